"""Times what Python does around the C call of a run: a graph of 61 inputs and 61 outputs.

    python examples/measure_calls.py            compiles it into build/calls/many, and times it
    python examples/measure_calls.py FOLDER     times another build of it

Least microseconds, with the C function replaced by one that does nothing.
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

import apq_tvm

CACHES, ROUNDS = 60, 3000


def model() -> onnx.ModelProto:
    """A step that doubles a row and gives back 60 caches."""

    def value(name: str, shape: list[int | str]) -> Any:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)

    names, cache = [f"{i}" for i in range(CACHES)], [1, 4, "past", 16]
    nodes = [helper.make_node("Add", ["x", "x"], ["y"])]
    nodes += [helper.make_node("Neg", [f"past{i}"], [f"now{i}"]) for i in names]
    given = [value("x", [1, 8])] + [value(f"past{i}", cache) for i in names]
    made = [value("y", [1, 8])] + [value(f"now{i}", cache) for i in names]
    graph = helper.make_graph(nodes, "many", given, made)
    opset = helper.make_opsetid("", 17)
    return helper.make_model(graph, opset_imports=[opset], ir_version=8)


def feeds(module: Any, past: int) -> dict[str, Any]:
    shapes = {i.name: [past if d == "past" else d for d in i.shape] for i in module.inputs}
    return {name: np.ones(shape, np.float32) for name, shape in shapes.items()}


def least(run: Callable[[int], Any]) -> float:
    """Least microseconds of a call with the number of its round."""
    best = float("inf")
    for number in range(ROUNDS):
        start = time.perf_counter()
        run(number)
        best = min(best, time.perf_counter() - start)
    return best * 1e6


def main() -> None:
    folder = Path(sys.argv[1] if sys.argv[1:] else "build/calls/many").resolve()
    if not sys.argv[1:]:
        folder.parent.mkdir(parents=True, exist_ok=True)
        onnx.save(model(), folder.parent / "many.onnx")
        source = folder.parent / "many.onnx"
        apq_tvm.compile(source, output=folder, scheme="float", target="host", force=True)
    sys.path.insert(0, str(folder.parent))
    module = importlib.import_module(folder.name)
    same, growing = feeds(module, 16), [feeds(module, past) for past in range(1, 100)]
    results = module.run(same)
    print(f"with the C call {least(lambda _: module.run(same)):.1f} us")
    module._library.run_c = lambda *_: 0
    print(f"around it {least(lambda _: module.run(same)):.1f} us")
    if "into" in (module.run.__kwdefaults__ or {}):
        print(f"into= {least(lambda _: module.run(same, into=results)):.1f} us")
    print(f"shapes that grow {least(lambda i: module.run(growing[i % len(growing)])):.1f} us")


if __name__ == "__main__":
    main()
