"""Products of looked up centroids and activations on x86, and sums of them."""

from __future__ import annotations

from typing import Any

from tvm import tirx

from apq_tvm.tensorize.exprs import x86
from apq_tvm.tensorize.meaning.planes import PlanesUnit

Expr = Any  # tvm is untyped


def add_scaled(unit: PlanesUnit, total: Expr, part: Expr, scale: Expr) -> Expr:
    """Add integers times the scales of their lanes."""
    dtype = f"float32x{unit.lanes}"
    name = f"llvm.fma.v{unit.lanes}f32"
    return tirx.call_llvm_pure_intrin(dtype, name, part.astype(dtype), scale, total)


def multiply(unit: PlanesUnit, sums: Expr | None, w: Expr, x: Expr) -> Expr:
    """Products of int8 [V] centroids (offset, for vpdpbusd) and activations, added to
    `sums`, None for 0."""
    if unit.offset:
        if sums is None:
            sums = tirx.Broadcast(tirx.const(0, "int32"), 16)
        return x86("int32x16", "avx512.vpdpbusd.512", sums, w, x)
    size = x86("int8x32", "avx2.psign.b", x, x)
    signed = x86("int8x32", "avx2.psign.b", w, x)
    ones = tirx.Broadcast(tirx.const(1, "int16"), 16)
    words = x86("int16x16", "avx2.pmadd.ub.sw", size, signed)
    products = x86("int32x8", "avx2.pmadd.wd", words, ones)
    return products if sums is None else sums + products
