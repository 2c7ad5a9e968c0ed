"""What an instruction set adds to the meaning of kernels on bitplanes: five times instructions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from apq_tvm.tensorize.exprs import Buffer
from apq_tvm.tensorize.meaning.planes import (
    PlanesStep,
    planes_codes,
    planes_dot,
    planes_lookup,
    rows_dot,
    table_dot,
)
from apq_tvm.tensorize.meaning.scaffold import Meaning, pair
from apq_tvm.tensorize.registry import register


@dataclass(frozen=True)
class PlanesInstruction(ABC):
    """How codes are looked up and multiplied.

    Its methods without an underscore register (once) and name an intrinsic of a meaning of
    `apq_tvm.tensorize.meaning.planes`; those that emit get a step and the buffers of its operands.

    Parameters
    ----------
    name : str
        Part of the names of kernels and intrinsics.
    vector : int
        Bytes of a register.
    offset : int
        What centroids are increased by.
    features : tuple of str
        LLVM features it needs, all of them.
    """

    name: str
    vector: int
    offset: int
    features: tuple[str, ...]

    def step(
        self, bits: int, tables: int, k: int, group: int = 0, divided: bool = False
    ) -> PlanesStep:
        """A step for this instruction; parameters as there."""
        return PlanesStep(bits, tables, k, self.vector, self.offset, group, divided)

    def dot(self, step: PlanesStep, ahead: int = 0) -> str:
        """`planes_dot`, with every plane prefetched `ahead` bytes."""
        prefetch = f"_pf{ahead}" if ahead else ""
        emit = partial(self.emit_dot, step, ahead)
        return self._register(f"planes_{step}{prefetch}", planes_dot(step), emit)

    def lookup(self, step: PlanesStep, ahead: int = 0, digit: int = 0) -> str:
        """`planes_lookup`, likewise. (A sum, because its meaning is one; LLVM sees the zeros that
        it starts from, and stores.)"""
        prefetch = f"_pf{ahead}" if ahead else ""
        emit = partial(self.emit_lookup, step, ahead, digit)
        name = f"lookup{digit or ''}_{step}{prefetch}"
        return self._register(name, planes_lookup(step, digit), emit)

    def codes(self, step: PlanesStep) -> str:
        """`planes_codes`."""
        return self._register(f"codes_{step}", planes_codes(step), partial(self.emit_codes, step))

    def table_dot(self, step: PlanesStep, rows: int) -> str:
        """`apq_tvm.tensorize.meaning.planes.table_dot`."""
        emit = partial(self.emit_table_dot, step, rows)
        return self._register(f"table{rows}_{step}", table_dot(step, rows), emit)

    def rows(self, step: PlanesStep, m: int, rows: int) -> str:
        """`rows_dot`."""
        emit = partial(self.emit_rows, step, m, rows)
        name = f"rows_{m}x{rows}x{step.k}{step.suffix}"
        return self._register(name, rows_dot(step, m, rows), emit)

    def _register(self, name: str, meaning: Meaning, emit: Callable[..., None]) -> str:
        return register(f"apq_{self.name}_{name}", lambda: pair(meaning, emit))

    @abstractmethod
    def emit_dot(self, step: PlanesStep, ahead: int, *buffers: Buffer) -> None:
        """Instructions of `planes_dot`."""

    @abstractmethod
    def emit_lookup(self, step: PlanesStep, ahead: int, digit: int, *buffers: Buffer) -> None:
        """Instructions of `planes_lookup`, of one byte of weights that have two."""

    @abstractmethod
    def emit_codes(self, step: PlanesStep, *buffers: Buffer) -> None:
        """Instructions of `planes_codes`."""

    @abstractmethod
    def emit_table_dot(self, step: PlanesStep, rows: int, *buffers: Buffer) -> None:
        """Instructions of `apq_tvm.tensorize.meaning.planes.table_dot`."""

    @abstractmethod
    def emit_rows(self, step: PlanesStep, m: int, rows: int, *buffers: Buffer) -> None:
        """Instructions of `rows_dot`."""
