"""What tensor cores have an instruction for: as features of a profile."""

from __future__ import annotations

B1_AND, B1_XOR = "b1_and", "b1_xor"
"""Products of bits."""

_BITS = {75: (B1_XOR,), 90: (B1_AND,)} | dict.fromkeys((80, 86, 87, 89), (B1_AND, B1_XOR))


def native(sm: int) -> tuple[str, ...]:
    """Features of a compute capability.

    By what ``mma`` becomes in machine code (nvdisasm of images by CUDA 13.0). Of 9.0 xor is two
    products; from 10.0 on both are emulated by eight of int8.
    """
    return _BITS.get(sm, ())
