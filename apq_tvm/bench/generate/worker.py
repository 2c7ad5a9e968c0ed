"""The process of one contender: it waits for its turn, measures, answers, and waits again.

``python -m apq_tvm.bench.generate.worker CONTENDER`` takes a JSON object ``kind, path, threads,
longest`` and lines of JSON on standard input: ``["prefill", P]`` or ``["decode", C, N]``. Each is
answered by a line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from apq_tvm.bench.generate.decoder import Decoder
from apq_tvm.bench.model import IDS
from apq_tvm.errors import ApqError


class Contender(Protocol):
    """What a worker asks: seconds of a prompt, and of each token behind one."""

    def prefill_s(self, ids: Sequence[int]) -> float:
        """Seconds of a prompt with nothing before it."""

    def decode_s(self, ids: Sequence[int], tokens: int) -> float:
        """Seconds of each of `tokens` tokens behind a prompt."""


class Timed:
    """A `Decoder` as a contender: the same tokens for all, whatever the model would say."""

    def __init__(self, decoder: Decoder, clock: Callable[[], float] = time.perf_counter) -> None:
        self._decoder, self._clock = decoder, clock
        self._prompt: tuple[int, ...] = ()

    def prefill_s(self, ids: Sequence[int]) -> float:
        """Seconds of a prompt with nothing before it."""
        start = self._clock()
        self._decoder.prefill(ids)
        self._prompt = tuple(ids)
        return self._clock() - start

    def decode_s(self, ids: Sequence[int], tokens: int) -> float:
        """Seconds of each of `tokens` tokens behind a prompt; the mean of them."""
        if self._prompt == tuple(ids):
            self._decoder.rewind(len(ids))
        else:
            self.prefill_s(ids)
        start = self._clock()
        for i in range(tokens):
            self._decoder.step(ids[i % len(ids)])
        return (self._clock() - start) / tokens


def prompt(length: int, vocabulary: int | None) -> list[int]:
    """Made-up tokens, the same for every contender."""
    ids = np.random.default_rng(0).integers(1, min(IDS, vocabulary or IDS), length)
    return [int(token) for token in ids]


def status(key: str) -> int:
    """Bytes of a line of ``/proc/self/status``."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    return 0


def open_contender(asked: dict[str, Any]) -> tuple[Contender, dict[str, Any], Any]:
    """The contender, what is known of it beforehand, and its decoder if it is one of ours."""
    path, threads, longest = Path(asked["path"]), asked["threads"], asked["longest"]
    if asked["kind"] == "gguf":
        from apq_tvm.bench.generate.llama import open_llama

        return open_llama(path, threads, longest), _gguf_facts(path), None
    if asked["kind"] == "onnx":
        from apq_tvm.bench.generate.onnx import OnnxDecoder

        decoder: Any = OnnxDecoder(path, threads, longest)
    else:
        from apq_tvm.bench.generate.ours import open_decoder

        decoder = open_decoder(path, threads, longest)
    facts = {
        "weight_bytes": decoder.weight_bytes,
        "cache_bytes": decoder.cache_bytes,
        "vocabulary": decoder.vocabulary,
        "how": decoder.how,
    }
    return Timed(decoder), facts, decoder


def _gguf_facts(path: Path) -> dict[str, Any]:
    """Of a file for llama.cpp: nearly all of it is weights; its cache's size it does not tell."""
    return {"weight_bytes": path.stat().st_size, "how": "llama.cpp's cache"}


def serve(asked: dict[str, Any], lines: Any, answer: Callable[[Any], None]) -> None:
    """Open the contender and measure what lines ask for until they end."""
    before = status("VmRSS:")
    contender, facts, decoder = open_contender(asked)
    answer(facts)
    for line in lines:
        kind, length, *more = json.loads(line)
        ids = prompt(length, facts.get("vocabulary"))
        if kind == "prefill":
            seconds = contender.prefill_s(ids)
        else:
            seconds = contender.decode_s(ids, *more)
        arena = decoder.arena() if decoder else None
        peak = status("VmHWM:") - before
        answer({"seconds": seconds, "peak_bytes": peak, "arena_bytes": arena})


def main() -> None:
    """Answer on what was standard output; libraries that print do so on standard error."""
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(document: Any) -> None:
        channel.write(json.dumps(document) + "\n")
        channel.flush()

    try:
        serve(json.loads(sys.argv[1]), sys.stdin, answer)
    except ApqError as error:
        answer({"error": str(error)})
    except Exception as error:  # of a rival: it is named, and the others go on
        answer({"error": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    main()
