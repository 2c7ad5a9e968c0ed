"""Kernels of a module take tensors at multiples of 16 bytes, where numpy has them.

TVM holds for true that an argument lies at a multiple of 64, so that whatever a caller gives had to
be copied to such a place. With vectors of 32 and 64 bytes processors load as fast from aligned
memory by instructions that take any address; vectors of 16 bytes stay aligned.
"""

from __future__ import annotations

from typing import Any

import tvm_ffi
from tvm import tirx

from apq_tvm.schedules.graph.exprs import collect

ALIGNMENT = 16
"""Bytes; ``APQ_LEAST_ALIGNMENT`` of codegen/runtime/common/apq_runtime.h."""


def lower_alignment(func: Any) -> Any:
    """Take arguments at any multiple of `ALIGNMENT`.

    Parameters
    ----------
    func : tvm.tirx.PrimFunc
        With flat buffers, whose arguments are no pointers yet.

    Returns
    -------
    tvm.tirx.PrimFunc
    """
    params = [p for p in func.params if tirx.is_buffer_var(p)]
    views = [d.buffer for d in collect(func.body, tirx.DeclBuffer)]
    lower = {buffer: _lower(buffer) for buffer in (*params, *views)}
    rule = (tirx.Var, lambda var: lower.get(var, var))
    made = tirx.PrimFunc(
        [lower.get(p, p) for p in func.params],
        tvm_ffi.structural_map(func.body, rule),
        func.ret_type,
    )
    return made.with_attrs(func.attrs)


def _lower(buffer: Any) -> Any:
    return tirx.decl_buffer(
        buffer.shape,
        buffer.dtype,
        buffer.name,
        strides=buffer.strides,
        elem_offset=buffer.elem_offset,
        scope=buffer.scope(),
        data_alignment=min(ALIGNMENT, buffer.data_alignment),
        offset_factor=buffer.offset_factor,
        layout=buffer.layout,
    )
