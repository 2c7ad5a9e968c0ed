"""What a linear layer is to a kernel; operands and epilogue, which all PrimFuncs share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from apq_tvm.codegen.layouts import WeightLayout
from apq_tvm.formats.integer import ROW_SUMS
from apq_tvm.tensorize.exprs import Buffer, Expr
from apq_tvm.types import Scheme

ACTIVATIONS = (
    *("", "relu", "gelu", "gelu_tanh", "tanh", "sigmoid", "silu"),
    *("relu6", "hardsigmoid", "hardswish"),
)
"""Epilogues a linear layer may have."""


@dataclass(frozen=True)
class LinearSpec:
    """One linear layer as a kernel sees it: y[M, N] = act(x[M, K] W[N, K]ᵀ + b) + residual[M, N].

    Parameters
    ----------
    n, k : int
        Rows and columns of W.
    scheme : Scheme or None
        None where the weights stay float32.
    bias : bool
    activation : str
        One of `ACTIVATIONS`.
    residual : bool
    details : tuple of (str, int)
        Sizes of the weights that scheme and shape do not tell (`apq_tvm.formats.details`).
    after : bool
        The activation comes last: act(x Wᵀ + b + residual).
    asymmetric : bool
        Activations are ``xs (code - zero)`` with a zero point per row. Then ``xs`` has a second
        column with ``centre = -xs zero``, the packed arrays end with ``row_sums f32 [N]``, sums of
        what the weights' codes mean, and kernels add ``centre[m] row_sums[n]`` to their products
        of codes: nothing else of them knows.
    """

    n: int
    k: int
    scheme: Scheme | None
    bias: bool = False
    activation: str = ""
    residual: bool = False
    details: tuple[tuple[str, int], ...] = ()
    after: bool = False
    asymmetric: bool = False

    @property
    def centres(self) -> int:
        """Columns of ``xs`` behind the scales."""
        return int(self.asymmetric)


class Operands:
    """Declares the buffers of a linear PrimFunc in the order of the calling convention."""

    def __init__(self, spec: LinearSpec) -> None:
        from tvm import tirx
        from tvm.tirx.script.builder import ir as b

        b.func_name("linear")
        # Operands never overlap: the memory planner gives every tensor of a call its own bytes.
        b.func_attr({"apq.op": "linear", "op_pattern": 8, "tirx.noalias": True})
        self.spec = spec
        self.m = tirx.Var("m", "int64")

    def declare(self, name: str, shape: tuple[Any, ...], dtype: str, align: int = 4) -> Buffer:
        """Declare one argument."""
        from apq_tvm.ops.blocks import argument

        return argument(name, shape, dtype, align)

    def codes(self, layout: Any, summed: bool = True) -> tuple[Buffer, Buffer, Buffer | None]:
        """Declare ``xq i8 [M, Kp]`` and `factors`, of `apq_tvm.ops.activations.quantize`."""
        xq = self.declare("xq", (self.m, layout.padded_k(self.spec.k)), "int8")
        return xq, *self.factors(layout, summed)

    def factors(self, layout: Any, summed: bool = True) -> tuple[Buffer, Buffer | None]:
        """Declare ``xs f32 [M, Ga]`` and, where codes are `summed`, ``xsum i32 [M, Kp/gw]``; Ga is
        1 for a scale per token, 2 with its centre."""
        assert self.spec.scheme is not None
        groups = layout.padded_groups(self.spec.k)
        scales = 1 if self.spec.scheme.act_group == -1 else groups
        xs = self.declare("xs", (self.m, scales + self.spec.centres), "float32")
        return xs, self.declare("xsum", (self.m, groups), "int32") if summed else None

    def weights(self, layout: WeightLayout) -> dict[str, Buffer]:
        """Declare the packed arrays of a layout, by name."""
        # Packed arrays start on cache lines, so that vector loads may be aligned ones.
        shapes = layout.shapes(self.spec.n, self.spec.k).items()
        arrays = {name: self.declare(name, shape, dtype, 64) for name, (shape, dtype) in shapes}
        if self.spec.asymmetric:
            arrays[ROW_SUMS] = self.declare(ROW_SUMS, (self.spec.n,), "float32")
        return arrays

    def epilogue(self) -> tuple[Buffer | None, Buffer | None, Buffer]:
        """Declare bias, residual and y, the first two where the layer has them."""
        spec = self.spec
        bias = self.declare("bias", (spec.n,), "float32") if spec.bias else None
        whole = (self.m, spec.n)
        residual = self.declare("residual", whole, "float32") if spec.residual else None
        return bias, residual, self.declare("y", whole, "float32")


def epilogue_of(
    spec: LinearSpec,
    total: Expr,
    bias: Buffer | None,
    residual: Buffer | None,
    row: Expr,
    col: Expr,
    shift: tuple[Expr, Buffer] | None = None,
) -> Expr:
    """act(total + bias) + residual, or act(total + bias + residual).

    `shift` is the row's centre and the row sums of asymmetric activations.
    """
    from apq_tvm.ops import math

    if shift is not None:
        total = total + shift[0] * shift[1][col]
    value = total if bias is None else total + bias[col]
    if not spec.after:
        value = math.activation(spec.activation, value)
    value = value if residual is None else value + residual[row, col]
    return math.activation(spec.activation, value) if spec.after else value


def store_inside(y: Buffer, value: Expr, row: Expr, col: Expr, inside: Expr, always: bool) -> None:
    """Store where `inside` holds. (TVM calls a block with such a predicate not affine.)"""
    from tvm.tirx.script.builder import ir as b

    if always:
        b.buffer_store(y, value, [row, col])
    else:
        with b.If(inside), b.Then():
            b.buffer_store(y, value, [row, col])
