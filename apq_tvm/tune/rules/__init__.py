"""What a device wants of layers of every shape, found by timing: ``apq-tvm tune --rules``.

Records of the tuner are of one shape. From how many rows of x on a kernel pays, and what kernels
decide by default, hold for layers of many, and stand in rules of ``tuning_logs/<device>/``:
``thresholds.json`` (`apq_tvm.schedules.linear.thresholds`) and ``preferences.json``
(`apq_tvm.schedules.linear.preferences`). A device that nobody measured gets both here, for the
formats of one scheme at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from apq_tvm.schedules.devices import linear_kernels
from apq_tvm.schedules.linear import rules
from apq_tvm.schedules.linear.preferences import PREFERENCES
from apq_tvm.schedules.linear.thresholds import THRESHOLDS, rows_of, rule_of
from apq_tvm.select import by_name
from apq_tvm.tune.rules.file import Words, add_rules, where_of
from apq_tvm.tune.rules.ranges import Shares, best_ranges, limits
from apq_tvm.tune.rules.survey import Survey, mean
from apq_tvm.tune.tasks import Task
from apq_tvm.types import DeviceProfile

if TYPE_CHECKING:
    from apq_tvm.schedules.linear.kernel import LinearKernel

ROWS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Rows of x that kernels are timed with."""

SHAPES = ((1536, 576), (576, 1536), (4096, 4096))
"""Layers of a small model and of a large one."""

SURE = 1.02
"""What is gained less is noise."""

BETTER, NEVER_WORSE = 1.03, 0.97
"""A decision is preferred that gains so much in the mean, and loses no more anywhere."""

DECISIONS = 2
"""Decisions of one kernel that are changed, one after the other."""


@dataclass(frozen=True)
class Found:
    """A rule, and what it is for.

    Parameters
    ----------
    kernel : str
    log : str
        ``"thresholds"`` or ``"preferences"``.
    words : dict
        As its file has it.
    gain : float
        Of the rows or layers that it changes, the geometric mean.
    """

    kernel: str
    log: str
    words: Words
    gain: float


@dataclass(frozen=True)
class Answer:
    """What was found of one scheme, at one width.

    Parameters
    ----------
    scheme : str
    width : int
        Bits, where they are chosen at run time; else 0.
    shares : mapping
        How fast each kernel is, the fastest being 1, by rows of x.
    rules : list of Found
        What the device wants otherwise than today.
    """

    scheme: str
    width: int
    shares: Shares
    rules: list[Found]


def find_rules(tasks: Sequence[Task], survey: Survey) -> list[Answer]:
    """Time kernels on layers of one scheme, and say what the device wants otherwise than today.

    Parameters
    ----------
    tasks : sequence of Task
        Linear layers of one scheme, of several shapes, with `ROWS` or others.
    survey : Survey

    Returns
    -------
    list of Answer
        One for each width; none where layers have no choice of kernels.
    """
    asked = [task for task in tasks if len(task.kernels) > 1]
    widths = sorted({task.width for task in asked})
    return [_of_width([task for task in asked if task.width == width], survey) for width in widths]


def _of_width(asked: Sequence[Task], survey: Survey) -> Answer:
    profile = asked[0].profile
    shares, every = survey.kernels(asked), linear_kernels(profile)
    order = [k for k in every if k.name in shares and _by_rows(k, profile)]
    rows = sorted({m for kernel in order for m in shares[kernel.name]})
    serves = best_ranges([kernel.name for kernel in order], rows, shares)
    found = _thresholds(order, every, rows, shares, serves, asked[0])
    for name, mine in serves.items():
        ends = {mine[0], mine[-1]} if mine else set()
        chosen = [task for task in asked if task.m in ends and name in task.kernels]
        found += _preference(by_name(every)[name], every, chosen, survey)
    return Answer(asked[0].scheme, asked[0].width, shares, found)


def _by_rows(kernel: LinearKernel, profile: DeviceProfile) -> bool:
    """Whether rows of x decide: where bits of activations do, somebody has measured these."""
    found = rule_of(kernel, profile)
    return found is None or found.rule.most_act_bits is None


def _thresholds(
    order: Sequence[LinearKernel],
    every: Sequence[LinearKernel],
    rows: Sequence[int],
    shares: Shares,
    serves: Mapping[str, Sequence[int]],
    task: Task,
) -> list[Found]:
    """Rules of kernels that are to serve other rows than today, where that gains enough."""
    spans = {kernel.name: rows_of(kernel, task.spec, task.profile) for kernel in order}
    names, found = list(spans), []
    new = {m: name for name, mine in serves.items() for m in mine}
    for at, kernel in enumerate(order):
        gains: dict[int, float] = {}
        for m in rows:
            if m not in new or names.index(new[m]) < at:  # served by one that is preferred
                continue
            today = next((k for k in names[at:] if _covers(spans[k], m)), "")
            if kernel.name in (today, new[m]) and today != new[m]:
                gains[m] = shares[new[m]][m] / shares.get(today, {}).get(m, shares[new[m]][m])
        if not gains or mean(list(gains.values())) < SURE:
            continue
        figures = ", ".join(f"{m} rows {shares[kernel.name].get(m, 0):.2f}" for m in gains)
        words = {
            **where_of(kernel, every),
            **_threshold(kernel, serves[kernel.name], rows, task),
            "why": f"{_when()}, {task.scheme}: of the fastest kernel's speed, {figures}",
        }
        found.append(Found(kernel.name, THRESHOLDS.log, words, mean(list(gains.values()))))
    return found


def _covers(span: tuple[int, int], m: int) -> bool:
    return span[0] <= m and not 0 <= span[1] < m


def _threshold(
    kernel: LinearKernel, serves: Sequence[int], rows: Sequence[int], task: Task
) -> Words:
    """Answers of the rule of a kernel that serves these rows."""
    found = rule_of(kernel, task.profile)
    past = found.rule if found is not None else None
    if kernel.kind == "bitserial" and not serves:  # nor with more bits: each is a plane more
        assert task.spec.scheme is not None
        return {"most_act_bits": {str(task.spec.scheme.bits): task.spec.scheme.act_bits - 1}}
    least, most = limits(serves, rows)
    least, words = max(least, kernel.m_tile), {}
    if task.spec.scheme is not None and task.spec.scheme.group_size == -1:
        words = {"least": past.least if past else kernel.m_tile, "least_whole": least}
    else:
        words = {"least": least}
        if past is not None and past.least_whole is not None:
            words["least_whole"] = past.least_whole
    return {**words, "most": most} if most >= 0 else words


def _preference(
    kernel: LinearKernel, every: Sequence[LinearKernel], tasks: Sequence[Task], survey: Survey
) -> list[Found]:
    """The rule of a kernel that wants other decisions than its defaults, if it does."""
    first: dict[str, Any] = {}
    figures, gain = [], 1.0
    while tasks and len(first) < DECISIONS:
        ratios = survey.changes(tasks, kernel.name, first)
        sure = {
            change: mean(values)
            for change, values in ratios.items()
            if change[0] not in first and min(values) >= NEVER_WORSE and mean(values) >= BETTER
        }
        if not sure:
            break
        (name, value), best = max(sure.items(), key=lambda each: each[1])
        first[name] = value
        low, high = min(ratios[name, value]), max(ratios[name, value])
        figures.append(f"{name} {best:.2f} ({low:.2f} to {high:.2f})")
        gain *= best
    if not first:
        return []
    said = f"{_when()}, {tasks[0].scheme}: {'; '.join(figures)}, of {len(tasks)} shapes and rows"
    words = {**where_of(kernel, every), "first": first, "lent": False, "why": said}
    return [Found(kernel.name, PREFERENCES.log, words, gain)]


def _when() -> str:
    return date.today().isoformat()


def write_rules(found: Sequence[Found], folder: Path, measured: str) -> list[Path]:
    """Add rules to the files of a folder.

    Parameters
    ----------
    found : sequence of Found
    folder : Path
        ``tuning_logs/<device>``.
    measured : str
        Where and how, for a file that is new.

    Returns
    -------
    list of Path
        Files that were written.

    Raises
    ------
    BadLog, OutputFailed
        See `apq_tvm.tune.rules.file.add_rules`.
    """
    written = []
    kinds: list[rules.Kind[Any]] = [THRESHOLDS, PREFERENCES]
    for kind in kinds:
        mine = [each.words for each in found if each.log == kind.log]
        if mine:
            path = folder / f"{kind.log}.json"
            add_rules(path, kind, mine, measured)
            written.append(path)
    return written
