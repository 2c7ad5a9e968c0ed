"""Candidates for a GPU judged by their machine code (`apq_tvm.bench.gpu.static`), without one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from apq_tvm.bench.gpu.layer import GpuLayer
from apq_tvm.bench.gpu.static import StaticLayer, ideal_bytes
from apq_tvm.bench.linear import LinearCase
from apq_tvm.errors import BadTarget
from apq_tvm.schedules.decide import Decide, Defaults, Recorded
from apq_tvm.tune.static.figure import StaticFigure
from apq_tvm.tune.tasks import Task
from apq_tvm.tuning_logs.records import FUNCTION

if TYPE_CHECKING:
    from apq_tvm.tune.functions.graph import AnyTask
    from apq_tvm.tune.space import Point


class GpuJudge:
    """Judges candidates of one linear layer on a GPU.

    Parameters
    ----------
    task : Task or GraphTask

    Raises
    ------
    BadTarget
        The task is no linear layer.
    """

    def __init__(self, task: AnyTask) -> None:
        if not isinstance(task, Task) or task.op == FUNCTION:
            raise BadTarget(f"{task.name}: of GPUs only kernels of linear layers are judged")
        self._task = task
        self._known: dict[str, StaticFigure] = {}

    def figure(self, point: Point) -> StaticFigure:
        """What a candidate should cost, in microseconds.

        Raises
        ------
        BadTarget
            Its kernel is not the one that serves the task's rows.
        ApqError
            A compiler or disassembler is missing or failed.
        """
        from apq_tvm.codegen.cuda.compilers import find_compiler

        task, decisions = self._task, dict(point.decisions)

        def decide(name: str) -> Decide:
            return Recorded(decisions) if name == point.kernel else Defaults()

        layer = GpuLayer(task.spec.n, task.spec.k, task.scheme, task.profile, decide)
        served = layer.choice(task.m, task.width).kernel
        if served != point.kernel:
            raise BadTarget(f"{point.kernel} is not judged: {served} serves {task.m} rows")
        if layer.code.source not in self._known:
            gpu = task.profile.gpu
            assert gpu is not None
            image = find_compiler(gpu).image(layer.code, gpu.sm)
            self._known[layer.code.source] = self._judged(layer, image)
        return self._known[layer.code.source]

    def _judged(self, layer: GpuLayer, image: bytes) -> StaticFigure:
        task = self._task
        width = f"@{task.width}" if task.width else ""
        case = LinearCase(task.spec.n, task.spec.k, task.m, task.scheme + width, 1)
        row: dict[str, Any] = StaticLayer(layer, image).row(case)
        issue = row["times_us"].get("instructions", 0.0)
        each = row["instructions_per_weight"] or 0.0
        return StaticFigure(each, 0.0, ideal_bytes(layer, case), row["static_us"] + issue)
