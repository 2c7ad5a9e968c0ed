"""Every operator family through Relax's legalization and our rules, against ONNX Runtime."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

tvm = pytest.importorskip("tvm")
pytest.importorskip("onnxruntime")

from built import built  # noqa: E402
from generic_cases import GRAPHS, Graph, joined  # noqa: E402
from scheduled import AVX2, AVX512  # noqa: E402
from tvm import relax, te, tirx, topi  # noqa: E402
from tvm.relax.frontend.onnx import from_onnx  # noqa: E402

from apq_tvm.codegen.build.pipeline import NAME  # noqa: E402
from apq_tvm.ops.graph.extremes import place_of_extreme  # noqa: E402
from apq_tvm.schedules.decide import Decide, Defaults, Random  # noqa: E402
from apq_tvm.schedules.graph.exprs import collect  # noqa: E402
from apq_tvm.schedules.graph.rules import schedule_function  # noqa: E402
from tests.onnx_models import session_of  # noqa: E402

TOLERANCE = 1e-6  # per value of size 1 and per term of a sum of up to 100
SIZES = (
    {"B": 2, "S": 7, "T": 5},
    {"B": 1, "S": 17, "T": 33},
    {"B": 3, "S": 16, "T": 16},
    {"B": 1, "S": 1, "T": 1},
)


def _legalized(graph: Graph) -> Any:
    t = relax.transform
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = from_onnx(graph.model())
    passes = [
        t.DecomposeOpsForInference(), t.LegalizeOps(), t.AnnotateTIROpPattern(), t.FoldConstant(),
        t.FuseOps(), t.FuseTIR(), t.DeadCodeElimination(),
    ]  # fmt: skip
    return tvm.transform.Sequential(passes)(module)


def check(graphs: Mapping[str, Graph], profile: Any, decide: Decide) -> list[str]:
    """Compile together and compare at every size; the names of the rules."""
    graph = joined(graphs)
    module = _legalized(graph)
    target = tvm.target.Target(dict(profile.target))
    names = []
    with target:
        for variable, func in list(module.functions.items()):
            if isinstance(func, tirx.PrimFunc):
                scheduled, name = schedule_function(func, profile, decide)
                module.update_func(variable, scheduled)
                names.append(name)
    with tvm.transform.PassContext(config={"tirx.disable_assert": True}):  # as modules are built
        built_module = relax.build(module, target, tir_pipeline=NAME)
        run = relax.VirtualMachine(built_module, tvm.cpu())["main"]
    session = session_of(graph.model().SerializeToString())
    dynamic = any(isinstance(d, str) for _, shape in graph.inputs.values() for d in shape)
    wrong = []
    for sizes in SIZES if dynamic else SIZES[:1]:
        feeds = graph.feeds(sizes)
        result = run(*(tvm.runtime.tensor(v) for v in feeds.values()))
        results = [result] if hasattr(result, "numpy") else list(result)
        expected = session.run(None, feeds)
        for name, got, value in zip(graph.outputs, results, expected, strict=True):
            same = got.numpy().shape == value.shape
            if not same or not np.allclose(got.numpy(), value, 20 * TOLERANCE, 20 * TOLERANCE):
                wrong.append(f"{name} at {sizes}")
    assert not wrong, "\n".join(wrong)
    return names


def of_opset(opset: int) -> dict[str, Graph]:
    return {name: graph for name, graph in GRAPHS.items() if graph.opset == opset}


@pytest.mark.all_cases
@pytest.mark.parametrize("opset", sorted({graph.opset for graph in GRAPHS.values()}))
@pytest.mark.isa("avx2")
def test_avx2(opset: int) -> None:
    names = check(of_opset(opset), AVX2, Defaults())
    assert names and all(n.startswith("generic_") for n in names)


@pytest.mark.isa("avx512f")
def test_avx512() -> None:
    names = ("gelu", "softmax 1", "concat last", "conv", "matmul", "pad")
    check({name: GRAPHS[name] for name in names}, AVX512, Defaults())


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.isa("avx2")
def test_random_decisions(seed: int) -> None:
    names = ("bias and residual", "softmax -1", "conv")
    check({name: GRAPHS[name] for name in names}, AVX2, Random(seed))
    check({"ReduceMean [1, 2]": GRAPHS["ReduceMean [1, 2]"]}, AVX2, Random(seed))


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("gelu", "generic_elementwise"),
        ("softmax -1", "generic_rows"),
        ("ReduceMax [1]", "generic_reduction"),
        ("scatter nd", "generic_serial"),
    ],
)
def test_names_tell_the_rule(name: str, rule: str) -> None:
    module = _legalized(GRAPHS[name])
    funcs = [f for f in module.functions.values() if isinstance(f, tirx.PrimFunc)]
    assert rule in [schedule_function(f, AVX2, Defaults())[1] for f in funcs]


@pytest.mark.parametrize("name", ["erf", "exp", "tanh", "sigmoid", "gelu", "softmax -1"])
def test_no_scalar_math_calls_are_left(name: str) -> None:
    with tvm.target.Target(dict(AVX2.target)):
        module = _legalized(GRAPHS[name])
    for func in module.functions.values():
        if isinstance(func, tirx.PrimFunc):
            scheduled, _ = schedule_function(func, AVX2, Defaults())
            assembly = built(scheduled, AVX2).assembly
            assert not [f for f in ("erff", "expf", "tanhf") if f in assembly]


@pytest.mark.isa("avx2")
def test_tiles_that_would_take_long_are_made_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = {"conv": GRAPHS["conv"]}
    best = check(graphs, AVX2, Defaults())
    monkeypatch.setattr("apq_tvm.schedules.graph.generic.LARGEST", 100)
    small = check(graphs, AVX2, Defaults())
    assert [f"{name}_small_tile" for name in best] == small


@pytest.mark.parametrize("name", ["transpose [0, 2, 1]", "transpose of what is computed"])
def test_transposes_move_whole_vectors(name: str) -> None:
    with tvm.target.Target(dict(AVX2.target)):
        module = _legalized(GRAPHS[name])
    (func,) = (f for f in module.functions.values() if isinstance(f, tirx.PrimFunc))
    text = str(schedule_function(func, AVX2, Defaults())[0])
    assert "T.Shuffle" in text


@pytest.mark.parametrize("keep", [False, True])
def test_reductions_run_along_what_they_add_up(keep: bool) -> None:
    """Not along the sums: pixels of 16 channels lie 4096 apart, which took 36 times as long."""
    x = te.placeholder((1, 116, 64, 64), "float32", "x")
    mean = topi.divide(topi.sum(x, axis=(2, 3), keepdims=keep), 4096.0)
    func = te.create_prim_func([x, mean])
    loads = collect(schedule_function(func, AVX2, Defaults())[0].body, tirx.Ramp)
    assert loads and all(int(ramp.stride) == 1 for ramp in loads)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("largest", [False, True])
@pytest.mark.parametrize("axis", [0, 1])
def test_places_of_extremes(axis: int, largest: bool, last: bool) -> None:
    """Of equals the first or the last, of infinities too; along memory by whole vectors."""
    rows, columns = tirx.Var("rows", "int64"), tirx.Var("columns", "int64")
    x = te.placeholder((rows, columns), "float32", "x")
    place = place_of_extreme(x, axis, keep=False, largest=largest, last=last)
    func, _ = schedule_function(te.create_prim_func([x, place]), AVX2, Defaults())
    assert axis == 0 or "float32x8" in str(func)
    run = built(func, AVX2)
    rng = np.random.default_rng(0)
    for shape in ((1, 1), (3, 7), (5, 8), (4, 100)):
        values = rng.integers(-3, 3, shape).astype(np.float32)
        values[0] = -np.inf if largest else np.inf
        found = np.full(shape[1 - axis], -1, np.int64)
        run(values, found)
        ordered = values if largest else -values
        wanted = ordered.argmax(axis)
        if last:
            wanted = shape[axis] - 1 - np.flip(ordered, axis).argmax(axis)
        np.testing.assert_array_equal(found, wanted)
