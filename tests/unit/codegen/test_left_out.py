"""Sessions leave out what only serves outputs that they do not want."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from small_llama import CONFIG, small_llama

from apq_tvm import pipeline
from apq_tvm.codegen import emit
from apq_tvm.codegen.graph.plain import Call, Place
from apq_tvm.codegen.graph.session import left_out, tensors_of


@pytest.mark.parametrize("target", ["znver4", "h200"])
def test_whatever_serves_presents_alone_is_left_out(target: str, tmp_path: Path) -> None:
    config, stopwatch = replace(CONFIG, heads=4, kv_heads=2), pipeline._Stopwatch()
    path = small_llama(tmp_path / "llama.onnx", config)
    plan = pipeline.plan(path, scheme="float", target=target, stopwatch=stopwatch)
    (plan,) = plan.variants or (plan,)
    graph = emit.read(pipeline.scheduled(plan, stopwatch=stopwatch)).graph
    found = left_out(graph)
    readers: dict[int, set[int]] = {}
    for number, step in enumerate(graph.steps):
        for tensor in tensors_of(step):
            if tensor.place is Place.BUFFER:
                readers.setdefault(int(tensor.key), set()).add(number)
    kernels = set()
    for number, output in found.items():
        step = graph.steps[number]
        assert isinstance(step, Call) and graph.outputs[output].name.startswith("present.")
        (made,) = (int(tensor.key) for tensor in tensors_of(step)[-step.outputs :])
        assert graph.buffers[made].output == output or readers[made] <= found.keys()
        kernels.add(step.kernel)
    assert any("concatenate" in kernel for kernel in kernels)
    # Values are cached as they come; only a present has heads before tokens.
    assert any("transpose" in kernel for kernel in kernels)
    wanted = {i for i, port in enumerate(graph.outputs) if port.name == "logits"}
    assert not wanted & set(found.values()) and len(found) < len(graph.steps) / 2
