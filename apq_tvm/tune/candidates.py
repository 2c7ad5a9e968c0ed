"""Candidates of a task, built: object files, and the operands that their calls take."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from apq_tvm.bench.arm.layer import outputs
from apq_tvm.codegen.build.kernels import build_kernels
from apq_tvm.errors import BuildError, NotApplicable
from apq_tvm.schedules.decide import Defaults
from apq_tvm.schedules.graph.rewrites.lets import spill_lets
from apq_tvm.schedules.linear.kernel import Preparation
from apq_tvm.schedules.recorded import fingerprint
from apq_tvm.tune.inputs import (
    APPROXIMATE,
    LOOSE,
    Activations,
    MeantRows,
    activations,
    expected,
    expected_folded,
)
from apq_tvm.tune.program import INPUT, SCRATCH, WEIGHTS, Batch, Call, Expected, Operand
from apq_tvm.tune.space import Point, covering
from apq_tvm.tune.tasks import Task, packed_arrays
from apq_tvm.tuning_logs.records import FUNCTION
from apq_tvm.types import Array, DeviceProfile

_NS_PER_BYTE, _NS_PER_MAC = 0.04, 0.03
"""As `apq_tvm.codegen.graph.work` estimates calls."""


@dataclass(frozen=True)
class Built:
    """A candidate's own code.

    Parameters
    ----------
    point : Point
    function : str
        Symbol of its kernel.
    objects : tuple of Path
    text : str
        `fingerprint` of its schedule: equal ones need not be timed twice.
    work : float
        Estimated nanoseconds of a call, 0 where its workshop knows.
    """

    point: Point
    function: str
    objects: tuple[Path, ...]
    text: str
    work: float = 0.0


class Builder:
    """Builds candidates of one task; what they are is its subclasses'.

    Parameters
    ----------
    profile : DeviceProfile
    folder : Path
        For object files.
    threads : int
        That candidates are timed with.
    """

    def __init__(self, profile: DeviceProfile, folder: Path, threads: int) -> None:
        import tvm

        self._folder, self.threads = folder, threads
        self._target = tvm.target.Target(dict(profile.target))
        self._made: dict[str, Built] = {}
        self._operands: list[Operand] = []

    def scheduled(self, point: Point) -> Any:
        """The PrimFunc of a candidate.

        Raises
        ------
        NotApplicable
            Its schedule declines the combination.
        """
        raise NotImplementedError

    def operands(self, point: Point) -> tuple[Array, ...]:
        """What a candidate's own function is called with, of the first set of inputs."""
        raise NotImplementedError

    def estimate(self, func: Any) -> float:
        """`Built.work` of a candidate."""
        return 0.0

    def _add(self, kind: int, *arrays: Any) -> int:
        self._operands.append(Operand(kind, tuple(np.ascontiguousarray(a) for a in arrays)))
        return len(self._operands) - 1

    def build(self, points: Sequence[Point]) -> Iterator[tuple[Point, Built | str]]:
        """Build candidates side by side; what cannot be built comes with the reason."""
        waiting: list[tuple[Point, Any]] = []
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            for point in points:
                try:
                    func = self.scheduled(point)
                except NotApplicable as error:
                    waiting.append((point, f"refused: {error}"))
                    continue
                except Exception as error:  # TVM's own errors have no base
                    last = (str(error).strip().splitlines() or [type(error).__name__])[-1]
                    waiting.append((point, f"cannot be scheduled: {last}"))
                    continue
                waiting.append((point, pool.submit(self._object, point, func)))
            for point, job in waiting:
                try:
                    yield point, job if isinstance(job, str) else job.result()
                except BuildError as error:
                    yield point, f"cannot be built: {error}"

    def _object(self, point: Point, func: Any) -> Built:
        """The object file of one candidate; of an equal one that there is, its."""
        import tvm

        text = fingerprint(func)
        known = self._made.get(text)
        if known is not None:
            return replace(known, point=point)
        with self._target:
            name, func = f"c{text}", spill_lets(func)
        mod = tvm.IRModule({name: func.with_attr("global_symbol", name)})
        paths = build_kernels(
            mod, [name], self._target, self._folder, f"{name}_", checked=False, in_module=True
        )
        symbol = f"__tvm_ffi_{name}_{name}"
        built = Built(point, symbol, tuple(paths), text, self.estimate(func))
        self._made[text] = built
        return built

    def _bytes(self, operands: Sequence[int]) -> int:
        return sum(self._operands[i].arrays[0].nbytes for i in operands)


class Workshop(Builder):
    """Builds candidates of one task, and what they are called with.

    Parameters
    ----------
    task : Task
    folder : Path
        For object files.
    threads : int
        That candidates are timed with.
    """

    def __init__(self, task: Task, folder: Path, threads: int) -> None:
        super().__init__(task.profile, folder, threads)
        self.task = task
        self._written: dict[str, tuple[int, ...]] = {}
        self._before: dict[str, Built] = {}
        self._sets = self.activations()
        self._x = self._add(INPUT, *(s.x for s in self._sets))
        arrays = packed_arrays(task)
        self._weights = {name: self._add(WEIGHTS, array) for name, array in arrays.items()}
        self._y = self._add(SCRATCH, np.zeros((task.m, task.spec.n), np.float32))
        self._expected: dict[MeantRows | None, tuple[Expected, ...]] = {}
        self._alone: bool | None = None

    def activations(self) -> list[Activations]:
        """Sets of inputs."""
        task = self.task
        return activations(task.spec.scheme, task.spec.k, task.m, seed=task.spec.n + task.m)

    @property
    def loose(self) -> float:
        """How many tolerances the default may miss: its kernels approximate."""
        scheme = self.task.spec.scheme
        return LOOSE if scheme is not None and scheme.family in APPROXIMATE else 1.0

    def expected(self, folded: MeantRows | None = None) -> tuple[Expected, ...]:
        """Results for every set of inputs, computed once for each way to fold them."""
        if folded not in self._expected:
            dense, tensor = self.task.dense(), self.task.tensor
            if folded is None:
                made = [expected(_values(s), dense) for s in self._sets]
            else:
                scales = None if tensor is None else tensor.scales
                made = [expected_folded(s.x, folded, dense, scales) for s in self._sets]
            self._expected[folded] = tuple(made)
        return self._expected[folded]

    def scheduled(self, point: Point) -> Any:
        """The PrimFunc of a candidate.

        Raises
        ------
        NotApplicable
            Its schedule declines the combination.
        """
        task = self.task
        with self._target:
            if task.op == FUNCTION:
                made = task.preparation(task.kernel_named(task.kernel))
                assert made is not None
                return task.prepared(made, task.decided(point))[0]
            kernel = task.kernel_named(point.kernel)
            choice = kernel.choose(task.spec, task.profile, task.decided(point))
            return kernel.scheduled(choice)

    def operands(self, point: Point) -> tuple[Array, ...]:
        """What a candidate's own function is called with; what others write is zero."""
        made = self._preparation_of(point)
        given = (self._x,) if made is None else self._outputs(made)
        if self.task.op == FUNCTION:
            call = self._prepare_call(made, "", given)
        else:
            call = self._kernel_call("", given)
        return tuple(self._operands[i].arrays[0] for i in call.args)

    def batch(self, candidates: Sequence[Built]) -> tuple[Batch, list[Path]]:
        """The batch of these candidates, the default first, and all object files."""
        calls, timed, objects = [], [], dict[Path, None]()
        means: list[MeantRows | None] = []
        for built in candidates:
            mine, span, needed = self._calls(built)
            calls.append(tuple(mine))
            timed.append(span)
            objects |= dict.fromkeys(path for b in needed for path in b.objects)
            made = self._preparation_of(built.point)
            means.append(made.folded if made is not None else None)
        kinds = list(dict.fromkeys(means))
        batch = Batch(
            tuple(self._operands), tuple(calls), self._y, tuple(map(self.expected, kinds)),
            self.threads, tuple(timed), tuple(map(kinds.index, means)),
        )  # fmt: skip
        return batch, list(objects)

    def _calls(self, built: Built) -> tuple[list[Call], tuple[int, int], list[Built]]:
        """A candidate's calls, which are timed, and what they are of.

        Kernels that want their activations prepared alike are timed without that.
        """
        task = self.task
        preparation = self._preparation_of(built.point)
        if task.op == FUNCTION:
            reader = self._default_kernel()
            made = self._outputs(preparation)
            first = self._prepare_call(preparation, built.function, made)
            second = self._kernel_call(reader.function, made)
            return [first, second], (0, 1), [built, reader]
        if preparation is None:
            return [self._kernel_call(built.function, (self._x,))], (0, 1), [built]
        made = self._outputs(preparation)
        before = self._default_preparation(preparation)
        calls = [
            self._prepare_call(preparation, before.function, made),
            self._kernel_call(built.function, made),
        ]
        return calls, (1 if self._prepared_alike() else 0, 2), [before, built]

    def _preparation_of(self, point: Point) -> Any:
        """What a candidate wants done to x."""
        task = self.task
        if task.op == FUNCTION:
            return task.preparation(task.kernel_named(task.kernel))
        return task.preparation(task.kernel_named(point.kernel), task.decided(point))

    def _prepared_alike(self) -> bool:
        """Whether every candidate of the task has its activations prepared in one way."""
        if self._alone is None:
            made = map(self._preparation_of, covering(self.task.space().points))
            self._alone = len({p.key if p else "" for p in made}) == 1
        return self._alone

    def _outputs(self, preparation: Any) -> tuple[int, ...]:
        """Operands that a preparation writes."""
        if preparation.key not in self._written:
            made = self._arrays(preparation)
            self._written[preparation.key] = tuple(self._add(SCRATCH, array) for array in made)
        return self._written[preparation.key]

    def _arrays(self, preparation: Preparation) -> list[Array]:
        """Zeroed arrays for what a preparation writes."""
        return outputs(preparation.func, 1 + len(preparation.weights), self.task.m)

    def _default_preparation(self, preparation: Any) -> Built:
        if preparation.key not in self._before:
            func = self.task.prepared(preparation, Defaults())[0]
            self._before[preparation.key] = self._object(Point(preparation.key, ()), func)
        return self._before[preparation.key]

    def _default_kernel(self) -> Built:
        task = self.task
        kernel = task.kernel_named(task.kernel)
        func = kernel.scheduled(kernel.choose(task.spec, task.profile, Defaults()))
        return self._object(Point(task.kernel, ()), func)

    def _prepare_call(self, preparation: Any, function: str, made: tuple[int, ...]) -> Call:
        weights = tuple(self._weights[name] for name in preparation.weights)
        work = self._bytes((self._x, *made)) * _NS_PER_BYTE + self.task.m * self.task.spec.k * 0.1
        return Call(function, (self._x, *weights, *made), work)

    def _kernel_call(self, function: str, operands: tuple[int, ...]) -> Call:
        spec, weights = self.task.spec, tuple(self._weights.values())
        args = (*operands, *weights, self._y)
        work = self._bytes(args) * _NS_PER_BYTE + self.task.m * spec.n * spec.k * _NS_PER_MAC
        return Call(function, args, work)


def _values(given: Activations) -> Any:
    return given.values
