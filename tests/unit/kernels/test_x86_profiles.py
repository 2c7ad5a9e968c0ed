"""x86 device profiles: how a machine is recognised, with and without tiles."""

from __future__ import annotations

import pytest
import tvm
from tvm.target import codegen

from apq_tvm.codegen.build.kernels import cpu_flags
from apq_tvm.schedules.devices import find_profile
from apq_tvm.schedules.x86 import profiles as x86
from apq_tvm.types import DeviceProfile

ICE = (
    "sse4_1 ssse3 popcnt avx avx2 bmi1 bmi2 f16c fma avx512f avx512bw avx512cd avx512dq avx512vl "
    "avx512_vnni avx512vbmi avx512_vbmi2 avx512_bitalg avx512_vpopcntdq vaes"
)
SAPPHIRE = f"{ICE} avx512_bf16 avx512_fp16 avx_vnni"


def cpuinfo(flags: str) -> str:
    return f"processor\t: 0\nvendor_id\t: GenuineIntel\nflags\t\t: {flags}\n\n"


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        (f"{SAPPHIRE} amx_bf16 amx_tile amx_int8", "sapphirerapids"),
        (SAPPHIRE, "icelake-server"),  # a virtual machine that hides tiles
        (ICE, "icelake-server"),
    ],
)
def test_machines_are_recognised(flags: str, name: str) -> None:
    assert x86.recognise(cpuinfo(flags)).name == name


@pytest.mark.parametrize("profile", x86.PROFILES, ids=lambda profile: str(profile.name))
def test_llvm_knows_the_features_and_modules_ask_for_them(profile: DeviceProfile) -> None:
    target = tvm.target.Target(dict(profile.target))
    assert profile.features <= {str(f) for f in codegen.llvm_get_cpu_features(target)}
    asked = cpu_flags(target)
    assert ("amx_tile" in asked) == ("amx_int8" in asked) == ("amx-int8" in profile.features)


def test_host_without_leave_has_no_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(x86, "tiles_given", lambda: False)
    if find_profile("host").arch != "x86_64":
        pytest.skip("this machine is no x86-64")
    assert "amx-tile" not in x86.host_profile().features
