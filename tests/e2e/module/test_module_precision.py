"""Bits chosen at run time, and kernels that take only part of a call's arguments."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from tvm import relax, te, tirx

from apq_tvm.codegen.emit import emit
from apq_tvm.types import Array, TensorSpec, Variant
from tests.e2e.module.helpers import as_scheduled, import_from, symbol, tensor

WIDTHS = (3, 4, 6)
LAYERS = ("block.0", "block.1")


def adding(columns: tuple[int, ...], value: float) -> Any:
    """A kernel that adds its arguments [rows, 4] (weights: [4]) and a number."""
    n = symbol("rows")
    shapes = [(n, 4) if full else (4,) for full in columns]
    given = [te.placeholder(shape, "float32", f"a{i}") for i, shape in enumerate(shapes)]

    def total(i: Any, j: Any) -> Any:
        parts = [a(i, j) if c else a(j) for a, c in zip(given, columns, strict=True)]
        return sum(parts, tirx.const(value, "float32"))

    y = te.compute((n, 4), total, "y")
    return te.create_prim_func([*given, y])


@pytest.fixture(scope="module")
def precise(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """Two layers that each add the bits in use and their weight to x; the weights are 100, 200."""
    n = symbol("n")
    x = tensor("x", (n, 4), "float32")
    params = {f"{layer}.codes": tensor(f"{layer}.codes", (4,), "float32") for layer in LAYERS}
    out = relax.TensorType((n, 4), "float32")
    bb = relax.BlockBuilder()
    with bb.function("main", [x, *params.values()]):
        with bb.dataflow():
            entry = bb.add_func(adding((1, 0), 0.0), "any")
            y: Any = x
            for weight in params.values():
                y = bb.emit(relax.call_tir(entry, [y, weight], out))
            y = bb.emit_output(y)
        bb.emit_func_output(y)
    mod = bb.get()
    for width in WIDTHS:
        mod[f"few{width}"] = adding((1, 0), width)
        mod[f"many{width}"] = adding((1, 0), 1000 * width)
    variants = {
        "any": tuple(
            Variant(m_max, f"{name}{width}", width)
            for width in WIDTHS
            for m_max, name in ((2, "few"), (-1, "many"))
        )
    }
    weights: Mapping[str, Array] = {
        f"{layer}.codes": np.full(4, 100 * (i + 1), np.float32) for i, layer in enumerate(LAYERS)
    }
    scheduled = as_scheduled(
        mod,
        [TensorSpec("x", "float32", ("n", 4))],
        [TensorSpec("y", "float32", ("n", 4))],
        weights,
        variants,
    )
    return import_from(emit(scheduled, tmp_path_factory.mktemp("p") / "precise", {}))


def result(module: ModuleType, rows: int = 1, **how: int) -> float:
    y = module.run(x=np.zeros((rows, 4), np.float32), **how)["y"]
    assert (y == y[0, 0]).all()
    return float(y[0, 0])


def test_most_bits_unless_told_otherwise(precise: ModuleType) -> None:
    assert precise.precisions() == dict.fromkeys(LAYERS, 6)
    assert precise.manifest["precisions"] == {layer: [3, 6] for layer in LAYERS}
    assert result(precise) == 300 + 6 + 6
    assert result(precise, rows=3) == 300 + 6000 + 6000


def test_bits_of_one_run(precise: ModuleType) -> None:
    assert result(precise, bits=3) == 300 + 3 + 3
    assert result(precise, rows=3, bits=4) == 300 + 8000
    assert result(precise) == 300 + 6 + 6


def test_bits_of_all_and_of_some_layers(precise: ModuleType) -> None:
    try:
        precise.set_precision(4)
        assert result(precise) == 308
        precise.set_precision(3, layers=r"\.1$")
        assert precise.precisions() == {"block.0": 4, "block.1": 3}
        assert result(precise) == 307
        assert result(precise, bits=6) == 312
    finally:
        precise.set_precision(6)


@pytest.mark.parametrize("bits", (-1, 1, 2, 7, 100))
def test_bits_out_of_range_are_refused(precise: ModuleType, bits: int) -> None:
    says = f"bits={bits}: layer 'block.0'.* has 3 to 6"
    with pytest.raises(precise.InputError, match=says):
        precise.run(x=np.zeros((1, 4), np.float32), bits=bits)
    with pytest.raises(precise.InputError, match=says):
        precise.set_precision(bits)
    with pytest.raises(precise.InputError, match=says):
        precise.set_precision(bits, layers="0")
    assert precise.precisions() == dict.fromkeys(LAYERS, 6)


def test_layers_that_are_not_there(precise: ModuleType) -> None:
    with pytest.raises(precise.InputError, match=r"'head' matches no layer.*block\.0, block\.1"):
        precise.set_precision(4, layers="head")
    with pytest.raises(precise.InputError, match=r"nearest of 2 are block\.1, block\.0; prec"):
        precise.set_precision(4, layers=r"bl[aeiou]ck/[1]|k\.1/")
    with pytest.raises(precise.InputError, match=r"layers='\(' is no regular expression"):
        precise.set_precision(4, layers="(")


def test_from_c(precise: ModuleType, tmp_path: Path) -> None:
    folder = Path(precise.__file__ or "").parent
    source = tmp_path / "main.c"
    source.write_text("""
#include <stdio.h>
#include "precise.h"
int main(int argc, char **argv) {
  precise_handle *h;
  if (argc < 2 || precise_open(argv[1], &h) != 0) return 1;
  if (precise_set_precision(h, "block.1", 4) != 0) return 2;
  if (precise_precision(h, "block.0") != 6 || precise_precision(h, "block.1") != 4) return 3;
  if (precise_precision(h, "nothing") != 0) return 4;
  if (precise_set_precision(h, "nothing", 4) != PRECISE_BAD_INPUT) return 5;
  puts(precise_last_error());
  precise_close(h);
  return 0;
}
""")
    command = [os.environ.get("CC", "cc"), "-I", folder, source, folder / "libprecise.a"]
    program = tmp_path / "main"
    subprocess.run([*command, "-lm", "-ldl", "-lpthread", "-o", program], check=True)
    done = subprocess.run(
        [program, folder / "weights.safetensors"], capture_output=True, text=True, check=True
    )
    assert done.stdout == "precise has no layer 'nothing' whose bits can be chosen\n"


def test_module_without_choice_refuses_bits(tmp_path: Path) -> None:
    x = tensor("x", (symbol("n"), 4), "float32")
    bb = relax.BlockBuilder()
    with bb.function("main", [x]):
        with bb.dataflow():
            func = bb.add_func(adding((1,), 1.0), "one")
            y = bb.emit_output(relax.call_tir(func, [x], relax.TensorType(x.ty.shape, "float32")))
        bb.emit_func_output(y)
    spec = TensorSpec("x", "float32", ("n", 4)), TensorSpec("y", "float32", ("n", 4))
    module = import_from(emit(as_scheduled(bb.get(), spec[:1], spec[1:]), tmp_path / "fixed", {}))
    with pytest.raises(module.InputError, match="no layer of fixed has bits to choose"):
        module.run(x=np.zeros((1, 4), np.float32), bits=4)
    assert module.precisions() == {}
    with pytest.raises(module.InputError, match=r"no layer of fixed has bits to choose.*anyprec"):
        module.set_precision(4, layers="one")


@pytest.mark.parametrize(("rows", "expected"), [(1, 11.0), (2, 11.0), (3, 102.0)])
def test_variants_take_their_part_of_the_arguments(
    rows: int, expected: float, tmp_path: Path
) -> None:
    """Few rows read one preparation of x, many another; the one not needed does not run."""
    n = symbol("n")
    x = tensor("x", (n, 4), "float32")
    out = relax.TensorType((n, 4), "float32")
    bb = relax.BlockBuilder()
    with bb.function("main", [x]):
        with bb.dataflow():
            ten = bb.emit(relax.call_tir(bb.add_func(adding((1,), 10.0), "ten"), [x], out))
            many = bb.emit(relax.call_tir(bb.add_func(adding((1,), 100.0), "hundred"), [x], out))
            entry = bb.add_func(adding((1, 1), 0.0), "any")
            y = bb.emit_output(relax.call_tir(entry, [ten, many], out))
        bb.emit_func_output(y)
    mod = bb.get()
    mod["few"], mod["more"] = adding((1,), 1.0), adding((1,), 2.0)
    variants = {
        "any": (Variant(2, "few", args=(0, 2)), Variant(-1, "more", args=(1, 2))),
        "ten": (Variant(2, "ten"), Variant(-1, "")),
        "hundred": (Variant(2, ""), Variant(-1, "hundred")),
    }
    spec = TensorSpec("x", "float32", ("n", 4)), TensorSpec("y", "float32", ("n", 4))
    scheduled = as_scheduled(mod, spec[:1], spec[1:], variants=variants)
    module = import_from(emit(scheduled, tmp_path / f"parts{rows}", {}))
    assert (module.run(x=np.zeros((rows, 4), np.float32))["y"] == expected).all()
