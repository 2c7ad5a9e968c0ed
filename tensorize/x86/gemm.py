"""Micro-kernels of large-M GEMM on x86: a tile of rows x columns accumulated over one step of k.

Each intrinsic is a pair. Its *desc* is `apq_tvm.tensorize.meaning.tile`. Its *impl* uses the
instruction; its loops are unrolled, so that the accumulators (a stack buffer under 1 KB with
constant indices) live in registers. How many ``vpmaddubsw`` results int16 can sum is proved in
`apq_tvm.tensorize.x86.dot`.

Instructions: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2 (VPDPBUSD,
VPMADDUBSW, VPMADDWD, VPSIGNB, VFMADD231PS, VCVTDQ2PS); LLVM names from its IntrinsicsX86.td.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script.builder import ir as b

from apq_tvm.tensorize.exprs import llvm, whole
from apq_tvm.tensorize.meaning.tile import Tile as Tile
from apq_tvm.tensorize.meaning.tile import add_code, add_product, dequantize
from apq_tvm.tensorize.registry import register
from apq_tvm.tensorize.x86.dot import MADDUBS, MADDUBS_SUMS, DotInstruction

PrimFunc = Any  # tvm is untyped
Expr = Any
Buffer = Any


def splits_codes(instruction: DotInstruction, bits: int) -> bool:
    """Whether the micro-kernel wants codes as two planes of nibbles, low then high.

    ``vpmaddubsw`` saturates at 8 bits: 2 * 255 * 127 > 32767. Of two nibbles each sums 8 times in
    int16 like 4-bit codes (8 * 2 * 15 * 127 = 30480), and ``vpmaddwd`` with 16 instead of 1 weighs
    the high one for nothing. That is 2 multiplications for 32 products where sign and absolute
    value take ``vpsignb``, ``vpmaddubsw`` and ``vpmaddwd``.
    """
    return instruction is MADDUBS and bits == 8


def integer_gemm_intrinsic(instruction: DotInstruction, tile: Tile, bits: int) -> str:
    """Register (once) and name the micro-kernel for int8 activations and decoded codes.

    Parameters
    ----------
    instruction : DotInstruction
        ``tile.lanes`` must be its rows.
    tile : Tile
    bits : int
        Largest code is 2^bits - 1; 1-bit codes may be doubled to 2. See `splits_codes`.

    Returns
    -------
    str
        ``apq_<instr>_<m>x<n>x<k>_s8u8s32``; vpmaddubsw adds ``_x<sums>`` or ``_halves``.
    """
    name = f"apq_{instruction.name}_{tile}_s8u8s32"
    if instruction is not MADDUBS:
        return register(name, lambda: _pair(tile, "uint8", _dp_body))
    if bits == 8:
        return register(f"{name}_halves", lambda: _pair(tile, "uint8", _halves_body, True))
    sums = min(MADDUBS_SUMS[2 if bits == 1 else bits], tile.k // 4)
    body = partial(_maddubs_body, sums=sums)
    return register(f"{name}_x{sums}", lambda: _pair(tile, "uint8", body))


def float_gemm_intrinsic(tile: Tile) -> str:
    """Register (once) and name the micro-kernel ``apq_fma{bits}_<m>x<n>x<k>_f32f32f32``."""
    name = f"apq_fma{32 * tile.lanes}_{tile}_f32f32f32"  # 80 columns are 5 zmm or 10 ymm
    return register(name, lambda: _pair(tile, "float32", _float_body))


def dequantize_intrinsic(lanes: int) -> str:
    """Register (once) and name the conversion of one decoded unit to float32 columns.

    ``F[4k + i, r] = (U[k, r, i] - zero[r]) * scale[r]`` for a quad of 4 k: U is uint8 [1, R, 4],
    F float32 [4, R].
    """
    return register(
        f"apq_cvtdq2ps_{lanes}x4_u8f32",
        lambda: (_dequantize(lanes, _dequantize_loops), _dequantize(lanes, _dequantize_body)),
    )


def _axes(kinds: str, extents: tuple[int, ...], loops: Any) -> list[Expr]:
    """Block axes; an axis of extent 1 is the constant 0, as TVM simplifies it in the match."""
    axes = []
    for kind, extent, loop in zip(kinds, extents, loops, strict=True):
        if extent == 1:
            axes.append(tirx.const(0, "int32"))
        else:
            axes.append((b.axis.spatial if kind == "S" else b.axis.reduce)(extent, loop))
    return axes


def _ramp(start: Expr, lanes: int) -> Expr:
    return tirx.Ramp(start, 1, lanes)


def _operand(name: str, shape: tuple[int, ...], dtype: str, strided: bool) -> Buffer:
    """A buffer argument; a strided one leaves all strides but the last contiguous ones open."""
    handle = b.arg(name, b.handle())
    strides: list[Any] | None = None
    if strided:
        inner = 2 if len(shape) > 3 else 1  # the integer B keeps [R, 4] contiguous
        strides = [tirx.Var(f"{name}{d}", "int64") for d in range(len(shape) - inner)]
        strides += [4, 1] if inner == 2 else [1]
    # Activations are the caller's and only element-aligned (int8 rows: whole quads).
    align = 4 if name == "a" else 64
    return b.match_buffer(handle, shape, dtype, strides=strides, align=align, offset_factor=1)


def _pair(tile: Tile, dtype: str, body: Any, halves: bool = False) -> tuple[PrimFunc, PrimFunc]:
    """(desc, impl) of a micro-kernel whose panel is uint8 or float32; `body` emits instructions."""

    def loops(tile: Tile, a: Buffer, w: Buffer, c: Buffer) -> None:
        kinds, extents = tile.axes(dtype == "uint8")
        with b.grid(*extents) as axes, b.sblock("dot"):
            m, j, r, k, *i = _axes(kinds, extents, axes)
            if i:
                code = lambda *plane: w[(j, k, *plane, r, *i)]  # noqa: E731
                add_code(c, (m, j, r), a[m, k * 4 + i[0]], code, halves)
            else:
                add_product(c, (m, j, r), a[m, k], w[j, k, r])

    return _member(tile, dtype, loops, False, halves), _member(tile, dtype, body, True, halves)


def _member(
    tile: Tile, dtype: str, emit: Callable[..., None], strided: bool, halves: bool
) -> PrimFunc:
    integers = dtype == "uint8"
    planes = (2,) if halves else ()
    inner = (tile.k // 4, *planes, tile.lanes, 4) if integers else (tile.k, tile.lanes)
    with IRBuilder() as builder, b.prim_func(s_tir=True):
        b.func_name("gemm")
        a = _operand("a", (tile.m, tile.k), "int8" if integers else dtype, strided)
        w = _operand("b", (tile.vectors, *inner), dtype, strided)
        c = _operand("c", tile.sums, "int32" if integers else dtype, False)
        with b.sblock("root"):
            b.reads(whole(c), whole(a), whole(w))
            b.writes(whole(c))
            emit(tile, a, w, c)
    return builder.get()


def _broadcast_quad(a: Buffer, m: Expr, k: Expr, lanes: int, dtype: str) -> Expr:
    """Four activations of row m, repeated in every 32-bit lane."""
    quad = tirx.reinterpret("int32", a.vload([m, k * 4], "int8x4"))
    return tirx.reinterpret(f"{dtype}x{4 * lanes}", tirx.Broadcast(quad, lanes))


def _accumulate(c: Buffer, m: Expr, j: Expr, lanes: int, value: Any) -> None:
    b.buffer_store(c, value(c.vload([m, j, 0], f"int32x{lanes}")), [m, j, _ramp(0, lanes)])


def _dp_body(tile: Tile, a: Buffer, w: Buffer, c: Buffer) -> None:
    lanes = tile.lanes
    name = f"llvm.x86.avx512.vpdpbusd.{32 * lanes}"
    with b.unroll(tile.k // 4) as k, b.unroll(tile.m) as m, b.unroll(tile.vectors) as j:
        codes = w.vload([j, k, 0, 0], f"uint8x{4 * lanes}")
        quad = _broadcast_quad(a, m, k, lanes, "int8")
        _accumulate(c, m, j, lanes, lambda acc: llvm(f"int32x{lanes}", name, acc, codes, quad))


def _widen(pairs: Expr, factor: int = 1) -> Expr:
    """`factor` times the sums of neighbouring int16, as int32 (vpmaddwd); AVX2."""
    factors = tirx.Broadcast(tirx.const(factor, "int16"), 16)
    return llvm("int32x8", "llvm.x86.avx2.pmadd.wd", pairs, factors)


def _maddubs(codes: Expr, activations: Expr) -> Expr:
    return llvm("int16x16", "llvm.x86.avx2.pmadd.ub.sw", codes, activations)


def _maddubs_body(tile: Tile, a: Buffer, w: Buffer, c: Buffer, sums: int) -> None:
    # k is the outer loop: one weight vector and one broadcast are live at a time. It is a loop that
    # LLVM unrolls, late: unrolled here, LLVM would first reassociate the sums over k, then order
    # the products by accumulator and spill the weights.
    partials = b.alloc_buffer((tile.m, tile.vectors, 16), "int16", align=64)

    def add(k: Expr, first: bool) -> None:
        with b.unroll(tile.vectors) as j, b.unroll(tile.m) as m:
            codes = w.vload([j, k, 0, 0], "uint8x32")
            pairs = _maddubs(codes, _broadcast_quad(a, m, k, 8, "int8"))
            if not first:
                pairs = partials.vload([m, j, 0], "int16x16") + pairs
            b.buffer_store(partials, pairs, [m, j, _ramp(0, 16)])

    with b.serial(0, tile.k // 4 // sums) as chunk:
        add(chunk * sums, True)
        if sums > 1:
            with b.serial(1, sums) as step:
                add(chunk * sums + step, False)
        with b.unroll(tile.m) as m, b.unroll(tile.vectors) as j:
            total = _widen(partials.vload([m, j, 0], "int16x16"))
            _accumulate(c, m, j, 8, lambda acc: acc + total)


def _halves_body(tile: Tile, a: Buffer, w: Buffer, c: Buffer) -> None:
    sums = min(8, tile.k // 4)
    partials = b.alloc_buffer((tile.m, tile.vectors, 2, 16), "int16", align=64)

    def add(k: Expr, first: bool) -> None:
        with b.unroll(tile.vectors) as j, b.unroll(2) as h, b.unroll(tile.m) as m:
            codes = w.vload([j, k, h, 0, 0], "uint8x32")
            pairs = _maddubs(codes, _broadcast_quad(a, m, k, 8, "int8"))
            if not first:
                pairs = partials.vload([m, j, h, 0], "int16x16") + pairs
            b.buffer_store(partials, pairs, [m, j, h, _ramp(0, 16)])

    with b.serial(0, tile.k // 4 // sums) as chunk:
        add(chunk * sums, True)
        with b.serial(1, sums) as step:
            add(chunk * sums + step, False)
        with b.unroll(tile.m) as m, b.unroll(tile.vectors) as j:
            low = _widen(partials.vload([m, j, 0, 0], "int16x16"))
            high = _widen(partials.vload([m, j, 1, 0], "int16x16"), 16)
            _accumulate(c, m, j, 8, lambda acc: acc + low + high)


def _float_body(tile: Tile, a: Buffer, w: Buffer, c: Buffer) -> None:
    lanes, vector = tile.lanes, f"float32x{tile.lanes}"
    with b.unroll(tile.k) as k, b.unroll(tile.m) as m, b.unroll(tile.vectors) as j:
        # LLVM contracts the product and the sum to vfmadd231ps.
        product = tirx.Broadcast(a[m, k], lanes) * w.vload([j, k, 0], vector)
        b.buffer_store(c, c.vload([m, j, 0], vector) + product, [m, j, _ramp(0, lanes)])


def _dequantize(lanes: int, emit: Callable[..., None]) -> PrimFunc:
    with IRBuilder() as builder, b.prim_func(s_tir=True):
        b.func_name("dequantize")
        u = _operand("u", (lanes, 4), "uint8", False)
        zero = _operand("zero", (lanes,), "float32", False)
        scale = _operand("scale", (lanes,), "float32", False)
        out = _operand("f", (4, lanes), "float32", False)
        with b.sblock("root"):
            b.reads(whole(u), whole(zero), whole(scale))
            b.writes(whole(out))
            emit(lanes, u, zero, scale, out)
    return builder.get()


def _dequantize_loops(lanes: int, u: Buffer, zero: Buffer, scale: Buffer, out: Buffer) -> None:
    with b.grid(4, lanes) as loops, b.sblock("convert"):
        i, r = b.axis.remap("SS", loops)
        dequantize(out, (i, r), u[r, i], zero[r], scale[r])


def _dequantize_body(lanes: int, u: Buffer, zero: Buffer, scale: Buffer, out: Buffer) -> None:
    vector, words = f"float32x{lanes}", f"int32x{lanes}"
    word = tirx.reinterpret(words, u.vload([0, 0], f"uint8x{4 * lanes}"))
    for i in range(4):  # byte i of every 32-bit lane: no shuffles
        byte = tirx.bitwise_and(
            tirx.shift_right(word, tirx.Broadcast(tirx.const(8 * i, "int32"), lanes)),
            tirx.Broadcast(tirx.const(255, "int32"), lanes),
        )
        value = byte.astype(vector) - zero.vload([0], vector)
        b.buffer_store(out, value * scale.vload([0], vector), [i, _ramp(0, lanes)])
