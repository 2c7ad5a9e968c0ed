"""The probes of a machine's limits on 64-bit Arm: they read and multiply what they say, in qemu."""

from __future__ import annotations

from pathlib import Path

import pytest
from arm_tools import needs_qemu

from apq_tvm.bench.emulator import COMPILERS, emulator
from apq_tvm.bench.roofline import SOURCE
from apq_tvm.bench.trace import run

MAIN = """
#include <stdio.h>
#include "%s"
int main(void) {
    static uint64_t words[1024];
    for (int i = 0; i < 1024; ++i) words[i] = (uint64_t)i << 40;
    const uint8_t *p = (const uint8_t *)words;
    printf("%%llu %%llu ", (unsigned long long)(apq_read(p, sizeof words, 2, 0) >> 40),
           (unsigned long long)(apq_read(p, sizeof words, 1, 64) >> 40));
    printf("%%llu ", (unsigned long long)(apq_read_again(p, sizeof words, 2, 3) >> 40));
    printf("%%g %%ld ", apq_int8(10, 1), apq_int8_macs(10));
    printf("%%g %%ld\\n", apq_fp32(10, 2), apq_fp32_macs(10));
    return 0;
}
"""
SUM, SUMS = 1024 * 1023 // 2, 16
"""Of the words; independent sums of the arithmetic."""


@needs_qemu
@pytest.mark.parametrize(
    ("march", "a_lane", "lanes"),
    [("armv8-a", 2, 4), ("armv8.2-a+dotprod", 4, 4), ("armv8.6-a+i8mm", 8, 4)],
)
def test_probes(march: str, a_lane: int, lanes: int, tmp_path: Path) -> None:
    (tmp_path / "main.c").write_text(MAIN % SOURCE)
    program = tmp_path / "main"
    flags = ["-O3", f"-march={march}", "-fopenmp", "-static", "-Wall", "-Wextra", "-Werror"]
    run([COMPILERS["aarch64"], *flags, str(tmp_path / "main.c"), "-o", str(program)])
    words = run([*emulator("aarch64", "max"), str(program)]).split()
    assert words[:3] == [str(SUM), str(SUM), str(3 * SUM)]
    int8, int8_macs, fp32, fp32_macs = map(float, words[3:])
    assert int8 == 10 * SUMS * a_lane * 3 * 5
    assert int8_macs == 10 * SUMS * a_lane * lanes
    assert fp32 == 2 * 10 * SUMS * 4 * 0.5 * 0.25
    assert fp32_macs == 10 * SUMS * 4
