"""Machine code of fast kernels by ``bench static``: instructions, registers, reads in flight."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from small_llama import CONFIG, small_llama
from typer.testing import CliRunner

from apq_tvm import pipeline
from apq_tvm.bench.gpu import counts
from apq_tvm.bench.gpu.native import is_native, written
from apq_tvm.bench.gpu.sass import Loop, disassemble, find_tool
from apq_tvm.cli.main import app
from apq_tvm.codegen.cuda.compilers import find_compiler
from apq_tvm.codegen.cuda.split import split
from apq_tvm.codegen.emit import read
from apq_tvm.errors import BuildError
from apq_tvm.schedules.devices import find_profile


def judged(target: str, shape: str, scheme: str, *more: str) -> list[dict[str, Any]]:
    """Rows of ``apq-tvm bench static``; skips where this machine has not what it takes."""
    try:
        find_compiler(find_profile(target).gpu)
        find_tool("nvdisasm")
    except BuildError as error:
        pytest.skip(str(error))
    words = ["bench", "static", "--target", target, "--shape", shape, "--scheme", scheme, *more]
    result = CliRunner().invoke(app, [*words, "--json"])
    assert result.exit_code == 0, result.output
    rows: list[dict[str, Any]] = json.loads(result.stdout)
    return rows


@pytest.mark.slow
@pytest.mark.parametrize(
    "scheme, most",
    [("W4A8g128", 0.80), pytest.param("W4A8g32", 1.4, marks=pytest.mark.all_cases)],
)
def test_the_inner_loop_is_short(scheme: str, most: float) -> None:
    """On the GPU that wants most in flight; nothing spills."""
    (row,) = judged("h200", "2816x8192", scheme)
    assert row["kernel"] == "gemv_W4A8_imma16832_r16m8"
    assert 0.5 < row["instructions_per_weight"] <= most, row
    assert row["spills"] == 0 and row["registers"] <= 128, row
    assert row["bytes_in_flight"] >= row["bytes_wanted"], row
    assert sum(row["pipes"].values()) == pytest.approx(row["instructions_per_weight"])
    assert row["pipes"]["tensor"] == pytest.approx(1 / 16)  # 16 weights of a lane an mma
    assert row["static_us"] == max(row["times_us"].values())
    assert row["native"] is True
    assert (row["simulated"], row["simulated_m"]) == ("64x4096", 1)
    assert row["dram_bytes"] <= 1.05 * row["ideal_dram_bytes"], row


@pytest.mark.slow
def test_products_of_bits_are_short() -> None:
    """Five instructions for 256 columns of a plane, and what the ends of a row take."""
    (row,) = judged("h200", "8192x28672", "W2A8")
    assert row["kernel"] == "bitserial_W2A8_bmma168256_r16m1"
    assert 0.03 < row["instructions_per_weight"] <= 0.10, row
    assert row["spills"] == 0 and row["bytes_in_flight"] >= row["bytes_wanted"], row


@pytest.mark.slow
def test_every_kind_of_kernel_is_judged(tmp_path: Path) -> None:
    """Rows with and without loads of whole fragments, for few and many rows of x."""
    rows = judged(
        "rtx-2080", "64x256", "W4A8g32,nl4,W4A16g32", "--m", "1,9", "--keep", str(tmp_path)
    )
    assert len(rows) == 6 and len(list(tmp_path.glob("*.sass"))) == 6
    assert [row["instructions_per_weight"] is None for row in rows] == [False] * 2 + [True] * 4
    assert all(row["registers"] > 0 and row["warps_per_sm"] > 0 for row in rows)
    assert all(row["limit"] == "bandwidth" for row in rows[2:])
    assert [row["native"] for row in rows] == [True] * 2 + [None] * 4
    assert [row["simulated_m"] for row in rows] == [1, 9] * 3
    assert all(row["simulated"] == "64x256" and row["sectors"] > 0 for row in rows)
    assert [row["shared_waves"] > 0 for row in rows] == [True] * 2 + [False, True] * 2
    assert [row["preparation"] is None for row in rows] == [False] * 2 + [True] * 4


@pytest.mark.slow
def test_without_a_compiler_nothing_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """And both say so: figures that are null, and a line below the table."""
    monkeypatch.setattr(counts.shutil, "which", lambda name: None)
    (row,) = judged("rtx-3090", "64x256", "W4A8g32")
    assert row["sectors"] is row["dram_bytes"] is row["preparation"] is row["simulated"] is None
    words = ["bench", "static", "--target", "rtx-3090", "--shape", "64x256"]
    result = CliRunner().invoke(app, words)
    assert "was not counted: g++" in result.output.replace("\n", " ")


@pytest.mark.slow
@pytest.mark.parametrize("kv", ["f32", "f16"])
@pytest.mark.parametrize("target", ["rtx-3090", "rtx-4090", "h200"])
@pytest.mark.parametrize("heads, columns", [(3, 64), (4, 128)])
def test_attention_over_caches_is_short(
    target: str, kv: str, heads: int, columns: int, tmp_path: Path
) -> None:
    """Of one query, and of many: what threads keep stays in registers but for four words, which no
    inner loop touches; values are read in the longest pieces that a thread's columns are.
    """
    gpu = find_profile(target).gpu
    try:
        compiler = find_compiler(gpu)
        find_tool("nvdisasm")
    except BuildError as error:
        pytest.skip(str(error))
    sizes = replace(CONFIG, layers=1, heads=heads, width=heads * columns)
    path = small_llama(tmp_path / "llama.onnx", sizes)
    plan = pipeline.plan(path, target=target, scheme="float", search=False, kv=kv)
    part = read(pipeline.scheduled(plan))
    names = [name for name in part.graph.kernels() if name.startswith("cache")]
    _, code = split(part.mod, names, part.target, tmp_path)
    kernels = disassemble(compiler.image(code, gpu.sm))
    one, many, join = (kernels[f"cached_attention_kernel{end}"] for end in ("", "_1", "_2"))
    assert one.registers <= 80 and many.registers <= 160 and join.registers <= 48
    assert one.local_bytes <= 16 and many.local_bytes == join.local_bytes == 0
    piece = "LDG.E.128" if (kv, columns) == ("f32", 128) else "LDG.E.64"
    if (kv, columns) != ("f16", 64):
        assert one.text.count(piece) >= 8 and many.text.count(piece) >= 4
    assert all(kernels[f"cache{end}_kernel"].registers <= 32 for end in ("", "1"))


PTX = """
.visible .entry products(.param .u64 x) {
  mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%r1, %r2, %r3, %r4}, ...;
}
.entry bits(.param .u64 x) {
  mma.sync.aligned.m16n8k256.row.col.s32.b1.b1.s32.xor.popc {%r1, %r2, %r3, %r4}, ...;
}
.entry halves() { mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%f1}, ...; }
.entry plain() { ret; }
"""


def test_native_products() -> None:
    """Emulated products have other shapes, types or operations (as ptxas 12.9 writes them)."""
    wanted = written(PTX)
    assert wanted == {
        "products": {"IMMA.16832.U8.S8"},
        "bits": {"BMMA.168256.XOR.POPC"},
        "halves": {"HMMA.16816"},
        "plain": set(),
    }
    both = "IMMA.16832.U8.S8 R4, R8.ROW, R2.COL, R4 ; {}.16832.U8.S8 R4, R8.ROW, R2.COL, R4"
    assert is_native(wanted["products"], both.format("IMMA")) is True
    assert is_native(wanted["products"], "LOP3.LUT R2, R8, R3 ; IMAD R1, R2, R3, R4") is False
    assert is_native(wanted["bits"], "BMMA.168256.XOR.POPC R4, R8.ROW, R2.COL, R4") is True
    assert is_native(wanted["bits"], "BMMA.168256.AND.POPC R4, R8.ROW, R2.COL, R4") is False  # 9.0
    assert is_native(wanted["bits"], "IMMA.16832.U8.U8 R4, R8.ROW, R2.COL, R4") is False  # 12.0
    assert is_native(wanted["halves"], "HMMA.16816.F32 R4, R8, R2, R4") is True
    assert is_native(wanted["plain"], "FFMA R4, R8, R2, R4") is None


def test_what_is_in_flight() -> None:
    """From the read to the first use, over the end of the loop."""
    read = "LDG.E.NA.LTC256B.128.CONSTANT R{}, desc[UR6][R60.64]"
    loop = ["LOP3.LUT R2, R8, R3", read.format(8), "IMMA R4, R12.ROW, R2", read.format(12), "BRA x"]
    assert Loop(tuple(loop), True).loads_in_flight == 2
    assert Loop(tuple(loop), False).loads_in_flight == 2
    late = [read.format(8), "FADD R1, R11, R2", read.format(8), "FADD R1, R9, R2"]
    assert Loop(tuple(late), True).loads_in_flight == 1
    assert Loop(tuple(late), True).pipes == {"memory": 2, "float": 2}


@pytest.mark.parametrize(
    "words, message",
    [
        (("--target", "cuda-auto"), "is no GPU; name one"),
        (("--target", "h200", "--against", "libggml.so"), "--against is for Arm"),
    ],
)
def test_bad_options(words: tuple[str, ...], message: str) -> None:
    result = CliRunner().invoke(app, ["bench", "static", *words])
    assert result.exit_code == 1 and message in result.output.replace("\n", " ")
