"""Rotated queries and keys are computed where attention and caches read them: the same results, to
the bit, as by functions of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from onnx_models import build, save
from small_llama import CONFIG, small_llama
from tvm import te

import apq_tvm
from apq_tvm import lower
from apq_tvm.codegen.build.toolchain import find_toolchain
from apq_tvm.errors import NotApplicable
from apq_tvm.module import load_module
from apq_tvm.schedules.graph.attention.made import Made
from apq_tvm.tune.api import plan_of
from apq_tvm.tune.functions.graph import FunctionWorkshop, extract_functions
from apq_tvm.tune.local import Local
from apq_tvm.tune.measure import OK, Bench
from apq_tvm.tune.program import Linker
from apq_tvm.tune.space import covering

RNG = np.random.default_rng(3)
HEADS, WIDTH, POSITIONS = 4, 16, 10


def rotated(name: str, pairs: str) -> list[Any]:
    """``{name}_first`` [B, N, S, H] turned: Su et al., arXiv:2104.09864, as files spell it."""
    x, y = f"{name}_first", f"{name}_turned"
    if pairs == "halves":
        return [
            ("Split", x, f"{name}_a {name}_b", {"axis": -1, "num_outputs": 2}),
            ("Neg", f"{name}_b", f"{name}_c"),
            ("Concat", f"{name}_c {name}_a", f"{name}_d", {"axis": -1}),
            ("Mul", f"{x} cos", f"{name}_e"),
            ("Mul", f"{name}_d sin", f"{name}_f"),
            ("Add", f"{name}_e {name}_f", y),
        ]
    if pairs == "neighbours":
        return [
            ("Slice", f"{x} zero width last two", f"{name}_a"),
            ("Slice", f"{x} one width last two", f"{name}_b"),
            ("Neg", f"{name}_b", f"{name}_c"),
            *[("Unsqueeze", f"{name}_{n} last", f"{name}_{n}1") for n in "ac"],
            ("Concat", f"{name}_c1 {name}_a1", f"{name}_d1", {"axis": -1}),
            ("Reshape", f"{name}_d1 same", f"{name}_d"),
            ("Mul", f"{x} cos", f"{name}_e"),
            ("Mul", f"{name}_d sin", f"{name}_f"),
            ("Add", f"{name}_e {name}_f", y),
        ]
    return [("Mul", f"{x} cos", y)]


def encoder(folder: Path, pairs: str, tokens: int | str = POSITIONS) -> Path:
    """q, k and v of one x, the first two turned, and what attention makes of them."""
    weights: dict[str, Any] = {
        n: (RNG.standard_normal((64, 64)) / 8).astype(np.float32) for n in "qkv"
    }
    nodes = [
        *[("MatMul", f"x {n}", f"{n}_flat") for n in "qkv"],
        *[("Reshape", f"{n}_flat heads", f"{n}_heads") for n in "qkv"],
        *[("Transpose", f"{n}_heads", f"{n}_first", {"perm": [0, 2, 1, 3]}) for n in "qkv"],
        *rotated("q", pairs),
        *rotated("k", pairs),
        ("Transpose", "k_turned", "k_last", {"perm": [0, 1, 3, 2]}),
        ("MatMul", "q_turned k_last", "scores"),
        ("Softmax", "scores", "weighing", {"axis": -1}),
        ("MatMul", "weighing v_first", "y"),
    ]
    numbers = {"zero": [0], "one": [1], "two": [2], "last": [-1], "width": [WIDTH]}
    weights |= {name: np.array(value) for name, value in numbers.items()}
    weights |= {"heads": np.array([0, 0, HEADS, WIDTH]), "same": np.array([0, 0, 0, WIDTH])}
    angles = np.linspace(0, 3, POSITIONS * WIDTH, dtype=np.float32).reshape(POSITIONS, WIDTH)
    weights |= {"cos": np.cos(angles), "sin": np.sin(angles)}
    if tokens != POSITIONS:
        weights |= {"all_cos": weights.pop("cos"), "all_sin": weights.pop("sin")}
        nodes = [
            ("Shape", "x", "length", {"start": 1, "end": 2}),
            *[("Slice", f"all_{n} zero length zero", n) for n in ("cos", "sin")],
            *nodes,
        ]
    words = {word for node in nodes for word in node[1].split()}
    used = {name: array for name, array in weights.items() if name in words}
    return save(build(nodes, {"x": ("float32", ["b", tokens, 64])}, "y", used, opset=18), folder)


def both(path: Path, folder: Path, patch: pytest.MonkeyPatch, **options: Any) -> tuple[Any, Any]:
    """A module that computes them where they are read, and one that does not."""
    apq_tvm.compile(path, folder / "together", **options)
    with patch.context() as patched:
        patched.setattr(lower, "where_read", tvm.transform.Sequential([]))
        apq_tvm.compile(path, folder / "apart", **options)
    together, apart = (load_module(folder / name) for name in ("together", "apart"))
    return together, apart


def functions(module: Any) -> int:
    """How many there are beside linear layers."""
    return len(module.manifest["functions"])


@pytest.mark.parametrize("pairs", ["halves", "neighbours", "scaled"])
def test_an_encoder(pairs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    together, apart = both(encoder(tmp_path, pairs), tmp_path, monkeypatch, scheme="float")
    assert functions(together) <= functions(apart)
    for batch in (1, 3):
        x = RNG.standard_normal((batch, POSITIONS, 64)).astype(np.float32)
        np.testing.assert_array_equal(together.run(x=x)["y"], apart.run(x=x)["y"])


@pytest.mark.parametrize(
    "kv", ["f32", pytest.param("f16", marks=pytest.mark.all_cases), "i8", "i4"]
)
def test_sessions(kv: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = small_llama(tmp_path / "llama.onnx")
    modules = both(path, tmp_path, monkeypatch, scheme="float", kv=kv)
    assert functions(modules[0]) < functions(modules[1])  # q's is not k's: heads share keys
    ids = RNG.integers(0, CONFIG.vocabulary, (2, 40))
    first, second = (module.session(40, batch=2) for module in modules)
    for tokens in (ids[:, :21], ids[:, 21:22], ids[:, 22:]):
        np.testing.assert_array_equal(first.prefill(tokens), second.prefill(tokens))


def test_what_is_more_than_an_expression_is_refused() -> None:
    x = te.placeholder((4, 8), name="x")
    axis = te.reduce_axis((0, 8))
    summed = te.compute((4,), lambda i: te.sum(x[i, axis], axis=axis))
    twice = te.compute((4, 8), lambda i, j: x[i, j] * summed[i])
    many = te.compute((4, 8), lambda i, j: sum((x[i, (j + n) % 8] for n in range(20)), x[i, j]))
    for y in (summed, twice, many):
        with pytest.raises(NotApplicable):
            Made.of(te.create_prim_func([x, y]))
    plain = te.compute((4, 8), lambda i, j: x[i, j] + x[i, 7 - j])
    made = Made.of(te.create_prim_func([x, plain]))
    assert len(made.inputs) == 1 and [int(n) for n in made.shape] == [4, 8]


def test_tables_are_not_read_past_their_end(tmp_path: Path) -> None:
    apq_tvm.compile(encoder(tmp_path, "halves", "s"), tmp_path / "m", scheme="float")
    module = load_module(tmp_path / "m")
    assert module.run(x=np.ones((1, POSITIONS, 64), np.float32))["y"].shape[2] == POSITIONS
    with pytest.raises(module.InputError, match="10"):
        module.run(x=np.ones((1, POSITIONS + 1, 64), np.float32))


def test_candidates_of_the_tuner_are_right(tmp_path: Path) -> None:
    (plan,) = plan_of(small_llama(tmp_path / "llama.onnx"), "host", "float")
    tasks = extract_functions(plan, {"batch": 2, "sequence": 5, "past": 20})
    (task,) = (task for task in tasks if task.kernel == "attention")
    points, linker = task.space().points, Linker(find_toolchain(), tmp_path)
    workshop = FunctionWorkshop(task, tmp_path, threads=1)
    bench = Bench(workshop, linker, Local(), tmp_path, points[0])
    made = bench.trials(covering(points)[1:4], rounds=1)
    assert {trial.status for trial in made} == {OK}, made
