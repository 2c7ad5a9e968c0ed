"""Compiled modules for another machine, run under qemu-user from their static library; a model."""

from __future__ import annotations

import shutil
import struct
import subprocess
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from apq_tvm.bench.emulator import COMPILERS, EMULATORS, INSTALL
from apq_tvm.codegen.graph_c import DL_CODES
from apq_tvm.module import read_manifest
from apq_tvm.types import Array
from tests.onnx_models import build, rand, save

WIDTH, WORDS = 64, 40
"""Of the model `words_model`."""

SOURCE = Path(__file__).parent / "embed" / "run_file.c"
_CC, _QEMU = COMPILERS["aarch64"], EMULATORS["aarch64"]
_lacking = [tool for tool in (_CC, _QEMU) if shutil.which(tool) is None]

needs_qemu = pytest.mark.skipif(
    bool(_lacking), reason=f"{', '.join(_lacking)} not on PATH: {INSTALL}"
)
"""For tests that compile and run aarch64 programs."""


class Refused(Exception):
    """The module did not open or run: its return code and message."""


class ArmModule:
    """A module of this folder, linked into a program.

    Parameters
    ----------
    path : Path
        What `apq_tvm.compile` wrote.
    work : Path
        Folder for the program and its files.
    """

    def __init__(self, path: Path, work: Path) -> None:
        self.path, self.manifest = path, read_manifest(path)
        self._work, name = work, self.manifest["name"]
        self._program = work / "run_file"
        command = [
            _CC, "-Wall", "-Wextra", "-Werror", "-static", f"-I{path}", f"-DNAME={name}",
            f'-DHEADER="{name}.h"', str(SOURCE), str(path / f"lib{name}.a"), "-lm", "-ldl",
            "-lpthread", "-o", str(self._program),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        self.target = ""
        """The device whose code ran last."""

    def run(self, feeds: Mapping[str, Array], cpu: str = "max", bits: int = 0) -> dict[str, Array]:
        """Outputs by name, on a processor that qemu knows; raises `Refused`."""
        calls, results = self._work / "calls", self._work / "results"
        inputs, outputs = self.manifest["inputs"], self.manifest["outputs"]
        given = [np.ascontiguousarray(feeds[port["name"]]) for port in inputs]
        parts = [struct.pack("<ii", bits, len(given))]
        for array in given:
            parts += [_header(array.dtype, array.shape), array.tobytes()]
        parts.append(struct.pack("<i", len(outputs)))
        parts += [_header(np.dtype(p["dtype"]), (0,) * len(p["shape"])) for p in outputs]
        calls.write_bytes(b"".join(parts))
        weights = self.path / "weights.safetensors"
        command = [_QEMU, "-cpu", cpu, self._program, weights, calls, results]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 1:
            raise Refused(done.stderr)
        assert done.returncode == 0, f"ended with {done.returncode}: {done.stderr}"
        self.target = done.stdout.strip()
        return _read(results.read_bytes(), outputs)


def _header(dtype: np.dtype, shape: tuple[int, ...]) -> bytes:
    code = DL_CODES[dtype.name.rstrip("0123456789")]
    head = struct.pack("<BBHi", code, 8 * dtype.itemsize, 1, len(shape))
    return head + struct.pack(f"<{len(shape)}q", *shape)


def _read(data: bytes, ports: list[dict[str, object]]) -> dict[str, Array]:
    at, results = 0, {}
    for port in ports:
        rank, dtype = len(port["shape"]), np.dtype(port["dtype"])
        shape = struct.unpack_from(f"<{rank}q", data, at)
        at += 8 * rank
        count = int(np.prod(shape))
        results[port["name"]] = np.frombuffer(data, dtype, count, at).reshape(shape)
        at += count * dtype.itemsize
    return results


def words_model(folder: Path) -> Path:
    """An ONNX file: words in, attention and a feed-forward layer with its residual out."""
    weights = {
        "table": rand(WORDS, WIDTH),
        "wq": rand(WIDTH, WIDTH, seed=1) / 8,
        "wk": rand(WIDTH, WIDTH, seed=2) / 8,
        "gain": 1 + rand(WIDTH, seed=3) / 4,
        "shift": rand(WIDTH, seed=4),
        "w1": rand(WIDTH, 2 * WIDTH, seed=5) / 8,
        "b1": rand(2 * WIDTH, seed=6),
        "w2": rand(2 * WIDTH, WIDTH, seed=7) / 11,
    }
    nodes = [
        ("Gather", "table ids", "x"),
        ("MatMul", "x wq", "q"),
        ("MatMul", "x wk", "k"),
        ("Transpose", "k", "kt", {"perm": [0, 2, 1]}),
        ("MatMul", "q kt", "scores"),
        ("Softmax", "scores", "p", {"axis": -1}),
        ("MatMul", "p x", "a"),
        ("Add", "a x", "r"),
        ("LayerNormalization", "r gain shift", "n", {"axis": -1}),
        ("MatMul", "n w1", "h"),
        ("Add", "h b1", "hb"),
        ("Relu", "hb", "g"),
        ("MatMul", "g w2", "m"),
        ("Add", "m n", "y"),
    ]
    inputs = {"ids": ("int64", ["batch", "length"])}
    return save(build(nodes, inputs, "y", weights), folder)


def cosine(a: Array, b: Array) -> float:
    a, b = a.astype(np.float64), b.astype(np.float64)
    return float((a * b).sum() / np.sqrt((a * a).sum() * (b * b).sum()))
