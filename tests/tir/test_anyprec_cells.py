"""Any-precision whose cells of 5 bits are divided: instructions, kernels of every width."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from built import aligned
from test_anyprec import compiled, kernel_of, profile_for, quantized, same_halves
from test_anyprec_groups import in_order, prepared

from apq_tvm.errors import NotApplicable
from apq_tvm.formats import details, parse_scheme
from apq_tvm.formats.anyprec import levels_of, table_name
from apq_tvm.formats.anyprec_cells import CELLS, HALVES, MOST, UNITS, restored, table_widths
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.schedules.devices import find_profile
from apq_tvm.schedules.linear.kernel import LinearKernel
from apq_tvm.schedules.x86.anyprec import ANYPREC_KERNELS, APART_KERNELS, STRIDED_KERNELS
from apq_tvm.tensorize.meaning.planes import QUAD
from apq_tvm.tensorize.pairs.planes import PlanesInstruction
from apq_tvm.tensorize.x86.planes import INSTRUCTIONS
from apq_tvm.types import QuantizedTensor

Array = Any

RELATIVE_ERROR = 3e-6
"""As in `test_anyprec_groups`."""

CELL_KERNELS = tuple(kernel for kernel in ANYPREC_KERNELS if kernel not in APART_KERNELS.values())


def cells_tensor(n: int, k: int, name: str, seed: int = 0) -> QuantizedTensor:
    """Random codes, centroids up to ±116 and steps up to the largest."""
    rng, scheme = np.random.default_rng(seed), parse_scheme(name)
    assert scheme is not None
    tables: dict[str, Array] = {
        table_name(b): restored(
            np.sort(rng.integers(-UNITS, UNITS + 1, (n, 1 << b)), 1).astype(np.int8)
        )
        for b in table_widths(scheme)
    }
    if scheme.bits > 5:
        tables[HALVES] = rng.integers(0, MOST + 1, (n, CELLS)).astype(np.uint8)
    codes = rng.integers(0, 1 << scheme.bits, (n, k), dtype=np.uint8)
    scales = rng.uniform(0.5, 1.5, (n, 1)).astype(np.float16)
    return QuantizedTensor(codes, scales, None, scheme, tables)


def exact_weights(tensor: QuantizedTensor, bits: int) -> Array:
    """float64 [N, K], without float16's rounding of centroids."""
    steps = 16.0 * UNITS
    levels = np.rint(levels_of(tensor, bits).astype(np.float64) * steps) / steps
    codes = (tensor.codes >> np.uint8(tensor.scheme.bits - bits)).astype(np.intp)
    return np.take_along_axis(levels, codes, 1) * tensor.scales.astype(np.float64)


@pytest.mark.parametrize("group", (0, 16, 32, 64))
@pytest.mark.parametrize("bits", (6, 7, 8))
@pytest.mark.parametrize("instruction", INSTRUCTIONS, ids=lambda i: i.name)
def test_instructions_do_what_they_mean(
    instruction: PlanesInstruction, bits: int, group: int
) -> None:
    """At the extremes too; scales of powers of 2 keep sums exact."""
    if not set(instruction.features) <= find_profile("host").features:
        pytest.skip(f"this CPU has not {instruction.features}")
    for k in (32, 64):
        same_digits(instruction, bits, group, k)


def same_digits(instruction: PlanesInstruction, bits: int, group: int, k: int) -> None:
    rng, lanes = np.random.default_rng(bits + k + group), instruction.vector // 4
    planes = rng.integers(0, 256, (bits, 1, k)).astype(np.uint8)
    step = instruction.step(bits, 8, k, group, divided=True)
    dot = instruction.dot(step)
    width = max(1, min(group, k))
    scales = np.repeat(2.0 ** rng.integers(-2, 3, k // width), max(1, width // QUAD))
    acc = rng.integers(-99, 99, (8, lanes)).astype(np.float32 if group else np.int32)
    for extreme in (False, True):
        table = rng.integers(-UNITS, UNITS + 1, (8, CELLS)).astype(np.int8)
        halves = rng.integers(0, MOST + 1, (8, CELLS)).astype(np.uint8)
        x = rng.integers(-127, 128, k).astype(np.int8)
        if extreme:
            table, x = np.sign(table) * np.int8(UNITS), np.sign(x) * np.int8(127)
            halves = np.full_like(halves, MOST)
        extra = [scales.astype(np.float32)] if group else []
        same_halves(dot, [planes, table, halves, x, *extra], acc)
        for digit in range(0 if group else step.digits):
            lookup = instruction.lookup(step, 0, digit)
            same_halves(lookup, [planes, table, halves], np.zeros((8, k), np.uint8))


@pytest.mark.few(4)
@pytest.mark.parametrize("kernel", CELL_KERNELS, ids=lambda k: k.name)
def test_every_width(kernel: LinearKernel) -> None:
    n, k = ((17, 97), (9, 160), (24, 64))[kernel.width % 3]
    several = kernel in STRIDED_KERNELS.values()
    k = 1184 if several else k  # spans, stretches and half a one
    for acts in ("A8g32",) if several else ("A8", "A8g32", "A5g64"):
        tensor = cells_tensor(n, k, f"anyprec1-8{acts}", kernel.width)
        check(
            kernel, tensor, tuple(m for m in ((18,) if several else (1, 5)) if m >= kernel.m_tile)
        )


def check(kernel: LinearKernel, tensor: QuantizedTensor, rows: tuple[int, ...]) -> None:
    (n, k), profile = tensor.codes.shape, profile_for(kernel)
    spec = LinearSpec(n, k, tensor.scheme, False, "", False, details(tensor))
    run = compiled(kernel, spec, profile)
    layout = kernel.layout(spec, profile)
    packed = [aligned(array) for array in layout.pack(tensor).arrays.values()]
    weight, rng = exact_weights(tensor, kernel.width), np.random.default_rng(n + k)
    for m in rows:
        x = rng.normal(size=(m, k)).astype(np.float32)
        if tensor.scheme.group_size > 0:
            xq, xs, xsum = prepared(kernel, spec, profile, x)
            codes, scales = in_order(kernel, spec, xq, xs)
            meant = codes.astype(np.float64) * np.repeat(scales, QUAD, 1)
        else:
            xq, xs, xsum = quantized(x, layout.padded_k(k))
            meant = xq.astype(np.float64) * xs
        want = meant[:, :k] @ weight.T
        y = np.full((m, n), np.nan, np.float32)
        run(aligned(xq), aligned(xs), aligned(xsum), *packed, y)
        bound = RELATIVE_ERROR * (np.abs(want).max() + 1)
        np.testing.assert_allclose(y, want, rtol=0, atol=bound)


def test_reasons_to_decline() -> None:
    """Two bytes a weight fill int32 sooner, and have no table of 128 or 256."""
    host, scheme = find_profile("znver4"), parse_scheme("anyprec3-8A8")
    for kind in ("gemv", "gemm"):
        kernel = kernel_of(kind, 8, "vpermb", CELL_KERNELS)
        with pytest.raises(NotApplicable, match="int32"):
            kernel.check(LinearSpec(8, 4096, scheme, details=(("channels", 1),)), host)
    for kernel in APART_KERNELS.values():
        with pytest.raises(NotApplicable, match="divided"):
            kernel.check(LinearSpec(8, 512, scheme, details=(("channels", 1),)), host)
