"""How soon searches find the best of a space: trees against random order, on recorded sweeps.

A sweep is what ``apq-tvm tune --trials 3000 --log sweep.json`` leaves in ``sweep.json.trials``:
every point of a space, timed. Searches are run on those times, so no load of the machine matters::

    python examples/search_curves.py sweep.json.trials -o curves.png
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from apq_tvm.extras import require
from apq_tvm.tune.search import BATCH, AtRandom, Boosted, Search
from apq_tvm.tune.space import Point, Space

LEAST = 150
"""Points of a space that is worth a search."""

Sweep = dict[Point, float]


def read_sweeps(path: Path) -> dict[str, Sweep]:
    """Ratio of every point, by task, of tasks with `LEAST` points."""
    sweeps: dict[str, Sweep] = {}
    for line in path.read_text().splitlines():
        words = json.loads(line)
        if "task" not in words:
            continue
        answers = tuple((name, tuples(value)) for name, value in words["decisions"])
        point = Point(words["kernel"], answers)
        sweeps.setdefault(words["task"], {})[point] = words["ratio"]
    return {task: sweep for task, sweep in sweeps.items() if len(sweep) >= LEAST}


def tuples(value: object) -> object:
    """JSON has lists where decisions have tuples."""
    return tuple(map(tuples, value)) if isinstance(value, list) else value


def best_so_far(search: Search, sweep: Sweep, trials: int) -> list[float]:
    """After each trial, the best ratio so far over the best of all."""
    top, tried, curve = max(sweep.values()), Sweep(), list[float]()
    while len(curve) < trials:
        for point in search.propose(min(BATCH, trials - len(curve)), tried):
            tried[point] = sweep[point]
            curve.append(max(tried.values()) / top)
    return curve


def curves(sweep: Sweep, trials: int, seeds: int) -> dict[str, list[list[float]]]:
    """A curve of each search for each seed."""
    space = Space(tuple(sweep))
    return {
        "trees": [best_so_far(Boosted(space, seed), sweep, trials) for seed in range(seeds)],
        "random": [best_so_far(AtRandom(space, seed), sweep, trials) for seed in range(seeds)],
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Print how far both are after a third of the trials; draw the curves."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("journals", type=Path, nargs="+")
    parser.add_argument("-o", "--output", type=Path, help="PNG")
    parser.add_argument("--seeds", type=int, default=10)
    given = parser.parse_args(arguments)
    require("matplotlib")
    from matplotlib.figure import Figure

    sweeps = {task: s for path in given.journals for task, s in read_sweeps(path).items()}
    figure = Figure(figsize=(5 * max(len(sweeps), 1), 3.2), layout="constrained")
    panels = figure.subplots(1, max(len(sweeps), 1), squeeze=False)[0]
    for axes, (task, sweep) in zip(panels, sweeps.items(), strict=False):
        third = len(sweep) // 3
        for name, lines in curves(sweep, third, given.seeds).items():
            mean = np.mean(lines, axis=0)
            axes.plot(range(1, third + 1), mean, label=name)
            worst = min(line[-1] for line in lines)
            print(
                f"{task}: {len(sweep)} points, {name}: after {third} trials {mean[-1]:.3f} of the "
                f"best (worst of {given.seeds} seeds {worst:.3f}), mean over trials "
                f"{float(np.mean(mean)):.3f}"
            )
        axes.set_title(task, fontsize=8)
        axes.set_xlabel("trials")
        axes.set_ylabel("best so far / best")
        axes.legend()
    if given.output:
        figure.savefig(given.output, dpi=120)


if __name__ == "__main__":
    main()
