"""Intrinsics of 64-bit Arm as written assembly, in an order of our own."""
