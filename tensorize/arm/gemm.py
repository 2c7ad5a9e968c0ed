"""Micro-kernels of large-M GEMM on Arm: smmla, sdot by lane, and smull where there is neither.

`apq_tvm.tensorize.meaning.centred` says what each means. Accumulators (a stack buffer under 1 KB
with constant indices) live in registers.

Without dot products, smlal sums products in int16 lanes: with |code| <= c a lane holds
``32767 // (127 c)`` of them, halved because addp adds two neighbours before sadalp widens.

Instructions: Arm Architecture Reference Manual, DDI 0487 (SMMLA: FEAT_I8MM, SDOT: FEAT_DotProd,
SMULL, SMLAL, ADDP, SADALP); LLVM names from its IntrinsicsAArch64.td.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from tvm import tirx
from tvm.tirx.script.builder import ir as b

from apq_tvm.tensorize.exprs import Buffer, Expr, neon
from apq_tvm.tensorize.meaning.centred import CentredTile, products
from apq_tvm.tensorize.meaning.scaffold import pair
from apq_tvm.tensorize.registry import register


@dataclass(frozen=True)
class GemmInstruction:
    """One way to multiply int8.

    Parameters
    ----------
    name : str
        As in kernel names.
    features : tuple of str
        Of which the device needs one; empty for none.
    pairs : bool
        Order of the sums (`apq_tvm.tensorize.meaning.centred`).
    """

    name: str
    features: tuple[str, ...]
    pairs: bool


SMMLA = GemmInstruction("smmla", ("i8mm",), True)
SDOT = GemmInstruction("sdot", ("dotprod",), False)
SMULL = GemmInstruction("smull", (), False)


def centred_intrinsic(instruction: GemmInstruction, tile: CentredTile, largest: int) -> str:
    """Register (once) and name the micro-kernel.

    Parameters
    ----------
    instruction : GemmInstruction
    tile : CentredTile
    largest : int
        Largest magnitude in the panel, 1..128.

    Returns
    -------
    str
        ``apq_<instr>_<m>x<n>x<k>_s8s8s32``; smull adds ``_x<sums>``.
    """
    name = f"apq_{instruction.name}_{tile}_s8s8s32"
    body: Callable[..., None] = _smmla_body if instruction is SMMLA else _sdot_body
    if instruction is SMULL:
        sums = max(s for s in (1, 2, 4, 8, 16, 32) if s * largest * 254 <= 32767)
        sums = min(sums, tile.k // 4)
        name, body = f"{name}_x{sums}", partial(_smull_body, sums=sums)
    return register(name, lambda: pair(products(tile), partial(body, tile)))


def _accumulate(c: Buffer, m: Expr, j: Expr, value: Any) -> None:
    b.buffer_store(c, value(c.vload([m, j, 0], "int32x4")), [m, j, tirx.Ramp(0, 1, 4)])


def _smmla_body(tile: CentredTile, a: Buffer, w: Buffer, c: Buffer) -> None:
    pairs, columns, _ = tile.sums
    with b.unroll(tile.k // 8) as k, b.unroll(pairs) as p, b.unroll(columns) as j:
        x, codes = a.vload([p, k, 0, 0], "int8x16"), w.vload([k, j, 0, 0], "int8x16")
        _accumulate(c, p, j, lambda acc: neon("int32x4", "smmla.v4i32.v16i8", acc, x, codes))


def _sdot_body(tile: CentredTile, a: Buffer, w: Buffer, c: Buffer) -> None:
    with b.unroll(tile.k // 4) as q:
        x = a.vload([q, 0, 0], "int8x16")
        with b.unroll(tile.columns) as j:
            _dots_by_lane(tile, c, j, x, w.vload([q, j, 0, 0], "int8x16"))


def _dots_by_lane(tile: CentredTile, c: Buffer, j: Any, x: Expr, codes: Expr) -> None:
    words = tirx.reinterpret("int32x4", x)
    for m in range(tile.m):
        lanes = [tirx.const(m, "int32")] * 4
        quad = tirx.reinterpret("int8x16", tirx.Shuffle([words], lanes))

        def dot(acc: Expr, quad: Expr = quad) -> Expr:
            return neon("int32x4", "sdot.v4i32.v16i8", acc, codes, quad)

        _accumulate(c, m, j, dot)


def _half(vector: Expr, high: bool) -> Expr:
    start = 8 if high else 0
    return tirx.Shuffle([vector], [tirx.const(start + i, "int32") for i in range(8)])


def _smull_body(tile: CentredTile, a: Buffer, w: Buffer, c: Buffer, sums: int) -> None:
    partials = b.alloc_buffer((tile.m, tile.columns, 2, 8), "int16", align=16)

    def add(k: Expr, first: bool) -> None:
        with b.unroll(tile.m) as m:
            word = tirx.reinterpret("int32", a.vload([k, m, 0], "int8x4"))
            quad = tirx.reinterpret("int8x16", tirx.Broadcast(word, 4))
            with b.unroll(tile.columns) as j:
                codes = w.vload([k, j, 0, 0], "int8x16")
                for h in range(2):
                    products = neon(
                        "int16x8", "smull.v8i16", _half(codes, h == 1), _half(quad, h == 1)
                    )
                    if not first:
                        products = partials.vload([m, j, h, 0], "int16x8") + products
                    b.buffer_store(partials, products, [m, j, h, tirx.Ramp(0, 1, 8)])

    with b.serial(0, tile.k // 4 // sums) as chunk:
        add(chunk * sums, True)
        for step in range(1, sums):
            add(chunk * sums + step, False)
        with b.unroll(tile.m) as m, b.unroll(tile.columns) as j:
            both = [partials.vload([m, j, h, 0], "int16x8") for h in range(2)]
            total = neon("int16x8", "addp.v8i16", *both)
            wide = neon("int32x4", "saddlp.v4i32.v8i16", total)
            _accumulate(c, m, j, lambda acc: acc + wide)
