"""Scores of language models, against figures computed by hand."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from apq_tvm.errors import BadInput
from apq_tvm.evaluation.compare import Calls, Comparison, read_calls
from apq_tvm.evaluation.language import (
    Language,
    LanguageScore,
    find_logits,
    find_tokens,
    log_softmax,
    predicted,
    windows,
)
from apq_tvm.types import TensorSpec

IDS = TensorSpec("input_ids", "int64", ("batch", "seq"))
MASK = TensorSpec("attention_mask", "int64", ("batch", "seq"))


def logs(*shares: float) -> np.ndarray:
    return np.log(np.array(shares, np.float32))


def test_perplexity_of_equal_chances_is_their_number() -> None:
    score = LanguageScore()
    logits = np.full((5, 12), 3.5, np.float32)
    score.add(logits, logits, np.arange(5))
    summary = score.summary()
    assert summary["perplexity"] == pytest.approx(12, rel=1e-6)
    assert summary["float_perplexity"] == pytest.approx(12, rel=1e-6)
    assert summary["ratio"] == 1
    assert summary["kl_mean"] == summary["kl_max"] == 0
    assert summary["top1"] == 1
    assert summary["tokens"] == 5


def test_perplexity_and_divergence_by_hand() -> None:
    reference = np.stack([logs(0.5, 0.5), logs(0.8, 0.2)]) + 7  # logits may be shifted
    ours = np.stack([logs(0.9, 0.1), logs(0.2, 0.8)]) - 2
    score = LanguageScore()
    score.add(reference, ours, np.array([0, 0]))
    summary = score.summary()
    kl = (
        0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1),
        0.8 * math.log(0.8 / 0.2) + 0.2 * math.log(0.2 / 0.8),
    )
    assert summary["kl_mean"] == pytest.approx(sum(kl) / 2, rel=1e-5)
    assert summary["kl_max"] == pytest.approx(max(kl), rel=1e-5)
    assert summary["float_perplexity"] == pytest.approx((0.5 * 0.8) ** -0.5, rel=1e-5)
    assert summary["perplexity"] == pytest.approx((0.9 * 0.2) ** -0.5, rel=1e-5)
    assert summary["top1"] == 0.5


def test_scores_do_not_depend_on_chunks() -> None:
    rng = np.random.default_rng(0)
    reference = rng.standard_normal((150, 20)).astype(np.float32)
    ours = reference + rng.standard_normal((150, 20)).astype(np.float32)
    targets = rng.integers(0, 20, 150)
    whole, parts = LanguageScore(), LanguageScore()
    whole.add(reference, ours, targets)
    for start in range(0, 150, 7):
        part = slice(start, start + 7)
        parts.add(reference[part], ours[part], targets[part])
    for key, value in whole.summary().items():
        assert parts.summary()[key] == pytest.approx(value, rel=1e-6)


def test_tokens_that_the_float_model_rules_out_count_nothing() -> None:
    score = LanguageScore()
    reference = np.array([[0.0, -np.inf, 0.0]], np.float32)
    score.add(reference, np.zeros((1, 3), np.float32), np.array([0]))
    assert score.summary()["kl_mean"] == pytest.approx(math.log(3 / 2), rel=1e-5)


@pytest.mark.parametrize(
    ("reference", "ours", "targets", "message"),
    [
        (np.zeros((1, 3)), np.zeros((1, 4)), [0], "two models"),
        (np.zeros((1, 3)), np.zeros((1, 3)), [3], "token 3 is outside the vocabulary of 3"),
        (np.zeros((1, 3)), np.zeros((1, 3)), [-1], "token -1 is outside"),
        (np.zeros((1, 3)), np.full((1, 3), np.nan), [0], "quantized model gives NaN"),
        (np.full((1, 3), np.inf), np.zeros((1, 3)), [0], "float model gives NaN or infinite"),
    ],
)
def test_bad_logits_are_refused(
    reference: np.ndarray, ours: np.ndarray, targets: list[int], message: str
) -> None:
    with pytest.raises(BadInput, match=message):
        LanguageScore().add(reference, ours, np.array(targets))


def test_no_token_and_no_chance_are_refused() -> None:
    with pytest.raises(BadInput, match="2 unmasked tokens"):
        LanguageScore().summary()
    score = LanguageScore()
    score.add(np.zeros((1, 2)), np.array([[-np.inf, 0.0]]), np.array([0]))
    with pytest.raises(BadInput, match="no chance at all"):
        score.summary()


def test_log_softmax_does_not_overflow() -> None:
    x = log_softmax(np.array([[1e4, 1e4]], np.float32), "x")
    np.testing.assert_allclose(x, math.log(0.5), rtol=1e-6)


@pytest.mark.parametrize("length", [2, 3, 4, 9, 10, 11, 100])
def test_windows_cover_tokens_once(length: int) -> None:
    ids = np.arange(30, dtype=np.int64).reshape(3, 10)
    mask = np.ones_like(ids)
    parts = list(windows({"input_ids": ids, "attention_mask": mask}, (IDS, MASK), IDS, length))
    assert all(p["input_ids"].shape == p["attention_mask"].shape for p in parts)
    assert all(2 <= p["input_ids"].shape[1] <= length for p in parts)
    seen = np.concatenate([p["input_ids"].reshape(-1) for p in parts])
    dropped = 3 if length < 10 and 10 % length == 1 else 0  # a rest of one token predicts nothing
    assert len(np.unique(seen)) == len(seen) == 30 - dropped


def test_windows_leave_other_inputs_whole() -> None:
    past = TensorSpec("past", "float32", ("batch", 2, "past", 4))
    batch = {"input_ids": np.zeros((1, 6), np.int64), "past": np.zeros((1, 2, 3, 4), np.float32)}
    parts = list(windows(batch, (IDS, past), IDS, 4))
    assert [p["input_ids"].shape for p in parts] == [(1, 4), (1, 2)]
    assert all(p["past"].shape == (1, 2, 3, 4) for p in parts)


def test_a_fixed_sequence_needs_its_window() -> None:
    fixed = TensorSpec("input_ids", "int64", (1, 8))
    batch = {"input_ids": np.zeros((1, 8), np.int64)}
    assert len(list(windows(batch, (fixed,), fixed, 8))) == 1
    with pytest.raises(BadInput, match="exactly; say --window 8"):
        list(windows(batch, (fixed,), fixed, 4))


def test_predicted_tokens_are_unmasked_and_follow_unmasked_ones() -> None:
    ids = np.zeros((1, 5), np.int64)
    assert predicted(ids, None).sum() == 4
    assert predicted(ids, np.array([[1, 1, 0, 1, 1]])).tolist() == [[True, False, False, True]]


def test_token_ids_are_found() -> None:
    other = TensorSpec("token_type_ids", "int64", ("batch", "seq"))
    assert find_tokens((MASK, IDS, other)) == IDS
    assert find_tokens((MASK, other)) == other
    assert find_tokens((IDS, other), "token_type_ids") == other
    with pytest.raises(BadInput, match="Say --tokens NAME; the model takes attention_mask"):
        find_tokens((MASK,))
    with pytest.raises(BadInput, match="'x' is no input of token ids"):
        find_tokens((IDS,), "x")


def test_logits_are_found() -> None:
    ids = np.full((2, 3), 9)
    good, hidden, pooled = np.zeros((2, 3, 10)), np.zeros((2, 3, 9)), np.zeros((2, 10))
    assert find_logits({"h": hidden, "y": good, "p": pooled}, ids) == "y"
    assert find_logits({"a": good, "y": good}, ids, "y") == "y"
    with pytest.raises(BadInput, match="several outputs can be logits"):
        find_logits({"a": good, "y": good}, ids)
    with pytest.raises(BadInput, match=r"no output can be logits.*up to 9.*h \[2, 3, 9\]"):
        find_logits({"h": hidden}, ids)
    with pytest.raises(BadInput, match=r"output 'p' \[2, 10\] holds no logits"):
        find_logits({"p": pooled, "y": good}, ids, "p")
    with pytest.raises(BadInput, match="no output 'z'"):
        find_logits({"y": good}, ids, "z")


def test_too_few_tokens_and_nan_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "in.npz", input_ids=np.zeros((2, 5), np.int64))
    language = Language(window=4, min_tokens=7)
    with pytest.raises(BadInput, match="has 6 predicted tokens in windows of 4, 7 or more"):
        read_calls(tmp_path / "in.npz", (IDS,), 32, language)
    with pytest.raises(BadInput, match="predict nothing"):
        read_calls(tmp_path / "in.npz", (IDS,), 32, Language(window=1))
    np.savez(tmp_path / "nan.npz", x=np.full((1, 2), np.nan, np.float32))
    with pytest.raises(BadInput, match="'x' holds NaN or infinity"):
        read_calls(tmp_path / "nan.npz", (TensorSpec("x", "float32", ("b", 2)),), 32, None)


def test_comparison_scores_unmasked_tokens_and_other_outputs() -> None:
    ids = np.array([[1, 2, 0, 1]])
    batch = {"input_ids": ids, "attention_mask": np.array([[1, 1, 1, 0]])}
    logits = np.zeros((1, 4, 3), np.float32)
    logits[0, 3] = np.nan  # masked
    outputs = {"logits": logits, "pooled": np.ones((1, 2), np.float32)}
    comparison = Comparison(Calls((batch,), Language("input_ids"), "attention_mask"))
    comparison.add(batch, outputs, outputs)
    summary = comparison.summary()
    assert summary["language"]["tokens"] == 2
    assert summary["language"]["perplexity"] == pytest.approx(3)
    assert summary["language"]["logits"] == "logits"
    assert list(summary["outputs"]) == ["pooled"]
    with pytest.raises(BadInput, match="no output 'pooled'"):
        comparison.add(batch, outputs, {"logits": logits})
