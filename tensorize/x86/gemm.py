"""Micro-kernels of large-M GEMM on x86: a tile of rows x columns accumulated over one step of k.

Each intrinsic is a pair. Its *desc*, plain loops shared by every instruction, is its meaning::

    C[m, j, r] += sum over k, i of A[m, 4k + i] * B[j, k, r, i]        (integers)
    C[m, j, r] += sum over k of A[m, k] * B[j, k, r]                   (floats)

j counts vectors of R columns. Its *impl* uses the instruction; its loops are unrolled, so that the
accumulators (a stack buffer under 1 KB with constant indices) live in registers. How many
``vpmaddubsw`` results int16 can sum is proved in `apq_tvm.tensorize.x86.dot`.

Instructions: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2 (VPDPBUSD,
VPMADDUBSW, VPMADDWD, VPSIGNB, VFMADD231PS, VCVTDQ2PS); LLVM names from its IntrinsicsX86.td.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script.builder import ir as b

from apq_tvm.tensorize.exprs import llvm
from apq_tvm.tensorize.registry import register
from apq_tvm.tensorize.x86.dot import MADDUBS, MADDUBS_SUMS, DotInstruction

PrimFunc = Any  # tvm is untyped
Expr = Any
Buffer = Any


@dataclass(frozen=True)
class Tile:
    """Shape of one micro-kernel call.

    Parameters
    ----------
    m : int
        Rows of activations.
    vectors : int
        Vectors of columns.
    lanes : int
        R, columns in a vector: 8 for 256-bit, 16 for 512-bit registers.
    k : int
        Products summed by one call; a multiple of 4 for integers.
    """

    m: int
    vectors: int
    lanes: int
    k: int

    def __str__(self) -> str:
        return f"{self.m}x{self.vectors * self.lanes}x{self.k}"


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
        return register(name, lambda: (_integer_pair(tile), _integer_pair(tile, _dp_body)))
    if bits == 8:
        return register(
            f"{name}_halves",
            lambda: (_integer_pair(tile, None, 2), _integer_pair(tile, _halves_body, 2)),
        )
    sums = min(MADDUBS_SUMS[2 if bits == 1 else bits], tile.k // 4)
    body = partial(_maddubs_body, sums=sums)
    return register(f"{name}_x{sums}", lambda: (_integer_pair(tile), _integer_pair(tile, body)))


def float_gemm_intrinsic(tile: Tile) -> str:
    """Register (once) and name the micro-kernel ``apq_fma{bits}_<m>x<n>x<k>_f32f32f32``."""
    name = f"apq_fma{32 * tile.lanes}_{tile}_f32f32f32"  # 80 columns are 5 zmm or 10 ymm
    return register(name, lambda: (_float_desc(tile), _float_impl(tile)))


def dequantize_intrinsic(lanes: int) -> str:
    """Register (once) and name the conversion of one decoded unit to float32 columns.

    ``F[4k + i, r] = (U[k, r, i] - zero[r]) * scale[r]`` for a quad of 4 k: U is uint8 [1, R, 4],
    F float32 [4, R].
    """
    return register(
        f"apq_cvtdq2ps_{lanes}x4_u8f32",
        lambda: (_dequantize(lanes, False), _dequantize(lanes, True)),
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


def _whole(buffer: Buffer, shape: tuple[int, ...]) -> Any:
    return buffer[tuple(slice(0, extent) for extent in shape)]


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


def _integer_pair(tile: Tile, body: Any = None, halves: int = 1) -> PrimFunc:
    """The desc (no body) or one impl of the integer micro-kernel."""
    quads = tile.k // 4
    a_shape, c_shape = (tile.m, tile.k), (tile.m, tile.vectors, tile.lanes)
    b_shape = (tile.vectors, quads, *((2,) if halves == 2 else ()), tile.lanes, 4)
    with IRBuilder() as builder, b.prim_func(s_tir=True):
        b.func_name("gemm")
        a = _operand("a", a_shape, "int8", body is not None)
        w = _operand("b", b_shape, "uint8", body is not None)
        c = _operand("c", c_shape, "int32", False)
        with b.sblock("root"):
            b.reads(_whole(c, c_shape), _whole(a, a_shape), _whole(w, b_shape))
            b.writes(_whole(c, c_shape))
            (body or partial(_integer_loops, halves=halves))(tile, a, w, c)
    return builder.get()


def _integer_loops(tile: Tile, a: Buffer, w: Buffer, c: Buffer, halves: int) -> None:
    extents = (tile.m, tile.vectors, tile.lanes, tile.k // 4, 4)
    with b.grid(*extents) as loops, b.sblock("dot"):
        m, j, r, k, i = _axes("SSSRR", extents, loops)
        codes = [w[j, k, h, r, i] for h in range(2)] if halves == 2 else [w[j, k, r, i]]
        read = w[j, k, 0:2, r, i] if halves == 2 else codes[0]
        b.reads(c[m, j, r], a[m, k * 4 + i], read)
        b.writes(c[m, j, r])
        code = codes[0].astype("int32")
        if halves == 2:
            code = code + codes[1].astype("int32") * tirx.const(16, "int32")
        b.buffer_store(c, c[m, j, r] + a[m, k * 4 + i].astype("int32") * code, [m, j, r])


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


def _float_desc(tile: Tile) -> PrimFunc:
    extents = (tile.m, tile.vectors, tile.lanes, tile.k)
    with IRBuilder() as builder, b.prim_func(s_tir=True):
        b.func_name("gemm")
        a, w, c = _float_operands(tile, False)
        with b.sblock("root"):
            _float_regions(tile, a, w, c)
            with b.grid(*extents) as loops, b.sblock("dot"):
                m, j, r, k = _axes("SSSR", extents, loops)
                b.reads(c[m, j, r], a[m, k], w[j, k, r])
                b.writes(c[m, j, r])
                b.buffer_store(c, c[m, j, r] + a[m, k] * w[j, k, r], [m, j, r])
    return builder.get()


def _float_operands(tile: Tile, strided: bool) -> tuple[Buffer, Buffer, Buffer]:
    return (
        _operand("a", (tile.m, tile.k), "float32", strided),
        _operand("b", (tile.vectors, tile.k, tile.lanes), "float32", strided),
        _operand("c", (tile.m, tile.vectors, tile.lanes), "float32", False),
    )


def _float_regions(tile: Tile, a: Buffer, w: Buffer, c: Buffer) -> None:
    c_shape = (tile.m, tile.vectors, tile.lanes)
    b.reads(
        _whole(c, c_shape),
        _whole(a, (tile.m, tile.k)),
        _whole(w, (tile.vectors, tile.k, tile.lanes)),
    )
    b.writes(_whole(c, c_shape))


def _float_impl(tile: Tile) -> PrimFunc:
    lanes = tile.lanes
    vector = f"float32x{lanes}"
    with IRBuilder() as builder, b.prim_func(s_tir=True):
        b.func_name("gemm")
        a, w, c = _float_operands(tile, True)
        with b.sblock("root"):
            _float_regions(tile, a, w, c)
            with b.unroll(tile.k) as k, b.unroll(tile.m) as m, b.unroll(tile.vectors) as j:
                # LLVM contracts the product and the sum to vfmadd231ps.
                product = tirx.Broadcast(a[m, k], lanes) * w.vload([j, k, 0], vector)
                b.buffer_store(c, c.vload([m, j, 0], vector) + product, [m, j, _ramp(0, lanes)])
    return builder.get()


def _dequantize(lanes: int, instruction: bool) -> PrimFunc:
    with IRBuilder() as builder, b.prim_func(s_tir=True):
        b.func_name("dequantize")
        u = _operand("u", (lanes, 4), "uint8", False)
        zero = _operand("zero", (lanes,), "float32", False)
        scale = _operand("scale", (lanes,), "float32", False)
        out = _operand("f", (4, lanes), "float32", False)
        with b.sblock("root"):
            b.reads(_whole(u, (lanes, 4)), zero[0:lanes], scale[0:lanes])
            b.writes(_whole(out, (4, lanes)))
            if instruction:
                _dequantize_body(lanes, u, zero, scale, out)
            else:
                with b.grid(4, lanes) as (i, r), b.sblock("convert"):
                    vi, vr = b.axis.remap("SS", [i, r])
                    value = (u[vr, vi].astype("float32") - zero[vr]) * scale[vr]
                    b.reads(u[vr, vi], zero[vr], scale[vr])
                    b.writes(out[vi, vr])
                    b.buffer_store(out, value, [vi, vr])
    return builder.get()


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
