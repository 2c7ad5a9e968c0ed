"""Random graphs through the whole pipeline, against ONNX Runtime; many in one model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from random_graphs import SIZES, RandomGraph, grow
from random_regions import WIDTH, model

import apq_tvm
from apq_tvm.module import load_module
from tests.onnx_models import build, save, session_of

GRAPHS, STEPS = 12, 7


@pytest.mark.all_cases
@pytest.mark.parametrize("seed", range(8))
def test_random_graphs_match_onnxruntime(seed: int, tmp_path: Path) -> None:
    """Every value nobody reads is an output."""
    rng = np.random.default_rng(seed)
    graphs = [RandomGraph(f"g{number}.", rng) for number in range(GRAPHS)]
    for graph in graphs:
        grow(graph, STEPS)
    nodes = [node for graph in graphs for node in graph.nodes]
    inputs = {name: spec for graph in graphs for name, spec in graph.inputs.items()}
    weights = {name: array for graph in graphs for name, array in graph.weights.items()}
    read = {name for node in nodes for name in node[1].split()}
    outputs = [name for node in nodes for name in node[2].split() if name not in read]
    path = save(build(nodes, inputs, " ".join(outputs), weights, opset=20), tmp_path)
    apq_tvm.compile(path, tmp_path / "compiled", scheme="float")
    module, session = load_module(tmp_path / "compiled"), session_of(path)
    wrong = []
    for sizes in SIZES:
        feeds = {}
        for name, (kind, shape) in inputs.items():
            extents = [sizes["b"] if isinstance(d, str) else d for d in shape]
            whole = rng.integers(0, 5, extents)
            feeds[name] = rng.standard_normal(extents).astype(kind) if kind[0] == "f" else whole
        used = {i.name for i in session.get_inputs()}
        wanted = session.run(outputs, {k: v for k, v in feeds.items() if k in used})
        got = module.run(feeds)
        for name, value in zip(outputs, wanted, strict=True):
            assert got[name].dtype == value.dtype and got[name].shape == value.shape, name
            room = 1e-4 * max(1.0, float(np.abs(value[np.isfinite(value)]).max(initial=0)))
            if not np.allclose(got[name], value, rtol=1e-4, atol=room, equal_nan=True):
                wrong.append(f"{name} at {sizes}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.all_cases
@pytest.mark.parametrize("seed", range(4))
def test_random_regions_match_onnxruntime(seed: int, tmp_path: Path) -> None:
    """Branches and loops of all depths, of fused operators; their sums grow, so errors do."""
    path = save(model(seed, graphs=4, steps=6), tmp_path)
    apq_tvm.compile(path, tmp_path / "compiled", scheme="float")
    module, session = load_module(tmp_path / "compiled"), session_of(path)
    rng = np.random.default_rng(seed)
    for rows, any_number, some in ((1, 0, 1), (3, 1, 4), (3, 5, 2)):
        given = {name: rng.standard_normal((rows, WIDTH)).astype("f") for name in ("x", "z")}
        given |= {"any": np.asarray(any_number), "some": np.asarray(some)}
        given = {one.name: given[one.name] for one in session.get_inputs()}
        got = module.run(given)
        for out, value in zip(session.get_outputs(), session.run(None, given), strict=True):
            np.testing.assert_allclose(got[out.name], value, rtol=1e-3, atol=1e-4)
