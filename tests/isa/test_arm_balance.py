"""``W2*`` on Arm: results under qemu, with and without dot products, and assembly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from arm_tools import Emulated, emulated, needs_qemu
from balance_cases import Layer

from apq_tvm.formats.balance import balance_scheme
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.schedules.arm.balance import ARM_BALANCE_KERNELS
from apq_tvm.schedules.devices import find_profile, linear_kernels
from apq_tvm.schedules.linear.kernel import LinearKernel
from apq_tvm.select import choose
from apq_tvm.types import DeviceProfile

CASES = (
    ("sdot", 1, 48, 100, 32, "graviton2", (1, 3)),
    ("sdot", 4, 37, 130, -1, "graviton3", (4, 5)),
    ("smlal", 1, 13, 96, 64, "cortex-a53", (1,)),
    ("smlal", 2, 12, 300, 128, "cortex-a72", (3,)),
)


def kernel_of(instruction: str, m_tile: int) -> LinearKernel:
    wanted = (instruction, m_tile)
    (found,) = (k for k in ARM_BALANCE_KERNELS if (k.instruction.name, k.m_tile) == wanted)
    return found


@pytest.mark.few(2)
@needs_qemu
@pytest.mark.parametrize(("instruction", "m_tile", "n", "k", "group", "target", "rows"), CASES)
def test_kernels(
    instruction: str,
    m_tile: int,
    n: int,
    k: int,
    group: int,
    target: str,
    rows: tuple[int, ...],
    tmp_path: Path,
) -> None:
    """Groups, tails of N and K, tiles that overlap, epilogues, and the largest sums."""

    def compiled(func: Any, profile: DeviceProfile) -> Emulated:
        cpu = target if target in ("cortex-a53", "cortex-a72") else "max"
        return emulated(func, profile, tmp_path, cpu)

    odd = bool(m_tile & 1)
    scheme = balance_scheme(8, group, per_token=odd)
    spec = LinearSpec(n, k, scheme, odd, "relu" if odd else "", not odd)
    layer = Layer(kernel_of(instruction, m_tile), spec, find_profile(target), None, compiled)
    for m in rows:
        layer.check(m)
    layer.check(rows[0], extreme=True)


def test_every_core_gets_its_own_kernel() -> None:
    spec = LinearSpec(36, 64, balance_scheme())
    for target, instruction in (("graviton4", "sdot"), ("cortex-a53", "smlal")):
        profile = find_profile(target)
        plan = choose(spec, linear_kernels(profile), profile, "layer")
        few = [kernel_of(instruction, m).name for m in (1, 2, 4)]
        many = ["gemm_W2starA8_smmla_r4m8"] if target == "graviton4" else []
        assert [c.kernel for c in plan] == few + many
