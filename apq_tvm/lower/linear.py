"""``apq.Linear`` in Relax: one activation quantization per input, then one kernel call per layer.

Layers with the same problem (`LinearSpec`) share PrimFuncs. A layer calls the PrimFunc of its first
range of M; the others are its *variants*, which the emitted C chooses between by the rows at hand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import mul
from typing import TYPE_CHECKING, Any

from tvm import relax

from apq_tvm.errors import UnsupportedModel
from apq_tvm.ops.linear import LinearSpec
from apq_tvm.schedules.decide import Defaults
from apq_tvm.schedules.x86_quantize import quantize_func
from apq_tvm.select import epilogue, linear_spec
from apq_tvm.types import KernelPlan, Node

if TYPE_CHECKING:
    from apq_tvm.schedules.decide import Decide
    from apq_tvm.schedules.linear_kernel import LinearKernel


@dataclass(frozen=True)
class LinearFunc:
    """What the schedule stage needs to know of one linear PrimFunc."""

    kernel: LinearKernel
    spec: LinearSpec


class LinearLowering:
    """Lowers every ``apq.Linear`` of one model; collects PrimFuncs and variants on the way.

    Parameters
    ----------
    plan : KernelPlan
    kernels : mapping of str to LinearKernel
    decide : callable
        ``(kernel name, LinearSpec) -> Decide``: the tuning log, or the defaults.
    param_vars : callable
        ``layer name -> {array name: relax.Var}``: the layer's packed weights.

    Attributes
    ----------
    funcs : dict of str to LinearFunc
        By PrimFunc name.
    variants : dict of str to tuple of (int, str)
        As in `LoweredModel.variants`.
    """

    def __init__(
        self,
        plan: KernelPlan,
        kernels: Mapping[str, LinearKernel],
        decide: Callable[[str, LinearSpec], Decide],
        param_vars: Callable[[str], Mapping[str, Any]],
    ) -> None:
        self._plan = plan
        self._kernels = kernels
        self._decide = decide
        self._param_vars = param_vars
        self._entry: dict[tuple[LinearSpec, str], str] = {}
        self._quantized: dict[tuple[Any, int, int], tuple[Any, ...]] = {}
        self._quantizers: dict[str, Any] = {}
        self._vars: dict[str, relax.GlobalVar] = {}
        self.funcs: dict[str, LinearFunc] = {}
        self.variants: dict[str, tuple[tuple[int, str], ...]] = {}

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
        m = reduce(mul, lead, 1)
        x2d = bb.emit(relax.op.reshape(x, relax.ShapeExpr([m, spec.k])))
        entry = self._add_funcs(bb, node, spec)
        weights = self._param_vars(node.name)
        args = [*self._activations(bb, x, x2d, m, spec), *weights.values()]
        if spec.bias:
            args.append(bias)
        if spec.residual:
            args.append(bb.emit(relax.op.reshape(residual, relax.ShapeExpr([m, spec.n]))))
        out = relax.TensorType((m, spec.n), "float32")
        y = bb.emit(relax.call_tir(self._vars[entry], args, out))
        return relax.op.reshape(y, relax.ShapeExpr([*lead, spec.n]))

    def _add_funcs(self, bb: relax.BlockBuilder, node: Node, spec: LinearSpec) -> str:
        choices = self._plan.choices[node.name]
        key = (spec, choices[0].layout)
        if key in self._entry:
            return self._entry[key]
        names = []
        for choice in choices:
            kernel = self._kernels[choice.kernel]
            name = f"{kernel.name}_{spec_suffix(spec)}"
            func = kernel.func(spec, self._plan.profile, self._decide(kernel.name, spec))
            # A global symbol keeps variants, which no Relax call names, from dead code elimination.
            self._vars[name] = bb.add_func(func.with_attr("global_symbol", name), name)
            self.funcs[name] = LinearFunc(kernel, spec)
            names.append((choice.m_max, name))
        self._entry[key] = names[0][1]
        if len(names) > 1:
            self.variants[names[0][1]] = tuple(names)
        return names[0][1]

    def _activations(
        self, bb: relax.BlockBuilder, x: Any, x2d: Any, m: Any, spec: LinearSpec
    ) -> tuple[Any, ...]:
        """The activation operands: ``(x,)`` for float kernels, ``(xq, xs, xsum)`` otherwise."""
        if spec.scheme is None or spec.scheme.act_bits != 8:
            return (x2d,)
        groups = (spec.scheme.act_group, spec.scheme.group_size)
        key = (x, *groups)
        if key not in self._quantized:
            name = f"quantize_k{spec.k}_{suffix(groups[0])}_{suffix(groups[1])}"
            if name not in self._quantizers:
                func = quantize_func(spec.k, *groups, self._plan.profile, Defaults())
                self._vars[name] = bb.add_func(func.with_attr("global_symbol", name), name)
                self._quantizers[name] = func
            outs = [
                relax.TensorType((m, *buffer.shape[1:]), buffer.dtype)
                for buffer in self._quantizers[name].params[1:]
            ]
            packed = bb.emit(relax.call_tir(self._vars[name], [x2d], outs))
            self._quantized[key] = tuple(
                bb.emit(relax.TupleGetItem(packed, i)) for i in range(len(outs))
            )
        return self._quantized[key]


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


def suffix(group: int) -> str:
    """``g32``, or ``row``."""
    return f"g{group}" if group > 0 else "row"


def spec_suffix(spec: LinearSpec) -> str:
    """What tells apart the PrimFuncs that one kernel makes, e.g. ``384x1536_W4A8g32_bias_gelu``."""
    parts = [f"{spec.n}x{spec.k}", str(spec.scheme) if spec.scheme else ""]
    return "_".join([part for part in parts if part] + epilogue(spec))
