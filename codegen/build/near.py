"""Sums that are too many bytes for TVM to leave on the stack, where LLVM finds registers."""

from __future__ import annotations

from typing import Any

import tvm_ffi
from tvm import ir, tirx

from apq_tvm.schedules.graph.exprs import collect

LEFT = 1024
"""Bytes below which TVM 0.27 leaves a buffer on the stack (``kMaxStackAlloca``)."""

MOST = 2048
"""Bytes of all vector registers of AVX-512 and of SVE at 512 bits."""


def keep_near(func: Any) -> Any:
    """Let buffers of some registers' size stay on the stack, if every use has a constant index.

    TVM makes calls of its workspace of all that take `LEFT` bytes or more. The 5 x 4 vectors of a
    tile of sums are 1280: LLVM then kept what a K block began with and ended with in memory beside
    the registers, 60 stores of a vector for every 480 cycles of products.

    Parameters
    ----------
    func : tvm.tirx.PrimFunc
        Loops are vectorized and unrolled.

    Returns
    -------
    tvm.tirx.PrimFunc
    """
    if not any(_fits(alloc.buffer) for alloc in collect(func.body, tirx.AllocBuffer)):
        return func
    loads = [(use.source, use.indices) for use in collect(func.body, ir.TensorLoad)]
    stores = [(use.buffer, use.indices) for use in collect(func.body, tirx.BufferStore)]
    wandering = [buffer for buffer, at in (*loads, *stores) if not all(map(_is_constant, at))]

    def kept(alloc: Any) -> Any:
        buffer = alloc.buffer
        if not _fits(buffer) or any(buffer.same_as(b) for b in wandering):
            return alloc
        return tirx.AllocBuffer(
            buffer, {**dict(alloc.annotations), "disable_lower_builtin": tirx.const(True, "bool")}
        )

    return func.with_body(tvm_ffi.structural_map(func.body, (tirx.AllocBuffer, kept)))


def _fits(buffer: Any) -> bool:
    return LEFT <= _bytes(buffer) <= MOST


def _is_constant(index: Any) -> bool:
    return isinstance(index.base if isinstance(index, tirx.Ramp) else index, tirx.IntImm)


def _bytes(buffer: Any) -> int:
    """Of a flat buffer; 0 where only a run knows."""
    elements = 1
    for extent in buffer.shape:
        if not isinstance(extent, tirx.IntImm):
            return 0
        elements *= int(extent)
    dtype = tvm_ffi.dtype(str(buffer.dtype))
    return elements * int(dtype.lanes) * int(dtype.bits) // 8
