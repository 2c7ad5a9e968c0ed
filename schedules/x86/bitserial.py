"""Bit-serial linear layers on x86: their kernel records.

Where they are chosen (``tuning_logs/znver5/thresholds.json``), by the time of the integer dot
product over ours, both with the quantization of activations; 4096x4096, one scale per row, out of
cache, one thread of a Zen 5, vpopcntd beside vpdpbusd on 512 bits and pshufb beside vpmaddubsw
(code for Zen 3):

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

from __future__ import annotations

from apq_tvm.errors import NotApplicable
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.schedules.linear.bitserial import bitserial_kernel
from apq_tvm.schedules.linear.kernel import LinearKernel
from apq_tvm.schedules.linear.streams import M_TILES
from apq_tvm.tensorize.pairs.bitserial import Popcount
from apq_tvm.tensorize.x86.bitserial import INSTRUCTIONS
from apq_tvm.tensorize.x86.dot import INSTRUCTIONS as DOT_INSTRUCTIONS
from apq_tvm.types import DeviceProfile


def bitserial_x86(instruction: Popcount, bits: int, m_tile: int) -> LinearKernel:
    """The record of one kernel."""

    def check(spec: LinearSpec, profile: DeviceProfile) -> None:
        # All kernels of a layer read one layout: that of the device's integer dot product.
        for dot in DOT_INSTRUCTIONS:
            if profile.features & set(dot.features) and profile.vector_bytes >= 4 * dot.rows:
                if dot.rows == instruction.rows:
                    return
                raise NotApplicable(
                    f"counts in {instruction.rows} rows; {dot.name} wants the weights in {dot.rows}"
                )

    # 512-bit vectors pass so fast that the hardware's own prefetches do better.
    wide = instruction.rows == 16 and m_tile == 1
    aheads = (0, 4096, 2048, 8192) if wide else (4096, 0, 2048, 8192)
    return bitserial_kernel(instruction, bits, m_tile, aheads, check)


BITSERIAL_KERNELS: tuple[LinearKernel, ...] = tuple(
    bitserial_x86(instruction, bits, m_tile)
    for instruction in INSTRUCTIONS
    for bits in range(1, 9)
    for m_tile in M_TILES
)
"""In order of preference, before the integer dot products, which get what is left."""
