"""Operators that are no linear layers."""
