"""What kernels ask of memory, counted: of small ones by hand, of fast ones beside the ideal."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest

from apq_tvm import pipeline
from apq_tvm.bench.gpu.counts import CountedLayer, Counts, read_counts
from apq_tvm.bench.linear import write_model
from apq_tvm.codegen.cuda.simulator import Simulator
from apq_tvm.codegen.cuda.split import DeviceCode, DeviceKernel
from apq_tvm.codegen.cuda.tables import with_own_kernels
from apq_tvm.schedules.devices import find_profile
from tests.e2e.cuda.test_gpu_checked import encoder
from tests.onnx_models import rand
from tests.simulated_gpu import Program

SHARED = "__shared__ alignas(64) float s[1056]; "
ROWS = SHARED + "float sum = 0; for (int i = 0; i < 32; i++) s[{0} * i + t] = x[t]; "
COLUMNS = ROWS + "__syncthreads(); for (int i = 0; i < 32; i++) sum += s[{0} * t + i]; y[t] = sum;"
VIA_FOUR = "__shared__ float4 s[32]; s[t] = ((float4 *)x)[t]; __syncthreads(); {}"
VIA_TWO = "__shared__ float2 s[32]; s[t] = ((float2 *)x)[t]; __syncthreads(); {}"

SECTORS = {
    "y[t] = x[t];": (8, 8, 8),
    "y[t] = x[2 * t];": (12, 8, 12),
    "y[t] = x[t + 1];": (9, 8, 9),
    "y[t] = x[0];": (5, 5, 5),
    "y[t] = x[8 * t];": (36, 8, 36),
    "((float4 *)y)[t] = ((float4 *)x)[t];": (32, 32, 32),
    "float4 v = ((float4 *)x)[t]; y[t] = v.x + v.y + v.z + v.w;": (20, 20, 20),
    "((float2 *)y)[t] = ((float2 *)x)[2 * t];": (24, 16, 24),
    "((char *)y)[t] = ((char *)x)[t];": (2, 2, 2),
    "((char *)y)[t] = ((char *)x)[8 * t];": (9, 2, 9),
    "if (t < 8) y[t] = x[t];": (2, 2, 2),
    # Each execution is an instruction, for the lanes that come there.
    "float sum = 0; for (int i = 0; i <= t / 16; i++) sum += x[32 * i + t]; y[t] = sum;": (
        *(10, 10, 10),
    ),
    # What is read again is asked of caches.
    "float a = x[t]; __syncthreads(); y[t] = a + x[t ^ 1];": (12, 12, 8),
    # What no instruction reads at once is several.
    "struct Many { float of[8]; }; ((Many *)y)[t] = ((Many *)x)[t];": (128, 64, 64),
}
"""One warp → sectors touched, ideally, and of the launch."""

WAVES = {
    COLUMNS.format(32): (32 + 32 * 32, 64),
    COLUMNS.format(33): (64, 64),
    SHARED + "s[t] = x[t]; __syncthreads(); y[t] = s[0];": (2, 2),
    SHARED + "s[t] = x[t]; __syncthreads(); y[t] = s[t / 4 * 4];": (2, 2),
    SHARED + "s[2 * t] = x[t]; __syncthreads(); y[t] = s[62 - 2 * t];": (4, 2),
    VIA_FOUR.format("((float4 *)y)[t] = s[31 - t];"): (8, 8),
    VIA_FOUR.format("y[t] = s[t].x;"): (4 + 4, 4 + 1),
    VIA_TWO.format("((float2 *)y)[t] = s[t ^ 1];"): (4, 4),
    VIA_TWO.format("if (t < 16) ((float2 *)y)[t] = s[2 * t];"): (2 + 2, 2 + 1),
}
"""One warp → accesses of shared memory, and without conflicts."""


LAUNCH = """
import ctypes
from pathlib import Path

driver = ctypes.CDLL("libcuda.so.1")
def call(name, *given):
    assert getattr(driver, name)(*given) == 0, name

context, size = ctypes.c_void_p(), ctypes.c_size_t(1 << 16)
arrays = [ctypes.c_uint64() for _ in "xy"]
call("cuInit", 0)
call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
call("cuCtxPushCurrent_v2", context)
module = ctypes.c_void_p()
call("cuModuleLoadData", ctypes.byref(module), Path("kernels.image").read_bytes())
for number in range(kernels):
    function = ctypes.c_void_p()
    call("cuModuleGetFunction", ctypes.byref(function), module, b"k%d" % number)
    for array in arrays:
        call("cuMemAlloc_v2", ctypes.byref(array), size)
        call("cuMemcpyHtoDAsync_v2", array, bytes(size.value), size, None)
    given = (ctypes.c_void_p * 2)(*map(ctypes.addressof, arrays))
    call("cuLaunchKernel", function, blocks, 1, 1, threads, 1, 1, 0, None, given, None)
"""
"""Launches every kernel of an image; `counted` says before it how many, blocks and threads."""


def counted(
    program: Program, folder: Path, bodies: Iterable[str], blocks: int = 1, threads: int = 32
) -> list[Counts]:
    """Launch small kernels, ``float *x, *y`` and ``t`` the thread."""
    texts = [
        f'extern "C" __global__ void k{number}(float *x, float *y) '
        f"{{ int t = threadIdx.x; {body} }}"
        for number, body in enumerate(bodies)
    ]
    kernels = tuple(DeviceKernel(f"k{number}", "pp", ()) for number in range(len(texts)))
    code = with_own_kernels(DeviceCode("\n".join(texts), kernels))
    (folder / "kernels.image").write_bytes(Simulator(checked=True).image(code, 86))
    sizes = f"kernels, blocks, threads = {len(texts)}, {blocks}, {threads}\n"
    done = program(folder, sizes + LAUNCH, env={"CUSIM_COUNTS": str(folder / "counts.jsonl")})
    assert done.returncode == 0, done.stderr
    return read_counts(folder / "counts.jsonl")


def test_sectors(program: Program, tmp_path: Path) -> None:
    found = counted(program, tmp_path, SECTORS)
    for (body, wanted), counts in zip(SECTORS.items(), found, strict=True):
        assert (counts.sectors, counts.ideal_sectors, counts.dram_bytes // 32) == wanted, body
        assert counts.shared_waves == counts.ideal_waves == 0, body


def test_waves(program: Program, tmp_path: Path) -> None:
    found = counted(program, tmp_path, WAVES)
    for (body, wanted), counts in zip(WAVES.items(), found, strict=True):
        assert (counts.shared_waves, counts.ideal_waves) == wanted, body


def test_warps_and_blocks_are_told_apart(program: Program, tmp_path: Path) -> None:
    """Two blocks of two warps: the lanes of no two are one instruction's."""
    bodies = [f"int i = blockIdx.x * 64 + t; y[i] = x[{at}];" for at in ("i", "t % 32")]
    apart, same = counted(program, tmp_path, bodies, blocks=2, threads=64)
    assert (apart.sectors, apart.ideal_sectors, apart.dram_bytes) == (32, 32, 1024)
    assert (same.sectors, same.ideal_sectors, same.dram_bytes) == (32, 32, 16 * 32 + 128)


FAST = ("W4A8g128", "W3A8g64", "W4zA8g32")
ALIKE = ("W4A8g32", "W8A8", "W2A8g128", "W4A8tg64", "W1A8g128")


@pytest.mark.parametrize(
    "scheme", [*FAST, *(pytest.param(scheme, marks=pytest.mark.all_cases) for scheme in ALIKE)]
)
def test_fast_kernels_ask_for_little_more_than_they_must(
    driver: Path, scheme: str, tmp_path: Path
) -> None:
    """Of memory, of the first cache and of banks; what quantizes x stores factors of groups of 32
    four bytes at a time, and of one row a part of a tile."""
    layer = CountedLayer(64, 2048, scheme, find_profile("h200"), tmp_path)
    for m in (1, 8, 32):
        row = layer.row(m, 0)
        assert row["simulated"] == "64x2048" and row["simulated_m"] == m
        assert row["ideal_dram_bytes"] * 0.99 <= row["dram_bytes"], (m, row)
        assert row["dram_bytes"] <= 1.05 * row["ideal_dram_bytes"], (m, row)
        assert 0 < row["ideal_sectors"] <= row["sectors"] <= 1.1 * row["ideal_sectors"], (m, row)
        assert 0 < row["ideal_waves"] <= row["shared_waves"] <= 1.1 * row["ideal_waves"], (m, row)
        before = row["preparation"]
        small = m > 1 and scheme[-3:] != "g32"
        assert before["dram_bytes"] <= (1.05 if m > 1 else 1.25) * before["ideal_dram_bytes"], row
        assert before["sectors"] <= (1.1 if small else 1.35) * before["ideal_sectors"], (m, row)
        assert before["shared_waves"] <= 1.1 * before["ideal_waves"], (m, row)


RUN = """
import numpy as np, encoder
encoder.run(ids=np.random.default_rng(0).integers(0, 50, (1, 32)))
"""


@pytest.mark.parametrize("scheme", ["W4A8g32", pytest.param("W8A8", marks=pytest.mark.all_cases)])
def test_an_encoder_asks_for_little_more_than_it_must(
    program: Program, scheme: str, tmp_path: Path
) -> None:
    """Normalizations, attention and products, with what quantizes in them."""
    options = {"target": "rtx-3090", "scheme": scheme, "search": False}
    images = Simulator(checked=True)
    pipeline.compile(encoder(tmp_path), tmp_path / "encoder", images=images, **options)
    done = program(tmp_path, RUN, env={"CUSIM_COUNTS": str(tmp_path / "counts.jsonl")})
    assert done.returncode == 0, done.stderr
    for launch in read_counts(tmp_path / "counts.jsonl"):
        most = 1.4 if launch.kernel.startswith("attention") else 1.1
        assert launch.sectors <= most * launch.ideal_sectors, launch
        assert launch.shared_waves <= 1.1 * launch.ideal_waves, launch


@dataclass(frozen=True)
class Noting(Simulator):
    """A checked build whose text is kept."""

    folder: Path = Path()

    def image(self, code: DeviceCode, sm: int) -> bytes:
        (self.folder / "kernels.cu").write_text(code.source)
        return super().image(code, sm)


def test_arrays_hold_what_functions_write(tmp_path: Path) -> None:
    """TVM makes arrays as small as it sees them used; NVRTC drops what lies behind."""
    write_model(tmp_path / "linear.onnx", rand(64, 512))
    noting = Noting(checked=True, folder=tmp_path)
    options = {"target": "rtx-3090", "scheme": "W4zA8g32", "search": False, "images": noting}
    pipeline.compile(tmp_path / "linear.onnx", tmp_path / "linear", **options)
    words = {"apq_read_weights": 4, "apq_read4": 4, "apq_read2": 2, "apq_floats": 2}
    sizes: dict[str, int] = {}
    found = set()
    for line in (tmp_path / "kernels.cu").read_text().splitlines():
        if array := re.match(r"\s*alignas\(64\) \w+ (_ptr\w*)\[(\d+)\];", line):
            sizes[array[1]] = int(array[2])
        if call := re.match(r"\s*(apq_\w+)\(\(&\((_ptr\w*)\[(\d+)\]", line):
            assert int(call[3]) + words.get(call[1], 1) <= sizes[call[2]], line
            found.add(call[1])
    assert found >= set(words)
