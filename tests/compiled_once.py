"""What modules have in common, compiled once in a session: the runtime's C, and equal kernels.

Of C the same is the whole command, the source, every header and image beside it; of kernels the
functions, their names and the target.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tvm_ffi import structural_hash


@pytest.fixture(scope="session", autouse=True)
def compiled_once() -> Iterator[None]:
    """Give `compile_sources` the object that the same command made before."""
    from apq_tvm.codegen.build import library

    plain, objects = library.run, dict[object, bytes]()

    def run(command: Sequence[str]) -> str:
        if "-c" not in command:
            return plain(command)
        source, output = Path(command[-3]), Path(command[-1])
        headers = sorted((*source.parent.glob("*.h"), *source.parent.glob("*.image")))
        folders = [word for word in command[:-4] if not word.startswith("-I")]
        key = (*folders, source.name, *((p.name, p.read_bytes()) for p in (source, *headers)))
        if key in objects:
            output.write_bytes(objects[key])
            return ""
        printed = plain(command)
        objects[key] = output.read_bytes()
        return printed

    library.run = run
    yield
    library.run = plain


@pytest.fixture(scope="session", autouse=True)
def built_once() -> Iterator[None]:
    """Give `build_kernels` the object of the same functions for the same target."""
    from apq_tvm.codegen.build import kernels

    plain, objects = kernels._build_object, dict[object, bytes]()

    def build(mod: Any, names: Sequence[str], target: Any, *options: Any) -> bytes:
        functions = ((name, structural_hash(mod[name])) for name in names)
        key = (str(target), *options, *functions)
        if key not in objects:
            objects[key] = plain(mod, names, target, *options)
        return objects[key]

    kernels._build_object = build
    yield
    kernels._build_object = plain
