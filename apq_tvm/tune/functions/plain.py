"""PrimFuncs as they are written, in plain loops: what candidates are compared with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from apq_tvm.schedules.graph.rewrites.lets import spill_lets
from apq_tvm.types import Array


def plain_function(func: Any) -> Callable[..., None]:
    """The unscheduled function for this machine: ``(inputs, *outputs)``, which it fills."""
    import tvm

    from apq_tvm.codegen.build.pipeline import build

    mod = tvm.IRModule({"main": spill_lets(func).with_attr("global_symbol", "main")})
    built = build(mod, tvm.target.Target("llvm"), checked=False)

    def call(inputs: Sequence[Array], *outputs: Array) -> None:
        tensors = [tvm.runtime.tensor(array) for array in (*inputs, *outputs)]
        built["main"](*tensors)
        for array, tensor in zip(outputs, tensors[len(inputs) :], strict=True):
            array[...] = tensor.numpy()

    return call
