"""Benchmarks of decoders: tensors told apart, turns taken, rivals asked. Nothing is timed here."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from apq_tvm.bench.generate import llama
from apq_tvm.bench.generate.decoder import find_ports
from apq_tvm.bench.generate.generate import entries_of, row
from apq_tvm.bench.generate.ours import SessionDecoder, has_sessions, weight_bytes
from apq_tvm.bench.generate.turns import Entry, Sampled, busy_neighbour, take_turns
from apq_tvm.bench.generate.worker import Timed, prompt
from apq_tvm.cli.generate import table_rows
from apq_tvm.errors import BadInput, MissingPackage
from apq_tvm.types import TensorSpec

IDS = TensorSpec("input_ids", "int64", ("batch", "sequence"))
LOGITS = TensorSpec("logits", "float32", ("batch", "sequence", 40))


def cache(name: str, grows: str = "past") -> TensorSpec:
    return TensorSpec(name, "float32", ("batch", 2, grows, 16))


# ---- ports ----


def test_caches_are_paired_by_name() -> None:
    past = [cache(f"past_key_values.0.{kind}") for kind in ("key", "value")]
    present = [cache(f"present.0.{kind}", "total") for kind in ("value", "key")]
    mask = TensorSpec("attention_mask", "int64", ("batch", "total"))
    positions = TensorSpec("position_ids", "int64", ("batch", "sequence"))
    ports = find_ports([IDS, mask, positions, *past], [LOGITS, *present])
    assert [name for _, name in ports.caches] == ["present.0.key", "present.0.value"]
    assert ports.axis == 2
    feeds = ports.feeds([5, 6], past=3)
    assert feeds["attention_mask"].tolist() == [[1] * 5]
    assert feeds["position_ids"].tolist() == [[3, 4]]
    assert feeds["input_ids"].tolist() == [[5, 6]]
    assert ports.empty(past[0]).shape == (1, 2, 0, 16)
    assert ports.cache_bytes(10) == 2 * 2 * 10 * 16 * 4


def test_caches_are_paired_by_order_where_names_say_nothing() -> None:
    ports = find_ports([IDS, cache("pk"), cache("pv")], [LOGITS, cache("ok"), cache("ov")])
    assert [(spec.name, name) for spec, name in ports.caches] == [("pk", "ok"), ("pv", "ov")]


@pytest.mark.parametrize(
    ("inputs", "outputs", "message"),
    [
        ([IDS], [LOGITS], "no decoder with a cache: it takes input_ids"),
        ([IDS, cache("past")], [LOGITS], "takes 1 caches and gives 0"),
        (
            [IDS, cache("past"), TensorSpec("pixels", "float32", (1, 3))],
            [LOGITS, cache("present")],
            "input 'pixels' is neither",
        ),
        ([IDS, cache("past", "batch")], [LOGITS, cache("present")], "which axis of past"),
    ],
    ids=["no cache", "cache is lost", "unknown input", "no axis"],
)
def test_what_is_no_decoder_is_refused(
    inputs: list[TensorSpec], outputs: list[TensorSpec], message: str
) -> None:
    with pytest.raises(BadInput, match=message):
        find_ports(inputs, outputs)


def test_tables_that_are_looked_up_are_not_read() -> None:
    table = {"op": "apq.Embedding", "bytes": 800}
    head, other = {"op": "apq.Linear", "bytes": 850}, {"op": "apq.Linear", "bytes": 64}
    assert weight_bytes({"layers": [table, head, other]}) == 914


class FakeSession:
    """What a module's session answers to."""

    def __init__(self, longest: int) -> None:
        self.length, self.log = 0, [f"room {longest}"]

    def memory(self) -> dict[str, int]:
        return {"cache": 6400, "arena": 100}

    def reset(self) -> None:
        self.length = 0

    def prefill(self, ids: Any) -> None:
        if len(ids) > 32:
            raise FakeModule.ModuleError("too long")
        self.log.append(f"prefill {len(ids)} at {self.length}")
        self.length += len(ids)

    def step(self, token: int) -> None:
        self.length += 1

    def rewind(self, tokens: int) -> None:
        self.log.append(f"take back {tokens}")
        self.length -= tokens


class FakeModule:
    class ModuleError(Exception):
        pass

    session = FakeSession


def test_sessions_are_taken_where_a_module_has_them() -> None:
    manifest = {"session": {"feeds": {}}, "layers": [], "outputs": [{"shape": ["b", "s", 40]}]}
    assert has_sessions(manifest) and not has_sessions({"session": None})
    decoder = SessionDecoder(FakeModule, manifest, 64)
    assert (decoder.cache_bytes, decoder.vocabulary, decoder.arena()) == (100, 40, 6500)
    decoder.prefill([1, 2, 3])
    decoder.step(4)
    decoder.step(5)
    decoder.rewind(3)
    decoder.prefill([1, 2])
    log = decoder._session.log
    assert log == ["room 64", "prefill 3 at 0", "take back 2", "prefill 2 at 0"]
    with pytest.raises(BadInput, match="too long"):
        decoder.prefill(list(range(33)))


# ---- turns ----


class FakeDecoder:
    """Counts; a token costs a second, so does each of a prompt."""

    def __init__(self) -> None:
        self.now, self.length, self.log = 0.0, 0, list[str]()

    def prefill(self, ids: Sequence[int]) -> None:
        self.log.append(f"prefill {len(ids)}")
        self.length = len(ids)
        self.now += len(ids)

    def step(self, token: int) -> None:
        self.length += 1
        self.now += 1

    def rewind(self, length: int) -> None:
        self.log.append(f"rewind {self.length} to {length}")
        self.length = length


def test_decoding_starts_at_its_context_every_time() -> None:
    decoder = FakeDecoder()
    timed = Timed(decoder, clock=lambda: decoder.now)
    ids = prompt(5, vocabulary=7)
    assert max(ids) < 7
    assert ids == prompt(5, vocabulary=7)
    assert [timed.decode_s(ids, 8), timed.decode_s(ids, 8)] == [1.0, 1.0]
    assert timed.prefill_s(prompt(3, 7)) == 3.0
    assert timed.decode_s(ids, 2) == 1.0
    assert decoder.log == ["prefill 5", "rewind 13 to 5", "prefill 3", "prefill 5"]


class FakeWorker:
    def __init__(self, name: str, log: list[str], times: list[float]) -> None:
        self.name, self._log, self._times = name, log, iter(times)

    def ask(self, *request: Any) -> dict[str, Any]:
        self._log.append(self.name)
        try:
            return {"seconds": next(self._times), "peak_bytes": 1, "arena_bytes": None}
        except StopIteration:
            raise BadInput(f"{self.name}: it broke") from None


def test_contenders_take_turns_and_broken_ones_are_left_out() -> None:
    log: list[str] = []
    opened = {
        "a": FakeWorker("a", log, [9.0, 2.0, 1.0, 3.0]),
        "b": FakeWorker("b", log, [9.0, 1.0]),
    }
    done, failed = take_turns(opened, ("prefill", 4), budget_s=0, min_rounds=3)  # type: ignore[arg-type]
    assert log == ["a", "b", "a", "b", "a", "b", "a"]
    assert failed == {"b": "it broke"}
    assert (done["a"].best_s, done["a"].median_s, done["a"].rounds) == (1.0, 2.0, 3)


def test_a_busy_neighbour_ends_with_the_body() -> None:
    with busy_neighbour(False):
        pass
    with busy_neighbour(True):
        pass


def test_rows_hold_what_a_token_reads() -> None:
    sampled = Sampled(0.5, 0.6, 3, {"peak_bytes": 10, "arena_bytes": 5})
    facts = {"weight_bytes": 1000, "cache_bytes": 10, "how": "session"}
    entry = Entry("m", "module", "m")
    decode = row(entry, ("decode", 20, 4), 1, sampled, facts, busy=False)
    assert (decode["ms"], decode["tokens_s"], decode["bytes"]) == (500.0, 2.0, 1200)
    taken = row(entry, ("prefill", 20), 1, sampled, facts, busy=True)
    assert (taken["ms"], taken["bytes"]) == (600.0, 0)
    assert taken["tokens_s"] == pytest.approx(20 / 0.6)
    rival = row(Entry("r", "onnx", "r"), ("decode", 20, 4), 1, sampled, facts, busy=False)
    cells = table_rows([decode, {**rival, "ms": 1000.0}, taken])
    assert [(c[0], c[3], c[6]) for c in cells] == [
        ("prompt", "m", "1.00"),
        ("decode", "m", "1.00"),
        ("decode", "r", "2.00"),
    ]


def test_files_that_are_not_there_are_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="name one compiled module"):
        entries_of([], [], [])
    with pytest.raises(BadInput, match=r"x\.gguf: no such file"):
        entries_of([tmp_path], [], [tmp_path / "x.gguf"])
    with pytest.raises(BadInput, match="not a compiled module"):
        entries_of([tmp_path], [], [])


# ---- llama.cpp ----


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama, "PACKAGES", ("no_such_llama",))
    with pytest.raises(MissingPackage, match="not installed: pip install xllamacpp"):
        llama.open_llama(Path("x.gguf"), 1, 8)


def test_the_server_of_llama_cpp_is_asked_for_its_times(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    class Server:
        def __init__(self, params: Any) -> None:
            assert params.cpuparams.n_threads == params.cpuparams_batch.n_threads == 2
            assert params.n_ctx >= 64

        def handle_completions(self, request: dict[str, Any]) -> str:
            asked.append(request)
            count = request["n_predict"]
            times = {"prompt_ms": 30.0, "predicted_n": count, "predicted_ms": 4.0 * (count - 1)}
            return json.dumps({"timings": times})

    def params() -> SimpleNamespace:
        parts = {name: SimpleNamespace() for name in ("model", "cpuparams", "cpuparams_batch")}
        return SimpleNamespace(**parts)

    fake = ModuleType("xllamacpp")
    fake.Server, fake.CommonParams = Server, params  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "xllamacpp", fake)
    server = llama.Server(Path("m.gguf"), 2, 64)
    assert server.prefill_s([1, 2, 3]) == pytest.approx(0.030)
    assert server.decode_s([1, 2, 3], 8) == pytest.approx(0.004)
    assert [request["cache_prompt"] for request in asked] == [False, True]
    assert [request["n_predict"] for request in asked] == [1, 9]


def test_the_bindings_of_llama_cpp_evaluate_behind_the_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log: list[tuple[int, int]] = []

    class Llama:
        def __init__(self, path: str, **options: Any) -> None:
            assert options["n_threads"] == options["n_threads_batch"] == 1
            self.n_tokens = 0

        def reset(self) -> None:
            self.n_tokens = 0

        def eval(self, ids: list[int]) -> None:
            log.append((self.n_tokens, len(ids)))
            self.n_tokens += len(ids)

    fake = ModuleType("llama_cpp")
    fake.Llama = Llama  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "llama_cpp", fake)
    bindings = llama.Bindings(Path("m.gguf"), 1, 64)
    bindings.decode_s([1, 2, 3], 2)
    bindings.decode_s([1, 2, 3], 2)
    assert log == [(0, 3), (3, 1), (4, 1), (3, 1), (4, 1)]
