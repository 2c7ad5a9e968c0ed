"""`bench static` without its tools: pieces of code, traces, ggml's layouts, and errors."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from apq_tvm.bench.arm.cost import Cost
from apq_tvm.bench.arm.ggml import BLOCK, CODES, find_products, interleave, pack
from apq_tvm.bench.arm.loops import Body, bodies, branch_target
from apq_tvm.bench.arm.mca import assembly, find_analyser
from apq_tvm.bench.trace import Instruction, Trace
from apq_tvm.cli.main import app
from apq_tvm.errors import ApqError, BadInput
from apq_tvm.formats import parse_scheme
from apq_tvm.schedules.devices import find_profile

NESTED = """
100 mov x0, #0x0 @1
104 ldr q0, [x1] @3
108 sdot v2.4s, v0.16b, v1.4b[0] @12
10c subs x2, x2, #0x1 @12
110 b.ne 0x108 @12
114 cbz x5, 0x11c @3
118 nop @1
11c fmul v3.4s, v2.4s, v4.4s @3
120 cbnz x3, 0x104 @3
124 bl 0x100 @1
128 ret @1
"""


def instructions(listing: str, function: str = "kernel") -> list[Instruction]:
    """Lines of "address text @count"."""
    found = []
    for line in listing.strip().splitlines():
        address, rest = line.split(maxsplit=1)
        text, count = rest.rsplit(" @", 1)
        found.append(Instruction(int(address, 16), text, function, int(count)))
    return found


def test_a_body_is_what_one_loop_executes_equally_often() -> None:
    found = [(body.count, [i.address for i in body.instructions]) for body in bodies(
        instructions(NESTED))]  # fmt: skip
    assert sorted(found) == [
        (1, [0x100, 0x124, 0x128]),
        (1, [0x118]),
        (3, [0x104, 0x114, 0x11C, 0x120]),
        (12, [0x108, 0x10C, 0x110]),
    ]


def test_loops_of_equal_counts_are_apart() -> None:
    twice = "200 sdot v0.4s, v0.16b, v0.16b @9\n204 b.ne 0x200 @9\n"
    other = "208 nop @9\n20c cbnz w1, 0x208 @9\n"
    assert [len(body.instructions) for body in bodies(instructions(twice + other))] == [2, 2]


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("b 0x40", 0x40),
        ("b.lo 0x40", 0x40),
        ("cbz x3, 0x40", 0x40),
        ("tbnz w3, #31, 0x40", 0x40),
        ("bl 0x40", None),
        ("br x3", None),
        ("csel x1, x2, x3, cc", None),
        ("bic v0.16b, v1.16b, v2.16b", None),
    ],
)
def test_branch_targets(text: str, target: int | None) -> None:
    assert branch_target(Instruction(0, text, "f", 1)) == target


def test_assembly_has_no_addresses_and_a_region_per_body() -> None:
    found = bodies(instructions(NESTED))
    text = assembly(found, [1.0] * len(found))
    assert text.count("LLVM-MCA-BEGIN") == text.count("LLVM-MCA-END") == len(found)
    assert "\tb.ne .\n" in text and "\tbl .\n" in text and "#0x1\n" in text
    assert "executed 12 times; 1 cycles each" in text


def test_blocks_of_a_trace_overlap() -> None:
    counted = Trace(np.array([[96, 4, 10], [104, 2, 5], [4096, 1, 7]], np.int64))
    assert counted.instructions == 57
    assert counted.executions(100, 116).tolist() == [10, 15, 15, 0]


def test_figures_compare_with_the_best_instruction_used() -> None:
    profile = find_profile("graviton3")  # has smmla too
    dots = Body(tuple(instructions("0 sdot v0.4s, v1.16b, v2.16b @8\n4 nop @8")))
    rest = Body(tuple(instructions("8 smull v0.8h, v1.8b, v2.8b @2")))
    row = Cost(40, (rest, dots), (4.0, 2.0)).figures(1, 24 * 16, profile)
    assert row["cycles"] == 24 and row["macs_per_cycle"] == 16
    assert row["peak_instruction"] == "sdot"
    assert row["peak_share"] == 16 / profile.macs_per_cycle["sdot"]
    assert (row["loop_cycles"], row["loop_count"], row["loop_instructions"]) == (2, 8, 2)
    assert row["loop_share"] == 16 / 24 and row["judged_share"] == 18 / 40
    assert row["loop_peak_share"] == 24 / profile.macs_per_cycle["sdot"]  # it has every sdot


@pytest.mark.parametrize(("m", "limit"), [(1, "sdot"), (2, "smmla")])
def test_one_row_is_compared_with_sdot(m: int, limit: str) -> None:
    profile = find_profile("graviton3")
    pairs = Body(tuple(instructions("0 smmla v0.4s, v1.16b, v2.16b @8")))
    row = Cost(8, (pairs,), (2.0,)).figures(m, 512, profile)
    assert row["peak_instruction"] == limit
    assert row["peak_share"] == row["loop_peak_share"] == m * 32 / profile.macs_per_cycle[limit]


@settings(max_examples=30)
@given(
    st.sampled_from([(1, 32), (4, 4), (4, 8), (8, 8)]),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(0, 2**32 - 1),
)
def test_interleaving_is_ggmls(block: tuple[int, int], groups: int, count: int, seed: int) -> None:
    (rows, chunk), rng = block, np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (groups * rows, count, BLOCK), np.uint8)
    scales = rng.random((groups * rows, count)).astype(np.float16)
    data, size = interleave(blocks, scales, rows, chunk), rows * (2 + BLOCK)
    assert len(data) == groups * count * size
    for g in range(groups):
        for b in range(count):
            part = data[(g * count + b) * size :][:size]
            np.testing.assert_array_equal(
                np.frombuffer(part, np.float16, rows), scales[g * rows : (g + 1) * rows, b]
            )
            codes = np.frombuffer(part, np.uint8, offset=2 * rows)
            for i in range(0, len(codes), chunk):  # the chunk of row r that starts at `at`
                r, at = i // chunk % rows, i // chunk // rows * chunk
                want = blocks[g * rows + r, b, at : at + chunk]
                np.testing.assert_array_equal(codes[i : i + chunk], want)


@pytest.mark.parametrize("kind", CODES)
def test_codes_are_stored_as_ggml_reads_them(kind: str) -> None:
    values = np.array(CODES[kind])
    codes = np.random.default_rng(0).integers(0, len(values), (3, 2, BLOCK), np.uint8)
    stored = pack(codes, kind).view(np.int8)
    if kind == "q8_0":
        read = stored
    else:  # the low nibbles, then the high ones
        nibbles = np.concatenate([stored << 4, stored & -16], axis=2) >> 4
        read = nibbles if kind == "q4_0" else values[nibbles & 15]
    np.testing.assert_array_equal(read, values[codes])


def fake_mca(folder: Path, version: int) -> str:
    path = folder / "llvm-mca"
    path.write_text(f"#!/bin/sh\necho Debian LLVM version {version}.1.0\n")
    path.chmod(0o755)
    return str(path)


def test_llvm_mca_must_be_22(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadInput, match="LLVM 19, whose models differ from 22's; make arm-tools"):
        find_analyser("neoverse-n1", fake_mca(tmp_path, 19))
    assert find_analyser("neoverse-n1", fake_mca(tmp_path, 22)).mcpu == "neoverse-n1"
    monkeypatch.setenv("APQ_LLVM_MCA", "/nowhere/llvm-mca")
    with pytest.raises(BadInput, match="/nowhere/llvm-mca not found; make arm-tools"):
        find_analyser("neoverse-n1")


def test_missing_tools_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    result = CliRunner().invoke(app, ["bench", "static", "--target", "graviton3"])
    assert result.exit_code == 1
    assert "qemu-aarch64 is not on PATH: apt-get install qemu-user" in result.output


def test_rivals_are_named_in_errors(tmp_path: Path) -> None:
    scheme = parse_scheme("W4A8g32")
    with pytest.raises(BadInput, match="is no file, nor FILE:symbol"):
        find_products("none.so", scheme)
    text = tmp_path / "text.so"
    text.write_text("no library")
    with pytest.raises(ApqError, match=r"nm|text\.so"):
        find_products(str(text), scheme)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--target", "znver4"], "bench static judges 64-bit Arm"),
        (
            ["--target", "arm-auto"],
            "arm-auto is for many cores; judge its kernels on one of graviton4",
        ),
        (["--target", "graviton9"], "unknown target 'graviton9'"),
        (["--target", "graviton3", "--shape", "4"], "is not NxK"),
        (["--target", "graviton3", "--m", "0"], "--m '0'"),
        pytest.param(
            ["--target", "graviton3", "--mca", "/nowhere/mca"],
            "/nowhere/mca not found",
            marks=pytest.mark.skipif(not shutil.which("qemu-aarch64"), reason="no qemu-aarch64"),
        ),
    ],
)
def test_bad_options(options: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["bench", "static", *options])
    assert result.exit_code != 0
    assert message in " ".join(result.output.split())
