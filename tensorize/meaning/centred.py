"""Micro-kernels and panels of GEMMs whose decoded codes are centred int8: their plain loops.

A *tile* is rows of activations times vectors of 4 int32 sums. Sums lie in one of two orders:

- *lanes*: a vector is one row of x times 4 rows of W, as sdot by lane gives it::

      C[m, c, r] += sum over q, i of A[q, m, i] * B[q, c, r, i]

- *pairs*: a vector is 2 rows of x times 2 rows of W, ``r = 2 * (row of x) + (row of W)``, as smmla
  gives it from operands of 2 rows x 8 k::

      C[p, c, r] += sum over e, i of A[p, e, r // 2, i] * B[e, c, r % 2, i]

The panel B is decoded by ``B = code - zero`` (W1 without zero points: ``2 * code - 1``); codes of 8
bits lose 128 instead of their zero point, which would not fit. Scales are in the order of the sums.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from apq_tvm.tensorize.exprs import member
from apq_tvm.tensorize.meaning.interleaved import Unit, decode

PrimFunc = Any  # tvm is untyped
Expr = Any
Buffer = Any
Place = Callable[[Expr, Expr], list[Expr]]


@dataclass(frozen=True)
class CentredTile:
    """Shape of one micro-kernel call.

    Parameters
    ----------
    m : int
        Rows of activations: 4 in the order of lanes, even for pairs.
    columns : int
        Vectors along the rows of W: of 4 rows, 2 for pairs.
    k : int
        Products summed by one call: a multiple of 4, of 8 for pairs.
    pairs : bool
        Order of the sums.
    """

    m: int
    columns: int
    k: int
    pairs: bool

    def __str__(self) -> str:
        return f"{self.m}x{(2 if self.pairs else 4) * self.columns}x{self.k}"

    @property
    def sums(self) -> tuple[int, int, int]:
        """Shape of C."""
        return (self.m // 2 if self.pairs else self.m), self.columns, 4

    @property
    def activations(self) -> tuple[int, ...]:
        """Shape of A."""
        return (self.m // 2, self.k // 8, 2, 8) if self.pairs else (self.k // 4, self.m, 4)

    @property
    def panel(self) -> tuple[int, ...]:
        """Shape of B."""
        if self.pairs:
            return self.k // 8, self.columns, 2, 8
        return self.k // 4, self.columns, 4, 4


def centre(unit: Unit, code: Expr, zero: Expr | None) -> Expr:
    """What a decoded byte holds, int32.

    Parameters
    ----------
    unit : Unit
    code : PrimExpr
        int32.
    zero : PrimExpr or None
        The group's zero point; None for symmetric codes and for 8 bits.
    """
    from tvm import tirx

    if zero is not None:
        return code - zero.astype("int32")
    if unit.bits == 1:
        return code + code - tirx.const(1, "int32")
    return code - tirx.const(1 << (unit.bits - 1), "int32")


def largest_byte(bits: int, zero_points: bool) -> int:
    """Largest magnitude in a panel of `bits`-bit codes."""
    if bits == 8 or bits == 1:
        return 128 if bits == 8 else 1
    return (1 << bits) - 1 if zero_points else 1 << (bits - 1)


def multiply_pair(
    tile: CentredTile, body: Callable[[CentredTile, Buffer, Buffer, Buffer], None]
) -> tuple[PrimFunc, PrimFunc]:
    """(desc, impl) of a micro-kernel ``(a int8, b int8, c int32)``; `body` emits instructions."""
    return _multiply(tile, _multiply_loops, False), _multiply(tile, body, True)


def unpack_pair(
    unit: Unit, pairs: bool, zeros: bool, body: Callable[[Buffer, Buffer | None, Buffer], None]
) -> tuple[PrimFunc, PrimFunc]:
    """(desc, impl) of the decoding of one unit, ``(codes uint8, [zeros uint8,] b int8)``.

    `zeros` are [4], or [2, 4] where a unit has two groups; b is the panel of 4 rows of W.
    """

    def place(at: tuple[Expr, ...]) -> tuple[Expr, ...]:
        return at if pairs else (at[0], 0, *at[1:])

    def loops(codes: Buffer, zero: Buffer | None, out: Buffer) -> None:
        unpack_loops(
            unit,
            pairs,
            lambda byte: codes[byte],
            codes[0 : unit.nbytes],
            None if zero is None else lambda at: zero[at],
            lambda at: out[place(at)],
            lambda at, value: _store(out, value, place(at)),
        )

    return (
        _unpack(unit, pairs, zeros, loops, False),
        _unpack(unit, pairs, zeros, body, True),
    )


def unpack_loops(
    unit: Unit, pairs: bool, load: Any, codes: Any, zero: Any, out: Any, store: Any
) -> None:
    """The loops of `unpack_pair` over the caller's buffers, block ``unpack``.

    Parameters
    ----------
    load : callable
        Byte of the unit by index.
    codes : BufferRegion
        All of the unit.
    zero, out : callable
        Element by index in [4] or [2, 4], and in the panel; `zero` may be None.
    store : callable
        ``(index, int8 value)``.
    """
    from tvm.tirx.script.builder import ir as b

    shape = (4, 2, 2, 8) if pairs else (8, 4, 4)
    with b.grid(*shape) as loops, b.sblock("unpack"):
        at = tuple(b.axis.remap("S" * len(shape), loops))
        if pairs:
            four, row, k = at[0] * 2 + at[3] // 4, at[1] * 2 + at[2], at[3] % 4
        else:
            four, row, k = at
        per_group = unit.vectors if not pairs else unit.vectors // 2
        group = () if unit.groups == 1 else (at[0] // per_group,)
        point = None if zero is None else zero((*group, row))
        b.reads(*([codes] if point is None else [codes, point]))
        b.writes(out(at))
        code = decode(unit, load, *unit.place(row, four, k))
        store(at, centre(unit, code, point).astype("int8"))


def scales_pair(body: Callable[[Buffer, Buffer], None], source: str) -> tuple[PrimFunc, PrimFunc]:
    """(desc, impl) of `spread_loops`: V is `source` [4], S float32 [2, 4], int32 for uint8."""
    made = "int32" if source == "uint8" else "float32"

    def loops(values: Buffer, out: Buffer) -> None:
        spread_loops("spread", lambda i: values[i], out, lambda c, r: [c, r])

    def build(emit: Callable[[Buffer, Buffer], None]) -> PrimFunc:
        return member([("v", (4,), source, 4, None), ("s", (2, 4), made, 16, None)], emit)

    return build(loops), build(body)


def spread_loops(name: str, value: Callable[[Expr], Expr], out: Buffer, at: Place) -> None:
    """``S[c, r] = V[2c + r % 2]`` as the sums of pairs want factors of 4 rows."""
    _two_vectors(name, lambda c, r: value(c * 2 + r % 2), out, at)


def rows_pair(body: Callable[[Buffer, Buffer], None]) -> tuple[PrimFunc, PrimFunc]:
    """(desc, impl) of `rows_loops`, float32."""

    def loops(sums: Buffer, out: Buffer) -> None:
        rows_loops(lambda c, r: sums[c, r], out, lambda m, r: [m, r])

    def build(emit: Callable[[Buffer, Buffer], None]) -> PrimFunc:
        out_strides = [_stride("y"), 1] if emit is body else None
        declared = ("y", (2, 4), "float32", 16, out_strides)
        return member([("s", (2, 4), "float32", 16, None), declared], emit)

    return build(loops), build(body)


def rows_loops(sums: Callable[[Expr, Expr], Expr], out: Buffer, at: Place) -> None:
    """``Y[m, r] = S[r // 2, 2m + r % 2]``: two vectors of sums in pairs as 2 rows of 4."""
    _two_vectors("rows", lambda m, r: sums(r // 2, m * 2 + r % 2), out, at)


def _two_vectors(name: str, source: Callable[[Expr, Expr], Expr], out: Buffer, at: Place) -> None:
    """Two vectors of 4, element by element; `at` is where they go."""
    from tvm.tirx.script.builder import ir as b

    with b.grid(2, 4) as loops, b.sblock(name):
        vector, r = b.axis.remap("SS", loops)
        value, place = source(vector, r), at(vector, r)
        b.reads(value)
        b.writes(out[tuple(place)])
        b.buffer_store(out, value.astype(out.dtype), place)


def _unpack(
    unit: Unit, pairs: bool, zeros: bool, emit: Callable[..., None], strided: bool
) -> PrimFunc:
    shape = (4, 2, 2, 8) if pairs else (8, 1, 4, 4)
    inner = [16, 8, 1] if pairs else [16, 4, 1]
    strides = [_stride("b"), *inner] if strided else None
    zero_shape = (4,) if unit.groups == 1 else (2, 4)
    operands: list[tuple[Any, ...]] = [("codes", (unit.nbytes,), "uint8", unit.vector_bytes, None)]
    if zeros:
        operands.append(("zeros", zero_shape, "uint8", 4, None))
    operands.append(("b", shape, "int8", 16, strides))

    def call(*buffers: Buffer) -> None:
        emit(buffers[0], buffers[1] if zeros else None, buffers[-1])

    return member(operands, call)


def _multiply(tile: CentredTile, emit: Callable[..., None], strided: bool) -> PrimFunc:
    of_x = [_stride("a"), 16, 8, 1] if strided and tile.pairs else None
    lasting = [16, *((8, 1) if tile.pairs else (4, 1))]
    operands = (
        ("a", tile.activations, "int8", 4, of_x),
        ("b", tile.panel, "int8", 16, [_stride("b"), *lasting] if strided else None),
        ("c", tile.sums, "int32", 16),
    )
    return member(operands, lambda *buffers: emit(tile, *buffers), updated=True)


def _multiply_loops(tile: CentredTile, a: Buffer, w: Buffer, c: Buffer) -> None:
    multiply_loops(tile, (lambda *at: a[at]), (lambda *at: w[at]), c)


def multiply_loops(tile: CentredTile, a: Any, w: Any, c: Buffer) -> None:
    """The loops of `multiply_pair`, block ``dot``; `a` and `w` are elements by their index."""
    from tvm import tirx
    from tvm.tirx.script.builder import ir as b

    width = 8 if tile.pairs else 4
    extents = (*tile.sums, tile.k // width, width)
    with b.grid(*extents) as loops, b.sblock("dot"):
        axes: list[Expr] = []
        for kind, extent, loop in zip("SSSRR", extents, loops, strict=True):
            # An axis of extent 1 is the constant 0, as TVM simplifies it in the match.
            make = b.axis.spatial if kind == "S" else b.axis.reduce
            axes.append(tirx.const(0, "int32") if extent == 1 else make(extent, loop))
        m, j, r, k, i = axes
        if tile.pairs:
            x, code = a(m, k, r // 2, i), w(k, j, r % 2, i)
        else:
            x, code = a(k, m, i), w(k, j, r, i)
        b.reads(c[m, j, r], x, code)
        b.writes(c[m, j, r])
        product = x.astype("int32") * code.astype("int32")
        b.buffer_store(c, c[m, j, r] + product, [m, j, r])


def _store(buffer: Buffer, value: Expr, at: tuple[Expr, ...]) -> None:
    from tvm.tirx.script.builder import ir as b

    b.buffer_store(buffer, value, list(at))


def _stride(name: str) -> Expr:
    from tvm import tirx

    return tirx.Var(f"{name}_stride", "int64")
