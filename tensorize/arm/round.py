"""Rounding of activations to int8, their sums and largest magnitudes with 16-byte Arm vectors.

Sources: Arm Architecture Reference Manual (DDI 0487), SDOT, SADDLP, SADALP, SMAXP, SMAXV, ADDP,
ADDV; LLVM's IntrinsicsAArch64.td. `apq_tvm.tensorize.meaning.rounding` takes one operation where
``frinti``, two bounds and ``fcvtzs`` take four (``fcvtns`` alone: two, at half the rate on N1).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.tirx.script.builder import ir as b

from apq_tvm.tensorize.exprs import MAGIC, Buffer, Expr, member, neon
from apq_tvm.tensorize.meaning.rounding import (
    CODES,
    bounded,
    round_loops,
    sum_loops,
    tree,
    tree_loops,
)
from apq_tvm.tensorize.registry import register


def round_intrinsic(bits: int) -> str:
    """Register (once) and name ``q[e] = round_value(x[e], inverse[0])``, 16 codes."""

    def implement(x: Buffer, inverse: Buffer, q: Buffer) -> None:
        def all_(value: Any, dtype: str, lanes: int) -> Expr:
            return tirx.Broadcast(tirx.const(value, dtype), lanes)

        magic, factor = all_(MAGIC, "float32", 4), tirx.Broadcast(inverse[0], 4)
        parts = [x.vload([4 * i], "float32x4") * factor + magic for i in range(4)]
        for dtype in ("int16", "int8"):  # the even elements of two vectors: uzp1
            parts = [_even(a, c, dtype) for a, c in zip(parts[::2], parts[1::2], strict=True)]
        code = bounded(parts[0], bits, lambda v: all_(v, "int8", CODES))
        b.buffer_store(q, code, [tirx.Ramp(0, 1, CODES)])

    def plain(x: Buffer, inverse: Buffer, q: Buffer) -> None:
        round_loops("round", lambda e: x[e], inverse[0], lambda e: q[e], bits)

    shapes = (("x", (CODES,), "float32"), ("inverse", (1,), "float32"), ("q", (CODES,), "int8"))
    return _register(f"apq_round{bits}_1x1x{CODES}_f32s8", shapes, plain, implement)


def sum_intrinsic(dotprod: bool) -> str:
    """Register (once) and name ``s[l] += q[4l] + .. + q[4l + 3]``, 16 codes.

    Parameters
    ----------
    dotprod : bool
        By ``sdot`` with ones, else by ``saddlp`` and ``sadalp``.
    """

    def implement(q: Buffer, s: Buffer) -> None:
        codes, sums = q.vload([0], "int8x16"), s.vload([0], "int32x4")
        if dotprod:
            ones = tirx.Broadcast(tirx.const(1, "int8"), CODES)
            value = neon("int32x4", "sdot.v4i32.v16i8", sums, codes, ones)
        else:
            pairs = neon("int16x8", "saddlp.v8i16.v16i8", codes)
            value = sums + neon("int32x4", "saddlp.v4i32.v8i16", pairs)
        b.buffer_store(s, value, [tirx.Ramp(0, 1, 4)])

    def plain(q: Buffer, s: Buffer) -> None:
        sum_loops("sum", lambda lane, e: q[lane * 4 + e], lambda lane: s[lane])

    shapes = (("q", (CODES,), "int8"), ("s", (4,), "int32"))
    name = f"apq_{'sdot' if dotprod else 'sadalp'}_1x1x{CODES}_s8s32"
    return _register(name, shapes, plain, implement, updated=True)


def tree_intrinsic(operation: str) -> str:
    """Register (once) and name ``y[g] = tree of x[g, :]``, int32, four vectors to one.

    Parameters
    ----------
    operation : {"max", "add"}
    """

    def implement(x: Buffer, y: Buffer) -> None:
        name = "smaxp.v4i32" if operation == "max" else "addp.v4i32"
        vectors = [x.vload([g, 0], "int32x4") for g in range(4)]
        value = tree(lambda a, c: neon("int32x4", name, a, c), vectors)
        b.buffer_store(y, value, [tirx.Ramp(0, 1, 4)])

    def plain(x: Buffer, y: Buffer) -> None:
        tree_loops("tree", operation, x, lambda g: y[g])

    shapes = (("x", (4, 4), "int32"), ("y", (4,), "int32"))
    return _register(f"apq_{operation}p_4x1x4_s32s32", shapes, plain, implement)


def _even(a: Expr, c: Expr, dtype: str) -> Expr:
    """Elements 0, 2, 4, .. of two vectors read as `dtype`."""
    lanes = 8 if dtype == "int16" else 16
    halves = [tirx.reinterpret(f"{dtype}x{lanes}", v) for v in (a, c)]
    return tirx.Shuffle(halves, [tirx.const(i, "int32") for i in range(0, 2 * lanes, 2)])


def _register(
    name: str,
    shapes: tuple[tuple[str, tuple[int, ...], str], ...],
    plain: Callable[..., None],
    implement: Callable[..., None],
    updated: bool = False,
) -> str:
    operands = [(*declared, 4) for declared in shapes]
    return register(
        name, lambda: (member(operands, plain, updated), member(operands, implement, updated))
    )
