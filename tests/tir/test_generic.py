"""Every operator family through Relax's legalization and our rules, against ONNX Runtime."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

tvm = pytest.importorskip("tvm")
onnxruntime = pytest.importorskip("onnxruntime")

from built import built  # noqa: E402
from generic_cases import GRAPHS, Graph  # noqa: E402
from scheduled import AVX2, AVX512  # noqa: E402
from tvm import relax, tirx  # noqa: E402
from tvm.relax.frontend.onnx import from_onnx  # noqa: E402

from apq_tvm.schedules.decide import Decide, Defaults, Random  # noqa: E402
from apq_tvm.schedules.graph.rules import schedule_function  # noqa: E402

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


def check(graph: Graph, profile: Any, decide: Decide) -> list[str]:
    """Compile and compare at every size; the names of the rules."""
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
        run = relax.VirtualMachine(tvm.compile(module, target), tvm.cpu())["main"]
    session = onnxruntime.InferenceSession(
        graph.model().SerializeToString(), providers=["CPUExecutionProvider"]
    )
    dynamic = any(isinstance(d, str) for _, shape in graph.inputs.values() for d in shape)
    for sizes in SIZES if dynamic else SIZES[:1]:
        feeds = graph.feeds(sizes)
        result = run(*(tvm.runtime.tensor(v) for v in feeds.values()))
        results = [result] if hasattr(result, "numpy") else list(result)
        for got, expected in zip(results, session.run(None, feeds), strict=True):
            assert got.numpy().shape == expected.shape
            np.testing.assert_allclose(
                got.numpy(), expected, rtol=20 * TOLERANCE, atol=20 * TOLERANCE
            )
    return names


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.isa("avx2")
def test_avx2(name: str) -> None:
    names = check(GRAPHS[name], AVX2, Defaults())
    assert names and all(n.startswith("generic_") for n in names)


@pytest.mark.parametrize(
    "name", ["gelu", "softmax 1", "ReduceMean [1]", "concat last", "conv", "matmul", "pad"]
)
@pytest.mark.isa("avx512f")
def test_avx512(name: str) -> None:
    check(GRAPHS[name], AVX512, Defaults())


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.isa("avx2")
def test_random_decisions(seed: int) -> None:
    for name in ("bias and residual", "softmax -1", "ReduceMean [1, 2]", "conv"):
        check(GRAPHS[name], AVX2, Random(seed))


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


def test_transposes_move_whole_vectors() -> None:
    module = _legalized(GRAPHS["transpose [0, 2, 1]"])
    (func,) = (f for f in module.functions.values() if isinstance(f, tirx.PrimFunc))
    text = str(schedule_function(func, AVX2, Defaults())[0])
    assert "T.Shuffle" in text
