"""Candidates for GPUs: timed by a bundle elsewhere, and taken in again."""
