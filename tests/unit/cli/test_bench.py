"""Timing, rivals and shapes of benchmarks; nothing is timed here, only the arithmetic of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import fake_module
import numpy as np
import pytest

from apq_tvm.bench import rivals, roofline
from apq_tvm.bench.linear import LinearCase, write_model
from apq_tvm.bench.memory import measure_memory
from apq_tvm.bench.model import make_inputs, resolve_dims
from apq_tvm.bench.roofline import Limits
from apq_tvm.bench.timing import COLD_BYTES, Candidate, cold_copies, interleave
from apq_tvm.errors import BadInput
from apq_tvm.types import TensorSpec

INT8_ROUNDING = 0.01  # mean error of int8 activations, relative to the result
FLOAT_ROUNDING = 1e-5


class FakeClock:
    """Time that passes only when a candidate says so."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls: list[str] = []

    def __call__(self) -> float:
        return self.now

    def candidate(self, name: str, costs: list[float], calls: int = 1) -> Candidate:
        """A candidate whose n-th run costs ``costs[n]`` seconds per repeat, then the last one."""
        count = 0

        def run(repeats: int) -> None:
            nonlocal count
            self.now += costs[min(count, len(costs) - 1)] * repeats
            self.calls.append(name)
            count += 1

        return Candidate(run, calls)


def test_interleave_takes_turns_and_the_minimum() -> None:
    clock = FakeClock()
    # two untimed runs, then rounds: one disturbed, one undisturbed, ...
    slow = clock.candidate("slow", [0.5, 0.5, 0.9, 0.5, 0.7, 0.5, 0.6])
    fast = clock.candidate("fast", [0.25], calls=5)
    result = interleave({"slow": slow, "fast": fast}, budget_s=0, min_rounds=5, clock=clock)
    assert clock.calls[4:] == ["slow", "fast"] * 5
    assert result["slow"].us == pytest.approx(0.5e6)
    assert result["slow"].noise == pytest.approx(0.6 / 0.5 - 1)
    assert result["fast"].us == pytest.approx(0.25e6 / 5)
    assert result["fast"].noise == pytest.approx(0)
    assert result["fast"].rounds == 5


def test_interleave_repeats_short_work_and_stops_at_the_budget() -> None:
    clock = FakeClock()
    result = interleave({"short": clock.candidate("short", [1e-6])}, budget_s=0.01, clock=clock)
    assert result["short"].us == pytest.approx(1.0)
    assert 5 <= result["short"].rounds <= 7


@pytest.mark.parametrize("nbytes", [1, COLD_BYTES // 2 - 1, COLD_BYTES // 2, COLD_BYTES, 10**10])
def test_cold_copies_exceed_the_cache(nbytes: int) -> None:
    copies = cold_copies(nbytes)
    assert copies >= 2
    assert copies * nbytes >= COLD_BYTES


def test_limit_share_names_what_binds() -> None:
    limits = Limits(1, read_gbs=10.0, int8_gmacs=100.0, fp32_gmacs=50.0, int8_instruction="x")
    assert limits.share(us=200, nbytes=10**6, macs=10**6, integer=True) == (0.5, "memory")
    assert limits.share(us=200, nbytes=0, macs=10**7, integer=True) == (0.5, "compute")
    assert limits.share(us=200, nbytes=0, macs=10**7, integer=False) == (1.0, "compute")


def test_best_of_limits_takes_every_maximum() -> None:
    first, second = Limits(1, 10.0, 50.0, 30.0, "x"), Limits(1, 9.0, 60.0, 20.0, "x")
    assert first.best_of(second) == second.best_of(first) == Limits(1, 10.0, 60.0, 30.0, "x")


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("k", [8, 16, 64])
def test_pack_bits_is_low_bits_first(bits: int, k: int) -> None:
    codes = np.random.default_rng(k).integers(0, 2**bits, (3, k), dtype=np.uint8)
    packed = rivals.pack_bits(codes, bits)
    assert packed.shape == (3, k * bits // 8)
    per_byte = 8 // bits
    for j in range(k):
        decoded = (packed[:, j // per_byte] >> (bits * (j % per_byte))) & (2**bits - 1)
        np.testing.assert_array_equal(decoded, codes[:, j])


@pytest.mark.parametrize("key", list(rivals.RIVALS))
@pytest.mark.parametrize("cold", [False, True], ids=["warm", "cold"])
def test_rival_computes_its_own_codes(
    key: str, cold: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("onnxruntime")
    monkeypatch.setattr("apq_tvm.bench.rivals.cold_copies", lambda _: 3)
    rng = np.random.default_rng(1)
    weight = rng.standard_normal((48, 160)).astype(np.float32)
    x = rng.standard_normal((5, 160)).astype(np.float32)
    built = rivals.RivalLayer(rivals.RIVALS[key], weight, threads=1, cold=cold)
    assert built.copies == (3 if cold else 1)
    mean, _ = rivals.relative_error(built.output(x), x, built.layer.weight)
    rounds_to_int8 = "accuracy_level 4" in built.name or "int8" in built.name
    assert mean < (INT8_ROUNDING if rounds_to_int8 else FLOAT_ROUNDING)
    candidate = built.candidate(x)
    candidate.run(2)
    assert candidate.calls == built.copies


def test_relative_error_is_relative_to_the_result() -> None:
    weight = np.eye(4)
    x = np.full((2, 4), 2.0, np.float32)
    assert rivals.relative_error(x, x, weight) == (0.0, 0.0)
    y = x.copy()
    y[0, 0] = 3
    assert rivals.relative_error(y, x, weight) == pytest.approx((1 / 8 / 2, 0.5))


def test_saturation_is_noticed() -> None:
    pytest.importorskip("onnxruntime")
    exact = rivals.float32()
    assert not rivals.saturates(exact)

    def half(weight: np.ndarray) -> rivals.Layer:
        layer = exact.quantize(weight)
        return rivals.Layer({"w": layer.arrays["w"] / 2}, layer.weight)

    assert rivals.saturates(rivals.Rival("loses half", half, exact.nodes))


@pytest.mark.parametrize(
    ("bits", "name"),
    [(1, "ort-w2-b128"), (3, "ort-w4-b128"), (4, "ort-w4-b128"), (8, "ort-w8-b128"),
     (32, "ort-fp32")],
)  # fmt: skip
def test_onnxruntime_means_the_strongest_of_the_same_size(bits: int, name: str) -> None:
    assert rivals.parse_against("onnxruntime", bits) == [rivals.RIVALS[name]]


def test_against_takes_lists_without_repeats() -> None:
    parsed = rivals.parse_against("ort-w4-b32, onnxruntime,ort-w4-b32", 4)
    assert [r.name for r in parsed] == [
        "onnxruntime MatMulNBits W4 block 32 accuracy_level 4",
        "onnxruntime MatMulNBits W4 block 128 accuracy_level 4",
    ]
    assert rivals.parse_against(rivals.EVERY, 4) == list(rivals.RIVALS.values())


def test_unknown_rival_is_named_with_the_known_ones() -> None:
    with pytest.raises(BadInput, match=r"'tflite'.*onnxruntime, onnxruntime-all, ort-w2-b128"):
        rivals.parse_against("onnxruntime,tflite", 4)


def test_written_model_is_one_matmul(tmp_path: Path) -> None:
    ort = pytest.importorskip("onnxruntime")
    weight = np.random.default_rng(0).standard_normal((6, 10)).astype(np.float32)
    write_model(tmp_path / "m.onnx", weight)
    x = np.ones((3, 10), np.float32)
    (y,) = ort.InferenceSession(str(tmp_path / "m.onnx")).run(None, {"x": x})
    np.testing.assert_allclose(y, x @ weight.T, rtol=1e-5, atol=1e-5)
    assert LinearCase(6, 10, 1, "W4A8g32", 1).shape == "6x10"


TOKENS = (
    TensorSpec("input_ids", "int64", ("batch_size", "sequence_length")),
    TensorSpec("attention_mask", "int64", ("batch_size", "sequence_length")),
    TensorSpec("token_type_ids", "int64", ("batch_size", "sequence_length")),
    TensorSpec("features", "float32", ("batch_size", 7)),
)


def test_made_up_inputs_fit_their_names() -> None:
    dims = resolve_dims(TOKENS, 2, 5, {})
    assert dims == {"batch_size": 2, "sequence_length": 5}
    made = make_inputs(TOKENS, dims)
    assert {n: (a.shape, str(a.dtype)) for n, a in made.items()} == {
        "input_ids": ((2, 5), "int64"),
        "attention_mask": ((2, 5), "int64"),
        "token_type_ids": ((2, 5), "int64"),
        "features": ((2, 7), "float32"),
    }
    assert made["attention_mask"].all()
    assert not made["token_type_ids"].any()
    assert 0 < made["input_ids"].min() <= made["input_ids"].max() < 1000


@pytest.mark.parametrize(
    ("given", "message"),
    [({}, r"how large is dimension 'width'.*--dims width=SIZE"),
     ({"height": 3}, r"no dimension 'height'; it has batch_size, width")],
)  # fmt: skip
def test_dimensions_are_asked_for_by_name(given: dict[str, int], message: str) -> None:
    specs = (TensorSpec("x", "float32", ("batch_size", "width")),)
    with pytest.raises(BadInput, match=message):
        resolve_dims(specs, 1, 1, given)
    assert resolve_dims(specs, 4, 1, {"width": 9}) == {"batch_size": 4, "width": 9}


def test_repeats_reach_the_candidate() -> None:
    seen: list[int] = []
    run: Callable[[int], None] = seen.append
    clock = FakeClock()
    interleave({"a": Candidate(run)}, budget_s=0, min_rounds=2, max_rounds=2, clock=clock)
    assert seen[:2] == [1, 1]  # untimed: the second tells how many repeats make a sample
    repeats = seen[3]
    assert repeats > 1
    assert seen[2:] == [1, repeats, 1, repeats]


@pytest.mark.isa("avx2")
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("ahead", roofline.PREFETCH_BYTES)
def test_bandwidth_probe_reads_every_byte(threads: int, ahead: int) -> None:
    words = np.random.default_rng(0).integers(0, 2**62, 1024, dtype=np.uint64)
    lib = roofline.library()
    total = lib.apq_read(words.ctypes.data, words.nbytes, threads, ahead)
    assert total == int(words.sum()) % 2**64
    total = lib.apq_read_again(words.ctypes.data, words.nbytes, threads, 3)
    assert total == 3 * int(words.sum()) % 2**64


@pytest.mark.isa("avx2")
def test_arithmetic_probes_count_what_they_do() -> None:
    lib = roofline.library()
    assert lib.apq_int8_macs(10) % (8 * 32) == 0 and lib.apq_fp32_macs(10) % (8 * 8) == 0
    # 3 * 5 per byte pair, 4 bytes in an int32 lane, 8 accumulators of which one lane is returned
    assert lib.apq_int8(10, 1) == 10 * 8 * 4 * 3 * 5
    lanes = lib.apq_fp32_macs(10) / 10 / 8
    assert lib.apq_fp32(10, 2) == 2 * 10 * 8 * lanes * 0.5 * 0.25


def test_memory_of_a_run(tmp_path: Path) -> None:
    module = fake_module.write(tmp_path / "fake")
    (module / "weights.safetensors").write_bytes(bytes(100))
    call = {"x": np.ones((2, 3, 4), np.float32), "attention_mask": np.ones((2, 3), np.int64)}
    found = measure_memory(module, call, threads=1)
    assert found["weight_bytes"] == 100
    assert found["output_bytes"] == 2 * 3 * 4 * 4 + 2 * 3 * 8
    assert (found["arena"], found["live"]) == (2000, 1000)
    assert found["overhead"] == (found["peak_rss_bytes"] - found["output_bytes"]) / 1000
    assert found["weights_read"] == 0  # nobody maps the file
    with pytest.raises(BadInput, match=r"process of its own: .*KeyError: 'attention_mask'"):
        measure_memory(module, {"x": call["x"]}, threads=1)
