"""Bits per weight: every weight a module stores counts, once, in every form it is stored in."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from onnx_models import build, rand, save
from typer.testing import CliRunner

from apq_tvm.cli.main import app
from apq_tvm.onnx_import import import_onnx
from apq_tvm.quantizers import quantize
from apq_tvm.quantizers.stored import Stored, storage
from apq_tvm.types import ImportedModel

VOCABULARY, WIDTH = 40, 32


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ImportedModel:
    """A table that a head shares, a table too small to quantize, a linear layer, a norm."""
    table = rand(VOCABULARY, WIDTH)
    # Of equal arrays the importer keeps one.
    weights = {"table": table, "kinds": rand(2, WIDTH), "w": rand(WIDTH, WIDTH)}
    weights |= {name: rand(WIDTH, seed=i) for i, name in enumerate(("b", "gain", "shift"))}
    nodes = [
        ("Gather", "table ids", "word"),
        ("Gather", "kinds types", "kind"),
        ("Add", "word kind", "x"),
        ("LayerNormalization", "x gain shift", "n", {"axis": -1}),
        ("MatMul", "n w", "m"),
        ("Add", "m b", "h"),
        ("Transpose", "table", "turned", {"perm": [1, 0]}),
        ("MatMul", "h turned", "y"),
    ]
    inputs = {"ids": ("int64", ["n", "s"]), "types": ("int64", ["n", "s"])}
    return import_onnx(save(build(nodes, inputs, "y", weights), tmp_path_factory.mktemp("m")))


FLOATS = (2 + 3) * WIDTH
TABLE, LINEAR = VOCABULARY * WIDTH, WIDTH * WIDTH


def test_every_weight_counts_once(model: ImportedModel) -> None:
    found = storage(quantize(model, "W8A8g32"))
    coded = Stored(TABLE + LINEAR, (TABLE + LINEAR) * 17 // 16)
    assert found.quantized == found.linear == coded
    assert found.embedding == Stored(TABLE, TABLE * 17 // 16)
    assert found.all == Stored(coded.weights + FLOATS, coded.nbytes + 4 * FLOATS)
    assert coded.bits == 8.5 and Stored().bits == 0


def test_a_weight_in_two_forms_takes_the_bits_of_both(model: ImportedModel) -> None:
    """Of the table in 8 bits and its head in floats or in 4 bits both are in the file."""
    split = storage(quantize(model, "W8A8g32", {"n_y": "W4A8g32"}))
    assert split.quantized.weights == TABLE + LINEAR
    assert split.quantized.nbytes == TABLE * (17 + 9) // 16 + LINEAR * 17 // 16
    head = storage(quantize(model, "W8A8g32", {"n_y": "float"}))
    assert head.all == Stored(
        TABLE + LINEAR + FLOATS, (TABLE + LINEAR) * 17 // 16 + 4 * (TABLE + FLOATS)
    )
    assert storage(quantize(model, "float")).all == Stored(
        TABLE + LINEAR + FLOATS, 4 * (TABLE + LINEAR + FLOATS)
    )


def test_a_width_counts_what_it_reads(model: ImportedModel) -> None:
    quantized = quantize(model, "anyprec3-6s", {"word": "float"})
    assert 32 > storage(quantized).all.bits > storage(quantized, 3).all.bits
    floats = 4 * (TABLE + FLOATS)
    assert storage(quantized, 3).all.nbytes == floats + storage(quantized, 3).linear.nbytes


def test_a_float_convolution_has_32_bits(tmp_path: Path) -> None:
    """The command said 0.0: layers of `layers` alone were counted, and there is none."""
    weights = {"w": rand(8, 4, 1, 1), "shape": np.array([1, -1])}
    nodes = [("Conv", "x w", "c"), ("Reshape", "c shape", "y")]
    path = save(build(nodes, {"x": ("float32", [1, 4, 5, 5])}, "y", weights), tmp_path)
    words = ["compile", str(path), "--dry-run", "--target", "znver3"]
    report = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)
    assert report["bits_per_weight"] == 32 and report["quantized_bits_per_weight"] == 0
    assert report["stored"]["weights"] == 32
    text = CliRunner().invoke(app, words).stdout
    assert "32.0 bits per weight (no layer is quantized); nothing was written" in text
