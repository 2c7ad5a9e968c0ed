"""Codebooks and tables on Arm: lookups in registers, counted."""

from __future__ import annotations

import pytest
from arm_lookup_cases import loop_of, record, scheme_of
from arm_tools import assembly, count, inner_loop, scheduled

from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.schedules.devices import find_profile


@pytest.mark.parametrize("target", ["graviton2", "graviton3", "graviton4"])
def test_tables_stay_in_registers(target: str) -> None:
    """One tbl for every sdot; nothing is spilled or converted."""
    profile = find_profile(target)
    spec = LinearSpec(512, 4096, scheme_of("nl4"))
    loop = loop_of(assembly(scheduled(record("nl4", 1), spec, profile), profile), "sdot")
    vectors = 32 if target == "graviton2" else 16  # two row blocks at once
    assert count(loop, "sdot") == count(loop, "tbl") == vectors
    assert "[sp" not in loop
    assert count(loop, r"mov\s+v\d+\.16b") <= 4
    assert count(loop, "scvtf|fcvtl|addv|addp|dup") == 0
    if "sve" in profile.features:
        assert count(loop, r"tbl\s+z\d+") == vectors


@pytest.mark.parametrize("target", ["graviton2", "graviton3", "graviton4", "cortex-a55"])
def test_written_quads_of_3_bits(target: str) -> None:
    """Of four: 22 instructions each for indices, 7 for books of all, and for sub-scales."""
    profile = find_profile(target)
    spec = LinearSpec(512, 4096, scheme_of("cb3"))
    loop = loop_of(assembly(scheduled(record("cb3", 1), spec, profile), profile), "sdot")
    sve, spread = "sve" in profile.features, 3 * 4
    whole = target == "graviton3"  # its vectors hold a table, which LLVM puts there in the loop
    assert count(loop, "sdot") == 64
    assert count(loop, "tbl") == 64 + spread + (2 * whole if sve else 16)
    found = count(loop, r"bit|bif|and\s+v\d+|orr\s+v\d+|ushr|shl|sli|sri")
    assert found == 4 * 22 + 7 + (16 if sve else 4)
    assert (whole or "[sp" not in loop) and count(loop, r"mov\s+v\d+") <= 4
    assert count(loop, r"tbl\s+z\d+") == sve * (64 * whole + spread)


@pytest.mark.parametrize(("name", "merges"), [("W2sA8", 0), ("W3sA8", 8)])
def test_super_blocks_have_no_conversions(name: str, merges: int) -> None:
    """A unit: 8 products, 4 lookups that spread sub-scales and minima, few other operations."""
    profile = find_profile("graviton2")
    spec = LinearSpec(512, 4096, scheme_of(name))
    loop = loop_of(assembly(scheduled(record(name, 1), spec, profile), profile), "sdot")
    assert (count(loop, "sdot"), count(loop, "tbl"), count(loop, "fmla")) == (8, 4, 4)
    assert count(loop, "scvtf|ucvtf|fcvtl|addv|addp") == 0 and "[sp" not in loop
    # Two fields of 2 bits in four vectors each, two nibbles twice, four floats made of bits.
    assert count(loop, "and|ushr|shl|orr|bsl|bit|bif|add\\s+v\\d+") <= 12 + 4 + 4 + 3 * merges


@pytest.mark.parametrize("target", ["cortex-a53", "cortex-a72"])
def test_without_dot_products_int16_sums(target: str) -> None:
    profile, spec = find_profile(target), LinearSpec(512, 4096, scheme_of("nl4"))
    kernel = record("nl4", 1, "smull")
    source = assembly(scheduled(kernel, spec, profile), profile)
    loop = inner_loop(source, "smlal|smlal2")
    assert count(source, "sdot") == 0
    assert count(loop, "smull|smull2|smlal|smlal2") == 2 * count(loop, "tbl")
    assert count(loop, "smull|smull2") * 4 == 2 * count(loop, "tbl")  # four products in a lane
