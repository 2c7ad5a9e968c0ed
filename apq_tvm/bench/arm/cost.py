"""What a call costs, of the pieces of code it executed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from apq_tvm.bench.arm.loops import DOT, Body, bodies
from apq_tvm.bench.arm.mca import Analyser
from apq_tvm.bench.trace import Instruction
from apq_tvm.types import DeviceProfile


@dataclass(frozen=True)
class Cost:
    """What one call of a function costs.

    Parameters
    ----------
    instructions : int
        Executed by the whole call, with the library functions it calls.
    judged : tuple of Body
        The function's own code.
    each : tuple of float
        Cycles of one execution of every body.
    """

    instructions: int
    judged: tuple[Body, ...]
    each: tuple[float, ...]

    @property
    def spent(self) -> list[float]:
        """Cycles of every body, over all its executions."""
        return [b.count * c for b, c in zip(self.judged, self.each, strict=True)]

    @property
    def cycles(self) -> float:
        """Of the call."""
        return sum(self.spent)

    def uses(self, names: Sequence[str]) -> int:
        """Executed instructions with one of these mnemonics."""
        return sum(b.count * b.uses(names) for b in self.judged)

    def figures(self, m: int, weights: int, profile: DeviceProfile) -> dict[str, Any]:
        """Entries of a row of `bench_static`, for `m` rows of activations times `weights`."""
        macs, peaks = m * weights, profile.macs_per_cycle
        used = [name for name, family in DOT.items() if name in peaks and self.uses(family)]
        best = max(used or peaks, key=lambda name: peaks[name])
        # smmla multiplies two rows of x: of one row it can do no more than sdot.
        limit = "sdot" if best == "smmla" and m == 1 else best
        rate = macs / self.cycles
        hottest = self.spent.index(max(self.spent))
        hot, each = self.judged[hottest], self.each[hottest]
        dots = self.uses(DOT[best])
        loop_macs = macs * hot.count * hot.uses(DOT[best]) / dots if dots else 0
        own = sum(b.count * len(b.instructions) for b in self.judged)
        return {
            "instructions": self.instructions,
            "cycles": self.cycles,
            "macs_per_cycle": rate,
            "peak_share": rate / peaks[limit],
            "peak_instruction": limit,
            "loop_cycles": each,
            "loop_count": hot.count,
            "loop_instructions": len(hot.instructions),
            "loop_share": hot.count * each / self.cycles,
            "loop_peak_share": loop_macs / (hot.count * each) / peaks[limit],
            "judged_share": own / self.instructions,
        }


def judge(instructions: int, code: Sequence[Instruction], analyser: Analyser) -> Cost:
    """Cost of a call that executed `instructions` in all, `code` of them its own."""
    judged = tuple(bodies(code))
    return Cost(instructions, judged, tuple(analyser.cycles(judged)))
