"""What modules have in common, made once in a run: objects of C, C++ and equal kernels, GPU images.

Of C and C++ the same is the whole command, the source, every header and image beside it; their
objects lie in a folder of both workers. Of kernels the functions, their names and the target.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tvm_ffi import structural_hash

Run = Callable[[Sequence[str]], str]

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def objects(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of all workers."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "objects"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session", autouse=True)
def compiled_once(objects: Path) -> Iterator[None]:
    """Give `compile_sources` and the simulator what the same command made before."""
    from apq_tvm.codegen.build import library
    from apq_tvm.codegen.cuda import simulator

    plain = library.run, simulator.run
    library.run, simulator.run = (_stored(run, objects) for run in plain)
    yield
    library.run, simulator.run = plain


def _stored(plain: Run, folder: Path) -> Run:
    """`plain`, whose objects and images go into a folder; commands of one source alone, and nm."""

    def run(command: Sequence[str]) -> str:
        if len(command) == 2 and Path(command[0]).name.endswith("nm"):
            return _listed(plain, command, folder)
        sources = [word for word in command if word.endswith((".c", ".cc"))]
        if len(sources) != 1 or "-o" not in command:
            return plain(command)
        source, output = Path(sources[0]), Path(command[command.index("-o") + 1])
        stored = folder / _key(command, source, output)
        if stored.exists():
            output.write_bytes(stored.read_bytes())
            return ""
        printed = plain(command)
        _store(stored, output.read_bytes())
        return printed

    return run


def _listed(plain: Run, command: Sequence[str], folder: Path) -> str:
    """Symbols of an object, whose bytes say them wherever it lies."""
    data = Path(command[1]).read_bytes()
    stored = folder / hashlib.sha256(command[0].encode() + b" " + data).hexdigest()
    if not stored.exists():
        _store(stored, plain(command).encode())
    return stored.read_text()


def _store(path: Path, data: bytes) -> None:
    """Whole, for the other worker."""
    written = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}")
    written.write_bytes(data)
    written.replace(path)


def _key(command: Sequence[str], source: Path, output: Path) -> str:
    """Equal for commands that make the same, wherever source and output lie."""
    here = str(source.parent)
    words = [w.replace(str(output), "").replace(here, "") for w in command if _stays(w, here)]
    found = hashlib.sha256(repr(words).encode())
    beside = (path for end in ("*.h", "*.image") for path in sorted(source.parent.glob(end)))
    for path in (source, *beside):
        data = path.read_bytes()
        found.update(f"{path.name} {len(data)} ".encode() + data)
    return found.hexdigest()


def _stays(word: str, here: str) -> bool:
    """Not a folder of one module, which has headers for its own sources alone."""
    return not word.startswith("-I") or word == f"-I{here}" or word.startswith(f"-I{ROOT}")


@pytest.fixture(scope="session", autouse=True)
def images_once() -> Iterator[None]:
    """Give NVRTC's image of the same text for the same architecture: many devices have one."""
    from apq_tvm.codegen.cuda.nvrtc import Nvrtc

    plain = Nvrtc.compile
    Nvrtc.compile = cache(plain)  # type: ignore[method-assign]
    yield
    Nvrtc.compile = plain  # type: ignore[method-assign]


@pytest.fixture(scope="session", autouse=True)
def built_once(objects: Path) -> Iterator[None]:
    """Give `build_kernels` an object for each kernel: that of the same function for the target.

    Models of one family have most kernels in common, whatever else they have.
    """
    from apq_tvm.codegen.build import kernels

    plain, several = kernels._build_object, kernels._KERNELS_PER_OBJECT

    def build(mod: Any, names: Sequence[str], target: Any, *options: Any) -> bytes:
        functions = [(name, structural_hash(mod[name])) for name in names]
        key = hashlib.sha256(repr((str(target), options, functions)).encode()).hexdigest()
        stored = objects / key
        if not stored.exists():
            _store(stored, plain(mod, names, target, *options))
        return stored.read_bytes()

    kernels._build_object, kernels._KERNELS_PER_OBJECT = build, 1
    yield
    kernels._build_object, kernels._KERNELS_PER_OBJECT = plain, several
