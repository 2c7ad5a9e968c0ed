"""Products of folded activations for cores that issue in order, as written assembly.

A Cortex-A55 completes instructions in order: an ``and`` (1 cycle) behind an sdot (4 cycles) waits
for it, a load from base and immediate (3 cycles) cannot be issued beside one, and a sum waits for
the sum before it. LLVM's scheduler does not know the first two: of the same product it makes 31 %
of the sdot peak. So the order is written down here, for four row blocks and all their chunks:

- four sums in turn, so that none waits for its own last addition;
- all masks of a part, then all its products;
- loads stand beside products, from base and register (4 cycles); a few of W4's codes are loaded in
  pairs, and pointers few and indexed by the count of chunks, for fewer instructions in all.

Sources: Arm Cortex-A55 Software Optimization Guide, EPM128372; LLVM's AArch64SchedA55.td.
"""

from __future__ import annotations

from apq_tvm.tensorize.arm.written.call import call_function
from apq_tvm.tensorize.arm.written.in_order_asm import STREAMS, function
from apq_tvm.tensorize.meaning.fold import Fold
from apq_tvm.tensorize.meaning.interleaved import UNIT_K
from apq_tvm.tensorize.pairs.folded_dot import FoldedDot, FoldedOperands, folded_pair
from apq_tvm.tensorize.registry import register


def in_order_intrinsic(fold: Fold, chunks: int, units: int = 1) -> str:
    """Register (once) and name the product of four row blocks with one row of x.

    Parameters
    ----------
    fold : Fold
        Of W4 or W2 codes without zero points.
    chunks : int
        Of a row.
    units : int
        Of a chunk: 1, with W4 also 2 or 4.
    """
    unit = fold.unit
    name = f"apq_sdot_in_order_1x{STREAMS * unit.rows}x{UNIT_K * chunks * units}_s8u{unit.bits}f32"
    name += f"_c{units}" if units > 1 else ""

    def call(o: FoldedOperands) -> None:
        buffers = (o.codes, o.x, o.starts, o.factors, o.scales, o.acc)
        call_function(name, function(fold, chunks, name, units), buffers)

    dot = FoldedDot(fold, 1, units, STREAMS, chunks)
    return register(name, lambda: folded_pair(dot, call))
