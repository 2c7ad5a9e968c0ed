"""What a candidate should cost, judged by its code alone.

Processors: instructions of one call on one thread, counted (64-bit Arm under qemu-user, x86-64
where it runs); llvm-mca's cycles of every piece of code times its executions, as
`apq_tvm.bench.arm.static` has them; plus the bytes of its operands at `BYTES_PER_CYCLE`. GPUs: the
longest of the times that `apq_tvm.bench.gpu.static` computes, plus the time to issue instructions.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from apq_tvm.bench.arm.layer import emulated_cpu
from apq_tvm.bench.arm.loops import bodies
from apq_tvm.bench.arm.loops import branch_target as arm_target
from apq_tvm.bench.arm.mca import Analyser, find_analyser
from apq_tvm.bench.trace import Instruction
from apq_tvm.bench.trace import executed as traced
from apq_tvm.schedules.graph.rewrites.lets import spill_lets
from apq_tvm.schedules.graph.rewrites.loops import GRAIN
from apq_tvm.schedules.recorded import fingerprint
from apq_tvm.tune.static import x86
from apq_tvm.types import Array, DeviceProfile

if TYPE_CHECKING:
    from apq_tvm.tune.candidates import Builder
    from apq_tvm.tune.space import Point

BYTES_PER_CYCLE = 8.0
"""Of memory, to one core: a round figure for all. Candidates of one task mostly move the same
bytes, so that it hardly changes their order."""


ITERATIONS = 10, 30
"""Of llvm-mca: candidates are many, and their innermost loops long where they are unrolled."""


@dataclass(frozen=True)
class StaticFigure:
    """What one call of a candidate should cost.

    Parameters
    ----------
    instructions : float
        Executed; of GPUs a lane's over each weight.
    cycles : float
        Of one core for them; of GPUs 0.
    nbytes : float
        Of its operands: weights, x and y, each once.
    cost : float
        Cycles, of GPUs microseconds: smaller is faster.
    """

    instructions: float
    cycles: float
    nbytes: float
    cost: float


class CpuJudge:
    """Judges candidates of one task on a processor.

    Parameters
    ----------
    profile : DeviceProfile
    workshop : Builder
        Schedules them, and has what they are called with: its values hardly matter.
    folder : Path
        For programs.
    mca : str
        llvm-mca, if not the usual one.

    Raises
    ------
    BadTarget
        Code of the target cannot be counted on this machine.
    BadInput
        llvm-mca is missing.
    """

    def __init__(
        self, profile: DeviceProfile, workshop: Builder, folder: Path, mca: str = ""
    ) -> None:
        import tvm

        if profile.arch == "x86_64":
            x86.check_runs_here(profile)
        self._profile, self._workshop, self._folder = profile, workshop, folder
        analyser = find_analyser(str(profile.target["mcpu"]), mca, profile.arch)
        self._analyser = replace(analyser, iterations=ITERATIONS)
        self._target = tvm.target.Target(dict(profile.target))
        self._known: dict[str, StaticFigure] = {}

    def figure(self, point: Point) -> StaticFigure:
        """What a candidate should cost.

        Raises
        ------
        NotApplicable
            Its schedule declines the combination.
        BuildError
            It cannot be built or run.
        """
        func = self._workshop.scheduled(point)
        if func.attrs is not None and GRAIN in func.attrs:  # nothing to one thread
            func = func.without_attr(GRAIN)
        text = fingerprint(func)
        if text not in self._known:
            with self._target:
                func = spill_lets(func)
            self._known[text] = self._judge(func, self._workshop.operands(point))
        return self._known[text]

    def _judge(self, func: Any, arrays: Sequence[Array]) -> StaticFigure:
        with tempfile.TemporaryDirectory(dir=self._folder) as name:
            code, cycles = self._judged(func, arrays, Path(name))
        nbytes = float(sum(array.nbytes for array in arrays))
        count = sum(instruction.count for instruction in code)
        return StaticFigure(count, cycles, nbytes, cycles + nbytes / BYTES_PER_CYCLE)

    def _judged(
        self, func: Any, arrays: Sequence[Array], folder: Path
    ) -> tuple[list[Instruction], float]:
        profile = self._profile
        if profile.arch == "x86_64":
            code = x86.executed(func, profile, arrays, folder)
            return code, cycles_of(code, self._analyser, x86.branch_target)
        from apq_tvm.bench.emulator import Program

        program = Program(func, profile, folder, emulated_cpu(profile), checked=False)
        counted = program.trace(*arrays)
        code = traced(program.path, program.functions(), counted)
        return code, cycles_of(code, self._analyser, arm_target)


def cycles_of(code: Sequence[Instruction], analyser: Analyser, target: Any) -> float:
    """Cycles of executed instructions: of every piece by llvm-mca, times its executions."""
    judged = bodies(code, target)
    each = analyser.cycles(judged)
    return sum(body.count * cycles for body, cycles in zip(judged, each, strict=True))
