"""Attention over packed keys, and packing them."""
