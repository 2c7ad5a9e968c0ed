"""Vector expressions that lookup kernels on Arm are made of.

Table lookups come in two forms. ``tbl`` of Advanced SIMD takes one, two or four registers; on
Neoverse V1 and V2 only half of the pipelines have it, and V1 needs two cycles of them. SVE's
``tbl`` of one register costs one, whatever the vector length: the low 16 bytes of a z register are
a v register, and an index below 16 finds a byte among them. Where vectors have 32 bytes, as on V1,
it takes the place of ``tbl`` of two.

Without dot products ``smull`` and ``smlal`` sum products in int16, then ``sadalp`` and ``addp``
bring them to the order of ``sdot``'s sums.

Sources: Arm Architecture Reference Manual, DDI 0487 (SDOT, TBL, SMLAL, SADALP, and the low 128 bits
of SVE registers); LLVM's IntrinsicsAArch64.td for names; LangRef for ``llvm.vector.insert``.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm import tirx

from apq_tvm.tensorize.exprs import MAGIC, Expr, neon, shuffled, splat

BYTES = 16
"""Of a vector."""


def masked(vector: Expr, mask: int) -> Expr:
    """Bits of `mask` of every byte."""
    return tirx.bitwise_and(vector, splat(mask, "uint8"))


def merged(mask: int, a: Expr, c: Expr) -> Expr:
    """Bits of `mask` of every byte from `a`, the others from `c`: ``bsl``, ``bit`` or ``bif``."""
    return tirx.bitwise_or(masked(a, mask), masked(c, 255 - mask))


def kept(vector: Expr) -> Expr:
    """The same bytes, whose making LLVM does not take apart where they are used.

    It would rather mask the operands of a merge for each of the two indices in a byte, which is
    more instructions. ``llvm.arithmetic.fence`` is for floats, and no instruction.
    """
    floats = tirx.reinterpret("float32x4", vector)
    fenced = tirx.call_llvm_pure_intrin("float32x4", "llvm.arithmetic.fence", floats)
    return tirx.reinterpret("uint8x16", fenced)


def shifted(vector: Expr, left: int) -> Expr:
    """Every byte shifted left, right if negative."""
    if left == 0:
        return vector
    move = tirx.shift_left if left > 0 else tirx.shift_right
    return move(vector, splat(abs(left), "uint8"))


def inserted_left(kept_low: Expr, vector: Expr, left: int) -> Expr:
    """Every byte of `vector` shifted left, below it the low bits of `kept_low`: ``sli``."""
    return neon("uint8x16", "vsli.v16i8", kept_low, vector, tirx.const(left, "int32"))


def inserted_right(kept_high: Expr, vector: Expr, right: int) -> Expr:
    """Every byte of `vector` shifted right, above it the high bits of `kept_high`: ``sri``."""
    return neon("uint8x16", "vsri.v16i8", kept_high, vector, tirx.const(right, "int32"))


def lane(vector: Expr, dtype: str, index: int) -> Expr:
    """One 32-bit lane of a vector of 16 bytes, in every lane of a vector of `dtype`."""
    words = tirx.reinterpret("int32x4", vector)
    four = tirx.Shuffle([words], [tirx.const(index, "int32")] * 4)
    return tirx.reinterpret(dtype, four)


def table_lookup(tables: Sequence[Expr], index: Expr, sve: bool = False) -> Expr:
    """int8 [16]: bytes of one, two or four registers; 0 where the index is past their end.

    Parameters
    ----------
    tables : sequence of PrimExpr
        int8 [16] each.
    index : PrimExpr
        uint8 [16]; with `sve` below 16, or past the end of any vector.
    sve : bool
        Whether one register may be looked up by SVE's instruction.
    """
    index = tirx.reinterpret("int8x16", index)
    if sve and len(tables) == 1:
        found = _sve("llvm.aarch64.sve.tbl", _wide(tables[0]), _wide(index))
        return tirx.call_llvm_pure_intrin("int8x16", "llvm.vector.extract", found, _zero())
    return neon("int8x16", f"tbl{len(tables)}.v16i8", *tables, index)


def long_lookup(tables: Sequence[Expr], index: Expr) -> Expr:
    """int8 [16]: bytes of two registers, by one SVE instruction on vectors of at least 32 bytes.

    Parameters
    ----------
    tables : sequence of PrimExpr
        int8 [16] twice.
    index : PrimExpr
        uint8 [16], below 32.
    """
    low, high = tables
    table = _sve("llvm.vector.insert", _wide(low), high, tirx.const(BYTES, "int64"))
    found = _sve("llvm.aarch64.sve.tbl", table, _wide(tirx.reinterpret("int8x16", index)))
    return tirx.call_llvm_pure_intrin("int8x16", "llvm.vector.extract", found, _zero())


def _zero() -> Expr:
    return tirx.const(0, "int64")


def _sve(name: str, *operands: Expr) -> Expr:
    return tirx.call_llvm_pure_intrin("int8xvscalex16", name, *operands)


def anything(dtype: str, lanes: Expr) -> Expr:
    """A vector for which no instruction is spent: LLVM's poison (``ctlz`` of zero, declared never
    to happen, is poison)."""
    poison = tirx.call_llvm_pure_intrin(
        dtype, "llvm.ctlz", tirx.const(0, dtype), tirx.const(True, "bool")
    )
    return tirx.Broadcast(poison, lanes)


def _wide(vector: Expr) -> Expr:
    """The z register whose low 16 bytes are `vector`; the others are `anything`."""
    return _sve("llvm.vector.insert", anything("int8", BYTES * tirx.vscale()), vector, _zero())


def small_dot(codes: Sequence[Expr], x: Sequence[Expr]) -> Expr:
    """int32 [4]: Σ code x of 4 rows over 4 k a vector, where int16 holds the sum of 8 products.

    Parameters
    ----------
    codes : sequence of PrimExpr
        uint8 [16], below 128.
    x : sequence of PrimExpr
        int8 [16] each: four activations, four times.
    """
    halves: list[Expr] = []
    for first in (0, 8):
        order = range(first, first + 8)
        words: Expr = None
        for code, four in zip(codes, x, strict=True):
            part = [shuffled(v, BYTES, order) for v in (tirx.reinterpret("int8x16", code), four)]
            product = neon("int16x8", "smull.v8i16", *part)
            words = product if words is None else words + product
        halves.append(words)
    pairs = neon("int16x8", "addp.v8i16", *halves)  # two sums of two k each per row
    return neon("int32x4", "saddlp.v4i32.v8i16", pairs)


class Dot:
    """Sums of products of 4 rows, four k each step.

    Parameters
    ----------
    fused : bool
        Whether there is ``sdot``.
    top : int
        Largest magnitude of a weight, for the sums in int16.
    start : PrimExpr or None
        int32 [4] to begin with; None for 0.
    """

    def __init__(self, fused: bool, top: int, start: Expr | None = None) -> None:
        self.fused, self._start = fused, start
        self._most = 32767 // (127 * top)
        self._sums = start if start is not None and fused else splat(0, "int32", 4)
        self._wide: list[Expr | None] = [None, None]
        self._words: list[Expr | None] = [None, None]
        self._count = 0

    def add(self, weights: Expr, x: Expr, index: int) -> None:
        """Add int8 weights [4 rows, 4 k] times lane `index` of int8 x [16]."""
        if self.fused:
            by = lane(x, "int8x16", index)
            self._sums = neon("int32x4", "sdot.v4i32.v16i8", self._sums, weights, by)
            return
        by = lane(x, "int8x16", index)
        for half in range(2):
            order = range(8 * half, 8 * half + 8)
            product = neon("int16x8", "smull.v8i16", shuffled(weights, 16, order),
                           shuffled(by, 16, order))  # fmt: skip
            words = self._words[half]
            self._words[half] = product if words is None else words + product
        self._count += 1
        if self._count == self._most:
            self._widen()

    def _widen(self) -> None:
        for half in range(2):
            wide = neon("int32x4", "saddlp.v4i32.v8i16", self._words[half])
            before = self._wide[half]
            self._wide[half] = wide if before is None else before + wide
        self._words, self._count = [None, None], 0

    def total(self) -> Expr:
        """int32 [4], with the start."""
        if self.fused:
            return self._sums
        if self._count:
            self._widen()
        total = neon("int32x4", "addp.v4i32", *self._wide)
        return total if self._start is None else total + self._start


def as_float(total: Expr) -> Expr:
    """float32 [4] of sums that began with `MAGIC_BITS`."""
    return tirx.reinterpret("float32x4", total) - splat(MAGIC, "float32", 4)
