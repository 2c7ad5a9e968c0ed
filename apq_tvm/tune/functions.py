"""Tasks of functions that are no linear layers: softmax, norms, attention, fused elementwise ones.

A record of one is found again by the hash of its default schedule. What a candidate must give is
what the function gives unscheduled, as plain loops.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from apq_tvm.schedule import operation
from apq_tvm.schedules.decide import Decide, Defaults, Recorded, Recording
from apq_tvm.schedules.graph.lets import spill_lets
from apq_tvm.schedules.graph.rules import schedule_function
from apq_tvm.schedules.recorded import fingerprint
from apq_tvm.tune.candidates import Builder, Built
from apq_tvm.tune.program import INPUT, SCRATCH, Batch, Call, Expected
from apq_tvm.tune.space import Point, Space, space_of
from apq_tvm.tuning_logs.records import FUNCTION
from apq_tvm.types import Array, DeviceProfile, KernelPlan

SIZES = (1, 128)
"""Of symbolic dimensions where the user gives none: of the first of a tensor, and of others."""

OPERATIONS = ("batch_matmul", "generic", "layernorm", "softmax")
"""Whose arguments may be any floats of any sizes: attention's sizes depend on each other."""

MOST_ELEMENTS = 1 << 25
"""Of all tensors of a function that is tuned."""

_SETS = (1.0, 30.0, 1e-4)
"""Sizes of inputs: ordinary, large, small ones."""

_ERROR = 3e-6
"""Of a result, against the largest of its row: float32 sums in another order."""


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
        return len(self.layers) * 0.5 * sum(int(np.prod(s, dtype=np.int64)) for s in self.shapes)

    def scheduled(self, decide: Decide) -> Any:
        """The PrimFunc as a module holds it."""
        import tvm

        with tvm.target.Target(dict(self.profile.target)):
            return schedule_function(self.func, self.profile, decide)[0]

    def space(self) -> Space:
        """All candidates."""
        return space_of({self.kernel: self.scheduled})

    def answers(self, point: Point) -> Mapping[str, Any]:
        """The decisions of a point that differ from the defaults."""
        default = Recording(Defaults())
        self.scheduled(default)
        return {n: v for n, v in point.decisions if default.taken.get(n) != v}


def extract_functions(plan: KernelPlan, sizes: Mapping[str, int]) -> list[GraphTask]:
    """Functions of a model that have float tensors alone and one result.

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
    tasks = []
    for var, func in lowered.mod.functions.items():
        name = var.name_hint
        known = name in lowered.linears or name in lowered.preparations
        if known or not isinstance(func, tirx.PrimFunc) or not _is_plain(func):
            continue
        shapes = _shapes(func, sizes)
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
    if {str(b.dtype) for b in buffers} != {"float32"} or not buffers[-1].shape:
        return False
    written = {store.buffer.name for store in collect(func.body, tirx.BufferStore)}
    return not written & {buffer.name for buffer in buffers[:-1]}


def _shapes(func: Any, sizes: Mapping[str, int]) -> tuple[tuple[int, ...], ...]:
    """Shapes with numbers for symbols."""
    from tvm import sym, tirx
    from tvm_ffi import structural_map

    simplify, known = sym.Analyzer().simplify, dict[Any, Any]()
    buffers = _buffers(func)
    for buffer in buffers:
        for axis, dim in enumerate(buffer.shape):
            if isinstance(dim, tirx.Var) and dim not in known:
                size = sizes.get(str(dim.name), SIZES[axis > 0 or len(buffer.shape) == 1])
                known[dim] = tirx.const(size, str(dim.dtype) if hasattr(dim, "dtype") else "int64")

    def number(dim: Any) -> int:
        value = structural_map(dim, (tirx.Var, lambda var: known.get(var, tirx.const(4, "int64"))))
        return int(simplify(value))

    return tuple(tuple(number(dim) for dim in buffer.shape) for buffer in buffers)


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
        rng = np.random.default_rng(len(task.layers))
        self._inputs = [
            [(size * rng.standard_normal(shape)).astype(np.float32) for size in _SETS]
            for shape in task.shapes[:-1]
        ]
        self._args = tuple(self._add(INPUT, *arrays) for arrays in self._inputs)
        self._y = self._add(SCRATCH, np.zeros(task.shapes[-1], np.float32))
        self._expected: tuple[Expected, ...] = ()

    def scheduled(self, point: Point) -> Any:
        """The PrimFunc of a candidate."""
        return self.task.scheduled(Recorded(dict(point.decisions)))

    def batch(self, candidates: Sequence[Built]) -> tuple[Batch, list[Path]]:
        """The batch of these candidates, the default first, and all object files."""
        args = (*self._args, self._y)
        work = self._bytes(args) * 0.25
        calls = tuple((Call(built.function, args, work),) for built in candidates)
        paths = list(dict.fromkeys(path for built in candidates for path in built.objects))
        operands = tuple(self._operands)
        return Batch(operands, calls, self._y, (self.expected(),), self.threads), paths

    def expected(self) -> tuple[Expected, ...]:
        """Results of the unscheduled function for every set of inputs, computed once."""
        if not self._expected:
            plain = _plain(self.task.func)
            made = []
            for arrays in zip(*self._inputs, strict=True):
                y = np.zeros(self.task.shapes[-1], np.float32)
                plain(arrays, y)
                made.append(_expected_of(y))
            self._expected = tuple(made)
        return self._expected


def _plain(func: Any) -> Any:
    """The function as it is written, for this machine."""
    import tvm

    from apq_tvm.codegen.build.pipeline import build

    mod = tvm.IRModule({"main": spill_lets(func).with_attr("global_symbol", "main")})
    built = build(mod, tvm.target.Target("llvm"), checked=False)

    def call(inputs: Sequence[Array], y: Array) -> None:
        tensors = [tvm.runtime.tensor(array) for array in (*inputs, y)]
        built["main"](*tensors)
        y[...] = tensors[-1].numpy()

    return call


def _expected_of(y: Array) -> Expected:
    """What rows must be, and how near."""
    rows = y.reshape(-1, y.shape[-1])
    largest = np.abs(rows).max(axis=1)
    return Expected(rows, (_ERROR * largest + 1e-6 * float(largest.max()) + 1e-30))
