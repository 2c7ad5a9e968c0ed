"""Passes that lead to LLVM: what TVM's own pipeline gives, but for values it takes long over."""

from __future__ import annotations

import re
from typing import Any

import pytest
import tvm
from arm_tools import scheduled
from tvm import tirx

from apq_tvm.codegen.build.pipeline import build
from apq_tvm.formats import parse_scheme
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.schedules.devices import find_profile, linear_kernels

DEBUGGER = re.compile(r"^\s*\.Ltmp\d+:|^\s*\.loc\s|DEBUG_VALUE")
"""Lines for a debugger alone, to which a slot is a variable; no package has them."""


def assemblies(target: str, name: str, activation: str) -> tuple[str, str]:
    """Of a kernel, by our passes and by TVM's."""
    profile = find_profile(target)
    kernel = next(kernel for kernel in linear_kernels(profile) if kernel.name == name)
    spec = LinearSpec(51, 160, parse_scheme("W4A8g32"), True, activation, True)
    func = scheduled(kernel, spec, profile).with_attr("global_symbol", "main")
    mod, llvm = tvm.IRModule({"main": func}), tvm.target.Target(dict(profile.target))

    def text(module: Any) -> str:
        code, _, _ = str(module.inspect_source("asm")).partition("\t.section\t.debug_")
        return "".join(line for line in code.splitlines(True) if not DEBUGGER.search(line))

    return text(build(mod, llvm)), text(tirx.build(mod, target=llvm))


@pytest.mark.parametrize(
    ("target", "name"),
    [("x86-64-v3", "gemv_W4A8_maddubs_r8m4"), ("graviton2", "gemm_W4A8_sdot_r4m4")],
)
def test_code_is_that_of_tvms_own_passes(target: str, name: str) -> None:
    ours, theirs = assemblies(target, name, "silu")
    assert ours == theirs


def test_slots_of_large_values_stay_in_registers() -> None:
    ours, theirs = assemblies("x86-64-v3", "gemv_W4A8_maddubs_r8m1", "gelu")
    assert ours != theirs  # or nothing needs slots any more
    assert abs(ours.count("\n") - theirs.count("\n")) < 0.02 * theirs.count("\n")
    assert ours.count("(%rsp)") <= 1.1 * theirs.count("(%rsp)")
