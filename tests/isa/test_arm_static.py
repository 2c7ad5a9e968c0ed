"""`bench static` with its tools: counts are exact and repeat, cycles are llvm-mca's, rivals run."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from arm_tools import needs_cross
from typer.testing import CliRunner

from apq_tvm.bench.arm.ggml import call, find_products
from apq_tvm.bench.arm.mca import find_analyser
from apq_tvm.bench.arm.static import bench_static
from apq_tvm.bench.linear import LinearCase
from apq_tvm.bench.trace import INSTALL, QEMU, executed, functions, symbols, trace
from apq_tvm.cli.main import app
from apq_tvm.errors import ApqError, BadInput
from apq_tvm.formats import parse_scheme
from apq_tvm.schedules.arm import profiles as arm

pytestmark = [
    needs_cross,
    pytest.mark.skipif(shutil.which(QEMU) is None, reason=f"{QEMU} is not on PATH: {INSTALL}"),
]


def _missing_mca() -> str:
    try:
        find_analyser("neoverse-n1")
    except ApqError as error:
        return str(error)
    return ""


needs_mca = pytest.mark.skipif(bool(_missing_mca()), reason=_missing_mca())

COUNTED = r"""
#include <stdlib.h>
__attribute__((noinline)) void apq_trace_begin(void) { __asm__ volatile(""); }
__attribute__((noinline)) void apq_trace_end(void) { __asm__ volatile(""); }
void loops(long outer, long inner);
__asm__(".type loops, %function\nloops: mov x2, x1\n2: nop\n subs x2, x2, #1\n b.ne 2b\n"
        " subs x0, x0, #1\n b.ne loops\n ret\n.size loops, .-loops");
int main(int argc, char **argv) {
  if (argc != 3) return 1;
  long outer = atol(argv[1]), inner = atol(argv[2]);
  loops(2, 2);
  apq_trace_begin();
  loops(outer, inner);
  apq_trace_end();
  loops(2, 2);
  return 0;
}
"""


def compile_c(source: str, path: Path, *options: str) -> Path:
    code = path.with_suffix(".c")
    code.write_text(source)
    command = ["aarch64-linux-gnu-gcc", "-O2", str(code), *options, "-o", str(path)]
    subprocess.run(command, check=True)
    return path


def test_a_trace_counts_every_instruction_between_the_markers(tmp_path: Path) -> None:
    program = compile_c(COUNTED, tmp_path / "counted", "-static")
    for outer, inner in ((1, 1), (3, 1), (7, 1000)):
        counted = trace(program, [str(outer), str(inner)], tmp_path)
        assert counted.instructions == outer * (3 + 3 * inner) + 1
        code = executed(program, symbols(program), counted)
        texts = [(i.text.split()[0], i.count) for i in code if i.function == "loops"]
        assert texts == [
            ("mov", outer), ("nop", outer * inner), ("subs", outer * inner),
            ("b.ne", outer * inner), ("subs", outer), ("b.ne", outer), ("ret", 1),
        ]  # fmt: skip


def test_code_without_a_symbol_belongs_to_a_function(tmp_path: Path) -> None:
    source = 'void a(void) { } __asm__(".text\\n nop\\n nop"); void b(void) { }'
    path = compile_c(source, tmp_path / "a.o", "-c", "-fno-toplevel-reorder")
    found = functions(path, 0x1000)
    sizes = {f.name: f.size for f in found}
    assert {"a", "b"} <= set(sizes) and sum(sizes.values()) >= 16
    assert any(name.startswith("unnamed") and size >= 8 for name, size in sizes.items())
    ends = [f.address + f.size for f in found]
    assert [f.address for f in found[1:]] == ends[:-1] and found[0].address == 0x1000


@needs_mca
def test_peaks_of_profiles_are_llvm_mcas() -> None:
    """Independent dot products reach the stated peak, where LLVM has the core's own model."""
    macs, checked = {"sdot": 16, "smmla": 32}, set()
    for profile in arm.PROFILES:
        mcpu = str(profile.target["mcpu"])
        analyser = find_analyser(mcpu)
        if mcpu != "generic":
            summary = analyser._run("nop\n", 1)["CodeRegions"][0]["SummaryView"]
            assert summary["DispatchWidth"] == profile.issue_width, mcpu
        model = analyser.model().upper().removeprefix("CORTEX")
        if not mcpu.upper().endswith(f"-{model}"):
            continue  # LLVM takes another core's
        for name in macs.keys() & profile.macs_per_cycle.keys():
            text = "".join(f"{name} v{i}.4s, v30.16b, v31.16b\n" for i in range(24))
            rate = 24 * macs[name] / analyser._steady(text)[0]
            assert rate == pytest.approx(profile.macs_per_cycle[name], rel=0.02), mcpu
            checked.add((mcpu, name))
    assert {("neoverse-n1", "sdot"), ("neoverse-v1", "smmla"), ("cortex-a55", "sdot")} <= checked


@pytest.mark.all_cases
@needs_mca
def test_rows_repeat_and_add_up(tmp_path: Path) -> None:
    cases = [LinearCase(n, 64, 1, "W4A8g32", 1) for n in (32, 64)]
    rows = bench_static(cases, target="graviton3", keep=tmp_path)
    assert bench_static(cases[:1], target="graviton3") == rows[:1]
    assert rows[1]["instructions"] > rows[0]["instructions"] > 32 * 64 / 32
    for row in rows:
        n, k = map(int, row["shape"].split("x"))
        assert row["macs_per_cycle"] == n * k / row["cycles"]
        assert 0 < row["peak_share"] < 1 and 0.9 < row["judged_share"] <= 1
        assert row["error"] < 0.02 and row["prepare_instructions"] > 0
        assert row["target"] == "graviton3" and row["model"] == "V1"
    kept = (tmp_path / f"{rows[0]['kernel']}_32x64_W4A8g32_m1.s").read_text()
    assert re.search(r"fml[as]|fmul", kept), "the judged code scales"
    counts = re.findall(r"executed (\d+) times; ([\d.e+]+) cycles each", kept)
    total = sum(int(count) * float(cycles) for count, cycles in counts)
    assert total == pytest.approx(rows[0]["cycles"], rel=1e-4)


# What ggml's functions are to compute, by its own layouts, for a library to call.
REFERENCE = r"""
#include <math.h>
#include <stddef.h>
#include <stdint.h>
static float half(const char *p) { __fp16 h; __builtin_memcpy(&h, p, 2); return h; }
static void product(int k, float *y, size_t stride, const char *w, const char *x, int rows, int n,
                    int tile) {
  int blocks = k / 32, wsize = 4 * 18, xsize = tile * 34;
  for (int m = 0; m < rows; m++)
    for (int c = 0; c < n; c++) {
      float sum = 0;
      for (int b = 0; b < blocks; b++) {
        const char *wb = w + (c / 4 * blocks + b) * wsize;
        const char *xb = x + (m / tile * blocks + b) * xsize;
        int chunk = tile == 1 ? 32 : 4, dot = 0;
        for (int i = 0; i < 32; i++) {
          int8_t byte = wb[8 + i % 16 / 4 * 16 + c % 4 * 4 + i % 4];
          int code = i < 16 ? (int8_t)(byte << 4) >> 4 : byte >> 4;
          int at = i / chunk * chunk * tile + m % tile * chunk + i % chunk;
          dot += code * (int8_t)xb[2 * tile + at];
        }
        sum += dot * half(wb + c % 4 * 2) * half(xb + m % tile * 2);
      }
      y[m * stride + c] = sum;
    }
}
void ggml_gemv_q4_0_4x4_q8_0(int k, float *y, size_t s, const void *w, const void *x, int m, int n)
{ product(k, y, s, w, x, m, n, 1); }
void ggml_gemm_q4_0_4x4_q8_0(int k, float *y, size_t s, const void *w, const void *x, int m, int n)
{ product(k, y, s, w, x, m, n, 4); }
static void quantize(const float *x, char *to, int64_t k, int rows) {
  int chunk = rows == 1 ? 32 : 4;
  for (int64_t b = 0; b < k / 32; b++, to += rows * 34)
    for (int r = 0; r < rows; r++) {
      float largest = 0;
      for (int i = 0; i < 32; i++) largest = fmaxf(largest, fabsf(x[r * k + b * 32 + i]));
      __fp16 scale = largest / 127;
      __builtin_memcpy(to + 2 * r, &scale, 2);
      for (int i = 0; i < 32; i++)
        to[2 * rows + i / chunk * chunk * rows + r * chunk + i % chunk] =
            (char)lrintf(x[r * k + b * 32 + i] * 127 / largest);
    }
}
void quantize_row_q8_0(const float *x, void *to, int64_t k) { quantize(x, to, k, 1); }
void ggml_quantize_mat_q8_0_4x4(const float *x, void *to, int64_t k) { quantize(x, to, k, 4); }
void other(void) { }
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rival") / "libggml-cpu.so"
    return compile_c(REFERENCE, path, "-shared", "-fPIC", "-march=armv8.2-a+fp16", "-lm")


@pytest.mark.parametrize("m", [1, 4, 6])
def test_rivals_compute_what_ggml_defines(library: Path, m: int, tmp_path: Path) -> None:
    (product,) = find_products(str(library), parse_scheme("W4A8g32"))
    ran, prepared, error = call(product, 8, 64, m, tmp_path, "max")
    assert 0 < error < 0.02  # what rounding the activations costs
    names = {i.function for i in ran.code}
    assert {name.split("_")[1] for name in names if name.startswith("ggml")} == (
        {"gemv"} if m == 1 else {"gemm"} if m == 4 else {"gemv", "gemm"}
    )
    assert any("quantize" in i.function for i in prepared.code)
    again, _, _ = call(product, 8, 64, m, tmp_path, "max")
    assert again.counted.instructions == ran.counted.instructions > 8 * 64 * m


def test_rivals_that_do_not_fit_are_refused(library: Path, tmp_path: Path) -> None:
    scheme = parse_scheme("W4A8g32")
    assert find_products(str(library), parse_scheme("W4A8g64")) == []
    assert len(find_products(f"{library}:ggml_gemm_q4_0_4x4_q8_0", scheme)) == 1
    with pytest.raises(BadInput, match="does not define nothing"):
        find_products(f"{library}:nothing", scheme)
    with pytest.raises(BadInput, match="can call ggml_gemv_q4_0_4x4_q8_0 and its like"):
        find_products(f"{library}:other", scheme)
    (product,) = find_products(str(library), scheme)
    with pytest.raises(BadInput, match="6x64 is no multiple of 4x32"):
        call(product, 6, 64, 1, tmp_path, "max")


@needs_mca
def test_command_prints_ours_and_the_rival(library: Path) -> None:
    options = ["--target", "graviton2", "--shape", "8x64", "--against", str(library), "--json"]
    result = CliRunner().invoke(app, ["bench", "static", *options])
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    ours, theirs = document
    assert ours["object"] == "" and theirs["object"] == "libggml-cpu.so"
    wanted = {"shape", "m", "scheme", "kernel", "instructions", "cycles", "macs_per_cycle"}
    for row in (ours, theirs):
        assert wanted <= row.keys() and np.isfinite(row["peak_share"])
    assert theirs["instructions_ratio"] == ours["instructions"] / theirs["instructions"]
