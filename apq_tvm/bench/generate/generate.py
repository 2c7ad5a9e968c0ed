"""Prompt and decoding speeds of modules at given contexts, beside rivals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from apq_tvm.bench.generate.llama import INSTALL, package
from apq_tvm.bench.generate.ours import check_decoder
from apq_tvm.bench.generate.turns import Entry, Sampled, busy_neighbour, take_turns, workers
from apq_tvm.bench.roofline import measure
from apq_tvm.errors import BadInput, BuildError
from apq_tvm.extras import require
from apq_tvm.progress import Progress, Silent
from apq_tvm.types import AnyPath


def entries_of(
    modules: Sequence[AnyPath], against: Sequence[AnyPath], gguf: Sequence[AnyPath]
) -> list[Entry]:
    """Contenders in the order of the table, each with a name of its own.

    Raises
    ------
    BadInput
        There is no module, a file is not there, or a module is no decoder.
    """
    if not modules:
        raise BadInput("name one compiled module at least")
    for path in map(Path, (*against, *gguf)):
        if not path.is_file():
            raise BadInput(f"{path}: no such file")
    for path in map(Path, modules):
        check_decoder(path)
    found = [
        *(Entry(Path(p).name, "module", str(p)) for p in modules),
        *(Entry(f"onnxruntime {Path(p).name}", "onnx", str(p)) for p in against),
        *(Entry(f"llama.cpp {Path(p).name}", "gguf", str(p)) for p in gguf),
    ]
    names = [entry.name for entry in found]
    return [e if names.count(e.name) == 1 else Entry(e.path, e.kind, e.path) for e in found]


def bench_generate(
    modules: Sequence[AnyPath],
    *,
    prompts: Sequence[int] = (16, 256),
    contexts: Sequence[int] = (16, 1024),
    tokens: int = 32,
    threads: Sequence[int] = (1,),
    against: Sequence[AnyPath] = (),
    gguf: Sequence[AnyPath] = (),
    busy: bool = False,
    budget_s: float = 4.0,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Time decoders in turns, each in a process of its own.

    Parameters
    ----------
    modules : sequence of str or path
        Compiled modules with a cache of keys and values.
    prompts : sequence of int
        Tokens that are taken at once, with nothing before them.
    contexts : sequence of int
        Tokens before those that are decoded one by one.
    tokens : int
        How many of those make a sample.
    threads : sequence of int
    against : sequence of str or path
        ONNX files for ONNX Runtime.
    gguf : sequence of str or path
        Files for llama.cpp.
    busy : bool
        Let a process compute beside all of them; times are medians then.
    budget_s : float
        Seconds for each comparison.
    progress : Progress, optional

    Returns
    -------
    dict
        ``tokens, busy, read_gbs`` (threads → DRAM's GB/s, None where nothing measures it) and
        ``rows``: ``name, kind, how`` (where caches are), ``what`` (``"prompt"`` or ``"decode"``),
        ``length, threads, ms`` (a prompt, or a token), ``tokens_s, noise, rounds, bytes`` (of
        weights and cache that a token reads; 0 for prompts), ``dram_share, peak_bytes,
        arena_bytes``; ``failed``: name → why it was left out.

    Raises
    ------
    BadInput
        Anything given does not fit, or no module of ours could be timed.
    MissingPackage
        onnxruntime is not installed, but `against` names a file.
    """
    progress, entries = progress or Silent(), entries_of(modules, against, gguf)
    if against:
        require("onnxruntime")
    failed: dict[str, str] = {}
    if gguf and package() is None:
        failed = {e.name: f"not installed: {INSTALL}" for e in entries if e.kind == "gguf"}
    longest = max((*prompts, *(context + tokens for context in contexts)))
    requests = [("prefill", p) for p in prompts] + [("decode", c, tokens) for c in contexts]
    speeds = {count: read_speed(count) for count in threads}  # with no neighbour yet
    rows = []
    with progress.stage("generate", len(threads) * len(requests)), busy_neighbour(busy):
        for count in threads:
            asked = [entry for entry in entries if entry.name not in failed]
            with workers(asked, count, longest) as (opened, refused):
                failed |= refused
                for request in requests:
                    progress.advance(f"{request[0]} {request[1]} on {count}")
                    live = {name: opened[name] for name in opened if name not in failed}
                    done, broken = take_turns(live, request, budget_s=budget_s)
                    failed |= broken
                    rows += [
                        row(e, request, count, done[e.name], live[e.name].facts, busy)
                        for e in asked if e.name in done
                    ]  # fmt: skip
    check_ours(entries, failed)
    speeds = speeds if busy else {count: read_speed(count) for count in threads}
    add_shares(rows, speeds)
    return {"tokens": tokens, "busy": busy, "read_gbs": speeds, "rows": rows, "failed": failed}


def check_ours(entries: Sequence[Entry], failed: Mapping[str, str]) -> None:
    """Refuse a comparison without any module of ours.

    Raises
    ------
    BadInput
        With the reason of the first.
    """
    ours = [entry.name for entry in entries if entry.kind == "module"]
    if all(name in failed for name in ours):
        raise BadInput(f"no module could be timed; {ours[0]}: {failed[ours[0]]}")


def add_shares(rows: Sequence[dict[str, Any]], speeds: Mapping[int, float | None]) -> None:
    """Set ``dram_share`` where a token's bytes and memory's speed are known."""
    for entry in rows:
        speed = speeds[entry["threads"]]
        if speed and entry["bytes"]:
            entry["dram_share"] = entry["bytes"] / (entry["ms"] / 1e3) / (speed * 1e9)


def read_speed(threads: int) -> float | None:
    """DRAM's GB/s, the best that this process has seen; None where it cannot be measured."""
    try:
        return measure(threads).read_gbs
    except BuildError:
        return None


def row(
    entry: Entry,
    request: Sequence[Any],
    threads: int,
    sampled: Sampled,
    facts: Mapping[str, Any],
    busy: bool,
) -> dict[str, Any]:
    """One row of the document."""
    seconds = sampled.median_s if busy else sampled.best_s
    decodes, length = request[0] == "decode", int(request[1])
    nbytes = facts["weight_bytes"] + facts.get("cache_bytes", 0) * length if decodes else 0
    return {
        "name": entry.name,
        "kind": entry.kind,
        "how": facts["how"],
        "what": "decode" if decodes else "prompt",
        "length": length,
        "threads": threads,
        "ms": seconds * 1e3,
        "tokens_s": (1 if decodes else length) / seconds,
        "noise": sampled.median_s / sampled.best_s - 1,
        "rounds": sampled.rounds,
        "bytes": nbytes,
        "dram_share": None,
        "peak_bytes": sampled.last["peak_bytes"],
        "arena_bytes": sampled.last["arena_bytes"],
    }
