"""Intrinsics of x86-64: AVX2, AVX-512, VNNI."""
