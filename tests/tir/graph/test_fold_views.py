"""Reshapes of constants and of reshapes are folded when a graph is lowered: TVM would compile
functions for them, or copy."""

from __future__ import annotations

from typing import Any

import numpy as np
from tvm import relax, tirx

from apq_tvm.lower.views import fold_views, is_view


def _values(build: Any) -> list[Any]:
    (block,) = fold_views(build.get())["main"].body.blocks
    return [one.value for one in block.bindings]


def _views(values: list[Any]) -> list[Any]:
    return [v for v in values if is_view(v)]


def test_reshapes_of_constants_are_constants() -> None:
    build = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType([2, 3, 4], "float32"))
    scale = relax.const(np.arange(3, dtype=np.float32))
    with build.function("main", [x]):
        with build.dataflow():
            row = build.emit(relax.op.reshape(scale, [1, 3]))
            kept = build.emit(relax.op.reshape(x, [2, 3, 2, 2]))
            flat = relax.op.sum(kept, 3, keepdims=True)
            made = relax.op.multiply(build.emit(flat), relax.op.expand_dims(row, [2, 3]))
            y = build.emit_output(made)
        build.emit_func_output(y)
    values = _values(build)
    assert len(_views(values)) == 1  # of x
    shapes = [v.value.numpy().shape for v in values if hasattr(v, "value")]
    assert shapes == [(1, 3), (1, 3, 1, 1)]


def test_reshapes_of_reshapes_are_one() -> None:
    """What a convolution makes of rows, and the next one's rows of that."""
    build = relax.BlockBuilder()
    batch = tirx.Var("batch", "int64")
    x = relax.Var("x", relax.TensorType([batch * 56 * 56, 64], "float32"))
    with build.function("main", [x]):
        with build.dataflow():
            image = build.emit(relax.op.reshape(x, [batch, 56, 56, 64]))
            rows = build.emit(relax.op.reshape(image, [batch * 3136, 64]))
            flat = build.emit(relax.op.reshape(rows, [batch, 56 * 56 * 64]))
            both = build.emit(
                relax.op.concat([build.emit(relax.op.reshape(rows, [batch, 200704])), flat], 1)
            )
            y = build.emit_output(relax.op.nn.relu(both))
        build.emit_func_output(y)
    views = _views(_values(build))
    assert [v.args[0].name for v in views] == ["x"] * len(views)


def test_a_reshape_that_may_not_fit_stays() -> None:
    """Whether sizes agree is asked at run time: of x and the first, which nothing proves."""
    build = relax.BlockBuilder()
    rows, columns = tirx.Var("rows", "int64"), tirx.Var("columns", "int64")
    x = relax.Var("x", relax.TensorType([rows], "float32"))
    like = relax.Var("like", relax.TensorType([columns, 4], "float32"))
    with build.function("main", [x, like]):
        with build.dataflow():
            first = build.emit(relax.op.reshape(x, [columns, 4]))
            flat = build.emit(relax.op.reshape(first, [rows]))
            y = build.emit_output(relax.op.nn.relu(flat))
        build.emit_func_output(y)
    first, flat = _views(_values(build))
    assert first.args[0].name == "x"
    assert flat.args[0].name != "x"
