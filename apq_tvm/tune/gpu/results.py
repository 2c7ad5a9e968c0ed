"""``logs import``: records of what a bundle with candidates measured on a GPU.

Nothing is believed that was not measured by this bundle's own images with results that are right
by bounds of ours.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from apq_tvm.bench.gpu.bundle import bound_of
from apq_tvm.bench.gpu.on_gpu.main import FORMAT
from apq_tvm.errors import BadInput
from apq_tvm.formats import parse_scheme
from apq_tvm.schedules.decide import Defaults
from apq_tvm.schedules.devices import find_profile, linear_kernels
from apq_tvm.schedules.recorded import Nearly
from apq_tvm.select import by_name
from apq_tvm.tune.journal import add_records
from apq_tvm.tune.logs import spec_of, stale
from apq_tvm.tune.ratios import CONFIDENCE, Ratio, ratio_of
from apq_tvm.tune.session import versions
from apq_tvm.tuning_logs.records import LINEAR, Record
from apq_tvm.types import AnyPath, DeviceProfile

_DAMAGED = (KeyError, TypeError, ValueError, AttributeError)
"""What a file with other contents than ours ends in."""


@dataclass(frozen=True)
class Imported:
    """What a case of a bundle came to.

    Parameters
    ----------
    case : str
        Its shape, scheme and rows.
    record : Record or None
    why : tuple of str
        Why there is no record, or why candidates were left out.
    """

    case: str
    record: Record | None
    why: tuple[str, ...] = ()


def import_results(bundle: AnyPath, log: AnyPath, results: AnyPath | None = None) -> list[Imported]:
    """Record the candidates of a bundle that are faster for sure.

    Parameters
    ----------
    bundle : str or path
        What ``bench gpu --prepare --candidates`` wrote.
    log : str or path
        File of records to add to.
    results : str or path, optional
        By default ``results.json`` in the bundle.

    Returns
    -------
    list of Imported
        One for each case with candidates.

    Raises
    ------
    BadInput
        A file is damaged, or the results are of another bundle or GPU, or of ``--small``.
    BadLog, OutputFailed
        The log cannot be read or written.
    """
    folder = Path(bundle)
    document, found = _read(folder, Path(results) if results else folder / "results.json")
    profile = find_profile(document["target"])
    try:
        cases = [
            (layer, case, _words(layer, case))
            for layer in document["layers"]
            for case in layer["cases"]
            if case.get("candidates")
        ]
        rows = {f"{r['shape']} {r['scheme']} M={r['m']}": r for r in found["rows"]}
        machine, date = f"{found['gpu']}, CUDA {found['cuda']}", found["measured"]
    except _DAMAGED as error:
        raise BadInput(f"{folder} or its results are damaged: {error!r}") from error
    if not cases:
        raise BadInput(f"{folder} has no candidates: prepare it with --candidates")
    made = []
    for layer, case, words in cases:
        try:
            made.append(_imported(layer, case, rows.get(words), profile, machine, date))
        except _DAMAGED as error:
            raise BadInput(f"the results of {words} are damaged: {error!r}") from error
    add_records(Path(log), [each.record for each in made if each.record is not None])
    return made


def _read(folder: Path, path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The bundle, and the results that are its own."""
    try:
        text = (folder / "bundle.json").read_bytes()
        document, found = json.loads(text), json.loads(path.read_text())
        forms, own = {document["format"], found["format"]}, found["bundle"]
        target = str(document["target"])
        sm, small = int(found["compute_capability"]), found["small"]
    except (OSError, *_DAMAGED) as error:
        raise BadInput(f"{folder} and {path} are no bundle and its results: {error}") from error
    if forms != {FORMAT} or own != sha256(text).hexdigest():
        raise BadInput(f"{path} is not of the bundle {folder}: run this one, or import its own")
    gpu = find_profile(target).gpu
    if gpu is None or sm != gpu.sm:
        raise BadInput(
            f"{path} was measured on compute capability {sm // 10}.{sm % 10}, which {target} is not"
        )
    if small:
        raise BadInput(f"{path} was measured with --small: its times say nothing")
    return document, found


def _imported(
    layer: Mapping[str, Any],
    case: Mapping[str, Any],
    row: Mapping[str, Any] | None,
    profile: DeviceProfile,
    machine: str,
    date: str,
) -> Imported:
    words = _words(layer, case)
    if row is None or row["wrong"] or row["failed"] or not row.get("searched"):
        return Imported(words, None, (f"the default was not timed: {_fault(row)}",))
    searched, why, ratios = row["searched"], [], {}
    bound = bound_of(parse_scheme(layer["scheme"]))
    count = len(case["candidates"])
    both = zip(case["candidates"], searched["candidates"], strict=True)
    for number, (wanted, given) in enumerate(both):
        fault = _candidate_fault(wanted, given, searched["default_us"], bound)
        if fault:
            why.append(f"candidate {number} {_answers(wanted)}: {fault}")
            continue
        pairs = list(zip(searched["default_us"], given["us"], strict=True))
        ratios[number] = ratio_of(pairs, 1 - (1 - CONFIDENCE) / count)  # Bonferroni
    best = max(ratios, key=lambda number: ratios[number].low, default=None)
    if best is None or not ratios[best].is_faster:
        return Imported(words, None, (*why, "no candidate is faster for sure"))
    record = _record(layer, case, best, ratios[best], profile, machine, date)
    if isinstance(record, str):
        return Imported(words, None, (*why, record))
    return Imported(words, record, tuple(why))


def _words(layer: Mapping[str, Any], case: Mapping[str, Any]) -> str:
    return f"{layer['shape']} {case['scheme']} M={case['m']}"


def _fault(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return "there was no time"
    return row["failed"] or ("its result is wrong" if row["wrong"] else "nothing was searched")


def _candidate_fault(
    wanted: Mapping[str, Any], given: Mapping[str, Any], default_us: Sequence[float], bound: float
) -> str:
    """Why a candidate is not believed; ``""`` if it is."""
    if given["failed"]:
        return str(given["failed"])
    if given["sha256"] != wanted["sha256"]:
        return "the image that ran is not the bundle's"
    error = given["error"]
    if given["wrong"] or error is None or not 0 <= error <= bound:
        return f"its error is {error}, more than {bound:g}"
    times = [*default_us, *given["us"]]
    if len(given["us"]) != len(default_us) or not all(0 < t < math.inf for t in times):
        return "its times are not those of the default's turns"
    return ""


def _answers(candidate: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in candidate["decisions"])


def _record(
    layer: Mapping[str, Any],
    case: Mapping[str, Any],
    number: int,
    ratio: Ratio,
    profile: DeviceProfile,
    machine: str,
    date: str,
) -> Record | str:
    """The record of a candidate, or why today's kernels have none."""
    answers = {name: _tuples(value) for name, value in case["candidates"][number]["decisions"]}
    record = Record(
        LINEAR, case["kernel"], answers, case["schedule"], n=layer["n"], k=layer["k"],
        scheme=layer["scheme"], details=tuple((name, size) for name, size in layer["details"]),
        width=case["bits"], rows=(case["rows"][0], case["rows"][1]),
        ratio=ratio.value, interval=(ratio.low, ratio.high), machine=machine, date=date,
        versions=versions(),
    )  # fmt: skip
    for entry in stale([record], profile):
        return f"not recorded, {entry.why}: prepare the bundle again"
    kernel, spec = by_name(linear_kernels(profile))[record.kernel], spec_of(record)
    taken = kernel.choose(spec, profile, Nearly(answers)).decisions
    if dict(taken) != answers:
        return f"not recorded, {record.kernel} has no such decisions: prepare the bundle again"
    default = kernel.choose(spec, profile, Defaults()).decisions
    decided = {name: value for name, value in answers.items() if default[name] != value}
    return replace(record, decisions=decided)


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
