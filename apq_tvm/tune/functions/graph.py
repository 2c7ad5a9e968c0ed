"""Tasks of functions that are no linear layers: softmax, norms, attention, images, fused ones.

A record of one is found again by the hash of its default schedule. What a candidate must give is
what the function gives unscheduled, as plain loops.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from apq_tvm.codegen.graph.work import nanoseconds
from apq_tvm.schedule import operation
from apq_tvm.schedules.decide import (
    Decide,
    Defaults,
    Questions,
    Recorded,
)
from apq_tvm.schedules.graph.rules import schedule_function
from apq_tvm.schedules.recorded import fingerprint
from apq_tvm.tune.candidates import Builder, Built
from apq_tvm.tune.functions import attended
from apq_tvm.tune.functions.plain import plain_function
from apq_tvm.tune.functions.sizes import shapes_of
from apq_tvm.tune.functions.windows import WindowsTask, windows_tasks
from apq_tvm.tune.program import INPUT, SCRATCH, Batch, Call, Expected
from apq_tvm.tune.space import Point, Space, space_of
from apq_tvm.tune.tasks import Task
from apq_tvm.tuning_logs.records import FUNCTION
from apq_tvm.types import Array, DeviceProfile, KernelPlan

ATTENTION = ("attention", "pack_keys")
"""Whose sizes depend on each other, and whose results `apq_tvm.tune.functions.attended` knows."""

WINDOWS = ("convolution", "depthwise", "pool")
"""Of images; what of a window lies outside is left out, so that all sizes do."""

OPERATIONS = ("batch_matmul", "generic", "layernorm", "softmax", *WINDOWS, *ATTENTION)
"""Whose arguments may be any floats."""

MOST_ELEMENTS = 1 << 25
"""Of all tensors of a function that is tuned."""

_SETS = (1.0, 30.0, 1e-4)
"""Sizes of inputs: ordinary, large, small ones."""

_ERROR = 3e-6
"""Of a result, against the largest of its row: float32 sums in another order."""

_TERMS = 16
"""Of a sum, from which on that error grows with the root of their number."""


@dataclass(frozen=True, eq=False)
class GraphTask:
    """One function of a model.

    Parameters
    ----------
    func : tvm.tirx.PrimFunc
        Unscheduled.
    profile : DeviceProfile
    shapes : tuple of tuple of int
        Of its arguments.
    layers : tuple of str
        A name for each call of it.
    """

    func: Any = field(repr=False)
    profile: DeviceProfile = field(repr=False)
    shapes: tuple[tuple[int, ...], ...]
    layers: tuple[str, ...]

    op = FUNCTION
    rows = (1, -1)
    width = 0

    @property
    def kernel(self) -> str:
        """What records call it: its operation."""
        return operation(self.func)

    @property
    def name(self) -> str:
        """For people."""
        sizes = "x".join(map(str, self.shapes[-1]))
        return f"{self.kernel} {sizes}"

    @property
    def m(self) -> int:
        """Rows of its result."""
        return int(np.prod(self.shapes[-1][:-1], dtype=np.int64))

    @property
    def key(self) -> str:
        """By which trials of the task are found again."""
        return f"{self.op} {self.kernel} {self.schedule} {self.shapes}"

    @cached_property
    def schedule(self) -> str:
        """`fingerprint` of the default."""
        return fingerprint(self.scheduled(Defaults()))

    @property
    def share(self) -> float:
        """A rough time of its calls in one run, in nanoseconds."""
        sizes = [int(np.prod(s, dtype=np.int64)) for s in self.shapes]
        return len(self.layers) * (0.5 * sum(sizes) + 0.02 * self.terms * sizes[-1])

    @property
    def terms(self) -> int:
        """Operations of an element of the result, where they are many."""
        attrs = self.func.attrs
        each = int(attrs["apq.work"]) if self.kernel in (*WINDOWS, *ATTENTION) else 0
        if self.kernel == "attention":
            tensor, axis = (int(n) for n in attrs["apq.work_along"])
            each *= self.shapes[tensor][axis]
        return each

    def scheduled(self, decide: Decide) -> Any:
        """The PrimFunc as a module holds it."""
        import tvm

        with tvm.target.Target(dict(self.profile.target)):
            return schedule_function(self.func, self.profile, decide)[0]

    @property
    def default(self) -> str:
        """What records call the default."""
        return self.kernel

    def point(self, kernel: str, decide: Decide) -> Point:
        """The candidate that somebody answers."""
        asked = Questions(decide)
        asked.of(self.scheduled)
        return Point(kernel, tuple(asked.taken.items()))

    def space(self) -> Space:
        """All candidates."""
        return space_of({self.kernel: self.scheduled})

    def schedule_of(self, point: Point) -> str:
        """`fingerprint` of the default that a record of a candidate compares with."""
        return self.schedule

    def answers(self, point: Point) -> Mapping[str, Any]:
        """The decisions of a point that differ from the defaults."""
        default = dict(self.point(self.kernel, Defaults()).decisions)
        return {n: v for n, v in point.decisions if default.get(n) != v}


AnyTask: TypeAlias = Task | GraphTask
"""What there is to tune."""


def extract_functions(plan: KernelPlan, sizes: Mapping[str, int]) -> list[GraphTask | WindowsTask]:
    """Functions of a model that have float tensors alone and one result, and roundings of windows.

    Parameters
    ----------
    plan : KernelPlan
    sizes : mapping of str to int
        Of symbolic dimensions.
    """
    from tvm import tirx

    from apq_tvm.lower import lower
    from apq_tvm.pack import pack
    from apq_tvm.pipeline import default_decisions
    from apq_tvm.progress import Silent
    from apq_tvm.schedules.devices import linear_kernels
    from apq_tvm.select import by_name

    kernels = by_name(linear_kernels(plan.profile))
    lowered = lower(pack(plan, Silent()), kernels, default_decisions)
    text = lowered.mod["main"].script()
    tasks: list[GraphTask | WindowsTask] = windows_tasks(lowered, sizes)
    for var, func in lowered.mod.functions.items():
        name = var.name_hint
        known = name in lowered.linears or name in lowered.preparations
        if known or not isinstance(func, tirx.PrimFunc) or not _is_plain(func):
            continue
        shapes = shapes_of(func, sizes)
        if operation(func) in ATTENTION:
            fitting = attended.consistent(func, shapes)
            if fitting is None:
                continue
            shapes = fitting
        calls = max(1, text.count(f"cls.{name},"))
        if sum(int(np.prod(shape, dtype=np.int64)) for shape in shapes) <= MOST_ELEMENTS:
            tasks.append(GraphTask(func, plan.profile, shapes, (name,) * calls))
    return sorted(tasks, key=lambda task: (-task.share, task.key))


def _buffers(func: Any) -> list[Any]:
    """The arguments, which have shapes and types."""
    return list(func.params)


def _is_plain(func: Any) -> bool:
    """Whether inputs of any values may be given, and the last argument alone is written."""
    from tvm import tirx

    from apq_tvm.schedules.graph.exprs import collect

    if operation(func) not in OPERATIONS:
        return False
    buffers = _buffers(func)
    if len(buffers) < 2 or not all(hasattr(b, "shape") for b in buffers):
        return False
    halves = {"float16"} if operation(func) == "attention" else set()  # of a cache
    if {str(b.dtype) for b in buffers} - halves != {"float32"} or not buffers[-1].shape:
        return False
    written = {store.buffer.name for store in collect(func.body, tirx.BufferStore)}
    return not written & {buffer.name for buffer in buffers[:-1]}


class FunctionWorkshop(Builder):
    """Builds candidates of a function, and what they are called with.

    Parameters
    ----------
    task : GraphTask
    folder : Path
        For object files.
    threads : int
        That candidates are timed with.
    """

    loose = 1.0

    def __init__(self, task: GraphTask, folder: Path, threads: int) -> None:
        super().__init__(task.profile, folder, threads)
        self.task = task
        if task.kernel in ATTENTION:
            self._inputs = attended.inputs_of(task.func, task.shapes, len(task.layers))
        else:
            self._inputs = _inputs(task)
        self._args = tuple(self._add(INPUT, *arrays) for arrays in self._inputs)
        self._y = self._add(SCRATCH, np.zeros(task.shapes[-1], np.float32))
        self._expected: tuple[Expected, ...] = ()

    def scheduled(self, point: Point) -> Any:
        """The PrimFunc of a candidate."""
        return self.task.scheduled(Recorded(dict(point.decisions)))

    def estimate(self, func: Any) -> float:
        """As a module has it: what shares a loop out among threads."""
        return nanoseconds(func, self.task.shapes)

    def operands(self, point: Point) -> tuple[Array, ...]:
        """What any candidate is called with."""
        return tuple(self._operands[i].arrays[0] for i in (*self._args, self._y))

    def batch(self, candidates: Sequence[Built]) -> tuple[Batch, list[Path]]:
        """The batch of these candidates, the default first, and all object files."""
        args = (*self._args, self._y)
        calls = tuple((Call(built.function, args, built.work),) for built in candidates)
        paths = list(dict.fromkeys(path for built in candidates for path in built.objects))
        operands = tuple(self._operands)
        return Batch(operands, calls, self._y, (self.expected(),), self.threads), paths

    def expected(self) -> tuple[Expected, ...]:
        """Results of the unscheduled function for every set of inputs, computed once."""
        task = self.task
        if not self._expected and task.kernel in ATTENTION:
            self._expected = tuple(
                attended.expected_of(task.func, arrays, task.shapes[-1])
                for arrays in zip(*self._inputs, strict=True)
            )
        if not self._expected:
            plain = plain_function(task.func)
            made = []
            for arrays in zip(*self._inputs, strict=True):
                y = np.zeros(task.shapes[-1], np.float32)
                plain(arrays, y)
                made.append(_expected_of(y, max(1.0, (task.terms / _TERMS) ** 0.5)))
            self._expected = tuple(made)
        return self._expected


def _inputs(task: GraphTask) -> list[list[Array]]:
    """Of every argument but the last, its array in each set of inputs.

    Of images also what is blank, and what has one bright point or every other one dark.
    """
    rng = np.random.default_rng(len(task.layers))
    made = [
        [(size * rng.standard_normal(shape)).astype(np.float32) for size in _SETS]
        for shape in task.shapes[:-1]
    ]
    if task.kernel in WINDOWS:
        blank = np.zeros(task.shapes[0], np.float32)
        point, stripes = blank.copy(), blank + 50
        point.flat[point.size // 2] = 1e4
        stripes.reshape(-1)[::2] *= -1
        made[0] += [blank, point, stripes]
        for arrays in made[1:]:
            arrays += [arrays[0]] * 3
    return made


def _expected_of(y: Array, terms: float = 1.0) -> Expected:
    """What rows must be, and how near; `terms` is by how much errors of sums are larger."""
    rows = y.reshape(-1, y.shape[-1])
    largest = np.abs(rows).max(axis=1)
    return Expected(rows, (terms * _ERROR * largest + terms * 1e-6 * float(largest.max()) + 1e-30))
