"""LSTM, GRU and RNN in all their forms through the whole pipeline, against ONNX Runtime.

One model of all: what is compared is the joined graph, with symbolic lengths and batch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import apq_tvm
from apq_tvm.module import load_module
from tests.onnx_models import build, save, session_of
from tests.recurrent_models import HIDDEN, INPUTS, SIZES, VARIANTS, feeds, joined, weight


@pytest.mark.parametrize(
    "names",
    [
        ["lstm_two", "lstm_peepholes", "gru_late", "rnn"],
        pytest.param(list(VARIANTS), marks=pytest.mark.all_cases),
    ],
    ids=["few", "all"],
)
def test_forms_match_onnxruntime(names: list[str], tmp_path: Path) -> None:
    """What is wrong is listed; the importer's tests have every form."""
    path = save(joined(names), tmp_path)
    apq_tvm.compile(path, tmp_path / "compiled", scheme="float")
    module, session, wrong = load_module(tmp_path / "compiled"), session_of(path), []
    outputs = [output.name for output in session.get_outputs()]
    for steps, batch in SIZES:
        given = feeds(steps, batch)
        got = module.run(given)
        for name, value in zip(outputs, session.run(outputs, given), strict=True):
            assert got[name].shape == value.shape, name
            error = float(np.abs(got[name] - value).max())
            if not error < 2e-5:
                wrong.append(f"{name} at {steps} steps of {batch}: {error:.2g}")
    assert not wrong, "\n".join(wrong)


def test_no_steps_and_no_rows(tmp_path: Path) -> None:
    """Rows without steps end in a state of 0, as ONNX Runtime's do.

    Which is run only where some row has a step: it leaves the cells of an LSTM unwritten where
    there is none, and ends the process at a batch of 0.
    """
    path = save(joined(["lstm_bias_states", "lstm_two", "gru_early_two", "rnn_two"]), tmp_path)
    apq_tvm.compile(path, tmp_path / "compiled", scheme="float")
    module, session = load_module(tmp_path / "compiled"), session_of(path)
    outputs = [output.name for output in session.get_outputs()]
    some = feeds(4, 3) | {"lens": np.int32([0, 4, 0])}
    got = module.run(some)
    for name, value in zip(outputs, session.run(outputs, some), strict=True):
        np.testing.assert_allclose(got[name], value, atol=2e-5, err_msg=name)
    for steps, batch in ((0, 3), (4, 0), (0, 0)):
        given = feeds(4, batch) | {"lens": np.full(batch, steps, np.int32)}
        found = module.run(given | {"x": given["x"][:steps]})
        for name, value in found.items():
            shape = (got[name].shape[-3], batch, HIDDEN)
            assert value.shape == ((steps, *shape) if name.endswith(".y") else shape), name
            assert not value.any(), name


GRUS = ["gru_late", "gru_early_two"]


@pytest.mark.parametrize(
    ("scheme", "names"),
    [
        ("W8A8", ["lstm_two"]),
        pytest.param("W8A8", GRUS, marks=pytest.mark.all_cases),
        pytest.param("anyprec3-4", ["lstm_two", *GRUS], marks=pytest.mark.all_cases),
    ],
)
def test_layers_are_quantized(scheme: str, names: list[str], tmp_path: Path) -> None:
    """Both products of every direction are layers of the scheme, and rows do not see each other."""
    path = save(joined(names), tmp_path)
    compiled = apq_tvm.compile(path, tmp_path / "compiled", scheme=scheme)
    layers = [entry["name"] for entry in compiled.manifest["layers"]]
    assert {name.rpartition(".")[2] for name in layers} >= {"input", "recurrent"}
    module, session = load_module(tmp_path / "compiled"), session_of(path)
    outputs = [output.name for output in session.get_outputs()]
    given = feeds(9, 4)
    got = module.run(given)
    for name, value in zip(outputs, session.run(outputs, given), strict=True):
        a, b = got[name].ravel().astype(np.float64), value.ravel().astype(np.float64)
        assert a @ b / np.sqrt((a @ a) * (b @ b)) > 0.99, name


def test_layout_one(tmp_path: Path) -> None:
    """ONNX Runtime refuses ``layout=1``: it is compared with layout 0 between transposes."""
    nodes: list[Any] = []
    weights = {
        "w": weight(2, 4 * HIDDEN, INPUTS),
        "r": weight(2, 4 * HIDDEN, HIDDEN),
        "b": weight(2, 8 * HIDDEN),
    }
    attrs = {"hidden_size": HIDDEN, "direction": "bidirectional"}
    nodes += [("LSTM", "x w r b _ h0 c0", "y h c", {**attrs, "layout": 1})]
    nodes += [("Transpose", word, f"{word}_t", {"perm": [1, 0, 2]}) for word in ("x", "h0", "c0")]
    nodes += [("LSTM", "x_t w r b _ h0_t c0_t", "y_0 h_0 c_0", attrs)]
    nodes += [("Transpose", "y_0", "y_t", {"perm": [2, 0, 1, 3]})]
    nodes += [("Transpose", f"{w}_0", f"{w}_t", {"perm": [1, 0, 2]}) for w in ("h", "c")]
    inputs = {name: ("float32", ["n", d, k]) for name, d, k in
              (("x", "t", INPUTS), ("h0", 2, HIDDEN), ("c0", 2, HIDDEN))}  # fmt: skip
    path = save(build(nodes, inputs, "y h c y_t h_t c_t", weights), tmp_path)
    apq_tvm.compile(path, tmp_path / "compiled", scheme="float")
    made = {"x": weight(3, 5, INPUTS), "h0": weight(3, 2, HIDDEN), "c0": weight(3, 2, HIDDEN)}
    got = load_module(tmp_path / "compiled").run(made)
    for name in "yhc":
        np.testing.assert_allclose(got[name], got[f"{name}_t"], atol=1e-6)
