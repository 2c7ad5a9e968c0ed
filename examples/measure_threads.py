"""Times modules on one and two threads, on a machine as it is and beside one busy process.

    python examples/measure_threads.py old=build/before/minilm_w4 new=build/minilm_w4 --rounds 8

Each module runs in a process of its own; they take turns of a fraction of a second, so that what
else the machine does meets all of them alike. Least and mean milliseconds of a run: without
neighbours the least tells, beside a busy process the mean does.

On a machine that others use, root can have it alone: ``chrt -f 1`` before the command gives these
processes every core that they want. With a busy process, which is then to have its share,
``setsid -w sh -c 'echo -20 > /proc/self/autogroup; exec python examples/measure_threads.py ...'``.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np


def feeds_of(module: Any, batch: int, length: int) -> dict[str, Any]:
    """Inputs of two varying dimensions are ids or a mask, others noise."""
    rng = np.random.default_rng(0)
    sizes = {}
    for info in module.inputs:
        dims = [d for d in info.shape if isinstance(d, str)]
        sizes.update({d: v for d, v in zip(dims, (batch, length), strict=False) if d not in sizes})
    feeds = {}
    for info in module.inputs:
        shape = [sizes[d] if isinstance(d, str) else d for d in info.shape]
        if info.dtype.startswith("int"):
            values = rng.integers(100, 2000, shape) if info.name == "input_ids" else np.ones(shape)
            feeds[info.name] = values.astype(info.dtype)
        else:
            feeds[info.name] = rng.standard_normal(shape).astype(info.dtype)
    return feeds


def serve(folder: Path) -> None:
    """Answer lines of ``batch length threads seconds`` by the least and the mean milliseconds."""
    sys.path.insert(0, str(folder.parent))
    module = importlib.import_module(folder.name)
    print("ready", flush=True)
    for line in sys.stdin:
        batch, length, threads, seconds = line.split()
        module.set_num_threads(int(threads))
        feeds = feeds_of(module, int(batch), int(length))
        for _ in range(3):
            module.run(feeds)
        times = []
        end = time.perf_counter() + float(seconds)
        while time.perf_counter() < end:
            start = time.perf_counter()
            module.run(feeds)
            times.append((time.perf_counter() - start) * 1e3)
        print(json.dumps([min(times), sum(times) / len(times)]), flush=True)


def start(folder: str) -> subprocess.Popen[str]:
    """A process that serves a module."""
    command = [sys.executable, __file__, "--serve", str(Path(folder).resolve())]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    return child


def ask(child: subprocess.Popen[str], *question: Any) -> list[float]:
    assert child.stdin is not None and child.stdout is not None
    child.stdin.write(" ".join(map(str, question)) + "\n")
    child.stdin.flush()
    answer: list[float] = json.loads(child.stdout.readline())
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("modules", nargs="*", metavar="NAME=FOLDER")
    parser.add_argument("--shape", action="append", help="BATCHxLENGTH, by default 1x16 and 1x128")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=0.3, help="of a turn")
    parser.add_argument("--neighbours", default="none,yes", help="of the measurement: none, yes")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve)
        return
    children = {name: start(folder) for name, _, folder in (m.partition("=") for m in args.modules)}
    print("neighbour shape    module threads   least ms    mean ms   best mean ms")
    for neighbour in args.neighbours.split(","):
        busy = subprocess.Popen(["yes"], stdout=subprocess.DEVNULL) if neighbour == "yes" else None
        answers: dict[tuple[str, str, int], list[list[float]]] = {}
        for _ in range(args.rounds):
            for shape in args.shape or ["1x16", "1x128"]:
                for name, child in children.items():
                    for threads in (1, 2):
                        took = ask(child, *shape.split("x"), threads, args.seconds)
                        answers.setdefault((shape, name, threads), []).append(took)
        if busy is not None:
            busy.kill()
            busy.wait()
        for (shape, name, threads), rounds in answers.items():
            least, means = min(r[0] for r in rounds), [r[1] for r in rounds]
            mean = sum(means) / len(means)
            print(
                f"{neighbour:9} {shape:8} {name:6} {threads:7} {least:10.3f} {mean:10.3f}"
                f" {min(means):14.3f}"
            )
    for child in children.values():
        child.kill()
        child.wait()


if __name__ == "__main__":
    main()
