"""What an instruction set adds to the products of ``mixed24`` tiles: instructions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from apq_tvm.tensorize.exprs import prefetch
from apq_tvm.tensorize.meaning.mixed import TILE_K, TRIPLE, mixed_bytes, narrow_dot, wide_dot
from apq_tvm.tensorize.meaning.scaffold import pair
from apq_tvm.tensorize.registry import register

Expr = Any  # tvm is untyped
Buffer = Any


@dataclass(frozen=True)
class MixedBuffers:
    """Operands of `narrow_dot`, or of `wide_dot`, which has not the last three."""

    rows: int
    m: int
    codes: Buffer
    x: Buffer
    acc: Buffer
    minus: Buffer = None
    scale: Buffer = None
    plus: Buffer = None

    def row(self, i: Any, *rest: Any) -> list[Any]:
        """Index that starts with row i of x where there are several."""
        return [i, *rest] if self.m > 1 else list(rest)


@dataclass(frozen=True)
class MixedInstruction:
    """How tiles are decoded, multiplied and summed.

    Parameters
    ----------
    name : str
        First part of the intrinsics' names.
    rows : int
        R of the layout.
    features : tuple of str
        LLVM features it needs, any one of them.
    narrow, wide : callable
        Emit the instructions for three 2-bit tiles and for a 4-bit tile.
    lanes : int
        Int32 lanes of its vectors, 0 for R.
    """

    name: str
    rows: int
    features: tuple[str, ...]
    narrow: Callable[[MixedBuffers], None]
    wide: Callable[[MixedBuffers], None]
    lanes: int = 0


def mixed_intrinsic(instruction: MixedInstruction, wide: bool, m: int = 1, ahead: int = 0) -> str:
    """Register (once) and name the product of three 2-bit tiles or of a 4-bit tile.

    Parameters
    ----------
    instruction : MixedInstruction
    wide : bool
    m : int
        Rows of x.
    ahead : int
        Bytes to prefetch ahead, 0 for none.

    Returns
    -------
    str
        The intrinsic's name; its operands are those of `narrow_dot` or `wide_dot`.
    """
    rows = instruction.rows
    k, what = (TILE_K, "u4") if wide else (TRIPLE * TILE_K, "u2x3")
    name = f"apq_{instruction.name}_{m}x{rows}x{k}_s8{what}"
    name += ("s32" if wide else "f32") + (f"_pf{ahead}" if ahead else "")

    def emit(codes: Buffer, x: Buffer, *more: Buffer) -> None:
        *second, acc = more
        prefetch(codes, mixed_bytes(rows, wide), ahead)
        operands = MixedBuffers(rows, m, codes, x, acc, *second)
        (instruction.wide if wide else instruction.narrow)(operands)

    return register(name, lambda: pair((wide_dot if wide else narrow_dot)(rows, m), emit))
