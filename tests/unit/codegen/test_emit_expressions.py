"""Shape expressions in C mean what they mean in TVM."""

from __future__ import annotations

import ctypes
import itertools
import random
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tvm import tirx
from tvm.sym import Analyzer

from apq_tvm.codegen.graph.c_expr import c_expr
from apq_tvm.codegen.package.folder import COMMON
from apq_tvm.errors import UnsupportedModel

BINARY: tuple[Callable[[Any, Any], Any], ...] = (
    lambda a, b: a + b,
    lambda a, b: a - b,
    lambda a, b: a * b,
    tirx.floordiv,
    tirx.floormod,
    tirx.truncdiv,
    tirx.truncmod,
    tirx.min,
    tirx.max,
    lambda a, b: tirx.Select(a < b, a, b),
    lambda a, b: tirx.Select(tirx.any(a == b, tirx.Not(a >= b)), b, a),
    lambda a, b: tirx.if_then_else(tirx.all(a > 0, b != 1), a, b),
)
POINTS = tuple(itertools.product((-7, -1, 0, 3, 8), repeat=2))


Tree = int | tuple[Callable[[Any, Any], Any], Any, Any]  # 0 and 1 are the symbols, else a constant


def trees(count: int) -> list[Tree]:
    """Random expressions; every operator first occurs alone."""
    rng = random.Random(0)
    made: list[Tree] = [(op, 0, 1) for op in BINARY]
    while len(made) < count:
        leaves: list[Tree] = [0, 1, rng.randint(-5, 5)]
        made.append((rng.choice(BINARY), rng.choice(made + leaves), rng.choice(leaves)))
    return made


def build(tree: Tree, a: Any, b: Any) -> Any:
    """The tree's expression on two operands."""
    if isinstance(tree, int):
        return (a, b)[tree] if tree in (0, 1) else tirx.IntImm("int64", tree)
    op, left, right = tree
    return op(build(left, a, b), build(right, a, b))


def evaluate(tree: Tree, point: tuple[int, int]) -> int | None:
    """TVM's value; None where it divides by zero, which TVM does not define."""
    try:
        result = Analyzer().simplify(build(tree, *(tirx.IntImm("int64", v) for v in point)))
    except Exception as error:  # TVM's error classes are made at run time
        assert "ivi" in str(error), error
        return None
    return int(result.value) if isinstance(result, tirx.IntImm) else None


def test_c_agrees_with_tvm(tmp_path: Path) -> None:
    a, b = tirx.Var("a", "int64"), tirx.Var("b", "int64")
    names = {a: "a", b: "b"}
    made = trees(60)
    lines = ['#include "apq_runtime.h"']
    for i, tree in enumerate(made):
        text = c_expr(build(tree, a, b), names)
        lines.append(f"int64_t e{i}(int64_t a, int64_t b) {{ return {text}; }}")
    source, library = tmp_path / "e.c", tmp_path / "e.so"
    source.write_text("\n".join(lines) + "\n")
    files = [str(source), str(COMMON / "graph_support.c"), str(COMMON / "errors.c")]
    stub = tmp_path / "stub.c"
    stub.write_text('#include "apq_runtime.h"\nvoid apq_set_work(double n) { (void)n; }\n')
    command = ["cc", "-shared", "-fPIC", "-fwrapv", f"-I{COMMON}", *files, str(stub)]
    subprocess.run([*command, "-o", str(library)], check=True)
    loaded = ctypes.CDLL(str(library))
    compared = 0
    for i, tree in enumerate(made):
        function = getattr(loaded, f"e{i}")
        function.restype, function.argtypes = ctypes.c_int64, [ctypes.c_int64] * 2
        for point in POINTS:
            got, wanted = function(*point), evaluate(tree, point)
            if wanted is not None:
                assert got == wanted, f"{build(tree, a, b)} at {point}"
                compared += 1
    assert compared > len(made) * len(POINTS) // 2


def test_division_by_zero_does_not_trap(tmp_path: Path) -> None:
    source, library = tmp_path / "z.c", tmp_path / "z.so"
    source.write_text(
        '#include "apq_runtime.h"\nvoid apq_set_work(double n) { (void)n; }\n'
        "int64_t z(int64_t a, int64_t b) { return apq_floordiv(a, b) + apq_floormod(a, b)\n"
        "    + apq_truncdiv(a, b) + apq_truncmod(a, b); }\n"
    )
    files = [str(source), str(COMMON / "graph_support.c"), str(COMMON / "errors.c")]
    command = ["cc", "-shared", "-fPIC", f"-I{COMMON}", *files, "-o", str(library)]
    subprocess.run(command, check=True)
    z = ctypes.CDLL(str(library)).z
    z.restype, z.argtypes = ctypes.c_int64, [ctypes.c_int64] * 2
    assert z(5, 0) == 0
    assert z(-(1 << 63), -1) != 1  # the one quotient that does not fit


def test_unknown_symbol_is_named() -> None:
    with pytest.raises(UnsupportedModel, match="'hidden' does not follow"):
        c_expr(tirx.Var("hidden", "int64") + 1, {})


def test_unknown_operator_is_named() -> None:
    a = tirx.Var("a", "int64")
    with pytest.raises(UnsupportedModel, match="cannot be written in C"):
        c_expr(tirx.popcount(a), {a: "a"})
