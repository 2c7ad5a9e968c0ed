"""Products of folded activations for cores that issue in order, as written assembly.

A Cortex-A55 completes instructions in order: an ``and`` (1 cycle) behind an sdot (4 cycles) waits
for it, a load from base and immediate (3 cycles) cannot be issued beside one, and a sum waits for
the sum before it. LLVM's scheduler does not know the first two: of the same product it makes 31 %
of the sdot peak. So the order is written down here, for four row blocks and all their chunks:

- four sums in turn, so that none waits for its own last addition;
- all masks of a part, then all its products;
- loads stand beside products, from base and register (4 cycles); a few of W4's codes are loaded in
  pairs, and pointers few and indexed by the count of chunks, for fewer instructions in all.

Sources: Arm Cortex-A55 Software Optimization Guide, EPM128372; LLVM's AArch64SchedA55.td. The
function comes into the module as LLVM IR (TVM's ``pragma_import_llvm``) around inline assembly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script.builder import ir as b

from apq_tvm.tensorize.arm.written.in_order_asm import STREAMS, function
from apq_tvm.tensorize.exprs import i64, operand, whole
from apq_tvm.tensorize.meaning.fold import Fold
from apq_tvm.tensorize.meaning.interleaved import UNIT_K, VECTORS
from apq_tvm.tensorize.pairs.folded_dot import STARTS, term
from apq_tvm.tensorize.registry import register

Expr = Any  # tvm is untyped
Buffer = Any


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

    def plain(*buffers: Buffer) -> None:
        _plain_loops(fold, chunks, units, *buffers)

    def call(*buffers: Buffer) -> None:
        pointers = [
            tirx.address_of(buffer[tuple([i64(0)] * len(buffer.shape))]) for buffer in buffers
        ]
        module = function(fold, chunks, name, units)
        with b.attr(tirx.const(0, "int32"), "pragma_import_llvm", module):
            b.evaluate(tirx.call_extern("void", name, *pointers))

    return register(
        name, lambda: (_member(fold, chunks, units, plain), _member(fold, chunks, units, call))
    )


def _member(fold: Fold, chunks: int, units: int, body: Callable[..., None]) -> Any:
    """PrimFunc (codes, x, starts, factors, scales, sums) whose block holds `body`."""
    rows = fold.unit.rows
    with IRBuilder() as builder:
        with b.prim_func(s_tir=True):
            b.func_name("in_order")
            buffers = (
                operand("codes", (STREAMS, chunks * units, fold.unit.nbytes), "uint8", 16, None),
                operand("x", (UNIT_K * chunks * units,), "int8", 4, None),
                operand("starts", (chunks, STREAMS, STARTS), "float32", 4, None),
                operand("factors", (chunks, fold.factors), "float32", 4, None),
                operand("scales", (STREAMS, chunks, rows), "float16", 8, None),
                operand("acc", (STREAMS, rows), "float32", 16, None),
            )
            with b.sblock("root"):
                b.reads(*(whole(buffer) for buffer in (buffers[-1], *buffers[:-1])))
                b.writes(whole(buffers[-1]))
                body(*buffers)
    return builder.get()


def _plain_loops(
    fold: Fold,
    chunks: int,
    units: int,
    codes: Buffer,
    x: Buffer,
    starts: Buffer,
    factors: Buffer,
    scales: Buffer,
    acc: Buffer,
) -> None:
    lead = (units,) if units > 1 else ()
    extents = (STREAMS, fold.unit.rows, chunks, *lead, VECTORS, 4)
    with b.grid(*map(i64, extents)) as loops, b.sblock("dot"):
        s, r, chunk, *inner, j, c = b.axis.remap("SSRRR" + "R" * len(lead), loops)
        first = chunk * i64(UNIT_K * units)
        unit = chunk * i64(units) + inner[0] if inner else chunk
        inside = slice(chunk * i64(units), chunk * i64(units) + i64(units)) if inner else chunk
        k0 = first + inner[0] * i64(UNIT_K) if inner else first
        b.reads(
            acc[s, r],
            codes[s, inside, 0 : fold.unit.nbytes],
            x[first : first + i64(UNIT_K * units)],
            starts[chunk, s, 0:STARTS],
            factors[chunk, 0 : fold.factors],
            scales[s, chunk, r],
        )
        b.writes(acc[s, r])
        value = term(
            fold,
            lambda byte: codes[s, unit, byte],
            lambda k: x[k0 + k],
            lambda i: factors[chunk, i],
            scales[s, chunk, r],
            None,
            (r, j, c),
        )
        b.buffer_store(acc, acc[s, r] + value, [s, r])
