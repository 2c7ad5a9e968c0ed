"""Products of whole tiles on x86: AMX, 16 rows of x by 16 columns, up to 64 k an instruction.

``tdpbsud`` adds to an int32 tile [16, 16] the products of a tile of int8 activations [16, 4q] and
one of uint8 codes [q, 16, 4], q up to 16. Both lie in memory as they always do: x row by row, codes
as units of 16 interleaved rows (`apq_tvm.codegen.layouts.interleaved`), of which 64 bytes are a row
of the tile. There is no remainder of K: q is the largest divisor of K / 4 up to 16, so that all
steps are of one size, and the shapes of tiles are set once.

Tile registers have numbers, which LLVM does not assign (`Registers` does). Their shapes are state
of the thread, set by ``ldtilecfg``: `shapes_intrinsic` is a pair whose meaning is to write the 64
bytes that describe them, and whose instructions load them besides; `release_intrinsic` clears both
again, so that the kernel has no tiles to save for the thread.

Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, chapter 18; volume
2, LDTILECFG, TILELOADD, TDPBSUD, TILESTORED, TILERELEASE; LLVM's IntrinsicsX86.td.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from tvm import tirx
from tvm.tirx.script.builder import ir as b

from apq_tvm.tensorize.exprs import Buffer, i32, i64, prefetch_line
from apq_tvm.tensorize.meaning.interleaved import VECTORS
from apq_tvm.tensorize.meaning.scaffold import pair
from apq_tvm.tensorize.meaning.tile import Tile, unit_products
from apq_tvm.tensorize.meaning.tile_registers import (
    CONFIG,
    ROWS,
    Registers,
    cleared,
    described,
)
from apq_tvm.tensorize.registry import register

_ROW = 4 * ROWS
"""Bytes of a row of sums or of codes."""

_AHEAD = 4
"""Tiles of codes between the one that is loaded and the one that is asked for."""


def shapes_intrinsic(tile: Tile) -> str:
    """Register (once) and name what sets the shapes of all tiles of a micro-kernel."""
    registers = Registers(tile)

    def implement(config: Buffer) -> None:
        _store(registers.description, config)
        _emit("ldtilecfg", tirx.address_of(config[i64(0)]))

    name = f"apq_ldtilecfg_{tile.m}x{tile.vectors * ROWS}x{4 * registers.quads}_u8"
    return register(name, lambda: pair(described(registers), implement))


def release_intrinsic() -> str:
    """Register (once) and name what gives all tiles back."""

    def implement(config: Buffer) -> None:
        _store(bytes(CONFIG), config)
        _emit("tilerelease")

    return register("apq_tilerelease_u8", lambda: pair(cleared(), implement))


def tile_intrinsic(tile: Tile, fresh: bool, near: bool) -> str:
    """Register (once) and name the micro-kernel ``apq_tdpbsud_<m>x<n>x<k>_s8u8s32``.

    ``_fresh`` ones start sums from 0 (`apq_tvm.tensorize.meaning.scaffold.fresh_product`), codes of
    ``_near`` ones were just decoded: nothing is asked for ahead.
    """
    name = f"apq_tdpbsud_{tile}_s8u8s32" + "_fresh" * fresh + "_near" * near
    body = partial(_products, tile, fresh, near)
    return register(name, lambda: pair(unit_products(tile), body, fresh))


def _emit(name: str, *operands: Any) -> None:
    b.evaluate(tirx.call_llvm_intrin("void", f"llvm.x86.{name}", *operands))


def _store(values: bytes, config: Buffer) -> None:
    words = [tirx.const(v, "uint8") for v in values]
    vector = tirx.Shuffle(words, [i32(i) for i in range(CONFIG)])
    b.buffer_store(config, vector, [tirx.Ramp(i64(0), i64(1), CONFIG)])


def _products(tile: Tile, fresh: bool, near: bool, a: Buffer, w: Buffer, c: Buffer) -> None:
    registers = Registers(tile)
    four = registers.quads

    def number(of: int) -> Any:
        return tirx.const(of, "int8")

    def every_sum(name: str) -> None:
        for i, row in enumerate(registers.sums):
            for j, of in enumerate(row):
                place = tirx.address_of(c[i64(i * ROWS), i64(j), i64(0)])
                _emit(name, number(of), place, i64(_ROW * tile.vectors))

    if fresh:
        for of in range(registers.x[0]):
            _emit("tilezero", number(of))
    else:
        every_sum("tileloadd64")
    with b.serial(0, i64(tile.k // 4 // four)) as step:
        first = step * i64(four)
        for j, of in enumerate(registers.codes):
            at = (i64(j), first // i64(VECTORS), first % i64(VECTORS) * i64(_ROW))
            _emit("tileloadd64", number(of), tirx.address_of(w[at]), i64(_ROW))
            for row in range(0 if near else four):
                ahead = first + i64(_AHEAD * ROWS + row)
                prefetch_line(w[i64(j), ahead // i64(VECTORS), ahead % i64(VECTORS) * i64(_ROW)])
        for i, of in enumerate(registers.x):
            place = tirx.address_of(a[i64(i * ROWS), first * i64(4)])
            _emit("tileloadd64", number(of), place, a.strides[0])
            for total, code in zip(registers.sums[i], registers.codes, strict=True):
                _emit("tdpbsud", *map(number, (total, of, code)))
    every_sum("tilestored64")
