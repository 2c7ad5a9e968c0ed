"""Weights that are integers in the file already, and products of integers."""
