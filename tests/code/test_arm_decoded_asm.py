"""GEMMs on Arm of formats that decode to int8: what LLVM makes of their loops."""

from __future__ import annotations

import re

import pytest
from arm_tools import assembly, count, inner_loop, scheduled
from test_arm_decoded import kernel_of

from apq_tvm.formats import parse_scheme
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.schedules.devices import find_profile


@pytest.mark.parametrize(("scheme", "smmla"), (("nl4", 12), ("W2*A8", 24)))
def test_products_stay_in_registers(scheme: str, smmla: int) -> None:
    profile, kernel = find_profile("graviton3"), kernel_of(scheme, "smmla")
    spec = LinearSpec(48, 1024, parse_scheme(scheme))
    loop = inner_loop(assembly(scheduled(kernel, spec, profile), profile), "smmla")
    loop = loop.split("\tb.ne")[0].split("\tb.lo")[0]
    found = count(loop, "smmla")
    assert found and found % smmla == 0
    assert "[sp" not in loop


def test_decoding_is_vectors() -> None:
    """A unit of nl4: 8 lookups of 16 weights, zips while two codes share a byte."""
    profile, kernel = find_profile("graviton3"), kernel_of("nl4", "smmla")
    spec = LinearSpec(48, 1024, parse_scheme("nl4"))
    loop = inner_loop(assembly(scheduled(kernel, spec, profile), profile), "tbl").split("\tb.ne")[0]
    found = count(loop, "tbl")
    assert found and found % 8 == 0 and count(loop, "zip[12]") == found // 2
    assert not re.search(r"\tldrb\t", loop)
