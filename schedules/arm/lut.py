"""Kernels for binary codes on Arm: activations rounded in tables that ``tbl`` looks up.

One schedule serves every core: a lookup needs nothing but AdvSIMD. No software prefetch by default:
weights are one or two streams, which hardware follows. Cycles per weight with the scaling,
4096x4096, g = 128, M = 1, llvm-mca 22 (W4A8g32 by sdot takes 0.08, 0.04 and 0.18):

=====  ===========  ===========  ==========
q      Neoverse N1  Neoverse V1  Cortex-A55
=====  ===========  ===========  ==========
1      0.046        0.024        0.095
2      0.078        0.049        0.178
3      0.115        0.073        0.268
4      0.151        0.095        0.349
=====  ===========  ===========  ==========
"""

from __future__ import annotations

from apq_tvm.schedules.linear.kernel import LinearKernel
from apq_tvm.schedules.linear.lut import lut_kernels
from apq_tvm.schedules.linear.streams import FOLLOWED_AHEADS
from apq_tvm.tensorize.arm.lut import TBL

ARM_LUT_KERNELS: tuple[LinearKernel, ...] = tuple(lut_kernels(TBL, FOLLOWED_AHEADS))
"""In order of preference: where several fit, larger M tiles take over as M grows."""
