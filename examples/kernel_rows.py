"""Which kernel serves how many rows: the defaults of all that read one layout, in turns.

The figures behind ``tuning_logs/<device>/thresholds.json``. Layers have random weights, out of the
caches, or, with ``--weights 4``, as many as a model of 4 MB has, which stay in them: what is faster
with one may be slower with the other. Ratios are the time of the kernel that is chosen today over a
kernel's, so that above 1 it is faster::

    python examples/kernel_rows.py --shapes 1536x576,4096x4096 --schemes W4A8g32,W8A8 --rows 8,16,32
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from apq_tvm.cli.bench import parse_counts, parse_shapes
from apq_tvm.codegen.build.toolchain import find_toolchain
from apq_tvm.schedules.decide import Defaults
from apq_tvm.tune.api import plan_of
from apq_tvm.tune.candidates import Workshop
from apq_tvm.tune.local import Local
from apq_tvm.tune.measure import OK, SECOND_ROUNDS, Bench
from apq_tvm.tune.program import Linker
from apq_tvm.tune.tasks import Task, extract
from apq_tvm.tuning_logs.records import LINEAR


def ratios(
    task: Task, linker: Linker, folder: Path, threads: int, weights: int
) -> dict[str, float]:
    """Kernel → the chosen one's time over its; of those that are right."""
    points = [task.point(name, Defaults()) for name in task.kernels]
    workshop = Workshop(task, folder, threads)
    bench = Bench(workshop, linker, Local(), folder, points[0], weights=weights)
    trials = bench.trials(points[1:], SECOND_ROUNDS)
    return {trial.point.kernel: trial.ratio for trial in trials if trial.status == OK}


def main() -> None:
    """Print a line for each scheme, shape and number of rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", type=parse_shapes, default=[(1536, 576), (4096, 4096)])
    parser.add_argument("--schemes", default="W4A8g32,W8A8")
    parser.add_argument("--rows", default="8,16,32")
    parser.add_argument("--target", default="host")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--weights", type=int, default=0, metavar="MB")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for scheme in asked.schemes.split(","):
            for plan in plan_of(None, asked.target, scheme, asked.shapes):
                linker = Linker(find_toolchain(plan.profile.triple, exact=False), folder)
                for task in extract(plan, parse_counts(asked.rows, "--rows")):
                    if task.op != LINEAR or len(task.kernels) < 2:
                        continue
                    given = (linker, folder, asked.threads, asked.weights << 20)
                    found = sorted(ratios(task, *given).items(), key=lambda r: -r[1])
                    words = ", ".join(f"{kernel} {ratio:.2f}" for kernel, ratio in found)
                    print(f"{task.name} M={task.m}, {task.kernel} 1.00: {words}", flush=True)


if __name__ == "__main__":
    main()
