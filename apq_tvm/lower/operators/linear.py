"""``apq.Linear`` in Relax: one activation quantization per input, then one kernel call per layer.

Layers with the same problem (`LinearSpec`) share PrimFuncs. A layer calls the PrimFunc of its first
range of M; the others are its *variants*, which the emitted C chooses between by the rows at hand.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import mul
from typing import TYPE_CHECKING, Any

import tvm_ffi
from tvm import relax, tirx

from apq_tvm.errors import UnsupportedModel
from apq_tvm.lower.operators.reshape import reshape
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.schedules.decide import Defaults, Recorded
from apq_tvm.schedules.graph.exprs import substitute
from apq_tvm.schedules.graph.rules import prepared_by_default
from apq_tvm.select import epilogue, linear_spec
from apq_tvm.types import KernelChoice, KernelPlan, Node, Variant

if TYPE_CHECKING:
    from apq_tvm.lower.operators.channels_last import ChannelsLastLowering
    from apq_tvm.schedules.decide import DecideOf
    from apq_tvm.schedules.linear.kernel import Choice, LinearKernel, Preparation


@dataclass(frozen=True)
class LinearFunc:
    """What the schedule stage needs to know of one linear PrimFunc; `layer` has it first."""

    kernel: LinearKernel
    choice: Choice
    params: tuple[Any, ...] = ()
    planned: KernelChoice | None = None
    layer: str = ""


class LinearLowering:
    """Lowers every ``apq.Linear`` of one model; collects PrimFuncs and variants on the way.

    Parameters
    ----------
    plan : KernelPlan
    kernels : mapping of str to LinearKernel
    decide : DecideOf
        The tuning log, or the defaults.
    param_vars : callable
        ``layer name -> {array name: relax.Var}``: the layer's packed weights.
    windows : ChannelsLastLowering
        Knows which inputs are windows, which are quantized as they are gathered.

    Attributes
    ----------
    funcs : dict of str to LinearFunc
        By PrimFunc name.
    preparations : dict of str to Preparation
        By PrimFunc name.
    gathered : dict of str to list of str
        As in `LoweredModel.gathered`.
    variants : dict of str to tuple of Variant
        As in `LoweredModel.variants`.
    """

    def __init__(
        self,
        plan: KernelPlan,
        kernels: Mapping[str, LinearKernel],
        decide: DecideOf,
        param_vars: Callable[[str], Mapping[str, Any]],
        windows: ChannelsLastLowering,
    ) -> None:
        self._windows = windows
        self._plan = plan
        self._kernels = kernels
        self._decide = decide
        self._param_vars = param_vars
        self._entry: dict[tuple[LinearSpec, str, tuple[int, ...]], _Entry] = {}
        self._prepared: dict[tuple[Any, ...], tuple[Any, ...]] = {}
        self.preparations: dict[str, Preparation] = {}
        self.gathered: dict[str, list[str]] = {}
        self._needed: dict[str, set[tuple[int, int]]] = {}
        self._vars: dict[str, relax.GlobalVar] = {}
        self.funcs: dict[str, LinearFunc] = {}
        self.variants: dict[str, tuple[Variant, ...]] = {}

    def convert(self, bb: relax.BlockBuilder, node: Node, inputs: Sequence[Any]) -> Any:
        """Lower one ``apq.Linear``.

        Raises
        ------
        UnsupportedModel
            The shape of the layer's input is unknown.
        """
        spec = linear_spec(self._plan.quantized, node)
        x, _, bias, residual = (*inputs, None, None)[:4]
        lead = known_shape(x, node)[:-1]
        made = self._convolved(bb, node, spec, x, bias, residual)
        if made is not None:
            return made
        m = reduce(mul, lead, 1)
        x2d = bb.emit(reshape(x, [m, spec.k]))
        entry = self._add_funcs(bb, node, spec, lead)
        weights = self._param_vars(node.name)
        args: list[Any] = []
        for preparation in entry.preparations:
            args += self._prepare(bb, node.name, (x, x2d, m), preparation, weights)
        if entry.takes_x:
            args.append(x2d)
        args += weights.values()
        if spec.bias:
            args.append(bias)
        if spec.residual:
            args.append(bb.emit(reshape(residual, [m, spec.n])))
        out = relax.TensorType((m, spec.n), "float32")
        y = bb.emit(relax.call_tir(self._vars[entry.func], args, out))
        return reshape(y, [*lead, spec.n])

    def _convolved(
        self, bb: relax.BlockBuilder, node: Node, spec: LinearSpec, x: Any, bias: Any, residual: Any
    ) -> Any:
        """A float layer of windows as a convolution, None where it is none (or slower so)."""
        profile, choice = self._plan.profile, self._plan.choices[node.name][0]
        if spec.scheme is not None or choice.layout != f"F32r{profile.vector_bytes // 4}":
            return None
        (weight,) = self._param_vars(node.name).values()
        more = [v for v, used in ((bias, spec.bias), (residual, spec.residual)) if used]
        return self._windows.convolved(bb, x, weight, spec.n, epilogue(spec), more, profile)

    def finish(self) -> None:
        """Once all layers are lowered: run each preparation only where some kernel reads it."""
        for key, needed in self._needed.items():
            self.variants[key] = _ranges(key, needed)

    def always_prepared(self) -> dict[str, Preparation]:
        """Preparations that every run of their PrimFunc's calls needs, whatever its rows."""
        return {
            name: preparation
            for name, preparation in self.preparations.items()
            if self.variants.get(name) == (Variant(-1, name),)
        }

    def _add_funcs(
        self, bb: relax.BlockBuilder, node: Node, spec: LinearSpec, lead: Sequence[Any]
    ) -> _Entry:
        """The PrimFuncs of a layer whose inputs have rows by the dimensions `lead`."""
        every, least = self._plan.choices[node.name], _least(lead)
        if _is_image(lead):
            every = self._of_images(every)
        choices = tuple(c for c in every if c.m_max < 0 or c.m_max >= least)
        key = (spec, choices[0].layout, tuple(c.m_min for c in choices))
        if key in self._entry:
            return self._entry[key]
        made = [self._add_kernel(bb, choice, spec, node.name) for choice in choices]
        entry = _Entry.of(tuple(made))
        if entry.shared:
            stub = _dispatch(entry.func, made)
            self._vars[entry.func] = bb.add_func(stub, entry.func)
        if entry.shared or len(made) > 1:
            self.variants[entry.func] = entry.variants
        self._entry[key] = entry
        return entry

    def _of_images(self, choices: Sequence[KernelChoice]) -> tuple[KernelChoice, ...]:
        """The kernel of most rows, and where it is not right, that of one row.

        Images have few pixels too seldom for the kernels in between to be worth building.
        """
        kept = []
        for width in {choice.width: None for choice in choices}:
            mine = [c for c in choices if c.width == width]
            first, last = mine[0], mine[-1]
            least = self._kernels[last.kernel].m_tile
            if least > 1 and self._kernels[first.kernel].m_tile == 1:
                kept += [replace(first, m_max=least - 1), replace(last, m_min=least)]
            elif least == 1:
                kept.append(replace(last, m_min=1))
            else:
                kept += mine
        return tuple(kept)

    def _add_kernel(
        self, bb: relax.BlockBuilder, choice: KernelChoice, spec: LinearSpec, layer: str
    ) -> _Made:
        kernel = self._kernels[choice.kernel]
        name = f"{kernel.name}_{spec_suffix(spec)}{decisions_suffix(choice)}"
        if name not in self.funcs:
            decide = Recorded(dict(choice.decisions)) if choice.decisions else Defaults()
            decided = kernel.choose(spec, self._plan.profile, decide)
            func = kernel.func(decided)
            # A global symbol keeps variants, which no Relax call names, from dead code elimination.
            self._vars[name] = bb.add_func(func.with_attr("global_symbol", name), name)
            self.funcs[name] = LinearFunc(kernel, decided, tuple(func.params), choice, layer)
        preparation = kernel.prepare(self.funcs[name].choice)
        if preparation is not None:
            preparation = self._decided(preparation)
            self._needed.setdefault(preparation.key, set()).add((choice.m_min, choice.m_max))
        return _Made(choice, name, self.funcs[name].params, preparation)

    def _decided(self, preparation: Preparation) -> Preparation:
        """The one of its key, whose decisions are found by that."""
        key = preparation.key
        if key not in self.preparations:
            profile = self._plan.profile
            decide = self._decide(key, lambda: prepared_by_default(preparation, profile))
            self.preparations[key] = replace(preparation, decide=decide)
        return self.preparations[key]

    def _prepare(
        self,
        bb: relax.BlockBuilder,
        layer: str,
        given: tuple[Any, Any, Any],
        preparation: Preparation,
        weights: Mapping[str, Any],
    ) -> tuple[Any, ...]:
        """The outputs of a preparation of x; layers that read one x share them.

        `given` are x, x as a matrix and its rows.
        """
        x, x2d, m = given
        read = tuple(weights[name] for name in preparation.weights)
        key = (x, preparation.key, read)
        if key not in self._prepared:
            gathered = self._windows.gathered(x, preparation, self._plan.profile)
            if gathered is not None:
                x2d, preparation = gathered[0], self._decided(gathered[1])
            name = preparation.key
            if preparation.gathers:
                self.gathered.setdefault(name, []).append(layer)
            if name not in self._vars:
                func = preparation.func.with_attr("global_symbol", name)
                self._vars[name] = bb.add_func(func, name)
            outs = [
                relax.TensorType(_extents(preparation, buffer, m), buffer.dtype)
                for buffer in _outputs(preparation)
            ]
            single = len(outs) == 1
            args = [x2d, *read]
            made = bb.emit(relax.call_tir(self._vars[name], args, outs[0] if single else outs))
            self._prepared[key] = (
                (made,)
                if single
                else tuple(bb.emit(relax.TupleGetItem(made, i)) for i in range(len(outs)))
            )
        return self._prepared[key]


@dataclass(frozen=True)
class _Made:
    """A choice, its PrimFunc and what it needs done to x."""

    choice: KernelChoice
    func: str
    params: tuple[Any, ...]
    preparation: Preparation | None

    @property
    def head(self) -> tuple[Any, ...]:
        """The parameters that are activations: outputs of the preparation, or x."""
        return self.params[: len(_outputs(self.preparation)) if self.preparation else 1]


@dataclass(frozen=True)
class _Entry:
    """The PrimFunc that a Relax call names, and what the call's arguments start with.

    Where kernels of one layer want x prepared differently, the call takes what any of them needs
    (`shared`) and every variant picks its part of the arguments.
    """

    func: str
    preparations: tuple[Preparation, ...]
    takes_x: bool
    variants: tuple[Variant, ...]

    @property
    def shared(self) -> bool:
        """Whether the call's arguments are more than any one kernel takes."""
        return len(self.preparations) + self.takes_x > 1

    @classmethod
    def of(cls, made: tuple[_Made, ...]) -> _Entry:
        """The call that serves all of a layer's kernels."""
        heads = {m.preparation.key if m.preparation else "": m for m in made}
        start, spans = 0, {}
        for key in sorted(heads, key=lambda key: not key):  # x comes last
            spans[key] = range(start, start + len(heads[key].head))
            start = spans[key].stop
        shared = len(heads) > 1

        def args(m: _Made) -> tuple[int, ...] | None:
            if not shared:
                return None
            head = spans[m.preparation.key if m.preparation else ""]
            return (*head, *range(start, start + len(m.params) - len(head)))

        return cls(
            f"any_{made[0].func}" if shared else made[0].func,
            tuple(p for key in spans if (p := heads[key].preparation) is not None),
            "" in heads,
            tuple(Variant(m.choice.m_max, m.func, m.choice.width, args(m)) for m in made),
        )


def _dispatch(name: str, made: Sequence[_Made]) -> Any:
    """An empty PrimFunc with the arguments of a shared call: what Relax needs to see."""
    from tvm.script.ir_builder import IRBuilder
    from tvm.tirx.script.builder import ir as b

    heads = {m.preparation.key if m.preparation else "": m for m in made}
    first = [p for key in sorted(heads, key=lambda key: not key) for p in heads[key].head]
    last = made[0].params[len(made[0].head) :]
    m = tirx.Var("m", "int64")
    with IRBuilder() as builder, b.prim_func(s_tir=True):
        b.func_name(name)
        b.func_attr({"apq.op": "dispatch", "op_pattern": 8, "global_symbol": name})
        for i, param in enumerate((*first, *last)):
            shape = [tvm_ffi.structural_map(d, (tirx.Var, lambda _: m)) for d in param.shape]
            b.match_buffer(b.arg(f"a{i}", b.handle()), shape, param.dtype, align=4, offset_factor=1)
        b.evaluate(tirx.const(0, "int32"))
    return builder.get()


def _least(dims: Sequence[Any]) -> int:
    """Fewest rows of an input: symbols are at least 1, but a cache may be empty."""
    return reduce(mul, (int(d) for d in dims if isinstance(d, tirx.IntImm)), 1)


def _is_image(dims: Sequence[Any]) -> bool:
    """Whether an input is an image (or several) of a size that only a run knows."""
    return len(dims) >= 3 and sum(not isinstance(d, tirx.IntImm) for d in dims) >= 2


def _extents(preparation: Preparation, buffer: Any, m: Any) -> tuple[Any, ...]:
    """The extents of an output where x has `m` rows: M in some, or pairs of rows."""
    if preparation.gathers:
        return (m, *buffer.shape[1:])
    rows = preparation.func.params[0].shape[0]
    return tuple(substitute(extent, rows, m) for extent in buffer.shape)


def _outputs(preparation: Preparation) -> list[Any]:
    """Buffers that a preparation writes; their extents depend on M alone."""
    return list(preparation.func.params)[1 + len(preparation.weights) :]


def _ranges(func: str, needed: set[tuple[int, int]]) -> tuple[Variant, ...]:
    """`func` for the rows in any of the ranges (m_min, m_max), nothing elsewhere."""
    variants: list[Variant] = []
    covered = 0  # all rows up to here are dealt with
    for m_min, m_max in sorted(needed):
        if m_max >= 0 and m_max <= covered:
            continue
        if m_min > covered + 1:
            variants.append(Variant(m_min - 1, ""))
        elif variants:
            variants.pop()
        variants.append(Variant(m_max, func))
        covered = m_max
        if m_max < 0:
            return tuple(variants)
    return (*variants, Variant(-1, ""))


def known_shape(x: Any, node: Node) -> list[Any]:
    """Dimensions of `x` as Relax integers and symbols.

    Raises
    ------
    UnsupportedModel
        The shape depends on data.
    """
    shape = getattr(x.ty, "shape", None)
    if not isinstance(shape, relax.ShapeExpr):
        raise UnsupportedModel(
            f"{node.op} {node.name!r}: the shape of its input is not known before run time; "
            "replace the data-dependent operator before it"
        )
    return list(shape.values)


def decisions_suffix(choice: KernelChoice) -> str:
    """What tells apart the PrimFuncs of one kernel that the tuner's records decided otherwise."""
    if not choice.decisions:
        return ""
    text = ",".join(f"{name}={value}" for name, value in choice.decisions)
    return f"_t{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def spec_suffix(spec: LinearSpec) -> str:
    """What tells apart the PrimFuncs that one kernel makes, e.g. ``384x1536_W4A8g32_bias_gelu``."""
    scheme = str(spec.scheme).replace("*", "star").replace("-", "to").replace(".", "p")
    details = [f"{name}{value}" for name, value in spec.details]
    parts = [f"{spec.n}x{spec.k}", scheme if spec.scheme else "", *details]
    return "_".join([part for part in parts if part] + epilogue(spec))
