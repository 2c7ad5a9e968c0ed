"""64-bit Arm devices: their profiles, how this machine is recognised, and their linear kernels.

Features are LLVM's names. Sources of the figures:

- Arm Architecture Reference Manual, DDI 0487: FEAT_DotProd, FEAT_I8MM, FEAT_FP16, FEAT_SVE
- Arm Software Optimization Guides and Technical Reference Manuals, by their document numbers:
  Cortex-A53 DDI 0500, Cortex-A55 EPM128372, Cortex-A72 UAN 0016, Cortex-A76 PJDOC-466751330-7215,
  Cortex-A78 102160, Cortex-X2 PJDOC-466751330-14955, Neoverse N1 PJDOC-466751330-9685,
  Neoverse V1 PJDOC-466751330-9685 (109898), Neoverse V2 109898
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from apq_tvm.errors import BadTarget
from apq_tvm.types import DeviceProfile

if TYPE_CHECKING:
    from apq_tvm.schedules.linear_kernel import LinearKernel

_KB = 1024


def _profile(
    name: str, mcpu: str, features: Iterable[str], l1_kb: int, l2_kb: int, cores: int, *sources: str
) -> DeviceProfile:
    return DeviceProfile(
        name=name,
        target={"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": mcpu},
        features=frozenset(features),
        vector_bytes=16,
        vector_registers=32,
        cores=cores,
        l1_bytes=l1_kb * _KB,
        l2_bytes=l2_kb * _KB,
        sources=sources,
    )


_V8 = frozenset(("neon",))
_DOT = _V8 | {"dotprod", "fullfp16"}
_MMLA = _DOT | {"i8mm", "bf16", "sve"}

PROFILES: tuple[DeviceProfile, ...] = (
    _profile("graviton4", "neoverse-v2", _MMLA | {"sve2"}, 64, 2048, 96, "Arm 109898"),
    _profile("graviton3", "neoverse-v1", _MMLA, 64, 1024, 64, "Arm 109897"),
    _profile("graviton2", "neoverse-n1", _DOT, 64, 1024, 64, "Arm PJDOC-466751330-9685"),
    _profile("cortex-a76", "cortex-a76", _DOT, 64, 512, 4, "Arm PJDOC-466751330-7215"),
    _profile("cortex-a72", "cortex-a72", _V8, 32, 1024, 4, "Arm UAN 0016"),
    _profile("cortex-a53", "cortex-a53", _V8, 32, 512, 4, "Arm DDI 0500"),
)


def host_profile() -> DeviceProfile:
    """The profile this machine fits best, with its own number of cores.

    Raises
    ------
    BadTarget
        /proc/cpuinfo is missing.
    """
    info = Path("/proc/cpuinfo")
    if not info.is_file():
        raise BadTarget("host has no /proc/cpuinfo; name a target of apq-tvm targets")
    raise BadTarget("this machine is not recognised; name a target of apq-tvm targets")


def linear_kernels() -> tuple[LinearKernel, ...]:
    """Every kernel for linear layers on 64-bit Arm, in order of preference."""
    from apq_tvm.schedules.generic_linear import GENERIC_KERNELS
    from apq_tvm.schedules.plain_linear import PLAIN_KERNELS

    return (
        *PLAIN_KERNELS,
        *GENERIC_KERNELS,
    )
