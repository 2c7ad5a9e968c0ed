"""Kernels for binary codes on x86: tables of activation sums in registers (LUT-GEMM, T-MAC).

Figures below are of Zen 5, one thread, minima on a loaded machine.

Latency follows the bytes of (q, g), as in the paper's figure 9: 4096x4096, M = 1, out of cache,
microseconds by vpermb and by pshufb, and megabytes of codes, scales and offsets:

=====  ==================  ==================  ==================  ==================
q      g = 32              g = 64              g = 128             a whole row
=====  ==================  ==================  ==================  ==================
1      136, 154 (4.2 MB)   87, 91 (3.1 MB)     71, 67 (2.6 MB)     55, 59 (2.1 MB)
2      215, 244 (7.3 MB)   150, 148 (5.8 MB)   130, 128 (5.0 MB)   111, 112 (4.2 MB)
3      290, 292 (10.5 MB)  217, 223 (8.4 MB)   194, 192 (7.3 MB)   165, 178 (6.3 MB)
4      387, 430 (13.6 MB)  293, 300 (11.0 MB)  262, 300 (9.7 MB)   221, 258 (8.4 MB)
=====  ==================  ==================  ==================  ==================

Integer tables (A8) serve every M: 2048x2048, bcq2g128, M = 64 takes 0.6 ms by vpermb where decoding
to floats takes 3.4 ms; bcq8g128 3.0 ms and 15 ms. Float tables (A32) hold 16 or 8 sums a register,
and from M = 32 on decoding a panel once and multiplying is as fast or faster.

The paper's tables of 256 sums of eight activations (mu = 8) live in shared memory on GPUs. Here
they would live in caches: 4096x4096, q = 2, out of cache takes 1046 us by scalar loads of float
entries (two loads for eight weights and a plane, 512 KB of tables), 1651 us of int16 ones, 1682 us
by AVX2 gathers and 2088 us in blocks of K that keep tables in the L1 cache; sixteen sums of four in
registers take 135 us as bytes (AVX2 and AVX-512), 177 us as floats (AVX-512) and 457 us (AVX2).
"""

from __future__ import annotations

from apq_tvm.schedules.linear.kernel import LinearKernel
from apq_tvm.schedules.linear.lut import lut_kernels
from apq_tvm.tensorize.x86.lut import INSTRUCTIONS

LUT_KERNELS: tuple[LinearKernel, ...] = tuple(
    kernel for instruction in INSTRUCTIONS for kernel in lut_kernels(instruction)
)
"""In order of preference: where several fit, larger M tiles take over as M grows."""
