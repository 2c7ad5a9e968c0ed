"""Many tensors one behind the other, each copied by loops of its own."""

from __future__ import annotations

from collections.abc import Sequence

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script.builder import ir as b

from apq_tvm.ops.blocks import argument, loops
from apq_tvm.ops.graph.shapes import Dim, Symbols
from apq_tvm.tensorize.exprs import PrimFunc, i64


def concatenate(shapes: Sequence[Sequence[Dim]], axis: int, dtype: str) -> PrimFunc:
    """Build ``(x0, x1, .., [begin1, begin2, ..], y)``.

    Parameters
    ----------
    shapes : sequence of sequence of int or str
        Of the tensors, alike but for `axis`; strings are dynamic dimensions.
    axis : int
        From 0 on.
    dtype : str
        Of all.

    Returns
    -------
    tvm.tirx.PrimFunc
        Where the tensors begin are int64 arguments, unless all of them are numbers: their sums
        would be as long as there are tensors. Attr ``apq.op`` = "concatenate".
    """
    symbols = Symbols()
    extents = [symbols.shape(shape) for shape in shapes]
    sizes = [shape[axis] for shape in shapes]
    known = [size for size in sizes if isinstance(size, int)]
    numbers = len(known) == len(sizes)
    begins = [i64(sum(known[:i])) for i in range(len(known))] if numbers else [i64(0)]
    with IRBuilder() as builder, b.prim_func(s_tir=True):
        b.func_name("concatenate")
        b.func_attr({"apq.op": "concatenate", "op_pattern": 8, "tirx.noalias": True})
        parts = [argument(f"x{i}", shape, dtype) for i, shape in enumerate(extents)]
        if not numbers:
            names = [f"begin{i}" for i in range(1, len(parts))]
            begins += [b.arg(name, tirx.Var(name, "int64")) for name in names]
        whole = list(extents[0])
        whole[axis] = i64(sum(known)) if numbers else symbols.dim("whole")
        y = argument("y", whole, dtype)
        with b.sblock("root"):
            b.reads()
            b.writes()
            for i, (part, shape, begin) in enumerate(zip(parts, extents, begins, strict=True)):
                with loops(shape) as at, b.sblock(f"part{i}"):
                    place = [b.axis.spatial(n, j) for n, j in zip(shape, at, strict=True)]
                    to = [*place[:axis], place[axis] + begin, *place[axis + 1 :]]
                    b.reads(part[tuple(place)])
                    b.writes(y[tuple(to)])
                    b.buffer_store(y, part[tuple(place)], to)
    return builder.get()
