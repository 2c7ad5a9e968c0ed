"""llama.cpp by either of its Python packages, where one is installed."""

from __future__ import annotations

import importlib.util
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from apq_tvm.errors import MissingPackage

PACKAGES = ("xllamacpp", "llama_cpp")
INSTALL = "pip install xllamacpp"


def package() -> str | None:
    """The first of `PACKAGES` that is installed."""
    return next((name for name in PACKAGES if importlib.util.find_spec(name)), None)


def open_llama(path: Path, threads: int, longest: int) -> Any:
    """llama.cpp with a GGUF file, by the package that is there.

    Raises
    ------
    MissingPackage
        Neither is installed.
    """
    found = package()
    if found is None:
        raise MissingPackage(f"not installed: {INSTALL}")
    return (Server if found == "xllamacpp" else Bindings)(path, threads, longest)


class Server:
    """``xllamacpp``: llama.cpp's server in this process, by the times that it gives itself.

    Its times leave out what Python does around a request; sampling the likeliest token is in them.
    """

    def __init__(self, path: Path, threads: int, longest: int) -> None:
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.n_ctx, params.n_parallel, params.n_gpu_layers = longest + 8, 1, 0
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        params.warmup, params.verbosity = False, 0
        self._server = xllamacpp.Server(params)

    def prefill_s(self, ids: Sequence[int]) -> float:
        """Seconds of a prompt with nothing before it."""
        return float(self._ask(ids, 1, again=False)["prompt_ms"]) / 1e3

    def decode_s(self, ids: Sequence[int], tokens: int) -> float:
        """Seconds of each of `tokens` tokens behind a prompt, which the server remembers."""
        times = self._ask(ids, tokens + 1, again=True)
        # The first comes of the prompt's logits, before the server's clock starts.
        return float(times["predicted_ms"]) / 1e3 / max(int(times["predicted_n"]) - 1, 1)

    def _ask(self, ids: Sequence[int], tokens: int, again: bool) -> dict[str, Any]:
        request = {
            "prompt": list(ids),
            "n_predict": tokens,
            "cache_prompt": again,
            "ignore_eos": True,
            "samplers": ["top_k"],
            "top_k": 1,
        }
        timings: dict[str, Any] = self.complete(request)["timings"]
        return timings

    def complete(self, request: dict[str, Any]) -> dict[str, Any]:
        """The server's answer to a request of its API (``POST /completion``).

        Raises
        ------
        RuntimeError
            It is an error.
        """
        answer = self._server.handle_completions(request)
        if isinstance(answer, str | bytes):
            answer = json.loads(answer)
        if "timings" not in answer:
            raise RuntimeError(f"llama.cpp: {answer}")
        found: dict[str, Any] = answer
        return found


class Bindings:
    """``llama-cpp-python``: evaluations by its `Llama`, timed here; nothing is sampled."""

    def __init__(self, path: Path, threads: int, longest: int) -> None:
        import llama_cpp

        self._llama = llama_cpp.Llama(
            str(path), n_ctx=longest + 8, n_threads=threads, n_threads_batch=threads,
            n_gpu_layers=0, verbose=False,
        )  # fmt: skip
        self._prompt: tuple[int, ...] = ()

    def prefill_s(self, ids: Sequence[int]) -> float:
        """Seconds of a prompt with nothing before it."""
        self._llama.reset()
        self._prompt = tuple(ids)
        return self._time(ids)

    def decode_s(self, ids: Sequence[int], tokens: int) -> float:
        """Seconds of each of `tokens` tokens behind a prompt."""
        if self._prompt != tuple(ids):
            self.prefill_s(ids)
        self._llama.n_tokens = len(ids)  # evaluation takes later ones out of the cache
        return sum(self._time([ids[i % len(ids)]]) for i in range(tokens)) / tokens

    def _time(self, ids: Sequence[int]) -> float:
        start = time.perf_counter()
        self._llama.eval(list(ids))
        return time.perf_counter() - start
