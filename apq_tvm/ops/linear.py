"""``y = act(x Wᵀ + b) + residual`` on packed integer weights, as unscheduled TensorIR.

Three plain loop nests: integer dot products per group, the sum over groups with scales, and the
store with its epilogue. The weights are read where `InterleavedLayout` puts them. Two decisions
shape the loops from the start, because TensorIR cannot split a dynamic M or an indivisible count
of row blocks without predicates inside the dot product:

- M is covered by tiles of `m_tile` rows; the last one starts at ``M - m_tile`` and repeats rows
  that another tile has done. M must be at least `m_tile`.
- Row blocks come in bundles of `streams`; past the end the last block is repeated.

Repeated rows are written twice with the same value by the same task.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from apq_tvm.codegen.layouts import UNIT_K, InterleavedLayout
from apq_tvm.tensorize.unit import Unit, decode
from apq_tvm.types import Scheme

ACTIVATIONS = ("", "relu", "gelu", "gelu_tanh", "tanh", "sigmoid", "silu")
"""Epilogues a linear layer may have."""


@dataclass(frozen=True)
class LinearSpec:
    """One linear layer as a kernel sees it: y[M, N] = act(x[M, K] W[N, K]ᵀ + b[N]) + residual[M, N].

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
    """

    n: int
    k: int
    scheme: Scheme | None
    bias: bool = False
    activation: str = ""
    residual: bool = False


def act_groups(layout: InterleavedLayout, scheme: Scheme, k: int) -> int:
    """Columns of ``xs``: scales of one row of activations."""
    return 1 if scheme.act_group == -1 else layout.padded_groups(k)


def unit_of(layout: InterleavedLayout) -> Unit:
    """The unit of `layout` as intrinsics describe it."""
    fields = tuple((f.width, f.shift) for f in layout.fields)
    return Unit(layout.bits, layout.rows, fields, 2 if layout.group_size == 16 else 1)


@dataclass(frozen=True)
class Blocking:
    """Extents of the loops of `integer_linear`.

    Parameters
    ----------
    m_tile : int
        Rows of x per tile.
    streams : int
        Row blocks per bundle.
    bundles : int
        Bundles that hold all row blocks.
    per_unit : int
        Groups that share one unit: 2 for groups of 16, else 1.
    spans, units : int
        Stretches along K that have `per_unit` scales each, and units in one.
    """

    m_tile: int
    streams: int
    bundles: int
    per_unit: int
    spans: int
    units: int

    @classmethod
    def of(cls, layout: InterleavedLayout, n: int, k: int, m_tile: int, streams: int) -> Blocking:
        """The blocking of an [n, k] matrix in `layout`."""
        width = layout.group_width(k)
        per_unit = max(1, UNIT_K // width)
        units = max(1, width // UNIT_K)
        bundles = -(-layout.row_blocks(n) // streams)
        return cls(m_tile, streams, bundles, per_unit, layout.padded_k(k) // UNIT_K // units, units)


class _Operands:
    """Declares the buffers of a linear PrimFunc in the order of the calling convention."""

    def __init__(self, spec: LinearSpec, layout: InterleavedLayout) -> None:
        from tvm import tirx

        self.spec = spec
        self.m = tirx.Var("m", "int64")
        self._shapes = layout.shapes(spec.n, spec.k)

    def declare(self, name: str, shape: tuple[Any, ...], dtype: str, align: int) -> Any:
        from tvm.tirx.script.builder import ir as b

        handle = b.arg(name, b.handle())
        extents = [_i64(s) if isinstance(s, int) else s for s in shape]
        return b.match_buffer(handle, extents, dtype, align=align, offset_factor=1)

    def weights(self) -> dict[str, Any]:
        # 64: packed arrays start on cache lines (codegen), so vector loads may be aligned ones.
        return {
            name: self.declare(name, shape, dtype, 64)
            for name, (shape, dtype) in self._shapes.items()
        }

    def epilogue(self) -> tuple[Any, Any, Any]:
        spec = self.spec
        bias = self.declare("bias", (spec.n,), "float32", 4) if spec.bias else None
        whole = (self.m, spec.n)
        residual = self.declare("residual", whole, "float32", 4) if spec.residual else None
        return bias, residual, self.declare("y", whole, "float32", 4)


def _i64(value: int) -> Any:
    from tvm import tirx

    return tirx.const(value, "int64")


def integer_linear(
    spec: LinearSpec,
    layout: InterleavedLayout,
    m_tile: int = 1,
    streams: int = 1,
    signed: bool = False,
) -> Any:
    """Linear layer with int8 activations: argument order as in `apq_tvm.lower`.

    ``y[m, n] = act(Σ_g scale[n, g] xs[m, g] (Σ_k code[n, k] xq[m, k] - zero[n, g] xsum[m, g])
    + b[n]) + residual[m, n]``, with a scale of the whole token applied after the sum.

    Parameters
    ----------
    spec : LinearSpec
        With 8-bit activations.
    layout : InterleavedLayout
    m_tile, streams : int
        See the module's docstring.
    signed : bool
        True to take 128 off 8-bit codes inside the dot product (and off the zero point), for
        instructions whose unsigned operand cannot hold 255 without saturating.

    Returns
    -------
    tvm.tirx.PrimFunc
        ``(xq i8 [M, Kp], xs f32 [M, Ga], xsum i32 [M, Kp/gw], codes, scales, [zeros], [bias],
        [residual], y)``, blocks ``dot``, ``scale`` and ``store``.
    """
    from tvm.script.ir_builder import IRBuilder
    from tvm.tirx.script.builder import ir as b

    assert spec.scheme is not None
    blocking = Blocking.of(layout, spec.n, spec.k, m_tile, streams)
    kp = layout.padded_k(spec.k)
    with IRBuilder() as builder:
        with b.prim_func(s_tir=True):
            b.func_name("linear")
            b.func_attr({"apq.op": "linear", "op_pattern": 8, "tirx.noalias": True})
            operands = _Operands(spec, layout)
            m = operands.m
            xq = operands.declare("xq", (m, kp), "int8", 4)
            xs = operands.declare("xs", (m, act_groups(layout, spec.scheme, spec.k)), "float32", 4)
            xsum = operands.declare("xsum", (m, layout.padded_groups(spec.k)), "int32", 4)
            weights = operands.weights()
            bias, residual, y = operands.epilogue()
            nest = _Nest(spec, layout, blocking, m)
            dots = b.sblock_alloc_buffer(nest.shape(groups=True), "int32")
            sums = b.sblock_alloc_buffer(nest.shape(groups=False), "float32")
            nest.dot(dots, xq, weights["codes"], signed)
            nest.scale(sums, dots, xs, xsum, weights, signed)
            nest.store(y, sums, xs, bias, residual)
    return builder.get()


class _Nest:
    """Emits the loop nests of `integer_linear`; indices are (tile, bundle, ..., stream, row of the
    tile, lane) so that every buffer between the nests is indexed by loop variables alone."""

    def __init__(
        self, spec: LinearSpec, layout: InterleavedLayout, blocking: Blocking, m: Any
    ) -> None:
        self.spec, self.layout, self.blocking, self.m = spec, layout, blocking, m
        self.tiles = (m + _i64(blocking.m_tile - 1)) // _i64(blocking.m_tile)
        assert spec.scheme is not None
        self.token_scale = spec.scheme.act_group == -1

    def shape(self, groups: bool) -> list[Any]:
        """Shape of the dot products (with spans and groups of a unit) or of their sums."""
        bl, rows = self.blocking, self.layout.rows
        middle = [bl.spans, bl.streams, bl.m_tile, bl.per_unit] if groups else [bl.streams, bl.m_tile]
        return [self.tiles, *(_i64(e) for e in (bl.bundles, *middle, rows))]

    def row(self, tile: Any, i: Any) -> Any:
        """Row of x: the last tile is moved back to end at M."""
        from tvm import tirx

        mt = self.blocking.m_tile
        return tile if mt == 1 else tirx.min(tile * _i64(mt), self.m - _i64(mt)) + i

    def block(self, bundle: Any, stream: Any) -> Any:
        """Row block to read: past the end the last one again."""
        from tvm import tirx

        index, last = self.block_index(bundle, stream), self.layout.row_blocks(self.spec.n) - 1
        return tirx.min(index, _i64(last)) if self.ragged else index

    def block_index(self, bundle: Any, stream: Any) -> Any:
        """Row block, possibly past the end. Each stream runs through consecutive blocks."""
        return stream * _i64(self.blocking.bundles) + bundle

    @property
    def ragged(self) -> bool:
        """Whether the last bundle has fewer blocks than streams."""
        return self.layout.row_blocks(self.spec.n) % self.blocking.streams != 0

    def dot(self, dots: Any, xq: Any, codes: Any, signed: bool) -> None:
        from tvm import tirx
        from tvm.tirx.script.builder import ir as b

        bl, lay = self.blocking, self.layout
        vectors = 8 // bl.per_unit
        extents = [*self.shape(groups=True), *(_i64(e) for e in (bl.units, vectors, 4))]
        with b.grid(*extents) as loops, b.sblock("dot"):
            t, nb, g, s, i, p, r, u, j, c = b.axis.remap("SSSSSSSRRR", loops)
            target = [t, nb, g, s, i, p, r]
            # p is left out where it is 0: intrinsics for one group have no such axis.
            vector = p * _i64(vectors) + j if bl.per_unit > 1 else j
            unit = g * _i64(bl.units) + u
            block, row = self.block(nb, s), self.row(t, i)
            # A whole unit of both operands: what an instruction reads.
            first = unit * _i64(UNIT_K)
            b.reads(
                codes[block, unit, 0 : lay.unit_bytes], xq[row, first : first + _i64(UNIT_K)]
            )
            b.writes(dots[tuple(target)])
            with b.init():
                b.buffer_store(dots, tirx.const(0, "int32"), target)
            code = decode(unit_of(lay), lambda byte: codes[block, unit, byte], vector, r * _i64(4) + c)
            if signed:
                code = code - tirx.const(128, "int32")
            x = xq[row, first + vector * _i64(4) + c].astype("int32")
            b.buffer_store(dots, dots[tuple(target)] + code * x, target)

    def scale(
        self, sums: Any, dots: Any, xs: Any, xsum: Any, weights: dict[str, Any], signed: bool
    ) -> None:
        from tvm import tirx
        from tvm.tirx.script.builder import ir as b

        bl, lay = self.blocking, self.layout
        spatial = self.shape(groups=False)
        with b.grid(*spatial, _i64(bl.spans), _i64(bl.per_unit)) as loops, b.sblock("scale"):
            t, nb, s, i, r, g, p = b.axis.remap("SSSSSRR", loops)
            target = [t, nb, s, i, r]
            with b.init():
                b.buffer_store(sums, tirx.const(0.0, "float32"), target)
            block, row = self.block(nb, s), self.row(t, i)
            group = g * _i64(bl.per_unit) + p
            total = self._centred(
                dots[t, nb, g, s, i, p, r],
                xsum[row, group],
                weights["zeros"][block, group, r] if lay.zero_points else None,
                signed,
            ).astype("float32")
            factor = weights["scales"][block, group, r].astype("float32")
            if not self.token_scale:
                factor = factor * xs[row, group]
            b.buffer_store(sums, sums[tuple(target)] + factor * total, target)

    def _centred(self, dot: Any, xsum: Any, zeros: Any, signed: bool) -> Any:
        """Dot product with (code - zero) instead of code; W1 without zeros is 2 * code - 1."""
        from tvm import tirx

        bits = self.layout.bits
        offset = 128 if signed else 0
        if zeros is not None:
            zero = zeros.astype("int32")
            return dot - (zero - tirx.const(offset, "int32") if offset else zero) * xsum
        if bits == 1:
            return dot * tirx.const(2, "int32") - xsum
        zero = (1 << (bits - 1)) - offset
        return dot - tirx.const(zero, "int32") * xsum if zero else dot

    def store(self, y: Any, sums: Any, xs: Any, bias: Any, residual: Any) -> None:
        from tvm.tirx.script.builder import ir as b

        from apq_tvm.ops import math

        n, rows = self.spec.n, self.layout.rows
        with b.grid(*self.shape(groups=False)) as loops, b.sblock("store"):
            t, nb, s, i, r = b.axis.remap("SSSSS", loops)
            index = self.block_index(nb, s)
            row, col = self.row(t, i), index * _i64(rows) + r
            value = sums[t, nb, s, i, r]
            if self.token_scale:
                value = value * xs[row, _i64(0)]
            if bias is not None:
                value = value + bias[col]
            value = math.activation(self.spec.activation, value)
            if residual is not None:
                value = value + residual[row, col]
            if n % rows == 0 and not self.ragged:
                b.buffer_store(y, value, [row, col])
            else:
                # Not a predicate of the block: TVM calls that binding not affine.
                inside = col < _i64(n) if n % rows else index < _i64(n // rows)
                with b.If(inside), b.Then():
                    b.buffer_store(y, value, [row, col])
