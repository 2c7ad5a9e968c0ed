"""Any-precision whose cells of 5 bits are divided, on Arm under qemu: 6 to 8 bits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from arm_tools import emulated, needs_qemu, scheduled
from test_anyprec import RELATIVE_ERROR, kernel_of, quantized
from test_anyprec_cells import cells_tensor, exact_weights

from apq_tvm.errors import NotApplicable
from apq_tvm.formats import details, parse_scheme
from apq_tvm.formats.anyprec_cells import HALVES, MOST
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.schedules.arm.anyprec import ANYPREC_KERNELS
from apq_tvm.schedules.devices import find_profile, linear_kernels
from apq_tvm.schedules.linear.kernel import LinearKernel

TARGETS = {"sdot_sve": "graviton3", "sdot": "graviton2", "smull": "cortex-a53"}

CASES = (
    *(("gemv", bits, "sdot", acts) for bits in (6, 7, 8) for acts in ("", "A8g32")),
    ("gemv", 6, "sdot_sve", "A8g16"),
    ("gemv", 8, "sdot_sve", "A8g64"),
    ("gemv", 7, "smull", ""),
    ("gemv", 8, "smull", "A8g32"),
    ("gemm", 6, "sdot", "A8g32"),
    ("gemm", 8, "sdot", ""),
    ("gemm", 7, "smull", "A8g32"),
)


def record(kind: str, bits: int, instruction: str) -> LinearKernel:
    wanted = tuple(
        kernel
        for kernel in ANYPREC_KERNELS
        if kind == "gemm" or bits == 6 or "_cells" in kernel.name
    )
    found = (instruction, f"{instruction}_cells")
    return next(
        k for k in wanted if (k.kind, k.width) == (kind, bits) and k.instruction.name in found
    )


@needs_qemu
@pytest.mark.parametrize(("kind", "bits", "instruction", "acts"), CASES)
def test_digits(kind: str, bits: int, instruction: str, acts: str, tmp_path: Path) -> None:
    """Ragged N, K of half units; the largest steps; x of ±127 in the first row."""
    n, k = ((9, 97), (17, 160), (8, 64))[bits % 3]
    kernel, profile = record(kind, bits, instruction), find_profile(TARGETS[instruction])
    tensor = cells_tensor(n, k, f"anyprec{bits}-8{acts}", bits)
    tensor.tables[HALVES][:4] = MOST
    spec = LinearSpec(n, k, tensor.scheme, False, "", False, details(tensor))
    layout = kernel.layout(spec, profile)
    packed = layout.pack(tensor).arrays.values()
    program = emulated(scheduled(kernel, spec, profile), profile, tmp_path)
    weight, rng = exact_weights(tensor, bits), np.random.default_rng(n + k)
    m = kernel.m_tile + 1
    x = rng.normal(size=(m, k)).astype(np.float32)
    x[0] = np.sign(x[0])
    group = tensor.scheme.act_group
    width = layout.padded_k(k)
    if group == -1:
        xq, xs, xsum = quantized(x, width)
        meant = xq.astype(np.float64) * xs
    else:
        width = -(-width // group) * group
        parts = np.zeros((m, width), np.float32)
        parts[:, :k] = x
        scale = np.abs(parts.reshape(m, -1, group)).max(2) / np.float32(127)
        xs = np.repeat(scale, group // 4, 1).astype(np.float32)
        each = np.repeat(np.where(scale > 0, scale, 1), group, 1)
        xq = np.rint(parts / each).astype(np.int8)
        meant = xq.astype(np.float64) * np.repeat(xs, 4, 1)
        xsum = meant.sum(1, keepdims=True).astype(np.float32)
    want = meant[:, :k] @ weight.T
    y = np.full((m, n), np.nan, np.float32)
    program(xq, xs, xsum, *packed, y)
    np.testing.assert_allclose(y, want, rtol=0, atol=3 * RELATIVE_ERROR * (np.abs(want).max() + 1))


def test_every_width_has_a_kernel_on_every_core() -> None:
    scheme = parse_scheme("anyprec2-8")
    assert scheme is not None
    spec = LinearSpec(64, 64, scheme, details=(("channels", 1),))
    for target in ("graviton2", "graviton4", "cortex-a53", "cortex-a55", "cortex-a76"):
        profile, widths = find_profile(target), set()
        for kernel in linear_kernels(profile):
            if (kernel.kind, kernel.family) == ("gemv", "anyprec"):
                try:
                    kernel.check(spec, profile)
                except NotApplicable:
                    continue
                widths.add(kernel.width)
        assert widths >= set(scheme.widths)


def test_kernels_of_tables_and_of_cells_keep_apart() -> None:
    profile = find_profile("graviton2")
    for text, good in (("anyprec2-8A8", "_cells"), ("anyprec2-8c1A8", "")):
        spec = LinearSpec(64, 64, parse_scheme(text), details=(("channels", 1),))
        for kernel in ANYPREC_KERNELS:
            if kernel.kind != "gemv" or kernel.width < 7 or kernel.instruction.name[:5] != "sdot":
                continue
            cells = "_cells" in kernel.name
            if cells != (good == "_cells") and (cells or kernel.width >= 7):
                with pytest.raises(NotApplicable):
                    kernel.check(spec, profile)
    assert kernel_of("gemv", 8, "sdot_cells", ANYPREC_KERNELS).name.endswith("_cells_r8m1")
