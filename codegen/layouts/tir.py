"""The transforms of `InterleavedLayout` as TensorIR, for one matrix shape each.

They are compiled into modules so that an app can load new canonical weights at run time. They
write the same bytes as the numpy reference. Written with `te` because every output element is one
closed expression of the layout's fields.
"""

from __future__ import annotations

from typing import Any

from tvm import te, tirx

from apq_tvm.codegen.layouts.interleaved import InterleavedLayout
from apq_tvm.tensorize.meaning.interleaved import UNIT_K, decode
from apq_tvm.tensorize.meaning.whole_codes import pieces


def pack_functions(layout: InterleavedLayout, n: int, k: int) -> dict[str, Any]:
    """Packers of an [n, k] matrix, padding as in `InterleavedLayout.pack`.

    Returns
    -------
    dict of str to tvm.tirx.PrimFunc
        Named by what they write, whose shape is ``layout.shapes(n, k)[name]``:
        ``codes(codes u8 [N, K], [zeros u8 [N, G],] out)``, ``scales(scales f16 [N, G], out)`` and,
        with zero points, ``zeros(zeros u8 [N, G], out)``. Public symbols are
        ``pack_{name}_{layout}``.
    """
    functions = {}
    for name, (shape, dtype) in layout.shapes(n, k).items():
        if name == "codes":
            function = _pack_codes(layout, n, k, shape)
        else:
            function = _pack_per_group(layout, (n, layout.groups(k)), shape, dtype)
        functions[name] = function.with_attr("global_symbol", f"pack_{name}_{layout.name}")
    return functions


def unpack_functions(layout: InterleavedLayout, n: int, k: int) -> dict[str, Any]:
    """Inverses of `pack_functions`.

    Returns
    -------
    dict of str to tvm.tirx.PrimFunc
        ``codes(packed, codes u8 [N, K])``, ``scales(packed, scales f16 [N, G])`` and, with zero
        points, ``zeros(packed, zeros u8 [N, G])``. Public symbols are ``unpack_{name}_{layout}``.
    """
    functions = {}
    for name, (shape, dtype) in layout.shapes(n, k).items():
        if name == "codes":
            function = _unpack_codes(layout, n, k, shape)
        else:
            function = _unpack_per_group(layout, (n, layout.groups(k)), shape, dtype)
        functions[name] = function.with_attr("global_symbol", f"unpack_{name}_{layout.name}")
    return functions


def _u8(value: int) -> Any:
    return tirx.const(value, "uint8")


def _pack_codes(layout: InterleavedLayout, n: int, k: int, shape: tuple[int, ...]) -> Any:
    groups = layout.groups(k)
    codes = te.placeholder((n, k), "uint8", "codes")
    zeros = te.placeholder((n, groups), "uint8", "zeros")

    def code(row: Any, col: Any) -> Any:
        padding: Any = _u8(layout.pad_code)
        if layout.zero_points:
            # Columns past K that still lie in the last group take its zero point.
            group = col // layout.group_width(k)
            known = tirx.all(row < n, group < groups)
            padding = tirx.if_then_else(known, zeros[row, group], padding)
        return tirx.if_then_else(tirx.all(row < n, col < k), codes[row, col], padding)

    def whole_byte(block: Any, unit: Any, load: Any, lane: Any) -> Any:
        value: Any = _u8(0x80)
        for vector in range(8):
            col = unit * UNIT_K + 4 * vector + lane % 4
            whole = code(block * layout.rows + lane // 4, col)
            for index, place, width, shift in pieces(layout.bits, vector):
                part = ((whole >> _u8(shift)) & _u8((1 << width) - 1)) << _u8(place)
                value = value ^ tirx.if_then_else(load == index, part, _u8(0))
        return value

    def packed_byte(block: Any, unit: Any, byte: Any) -> Any:
        value: Any = _u8(0)
        if layout.whole:
            return whole_byte(block, unit, byte // layout.vector_bytes, byte % layout.vector_bytes)
        for f in layout.fields:
            place = byte - layout.vector_bytes * f.shift  # byte of this field
            load, lane = place // layout.vector_bytes, place % layout.vector_bytes
            bits: Any = _u8(0)
            for t in range(f.per_byte):
                row, within = _position(layout, load + f.width * t, lane)
                whole = code(block * layout.rows + row, unit * UNIT_K + within)
                part = (whole >> _u8(f.shift)) & _u8(f.mask)
                bits = bits | (part << _u8(f.width * t))
            inside = tirx.all(place >= 0, place < layout.vector_bytes * f.width)
            value = tirx.if_then_else(inside, bits, value)
        return value ^ _u8(0x80) if layout.inverted else value

    out = te.compute(shape, packed_byte, name="packed")
    inputs = [codes, zeros] if layout.zero_points else [codes]
    return te.create_prim_func([*inputs, out])


def _position(layout: InterleavedLayout, vector: Any, lane: Any) -> tuple[Any, Any]:
    """(row of the block, k of the unit) of a byte of a vector: the inverse of `Unit.place`."""
    if layout.run == 4:
        return lane // 4, 4 * vector + lane % 4
    return vector % 2 * (layout.rows // 2) + lane // 8, vector // 2 * 8 + lane % 8


def _unpack_codes(layout: InterleavedLayout, n: int, k: int, shape: tuple[int, ...]) -> Any:
    packed = te.placeholder(shape, "uint8", "packed")

    def code(row: Any, col: Any) -> Any:
        place = (row % layout.rows, col % UNIT_K // 4, col % 4)
        vector, lane = layout.unit.place(*place)
        if layout.whole:
            unit = row // layout.rows, col // UNIT_K
            return decode(layout.unit, lambda at: packed[(*unit, at)], vector, lane).astype("uint8")
        value: Any = _u8(0)
        for f in layout.fields:
            byte = layout.vector_bytes * (f.shift + vector % f.width) + lane
            stored = packed[row // layout.rows, col // UNIT_K, byte]
            stored = stored ^ _u8(0x80) if layout.inverted else stored
            shift = (vector // f.width * f.width).astype("uint8")
            value = value | (((stored >> shift) & _u8(f.mask)) << _u8(f.shift))
        return value

    return te.create_prim_func([packed, te.compute((n, k), code, name="codes")])


def _pack_per_group(
    layout: InterleavedLayout, canonical: tuple[int, int], shape: tuple[int, ...], dtype: str
) -> Any:
    """[N, G] -> [NB, Gp, R], padded with 0."""
    values = te.placeholder(canonical, dtype, "values")

    def value(block: Any, group: Any, lane: Any) -> Any:
        row = block * layout.rows + lane
        known = tirx.all(row < canonical[0], group < canonical[1])
        return tirx.if_then_else(known, values[row, group], tirx.const(0, dtype))

    return te.create_prim_func([values, te.compute(shape, value, name="packed")])


def _unpack_per_group(
    layout: InterleavedLayout, canonical: tuple[int, int], shape: tuple[int, ...], dtype: str
) -> Any:
    """[NB, Gp, R] -> [N, G]."""
    packed = te.placeholder(shape, dtype, "packed")
    values = te.compute(
        canonical,
        lambda row, group: packed[row // layout.rows, group, row % layout.rows],
        name="values",
    )
    return te.create_prim_func([packed, values])
