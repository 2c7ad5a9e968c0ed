"""``python DIR/run.py``: check the bundle's kernels on this machine's GPU and time them."""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import platform
import re
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .driver import CudaError, Gpu, Memory, Unfit
from .layer import Case, Layer, copies_of, image_for
from .rates import rates
from .rival import Rival, find_torch
from .search import searched
from .timing import MOST_TURNS, Timing, measure

FORMAT = "apq_tvm-gpu-bundle-1"

SECONDS = 440.0
"""Of a run, so that with its beginning and its last case it is over in 8 minutes."""

CASE_SECONDS = 2.0
"""Of a case at most."""

SHARE_OF = "read_gbs"
"""The rate that `bandwidth_share` is a share of: layers read far more than they write."""

NOT_TIMED = ("us", "product_us", "bandwidth_share", "rival_us", "ratio", "noise")


def main(folder: Path, arguments: Sequence[str] | None = None) -> int:
    """Run a bundle.

    Parameters
    ----------
    folder : Path
        Its own.
    arguments : sequence of str, optional
        By default those of the command line.

    Returns
    -------
    int
        0; 1 if a kernel was wrong or failed; 2 if this machine cannot run the bundle.
    """
    options = _options(folder, arguments)
    try:
        return _Run(folder, options).run()
    except (Unfit, CudaError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _options(folder: Path, arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="run.py", description=__doc__)
    parser.add_argument("--small", action="store_true", help="only whether everything works")
    parser.add_argument("--only", metavar="REGEX", default="", help="of 'NxK SCHEME M=ROWS'")
    parser.add_argument("--out", metavar="FILE", type=Path, default=folder / "results.json")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="default: %(default)s")
    return parser.parse_args(arguments)


class _Run:
    """One run: what is found so far, and the file that holds it."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self._begun = time.monotonic()
        self._folder, self._options = folder, options
        try:
            text = (folder / "bundle.json").read_bytes()
            bundle = json.loads(text)
        except ValueError as error:
            raise Unfit(f"{folder / 'bundle.json'}: {error}") from error
        if not os.access(options.out.absolute().parent, os.W_OK):
            raise Unfit(f"--out {options.out}: there is no such folder, or it cannot be written")
        self._bundle = bundle
        self._layers = [{**layer, "cases": self._wanted(layer)} for layer in bundle["layers"]]
        self._layers = [layer for layer in self._layers if layer["cases"]]
        if not self._layers:
            raise Unfit(f"--only {options.only!r} fits no case of the bundle")
        self._gpu = gpu = Gpu()
        if gpu.version < bundle["cuda"]:
            raise Unfit(
                f"the driver knows CUDA {gpu.version // 1000}.{gpu.version % 1000 // 10}; the "
                f"bundle wants release {bundle['driver']} or later"
            )
        image_for(bundle["rates"]["images"], gpu.sm)
        self._l2 = gpu.l2_bytes(bundle["l2_bytes"])
        self._check_memory()
        self._torch, self._rival_says = find_torch()
        self._rival: tuple[tuple[int, int], Rival] | None = None
        self._result = {
            **{"format": FORMAT, "target": bundle["target"], "version": bundle["version"]},
            **{"gpu": gpu.name, "compute_capability": gpu.sm, "cuda": gpu.version},
            **{"multiprocessors": gpu.multiprocessors, "l2_bytes": self._l2},
            **{"measured": time.strftime("%Y-%m-%d"), "host": platform.platform()},
            **{"rival": self._rival_says, "small": options.small},
            **{"bundle": hashlib.sha256(text).hexdigest()},
            "share_of": SHARE_OF,
            **{"rates": {}, "rows": [], "skipped": [], "complete": False},
        }

    def _wanted(self, layer: dict[str, Any]) -> list[dict[str, Any]]:
        try:
            pattern = re.compile(self._options.only)
        except re.error as error:
            raise Unfit(f"--only {self._options.only!r}: {error}") from error
        return [case for case in layer["cases"] if pattern.search(_words(layer, case))]

    def _copies(self, nbytes: float) -> int:
        return copies_of(nbytes, self._l2, self._options.small)

    def _check_memory(self) -> None:
        free = self._gpu.free_bytes()
        for layer in self._layers:
            wanted = self._copies(layer["bytes"]) * layer["bytes"]
            wanted += max(sum(case["buffers"].values()) for case in layer["cases"])
            if wanted > free:
                raise Unfit(
                    f"{self._gpu.name}: too little memory: {layer['shape']} {layer['scheme']} "
                    f"wants {wanted} bytes, {free} are free; choose others with --only"
                )

    def run(self) -> int:
        """Everything; the exit code."""
        small, result = self._options.small, self._result
        print(f"{self._gpu.name}; rival: {self._rival_says}")
        result["rates"] = rates(self._gpu, self._folder, self._bundle["rates"], small)
        print(json.dumps(result["rates"]))
        for layer in self._layers:
            fatal = self._measure_layer(layer)
            self._write()
            if fatal:
                break
        done = {_words(row, row) for row in result["rows"]}
        every = [_words(layer, case) for layer in self._layers for case in layer["cases"]]
        result["skipped"] = [words for words in every if words not in done]
        for words in result["skipped"]:
            print(f"skipped: {words}")
        result["complete"] = True
        self._write()
        bad = [row for row in result["rows"] if row["wrong"] or row["failed"]]
        for row in bad:
            why = row["failed"] or f"error {_figure(row['error'])}, over {row['bound']:.3g}"
            print(f"wrong: {_words(row, row)} {row['kernel']}: {why}", file=sys.stderr)
        return 1 if bad else 0

    def _measure_layer(self, layer: dict[str, Any]) -> bool:
        """All its cases, as long as there is time; True if nothing can run after it."""
        if self._left() <= 0:
            return False
        rows = self._result["rows"]
        try:
            with Memory(self._gpu) as memory:
                copies = self._copies(layer["bytes"])
                made = Layer(self._gpu, self._folder, layer, copies, memory)
                for row in self._cases(layer, made):
                    rows.append(row)
                    print(_line(row), flush=True)
                made.kernels.unload()
        except Exception as error:  # what one layer's files hold costs no other layer its rows
            done = {_words(row, row) for row in rows}
            for case in layer["cases"]:
                if _words(layer, case) not in done:
                    rows.append({**_row(layer, case), "failed": f"{type(error).__name__}: {error}"})
                    print(_line(rows[-1]), flush=True)
            return isinstance(error, CudaError) and error.fatal
        return False

    def _cases(self, layer: dict[str, Any], made: Layer) -> Iterator[dict[str, Any]]:
        for case in layer["cases"]:
            left = self._left()
            if left <= 0:
                return
            row = _row(layer, case)
            with Memory(self._gpu) as memory:
                mine = Case(made, case, memory)
                mine.compute()
                if _is_right(row, mine):
                    mine.clear()
                    row |= self._timed(layer, case, mine, min(CASE_SECONDS, left))
                    if not _is_right(row, mine):  # what the graphs computed
                        row |= dict.fromkeys(NOT_TIMED)
                mine.close()
            if case.get("candidates") and row["us"] is not None and self._left() > 0:
                seconds = min(CASE_SECONDS * (1 + len(case["candidates"])), self._left())
                small = self._options.small
                row["searched"] = searched(self._gpu, self._folder, made, case, seconds, small)
            yield row

    def _timed(
        self, layer: dict[str, Any], case: dict[str, Any], mine: Case, budget_s: float
    ) -> dict[str, Any]:
        candidates, rival_says = mine.candidates(self._options.small), ""
        if self._torch is not None:
            try:
                rival = self._rival_of(layer["n"], layer["k"])
                candidates["rival"] = rival.candidate(case["m"])
            except RuntimeError as error:
                rival_says = str(error).splitlines()[0]
        timings = measure(candidates, budget_s, 1 if self._options.small else MOST_TURNS)
        ours, product = timings["ours"], timings["product"]
        theirs: Timing | None = timings.get("rival")
        bandwidth = self._result["rates"][SHARE_OF]
        return {
            "us": ours.us,
            "product_us": product.us,
            "bandwidth_share": case["ideal_bytes"] / (ours.us * 1e3) / bandwidth,
            "rival_us": theirs.us if theirs else None,
            "ratio": theirs.us / ours.us if theirs else None,
            "noise": max(ours.noise, theirs.noise if theirs else 0.0),
            "rival_failed": rival_says,
        }

    def _rival_of(self, n: int, k: int) -> Rival:
        if self._rival is None or self._rival[0] != (n, k):
            self._rival = None
            self._torch.cuda.empty_cache()
            self._rival = (n, k), Rival(self._torch, n, k, self._copies(2 * n * k))
        return self._rival[1]

    def _left(self) -> float:
        return float(self._options.seconds - (time.monotonic() - self._begun))

    def _write(self) -> None:
        """The file, whole: what stood there stays until it is."""
        out: Path = self._options.out
        part = out.with_name(f".{out.name}.{os.getpid()}.tmp")
        try:
            part.write_text(json.dumps(self._result, indent=1) + "\n")
            part.replace(out)
        except BaseException:
            part.unlink(missing_ok=True)
            raise


def _words(layer: dict[str, Any], case: dict[str, Any]) -> str:
    return f"{layer['shape']} {case['scheme']} M={case['m']}"


def _row(layer: dict[str, Any], case: dict[str, Any]) -> dict[str, Any]:
    """A row of which only what the bundle knows is filled."""
    return {
        **{"shape": layer["shape"], "m": case["m"], "scheme": case["scheme"]},
        **{"kernel": case["kernel"], "static_us": case["static_us"], "bound": case["bound"]},
        **{"error": None, "rounding_error": None, "wrong": False, "failed": ""},
        **dict.fromkeys(NOT_TIMED),
    }


def _is_right(row: dict[str, Any], case: Case) -> bool:
    """Note how wrong a case's result is; False if that is too much."""
    error, rounding = case.error()
    row["wrong"] = not error <= row["bound"]
    finite = math.isfinite(error)  # JSON has no others
    row["error"], row["rounding_error"] = (error, rounding) if finite else (None, None)
    return not row["wrong"]


def _figure(error: float | None) -> str:
    return "not finite" if error is None else f"{error:.3g}"


def _line(row: dict[str, Any]) -> str:
    if row["failed"]:
        return f"{_words(row, row)} {row['kernel']}: {row['failed']}"
    if row["wrong"]:
        return f"{_words(row, row)} {row['kernel']}: WRONG, error {_figure(row['error'])}"
    static = "" if row["static_us"] is None else f", judged {row['static_us']:.1f}"
    rival = "" if row["ratio"] is None else f"; rival {row['rival_us']:.1f} us: {row['ratio']:.2f}"
    return (
        f"{_words(row, row)} {row['kernel']}: {row['us']:.1f} us (product {row['product_us']:.1f}"
        f"{static}), {row['bandwidth_share']:.0%} of bandwidth{rival}; noise {row['noise']:.0%}, "
        f"error {row['error']:.1g}"
    )
