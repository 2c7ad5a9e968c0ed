"""A workshop whose candidates are only names: what the search and the session need of one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from apq_tvm.tune.candidates import Built
from apq_tvm.tune.space import Point


class FakeBatch:
    """Writes nothing."""

    def __init__(self, symbols: Sequence[str]) -> None:
        self._symbols = list(symbols)

    def functions(self) -> list[str]:
        return self._symbols

    def write(self, path: Path, cold_bytes: int) -> None:
        path.write_text("")


def symbol(point: Point) -> str:
    """A name without spaces."""
    parts = [point.kernel, *(f"{n}={v}" for n, v in point.decisions)]
    return ";".join(parts).replace(" ", "")


class FakeWorkshop:
    """Builds nothing; `refused` are points that it declines."""

    loose = 1.0

    def __init__(
        self, task: Any = None, folder: Any = None, threads: int = 1, refused: Sequence[Point] = ()
    ) -> None:
        self.task = task or SimpleNamespace(name="fake task")
        self._refused = set(refused)

    def build(self, points: Sequence[Point]) -> Iterator[tuple[Point, Built | str]]:
        for point in points:
            if point in self._refused:
                yield point, "refused: it does not fit"
            else:
                yield point, Built(point, symbol(point), (), "0123")

    def batch(self, candidates: Sequence[Built]) -> tuple[Any, list[Path]]:
        return FakeBatch([built.function for built in candidates]), []
