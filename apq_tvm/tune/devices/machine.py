"""What a device is, as the agent says, and whether code for a target runs there."""

from __future__ import annotations

from dataclasses import dataclass

from apq_tvm.errors import DeviceLost, DeviceUnfit
from apq_tvm.types import DeviceProfile

HWCAPS = {
    "asimd": (0, 1),
    "atomics": (0, 8),
    "asimdhp": (0, 10),
    "asimdrdm": (0, 12),
    "fcma": (0, 14),
    "sha3": (0, 17),
    "asimddp": (0, 20),
    "sve": (0, 22),
    "asimdfhm": (0, 23),
    "sve2": (1, 1),
    "svebitperm": (1, 4),
    "i8mm": (1, 13),
    "bf16": (1, 14),
}
"""Word and bit of 64-bit Arm's features, by their names in /proc/cpuinfo: Linux,
arch/arm64/include/uapi/asm/hwcap.h; as ``codegen/runtime/cpu/machine.c`` has them."""

_TILES = ("amx_tile", "amx_int8", "amx_bf16")


@dataclass(frozen=True)
class Machine:
    """A device.

    Parameters
    ----------
    arch : str
        ``"x86_64"``, ``"aarch64"``.
    system : str
        ``"Linux 6.1.0"``.
    cores : int
        That are online.
    flags : frozenset of str
        CPU features as /proc/cpuinfo spells them.
    model : str
        The processor's name, or Arm's numbers of it.
    memory : int
        Bytes.
    """

    arch: str
    system: str
    cores: int
    flags: frozenset[str]
    model: str
    memory: int = 0


def parse_facts(text: str, device: str) -> Machine:
    """Read what ``agent facts`` printed.

    Raises
    ------
    DeviceLost
        It is something else.
    """
    facts = dict(
        (key.strip(), value.strip())
        for key, colon, value in (line.partition(":") for line in text.splitlines())
        if colon
    )
    try:
        arch, system, cores = facts["arch"], facts["system"], int(facts["cores"])
        words = int(facts["hwcap"]), int(facts["hwcap2"])
    except (KeyError, ValueError) as error:
        raise DeviceLost(f"{device}: the agent said {text[:200]!r}") from error
    if arch == "aarch64":
        flags = {name for name, (word, bit) in HWCAPS.items() if words[word] >> bit & 1}
        numbers = (facts.get("CPU implementer"), facts.get("CPU part"))
        model = "/".join(filter(None, numbers))
    else:
        flags = set(facts.get("flags", "").split())
        flags -= set() if facts.get("tiles") == "1" else set(_TILES)
        model = facts.get("model name", "")
    return Machine(arch, system, cores, frozenset(flags), model, int(facts.get("memory", "0")))


def check_fit(machine: Machine, profile: DeviceProfile, device: str) -> None:
    """Refuse a device that code for a target would crash on.

    Parameters
    ----------
    machine : Machine
    profile : DeviceProfile
        Of the target; of one with variants any must run.
    device : str
        For the message.

    Raises
    ------
    DeviceUnfit
        Names what is missing, and the target that fits.
    """
    if machine.arch != profile.host_arch:
        raise DeviceUnfit(
            f"{device} is {machine.arch}, and target {profile.name} is {profile.host_arch}"
        )
    lacks = min((_lacks(machine, variant) for variant in profile.variants or (profile,)), key=len)
    if lacks:
        better = fitting(machine)
        remedy = f"; {better} fits it (--target {better})" if better else ""
        raise DeviceUnfit(
            f"{device} ({machine.model or machine.system}) lacks {', '.join(sorted(lacks))}, which "
            f"code for {profile.name} uses{remedy}"
        )


def fitting(machine: Machine) -> str:
    """The first target whose code runs on a device; ``""`` for none."""
    from apq_tvm.schedules.devices import PROFILES

    for profile in PROFILES:
        alike = profile.arch == machine.arch and not profile.variants
        if alike and not _lacks(machine, profile):
            return profile.name
    return ""


def _lacks(machine: Machine, profile: DeviceProfile) -> frozenset[str]:
    """What code for one target uses and the device has not."""
    import tvm

    from apq_tvm.codegen.build.kernels import cpu_flags

    target = dict(profile.target)
    host = target.get("host", target)
    return frozenset(cpu_flags(tvm.target.Target(dict(host)))) - machine.flags
