"""Micro-kernels of large-M GEMM on x86: a tile of rows x columns accumulated over one step of k.

Each intrinsic is a pair. Its *desc* is `apq_tvm.tensorize.meaning.tile`. Its *impl* uses the
instruction; its loops are unrolled, so that the accumulators (a stack buffer under 1 KB with
constant indices) live in registers. How many ``vpmaddubsw`` results int16 can sum is proved in
`apq_tvm.tensorize.x86.dot`.

Instructions: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2 (VPDPBUSD,
VPMADDUBSW, VPMADDWD, VFMADD231PS, VCVTDQ2PS); LLVM names from its IntrinsicsX86.td.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from tvm import tirx
from tvm.tirx.script.builder import ir as b

from apq_tvm.tensorize.exprs import Buffer, Expr, llvm
from apq_tvm.tensorize.meaning.interleaved import VECTORS
from apq_tvm.tensorize.meaning.scaffold import pair
from apq_tvm.tensorize.meaning.tile import Tile as Tile
from apq_tvm.tensorize.meaning.tile import (
    byte_products,
    dequantization,
    float_products,
    signed_products,
    tile_pair,
    unit_products,
    word_products,
)
from apq_tvm.tensorize.registry import register
from apq_tvm.tensorize.x86.dot import MADDUBS, MADDUBS_SUMS, DotInstruction


def integer_gemm_intrinsic(instruction: DotInstruction, tile: Tile, bits: int) -> str:
    """Register (once) and name the micro-kernel for int8 activations and decoded codes.

    Parameters
    ----------
    instruction : DotInstruction
        ``tile.lanes`` must be its rows.
    tile : Tile
    bits : int
        Largest code is 2^bits - 1; 1-bit codes may be doubled to 2. Of vpmaddubsw up to 7: 8-bit
        codes would saturate, see `word_gemm_intrinsic`.

    Returns
    -------
    str
        ``apq_<instr>_<m>x<n>x<k>_s8u8s32``; vpmaddubsw adds ``_x<sums>``.
    """
    name = f"apq_{instruction.name}_{tile}_s8u8s32"
    meaning, body = byte_products(tile), partial(_dp_body, tile)
    if instruction is MADDUBS:
        sums = min(MADDUBS_SUMS[2 if bits == 1 else bits], tile.k // 4)
        name = f"{name}_x{sums}"
        body = partial(_maddubs_body, tile, sums=sums) if sums > 1 else partial(_widened, tile)
    return register(name, lambda: tile_pair(meaning, body))


def unit_gemm_intrinsic(instruction: DotInstruction, tile: Tile) -> str:
    """Register (once) and name ``apq_<instr>_<m>x<n>x<k>_s8u8s32_units``.

    As `integer_gemm_intrinsic`, for vpdpbusd and codes of 8 bits where they lie in memory.
    """
    name = f"apq_{instruction.name}_{tile}_s8u8s32_units"
    return register(name, lambda: tile_pair(unit_products(tile), partial(_dp_body, tile)))


def word_gemm_intrinsic(tile: Tile) -> str:
    """Register (once) and name the micro-kernel ``apq_maddwd_<m>x<n>x<k>_s16s16s32``, by AVX2.

    ``vpmaddwd`` adds two products of int16 to an int32, exactly whatever the codes: 2
    multiplications and 2 additions for 32 products. Signs and magnitudes of bytes would take
    ``vpsignb``, ``vpmaddubsw``, ``vpmaddwd`` and an addition, two nibbles an eighth more and int16
    sums in registers besides.
    """
    meaning, body = word_products(tile), partial(_words_body, tile)
    return register(f"apq_maddwd_{tile}_s16s16s32", lambda: tile_pair(meaning, body))


def pair_gemm_intrinsic(tile: Tile) -> str:
    """Register (once) and name the micro-kernel ``apq_maddubs_<m>x<n>x<k>_u8s8s32``.

    Of signed codes of 8 bits of which no two neighbours exceed 152 together, and x whose bits are
    unsigned, up to 215: 215 * 152 = 32680 fits int16.
    """
    meaning, body = signed_products(tile), partial(_widened, tile, signed=True)
    return register(f"apq_maddubs_{tile}_u8s8s32", lambda: tile_pair(meaning, body))


def float_gemm_intrinsic(tile: Tile) -> str:
    """Register (once) and name the micro-kernel ``apq_fma{bits}_<m>x<n>x<k>_f32f32f32``."""
    name = f"apq_fma{32 * tile.lanes}_{tile}_f32f32f32"  # 80 columns are 5 zmm or 10 ymm
    return register(name, lambda: tile_pair(float_products(tile), partial(_float_body, tile)))


def dequantize_intrinsic(lanes: int) -> str:
    """Register (once) and name the conversion of 4 k of a decoded unit to float32 columns."""
    return register(
        f"apq_cvtdq2ps_{lanes}x4_u8f32",
        lambda: pair(dequantization(lanes), partial(_dequantize_body, lanes)),
    )


def _ramp(start: Expr, lanes: int) -> Expr:
    return tirx.Ramp(start, 1, lanes)


def _broadcast_quad(a: Buffer, m: Expr, k: Expr, lanes: int, dtype: str) -> Expr:
    """Four activations of row m, repeated in every 32-bit lane."""
    quad = tirx.reinterpret("int32", a.vload([m, k * 4], f"{a.dtype}x4"))
    return tirx.reinterpret(f"{dtype}x{4 * lanes}", tirx.Broadcast(quad, lanes))


def _accumulate(c: Buffer, m: Expr, j: Expr, lanes: int, value: Any) -> None:
    b.buffer_store(c, value(c.vload([m, j, 0], f"int32x{lanes}")), [m, j, _ramp(0, lanes)])


def _dp_body(tile: Tile, a: Buffer, w: Buffer, c: Buffer) -> None:
    lanes = tile.lanes
    name = f"llvm.x86.avx512.vpdpbusd.{32 * lanes}"
    with b.unroll(tile.k // 4) as k, b.unroll(tile.m) as m, b.unroll(tile.vectors) as j:
        # Of a panel, or of units as they lie in memory.
        at = [k, 0, 0] if len(w.shape) == 4 else [k // VECTORS, k % VECTORS * 4 * lanes]
        codes = w.vload([j, *at], f"uint8x{4 * lanes}")
        quad = _broadcast_quad(a, m, k, lanes, "int8")
        _accumulate(c, m, j, lanes, lambda acc: llvm(f"int32x{lanes}", name, acc, codes, quad))


def _maddwd(a: Expr, w: Expr) -> Expr:
    """Sums of two neighbouring products of int16, as int32; AVX2."""
    return llvm("int32x8", "llvm.x86.avx2.pmadd.wd", a, w)


def _maddubs(unsigned: Expr, signed: Expr) -> Expr:
    return llvm("int16x16", "llvm.x86.avx2.pmadd.ub.sw", unsigned, signed)


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
        with b.serial(1, sums) as step:
            add(chunk * sums + step, False)
        with b.unroll(tile.m) as m, b.unroll(tile.vectors) as j:
            ones = tirx.Broadcast(tirx.const(1, "int16"), 16)
            total = _maddwd(partials.vload([m, j, 0], "int16x16"), ones)
            _accumulate(c, m, j, 8, lambda acc: acc + total)


def _widened(tile: Tile, a: Buffer, w: Buffer, c: Buffer, signed: bool = False) -> None:
    """Every result of vpmaddubsw by itself: no register but the accumulators lives for long.

    Codes are the `signed` operand, or the other.
    """
    ones = tirx.Broadcast(tirx.const(1, "int16"), 16)
    with b.serial(0, tile.k // 4) as k, b.unroll(tile.m) as m, b.unroll(tile.vectors) as j:
        quad = _broadcast_quad(a, m, k, 8, a.dtype)
        codes = w.vload([j, k, 0, 0], f"{w.dtype}x32")
        total = _maddwd(_maddubs(quad, codes) if signed else _maddubs(codes, quad), ones)
        _accumulate(c, m, j, 8, lambda acc: acc + total)


def _words_body(tile: Tile, a: Buffer, w: Buffer, c: Buffer) -> None:
    # A loop that LLVM unrolls late, as above.
    with b.serial(0, tile.k // 2) as k, b.unroll(tile.m) as m, b.unroll(tile.vectors) as j:
        two = tirx.Broadcast(tirx.reinterpret("int32", a.vload([m, k * 2], "int16x2")), 8)
        codes = w.vload([j, k, 0, 0], "int16x16")
        product = _maddwd(tirx.reinterpret("int16x16", two), codes)
        _accumulate(c, m, j, 8, lambda acc: acc + product)


def _float_body(tile: Tile, a: Buffer, w: Buffer, c: Buffer) -> None:
    lanes, vector = tile.lanes, f"float32x{tile.lanes}"
    with b.unroll(tile.k) as k, b.unroll(tile.m) as m, b.unroll(tile.vectors) as j:
        # LLVM contracts the product and the sum to vfmadd231ps.
        product = tirx.Broadcast(a[m, k], lanes) * w.vload([j, k, 0], vector)
        b.buffer_store(c, c.vload([m, j, 0], vector) + product, [m, j, _ramp(0, lanes)])


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
