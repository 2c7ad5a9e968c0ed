"""Codes chosen with error feedback, and scales and codes that take turns after it."""
