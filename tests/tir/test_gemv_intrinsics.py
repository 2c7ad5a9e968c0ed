"""Each dot intrinsic: instructions give what the plain loops give, on random and extreme data."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from built import built
from tvm.s_tir import TensorIntrin

from apq_tvm.codegen.layouts import InterleavedLayout
from apq_tvm.schedules.devices import find_profile
from apq_tvm.tensorize.meaning.interleaved import Unit
from apq_tvm.tensorize.meaning.packed_dot import UnitDot
from apq_tvm.tensorize.pairs.float_dot import float_dot_intrinsic
from apq_tvm.tensorize.x86.dot import INSTRUCTIONS, MADDUBS_SUMS, DotInstruction, dot_intrinsic

GROUPS = (16, 32)


def unit(bits: int, rows: int, group: int) -> Unit:
    return InterleavedLayout(bits, rows, group).unit


def run(name: str, half: str, operands: list[np.ndarray[Any, Any]], acc: Any) -> Any:
    out = acc.copy()
    built(getattr(TensorIntrin.get(name), half), find_profile("host"))(*operands, out)
    return out


def sums_shape(u: Unit, m: int) -> tuple[int, ...]:
    return (*((2,) if u.groups == 2 else ()), *((m,) if m > 1 else ()), u.rows)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("instruction", INSTRUCTIONS, ids=lambda i: i.name)
def test_integer_dot(instruction: DotInstruction, bits: int, group: int) -> None:
    if not find_profile("host").features & set(instruction.features):
        pytest.skip(f"this CPU has none of {instruction.features}")
    m = 1 + bits % 3
    u = unit(bits, instruction.rows, group)
    name = dot_intrinsic(instruction, instruction.meaning(u, m))
    assert dot_intrinsic(instruction, instruction.meaning(u, m)) == name
    rng = np.random.default_rng(bits)
    shape = (m, 32) if m > 1 else (32,)
    signs = np.resize([127, -127], shape)
    for codes in (rng.integers(0, 256, u.nbytes), np.full(u.nbytes, 255), np.zeros(u.nbytes)):
        for x in (rng.integers(-127, 128, shape), np.full(shape, 127), np.full(shape, -127), signs):
            operands = [codes.astype(np.uint8), x.astype(np.int8)]
            acc = rng.integers(-1000, 1000, sums_shape(u, m)).astype(np.int32)
            want, got = (run(name, half, operands, acc) for half in ("desc", "impl"))
            np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("zeros", (False, True))
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("bits", range(1, 9))
def test_float_dot(bits: int, group: int, zeros: bool) -> None:
    m, rows = 1 + bits % 3, (4, 8, 16)[bits % 3]
    u = unit(bits, rows, group)
    name = float_dot_intrinsic(UnitDot(u, m, "float32", zeros=zeros))
    rng = np.random.default_rng(bits)
    operands = [
        rng.integers(0, 256, u.nbytes).astype(np.uint8),
        rng.normal(size=(m, 32) if m > 1 else (32,)).astype(np.float32),
    ]
    if zeros:
        shape = (2, rows) if u.groups == 2 else (rows,)
        operands.append(rng.integers(0, 1 << bits, shape).astype(np.uint8))
    acc = rng.normal(size=sums_shape(u, m)).astype(np.float32)
    want, got = (run(name, half, operands, acc) for half in ("desc", "impl"))
    # The order of 32 float32 sums of products up to 2^bits differs.
    np.testing.assert_allclose(got, want, atol=2e-6 * 32 * (1 << bits))


def test_int16_never_overflows() -> None:
    """The table in `x86_dot`: sums stay within int16 for every code and activation."""
    for bits, count in MADDUBS_SUMS.items():
        largest = (1 << bits) - 1 if bits < 8 else 128
        assert count * 2 * largest * 127 <= 32767
        assert count == 8 or (count + 1) * 2 * largest * 127 > 32767
