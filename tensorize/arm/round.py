"""Rounding of activations to int8, their sums and largest magnitudes with 16-byte Arm vectors.

Sources: Arm Architecture Reference Manual (DDI 0487), SDOT, SADDLP, SADALP, SMAXP, SMAXV, ADDP,
ADDV; LLVM's IntrinsicsAArch64.td. Rounding adds 1.5 * 2^23: the sum's unit is 1, so its low bits
are the nearest integer, ties to even, in two's complement. That takes one operation where
``frinti``, two bounds and ``fcvtzs`` take four (``fcvtns`` alone: two, at half the rate on N1).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from apq_tvm.tensorize.exprs import neon
from apq_tvm.tensorize.registry import register

Expr = Any  # tvm is untyped
Buffer = Any

CODES = 16
"""Codes of one vector."""

_MAGIC = 12582912.0  # 1.5 * 2^23


def tree(combine: Callable[[Expr, Expr], Expr], terms: list[Expr]) -> Expr:
    """Neighbours combined, then neighbours of those, as pairwise instructions do."""
    while len(terms) > 1:
        terms = [combine(a, c) for a, c in zip(terms[::2], terms[1::2], strict=True)]
    return terms[0]


def round_value(x: Expr, inverse: Expr, bits: int) -> Expr:
    """int8 expression of the code of one activation: the meaning of `round_intrinsic`.

    Parameters
    ----------
    x, inverse : PrimExpr
        float32; ``|x * inverse| < 2^22`` or NaN.
    bits : int
        2..8: codes lie in [-(2^(bits-1) - 1), 2^(bits-1) - 1].
    """
    from tvm import tirx

    pattern = tirx.reinterpret("int32", x * inverse + tirx.const(_MAGIC, "float32"))
    return _bounded(pattern.astype("int8"), bits, lambda v: tirx.const(v, "int8"))


def _bounded(code: Expr, bits: int, constant: Callable[[int], Expr]) -> Expr:
    """Of numbers only a NaN's low bits are out of range."""
    from tvm import tirx

    most = (1 << (bits - 1)) - 1
    code = tirx.max(code, constant(-most))
    return code if bits == 8 else tirx.min(code, constant(most))


def round_intrinsic(bits: int) -> str:
    """Register (once) and name ``q[e] = round_value(x[e], inverse[0])``, 16 codes."""
    from tvm import tirx

    def implement(x: Buffer, inverse: Buffer, q: Buffer) -> None:
        from tvm.tirx.script.builder import ir as b

        def all_(value: Any, dtype: str, lanes: int) -> Expr:
            return tirx.Broadcast(tirx.const(value, dtype), lanes)

        magic, factor = all_(_MAGIC, "float32", 4), tirx.Broadcast(inverse[0], 4)
        parts = [x.vload([4 * i], "float32x4") * factor + magic for i in range(4)]
        for dtype in ("int16", "int8"):  # the even elements of two vectors: uzp1
            parts = [_even(a, c, dtype) for a, c in zip(parts[::2], parts[1::2], strict=True)]
        code = _bounded(parts[0], bits, lambda v: all_(v, "int8", CODES))
        b.buffer_store(q, code, [tirx.Ramp(0, 1, CODES)])

    def plain(x: Buffer, inverse: Buffer, q: Buffer) -> None:
        from tvm.tirx.script.builder import ir as b

        with b.serial(0, CODES) as i, b.sblock("round"):
            e = b.axis.spatial(CODES, i)
            b.reads(x[e], inverse[0])
            b.writes(q[e])
            b.buffer_store(q, round_value(x[e], inverse[0], bits), [e])

    shapes = (("x", (CODES,), "float32"), ("inverse", (1,), "float32"), ("q", (CODES,), "int8"))
    return register(
        f"apq_round{bits}_1x1x{CODES}_f32s8",
        lambda: (_member(shapes, plain), _member(shapes, implement)),
    )


def sum_intrinsic(dotprod: bool) -> str:
    """Register (once) and name ``s[l] += q[4l] + .. + q[4l + 3]``, 16 codes.

    Parameters
    ----------
    dotprod : bool
        By ``sdot`` with ones, else by ``saddlp`` and ``sadalp``.
    """
    from tvm import tirx

    def implement(q: Buffer, s: Buffer) -> None:
        from tvm.tirx.script.builder import ir as b

        codes, sums = q.vload([0], "int8x16"), s.vload([0], "int32x4")
        if dotprod:
            ones = tirx.Broadcast(tirx.const(1, "int8"), CODES)
            value = neon("int32x4", "sdot.v4i32.v16i8", sums, codes, ones)
        else:
            pairs = neon("int16x8", "saddlp.v8i16.v16i8", codes)
            value = sums + neon("int32x4", "saddlp.v4i32.v8i16", pairs)
        b.buffer_store(s, value, [tirx.Ramp(0, 1, 4)])

    def plain(q: Buffer, s: Buffer) -> None:
        from tvm.tirx.script.builder import ir as b

        with b.grid(4, 4) as (l0, e0), b.sblock("sum"):
            lane, e = b.axis.remap("SR", [l0, e0])
            b.reads(s[lane], q[lane * 4 + e])
            b.writes(s[lane])
            b.buffer_store(s, s[lane] + q[lane * 4 + e].astype("int32"), [lane])

    shapes = (("q", (CODES,), "int8"), ("s", (4,), "int32"))
    name = "sdot" if dotprod else "sadalp"
    return register(
        f"apq_{name}_1x1x{CODES}_s8s32",
        lambda: (_member(shapes, plain), _member(shapes, implement)),
    )


def tree_intrinsic(operation: str) -> str:
    """Register (once) and name ``y[g] = tree of x[g, :]``, int32, four vectors to one.

    Parameters
    ----------
    operation : {"max", "add"}
    """
    from tvm import tirx

    combine = tirx.max if operation == "max" else lambda a, c: a + c

    def implement(x: Buffer, y: Buffer) -> None:
        from tvm.tirx.script.builder import ir as b

        name = "smaxp.v4i32" if operation == "max" else "addp.v4i32"
        vectors = [x.vload([g, 0], "int32x4") for g in range(4)]
        value = tree(lambda a, c: neon("int32x4", name, a, c), vectors)
        b.buffer_store(y, value, [tirx.Ramp(0, 1, 4)])

    def plain(x: Buffer, y: Buffer) -> None:
        from tvm.tirx.script.builder import ir as b

        with b.serial(0, 4) as g0, b.sblock("tree"):
            g = b.axis.spatial(4, g0)
            b.reads(x[g, 0:4])
            b.writes(y[g])
            b.buffer_store(y, tree(combine, [x[g, e] for e in range(4)]), [g])

    shapes = (("x", (4, 4), "int32"), ("y", (4,), "int32"))
    return register(
        f"apq_{operation}p_4x1x4_s32s32",
        lambda: (_member(shapes, plain), _member(shapes, implement)),
    )


def _even(a: Expr, c: Expr, dtype: str) -> Expr:
    """Elements 0, 2, 4, .. of two vectors read as `dtype`."""
    from tvm import tirx

    lanes = 8 if dtype == "int16" else 16
    halves = [tirx.reinterpret(f"{dtype}x{lanes}", v) for v in (a, c)]
    return tirx.Shuffle(halves, [tirx.const(i, "int32") for i in range(0, 2 * lanes, 2)])


def _at(rows: int, row: int) -> list[int]:
    return [row, 0] if rows > 1 else [0]


def _member(shapes: tuple[tuple[str, tuple[int, ...], str], ...], body: Callable[..., None]) -> Any:
    """PrimFunc over buffers, the last of which is written, whose block holds `body`."""
    from tvm.script.ir_builder import IRBuilder
    from tvm.tirx.script.builder import ir as b

    with IRBuilder() as builder, b.prim_func(s_tir=True):
        b.func_name("member")
        buffers = [
            b.match_buffer(b.arg(name, b.handle()), shape, dtype, align=4, offset_factor=1)
            for name, shape, dtype in shapes
        ]
        with b.sblock("root"):
            updated = [] if shapes[-1][0] in ("q", "y") else [buffers[-1]]
            whole = [
                buf[tuple(slice(0, e) for e in buf.shape)] for buf in (*updated, *buffers[:-1])
            ]
            b.reads(*whole)
            b.writes(buffers[-1][tuple(slice(0, e) for e in buffers[-1].shape)])
            body(*buffers)
    return builder.get()
