"""Bit-serial linear layers on x86: their kernel records."""

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


def bitserial_x86(
    instruction: Popcount, bits: int, m_tile: int, forced: bool = False
) -> LinearKernel:
    """The record of one kernel, for every layer it can compute if `forced`: to measure it."""

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
    return bitserial_kernel(instruction, bits, m_tile, aheads, check, forced)


BITSERIAL_KERNELS: tuple[LinearKernel, ...] = tuple(
    bitserial_x86(instruction, bits, m_tile)
    for instruction in INSTRUCTIONS
    for bits in range(1, 9)
    for m_tile in M_TILES
)
"""In order of preference, before the integer dot products: they decline where those are faster."""
