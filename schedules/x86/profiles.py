"""x86-64 devices: their profiles, how this machine is recognised, and their linear kernels.

Features are LLVM's names. Sources of the figures:

- psABI: System V ABI, AMD64 supplement, section 3.1.1 (levels x86-64-v2, v3 and v4)
- AMD Software Optimization Guides: 56305 (family 17h models 30h+, Zen 2), 56665 (family 19h,
  Zen 3), 57647 (family 19h model 11h, Zen 4), 58455 (family 1Ah, Zen 5)
- Intel 64 and IA-32 Architectures Optimization Reference Manual, 248966-050: chapter 2, the cache
  tables of Haswell, Skylake client and server, Ice Lake, Golden Cove
- Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, chapters 14 and 15:
  feature flags
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from apq_tvm.errors import BadTarget
from apq_tvm.types import DeviceProfile

if TYPE_CHECKING:
    from apq_tvm.schedules.linear.kernel import LinearKernel
    from apq_tvm.tensorize.meaning.four_dot import FourDot

_KB = 1024
_PSABI = "https://gitlab.com/x86-psABIs/x86-64-ABI, section 3.1.1"
_AMD = "https://docs.amd.com, Software Optimization Guide {}"
_INTEL = "https://www.intel.com/sdm, Optimization Reference Manual 248966-050, chapter 2"

_MEASURED = "znver5"
"""What kernels were tried on, those for AVX2 too: all others borrow its figures."""

_AVX2 = frozenset(("sse4.1", "ssse3", "popcnt", "avx", "avx2", "bmi", "bmi2", "f16c", "fma"))
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_CASCADE = _AVX512 | {"avx512vnni"}
_ICE = _CASCADE | {"avx512vbmi", "avx512vbmi2", "avx512bitalg", "avx512vpopcntdq", "vaes"}

_AMX = ("amx-tile", "amx-int8")
"""In /proc/cpuinfo they have an underscore; a process has to ask for them (`tiles_given`)."""


def _profile(
    mcpu: str,
    features: Iterable[str],
    l1_kb: int,
    l2_kb: int,
    cores: int,
    *sources: str,
) -> DeviceProfile:
    names = frozenset(features)
    wide = "avx512vl" in names
    return DeviceProfile(
        name=mcpu,
        target={"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": mcpu},
        features=names,
        vector_bytes=64 if wide else 32 if "avx2" in names else 16,
        vector_registers=32 if wide else 16,
        cores=cores,
        l1_bytes=l1_kb * _KB,
        l2_bytes=l2_kb * _KB,
        sources=sources,
        measured_as=() if mcpu == _MEASURED else (_MEASURED,),
    )


PROFILES: tuple[DeviceProfile, ...] = (
    # Cores: of the largest part on one die of the series the guide describes.
    _profile("znver5", _ICE | {"avx512bf16", "avxvnni"}, 48, 1024, 8, _AMD.format(58455)),
    _profile("znver4", _ICE | {"avx512bf16"}, 32, 1024, 8, _AMD.format(57647)),
    _profile("znver3", _AVX2 | {"vaes"}, 32, 512, 8, _AMD.format(56665)),
    _profile("znver2", _AVX2 | {"clwb"}, 32, 512, 8, _AMD.format(56305)),
    _profile(
        "sapphirerapids",
        _ICE | {"avx512bf16", "avx512fp16", "avxvnni", *_AMX},
        48,
        2048,
        60,
        _INTEL,
    ),
    _profile("icelake-server", _ICE, 48, 1280, 40, _INTEL),
    _profile("icelake-client", _ICE, 48, 512, 4, _INTEL),
    _profile("cascadelake", _CASCADE, 32, 1024, 28, _INTEL),
    _profile("skylake-avx512", _AVX512, 32, 1024, 28, _INTEL),
    _profile("alderlake", _AVX2 | {"avxvnni", "vaes"}, 32, 1280, 8, _INTEL),
    _profile("skylake", _AVX2 | {"clflushopt"}, 32, 256, 4, _INTEL),
    _profile("haswell", _AVX2, 32, 256, 4, _INTEL),
    _profile("x86-64-v4", _AVX512, 32, 1024, 4, _PSABI, _INTEL),
    _profile("x86-64-v3", _AVX2, 32, 256, 4, _PSABI, _INTEL),
    _profile("x86-64-v2", ("sse4.1", "ssse3", "popcnt"), 32, 256, 4, _PSABI, _INTEL),
    _profile("x86-64", (), 32, 256, 4, _PSABI, _INTEL),
)
"""Within a maker and among the levels, newest first: the first that a machine satisfies is its."""

_MAKERS = {
    "AuthenticAMD": ("znver5", "znver4", "znver3", "znver2"),
    "GenuineIntel": (
        "sapphirerapids",
        "icelake-server",
        "cascadelake",
        "skylake-avx512",
        "alderlake",
        "skylake",
        "haswell",
    ),
}
_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA = 158, 0x1023, 18
"""The system call of x86-64 and its arguments: linux/arch/x86/include/uapi/asm/prctl.h."""
_LEVELS = ("x86-64-v4", "x86-64-v3", "x86-64-v2", "x86-64")
_CPUINFO_NAMES = {
    "sse41": "sse4.1",
    "bmi1": "bmi",
    "abm": "lzcnt",
    "amxtile": "amx-tile",
    "amxint8": "amx-int8",
}


def host_profile() -> DeviceProfile:
    """The profile this machine fits best, with its own number of cores.

    Raises
    ------
    BadTarget
        It has none of the x86-64 levels, or /proc/cpuinfo is missing.
    """
    info = Path("/proc/cpuinfo")
    if not info.is_file():
        raise BadTarget("host has no /proc/cpuinfo; name a target of apq-tvm targets")
    text = info.read_text()
    return recognise(text if tiles_given() else text.replace(" amx_", " no_amx_"))


@cache
def tiles_given() -> bool:
    """Whether this process may use AMX's tiles; asks Linux for them, once (5.16 and later).

    Source: Linux, Documentation/arch/x86/xstate.rst. Where a machine has none, or a sandbox filters
    the call, kernels for it would end the process by SIGILL.
    """
    if os.uname().machine != "x86_64":
        return False
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    return bool(syscall(_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA) == 0)


def recognise(cpuinfo: str) -> DeviceProfile:
    """The newest profile whose features a machine has.

    Parameters
    ----------
    cpuinfo : str
        Text of Linux's /proc/cpuinfo. A virtual machine may hide features of its processor.

    Returns
    -------
    DeviceProfile
        With the machine's physical cores.
    """
    fields = [line.partition(":") for line in cpuinfo.splitlines()]
    values: dict[str, list[str]] = {}
    for key, _, value in fields:
        values.setdefault(key.strip(), []).append(value.strip())
    flags = {_llvm_name(flag) for flag in values.get("flags", [""])[0].split()}
    maker = values.get("vendor_id", [""])[0]
    profiles = {profile.name: profile for profile in PROFILES}
    for name in (*_MAKERS.get(maker, ()), *_LEVELS):
        profile = profiles[name]
        if profile.features <= flags:
            return replace(profile, cores=_physical_cores(values))
    raise BadTarget("this machine has none of the x86-64 levels")


def _llvm_name(flag: str) -> str:
    """Linux writes avx512_vnni and avx_vnni, LLVM avx512vnni and avxvnni."""
    plain = flag.replace("_", "")
    return _CPUINFO_NAMES.get(plain, plain)


def _physical_cores(values: dict[str, list[str]]) -> int:
    """Distinct (socket, core) pairs, or processors where the kernel does not tell."""
    pairs = set(zip(values.get("physical id", []), values.get("core id", []), strict=False))
    return len(pairs) or len(values.get("processor", [])) or 1


def rules() -> Mapping[str, Callable[..., Any]]:
    """Schedules of PrimFuncs that only these devices have: none."""
    return {}


def four_dots(features: Iterable[str]) -> tuple[FourDot, ...]:
    """What multiplies int8 keys on a device with these features, the best first."""
    from apq_tvm.tensorize.x86.four_dot import MADDUBS, VPDPBUSD256, VPDPBUSD512

    found = frozenset(features)
    if "avx512vnni" in found:
        return (VPDPBUSD512,)
    if "avxvnni" in found:
        return (VPDPBUSD256,)
    return (MADDUBS,) if "avx2" in found else ()


def linear_kernels() -> tuple[LinearKernel, ...]:
    """Every kernel for linear layers on x86, in order of preference."""
    from apq_tvm.schedules.linear.plain import PLAIN_KERNELS
    from apq_tvm.schedules.x86.amx import AMX_KERNELS
    from apq_tvm.schedules.x86.anyprec import ANYPREC_KERNELS
    from apq_tvm.schedules.x86.balance import BALANCE_KERNELS
    from apq_tvm.schedules.x86.bitserial import BITSERIAL_KERNELS
    from apq_tvm.schedules.x86.codebook import CODEBOOK_KERNELS
    from apq_tvm.schedules.x86.decoded import DECODED_KERNELS, GENERIC_KERNELS
    from apq_tvm.schedules.x86.gemm import GEMM_KERNELS
    from apq_tvm.schedules.x86.gemv import GEMV_KERNELS
    from apq_tvm.schedules.x86.lut import LUT_KERNELS
    from apq_tvm.schedules.x86.mixed import MIXED_KERNELS
    from apq_tvm.schedules.x86.pairs import PAIR_KERNELS
    from apq_tvm.schedules.x86.stepped import STEPPED_KERNELS
    from apq_tvm.schedules.x86.super_records import SUPER_KERNELS

    return (
        *BITSERIAL_KERNELS,
        *AMX_KERNELS,
        *PAIR_KERNELS,
        *GEMM_KERNELS,
        *GEMV_KERNELS,
        *ANYPREC_KERNELS,
        *BALANCE_KERNELS,
        *LUT_KERNELS,
        *MIXED_KERNELS,
        *CODEBOOK_KERNELS,
        *SUPER_KERNELS,
        *STEPPED_KERNELS,
        *PLAIN_KERNELS,
        *DECODED_KERNELS,
        *GENERIC_KERNELS,
    )
