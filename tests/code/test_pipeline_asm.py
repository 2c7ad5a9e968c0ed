"""Passes that lead to LLVM: what TVM's own pipeline gives, but for values it takes long over."""

from __future__ import annotations

import pytest
import tvm
from arm_tools import scheduled
from tvm import tirx

from apq_tvm.codegen.build.pipeline import build
from apq_tvm.formats import parse_scheme
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.schedules.devices import find_profile, linear_kernels
from apq_tvm.types import DeviceProfile

KERNELS = (("x86-64-v3", "gemv_W4A8_maddubs_r8m4"), ("graviton2", "gemm_W4A8_sdot_r4m4"))


def kernel_of(profile: DeviceProfile, name: str, activation: str) -> tvm.IRModule:
    kernel = next(kernel for kernel in linear_kernels(profile) if kernel.name == name)
    spec = LinearSpec(51, 160, parse_scheme("W4A8g32"), True, activation, True)
    func = scheduled(kernel, spec, profile)
    return tvm.IRModule({"main": func.with_attr("global_symbol", "main")})


@pytest.mark.parametrize(("target", "name"), KERNELS)
def test_code_is_that_of_tvms_own_passes(target: str, name: str) -> None:
    profile = find_profile(target)
    mod, llvm = kernel_of(profile, name, "silu"), tvm.target.Target(dict(profile.target))
    ours, theirs = build(mod, llvm), tirx.build(mod, target=llvm)
    assert ours.inspect_source("asm") == theirs.inspect_source("asm")


@pytest.mark.parametrize(("target", "name"), KERNELS)
def test_slots_of_large_values_stay_in_registers(target: str, name: str) -> None:
    profile = find_profile(target)
    mod, llvm = kernel_of(profile, name, "gelu"), tvm.target.Target(dict(profile.target))
    ours, theirs = (
        made.inspect_source("asm") for made in (build(mod, llvm), tirx.build(mod, llvm))
    )
    assert abs(ours.count("\n") - theirs.count("\n")) < 0.02 * theirs.count("\n")
    assert ours.count("[sp" if profile.arch == "aarch64" else "(%rsp)") <= 1.1 * theirs.count(
        "[sp" if profile.arch == "aarch64" else "(%rsp)"
    )
