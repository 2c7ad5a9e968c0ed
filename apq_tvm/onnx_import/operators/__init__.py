"""Operators that are written in others."""
