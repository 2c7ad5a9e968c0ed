"""Bit-serial linear layers on x86: where they are faster, and their kernel records."""

from __future__ import annotations

from functools import partial

from apq_tvm.errors import NotApplicable
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.schedules.linear.bitserial import M_TILES, bitserial_kernel
from apq_tvm.schedules.linear.kernel import LinearKernel
from apq_tvm.tensorize.x86.bitserial import (
    INSTRUCTIONS,
    PopcountInstruction,
    bitserial_intrinsic,
)

FASTER_UP_TO: dict[tuple[str, int], dict[int, int]] = {
    ("vpopcntd", 1): {1: 4},
    ("vpopcntd", 2): {1: 4, 2: 4},
    ("vpopcntd", 4): {1: 4, 2: 2},
    ("pshufb", 1): {1: 3, 2: 1},
    ("pshufb", 2): {1: 2, 2: 1},
    ("pshufb", 4): {1: 2, 2: 1},
}
"""(instruction, row tile) -> {q: largest p that is faster than the integer dot product}.

Time of the integer dot product over ours, both with the quantization of activations; 4096x4096, one
scale per row, out of cache, one thread of a Zen 5, vpopcntd beside vpdpbusd on 512 bits and pshufb
beside vpmaddubsw (code for Zen 3):

    =====  ========  ====================  ====================
    q      M         vpopcntd, p = 1 .. 4  pshufb, p = 1 .. 4
    =====  ========  ====================  ====================
    1      1         1.3  1.2  1.2  1.2    2.6  2.7  1.3  1.0
    1      2         4.5  5.0  4.7  4.0    2.7  2.4  1.0  0.8
    1      8         4.8  3.6  2.0  1.5    2.5  2.2  0.8  0.6
    1      64        4.6  3.2  1.7  1.3    2.4  2.1  0.8  0.6
    2      1         0.8  1.0  0.2  0.3    1.0  0.9  0.5  0.4
    2      2         2.1  2.2  1.8  1.5    1.1  1.0  0.5  0.4
    2      8         1.6  1.6  0.9  0.6    1.2  1.1  0.4  0.2
    2      64        2.0  1.8  0.8  0.3    1.6  0.8  0.3  0.3
    =====  ========  ====================  ====================

W3 was measured on a busy machine only: M = 8, p = 1 gave 0.9 to 1.4 and 0.7, p = 2 less than 1.
"""


def check_faster(spec: LinearSpec, instruction: PopcountInstruction, m_tile: int) -> None:
    """Decline where the integer dot product of the same layout was measured to be faster.

    Raises
    ------
    NotApplicable
    """
    assert spec.scheme is not None
    q, p = spec.scheme.bits, spec.scheme.act_bits
    most = FASTER_UP_TO[instruction.name, m_tile].get(q, 0)
    if p > most:
        raise NotApplicable(
            f"integer dot is faster from q*p >= {q * (most + 1)} on at W{q}, measured with "
            f"{instruction.name}; this is {q}*{p}"
        )


def _aheads(instruction: PopcountInstruction, m_tile: int) -> tuple[int, ...]:
    # 512-bit vectors pass so fast that the hardware's own prefetches do better.
    wide = instruction.rows == 16 and m_tile == 1
    return (0, 4096, 2048, 8192) if wide else (4096, 0, 2048, 8192)


def _kernels(forced: bool) -> tuple[LinearKernel, ...]:
    return tuple(
        bitserial_kernel(
            instruction,
            bitserial_intrinsic,
            bits,
            m_tile,
            _aheads(instruction, m_tile),
            None if forced else partial(check_faster, instruction=instruction, m_tile=m_tile),
        )
        for instruction in INSTRUCTIONS
        for bits in range(1, 9)
        for m_tile in M_TILES
    )


BITSERIAL_KERNELS: tuple[LinearKernel, ...] = _kernels(False)
"""In order of preference, before the integer dot products: they decline where those are faster."""

FORCED_KERNELS: tuple[LinearKernel, ...] = _kernels(True)
"""The same by name, for every layer they can compute: to measure them, or because a user asks."""
