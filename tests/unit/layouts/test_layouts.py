"""Weight layouts: names, shapes, the byte order that kernels rely on, exact inverses, refusals."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apq_tvm.codegen.layouts import (
    LAYOUTS,
    ROWS,
    UNIT_K,
    Field,
    FloatLayout,
    InterleavedLayout,
    embedding_layout,
    split_fields,
    weight_layout,
)
from apq_tvm.errors import PackError
from apq_tvm.tensorize.meaning.whole_codes import WIDTHS, pieces
from apq_tvm.types import PackedTensor, QuantizedTensor, Scheme

BITS = range(1, 9)
GROUPS = (16, 32, 64, 128, 256, -1)


def random_tensor(scheme: Scheme, n: int, k: int, seed: int = 0) -> QuantizedTensor:
    rng = np.random.default_rng(seed)
    groups = 1 if scheme.group_size == -1 else -(-k // scheme.group_size)
    top = 1 << scheme.bits
    zeros = rng.integers(0, top, (n, groups), dtype=np.uint8) if scheme.zero_points else None
    return QuantizedTensor(
        rng.integers(0, top, (n, k), dtype=np.uint8),
        rng.normal(size=(n, groups)).astype(np.float16),
        zeros,
        scheme,
    )


def assert_equal(a: QuantizedTensor, b: QuantizedTensor) -> None:
    np.testing.assert_array_equal(a.codes, b.codes)
    np.testing.assert_array_equal(a.scales, b.scales)
    assert (a.zeros is None) == (b.zeros is None)
    if a.zeros is not None and b.zeros is not None:
        np.testing.assert_array_equal(a.zeros, b.zeros)
    assert a.scheme == b.scheme


def read_code(layout: InterleavedLayout, codes: np.ndarray, n: int, k: int) -> int:
    """One code out of packed bytes, straight from the layout's description."""
    unit = codes[n // layout.rows, k // 32]
    vector, lane = (k % 32) // 4, 4 * (n % layout.rows) + k % 4
    v = 4 * layout.rows
    if layout.run == 8:
        byte = 8 * (n % layout.rows) + k % 8
        vector, lane = (k % 32) // 8 * 2 + byte // v, byte % v
    value, offset, low = 0, 0, 0
    for width in (8, 4, 2, 1):
        if layout.bits - low < width:
            continue
        load, turn = vector % width, vector // width
        byte = int(unit[offset + load * v + lane]) ^ (0x80 if layout.inverted else 0)
        value |= ((byte >> (turn * width)) & ((1 << width) - 1)) << low
        offset += width * v
        low += width
    assert (low, offset) == (layout.bits, unit.size)
    return value


@pytest.mark.parametrize("bits", BITS)
def test_fields_cover_every_bit_once(bits: int) -> None:
    fields = split_fields(bits)
    assert [f.shift for f in fields] == [
        sum(g.width for g in fields[:i]) for i in range(len(fields))
    ]
    assert sum(f.width for f in fields) == bits
    assert all(f.per_byte * f.width == 8 and f.mask == 2**f.width - 1 for f in fields)


def test_fields_of_seven_bits() -> None:
    assert split_fields(7) == (Field(4, 0), Field(2, 4), Field(1, 6))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("bits", BITS)
def test_bytes_are_where_kernels_look(bits: int, rows: int) -> None:
    n, k = rows + 1, 70
    tensor = random_tensor(Scheme(bits, group_size=32), n, k)
    layout = InterleavedLayout(bits, rows, 32, inverted=rows == 4)
    assert layout.name == f"W{bits}r{rows}k4" + ("s" if rows == 4 else "")
    packed = layout.pack(tensor).arrays["codes"]
    for row in range(n):
        for col in (0, 3, 4, 15, 16, 31, 32, 63, 64, 69):
            assert read_code(layout, packed, row, col) == tensor.codes[row, col]


@pytest.mark.parametrize("rows", (4, 8))
@pytest.mark.parametrize("bits", BITS)
def test_sixteen_bytes_are_two_rows_of_eight(bits: int, rows: int) -> None:
    n, k = rows + 1, 70
    scheme = Scheme(bits, group_size=32)
    tensor = random_tensor(scheme, n, k)
    layout = InterleavedLayout.of_pairs(scheme, rows)
    assert layout.name == f"W{bits}r{rows}k8s" and weight_layout(layout.name, scheme) == layout
    packed = layout.pack(tensor)
    for row in range(n):
        for col in (0, 3, 7, 8, 15, 16, 31, 32, 63, 64, 69):
            assert read_code(layout, packed.arrays["codes"], row, col) == tensor.codes[row, col]
    if bits == 8:
        pair = packed.arrays["codes"][0, 0, :16].reshape(2, 8) ^ 0x80
        np.testing.assert_array_equal(pair, tensor.codes[:2, :8])


@pytest.mark.parametrize(("rows", "run", "whole"), [(16, 8, False), (1, 8, False), (4, 8, True)])
def test_impossible_runs_are_refused(rows: int, run: int, whole: bool) -> None:
    with pytest.raises(PackError, match="runs are of 4, or of 8"):
        InterleavedLayout(3, rows, 32, False, True, whole, run)


@given(
    bits=st.integers(1, 8),
    rows=st.sampled_from((4, 8)),
    group=st.sampled_from(GROUPS),
    zero_points=st.booleans(),
    n=st.integers(1, 40),
    k=st.integers(1, 300),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=60)
def test_round_trip_in_runs_of_eight(
    bits: int, rows: int, group: int, zero_points: bool, n: int, k: int, seed: int
) -> None:
    scheme = Scheme(bits, zero_points, group_size=group)
    tensor = random_tensor(scheme, n, k, seed)
    layout = InterleavedLayout.of_pairs(scheme, rows)
    packed = layout.pack(tensor)
    assert {key: a.shape for key, a in packed.arrays.items()} == {
        key: shape for key, (shape, _) in layout.shapes(n, k).items()
    }
    assert_equal(layout.unpack(packed, n, k, scheme), tensor)


@pytest.mark.parametrize("zero_points", (False, True))
@pytest.mark.parametrize("bits", WIDTHS)
def test_whole_codes(bits: int, zero_points: bool) -> None:
    """Every bit of a unit is that of one code; the first vectors lie in the top bits of bytes."""
    scheme = Scheme(bits, zero_points, group_size=32)
    layout = InterleavedLayout.of_lanes(scheme, 4)
    assert layout.name == f"W{bits}r4k4t" and InterleavedLayout.parse(layout.name, scheme) == layout
    taken = [
        (byte, place + bit)
        for vector in range(8)
        for byte, place, width, _ in pieces(bits, vector)
        for bit in range(width)
    ]
    assert sorted(taken) == [(byte, bit) for byte in range(bits) for bit in range(8)]
    for vector in range(8):
        shifts = [(shift, width) for _, _, width, shift in pieces(bits, vector)]
        assert shifts == [(sum(w for _, w in shifts[:i]), w) for i, (_, w) in enumerate(shifts)]
    tensor = random_tensor(scheme, 9, 70)
    packed = layout.pack(tensor)
    assert_equal(layout.unpack(packed, 9, 70, scheme), tensor)
    top = packed.arrays["codes"][0, 0, :16].reshape(4, 4) >> (8 - bits)
    np.testing.assert_array_equal(top, tensor.codes[:4, :4] ^ (1 << (bits - 1)))


def test_fields_where_whole_codes_do_not_pay() -> None:
    others = Scheme(3, act_bits=4), Scheme(3, act_bits=32), Scheme(3, group_size=16), Scheme(4)
    for scheme in others:
        assert InterleavedLayout.of_lanes(scheme, 4).name.endswith("s")
    assert InterleavedLayout.of_lanes(Scheme(3), 8).name == "W3r8k4"
    with pytest.raises(PackError, match="whole"):
        InterleavedLayout(4, 4, 32, False, True, True)


def test_four_bit_load_holds_a_vector_per_nibble() -> None:
    codes = (np.arange(8 * 32) % 16).astype(np.uint8).reshape(8, 32)
    tensor = QuantizedTensor(codes, np.ones((8, 1), np.float16), None, Scheme(4, group_size=32))
    unit = InterleavedLayout(4, 8, 32).pack(tensor).arrays["codes"][0, 0].reshape(4, 32)
    for load in range(4):
        low = codes[:, 4 * load : 4 * load + 4].reshape(32)
        high = codes[:, 4 * load + 16 : 4 * load + 20].reshape(32)
        np.testing.assert_array_equal(unit[load], low | (high << 4))


def test_eight_bit_embedding_row_is_plain() -> None:
    tensor = random_tensor(Scheme(8), 5, 64)
    packed = embedding_layout(tensor.scheme).pack(tensor).arrays["codes"]
    np.testing.assert_array_equal(packed.reshape(5, 64), tensor.codes)


@pytest.mark.parametrize("zero_points", (False, True))
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("bits", BITS)
def test_round_trip_at_edges(bits: int, rows: int, group: int, zero_points: bool) -> None:
    scheme = Scheme(bits, zero_points, group_size=group)
    layout = InterleavedLayout(bits, rows, group, zero_points, rows == 4)
    edge = max(group, UNIT_K)
    for n in {1, max(rows - 1, 1), rows, rows + 1, 3 * rows + 1}:
        for k in (1, edge - 1, edge, edge + 1):
            tensor = random_tensor(scheme, n, k)
            packed = layout.pack(tensor)
            assert packed.layout == layout.name
            got = {key: (a.shape, str(a.dtype)) for key, a in packed.arrays.items()}
            assert got == layout.shapes(n, k)
            assert list(got) == list(layout.shapes(n, k))
            assert_equal(layout.unpack(packed, n, k), tensor)


@given(
    bits=st.integers(1, 8),
    rows=st.sampled_from(ROWS),
    group=st.sampled_from(GROUPS),
    zero_points=st.booleans(),
    n=st.integers(1, 40),
    k=st.integers(1, 300),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=100)
def test_round_trip_any_shape(
    bits: int, rows: int, group: int, zero_points: bool, n: int, k: int, seed: int
) -> None:
    scheme = Scheme(bits, zero_points, act_bits=16, group_size=group)
    tensor = random_tensor(scheme, n, k, seed)
    layout = InterleavedLayout(bits, rows, group, zero_points, rows == 4)
    assert_equal(layout.unpack(layout.pack(tensor), n, k, scheme), tensor)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("zero_points", (False, True))
def test_padding_means_zero(bits: int, zero_points: bool) -> None:
    scheme = Scheme(bits, zero_points, group_size=64)
    tensor = random_tensor(scheme, 5, 70)
    layout = InterleavedLayout(bits, 8, 64, zero_points)
    packed = layout.pack(tensor)
    assert not packed.arrays["scales"][0, :, 5:].any()
    for row in range(8):
        for col in range(70, 128):
            want = 1 << (bits - 1)
            if tensor.zeros is not None:
                want = int(tensor.zeros[row, 1]) if row < 5 else 0
            assert read_code(layout, packed.arrays["codes"], row, col) == want


def test_group_of_16_pads_to_whole_units() -> None:
    layout = InterleavedLayout(4, 8, 16)
    assert (layout.padded_k(33), layout.groups(33), layout.padded_groups(33)) == (64, 3, 4)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("rows", ROWS)
def test_names_parse_back(bits: int, rows: int) -> None:
    scheme = Scheme(bits, True, group_size=128)
    layout = InterleavedLayout(bits, rows, 128, True)
    assert layout.name == f"W{bits}r{rows}k4"
    assert weight_layout(layout.name, scheme) == layout


@pytest.mark.parametrize("name", ("W4r7k4", "W9r8k4", "W4r8", "w4r8k4", "W4r8k4 ", "F32r8", ""))
def test_unknown_names_are_refused(name: str) -> None:
    with pytest.raises(PackError, match="layout"):
        weight_layout(name, Scheme(4))


def test_name_of_other_bits_is_refused() -> None:
    with pytest.raises(PackError, match="W4r8k4 cannot hold W3A8g64"):
        weight_layout("W4r8k4", Scheme(3, group_size=64))


def test_each_name_belongs_to_one_family() -> None:
    for name, scheme in (("W4r8k4", Scheme(4)), ("F32r8", None)):
        parsed = [family.parse(name, scheme) for family in LAYOUTS]  # type: ignore[arg-type]
        assert sum(layout is not None for layout in parsed) == 1


@pytest.mark.parametrize("bits", (0, 9))
def test_impossible_bits_are_refused(bits: int) -> None:
    with pytest.raises(PackError, match=f"bits={bits}"):
        InterleavedLayout(bits, 8)


@pytest.mark.parametrize("group", (0, 17, 48, -2))
def test_impossible_groups_are_refused(group: int) -> None:
    with pytest.raises(PackError, match=f"group_size={group}"):
        InterleavedLayout(4, 8, group)


def test_pack_refuses_what_does_not_fit() -> None:
    good = random_tensor(Scheme(4, True, group_size=32), 5, 40)
    layout = InterleavedLayout(4, 8, 32, True)
    assert good.zeros is not None
    bad = {
        "cannot hold scheme": replace(good, scheme=Scheme(4, True, group_size=64)),
        "code 16 exceeds 15": replace(good, codes=np.full((5, 40), 16, np.uint8)),
        "codes are int64": replace(good, codes=good.codes.astype(np.int64)),
        "codes are uint8": replace(good, codes=good.codes[0]),
        r"scales is float16 \[5, 1\]": replace(good, scales=good.scales[:, :1]),
        "scales is float32": replace(good, scales=good.scales.astype(np.float32)),
        "not finite": replace(good, scales=np.full((5, 2), np.inf, np.float16)),
        "needs zero points": replace(good, zeros=None),
        "zeros holds 16; at most 15": replace(good, zeros=np.full((5, 2), 16, np.uint8)),
        r"zeros is uint8 \[4, 2\]": replace(good, zeros=good.zeros[:4]),
    }
    for message, tensor in bad.items():
        with pytest.raises(PackError, match=f"encoder.0.*{message}"):
            layout.pack(tensor, "encoder.0")


def test_unpack_refuses_other_arrays() -> None:
    layout = InterleavedLayout(4, 8, 32)
    packed = layout.pack(random_tensor(Scheme(4, group_size=32), 9, 40))
    codes, scales = packed.arrays["codes"], packed.arrays["scales"]
    with pytest.raises(PackError, match="codes is uint8"):
        layout.unpack(packed, 17, 40)
    with pytest.raises(PackError, match="N, K >= 1"):
        layout.unpack(packed, 0, 40)
    for bad in (
        PackedTensor("W4r16k4", packed.arrays),
        PackedTensor("W4r8k4", {"codes": codes}),
        PackedTensor("W4r8k4", {"codes": codes, "scales": scales.astype(np.float32)}),
    ):
        with pytest.raises(PackError, match="W4r8k4"):
            layout.unpack(bad, 9, 40)


@pytest.mark.parametrize("rows", (1, 8, 16))
@pytest.mark.parametrize("n", (1, 7, 8, 9, 33))
def test_float_layout_round_trip(rows: int, n: int) -> None:
    weight = np.random.default_rng(0).normal(size=(n, 5)).astype(np.float32)
    layout = weight_layout(f"F32r{rows}", None)
    packed = layout.pack(weight)
    assert packed.arrays["weight"].shape == layout.shapes(n, 5)["weight"][0]
    np.testing.assert_array_equal(
        packed.arrays["weight"][(n - 1) // rows, :, (n - 1) % rows], weight[-1]
    )
    np.testing.assert_array_equal(layout.unpack(packed, n, 5), weight)


def test_float_layout_refuses_what_does_not_fit() -> None:
    layout = FloatLayout(8)
    with pytest.raises(PackError, match=r"head: float64 \[2, 2\]"):
        layout.pack(np.zeros((2, 2)), "head")  # type: ignore[arg-type]
    packed = layout.pack(np.zeros((2, 2), np.float32))
    with pytest.raises(PackError, match="F32r8 weight is"):
        layout.unpack(packed, 2, 3)
    with pytest.raises(PackError, match="is no F32r8"):
        layout.unpack(PackedTensor("F32r4", packed.arrays), 2, 2)
    with pytest.raises(PackError, match="cannot hold float32 weights"):
        weight_layout("W4r8k4", None)
    with pytest.raises(PackError, match="F32r8 cannot hold W4"):
        FloatLayout.parse("F32r8", Scheme(4))
    with pytest.raises(PackError, match="rows=0"):
        FloatLayout(0)


def test_references_need_no_tvm() -> None:
    code = (
        "import sys, apq_tvm.codegen.layouts, apq_tvm.formats, apq_tvm.quantizers;"
        "sys.exit('tvm' in sys.modules or 'onnx' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("bits", (2, 4, 8))
def test_halves_of_eight_rows_lie_as_four_rows(bits: int) -> None:
    scheme = Scheme(bits, group_size=32)
    eight, four = (InterleavedLayout.of_pairs(scheme, rows) for rows in (8, 4))
    tensor = random_tensor(scheme, 8, 32)
    unit = eight.pack(tensor).arrays["codes"][0, 0]
    own = four.pack(tensor).arrays["codes"][:, 0]
    half = eight.half_unit
    assert (half.rows, half.nbytes) == (4, unit.size - 32)
    for part in range(2):
        bytes_of = [unit[32 * part + half.at(byte)] for byte in range(four.unit_bytes)]
        np.testing.assert_array_equal(bytes_of, own[part])


@pytest.mark.parametrize(("bits", "rows"), [(3, 8), (1, 8), (4, 4)])
def test_halves_that_lie_apart_are_refused(bits: int, rows: int) -> None:
    with pytest.raises(PackError, match="no halves"):
        _ = InterleavedLayout.of_pairs(Scheme(bits), rows).half_unit
