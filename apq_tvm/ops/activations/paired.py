"""Folded activations in the order of `apq_tvm.tensorize.pairs.paired_dot`.

Pair p has rows 2p and 2p + 1; of an odd M the last pair has the last two rows, so that one row is
in two pairs. Tiles of M then need no predicate.
"""

from __future__ import annotations

from tvm import tirx
from tvm.tirx.script.builder import ir as b

from apq_tvm.codegen.layouts import InterleavedLayout
from apq_tvm.ops.activations.fold import FoldActivations, ramp
from apq_tvm.tensorize.exprs import Buffer, Expr, PrimFunc, i64
from apq_tvm.tensorize.pairs.paired_dot import BYTES, activation_bytes


def fold_alone(
    k: int,
    layout: InterleavedLayout,
    per_token: bool,
    copies: int,
    row_block: int,
    asymmetric: bool = False,
) -> PrimFunc:
    """Quantize rows of float32 activations, each of which meets the weights alone.

    Parameters are those of `apq_tvm.ops.activations.fold.fold_activations`.

    Returns
    -------
    tvm.tirx.PrimFunc
        As there, with ``xq i8 [M, 2 Kp + 16]``: 8 zeros before every 8 codes, and 16 at the end.
    """
    return _Alone(k, layout, per_token, copies, row_block, asymmetric=asymmetric).build()


def fold_pairs(
    k: int,
    layout: InterleavedLayout,
    per_token: bool,
    copies: int,
    row_block: int,
    unfolded: bool,
    asymmetric: bool = False,
) -> PrimFunc:
    """Quantize rows of float32 activations in pairs, M >= 2.

    Parameters are those of `apq_tvm.ops.activations.fold.fold_activations`, and whether activations
    are not folded.

    Returns
    -------
    tvm.tirx.PrimFunc
        As there, with P = ceil(M / 2) for M, ``xq i8 [P, 2 Kp]``: 8 codes of a row, 8 of the other.
        Of 4 equal floats 2 are the first row's, 2 the other's.
    """
    return _Pairs(k, layout, per_token, copies, row_block, unfolded, asymmetric).build()


class _Alone(FoldActivations):
    name = "fold_alone"

    def x_bytes(self) -> int:
        return activation_bytes(self.padded, 1)

    def store_codes(self, row: Expr, k: Expr, fours: list[Expr]) -> None:
        zeros = tirx.Broadcast(tirx.const(0, "int32"), 8)
        lanes = [tirx.const((8 + i) % 16, "int32") for i in range(16)]
        for half in range(2):
            sixteen = tirx.Shuffle([*fours[2 * half : 2 * half + 2], zeros], lanes)
            first = k * 2 + half * BYTES
            b.buffer_store(self.xq, sixteen.astype("int8x16"), [row, ramp(first, 16)])

    def _row(self, row: Expr, source_row: Expr, x: Buffer) -> None:
        super()._row(row, source_row, x)
        none = tirx.Broadcast(tirx.const(0, "int8"), BYTES)
        b.buffer_store(self.xq, none, [row, ramp(i64(2 * self.padded), BYTES)])


class _Pairs(FoldActivations):
    name = "fold_pairs"
    together = 2

    def x_bytes(self) -> int:
        return activation_bytes(self.padded, 2)

    def source(self, row: Expr, m: Expr) -> Expr:
        return tirx.min(row // i64(2) * i64(2), m - i64(2)) + row % i64(2)

    def store_codes(self, row: Expr, k: Expr, fours: list[Expr]) -> None:
        lanes = [tirx.const(i, "int32") for i in range(8)]
        for half in range(2):
            eight = tirx.Shuffle(fours[2 * half : 2 * half + 2], lanes)
            first = k * 2 + half * BYTES + row % i64(2) * 8
            b.buffer_store(self.xq, eight.astype("int8x8"), [row // i64(2), ramp(first, 8)])

    def store_floats(self, target: Buffer, lead: list[Expr], index: int, value: Expr) -> None:
        row, *rest = lead
        first = row % i64(2) * 2 + index
        both = tirx.Broadcast(value, 2)
        b.buffer_store(target, both, [row // i64(2), *rest, ramp(first, 2)])
