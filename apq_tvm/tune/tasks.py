"""What there is to tune in a model: one task for each shape, scheme and range of rows.

Layers of one shape and scheme are one task, whatever follows their products. What is done to their
activations first is a task of its own, because layers share it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from apq_tvm.formats import dequantize, details
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.schedules.decide import Decide, Defaults, Recorded, Recording
from apq_tvm.schedules.devices import linear_kernels
from apq_tvm.schedules.graph.rules import schedule_preparation
from apq_tvm.schedules.linear.kernel import LinearKernel, Preparation
from apq_tvm.schedules.recorded import bare, default_of_kernel, fingerprint
from apq_tvm.select import by_name, choose, linear_spec
from apq_tvm.tune.space import Point, Space, space_of
from apq_tvm.tuning_logs.records import FUNCTION, LINEAR
from apq_tvm.types import F32, Array, DeviceProfile, KernelPlan, QuantizedTensor

DEFAULT_ROWS = (1, 4, 16, 128)
"""Rows of activations that are tuned for unless the user names others."""

_BYTE_NS, _MAC_NS = 0.04, 0.01
"""Rough times on one thread, for the share of a task before anything is timed."""


@dataclass(frozen=True)
class Task:
    """A question to the device: which candidate is the fastest?

    Parameters
    ----------
    op : str
        `LINEAR`, or `FUNCTION` for what is done to activations.
    name : str
        For people.
    spec : LinearSpec
        Of the layer, bare.
    m : int
        Rows of activations that are timed.
    rows : (int, int)
        Rows that the answer is for.
    width : int
        Bits, where they are chosen at run time.
    kernel : str
        The default kernel; of `FUNCTION` that which reads what is made.
    kernels : tuple of str
        Those that are candidates, the default first.
    layers : tuple of str
        Of the model, all that it stands for.
    tensor : QuantizedTensor or None
        Weights of one of them, or `weight` where they stay float.
    """

    op: str
    name: str
    spec: LinearSpec
    profile: DeviceProfile = field(compare=False)
    m: int
    rows: tuple[int, int]
    width: int
    kernel: str
    kernels: tuple[str, ...]
    layers: tuple[str, ...]
    tensor: QuantizedTensor | None = field(default=None, compare=False, repr=False)
    weight: F32 | None = field(default=None, compare=False, repr=False)

    @property
    def scheme(self) -> str:
        """As records spell it."""
        return str(self.spec.scheme) if self.spec.scheme else "float"

    @property
    def key(self) -> str:
        """By which trials of the task are found again."""
        low, high = self.rows
        sizes = "".join(f" {name}={size}" for name, size in self.spec.details)
        width = f" {self.width} bits" if self.width else ""
        return f"{self.op} {self.name}{sizes}{width} M={self.m} rows {low}..{high}"

    @property
    def layer(self) -> dict[str, Any]:
        """What a record of a linear layer says of it."""
        return {
            "n": self.spec.n, "k": self.spec.k, "scheme": self.scheme, "rows": self.rows,
            "details": self.spec.details, "width": self.width,
        }  # fmt: skip

    @property
    def share(self) -> float:
        """A rough time of its layers in one run, in nanoseconds."""
        n, k = self.spec.n, self.spec.k
        bits = self.spec.scheme.bits if self.spec.scheme else 32
        if self.op == FUNCTION:
            return len(self.layers) * self.m * k * 0.1
        return len(self.layers) * (n * k * bits / 8 * _BYTE_NS + self.m * n * k * _MAC_NS)

    def dense(self) -> F32:
        """What the weights mean, float32 [N, K]."""
        if self.tensor is None:
            assert self.weight is not None
            return self.weight
        return dequantize(self.tensor, self.width)

    def kernel_named(self, name: str) -> LinearKernel:
        """One of the device's kernels."""
        return by_name(linear_kernels(self.profile))[name]

    @property
    def default(self) -> str:
        """What records call the default."""
        return self.name if self.op == FUNCTION else self.kernel

    def space(self) -> Space:
        """All candidates."""
        names = (self.name,) if self.op == FUNCTION else self.kernels
        return space_of({name: partial(self._ask, name) for name in names})

    def point(self, kernel: str, decide: Decide) -> Point:
        """The candidate of a kernel that somebody answers."""
        asked = Recording(decide)
        self._ask(kernel, asked)
        return Point(kernel, tuple(asked.taken.items()))

    def _ask(self, kernel: str, decide: Decide) -> None:
        if self.op == FUNCTION:
            self._ask_preparation(decide)
        else:
            self.kernel_named(kernel).choose(self.spec, self.profile, decide)

    def preparation(self, kernel: LinearKernel, decide: Decide | None = None) -> Preparation | None:
        """What the kernel wants done to x, as it is decided, or by default."""
        return kernel.prepare(kernel.choose(self.spec, self.profile, decide or Defaults()))

    def _ask_preparation(self, decide: Decide) -> None:
        made = self.preparation(self.kernel_named(self.kernel))
        assert made is not None
        self.prepared(made, decide)

    def prepared(self, preparation: Preparation, decide: Decide) -> Any:
        """The scheduled PrimFunc of a preparation, and that it was made of."""
        mine = replace(preparation, decide=decide)
        return schedule_preparation(mine, mine.func, self.profile, decide)[0], mine.func

    def answers(self, point: Point) -> Mapping[str, Any]:
        """The decisions of a point that differ from its kernel's defaults."""
        default = dict(self.point(point.kernel, Defaults()).decisions)
        return {n: v for n, v in point.decisions if default.get(n) != v}

    def schedule_of(self, point: Point) -> str:
        """`fingerprint` of the default that a record of a candidate compares with."""
        import tvm

        if self.op == LINEAR:
            return default_of_kernel(self.spec, self.kernel_named(point.kernel), self.profile)
        made = self.preparation(self.kernel_named(self.kernel))
        assert made is not None
        with tvm.target.Target(dict(self.profile.target)):
            return fingerprint(self.prepared(made, Defaults())[0])

    def decided(self, point: Point) -> Recorded:
        """Who answers as the point does."""
        return Recorded(dict(point.decisions))


def extract(plan: KernelPlan, rows: Sequence[int] = DEFAULT_ROWS) -> list[Task]:
    """The tasks of a model on a device, those with the largest share of its time first.

    Parameters
    ----------
    plan : KernelPlan
        Without records: what a record compares with is the default.
    rows : sequence of int
        Rows of activations to tune for.
    """
    layers: dict[tuple[Any, ...], list[str]] = {}
    for node in plan.quantized.model.nodes:
        if node.op == "apq.Linear" and node.name in plan.choices:
            spec = bare(linear_spec(plan.quantized, node))
            layers.setdefault((spec, plan.choices[node.name][0].layout), []).append(node.name)
    tasks = []
    for (spec, layout), names in layers.items():
        tasks += _of_layers(plan, spec, layout, tuple(names), sorted(set(rows)))
    return sorted([*tasks, *_preparations(tasks)], key=lambda task: (-task.share, task.key))


def _of_layers(
    plan: KernelPlan, spec: LinearSpec, layout: str, names: tuple[str, ...], rows: Sequence[int]
) -> list[Task]:
    """Tasks of the layers of one shape and scheme."""
    profile, kernels = plan.profile, linear_kernels(plan.profile)
    tensor, weight = weights_of(plan, names[0])
    made = []
    for choice in choose(spec, kernels, profile, names[0]):
        for m in rows:
            if m < choice.m_min or 0 <= choice.m_max < m:
                continue
            low, high = rows_around(m, rows, choice.m_min, choice.m_max)
            others = [
                kernel.name
                for kernel in kernels
                if kernel.name != choice.kernel
                and kernel.width == choice.width
                and kernel.kind not in ("generic", "plain")
                and kernel.m_tile <= low
                and _lies(kernel, spec, profile, layout)
                and _means_the_same(kernel, by_name(kernels)[choice.kernel])
            ]
            scheme = str(spec.scheme) if spec.scheme else "float"
            bits = f" at {choice.width}" if choice.width else ""
            made.append(
                Task(
                    LINEAR, f"{spec.n}x{spec.k} {scheme}{bits}", spec, profile, m, (low, high),
                    choice.width, choice.kernel, (choice.kernel, *others), names, tensor, weight,
                )
            )  # fmt: skip
    return made


def rows_around(m: int, rows: Sequence[int], low: int, high: int) -> tuple[int, int]:
    """Rows that are nearer to `m` than to others of `rows` from `low` to `high`, of which -1 is no
    limit."""
    others = [other for other in rows if low <= other and (high < 0 or other <= high)]
    below, above = [o for o in others if o < m], [o for o in others if o > m]
    first = _between(max(below), m) + 1 if below else low
    return first, _between(m, min(above)) if above else high


def _between(low: int, high: int) -> int:
    """The last number of rows that is nearer to `low`, by ratio."""
    return max(low, min(high - 1, math.isqrt(low * high)))


def _lies(kernel: LinearKernel, spec: LinearSpec, profile: DeviceProfile, layout: str) -> bool:
    from apq_tvm.errors import NotApplicable

    try:
        if not kernel.is_for(spec):
            return False
        kernel.check(spec, profile)
    except NotApplicable:
        return False
    return kernel.layout(spec, profile).name == layout


def _means_the_same(kernel: LinearKernel, default: LinearKernel) -> bool:
    """Whether both round activations to integers, or neither does."""
    return (kernel.act_bits > 8) == (default.act_bits > 8)


def weights_of(plan: KernelPlan, layer: str) -> tuple[QuantizedTensor | None, F32 | None]:
    """A layer's codes, or its floats where it has none."""
    quantized = plan.quantized
    tensor = quantized.tensors.get(quantized.layers.get(layer, ""))
    if tensor is not None:
        return tensor, None
    (node,) = (node for node in quantized.model.nodes if node.name == layer)
    return None, quantized.model.weights[node.inputs[1]]


def _preparations(tasks: Sequence[Task]) -> list[Task]:
    """What is done to activations, of the most rows that any task has: there it costs the most."""
    found: dict[str, Task] = {}
    for task in sorted(tasks, key=lambda task: (-task.m, task.key)):
        made = task.preparation(task.kernel_named(task.kernel))
        if made is None:
            continue
        layers = task.layers + (found[made.key].layers if made.key in found else ())
        base = found.get(made.key) or replace(
            task, op=FUNCTION, name=made.key, rows=(1, -1), kernels=(made.key,)
        )
        found[made.key] = replace(base, layers=tuple(dict.fromkeys(layers)))
    return list(found.values())


def packed_arrays(task: Task) -> Mapping[str, Array]:
    """The weights as the task's kernels read them, by name."""
    from apq_tvm.codegen.layouts import weight_layout
    from apq_tvm.formats.integer import ROW_SUMS, row_sums

    name = task.kernel_named(task.kernel).layout(task.spec, task.profile).name
    if task.tensor is None:
        return dict(weight_layout(name, None).pack(task.dense(), task.name).arrays)
    layout = weight_layout(name, task.tensor.scheme, details(task.tensor))
    arrays = dict(layout.pack(task.tensor, task.name).arrays)
    if task.tensor.scheme.asymmetric_acts:
        arrays[ROW_SUMS] = row_sums(task.tensor)
    return arrays
