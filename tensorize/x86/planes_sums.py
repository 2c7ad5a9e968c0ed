"""Products and sums of kernels on bitplanes on x86: of integers, or times scales of activations."""

from __future__ import annotations

from tvm import tirx

from apq_tvm.tensorize.exprs import Buffer, Expr, llvm, splat, x86
from apq_tvm.tensorize.meaning.planes import QUAD, PlanesStep
from apq_tvm.tensorize.x86.vectors import maddubs, vpdpbusd, widened


def multiply(step: PlanesStep, sums: Expr | None, w: Expr, x: Expr) -> Expr:
    """Products of int8 [V] centroids (offset, if the step's are) and activations, added to `sums`,
    None for 0."""
    if step.offset:
        return vpdpbusd(splat(0, "int32", 16) if sums is None else sums, w, x)
    size = x86("int8x32", "avx2.psign.b", x, x)
    signed = x86("int8x32", "avx2.psign.b", w, x)
    products = widened(maddubs(size, signed))
    return products if sums is None else sums + products


def add_scaled(step: PlanesStep, total: Expr, part: Expr, scale: Expr) -> Expr:
    """Add integers times the scales of their lanes."""
    dtype = f"float32x{step.lanes}"
    return llvm(dtype, f"llvm.fma.v{step.lanes}f32", part.astype(dtype), scale, total)


def load(step: PlanesStep, buffer: Buffer, lead: tuple[int, ...], register: int) -> Expr:
    """One register of bytes of the row `lead` of a buffer; columns past the step's are 0."""
    return _load_part(buffer, lead, register, step.vector, step.k)


def load_scales(step: PlanesStep, scales: Buffer, lead: tuple[int, ...], register: int) -> Expr:
    """float32 [lanes]: the scale of the activations that each lane of a register multiplies."""
    return _load_part(scales, lead, register, step.lanes, step.k // QUAD)


def _load_part(buffer: Buffer, lead: tuple[int, ...], register: int, size: int, count: int) -> Expr:
    """`size` elements of the row `lead`, of which `count` there are at most; then 0."""
    width, dtype = min(count, size), str(buffer.dtype)
    value = buffer.vload([*lead, register * size], f"{dtype}x{width}")
    if width == size:
        return value
    zeros = tirx.Broadcast(tirx.const(0, dtype), width)
    return tirx.Shuffle([value, zeros], [tirx.const(i, "int32") for i in range(2 * width)])
