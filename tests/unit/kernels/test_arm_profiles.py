"""Arm device profiles: what LLVM may use, how a machine is recognised, what names are offered."""

from __future__ import annotations

import itertools
import os

import pytest
import tvm
from tvm.target import codegen

from apq_tvm.bench.linear import bench_linear
from apq_tvm.errors import BadTarget
from apq_tvm.schedules.arm import profiles as arm
from apq_tvm.schedules.devices import find_profile, linear_kernels
from apq_tvm.types import DeviceProfile

NAMES = lambda profile: profile.name  # noqa: E731

V8 = "fp asimd evtstrm aes pmull sha1 sha2 crc32 cpuid"
DOT = f"{V8} atomics fphp asimdhp asimdrdm lrcpc dcpop asimddp"
MMLA = f"{DOT} asimdfhm jscvt fcma i8mm bf16 flagm"

MACHINES = {
    "graviton2": ([(0x41, 0xD0C)] * 4, f"{DOT} ssbs"),
    "graviton3": ([(0x41, 0xD40)] * 8, f"{MMLA} sve rng"),
    "graviton4": ([(0x41, 0xD4F)] * 2, f"{MMLA} sve sve2 rng"),
    "cortex-a53": ([(0x41, 0xD03)] * 4, "fp asimd evtstrm crc32 cpuid"),
    "cortex-a55": ([(0x41, 0xD05)] * 4, DOT),
    "cortex-a72": ([(0x41, 0xD08)] * 4, "fp asimd evtstrm crc32 cpuid"),  # Raspberry Pi 4
    "cortex-a76": ([(0x41, 0xD0B)] * 4, DOT),  # Raspberry Pi 5
    "cortex-a78": ([(0x41, 0xD41)] * 4 + [(0x41, 0xD05)] * 4, DOT),
    "cortex-x2": ([(0x41, 0xD46)] * 4 + [(0x41, 0xD47)] * 3 + [(0x41, 0xD48)], MMLA),
    "armv8.6-i8mm": ([(0x61, 0x032)] * 8, MMLA),  # another maker's
    "armv8.2-dotprod": ([(0x61, 0x023)] * 8, f"{DOT} asimdfhm"),
    "armv8-a": ([(0x51, 0xC00)] * 2, V8),
}


def cpuinfo(parts: list[tuple[int, int]], features: str) -> str:
    return "".join(
        f"processor\t: {i}\nBogoMIPS\t: 50.00\nFeatures\t: {features}\n"
        f"CPU implementer\t: {maker:#x}\nCPU architecture: 8\nCPU variant\t: 0x1\n"
        f"CPU part\t: {part:#x}\nCPU revision\t: 1\n\n"
        for i, (maker, part) in enumerate(parts)
    )


@pytest.mark.parametrize("name", MACHINES)
def test_machine_is_recognised(name: str) -> None:
    found = arm.recognise(cpuinfo(*MACHINES[name]))
    assert found.name == name and found.cores == len(MACHINES[name][0])


def test_hidden_features_count_as_missing() -> None:
    """A virtual Graviton3 without SVE runs what every i8mm machine runs."""
    assert arm.recognise(cpuinfo([(0x41, 0xD40)], MMLA)).name == "armv8.6-i8mm"
    little = cpuinfo([(0x41, 0xD03)], V8) + cpuinfo([(0x41, 0xD41)], DOT)
    assert arm.recognise(little).name == "cortex-a53"


@pytest.mark.parametrize("text", ("", "processor: 0\nFeatures: fp\n"))
def test_no_processor_to_recognise(text: str) -> None:
    with pytest.raises(BadTarget, match="no"):
        arm.recognise(text)


@pytest.mark.parametrize("profile", (*arm.PROFILES, arm.AUTO), ids=NAMES)
def test_llvm_uses_what_the_profile_has(profile: DeviceProfile) -> None:
    target = tvm.target.Target(dict(profile.target))
    known = {str(feature) for feature in codegen.llvm_get_cpu_features(target)}
    assert profile.features <= known
    optional = {"aes", "sha2", "sha3", "sm4", "bf16", "sve", "sve2", "sve-bitperm", "i8mm"}
    implied = {"sve-bitperm"} if "sve2" in profile.features else set()
    assert (known & optional) <= profile.features | implied
    assert profile.arch == "aarch64" and profile.vector_bytes == 16
    assert profile.sources and all(s.startswith("https://") for s in profile.sources)
    assert linear_kernels(profile) == arm.linear_kernels()


@pytest.mark.parametrize("profile", arm.PROFILES, ids=NAMES)
def test_peaks_are_of_instructions_the_core_has(profile: DeviceProfile) -> None:
    needs = {"sdot": "dotprod", "smmla": "i8mm", "smull": "neon"}
    assert all(needs[name] in profile.features for name in profile.macs_per_cycle)
    if "generic" != profile.target["mcpu"]:
        assert set(profile.macs_per_cycle) == {n for n, f in needs.items() if f in profile.features}


@pytest.mark.parametrize("profile", arm.PROFILES, ids=NAMES)
def test_facts_of_cores(profile: DeviceProfile) -> None:
    """Of a core they are known, of a level of the architecture not; LLVM is told of loads."""
    known = profile.target["mcpu"] != "generic"
    assert (profile.issue_width > 0, profile.vector_pipes > 0) == (known, known)
    assert profile.paired_loads == ("+slow-paired-128" not in profile.target["mattr"])
    dot = profile.macs_per_cycle.get("sdot")
    assert dot in (None, 16 * profile.vector_pipes)


def test_in_order_cores() -> None:
    named = {p.name for p in arm.PROFILES if p.in_order}
    assert named == {"cortex-a53", "cortex-a55", "cortex-a510", "cortex-a520"}


def test_auto_ends_with_what_all_have() -> None:
    assert find_profile("arm-auto") is arm.AUTO
    assert arm.AUTO.variants[-1].target == arm.AUTO.target
    fewer = [v.features for v in arm.AUTO.variants]
    assert all(less < more for more, less in itertools.pairwise(fewer))


@pytest.mark.parametrize(
    "wrong,near", (("graviton5", "graviton4"), ("cortex-a57", "cortex-a7"), ("neoverse-v1", "neov"))
)
def test_unknown_core_gets_near_names(wrong: str, near: str) -> None:
    with pytest.raises(BadTarget, match=rf"unknown target '{wrong}'; nearest: .*{near}"):
        find_profile(wrong)


def test_layers_are_timed_where_they_run() -> None:
    other = "graviton2" if os.uname().machine == "x86_64" else "x86-64"
    with pytest.raises(
        BadTarget, match=f"{other} is .*, and this machine is .*apq-tvm bench static"
    ):
        bench_linear([], "onnxruntime", target=other)
