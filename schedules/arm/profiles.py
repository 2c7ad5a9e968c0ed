"""64-bit Arm devices: their profiles, how this machine is recognised, and their linear kernels.

Features are LLVM's names; LLVM is told to do without what a machine of a kind may lack: the
cryptography extensions are optional on Cortex cores, and Android kernels may leave SVE off.
Sources of the figures:

- caches, cores: the Technical Reference Manual that is named first of each core, at the sizes of
  common boards; for Graviton https://github.com/aws/aws-graviton-getting-started
- multiply-adds: the core's Software Optimization Guide, named second, "ASIMD dot product", "ASIMD
  matrix multiply-accumulate" and "ASIMD multiply, long": instructions per cycle times 16, 32 and 8.
  Cortex-X2 to X4 are counted as their Neoverse siblings V1 to V3, A520 as A510, A53 as LLVM's
  schedule model has it.
- vector pipes: of the same tables, those that ASIMD dot products are issued to (multiplies, where
  there are none), two of 8 bytes counted as one
- issue width: "Dispatch Width" of llvm-mca 22, by whose figures the schedules were chosen; A76 and
  A78 have the model of A57 there
- paired loads: LLVM's models; a pair of 16-byte loads costs more than two of them on Cortex-A55, 6
  cycles instead of 2, and on Neoverse V2, 3 slots of 6 instead of 2
- DDI 0487, Arm Architecture Reference Manual: FEAT_DotProd, FEAT_I8MM, FEAT_FP16, FEAT_FHM
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

from apq_tvm.errors import BadTarget
from apq_tvm.types import DeviceProfile

if TYPE_CHECKING:
    from apq_tvm.schedules.linear.kernel import LinearKernel
    from apq_tvm.tensorize.meaning.four_dot import FourDot

_KB = 1024
_DOCS = "https://developer.arm.com/documentation/"
_AWS = "https://github.com/aws/aws-graviton-getting-started"
_ARM_ARM = f"{_DOCS}ddi0487"

_V8 = frozenset(("neon",))
_DOT = _V8 | {"dotprod", "fullfp16"}
_MMLA = _DOT | {"i8mm", "bf16", "fp16fml"}

_MEASURED = ("graviton2",)
_MEASURED_SMMLA = ("graviton4", "graviton3", *_MEASURED)
"""Whose figures cores without and with smmla borrow: each was asked other questions."""

# Nothing of these is ever needed, and a machine may lack them.
_NO_CRYPTO = ("-aes", "-sha2", "-sha3", "-sm4")
_NO_SVE = ("-sve-bitperm", "-sve2", "-sve")


@dataclass(frozen=True)
class _Core:
    """What decides how fast a core multiplies; by default nobody knows."""

    macs: Mapping[str, int] = field(default_factory=dict)
    issue: int = 0
    pipes: int = 0


def _profile(
    name: str,
    mcpu: str,
    features: Iterable[str],
    core: _Core,
    l1_kb: int,
    l2_kb: int,
    cores: int,
    *sources: str,
    attributes: tuple[str, ...] = (),
    in_order: bool = False,
    paired_loads: bool = True,
    modelled_as: str = "",
) -> DeviceProfile:
    target = {"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": mcpu}
    names = frozenset(features)
    attributes += () if paired_loads else ("+slow-paired-128",)
    measured = _MEASURED_SMMLA if "i8mm" in names else _MEASURED
    without = () if "sve" in names or names <= _DOT else _NO_SVE
    return DeviceProfile(
        name=name,
        target={**target, "mattr": [*attributes, *_NO_CRYPTO, *without]},
        features=names,
        vector_bytes=16,
        vector_registers=32,
        cores=cores,
        l1_bytes=l1_kb * _KB,
        l2_bytes=l2_kb * _KB,
        sources=tuple(s if s.startswith("https:") else _DOCS + s for s in sources),
        in_order=in_order,
        issue_width=core.issue,
        vector_pipes=core.pipes,
        paired_loads=paired_loads,
        macs_per_cycle=dict(core.macs),
        measured_as=tuple(device for device in measured if device != name),
        modelled_as=modelled_as,
    )


def _core(issue: int, pipes: int, sdot: int = 0, smmla: int = 0, smull: int = 8) -> _Core:
    """Of int8 multiply-adds per cycle only those of instructions that the core has."""
    macs = {n: v for n, v in (("sdot", sdot), ("smmla", smmla), ("smull", smull)) if v}
    return _Core(macs, issue, pipes)


_UNKNOWN = _Core()
_V1, _V2, _V3 = (_core(issue, 4, 64, 128, 16) for issue in (8, 6, 10))
_N1, _N2 = _core(3, 2, 32), _core(5, 2, 32, 64, 16)
_A510 = _core(3, 2, 32, 64, 16)

GRAVITON4 = _profile(
    "graviton4", "neoverse-v2", _MMLA | {"sve", "sve2"}, _V2, 64, 2048, 96,
    "102375", "pjdoc466751330-593177", _AWS, paired_loads=False,
)  # fmt: skip
GRAVITON3 = _profile(
    "graviton3", "neoverse-v1", _MMLA | {"sve"}, _V1, 64, 1024, 64,
    "101427", "pjdoc466751330-9685", _AWS,
)  # fmt: skip
GRAVITON2 = _profile(
    "graviton2", "neoverse-n1", _DOT, _N1, 64, 1024, 64,
    "100616", "pjdoc466751330-9707", _AWS,
)  # fmt: skip
I8MM = _profile(
    "armv8.6-i8mm", "generic", _MMLA - {"bf16"}, _UNKNOWN, 32, 512, 4, _ARM_ARM,
    attributes=("+dotprod", "+fullfp16", "+fp16fml", "+i8mm"),
)  # fmt: skip
DOTPROD = _profile(
    "armv8.2-dotprod", "generic", _DOT, _UNKNOWN, 32, 512, 4, _ARM_ARM,
    attributes=("+dotprod", "+fullfp16"),
)  # fmt: skip
ARMV8 = _profile("armv8-a", "generic", _V8, _UNKNOWN, 32, 512, 4, _ARM_ARM)

PROFILES: tuple[DeviceProfile, ...] = (
    GRAVITON4,
    GRAVITON3,
    _profile(
        "neoverse-n2", "neoverse-n2", _MMLA | {"sve", "sve2"}, _N2, 64, 1024, 64,
        "102099", "pjdoc466751330-18256",
    ),
    GRAVITON2,
    _profile("cortex-x4", "cortex-x4", _MMLA, _V3, 64, 2048, 1, "102484", "pjdoc1505342170538636"),
    _profile(
        "cortex-x3", "cortex-x3", _MMLA, _V2, 64, 1024, 1, "101593", modelled_as="graviton4"
    ),
    _profile(
        "cortex-x2", "cortex-x2", _MMLA, _V2, 64, 1024, 1, "101803", "pjdoc466751330-14955",
        modelled_as="graviton4",
    ),
    _profile(
        "cortex-a710", "cortex-a710", _MMLA, _N2, 64, 512, 3, "101800", modelled_as="neoverse-n2"
    ),
    _profile("cortex-a78", "cortex-a78", _DOT, _N1, 64, 512, 4, "101430", "102160"),
    _profile(
        "cortex-a76", "cortex-a76", _DOT, _N1, 64, 512, 4, "100798", "pjdoc466751330-7215"
    ),
    _profile(
        "cortex-a520", "cortex-a520", _MMLA, _A510, 64, 512, 4, "102517", in_order=True
    ),
    _profile(
        "cortex-a510", "cortex-a510", _MMLA, _A510, 64, 512, 4,
        "101604", "pjdoc466751330-536816", in_order=True,
    ),
    _profile(
        "cortex-a55", "cortex-a55", _DOT, _core(2, 1, 16), 32, 256, 4, "100442", "epm128372",
        in_order=True, paired_loads=False,
    ),
    _profile("cortex-a72", "cortex-a72", _V8, _core(3, 1), 32, 1024, 4, "100095", "uan0016"),
    _profile("cortex-a53", "cortex-a53", _V8, _core(2, 1), 32, 512, 4, "ddi0500", in_order=True),
    I8MM,
    DOTPROD,
    ARMV8,
)  # fmt: skip
"""Fastest first, those without a core of their own last."""

AUTO = replace(ARMV8, name="arm-auto", variants=(I8MM, DOTPROD, ARMV8))
"""A library that carries code for several levels and chooses when it is loaded."""

# (implementer, part) of MIDR_EL1, as Linux names them in arch/arm64/include/asm/cputype.h.
_PARTS = {
    (0x41, 0xD03): "cortex-a53",
    (0x41, 0xD04): "cortex-a53",  # A35
    (0x41, 0xD05): "cortex-a55",
    (0x41, 0xD07): "cortex-a72",  # A57
    (0x41, 0xD08): "cortex-a72",
    (0x41, 0xD09): "cortex-a72",  # A73
    (0x41, 0xD0A): "cortex-a76",  # A75
    (0x41, 0xD0B): "cortex-a76",
    (0x41, 0xD0C): "graviton2",
    (0x41, 0xD0D): "cortex-a76",  # A77
    (0x41, 0xD0E): "cortex-a76",  # A76AE
    (0x41, 0xD40): "graviton3",
    (0x41, 0xD41): "cortex-a78",
    (0x41, 0xD42): "cortex-a78",  # A78AE
    (0x41, 0xD44): "cortex-a78",  # X1
    (0x41, 0xD46): "cortex-a510",
    (0x41, 0xD47): "cortex-a710",
    (0x41, 0xD48): "cortex-x2",
    (0x41, 0xD49): "neoverse-n2",
    (0x41, 0xD4B): "cortex-a78",  # A78C
    (0x41, 0xD4C): "cortex-a78",  # X1C
    (0x41, 0xD4D): "cortex-a710",  # A715
    (0x41, 0xD4E): "cortex-x3",
    (0x41, 0xD4F): "graviton4",
    (0x41, 0xD80): "cortex-a520",
    (0x41, 0xD81): "cortex-a710",  # A720
    (0x41, 0xD82): "cortex-x4",
    (0x41, 0xD84): "graviton4",  # Neoverse V3
    (0x41, 0xD85): "cortex-x4",  # X925
    (0x41, 0xD87): "cortex-a710",  # A725
}

# As /proc/cpuinfo spells features that profiles name (Linux arch/arm64/kernel/cpuinfo.c).
_CPUINFO_NAMES = {
    "asimd": "neon",
    "asimddp": "dotprod",
    "asimdhp": "fullfp16",
    "asimdfhm": "fp16fml",
    "i8mm": "i8mm",
    "bf16": "bf16",
    "sve": "sve",
    "sve2": "sve2",
}


def host_profile() -> DeviceProfile:
    """The profile this machine fits best, with its own number of cores.

    Raises
    ------
    BadTarget
        /proc/cpuinfo is missing, or it names no processor.
    """
    info = Path("/proc/cpuinfo")
    if not info.is_file():
        raise BadTarget("host has no /proc/cpuinfo; name a target of apq-tvm targets")
    return recognise(info.read_text())


def recognise(cpuinfo: str) -> DeviceProfile:
    """The fastest profile that every core of a machine can run.

    Parameters
    ----------
    cpuinfo : str
        Text of Linux's /proc/cpuinfo, one block per core. Cores of several kinds (big.LITTLE) run
        one program, so what any of them lacks counts as missing. A core that is in no table gets
        the architecture level that its features allow.

    Returns
    -------
    DeviceProfile
        With the machine's cores.

    Raises
    ------
    BadTarget
        The text names no processor, or one without Advanced SIMD.
    """
    values: dict[str, list[str]] = {}
    for key, _, value in (line.partition(":") for line in cpuinfo.splitlines()):
        values.setdefault(key.strip(), []).append(value.strip())
    lists = [frozenset(map(_CPUINFO_NAMES.get, f.split())) for f in values.get("Features", [])]
    if not lists:
        raise BadTarget("/proc/cpuinfo lists no features; name a target of apq-tvm targets")
    features = reduce(frozenset.intersection, lists)
    numbers = zip(values.get("CPU implementer", []), values.get("CPU part", []), strict=False)
    parts = {(int(maker, 0), int(part, 0)) for maker, part in numbers}
    named = {_PARTS.get(part, "") for part in parts}
    generic = {profile.name for profile in (I8MM, DOTPROD, ARMV8)}
    for profile in PROFILES:
        known = profile.name in named or profile.name in generic
        if known and profile.features <= features:
            return replace(profile, cores=len(lists))
    raise BadTarget("this processor has no Advanced SIMD (asimd), which every profile needs")


def rules() -> Mapping[str, Callable[..., Any]]:
    """Schedules of PrimFuncs that only these devices have, by ``apq.op``."""
    from apq_tvm.schedules.arm.activations import schedule_bundles

    return dict.fromkeys(("quantize_bundles", "layernorm_quantize_bundles"), schedule_bundles)


def four_dots(features: Iterable[str]) -> tuple[FourDot, ...]:
    """What multiplies int8 keys on a device with these features, the best first."""
    from apq_tvm.tensorize.arm.four_dot import SDOT

    return (SDOT,) if "dotprod" in features else ()


def linear_kernels() -> tuple[LinearKernel, ...]:
    """Every kernel for linear layers on 64-bit Arm, in order of preference."""
    from apq_tvm.schedules.arm import gemm as arm_gemm
    from apq_tvm.schedules.arm.anyprec import ANYPREC_KERNELS
    from apq_tvm.schedules.arm.balance import ARM_BALANCE_KERNELS
    from apq_tvm.schedules.arm.bitserial import ARM_BITSERIAL_KERNELS
    from apq_tvm.schedules.arm.codebook import LOOKUP_KERNELS
    from apq_tvm.schedules.arm.decoded import DECODED_KERNELS, GENERIC_KERNELS
    from apq_tvm.schedules.arm.gemv_plain import GEMV_KERNELS
    from apq_tvm.schedules.arm.lut import ARM_LUT_KERNELS
    from apq_tvm.schedules.arm.mixed import ARM_MIXED_KERNELS
    from apq_tvm.schedules.arm.paired import PAIRED_KERNELS
    from apq_tvm.schedules.linear.plain import PLAIN_KERNELS

    return (
        *DECODED_KERNELS,
        *ARM_LUT_KERNELS,
        *ARM_MIXED_KERNELS,
        *ARM_BALANCE_KERNELS,
        *ARM_BITSERIAL_KERNELS,
        *arm_gemm.PAIRED_GEMM_KERNELS,
        *PAIRED_KERNELS,
        *arm_gemm.MANY_ROWS,
        *GEMV_KERNELS,
        *arm_gemm.SOME_ROWS,
        *LOOKUP_KERNELS,
        *ANYPREC_KERNELS,
        *PLAIN_KERNELS,
        *GENERIC_KERNELS,
    )
