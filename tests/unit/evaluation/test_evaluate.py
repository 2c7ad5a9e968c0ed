"""`apq_tvm.evaluate` on made-up modules: what a row is, what is masked, what is refused."""

from __future__ import annotations

from pathlib import Path

import fake_module
import numpy as np
import pytest

from apq_tvm.errors import BadInput
from apq_tvm.evaluate import Agreement, evaluate, open_session, read_inputs, row_cosine, split
from apq_tvm.evaluation.compare import Calls, Comparison
from apq_tvm.evaluation.runners import call_session
from apq_tvm.module import load_module, read_manifest
from apq_tvm.types import TensorSpec

SPECS = (
    TensorSpec("x", "float32", ("batch", "seq", 4)),
    TensorSpec("attention_mask", "int64", ("batch", "seq")),
)


def batch(rows: int, seq: int, unmasked: int) -> dict[str, np.ndarray]:
    x = np.random.default_rng(rows).standard_normal((rows, seq, 4)).astype(np.float32)
    mask = np.zeros((rows, seq), np.int64)
    mask[:, :unmasked] = 1
    return {"x": x, "attention_mask": mask}


@pytest.fixture
def onnx_model(tmp_path: Path) -> Path:
    pytest.importorskip("onnxruntime")
    return fake_module.write_onnx(tmp_path / "model.onnx")


def save(path: Path, **arrays: np.ndarray) -> Path:
    np.savez(path, **arrays)
    return path


@pytest.mark.parametrize("rows", [1, 31, 32, 33])
def test_equal_outputs_agree_completely(rows: int, tmp_path: Path, onnx_model: Path) -> None:
    module = fake_module.write(tmp_path / "same")
    npz = save(tmp_path / "in.npz", **batch(rows, 5, 3))
    report = evaluate(module, onnx_model, npz)
    assert list(report["outputs"]) == ["y", "z"]
    assert report["calls"] == -(-rows // 32)
    y, z = report["outputs"]["y"], report["outputs"]["z"]
    assert y["cosine_mean"] == pytest.approx(1) and y["cosine_min"] == pytest.approx(1)
    assert y["max_abs_error"] == 0
    assert y["rows"] == rows * 3  # unmasked tokens only
    assert z["rows"] == rows  # one number per token: a row is a sentence


def test_errors_are_measured(tmp_path: Path, onnx_model: Path) -> None:
    module = fake_module.write(tmp_path / "off", error=0.5)
    data = batch(3, 4, 4)
    npz = save(tmp_path / "in.npz", **data)
    y = evaluate(module, onnx_model, npz)["outputs"]["y"]
    reference = 2 * data["x"].reshape(-1, 4).astype(np.float64)
    cosine = row_cosine(reference + 0.5 * (reference > 0), reference)
    assert y["cosine_mean"] == pytest.approx(cosine.mean(), abs=1e-6)
    assert y["cosine_min"] == pytest.approx(cosine.min(), abs=1e-6)
    assert y["max_abs_error"] == pytest.approx(0.5, abs=1e-6)


def test_masked_tokens_do_not_count(tmp_path: Path, onnx_model: Path) -> None:
    module = fake_module.write(tmp_path / "off", error=9.0)
    data = batch(3, 4, 2)
    data["x"][:, :2] = -np.abs(data["x"][:, :2])  # the module errs where x is positive
    npz = save(tmp_path / "in.npz", **data)
    assert evaluate(module, onnx_model, npz)["outputs"]["y"]["max_abs_error"] == 0


def test_ragged_calls(tmp_path: Path, onnx_model: Path) -> None:
    module = fake_module.write(tmp_path / "same")
    arrays = {}
    for call, (rows, seq) in enumerate([(2, 3), (1, 7)]):
        arrays |= {f"{name}__{call}": a for name, a in batch(rows, seq, seq).items()}
    report = evaluate(module, onnx_model, save(tmp_path / "in.npz", **arrays))
    assert report["calls"] == 2
    assert report["outputs"]["y"]["rows"] == 2 * 3 + 7


def test_row_cosine_of_zeros() -> None:
    zero, one = np.zeros((1, 3)), np.ones((1, 3))
    assert row_cosine(zero, zero) == 1
    assert row_cosine(zero, one) == 0
    assert row_cosine(one, -one) == pytest.approx(-1)
    assert row_cosine(np.full((1, 3), np.nan), one) == 0


def test_nan_on_one_side_is_an_error_of_its_own() -> None:
    value = np.ones((2, 3))
    broken = value.copy()
    broken[1, 2] = np.nan
    with pytest.raises(BadInput, match=r"'y'.*NaN or infinity"):
        Agreement("y").add(broken, value, None)


def test_equal_infinities_agree() -> None:
    value = np.array([[1.0, -np.inf], [1.0, 2.0]])
    agreement = Agreement("y")
    agreement.add(value, value, None)
    assert agreement.summary()["max_abs_error"] == 0


def test_relative_error_is_of_all_rows_together() -> None:
    agreement = Agreement("y")
    agreement.add(np.array([[3.0, 4.0]]), np.array([[3.0, 3.0]]), None)
    agreement.add(np.array([[1.0, 0.0]]), np.array([[1.0, 0.0]]), None)
    assert agreement.summary()["relative_error"] == pytest.approx(np.sqrt(1 / 19))


def test_integers_are_equal_or_not() -> None:
    """Neither their distance nor an angle between them means anything; padding does not count."""
    ids, mask = np.array([[5, 900, 0], [7, 8, 9]]), np.array([[1, 1, 0], [1, 1, 1]])
    batch = {"attention_mask": mask, "ids": ids}
    outputs = {"ids": ids, "label": np.array([[3], [4]]), "known": np.array([True, False])}
    ours = {**outputs, "ids": np.array([[5, 901, 77], [7, 8, 9]]), "known": np.array([True, True])}
    comparison = Comparison(Calls((batch,), None, "attention_mask"))
    for _ in range(2):
        comparison.add(batch, outputs, ours)
    found = comparison.summary()["outputs"]
    assert found["ids"] == {"equal": 0.8, "numbers": 10, "max_abs_error": 1, "rows": 4}
    assert found["label"]["equal"] == 1 and found["known"]["equal"] == 0.5
    with pytest.raises(BadInput, match=r"'label' has shape \(1,\).*\(2, 1\)"):
        comparison.add(batch, outputs, {**ours, "label": np.array([3])})


def test_different_shapes_are_refused_by_name() -> None:
    with pytest.raises(BadInput, match=r"'y' has shape \(2, 3\).*\(2, 4\)"):
        Agreement("y").add(np.ones((2, 3)), np.ones((2, 4)), None)


def test_nothing_to_compare_is_agreement() -> None:
    agreement = Agreement("y")
    agreement.add(np.ones((1, 2, 3)), np.ones((1, 2, 3)), np.zeros((1, 2)))
    assert agreement.summary()["rows"] == 0
    assert agreement.summary()["cosine_mean"] == 1


GOOD = batch(2, 3, 3)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({}, "holds no arrays"),
        ({**GOOD, "ids": GOOD["x"]}, r"'ids' is no input of the model; it takes attention_mask, x"),
        ({"x": GOOD["x"]}, "input 'attention_mask' is missing"),
        ({**GOOD, "x": GOOD["x"].astype(np.float64)}, r"'x' is float64, the model takes float32"),
        ({**GOOD, "x": GOOD["x"][0]}, r"'x' has shape \(3, 4\), the model takes 3 dimensions"),
        ({**GOOD, "x": GOOD["x"][..., :3]}, r"'x' dimension 2 is 3, the model takes 4"),
        (
            {**GOOD, "attention_mask": GOOD["attention_mask"][:1]},
            r"'attention_mask' dimension 0 is 1, but 'x' dimension 0 \(batch\) is 2",
        ),
        ({"x__1": GOOD["x"]}, "input 'attention_mask' is missing"),
    ],
)
def test_bad_inputs_are_named(arrays: dict[str, np.ndarray], message: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=message):
        read_inputs(save(tmp_path / "in.npz", **arrays), SPECS)


def test_not_an_npz(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no such file"):
        read_inputs(tmp_path / "absent.npz", SPECS)
    (tmp_path / "text.npz").write_text("hello")
    with pytest.raises(BadInput, match=r"text\.npz is not an npz"):
        read_inputs(tmp_path / "text.npz", SPECS)
    np.save(tmp_path / "one.npy", np.ones(3))
    with pytest.raises(BadInput, match=r"one\.npy is not an npz"):
        read_inputs(tmp_path / "one.npy", SPECS)
    np.savez(tmp_path / "pickled.npz", x=np.array([{}], dtype=object))
    with pytest.raises(BadInput, match=r"pickled\.npz is not an npz"):
        read_inputs(tmp_path / "pickled.npz", SPECS)


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_split_keeps_every_row_in_order(rows: int) -> None:
    data = batch(3, 2, 2)
    parts = list(split(data, SPECS, rows))
    assert max(len(p["x"]) for p in parts) <= rows
    for name, array in data.items():
        np.testing.assert_array_equal(np.concatenate([p[name] for p in parts]), array)


def test_split_leaves_fixed_and_unrelated_dimensions_alone() -> None:
    fixed = (TensorSpec("x", "float32", (3, 2)),)
    data = {"x": np.ones((3, 2), np.float32)}
    assert list(split(data, fixed, 1)) == [data]
    unrelated = (TensorSpec("x", "float32", ("a", 2)), TensorSpec("y", "float32", ("b", 2)))
    both = {"x": data["x"], "y": data["x"]}
    assert list(split(both, unrelated, 1)) == [both]


def test_refusal_of_the_module_is_passed_on(tmp_path: Path, onnx_model: Path) -> None:
    module = fake_module.write(tmp_path / "same")
    npz = save(tmp_path / "in.npz", **batch(51, 2, 2))
    with pytest.raises(BadInput, match="refuses the inputs: input 'x' is too long"):
        evaluate(module, onnx_model, npz, rows=100)


def test_refusal_of_onnxruntime_is_passed_on(tmp_path: Path, onnx_model: Path) -> None:
    with pytest.raises(BadInput, match="ONNX Runtime refuses the inputs"):
        call_session(open_session(onnx_model), {"x": np.zeros((1, 2, 3), np.float32)})


def test_open_session_names_the_file(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    with pytest.raises(BadInput, match=r"absent\.onnx: no such file"):
        open_session(tmp_path / "absent.onnx")
    (tmp_path / "text.onnx").write_text("hello")
    with pytest.raises(BadInput, match=r"cannot open .*text\.onnx"):
        open_session(tmp_path / "text.onnx")


def test_modules_of_one_name_load_side_by_side(tmp_path: Path) -> None:
    first = load_module(fake_module.write(tmp_path / "a" / "same", error=1.0))
    second = load_module(fake_module.write(tmp_path / "b" / "same", error=2.0))
    assert (first.ERROR, second.ERROR) == (1.0, 2.0)
    assert load_module(tmp_path / "a" / "same") is first


def test_what_is_no_module_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no such folder"):
        read_manifest(tmp_path / "absent")
    with pytest.raises(BadInput, match=r"no manifest\.json"):
        read_manifest(tmp_path)
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(BadInput, match="is damaged"):
        read_manifest(tmp_path)
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(BadInput, match="lists no layers"):
        read_manifest(tmp_path)
    (tmp_path / "manifest.json").write_text('{"layers": []}')
    with pytest.raises(BadInput, match=r"no __init__\.py"):
        load_module(tmp_path)
    (tmp_path / "__init__.py").write_text("raise OSError('libx.so is gone')")
    with pytest.raises(BadInput, match=r"does not load: OSError: libx\.so is gone"):
        load_module(tmp_path)
