"""The generic kernel: any layout that can say what a weight is."""

from __future__ import annotations

import pytest
import tvm
from built import built
from linear_cases import Case, build

from apq_tvm.codegen.layouts import InterleavedLayout
from apq_tvm.formats import parse_scheme
from apq_tvm.ops.linear.decode import decode_linear
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.schedules.decide import Defaults
from apq_tvm.schedules.devices import find_profile
from apq_tvm.schedules.linear.generic import schedule_decode
from apq_tvm.schedules.x86.decoded import GENERIC_KERNELS

PAIRED = ("W4A32g32", "W3zA32g64", "W8A32", "W2zA32g16")

SCHEMES = ("W1A32", "W2A32g16", "W3zA32g64", "W4A32g32", "W7zA32g128", "W8A32", "float")


@pytest.mark.parametrize("target", ("x86-64", "x86-64-v3"))
@pytest.mark.parametrize("scheme", SCHEMES)
def test_generic_kernel_multiplies_decoded_weights(scheme: str, target: str) -> None:
    profile = find_profile(target)
    spec = LinearSpec(21, 100, parse_scheme(scheme), bias=True, activation="relu", residual=True)
    case = Case(spec, GENERIC_KERNELS[0].layout(spec, profile))
    kernel = build(GENERIC_KERNELS[0], spec, profile, Defaults())
    for m in (1, 3):
        case.check(kernel, m)


@pytest.mark.parametrize("rows", (4, 8))
@pytest.mark.parametrize("scheme", PAIRED)
def test_runs_of_eight(scheme: str, rows: int) -> None:
    """4x8 and 8x8, which no device has by default for float activations."""
    spec = LinearSpec(21, 100, parse_scheme(scheme))
    assert spec.scheme is not None
    layout = InterleavedLayout.of_pairs(spec.scheme, rows)
    case = Case(spec, layout)
    sch = tvm.s_tir.Schedule(decode_linear(spec, layout, 0))
    schedule_decode(sch)
    case.check(built(sch.mod["main"], "llvm"), 3)
