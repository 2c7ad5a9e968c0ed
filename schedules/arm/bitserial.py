"""Bit-serial linear layers on Arm: their kernel records.

Where they are chosen (``tuning_logs/graviton2/thresholds.json``), by cycles per weight of the inner
loops by llvm-mca 22, 4096x4096, M = 1, beside the integer dot products of
`apq_tvm.schedules.arm.gemv` (``sdot``: activations of 8 bits alone; ``smull``: of any bits, about
0.18 on N1 and 0.09 on V1 for every q):

=====  ==================================  ==================================
q      Neoverse N1, p = 1, 2, 4, and sdot  Neoverse V1, p = 1, 2, 4, and sdot
=====  ==================================  ==================================
1      0.022  0.028  0.068  0.096          0.010  0.013  0.034  0.048
2      0.047  0.060  0.152  0.071          0.024  0.030  0.073  0.035
=====  ==================================  ==================================

So for fewer than 8 bits popcounts win where q * p <= 8 (3 * 3 takes 0.175 on N1, 4 * 4 0.45). Four
rows of x and more have the integer GEMM of the same activations, which does 21 products a cycle on
N1 and 64 on V1: popcounts do 51 and 107 for W1A1, 33 and 75 for W1A2, 28 and 56 for W2A1.
Of ``cntuaddlp`` no figures were kept: it is chosen where ``cntudot`` is.
"""

from __future__ import annotations

from apq_tvm.schedules.linear.bitserial import bitserial_kernel
from apq_tvm.schedules.linear.kernel import LinearKernel
from apq_tvm.schedules.linear.streams import FOLLOWED_AHEADS, M_TILES
from apq_tvm.tensorize.arm.bitserial import INSTRUCTIONS

ARM_BITSERIAL_KERNELS: tuple[LinearKernel, ...] = tuple(
    bitserial_kernel(instruction, bits, m_tile, FOLLOWED_AHEADS)
    for instruction in INSTRUCTIONS
    for bits in range(1, 9)
    for m_tile in M_TILES
)
"""In order of preference, before the integer dot products, which get what is left."""
