"""Constants are reshaped when a graph is lowered, not by functions that TVM compiles for it."""

from __future__ import annotations

import numpy as np
from tvm import relax

from apq_tvm.lower.views import VIEWS, view_constants


def test_reshapes_of_constants_are_constants() -> None:
    build = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType([2, 3, 4], "float32"))
    scale = relax.const(np.arange(3, dtype=np.float32))
    with build.function("main", [x]):
        with build.dataflow():
            row = build.emit(relax.op.reshape(scale, [1, 3]))
            kept = build.emit(relax.op.reshape(x, [2, 3, 2, 2]))
            flat = build.emit(relax.op.reshape(kept, [2, 3, 4]))
            made = relax.op.multiply(flat, relax.op.expand_dims(row, 2))
            y = build.emit_output(made)
        build.emit_func_output(y)
    (block,) = view_constants(build.get())["main"].body.blocks
    values = [one.value for one in block.bindings]
    assert sum(getattr(getattr(v, "op", None), "name", "") in VIEWS for v in values) == 2  # of x
    shapes = [v.value.numpy().shape for v in values if hasattr(v, "value")]
    assert shapes == [(1, 3), (1, 3, 1)]
