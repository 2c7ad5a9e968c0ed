"""Any-precision kernels on Arm: tables stay in registers, few instructions merge codes."""

from __future__ import annotations

import re

import pytest
from arm_tools import assembly, count, inner_loop, scheduled
from test_arm_anyprec import record

from apq_tvm.formats import parse_scheme
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.schedules.devices import find_profile

ROWS = 8


# Merges, shifts and masks for the 128 codes of eight rows are counted.
LOOPS = [("graviton2", "sdot"), ("graviton3", "sdot_sve"), ("graviton4", "sdot_sve")]


@pytest.mark.parametrize(("target", "instruction"), LOOPS)
@pytest.mark.parametrize(("bits", "most"), [(2, 8), (3, 23), (4, 24)])
def test_codes_are_looked_up_in_registers(
    bits: int, most: int, target: str, instruction: str
) -> None:
    """One lookup and one product for 16 weights, tables in registers, sums not across lanes."""
    spec = LinearSpec(512, 512, parse_scheme("anyprec1-8sA8"), details=(("channels", 2),))
    profile = find_profile(target)
    source = assembly(scheduled(record("gemv", bits, instruction), spec, profile), profile)
    block = inner_loop(source, "sdot")
    label = re.escape(block.partition(":")[0])
    loop = re.split(rf"(?m)^\s+b\.ne\s+\.LBB{label}$", block)[0]
    products = count(loop, "sdot")
    assert products % ROWS == 0 and count(loop, "tbl") == products
    assert "[sp" not in loop and count(loop, "addv|addp|dup") == 0
    lookups = count(loop, r"tbl\s+z\d+") if "sve" in instruction else 0
    assert lookups == (products if "sve" in instruction else 0)
    merging = count(loop, "and|orr|bsl|bit|bif|ushr|shl|add\\s+v\\d+")
    assert merging <= most * products // ROWS
