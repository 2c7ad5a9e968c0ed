"""What data point to stays inside its tensor, whatever they say.

Ids are checked by a kernel of their own, which the host hears of when the run ends
(`codegen/runtime/cuda/run.c`): kernels that look up read before that, so they look up clamped.
"""

from __future__ import annotations

from typing import Any

import tvm_ffi
from tvm import ir, tirx

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
    body = tvm_ffi.structural_map(func.body, rules)
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
