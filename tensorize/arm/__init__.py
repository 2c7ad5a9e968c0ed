"""Intrinsics of 64-bit Arm: Neon, dot products, i8mm and table lookups of SVE."""
