"""Every device by name, and which kernels compute linear layers on it."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from apq_tvm.errors import BadTarget
from apq_tvm.schedules.arm import profiles as arm
from apq_tvm.schedules.cuda import profiles as cuda
from apq_tvm.schedules.x86 import profiles as x86
from apq_tvm.types import DeviceProfile

if TYPE_CHECKING:
    from apq_tvm.schedules.linear.kernel import LinearKernel
    from apq_tvm.tensorize.meaning.four_dot import FourDot

PROFILES: tuple[DeviceProfile, ...] = (
    *x86.PROFILES,
    *arm.PROFILES,
    arm.AUTO,
    *cuda.PROFILES,
)

_HOSTS = {"x86_64": x86.host_profile, "aarch64": arm.host_profile}


def find_profile(name: str = "host", triple: str = "", layout: str = "") -> DeviceProfile:
    """The profile called `name`; ``"host"`` is this machine's, with its own number of cores.

    Parameters
    ----------
    name : str
    triple : str
        To compile for another system of the same architecture: ``"aarch64-linux-android24"``.
    layout : str
        Of integer weights on 64-bit Arm: ``"4x4"``, ``"4x8"`` or ``"8x8"``, by default the one that
        was measured to be fastest (`apq_tvm.schedules.arm.layouts`).

    Raises
    ------
    BadTarget
        No profile has this name, ``host`` is no machine that a profile is for, the triple is of
        another architecture or of no Linux, or the device has no such layout.
    """
    profile = _by_name(name)
    if layout:
        profile = _with_layout(profile, layout)
    if not triple:
        return profile
    arch, _, system = triple.partition("-")
    if arch != profile.host_arch:
        raise BadTarget(f"--triple {triple} is not of {profile.name}, which is {profile.host_arch}")
    if not re.fullmatch(r"(\w+-)?linux(-gnu|-musl|-android\d*)?", system):
        raise BadTarget(
            f"--triple {triple}: modules are for Linux and Android, such as "
            f"{arch}-linux-gnu, {arch}-linux-musl or {arch}-linux-android24"
        )
    return _with_triple(profile, triple)


def _with_layout(profile: DeviceProfile, layout: str) -> DeviceProfile:
    choices = {"4x4": "neon", "4x8": "i8mm", "8x8": "i8mm"}
    if layout not in choices:
        raise BadTarget(f"--layout {layout!r}: {', '.join(choices)} are possible")
    if profile.arch != "aarch64":
        raise BadTarget(f"--layout is for 64-bit Arm; {profile.name} has one layout of weights")
    variants = profile.variants or (profile,)
    lacking = [v.name for v in variants if choices[layout] not in v.features]
    if lacking:
        raise BadTarget(
            f"--layout {layout} is for smmla (i8mm), which {', '.join(lacking)} does not have; "
            "4x4 is possible"
        )
    variants = tuple(replace(variant, interleaving=layout) for variant in profile.variants)
    return replace(profile, interleaving=layout, variants=variants)


def _with_triple(profile: DeviceProfile, triple: str) -> DeviceProfile:
    variants = tuple(_with_triple(variant, triple) for variant in profile.variants)
    host = profile.target.get("host")
    given = {"host": {**host, "mtriple": triple}} if host else {"mtriple": triple}
    return replace(profile, target={**profile.target, **given}, variants=variants)


def _by_name(name: str) -> DeviceProfile:
    if name == "host":
        system, machine = os.uname().sysname, os.uname().machine
        if system != "Linux" or machine not in _HOSTS:
            raise BadTarget(
                f"host is {system} on {machine}, and profiles are for x86-64 and aarch64 Linux; "
                "name a target of apq-tvm targets"
            )
        return _HOSTS[machine]()
    for profile in PROFILES:
        if profile.name == name:
            return profile
    names = ["host", *(p.name for p in PROFILES)]
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.3) or names
    raise BadTarget(f"unknown target {name!r}; nearest: {', '.join(near)} (apq-tvm targets)")


_WINGS: dict[str, Any] = {"x86_64": x86, "aarch64": arm, "cuda": cuda}


def device_rules(profile: DeviceProfile) -> Mapping[str, Callable[..., Any]]:
    """Schedules of PrimFuncs that devices like `profile` alone have, by ``apq.op``."""
    rules: Mapping[str, Callable[..., Any]] = _WINGS[profile.arch].rules()
    return rules


def multiplies_pairs(profile: DeviceProfile) -> bool:
    """Whether 8-bit codes are multiplied faster where no two neighbours are too large together.

    So it is on x86 with ``vpmaddubsw`` and without VNNI.
    """
    from apq_tvm.schedules.x86.instructions import VNNI

    return "avx2" in profile.features and not profile.features & VNNI


def four_dots(profile: DeviceProfile) -> tuple[FourDot, ...]:
    """What multiplies int8 keys of attention on devices like `profile`, the best first."""
    found: tuple[FourDot, ...] = _WINGS[profile.arch].four_dots(profile.features)
    return found


def whole_schedule(profile: DeviceProfile) -> Callable[..., Any] | None:
    """The one schedule of all PrimFuncs but linear layers, where devices have such."""
    return cuda.schedule_any() if profile.gpu else None


def linear_kernels(profile: DeviceProfile) -> tuple[LinearKernel, ...]:
    """Every kernel for linear layers on devices like `profile`, in order of preference."""
    kernels: tuple[LinearKernel, ...] = _WINGS[profile.arch].linear_kernels()
    return kernels


def device_operators(profile: DeviceProfile) -> Mapping[str, Callable[..., Any]]:
    """Operators that the device has beside ONNX's and ours: what makes their PrimFuncs.

    Parameters
    ----------
    profile : DeviceProfile

    Returns
    -------
    mapping of str to callable
        ``(shapes, **attributes)`` → PrimFunc, as `apq_tvm.schedules.cuda.operators` says.
    """
    if profile.gpu:
        from apq_tvm.schedules.cuda.operators import OPERATORS

        return OPERATORS
    return cached_operators(profile)


def cached_operators(profile: DeviceProfile) -> Mapping[str, Callable[..., Any]]:
    """Likewise of a decoder whose caches a module keeps: attention over packed keys, the caches."""
    if profile.gpu:
        from apq_tvm.schedules.cuda.operators import cached_operators

        return cached_operators(profile)
    from apq_tvm.ops.graph.attention import attention
    from apq_tvm.ops.graph.caches.grown import cache
    from apq_tvm.ops.graph.caches.pack_keys import pack_keys

    return {"apq.Attention": attention, "apq.Cache": cache, "apq.PackKeys": pack_keys}
