"""`kill -9` on a tuner that times code here, from outside; it goes on where it was."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from apq_tvm.codegen.build.toolchain import find_toolchain
from apq_tvm.tune.api import plan_of, tune
from apq_tvm.tune.candidates import Workshop
from apq_tvm.tune.local import Local
from apq_tvm.tune.measure import OK, Bench, Trial
from apq_tvm.tune.program import Linker
from apq_tvm.tune.search import BATCH
from apq_tvm.tune.tasks import extract

TRIALS = 64  # whole spaces: nothing that needs xgboost
WANTED = {"shapes": [(256, 128)], "scheme": "W4A8g32", "rows": [1], "threads": 1, "trials": TRIALS}
PROGRAM = "import sys; from apq_tvm.tune import tune; tune(**{wanted!r}, log=sys.argv[1])"


def test_a_killed_tuner_goes_on(tmp_path: Path) -> None:
    log, trials = tmp_path / "log.json", tmp_path / "log.json.trials"
    command = [sys.executable, "-c", PROGRAM.format(wanted=WANTED), str(log)]
    process = subprocess.Popen(command, start_new_session=True)
    while not trials.exists() or trials.read_bytes().count(b"\n") < 3:
        assert process.poll() is None, "it ended before it had tried three"
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    kept = [json.loads(line) for line in trials.read_text().splitlines()]
    assert 3 <= len(kept) < BATCH  # in the middle of the first batch
    before = {json.dumps([line["kernel"], line["decisions"]]) for line in kept}
    assert len(before) == len(kept)
    tune(**WANTED, log=log)  # type: ignore[arg-type]
    lines = [json.loads(line) for line in trials.read_text().splitlines()][len(kept) :]
    made = {json.dumps([e["kernel"], e["decisions"]]) for e in lines if "kernel" in e}
    assert made and not made & before


def test_candidates_take_turns_and_are_told_at_once(tmp_path: Path) -> None:
    """The program's own lines: of a candidate something is told before the next is looked at."""
    (plan,) = plan_of(None, "host", "W8A8", [(64, 96)])
    (task,) = [t for t in extract(plan, [2]) if t.op == "linear"]
    points = task.space().points
    linker = Linker(find_toolchain(), tmp_path)
    said: list[str] = []

    class Listening(Local):
        def run(self, job, on_line=None):  # type: ignore[no-untyped-def]
            def hear(line: str) -> None:
                said.append(line)
                on_line(line)

            return super().run(job, hear)

    bench = Bench(Workshop(task, tmp_path, 1), linker, Listening(), tmp_path, points[0])
    told: list[tuple[int, Trial]] = []
    made = bench.trials(points[1:4], rounds=3, told=lambda trial: told.append((len(said), trial)))
    assert [trial.point for _, trial in told[:3]] == list(points[1:4])
    assert {trial.point: trial for _, trial in told} == {trial.point: trial for trial in made}
    assert all(trial.status == OK and trial.ratio > 0 for trial in made)
    looked_at = [number for number, line in enumerate(said, 1) if line.startswith("at check")]
    ends = [number - 1 for number in looked_at[2:]]
    assert [number for number, _ in told[:2]] == ends
    samples = [int(line.split()[1]) for line in said if line.startswith("t ")]
    assert samples[:9] == [0, 1, 0, 0, 2, 0, 0, 3, 0] and samples[9::2] == [0] * 7
    assert sorted(samples[10:16:2]) == sorted(samples[16::2]) == [1, 2, 3]
