"""How bits of planes are counted and packed on x86 (`apq_tvm.tensorize.meaning.bitserial`).

``vpopcntd`` counts 32 bits of a lane (AVX-512 VPOPCNTDQ); AVX2 looks nibbles up and adds bytes
(`apq_tvm.tensorize.x86.byte_sums`).

Sources: Intel 64 and IA-32 Software Developer's Manual, volume 2, VPOPCNT, PSHUFB, PMOVMSKB; LLVM's
IntrinsicsX86.td for the operand types.
"""

from __future__ import annotations

import itertools

from tvm import tirx
from tvm.tirx.script.builder import ir as b

from apq_tvm.tensorize.exprs import Buffer, Expr, llvm, x86
from apq_tvm.tensorize.meaning.interleaved import UNIT_K
from apq_tvm.tensorize.pairs.bitserial import Planes, Popcount
from apq_tvm.tensorize.x86.byte_sums import ByteSums, add
from apq_tvm.tensorize.x86.vectors import shifted


def _shift(vector: Expr, down: int) -> Expr:
    return shifted(vector, -down)


def _count_lanes(o: Planes) -> list[Expr]:
    """int32 [R] for every row of x: whole lanes are counted."""
    lanes = f"int32x{o.unit.rows}"
    one, zero = (tirx.Broadcast(tirx.const(v, "int32"), o.unit.rows) for v in (1, 0))
    weights = o.unit.bits + o.terms - 1
    sums: list[list[Expr]] = [[None] * weights for _ in range(o.m)]  # by weight 2^(s+t)
    for which in range(o.units):
        planes = o.planes_of(which)
        for i, t in itertools.product(range(o.m), range(o.terms)):
            x = o.operands(i, t, which)
            for s, w in enumerate(planes):
                bits = tirx.reinterpret(lanes, o.match(w, x))
                counts = llvm(lanes, f"llvm.ctpop.v{o.unit.rows}i32", bits)
                negative = zero if o.negative(t) else None
                sums[i][s + t] = add(sums[i][s + t], counts, negative)
    totals = []
    for row in sums:
        total = row[-1]
        for weighed in reversed(row[:-1]):
            total = tirx.shift_left(total, one) + weighed
        totals.append(total)
    return totals


def _count_nibbles(o: Planes) -> list[Expr]:
    """int32 [R] for every row of x: bytes of counts, widened where they are full."""
    sums = [ByteSums() for _ in range(o.m)]
    split = o.m * o.terms * o.unit.bits > 1
    for which in range(o.units):
        planes = o.planes_of(which)
        parts = [_nibbles(o, w) for w in planes] if split else []
        for i in range(o.m):
            for t in range(o.terms):
                x = o.operands(i, t, which)
                halves = _halves(o, x)
                for s, w in enumerate(planes):
                    if split:
                        low, up = (o.match(parts[s][h], halves[h]) for h in range(2))
                    else:
                        low, up = _nibbles(o, o.match(w, x))
                    sums[i].add(s + t, o.negative(t), low, up)
    return [total.finish() for total in sums]


def _halves(o: Planes, x: list[Expr]) -> tuple[list[Expr], list[Expr]]:
    """Operands for the low and for the high nibbles, which those of weights are masked to.

    An AND with a masked vector needs no other mask; a XOR does, unless an AND follows.
    """
    pairs = [_nibbles(o, v) if i == 0 and o.p < 3 else (v, o.isa.shift(v, 4))
             for i, v in enumerate(x)]  # fmt: skip
    return [low for low, _ in pairs], [high for _, high in pairs]


def _nibbles(o: Planes, vector: Expr) -> tuple[Expr, Expr]:
    return o.masked(vector, 15), o.masked(o.isa.shift(vector, 4), 15)


def _pack(planes: int, x: Buffer, y: Buffer) -> None:
    codes = x.vload([0], f"int32x{UNIT_K}").astype(f"int8x{UNIT_K}")
    # Byte 8c + v of the shuffled vector is k = 4v + c: its top bits are then in a plane's order.
    order = [tirx.const(4 * v + c, "int32") for c in range(4) for v in range(8)]
    words = tirx.reinterpret("uint16x16", tirx.Shuffle([codes], order))
    for t in range(planes):
        top = tirx.shift_left(words, tirx.Broadcast(tirx.const(7 - t, "uint16"), 16))
        mask = x86("int32", "avx2.pmovmskb", tirx.reinterpret("int8x32", top))
        b.buffer_store(y, y[t, 0] + mask, [t, 0])


_PACKER = ("vpmovmskb", _pack)

VPOPCNT = Popcount("vpopcntd", 16, ("avx512vpopcntdq",), _count_lanes, _shift, _PACKER)
PSHUFB = Popcount("pshufb", 8, ("avx2",), _count_nibbles, _shift, _PACKER)

INSTRUCTIONS = (VPOPCNT, PSHUFB)
"""In order of preference."""
