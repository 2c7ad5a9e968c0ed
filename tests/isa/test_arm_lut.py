"""Binary codes by ``tbl`` on Arm: results under qemu, layout, decisions, assembly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from arm_tools import Emulated, emulated, needs_qemu
from lut_cases import Case, tables, weights

from apq_tvm.codegen.layouts import default_layout
from apq_tvm.codegen.layouts.bcq import BcqLayout
from apq_tvm.formats import bcq
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.schedules.arm.lut import ARM_LUT_KERNELS
from apq_tvm.schedules.devices import find_profile
from apq_tvm.schedules.linear.kernel import LinearKernel
from apq_tvm.types import DeviceProfile


def kernel_of(bits: int, m_tile: int) -> LinearKernel:
    (found,) = (k for k in ARM_LUT_KERNELS if (k.bits, k.m_tile) == (bits, m_tile))
    return found


CASES = (
    # bits, rows of x per tile, N, K, group, target, M
    (3, 1, 64, 256, 128, "graviton2", (1, 3)),
    (1, 4, 100, 100, 32, "cortex-a53", (4, 5)),
    (2, 2, 33, 300, -1, "graviton3", (3,)),
    (8, 1, 17, 31, 64, "cortex-a72", (2,)),
)


@pytest.mark.few(2)
@needs_qemu
@pytest.mark.parametrize(("bits", "m_tile", "n", "k", "group", "target", "rows"), CASES)
def test_kernels(
    bits: int, m_tile: int, n: int, k: int, group: int, target: str, rows: Any, tmp_path: Path
) -> None:
    """Tails of N and K, one and several streams, epilogues; tables by the target's own rule."""

    def compiled(func: Any, profile: DeviceProfile) -> Emulated:
        cpu = target if target.startswith("cortex") else "max"
        return emulated(func, profile, tmp_path, cpu)

    odd = bool(bits % 2)
    spec = LinearSpec(n, k, bcq.scheme_of(bits, group), odd, "relu" if odd else "", not odd)
    profile = find_profile(target)
    case = Case(kernel_of(bits, m_tile), spec, None, bits, profile, compiled)
    for m in rows:
        case.check(m)
    x = np.random.default_rng(k).normal(size=(2, k)).astype(np.float32)
    x[1] *= 1e-30
    table, scales, sums = case.tabulate(x)
    want_table, want_scales, want_sums = tables(x, case.layout.padded_k(k), case.span)
    used = np.repeat(want_scales > 2.0**-100 / 127, case.span * 4, axis=1)
    np.testing.assert_allclose(scales[0], want_scales[0], rtol=1e-6)
    np.testing.assert_allclose(sums, want_sums, rtol=1e-5, atol=1e-5 * np.abs(x).max())
    off = np.abs(table.astype(np.int64) - want_table)
    assert off[used].max() <= 1 and (off[used] > 0).mean() < 0.01
    assert (table[~used] == 128).all() and table.min() >= 1


def test_meaning_on_this_machine() -> None:
    """The plain loops of the layout that ``tbl`` reads, without Arm: the generic kernel's."""
    tensor = weights(40, 70, bcq.scheme_of(3, 32))
    layout = default_layout(tensor.scheme, (), 4)
    assert layout == BcqLayout(3, 16, 32, narrow=True) and layout.name == "bcq3b16"
    packed = layout.pack(tensor)
    assert BcqLayout.parse("bcq3b16", tensor.scheme) == layout
    np.testing.assert_array_equal(layout.unpack(packed, 40, 70, tensor.scheme).codes, tensor.codes)


def test_tiles_fit_the_registers() -> None:
    tiles = {k.bits: k.m_tile for k in reversed(ARM_LUT_KERNELS)}  # the largest of each
    assert tiles == {1: 4, 2: 2, **dict.fromkeys(range(3, 9), 1)}
    spec = LinearSpec(256, 256, bcq.scheme_of(2, 128))
    kernel_of(2, 2).check(spec, find_profile("graviton2"))
