"""C files of the runtime, compiled once in a session: every module that a test emits has the same.

What is the same is the whole command, the source and every header beside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest


@pytest.fixture(scope="session", autouse=True)
def compiled_once() -> Iterator[None]:
    """Give `compile_sources` the object that the same command made before."""
    from apq_tvm.codegen.build import library

    plain, objects = library.run, dict[object, bytes]()

    def run(command: Sequence[str]) -> str:
        if "-c" not in command:
            return plain(command)
        source, output = Path(command[-3]), Path(command[-1])
        headers = sorted(source.parent.glob("*.h"))
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
