"""What a linear layer's kernels ask of memory, counted on the simulated GPU.

The layer is compiled by the pipeline with a checked build of its kernels
(`apq_tvm.codegen.cuda.simulator`), which runs on this machine, and each launch counted
(``simulator/include/cusim_count.h`` says how). Layers too large to simulate in seconds are made
smaller: fewer rows of weights, columns and rows of x, of each enough for whole blocks and rounds.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from apq_tvm.bench.linear import write_model
from apq_tvm.codegen.cuda.simulator import Simulator, build_driver
from apq_tvm.errors import BuildError
from apq_tvm.formats.scheme import parse_scheme
from apq_tvm.types import DeviceProfile

MOST_N, MOST_K, MOST_M = 64, 4096, 64
"""Simulated are no more rows of weights, columns and rows of x: 4 blocks of 16 rows, 2 of 32."""


def most_rows(scheme: str) -> int:
    """`MOST_N`, less what is no whole block of 48 rows where codes of three rows are one."""
    parsed = parse_scheme(scheme)
    whole = 48 if parsed is not None and parsed.family == "balance" else 1
    return MOST_N // whole * whole


_NAME = "linear"

_RUN = f"""
import sys, {_NAME}, numpy as np
rows, columns, bits = map(int, sys.argv[1:])
if bits:
    {_NAME}.set_precision(bits)
x = np.random.default_rng(rows).standard_normal((rows, columns)).astype(np.float32)
{_NAME}.run(x=x)
"""


@dataclass(frozen=True)
class Counts:
    """What one launch asks of memory, and the least that it could.

    Parameters
    ----------
    kernel : str
        As in the image.
    dram_bytes : int
        In distinct sectors of 32 bytes of the device's memory that it reads or writes.
    sectors, ideal_sectors : int
        That warps' instructions touch, and that the bytes they ask for would fill.
    shared_waves, ideal_waves : int
        Accesses of shared memory, and those without conflicts of banks.
    """

    kernel: str
    dram_bytes: int
    sectors: int
    ideal_sectors: int
    shared_waves: int
    ideal_waves: int


def read_counts(file: Path) -> list[Counts]:
    """Read what the driver wrote (``CUSIM_COUNTS``), a launch a line."""
    names = Counts.__dataclass_fields__
    lines = map(json.loads, file.read_text().splitlines())
    return [Counts(**{name: line[name] for name in names}) for line in lines]


def why_not() -> str:
    """Why nothing can be counted on this machine; empty if it can."""
    return "" if shutil.which("g++") else "g++, which compiles for the simulated GPU, is missing"


_FIGURES = (
    ("dram_bytes", "ideal_dram_bytes"),
    ("sectors", "ideal_sectors"),
    ("shared_waves", "ideal_waves"),
)

UNCOUNTED: Mapping[str, Any] = dict.fromkeys(
    ["simulated", "simulated_m", *chain(*_FIGURES), "preparation"]
)
"""`CountedLayer.row` where nothing can be counted."""


class CountedLayer:
    """A layer of the size that is simulated, with its kernels for a simulated GPU.

    Parameters
    ----------
    n, k : int
        Of the real layer; the attributes `n` and `k` are what is simulated.
    scheme : str
    profile : DeviceProfile
    folder : Path
        Receives module and driver.

    Raises
    ------
    ApqError
        A scheme is unknown, or a compiler is missing or failed.
    """

    def __init__(self, n: int, k: int, scheme: str, profile: DeviceProfile, folder: Path) -> None:
        from apq_tvm import pipeline
        from apq_tvm.codegen.emit import emit
        from apq_tvm.manifest import describe

        self.n, self.k = min(n, most_rows(scheme)), min(k, MOST_K)
        self._folder, self._gpu = folder, profile.gpu
        model = folder / "linear.onnx"
        weight = np.random.default_rng(n + k).standard_normal((self.n, self.k)).astype(np.float32)
        write_model(model, weight)
        plan = pipeline.plan(model, target=profile.name, scheme=scheme, search=False)
        plan = replace(plan, profile=_hosted_here(plan.profile))
        self._made = pipeline.scheduled(plan)
        extra = describe(plan, (self._made,))
        emit(self._made, folder / _NAME, extra, images=Simulator(checked=True))
        self._tensor = next(iter(plan.quantized.tensors.values()), None)
        self._driver = build_driver(folder)

    def run(self, m: int, bits: int) -> list[Counts]:
        """Count the launches of a run of `m` rows at a run-time width, 0 for none.

        Raises
        ------
        BuildError
            The kernels are wrong; what the checked build says.
        """
        assert self._gpu is not None
        file = self._folder / f"{m}_{bits}.jsonl"
        env = {"LD_LIBRARY_PATH": str(self._driver.parent), "CUSIM_COUNTS": str(file)}
        done = subprocess.run(
            [sys.executable, "-c", _RUN, *map(str, (m, self.k, bits))],
            cwd=self._folder,
            env={**os.environ, **env, "CUSIM_SM": str(self._gpu.sm)},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise BuildError(f"the layer {self.n}x{self.k}, simulated: {done.stderr[-4000:]}")
        return read_counts(file)

    def row(self, m: int, bits: int) -> dict[str, Any]:
        """Describe the launches of a run.

        Returns
        -------
        dict
            ``simulated`` (NxK), ``simulated_m``, and of the product ``dram_bytes,
            ideal_dram_bytes, sectors, ideal_sectors, shared_waves, ideal_waves``; the same of
            what quantizes x as ``preparation``, None if nothing does.
        """
        m = min(m, MOST_M)
        launches = self.run(m, bits)
        lowered = self._made.lowered
        product = _of(launches, lowered.linears)
        preparation = _of(launches, lowered.preparations)
        assert product is not None
        weights = self._weight_bytes(bits)
        return {
            **UNCOUNTED,
            "simulated": f"{self.n}x{self.k}",
            "simulated_m": m,
            **_described(product[1], weights + self._moved(product[0], m)),
            "preparation": preparation
            and _described(preparation[1], self._moved(preparation[0], m)),
        }

    def _weight_bytes(self, bits: int) -> int:
        from apq_tvm.formats import nbytes_at

        if self._tensor is None:
            return 4 * self.n * self.k
        scheme = self._tensor.scheme
        return nbytes_at(self._tensor, bits or (scheme.bits if scheme.min_bits else 0))

    def _moved(self, function: str, m: int) -> int:
        """Bytes of a function's arrays that have as many rows as x: `m` rows' share of them."""
        moved = 0
        for array in self._made.mod[function].params:
            few, many = (
                int(np.prod([sized(extent, rows) for extent in array.shape]))
                for rows in (MOST_M, 2 * MOST_M)
            )
            moved += (many - few) * m // MOST_M * np.dtype(str(array.dtype)).itemsize
        return moved


def sized(extent: Any, m: int) -> int:
    """The value of an expression over one variable, of which there are `m`."""
    from tvm import sym, tirx
    from tvm_ffi import structural_map

    rows = structural_map(extent, (tirx.Var, lambda _: tirx.const(m, "int64")))
    return int(sym.Analyzer().simplify(rows))


def _hosted_here(profile: DeviceProfile) -> DeviceProfile:
    """The GPU in this machine, which runs the simulated one."""
    host = {"kind": "llvm", "mtriple": f"{os.uname().machine}-linux-gnu"}
    return replace(profile, target={**profile.target, "host": host})


def _of(launches: list[Counts], functions: Iterable[str]) -> tuple[str, Counts] | None:
    """The function of some that was launched, and its launch."""
    from apq_tvm.codegen.graph.c_text import identifier

    for name in functions:
        for launch in launches:
            if launch.kernel == f"{identifier(name)}_kernel":
                return name, launch
    return None


def _described(counts: Counts, ideal: int) -> dict[str, int]:
    figures = asdict(counts) | {"ideal_dram_bytes": ideal}
    return {name: figures[name] for name in chain(*_FIGURES)}
