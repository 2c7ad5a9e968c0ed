"""A device without a processor: it says what a program would print, by its own clock."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from apq_tvm.errors import DeviceFailed
from apq_tvm.tune.device import Job, Outcome

Say = Callable[[str], None]


@dataclass
class FakeDevice:
    """Prints samples of ``cost`` nanoseconds with noise.

    Parameters
    ----------
    cost : callable
        Symbol of a candidate's function → nanoseconds; the job's program is a list of symbols.
    wrong, crashing, hanging : set of str
        Symbols of candidates that are wrong, or end the program.
    noise : float
        Standard deviation of a sample, relative; with 0 there are no outliers either.
    pace : callable
        How much slower the machine is, by the number of samples that it took before.
    lost : int
        So many runs fail at first.
    """

    cost: Callable[[str], float] = lambda symbol: 1000.0
    wrong: set[str] = field(default_factory=set)
    crashing: set[str] = field(default_factory=set)
    hanging: set[str] = field(default_factory=set)
    noise: float = 0.02
    pace: Callable[[int], float] = lambda taken: 1.0
    lost: int = 0
    seed: int = 0
    jumps: bool = False
    name: str = "fake"
    speed: bool = True
    cold_bytes: int = 1
    streams: bool = True
    runs: int = 0
    taken: int = 0
    timed: list[str] = field(default_factory=list)

    def describe(self) -> str:
        return "a fake"

    def check(self, features: Sequence[str]) -> None:
        pass

    def forget(self, data: Path) -> None:
        pass

    def run(self, job: Job, on_line: Callable[[str], None] | None = None) -> Outcome:
        self.runs += 1
        if self.lost:
            self.lost -= 1
            raise DeviceFailed("the fake is lost")
        rng = random.Random(f"{self.seed} {self.runs}")
        symbols = job.program.read_text().split()
        options = dict(word.split("=") for word in job.arguments)
        order = [int(n) for n in options["only"].split(",")]
        lines = [f"apq-tune 1 {len(symbols)}"]

        def say(line: str) -> None:
            lines.append(line)
            if on_line is not None:
                on_line(line)

        code = self._in_turns(symbols, order, int(options["rounds"]), rng, say)
        if code == 0:
            say("done")
        return Outcome(tuple(lines), code)

    def _check(self, symbols: Sequence[str], number: int, say: Say) -> bool | None:
        """Whether a candidate is right, None if it ends the program."""
        say(f"at check {number}")
        if symbols[number] in self.crashing:
            return None
        wrong = symbols[number] in self.wrong
        say(f"checked {number} {300 if wrong else 0.1}")
        return not wrong

    def _sample(self, symbols: Sequence[str], number: int, rng: random.Random) -> str:
        outlier = 0.5 if self.noise and rng.random() < 0.02 else 0
        slow = (1 + abs(rng.gauss(0, self.noise)) + outlier) * self.pace(self.taken)
        self.taken += 1
        time = self.cost(symbols[number]) * slow
        return f"t {number} {-1 if self.jumps and rng.random() < 0.1 else round(time, 1)}"

    def _turn(self, symbols: Sequence[str], number: int, rng: random.Random, say: Say) -> bool:
        say(self._sample(symbols, 0, rng))
        say(f"at time {number}")
        if symbols[number] in self.hanging:
            return False
        self.timed.append(symbols[number])
        say(self._sample(symbols, number, rng))
        return True

    def _in_turns(
        self, symbols: Sequence[str], order: list[int], rounds: int, rng: random.Random, say: Say
    ) -> int:
        self._check(symbols, 0, say)
        right = []
        for number in order:
            found = self._check(symbols, number, say)
            if found is None:
                return -11
            if found:
                right.append(number)
                if not self._turn(symbols, number, rng, say):
                    return -14
                say(self._sample(symbols, 0, rng))
        for _ in range(rounds - 1):
            rng.shuffle(right)
            for number in right:
                if not self._turn(symbols, number, rng, say):
                    return -14
        say(self._sample(symbols, 0, rng))
        return 0


class FakeLinker:
    """Writes a batch's symbols instead of a program."""

    tools = None

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def link(
        self, name: str, functions: Sequence[str], kernels: Sequence[Path]
    ) -> tuple[Path, tuple[Path, ...]]:
        path = self._folder / name
        path.write_text(" ".join(functions))
        return path, ()
