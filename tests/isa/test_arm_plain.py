"""Kernels without intrinsics under qemu: what every 64-bit Arm core runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from arm_tools import ArmCase, needs_qemu

from apq_tvm.formats import parse_scheme
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.schedules.devices import find_profile
from apq_tvm.schedules.linear.plain import PLAIN_KERNELS

TARGETS = ("graviton2", "cortex-a53")


@needs_qemu
@pytest.mark.parametrize("scheme", ("W4A8g32", "float"))
@pytest.mark.parametrize("target", TARGETS)
def test_plain_kernel(scheme: str, target: str, tmp_path: Path) -> None:
    kernel = PLAIN_KERNELS[scheme == "float"]
    parsed = None if scheme == "float" else parse_scheme(scheme)
    spec = LinearSpec(13, 96, parsed, bias=True, activation="gelu", residual=True)
    case = ArmCase(spec, kernel.layout(spec, find_profile(target)))
    case.check_under_qemu(kernel, target, (1, 3), tmp_path)
