"""Bit-serial kernels on Arm: exact sums under qemu, packing of planes, where they are chosen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from arm_tools import emulated, needs_qemu, scheduled
from bitserial_cases import codes_reference, unpacked
from linear_cases import RELATIVE_ERROR, dequantized, quantized_weight

from apq_tvm.errors import NotApplicable
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.schedules.arm.bitserial import ARM_BITSERIAL_KERNELS
from apq_tvm.schedules.decide import Defaults
from apq_tvm.schedules.devices import find_profile, linear_kernels
from apq_tvm.schedules.graph.rules import schedule_preparation
from apq_tvm.schedules.linear.bitserial import bitserial_kernel
from apq_tvm.schedules.linear.streams import FOLLOWED_AHEADS
from apq_tvm.schedules.linear.thresholds import rows_of
from apq_tvm.select import choose
from apq_tvm.tensorize.arm.bitserial import UADDLP, UDOT
from apq_tvm.types import Scheme

CASES = (
    # instruction, (q, p), rows of x per tile, N, K, group, zero points, target
    (UDOT, (1, 1), 1, 9, 161, 32, True, "graviton2"),
    (UDOT, (1, 2), 4, 8, 127, -1, False, "graviton3"),
    (UDOT, (3, 3), 2, 7, 256, 128, True, "graviton2"),
    (UDOT, (2, 4), 1, 12, 128, 64, False, "cortex-a55"),
    (UADDLP, (1, 4), 2, 8, 256, -1, False, "cortex-a53"),
    (UADDLP, (5, 2), 1, 4, 96, 32, True, "cortex-a72"),
)


@pytest.mark.few(3)
@needs_qemu
@pytest.mark.parametrize(("isa", "bits", "m_tile", "n", "k", "group", "zeros", "target"), CASES)
def test_kernels(
    isa: Any,
    bits: tuple[int, int],
    m_tile: int,
    n: int,
    k: int,
    group: int,
    zeros: bool,
    target: str,
    tmp_path: Path,
) -> None:
    """Planes, scales and sums of the target's own rule, then products; tails of N and K."""
    (q, p), profile, m = bits, find_profile(target), 5
    scheme = Scheme(q, zeros, p, group > 0 and m_tile == 1, group)
    spec = LinearSpec(n, k, scheme)
    kernel = bitserial_kernel(isa, q, m_tile, FOLLOWED_AHEADS)
    preparation = kernel.prepare(kernel.choose(spec, profile, Defaults()))
    assert preparation is not None
    func, rule = schedule_preparation(preparation, preparation.func, profile, Defaults())
    assert rule == "aarch64_quantize_planes"
    cpu = target if target in ("cortex-a53", "cortex-a72") else "max"
    prepare = emulated(func, profile, tmp_path, cpu)
    run = emulated(scheduled(kernel, spec, profile), profile, tmp_path, cpu)

    rng, layout = np.random.default_rng(q * p), kernel.layout(spec, profile)
    weight = quantized_weight(n, k, scheme, rng)
    x = np.zeros((m, layout.padded_k(k)), np.float32)
    x[:, :k] = rng.standard_normal((m, k))
    width = layout.padded_k(k) if scheme.act_group == -1 else layout.group_width(k)
    codes, scales = codes_reference(x, p, k, width)
    outs = [
        np.full((m, *map(int, out.shape[1:])), 99, str(out.dtype))
        for out in list(preparation.func.params)[1:]
    ]
    prepare(x[:, :k].copy(), *outs)
    got = unpacked(outs[0])
    if p == 1:
        got[:, :k] = 2 * got[:, :k] - 1
    np.testing.assert_array_equal(got, codes)
    np.testing.assert_allclose(outs[1], scales, rtol=1e-6)
    values = (codes.reshape(m, -1, width) * scales[..., None]).reshape(m, -1)[:, :k]
    want = values @ dequantized(weight).T
    y = np.full((m, n), np.nan, np.float32)
    run(*outs, *layout.pack(weight).arrays.values(), y)
    np.testing.assert_allclose(y, want, rtol=0, atol=RELATIVE_ERROR * (np.abs(want).max() + 1))


@pytest.mark.parametrize(
    ("text", "chosen"),
    (((1, 1), (1, 2, 4)), ((1, 4), (1, 2)), ((2, 4), (1, 2)), ((4, 4), ()), ((1, 8), ())),
)
def test_chosen_where_fewer_operations(text: tuple[int, int], chosen: tuple[int, ...]) -> None:
    (q, p), profile = text, find_profile("graviton2")
    spec = LinearSpec(64, 256, Scheme(q, False, p))
    names = [c.kernel for c in choose(spec, linear_kernels(profile), profile, "layer")]
    kernels = {k.name: k for k in ARM_BITSERIAL_KERNELS}
    mine = [kernels[name] for name in names if name in kernels]
    assert [(k.bits, k.instruction.name, k.m_tile) for k in mine] == [
        (q, UDOT.name, m) for m in chosen
    ]
    if not chosen:
        kernel = next(k for k in ARM_BITSERIAL_KERNELS if k.bits == q)
        with pytest.raises(NotApplicable, match="integer dot is faster"):
            rows_of(kernel, spec, profile)
