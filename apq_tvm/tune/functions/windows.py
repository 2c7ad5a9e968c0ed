"""Tasks of layers whose activations are windows of an image, rounded as they are gathered.

A record of one is found again by its name and the hash of its default, as of other preparations. A
candidate's codes, scales and sums are read by the layer's own kernel, whose result must be the
product of what the plain loops of the default round to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from operator import mul
from pathlib import Path
from typing import Any

import numpy as np
from tvm import sym

from apq_tvm.schedules.decide import Decide, Defaults
from apq_tvm.schedules.linear.kernel import LinearKernel, Preparation
from apq_tvm.schedules.recorded import bare, fingerprint
from apq_tvm.select import linear_spec
from apq_tvm.tensorize.exprs import i64
from apq_tvm.tensorize.meaning.unsigned_rows import UnsignedRows
from apq_tvm.tune.candidates import Workshop
from apq_tvm.tune.functions.plain import plain_function
from apq_tvm.tune.functions.sizes import numbers_of
from apq_tvm.tune.inputs import Activations, MeantRows, expected
from apq_tvm.tune.program import Expected
from apq_tvm.tune.space import Space
from apq_tvm.tune.tasks import Task, weights_of
from apq_tvm.tuning_logs.records import FUNCTION
from apq_tvm.types import F32, Array, LoweredModel

MOST_ELEMENTS = 1 << 25
"""Of an image, of its windows and of the layer's result."""

SETS = ("random", "blank", "even", "stripes", "point", "tiny", "huge")
"""Kinds of images."""


@dataclass(frozen=True)
class WindowsTask(Task):
    """The rounding of the windows of an image.

    Parameters
    ----------
    made : Preparation
        That of the model.
    image : tuple of int
        Shape of x.
    """

    made: Preparation | None = field(default=None, compare=False, repr=False)
    image: tuple[int, ...] = ()

    @property
    def key(self) -> str:
        """By which trials of the task are found again."""
        return f"{self.op} {self.name} {self.image}"

    def preparation(self, kernel: LinearKernel, decide: Decide | None = None) -> Preparation | None:
        """The one that gathers, whatever the kernel."""
        return self.made

    def space(self) -> Space:
        """Candidates of different code; what has but one way to be done has one."""
        return self._space

    @cached_property
    def _space(self) -> Space:
        import tvm

        whole, assured = super().space(), self.made
        assert assured is not None
        seen: dict[str, Any] = {}
        with tvm.target.Target(dict(self.profile.target)):
            for point in whole.points:
                func = self.prepared(assured, self.decided(point))[0]
                seen.setdefault(fingerprint(func), point)
        return replace(whole, points=tuple(seen.values()))


def windows_tasks(lowered: LoweredModel, sizes: Mapping[str, int]) -> list[Any]:
    """Those of a model; `sizes` are of symbolic dimensions.

    Layers of one shape, scheme and image are one task.
    """
    from apq_tvm.schedules.devices import linear_kernels
    from apq_tvm.select import by_name

    plan = lowered.packed.plan
    nodes = {node.name: node for node in plan.quantized.model.nodes}
    kernels, tasks = by_name(linear_kernels(plan.profile)), []
    for key, layers in lowered.gathered.items():
        made = lowered.preparations[key]
        spec = bare(linear_spec(plan.quantized, nodes[layers[0]]))
        image = numbers_of(made.image, sizes)
        m = _windows(made, image)
        if max(reduce(mul, image), m * spec.k, m * spec.n) > MOST_ELEMENTS:
            continue
        reader = next(
            (
                choice
                for choice in plan.choices[layers[0]]
                if choice.m_min <= m and (choice.m_max < 0 or m <= choice.m_max)
                and _reads(kernels[choice.kernel], spec, plan.profile, key)
            ),
            None,
        )  # fmt: skip
        if reader is not None:
            tensor, weight = weights_of(plan, layers[0])
            tasks.append(
                WindowsTask(
                    FUNCTION, key, spec, plan.profile, m, (1, -1), reader.width, reader.kernel,
                    (key,), tuple(layers), tensor, weight, made, image,
                )
            )  # fmt: skip
    return tasks


def _reads(kernel: LinearKernel, spec: Any, profile: Any, key: str) -> bool:
    made = kernel.prepare(kernel.choose(spec, profile, Defaults()))
    return made is not None and key.startswith(f"windows_{made.key}_")


def _windows(made: Preparation, image: tuple[int, ...]) -> int:
    """How many windows an image has."""
    geometry = made.geometry
    assert geometry is not None
    simplify = sym.Analyzer().simplify
    positions = [int(simplify(geometry.extent(i, i64(s)))) for i, s in enumerate(image[1:-1])]
    return int(image[0] * reduce(mul, positions))


class WindowsWorkshop(Workshop):
    """Builds candidates of a `WindowsTask`, and what they are called with.

    Parameters
    ----------
    task : WindowsTask
    folder : Path
        For object files.
    threads : int
        That candidates are timed with.
    """

    task: WindowsTask

    def __init__(self, task: WindowsTask, folder: Path, threads: int) -> None:
        super().__init__(task, folder, threads)

    def activations(self) -> list[Activations]:
        """Images; what is multiplied is known of plain loops alone."""
        rng = np.random.default_rng(self.task.m)
        made = [_image(kind, self.task.image, rng) for kind in SETS]
        return [Activations(x, x.astype(np.float64)) for x in made]

    def expected(self, folded: MeantRows | None = None) -> tuple[Expected, ...]:
        """Products of what the default's plain loops round to, computed once."""
        if folded not in self._expected:
            made, dense = self.task.made, self.task.dense()
            assert made is not None
            plain = plain_function(replace(made, decide=Defaults()).func)
            largest = float(np.abs(dense).max(initial=0))
            results = []
            for given in self._sets:
                arrays = self._arrays(made)
                plain((given.x,), *arrays)
                values, steps = _values(arrays, self.task)
                # A product and a sum may be rounded once or twice: then a code is another.
                results.append(expected(values, dense, steps.max(axis=1) * largest))
            self._expected[folded] = tuple(results)
        return self._expected[folded]

    def _arrays(self, preparation: Preparation) -> list[Array]:
        """Zeroed arrays for what it writes: rows of all windows."""
        return [
            np.zeros((self.task.m, *map(int, buffer.shape[1:])), str(buffer.dtype))
            for buffer in preparation.func.params[1 + len(preparation.weights) :]
        ]


def _image(kind: str, shape: tuple[int, ...], rng: np.random.Generator) -> F32:
    x = rng.standard_normal(shape)
    if kind == "blank":
        x[:] = 0
    elif kind == "even":
        x[:] = -3.5
    elif kind == "stripes":
        x[:] = 2.0
        x.reshape(-1)[::2] *= -1
    elif kind == "point":
        x[:] = 0
        x.flat[x.size // 2] = 1e4
    elif kind in ("tiny", "huge"):
        x *= 2.0 ** (-40 if kind == "tiny" else 40)
    return x.astype(np.float32)


def _values(arrays: list[Array], task: WindowsTask) -> tuple[Array, Array]:
    """float64 [M, K]: what codes mean; and the scales of a row."""
    made = task.made
    unsigned = made is not None and isinstance(made.folded, UnsignedRows)
    codes = arrays[0].view(np.uint8) if unsigned else arrays[0]
    codes, scales = codes.astype(np.float64), arrays[1].astype(np.float64)
    if task.spec.asymmetric:
        scales, centres = scales[:, :-1], scales[:, -1:]
    else:
        centres = np.zeros((len(codes), 1))
    width = codes.shape[1] // scales.shape[1]
    values = codes * np.repeat(scales, width, axis=1) + centres
    return values[:, : task.spec.k], np.abs(scales)
