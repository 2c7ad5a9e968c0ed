"""A module touches nothing beside its tensors: all of them lie beside pages that nobody may touch.

Inputs, outputs, working memory, scratch and weights alike. Sizes are odd along every axis that a
kernel walks, and a tensor is a multiple of 64 bytes in all, so that no copy of it is made.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import apq_tvm
from apq_tvm.formats import FAMILIES
from apq_tvm.module import load_module
from tests.onnx_models import build, joined, save

HERE = Path(__file__).parent / "guard"
RNG = np.random.default_rng(0)


def weight(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


@pytest.fixture(scope="module")
def preload(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = tmp_path_factory.mktemp("guard") / "guard.so"
    command = ["cc", "-O1", "-shared", "-fPIC", "-o", library, HERE / "guard.c", "-ldl"]
    subprocess.run(command, check=True)
    return library


def run_guarded(module: Path, preload: Path, cases: list[Any]) -> str:
    """What the run printed; its last line is "whole" if it touched nothing else."""
    done = subprocess.run(
        [sys.executable, HERE / "run_guarded.py", module, json.dumps(cases)],
        env={"LD_PRELOAD": str(preload), "OMP_NUM_THREADS": "2", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    return done.stdout + done.stderr


# ---- operators ----

WIDTH = 37
X = {"x": ("float32", ["b", "s", WIDTH])}
IMAGE = {"x": ("float32", ["b", 3, 15, 13])}
IDS = {"i": ("int64", ["b", "s"])}

GRAPHS: dict[str, tuple[Any, ...]] = {
    "unary": ([("Exp", "x", "a"), ("Erf", "x", "b"), ("Tanh", "x", "c")], X, "a b c", {}),
    "binary": ([("Add", "x c", "a"), ("Mul", "a x", "y")], X, "a y", {"c": weight(WIDTH)}),
    "softmax": ([("Softmax", "x", "y"), ("LogSoftmax", "x", "z")], X, "y z", {}),
    "softmax_inner": ([("Softmax", "x", "y", {"axis": 1})], X, "y", {}),
    "layernorm": (
        [("LayerNormalization", "x g b", "y m v", {"axis": -1}),
         ("LayerNormalization", "x g b", "z", {"axis": -1}), ("Gelu", "z", "w")],
        X, "y m v z w", {"g": weight(WIDTH), "b": weight(WIDTH)},
    ),
    "reduce": (
        [("ReduceMean", "x last", "m", {"keepdims": 0}), ("ReduceMax", "x mid", "a"),
         ("ReduceSum", "x two", "s", {"keepdims": 0}), ("ArgMax", "x", "k", {"axis": -1}),
         ("CumSum", "x axis", "c")],
        X, "m a s k c",
        {"last": np.array([-1]), "mid": np.array([1]), "two": np.array([0, 1]),
         "axis": np.array(1)},
    ),
    "moves": (
        [("Transpose", "x", "t", {"perm": [2, 0, 1]}), ("Split", "x parts", "p q", {"axis": -1}),
         ("Concat", "q x p", "y", {"axis": -1}), ("Slice", "x from to axes by", "e"),
         ("Pad", "x pads", "z")],
        X, "t p q y e z",
        {"parts": np.array([16, 21]), "from": np.array([3]), "to": np.array([36]),
         "axes": np.array([2]), "by": np.array([2]), "pads": np.array([0, 0, 2, 0, 0, 3])},
    ),
    "products": (
        [("Transpose", "x", "t", {"perm": [0, 2, 1]}), ("MatMul", "x t", "y"),
         ("MatMul", "t x", "z"), ("Softmax", "y", "p"), ("MatMul", "p x", "o")],
        X, "y z o", {},
    ),
    "gather": (
        [("Gather", "t i", "e"), ("Gather", "e k", "y", {"axis": 2})],
        IDS, "e y", {"t": weight(50, 23), "k": np.array([3, -1, 0])},
    ),
    "integers": ([("Add", "i one", "a"), ("Mul", "a a", "y")], IDS, "a y", {"one": np.array(1)}),
    "cast": ([("Cast", "x", "i", {"to": 7}), ("Cast", "x", "h", {"to": 10}), ("Less", "x z", "c"),
              ("Cast", "x", "o", {"to": 3})], X, "i h c o", {"z": np.zeros(1, np.float32)}),
    "image": (
        [("Conv", "x w b", "c", {"pads": [1, 1, 1, 1], "strides": [2, 2]}), ("Relu", "c", "r"),
         ("MaxPool", "r", "p", {"kernel_shape": [3, 3], "strides": [2, 2]}),
         ("GlobalAveragePool", "r", "g"), ("BatchNormalization", "x s t m v", "n"),
         ("Conv", "x d", "dw", {"group": 3, "pads": [1, 1, 1, 1]}),
         ("Resize", "x _ scales", "u", {"mode": "linear"})],
        IMAGE, "c p g n dw u",
        {"w": weight(7, 3, 3, 3), "b": weight(7), "s": weight(3), "t": weight(3), "m": weight(3),
         "v": np.abs(weight(3)) + 1, "d": weight(3, 1, 3, 3),
         "scales": np.array([1, 1, 2, 2], np.float32)},
    ),
}  # fmt: skip
SIZES = ((16, 1), (1, 16), (4, 4), (16, 7), (1, 1), (3, 5))


TARGETS = ("host", pytest.param("x86-64-v3", marks=pytest.mark.all_cases))


@pytest.mark.parametrize("target", TARGETS)
def test_operators(target: str, tmp_path: Path, preload: Path) -> None:
    nodes, inputs, outputs, weights = joined(GRAPHS)
    path = save(build(nodes, inputs, " ".join(outputs), weights, opset=20), tmp_path)
    apq_tvm.compile(path, tmp_path / "guarded", scheme="float", target=target)
    cases = []
    for b, s in SIZES:
        sizes = {"b": b, "s": s}
        shapes = {n: [sizes.get(d, d) for d in shape] for n, (_, shape) in inputs.items()}
        cases.append((f"b={b} s={s}", shapes))
    printed = run_guarded(tmp_path / "guarded", preload, cases)
    assert printed.splitlines()[-1] == "whole", printed


# ---- linear layers ----

N, K, WIDE = 72, 100, 112  # [rows, K] is whole blocks of 64 bytes at 4 rows, [rows, WIDE] at any
INTEGERS = (
    "W1A8", "W2A8g16", "W3zA8g64", "W4A8g32", "W4zA8g32", "W5A8g128", "W7A8g32", "W8A8", "W4A4g32",
    "W2A2g64", "W3A16g64", "W4zA32g16", "W8A16", "float",
)  # fmt: skip
FEW = ("W4A8g32", "W8A8", "float", "W4A4g32", "anyprec3-4")
# Every width of any-precision has kernels of its own to build: a few will do.
PLANES = ("anyprec2-3sA8", "anyprec5-6", "anyprec8-8A8", "anyprec4-4A32")
OTHERS = [f.examples for f in FAMILIES if f.name not in ("int", "anyprec")]
EVERY = (*INTEGERS, *PLANES, *(name for examples in OTHERS for name in examples))
SOME = (*INTEGERS[::2], *PLANES, *(examples[0] for examples in OTHERS))
ROWS = (1, 2, 3, 8, 16, 40)
MORE, SOME_MORE = ([s for s in names if s not in FEW] for names in (EVERY, SOME))
LAYERS = [
    pytest.param("host", FEW, id="host-few"),
    pytest.param("host", MORE, id="host", marks=pytest.mark.all_cases),
    pytest.param("x86-64-v3", [*FEW, *SOME_MORE], id="x86-64-v3", marks=pytest.mark.all_cases),
]


@pytest.mark.parametrize(("target", "schemes"), LAYERS)
def test_linear_layers(target: str, schemes: Sequence[str], tmp_path: Path, preload: Path) -> None:
    weights, nodes, outputs, types = {}, [], [], {}
    for i, scheme in enumerate(schemes):
        for x, width in (("x", K), ("z", WIDE))[: 1 + (scheme in FEW)]:
            layer = f"{x}{i}"
            weights[f"w{layer}"] = weight(width, N)
            weights[f"b{layer}"] = weight(N)
            nodes += [("MatMul", f"{x} w{layer}", f"m{layer}"),
                      ("Add", f"m{layer} b{layer}", f"y{layer}")]  # fmt: skip
            outputs.append(f"y{layer}")
            types[f"^n_m{layer}$"] = scheme
    inputs = {"x": ("float32", ["rows", K]), "z": ("float32", ["rows", WIDE])}
    path = save(build(nodes, inputs, " ".join(outputs), weights), tmp_path)
    apq_tvm.compile(path, tmp_path / "guarded", tensor_types=types, target=target)
    cases = [(f"{rows} rows", {"x": [rows, K], "z": [rows, WIDE]}) for rows in ROWS]
    printed = run_guarded(tmp_path / "guarded", preload, cases)
    assert printed.splitlines()[-1] == "whole", printed


def test_reshapes_that_do_not_fit(tmp_path: Path) -> None:
    """As many elements as there are, or an error: only a run knows."""
    nodes = [("Reshape", "x s", "y"), ("Reshape", "z t", "u"), ("Neg", "u", "v")]
    inputs = {"x": ("float32", ["n", "k"]), "z": ("float32", ["m", 4])}
    weights = {"s": np.array([8]), "t": np.array([-1, 8])}
    path = save(build(nodes, inputs, "y v", weights), tmp_path)
    apq_tvm.compile(path, tmp_path / "reshapes", scheme="float")
    module = load_module(tmp_path / "reshapes")
    assert module.run(x=np.ones((2, 4), np.float32), z=np.ones((4, 4), np.float32))["v"].shape == (
        2,
        8,
    )
    for x, m in (((3, 1), 4), ((4, 4), 4), ((8, 1), 3)):
        with pytest.raises(module.InputError, match="do not fit together"):
            module.run(x=np.ones(x, np.float32), z=np.ones((m, 4), np.float32))
