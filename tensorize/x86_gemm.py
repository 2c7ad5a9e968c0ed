"""Micro-kernels of large-M GEMM on x86: a tile of rows x columns accumulated over one step of k.

Each intrinsic is a pair. Its *desc*, plain loops shared by every instruction, is its meaning::

    C[m, j, r] += sum over k, i of A[m, 4k + i] * B[j, k, r, i]        (integers)
    C[m, j, r] += sum over k of A[m, k] * B[j, k, r]                   (floats)

j counts vectors of R columns. Its *impl* uses the instruction; its loops are unrolled, so that the
accumulators (a stack buffer under 1 KB with constant indices) live in registers. How many
``vpmaddubsw`` results int16 can sum is proved in `apq_tvm.tensorize.x86_dot`.

Instructions: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2 (VPDPBUSD,
VPMADDUBSW, VPMADDWD, VPSIGNB, VFMADD231PS, VCVTDQ2PS); LLVM names from its IntrinsicsX86.td.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script.builder import ir as b

from apq_tvm.tensorize.registry import register
from apq_tvm.tensorize.x86_dot import MADDUBS_SUMS, DotInstruction

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


def integer_gemm_intrinsic(instruction: DotInstruction, tile: Tile, bits: int) -> str:
    """Register (once) and name the micro-kernel for int8 activations and decoded codes.

    Parameters
    ----------
    instruction : DotInstruction
        ``tile.lanes`` must be its rows.
    tile : Tile
    bits : int
        Largest code is 2^bits - 1; 1-bit codes may be doubled to 2. For 8 bits and an instruction
        with ``signed8``, B is int8 and holds ``code - 128``.

    Returns
    -------
    str
        ``apq_<instr>_<m>x<n>x<k>_s8u8s32`` or ``..._s8s8s32``; vpmaddubsw adds ``_x<sums>``.
    """
    signed = bits == 8 and instruction.signed8
    dtype = "int8" if signed else "uint8"
    name = f"apq_{instruction.name}_{tile}_s8{'s8' if signed else 'u8'}s32"
    if instruction.name != "maddubs":
        return register(
            name, lambda: (_integer_pair(tile, dtype), _integer_pair(tile, dtype, "dp"))
        )
    if signed:
        return register(
            name, lambda: (_integer_pair(tile, dtype), _integer_pair(tile, dtype, "sign"))
        )
    sums = min(MADDUBS_SUMS[2 if bits == 1 else bits], tile.k // 4)
    return register(
        f"{name}_x{sums}",
        lambda: (_integer_pair(tile, dtype), _integer_pair(tile, dtype, "maddubs", sums)),
    )


def float_gemm_intrinsic(tile: Tile) -> str:
    """Register (once) and name the float32 micro-kernel, ``apq_fma_<m>x<n>x<k>_f32f32f32``."""
    return register(f"apq_fma_{tile}_f32f32f32", lambda: (_float_desc(tile), _float_impl(tile)))


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
        inner = 2 if len(shape) == 4 else 1  # the integer B keeps [R, 4] contiguous
        strides = [tirx.Var(f"{name}{d}", "int64") for d in range(len(shape) - inner)]
        strides += [4, 1] if inner == 2 else [1]
    # Activations are the caller's and only element-aligned (int8 rows: whole quads).
    align = 4 if name == "a" else 64
    return b.match_buffer(handle, shape, dtype, strides=strides, align=align, offset_factor=1)


def _integer_pair(tile: Tile, dtype: str, instruction: str = "", sums: int = 0) -> PrimFunc:
    """The desc (no instruction) or one impl of the integer micro-kernel."""
    quads = tile.k // 4
    a_shape, c_shape = (tile.m, tile.k), (tile.m, tile.vectors, tile.lanes)
    b_shape = (tile.vectors, quads, tile.lanes, 4)
    with IRBuilder() as builder:
        with b.prim_func(s_tir=True):
            b.func_name("gemm")
            strided = bool(instruction)
            a = _operand("a", a_shape, "int8", strided)
            w = _operand("b", b_shape, dtype, strided)
            c = _operand("c", c_shape, "int32", False)
            with b.sblock("root"):
                b.reads(_whole(c, c_shape), _whole(a, a_shape), _whole(w, b_shape))
                b.writes(_whole(c, c_shape))
                if instruction == "dp":
                    _dp_body(tile, a, w, c)
                elif instruction == "sign":
                    _sign_body(tile, a, w, c)
                elif instruction == "maddubs":
                    _maddubs_body(tile, a, w, c, sums)
                else:
                    _integer_loops(tile, a, w, c)
    return builder.get()


def _integer_loops(tile: Tile, a: Buffer, w: Buffer, c: Buffer) -> None:
    extents = (tile.m, tile.vectors, tile.lanes, tile.k // 4, 4)
    with b.grid(*extents) as loops, b.sblock("dot"):
        m, j, r, k, i = _axes("SSSRR", extents, loops)
        b.reads(c[m, j, r], a[m, k * 4 + i], w[j, k, r, i])
        b.writes(c[m, j, r])
        product = a[m, k * 4 + i].astype("int32") * w[j, k, r, i].astype("int32")
        b.buffer_store(c, c[m, j, r] + product, [m, j, r])


def _broadcast_quad(a: Buffer, m: Expr, k: Expr, lanes: int, dtype: str) -> Expr:
    """Four activations of row m, repeated in every 32-bit lane."""
    quad = tirx.reinterpret("int32", a.vload([m, k * 4], "int8x4"))
    return tirx.reinterpret(f"{dtype}x{4 * lanes}", tirx.Broadcast(quad, lanes))


def _call(dtype: str, name: str, *operands: Expr) -> Expr:
    return tirx.call_llvm_pure_intrin(dtype, name, *operands)


def _accumulate(c: Buffer, m: Expr, j: Expr, lanes: int, value: Any) -> None:
    b.buffer_store(c, value(c.vload([m, j, 0], f"int32x{lanes}")), [m, j, _ramp(0, lanes)])


def _dp_body(tile: Tile, a: Buffer, w: Buffer, c: Buffer) -> None:
    lanes = tile.lanes
    name = f"llvm.x86.avx512.vpdpbusd.{32 * lanes}"
    with b.unroll(tile.k // 4) as k, b.unroll(tile.m) as m, b.unroll(tile.vectors) as j:
        codes = w.vload([j, k, 0, 0], f"uint8x{4 * lanes}")
        quad = _broadcast_quad(a, m, k, lanes, "int8")
        _accumulate(c, m, j, lanes, lambda acc: _call(f"int32x{lanes}", name, acc, codes, quad))


def _widen(pairs: Expr) -> Expr:
    """Sum neighbouring int16 into int32 (vpmaddwd with ones); AVX2."""
    ones = tirx.Broadcast(tirx.const(1, "int16"), 16)
    return _call("int32x8", "llvm.x86.avx2.pmadd.wd", pairs, ones)


def _maddubs(codes: Expr, activations: Expr) -> Expr:
    return _call("int16x16", "llvm.x86.avx2.pmadd.ub.sw", codes, activations)


def _maddubs_body(tile: Tile, a: Buffer, w: Buffer, c: Buffer, sums: int) -> None:
    # k is the outer loop: one weight vector and one broadcast are live at a time, and the int16
    # sums are the only accumulators, so nothing spills with 16 registers.
    partial = b.alloc_buffer((tile.m, tile.vectors, 16), "int16", align=64)
    with b.unroll(tile.k // 4 // sums) as chunk:
        for step in range(sums):
            with b.unroll(tile.m) as m, b.unroll(tile.vectors) as j:
                k = chunk * sums + step
                codes = w.vload([j, k, 0, 0], "uint8x32")
                pairs = _maddubs(codes, _broadcast_quad(a, m, k, 8, "int8"))
                if step:
                    pairs = partial.vload([m, j, 0], "int16x16") + pairs
                b.buffer_store(partial, pairs, [m, j, _ramp(0, 16)])
        with b.unroll(tile.m) as m, b.unroll(tile.vectors) as j:
            total = _widen(partial.vload([m, j, 0], "int16x16"))
            _accumulate(c, m, j, 8, lambda acc: acc + total)


def _sign_body(tile: Tile, a: Buffer, w: Buffer, c: Buffer) -> None:
    # |code - 128| <= 128 as unsigned and the activation with its sign: 2 * 128 * 127 fits int16.
    with b.unroll(tile.k // 4) as k, b.unroll(tile.m) as m, b.unroll(tile.vectors) as j:
        codes = w.vload([j, k, 0, 0], "int8x32")
        zero = tirx.Broadcast(tirx.const(0, "int8"), 32)
        size = tirx.reinterpret("uint8x32", tirx.Select(codes < zero, zero - codes, codes))
        quad = _broadcast_quad(a, m, k, 8, "int8")
        signed = _call("int8x32", "llvm.x86.avx2.psign.b", quad, codes)
        total = _widen(_maddubs(size, signed))
        _accumulate(c, m, j, 8, lambda acc: acc + total)


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
