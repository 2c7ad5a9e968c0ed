"""The record of one kernel for quantized (or float) linear layers, as a device's table lists it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from apq_tvm.schedules.decide import Decide, Defaults, Recording
from apq_tvm.schedules.linear.preferences import preferring

if TYPE_CHECKING:
    from apq_tvm.codegen.layouts import WeightLayout
    from apq_tvm.ops.activations.normalize import Normalize
    from apq_tvm.ops.graph.shapes import Dim
    from apq_tvm.ops.images.windows import Geometry
    from apq_tvm.ops.linear.spec import LinearSpec
    from apq_tvm.tensorize.meaning.spans.folded_rows import FoldedRows
    from apq_tvm.tensorize.meaning.unsigned_rows import UnsignedRows
    from apq_tvm.types import DeviceProfile

PARALLEL_WEIGHTS = 1 << 16
"""Weights from which on a second thread pays: launching one costs 1 to 2 us, a thread reads about
30 weights a nanosecond."""


GRAINS = (1, 4)
"""How often the usual work threads and tasks of a kernel's loops need: the estimate that shares
them out (`apq_tvm.codegen.graph.work`) knows neither instruction nor format."""


@dataclass(frozen=True)
class Preparation:
    """What is done to x f32 [M, K] before a kernel reads it.

    Parameters
    ----------
    key : str
        Name of the PrimFunc. Kernels with one key, in layers that read one x, share the call.
    make : callable
        Asks a `Decide` for everything that shapes the PrimFunc, and gives it.
    weights : tuple of str
        Packed arrays of the layer that it reads too.
    schedule : callable
        ``(func, profile, decide)`` → the scheduled PrimFunc. None: as its attribute ``apq.op`` says
        (`apq_tvm.schedules.graph.rules`).
    gather : callable
        ``(shape of an image, Geometry, channels)`` → `make` of a PrimFunc with the same outputs for
        its windows as rows; None where there is none, and the rows have to be made first.
    geometry : Geometry or None
        This is such a one: what it reads is the image, whose windows lie so.
    image : tuple of int or str
        Shape of that image, as the model names its dimensions.
    behind : callable
        PrimFunc ``(*inputs, x)`` that makes x → one that makes x, as a matrix of rows, and does
        this too, ``(*inputs, x, *outputs)``: a launch less. None where there is none; it raises
        `NotApplicable` where there is none for that function.
    folded : FoldedRows, UnsignedRows or None
        What x comes to mean where its codes depend on each other, or are unsigned; else what plain
        rounding gives.
    decide : Decide
        Who answers, for `func` and then for its schedule.
    """

    key: str
    make: Callable[[Decide], Any]
    weights: tuple[str, ...] = ()
    schedule: Callable[[Any, DeviceProfile, Decide], Any] | None = None
    gather: Callable[..., Any] | None = None
    geometry: Geometry | None = field(default=None, compare=False)
    image: tuple[Dim, ...] = field(default=(), compare=False)
    behind: Callable[[Any], Any] | None = None
    folded: FoldedRows | UnsignedRows | None = field(default=None, compare=False)
    decide: Decide = field(default_factory=Defaults, compare=False)

    @property
    def gathers(self) -> bool:
        """Whether it reads an image."""
        return self.geometry is not None

    @cached_property
    def made(self) -> tuple[Any, Recording]:
        """`func`, and what was asked for it."""
        asked = Recording(self.decide)
        return self.make(asked), asked

    @property
    def func(self) -> Any:
        """PrimFunc ``(x, *weights, *outputs)``, whose outputs a kernel starts with, unscheduled."""
        return self.made[0]


@dataclass(frozen=True)
class Instruction:
    """What the inner loop of a kernel is made of.

    Parameters
    ----------
    name : str
        Part of the kernel's name: ``vpdpbusd512``, ``sdot``; ``""`` for plain loops.
    features : tuple of str
        LLVM features it needs, all of them; of ``a|b`` either.
    lanes : int
        Rows of the weights that lie side by side in a vector, of the layout it wants; 0 for any.
    """

    name: str
    features: tuple[str, ...]
    lanes: int

    def lacks(self, features: frozenset[str]) -> list[str]:
        """What it needs that is not among the `features` of a device."""
        return [need for need in self.features if not features & set(need.split("|"))]


@dataclass(frozen=True)
class Choice:
    """Everything that was decided for one kernel on one layer; asked once, read by all.

    Parameters
    ----------
    spec : LinearSpec
    profile : DeviceProfile
    decisions : mapping of str to object
        What was answered.
    alternatives : mapping of str to tuple
        What could have been answered, the default first: the space a tuner searches.
    plan : object
        What follows from the answers: a blocking, a layout; the family's own.
    """

    spec: LinearSpec
    profile: DeviceProfile
    decisions: Mapping[str, Any]
    alternatives: Mapping[str, tuple[Any, ...]]
    plan: Any = None

    def __getitem__(self, name: str) -> Any:
        return self.decisions[name]


def prepare_activations(choice: Choice, unsigned: bool = False) -> Preparation | None:
    """``(xq, xs, xsum)`` of `apq_tvm.ops.activations.quantize`; x itself for float activations.

    `unsigned` is of rows with zero points alone, and ``(xq, xs)``.
    """
    from apq_tvm.schedules.linear.quantize import (
        in_bundles,
        quantize_behind,
        quantize_func,
        schedule_quantize,
    )
    from apq_tvm.tensorize.meaning.unsigned_rows import UnsignedRows

    spec, scheme = choice.spec, choice.spec.scheme
    if scheme is None or not scheme.integer_acts:
        return None
    groups = (scheme.act_group, scheme.group_size)
    named = "_".join(f"g{group}" if group > 0 else "row" for group in groups)
    bits = "" if scheme.act_bits == 8 else f"_A{scheme.act_bits}"
    sizes = (scheme.act_bits, spec.asymmetric)
    # Arm's bundles have a rule of their own, and are of rows that are there.
    bundles, gather = in_bundles(choice.profile, *sizes), None
    if not bundles and scheme.act_bits > 1:
        gather = partial(windows_func, groups, *sizes, unsigned)

    def make(decide: Decide, normalize: Normalize | None = None) -> Any:
        return quantize_func(spec.k, *groups, choice.profile, decide, *sizes, normalize, unsigned)

    return Preparation(
        f"quantize_k{spec.k}_{named}{bits}{'_unsigned' if unsigned else zero_point(spec)}",
        make,
        schedule=None if bundles else schedule_quantize,
        gather=gather,
        behind=lambda producer: quantize_behind(producer, choice.profile, make),
        folded=UnsignedRows() if unsigned else None,
    )


def zero_point(spec: LinearSpec) -> str:
    """What keys of preparations end with where rows have zero points."""
    return "_asymmetric" if spec.asymmetric else ""


def windows_func(
    groups: tuple[int, int],
    bits: int,
    asymmetric: bool,
    unsigned: bool,
    shape: Sequence[Dim],
    geometry: Geometry,
    channels: tuple[int, int],
) -> Callable[[Decide], Any]:
    """`Preparation.make` of the windows of an image."""
    from apq_tvm.ops.activations.windows import quantize_windows
    from apq_tvm.schedules.linear.quantize import LANES, WINDOWS

    return lambda decide: quantize_windows(
        shape, geometry, channels, groups, decide("lanes", LANES), bits, asymmetric,
        decide("scratch", WINDOWS), unsigned,
    )  # fmt: skip


def nothing_decided(spec: LinearSpec, profile: DeviceProfile, decide: Decide) -> None:
    """For kernels without decisions."""


@dataclass(frozen=True)
class LinearKernel:
    """One way to compute ``y = act(x Wᵀ + b) + residual`` on a device.

    Parameters
    ----------
    kind : str
        How: ``gemv`` streams the weights through once, ``gemm`` decodes panels of them, ``lut``
        looks activations up, ``bitserial`` multiplies planes, ``plain`` and ``generic`` need no
        instruction. First part of the name.
    weights : str
        Weights in the name: ``W4``, ``F32``, ``anyprec3``, ``bcq2``, ``mixed24``, ``W2star``.
    act_bits : int
        Of the activations it reads: 8 for int8, 16 or 32 for float32, 0 where weights are float or
        any bits will do.
    instruction : Instruction
    m_tile : int
        Rows of x that it reads at least: the caller keeps it from fewer. From how many on it is
        chosen was measured (`apq_tvm.schedules.linear.thresholds`).
    check : callable
        Raises `NotApplicable` with the reason if the kernel cannot compute a layer that it is for
        (`is_for`) on the device.
    layout : callable
        How the weights must lie; the same for every kernel of a layer on a device.
    func : callable
        `Choice` → the unscheduled PrimFunc, M dynamic.
    schedule : callable
        Schedules that PrimFunc in place, by the same `Choice`.
    ask : callable
        Asks for every decision of its own, once; returns `Choice.plan`.
    prepare : callable
        What x needs first; None is returned where the kernel takes x as it is.
    bits : int or None
        Weight bits it is for, None for any or for float weights. Kernels of other bits or families
        are no alternative for a layer, so nobody is told why they were not chosen.
    family : str
        Of the formats it is for; ``""`` for any.
    width : int
        Bits it is for, where a scheme leaves them to be chosen at run time; else 0.
    run : int
        Consecutive k of a row in the layout, where the name must tell; else 0.
    m_named : int
        The M tile in the name; 0 where there is none or it is decided.
    """

    kind: str
    weights: str
    act_bits: int
    instruction: Instruction
    m_tile: int
    check: Callable[[LinearSpec, DeviceProfile], None]
    layout: Callable[[LinearSpec, DeviceProfile], WeightLayout]
    func: Callable[[Choice], Any]
    schedule: Callable[[Any, Choice], None]
    ask: Callable[[LinearSpec, DeviceProfile, Decide], Any] = nothing_decided
    prepare: Callable[[Choice], Preparation | None] = prepare_activations
    bits: int | None = None
    family: str = "int"
    width: int = 0
    run: int = 0
    m_named: int = 0

    @cached_property
    def name(self) -> str:
        """``{kind}_{weights}A{act bits}_{instruction}_r{lanes}[k{run}][m{M tile}]``.

        As ``gemv_W4A8_maddubs_r8m1``. What does not apply is left out: float weights have no ``A``.
        """
        operands = self.weights + (f"A{self.act_bits}" if self.act_bits else "")
        parts = (self.kind, operands, self.instruction.name)
        sizes = (("r", self.instruction.lanes), ("k", self.run), ("m", self.m_named))
        tile = "".join(f"{letter}{size}" for letter, size in sizes if size)
        return "_".join(filter(None, (*parts, tile)))

    def is_for(self, spec: LinearSpec) -> bool:
        """Whether it is for such weights at all; `check` may still decline them, with a reason."""
        scheme = spec.scheme
        bits, family = (scheme.bits, scheme.family) if scheme else (None, "int")
        widths = scheme.widths if scheme else (0,)
        return self.bits in (None, bits) and self.family in ("", family) and self.width in widths

    def choose(self, spec: LinearSpec, profile: DeviceProfile, decide: Decide) -> Choice:
        """Ask `decide` for everything that this kernel leaves open for a layer.

        What a device prefers comes first (`apq_tvm.schedules.linear.preferences`). On processors
        ``grain`` is asked too, where there is enough to do for several threads.
        """
        asked = Recording(preferring(self, profile, decide))
        plan = self.ask(spec, profile, asked)
        if profile.gpu is None and spec.n * spec.k >= PARALLEL_WEIGHTS:
            asked("grain", GRAINS)
        return Choice(spec, profile, asked.taken, asked.alternatives, plan)

    def scheduled(self, choice: Choice, func: Any = None) -> Any:
        """The scheduled PrimFunc; of `func`, where a module has that under names of its own."""
        from tvm import s_tir

        from apq_tvm.schedules.graph.rewrites.loops import with_grain

        sch = s_tir.Schedule(self.func(choice) if func is None else func)
        self.schedule(sch, choice)
        return with_grain(sch.mod["main"], choice.decisions.get("grain", 1))
