"""Vector expressions that products on x86 are made of.

x86 has no shifts of bytes: they are shifted in 16-bit lanes, and masks drop the bits that come in
from the neighbour byte. Sources: Intel 64 and IA-32 Software Developer's Manual, volume 2,
PMADDUBSW, PMADDWD, VPDPBUSD; LLVM's IntrinsicsX86.td for the operand types.
"""

from __future__ import annotations

from tvm import tirx

from apq_tvm.tensorize.exprs import Expr, moved_bytes, splat, x86


def lanes_of(vector: Expr) -> int:
    """Lanes of a vector expression."""
    return int(str(vector.ty).rpartition("x")[2])


def shifted(vector: Expr, left: int) -> Expr:
    """Every byte shifted left (right if negative); bits of the neighbour byte come in."""
    return moved_bytes(vector, left, lanes_of(vector))


def masked(vector: Expr, mask: int) -> Expr:
    """Bits of `mask` of every byte."""
    return tirx.bitwise_and(vector, splat(mask, "uint8", lanes_of(vector)))


def merged(mask: int, a: Expr, c: Expr) -> Expr:
    """Bits of `mask` from `a`, the others from `c`."""
    return tirx.bitwise_or(masked(a, mask), masked(c, 255 - mask))


def for_rows(four: Expr, rows: int) -> Expr:
    """int8 [4R]: four activations, repeated for every row of weights."""
    word = tirx.reinterpret("int32", four)
    return tirx.reinterpret(f"int8x{4 * rows}", tirx.Broadcast(word, rows))


def maddubs(codes: Expr, x: Expr) -> Expr:
    """int16: sums of two neighbouring products of uint8 and int8, saturated."""
    size = lanes_of(x)
    name = "avx512.pmaddubs.w.512" if size == 64 else "avx2.pmadd.ub.sw"
    return x86(f"int16x{size // 2}", name, codes, x)


def widened(words: Expr, times: int = 1) -> Expr:
    """int32 [8]: sums of two neighbouring int16, `times` so large."""
    return x86("int32x8", "avx2.pmadd.wd", words, splat(times, "int16", 16))


def vpdpbusd(total: Expr, codes: Expr, x: Expr) -> Expr:
    """int32 [R]: `total` and four neighbouring products of uint8 and int8 each."""
    size = lanes_of(x)
    return x86(f"int32x{size // 4}", f"avx512.vpdpbusd.{8 * size}", total, codes, x)
