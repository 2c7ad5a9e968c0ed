"""Dot products of spans of looked up weights on Arm: codebooks, one table, super-blocks."""
