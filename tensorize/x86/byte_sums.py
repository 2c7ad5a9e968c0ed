"""Sums of popcounts in bytes, for processors that cannot count the bits of a lane; AVX2.

Nibbles are looked up with ``vpshufb`` and the counts added as bytes: a byte holds those of 31
vectors (8 each). Then ``vpmaddubsw`` with 2^(s+t) and ``vpmaddwd`` widen them. Mula, Kurz, Lemire:
"Faster Population Counts Using AVX2 Instructions" (The Computer Journal 2018).
"""

from __future__ import annotations

from tvm import tirx
from tvm.tirx.script.builder import ir as b

from apq_tvm.tensorize.exprs import Buffer, Expr, splat, x86
from apq_tvm.tensorize.x86.vectors import maddubs, widened

BYTE_PAIRS = 31
"""Vectors whose popcounts a byte can sum: 31 * 8 <= 255."""

_INT16_MAX = 32767


def add(total: Expr, value: Expr, zero: Expr = None) -> Expr:
    """``total + value``; ``total - value`` if a vector of zeros is given."""
    if zero is not None:
        return (zero if total is None else total) - value
    return value if total is None else total + value


class ByteSums:
    """Counts of one row of x: a byte vector per (weight, sign), then int16, then int32."""

    def __init__(self) -> None:
        self._full: list[tuple[int, bool, Buffer, int]] = []
        self._bytes: dict[tuple[int, bool], tuple[Buffer, int]] = {}
        self._words: Expr = None
        self._bound = 0
        self._total: Expr = None

    def add(self, weight: int, negative: bool, low: Expr, high: Expr) -> None:
        """Add the counts of two vectors of nibbles, times ±2^weight.

        By way of buffers, which become registers: the sums are then emitted as they arise, and few
        operands are live at a time.
        """
        kept, pairs = self._bytes.get((weight, negative), (None, 0))
        if pairs == BYTE_PAIRS:
            self._full.append((weight, negative, kept, pairs))
            pairs = 0
        counts = self._look_up(low) + self._look_up(high)
        if pairs:
            counts = kept.vload([0], "uint8x32") + counts
        else:
            kept = b.alloc_buffer((32,), "uint8", align=32)
        b.buffer_store(kept, counts, [tirx.Ramp(0, 1, 32)])
        self._bytes[weight, negative] = (kept, pairs + 1)

    def finish(self) -> Expr:
        """The int32 sums."""
        open_sums = [(*key, *value) for key, value in self._bytes.items()]
        for weight, negative, kept, pairs in sorted(self._full + open_sums, key=lambda s: s[:2]):
            self._widen(weight, negative, kept.vload([0], "uint8x32"), pairs)
        self._flush()
        return self._total

    def _look_up(self, nibbles: Expr) -> Expr:
        counts = [value.bit_count() for value in range(16)] * 2
        table = tirx.Shuffle(
            [tirx.const(v, "uint8") for v in counts],
            [tirx.const(i, "int32") for i in range(len(counts))],
        )
        return x86("uint8x32", "avx2.pshuf.b", table, nibbles)

    def _widen(self, weight: int, negative: bool, counts: Expr, pairs: int) -> None:
        """Add bytes, times ±2^weight, to the int16 sums, which are emptied where they may overflow.

        ``vpmaddubsw`` takes factors up to 2^6; larger weights go through ``vpmaddwd``.
        """
        low = min(weight, 6)
        bound = 2 * 8 * pairs << low
        if weight > 6 or self._bound + bound > _INT16_MAX:
            self._flush()
        words = maddubs(counts, splat(1 << low, "int8", 32))
        zero = tirx.Broadcast(tirx.const(0, "int16"), 16)
        self._words = add(self._words, words, zero if negative else None)
        self._bound += bound
        if weight > 6:
            self._flush(1 << (weight - 6))

    def _flush(self, factor: int = 1) -> None:
        if self._words is None:
            return
        self._total = add(self._total, widened(self._words, factor))
        self._words, self._bound = None, 0
