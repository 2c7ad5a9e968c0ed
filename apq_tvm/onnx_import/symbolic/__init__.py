"""Shapes and small integers that are known only as expressions of symbolic dimensions."""
