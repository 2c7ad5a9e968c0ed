"""Changes to functions before they are scheduled for GPUs: where they look up and what they keep.

Ids are checked by a kernel of their own, which the host hears of when the run ends
(`codegen/runtime/cuda/run.c`): kernels that look up read before that, so they look up clamped.
"""

from __future__ import annotations

from typing import Any

from tvm import ir, s_tir, tirx
from tvm_ffi import structural_map

from apq_tvm.schedules.graph.exprs import collect


def clamp_lookups(func: Any) -> Any:
    """Clamp every index that is computed from what memory holds.

    Parameters
    ----------
    func : tvm.tirx.PrimFunc
        Not yet lowered: indices are those of tensors.

    Returns
    -------
    tvm.tirx.PrimFunc
        The same if nothing is looked up.
    """

    def load(node: Any) -> Any:
        indices = _clamped(node.source, node.indices)
        return node if indices is None else tirx.BufferLoad(node.source, indices)

    def store(node: Any) -> Any:
        indices = _clamped(node.buffer, node.indices)
        return node if indices is None else tirx.BufferStore(node.buffer, node.value, indices)

    rules = ((ir.TensorLoad, load), (tirx.BufferStore, store))
    body = structural_map(func.body, rules)
    return func if body.same_as(func.body) else func.with_body(body)


def _clamped(buffer: Any, indices: Any) -> list[Any] | None:
    """The indices, those of data clamped; None where none is of data."""
    if not any(collect(index, ir.TensorLoad) for index in indices):
        return None
    return [
        _clamp(index, size) if collect(index, ir.TensorLoad) else index
        for index, size in zip(indices, buffer.shape, strict=True)
    ]


def _clamp(index: Any, size: Any) -> Any:
    last = tirx.Cast(str(index.ty), size - 1)
    return tirx.max(tirx.min(index, last), tirx.const(0, str(index.ty)))


def own_memory(func: Any) -> Any:
    """Give every thread what a block below the root allocates: kernels allocate nothing global."""
    if not isinstance(func.body, s_tir.SBlockRealize):
        return func
    root = func.body.block
    mine = {
        buffer: tirx.decl_buffer(buffer.shape, buffer.dtype, buffer.name, scope="local")
        for block in collect(func.body, s_tir.SBlock)
        if not block.same_as(root)
        for buffer in block.alloc_buffers
        if buffer.scope() == "global"
    }
    if not mine:
        return func
    return func.with_body(structural_map(func.body, (tirx.Var, lambda var: mine.get(var, var))))
