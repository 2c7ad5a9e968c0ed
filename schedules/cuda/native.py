"""What tensor cores have an instruction for, as features of a profile."""

from __future__ import annotations

B1_AND, B1_XOR = "b1_and", "b1_xor"
"""Products of bits."""

_EVERYWHERE = ("s8", "f16")
_MORE = {75: (B1_XOR, "s4"), 89: (B1_AND, B1_XOR, "s4", "e4m3"), 90: (B1_AND,), 120: ("e4m3",)}
_MORE |= dict.fromkeys((80, 86, 87), (B1_AND, B1_XOR, "s4"))


def native(sm: int) -> tuple[str, ...]:
    """Features of a compute capability: types of operands of ``mma.sync``.

    By what it becomes in machine code (nvdisasm of images by CUDA 13.0). Of 9.0 xor of bits is two
    products and s4 two of s8, with 90 instructions that spread its codes; from 10.0 on products of
    bits are eight of s8. Float8 is two products of float16 on 9.0 to 11.0.
    """
    return (*_EVERYWHERE, *_MORE.get(sm, ()))
