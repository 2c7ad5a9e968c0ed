"""Hashes of whole modules: kernels, C sources, packed weights and object code."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import tvm

from apq_tvm import pipeline
from apq_tvm.codegen import emit

from .kernels import func_hash, text_hash

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "examples")]

MODULES = (
    ("demo", "W4A8g32", "znver4"),
    ("decoder", "anyprec2-4", "graviton3"),
    ("decoder", "W3A8g64", "arm-auto"),
)
"""Model, scheme and device."""


def entries(number: int) -> Iterator[tuple[str, str]]:
    """``(key, hash)`` of one module: PrimFuncs, C, weights, and kernels as machine code."""
    model, scheme, target = MODULES[number]
    head = f"module/{model}/{scheme}/{target}"
    sources: dict[str, str] = {}
    compile_sources = emit.compile_sources

    def watch(tools: Any, paths: list[Path], work: Path) -> Any:
        sources.update({path.name: path.read_text() for path in paths})
        return compile_sources(tools, paths, work)

    scheduled = []
    schedule = pipeline.scheduled

    def keep(*args: Any) -> Any:
        scheduled.append(schedule(*args))
        return scheduled[-1]

    with (
        tempfile.TemporaryDirectory(prefix="golden.") as folder,
        mock.patch.object(emit, "compile_sources", watch),
        mock.patch.object(pipeline, "scheduled", keep),
    ):
        path = _model(model, Path(folder))
        made = pipeline.compile(path, Path(folder) / "golden", target=target, scheme=scheme)
        for device, model_of in enumerate(scheduled):
            for gv, func in model_of.mod.functions.items():
                if isinstance(func, tvm.tirx.PrimFunc):
                    yield f"{head}/{device}/{gv.name_hint}", func_hash(func)
        for name, text in sources.items():
            yield f"{head}/{name}", text_hash(text)
        yield f"{head}/weights", text_hash((made.path / "weights.safetensors").read_bytes())
        for member, data in _members(made.path / "libgolden.a"):
            yield f"{head}/{member}", text_hash(data)


def _model(name: str, folder: Path) -> Path:
    if name == "demo":
        import demo_model

        return demo_model.find()
    import tiny_decoder

    return tiny_decoder.write(folder)


def _members(archive: Path) -> Iterator[tuple[str, bytes]]:
    names = subprocess.run(["ar", "t", archive], capture_output=True, text=True, check=True)
    for name in names.stdout.split():
        yield name, subprocess.run(["ar", "p", archive, name], capture_output=True).stdout
