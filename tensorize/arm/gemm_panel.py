"""What Arm GEMMs do once a panel: packed codes to centred int8, scales and sums in pairs.

For pairs (`apq_tvm.tensorize.meaning.centred`) two vectors of 4 rows x 4 k become two of 2 rows x 8
k, by zip1 and zip2 of 32-bit lanes. They are zipped while still packed, so that W4 takes one zip
for two vectors of codes. Per 4 rows x 32 k of W4 that is 4 zips beside 8 of and/ushr, 8
subtractions and 8 stores. Weights in runs of 8 k (4x8 and 8x8 in the words of llama.cpp) are in
pairs already: per 128 rows of x that saves 0.3 % of the instructions of the GEMM, at M = 16 1.6 %.
What these layouts are for is fewer rows, which then need no panel at all
(`apq_tvm.schedules.arm.paired`).
"""

from __future__ import annotations

from functools import partial

from tvm import tirx
from tvm.tirx.script.builder import ir as b

from apq_tvm.tensorize.arm.codes import repeated, unpacked
from apq_tvm.tensorize.exprs import Buffer, Expr, i32
from apq_tvm.tensorize.meaning.centred import rows_of_sums, spreading
from apq_tvm.tensorize.meaning.interleaved import Unit
from apq_tvm.tensorize.meaning.scaffold import pair
from apq_tvm.tensorize.registry import register

_VECTOR = "uint8x16"


def scales_intrinsic(source: str) -> str:
    """Register (once) and name the spreading of 4 scales of a type, or uint8 zero points."""
    name = f"apq_neon_spread_{source}"
    return register(name, lambda: pair(spreading(source), partial(_spread, source)))


def rows_intrinsic() -> str:
    """Register (once) and name the way of sums from pairs to rows."""
    return register("apq_neon_rows_f32", lambda: pair(rows_of_sums(), _rows))


def _shuffle(vectors: list[Expr], lanes: list[int]) -> Expr:
    return tirx.Shuffle(vectors, [i32(lane) for lane in lanes])


def zipped_words(first: Expr, second: Expr, high: bool) -> Expr:
    """uint8 [16]: zip1 or zip2 of 32-bit lanes."""
    words = [tirx.reinterpret("int32x4", v) for v in (first, second)]
    start = 2 if high else 0
    return tirx.reinterpret(_VECTOR, _shuffle(words, [start, start + 4, start + 1, start + 5]))


def _field(packed: Expr, down: int, mask: int) -> Expr:
    """Bits of every byte, moved down (up if negative) and masked, where any others are left."""
    if down:
        move = tirx.shift_right if down > 0 else tirx.shift_left
        packed = move(packed, repeated(abs(down)))
    left = 255 >> down if down >= 0 else 255 << -down & 255
    return packed if left == mask else tirx.bitwise_and(packed, repeated(mask))


def unpacked_code(unit: Unit, pairs: bool, codes: Buffer, vector: int, half: int) -> Expr:
    """uint8 [16] codes in the order of the panel.

    Parameters
    ----------
    unit : Unit
        Of 4 rows.
    pairs : bool
    codes : Buffer
        Bytes of the unit.
    vector, half : int
        For lanes 0..7 and 0, for pairs 0..3 and 0..1: rows 0 and 1, or 2 and 3.
    """
    code: Expr = None
    for field in _fields(unit, pairs, codes, vector, half):
        code = field if code is None else tirx.bitwise_or(code, field)
    return code


def row_bytes(word: Expr, pairs: bool, half: int) -> Expr:
    """uint8 [16]: bytes of 4 rows, each as often as its row has bytes in a vector of the panel.

    Parameters
    ----------
    word : PrimExpr
        uint8 [4].
    pairs : bool
    half : int
        As in `unpacked_code`.
    """
    four = tirx.Broadcast(tirx.reinterpret("int32", word), 4)
    lanes = [2 * half + i // 8 for i in range(16)] if pairs else [i // 4 for i in range(16)]
    return _shuffle([tirx.reinterpret(_VECTOR, four)], lanes)


def _fields(unit: Unit, pairs: bool, codes: Buffer, vector: int, half: int) -> list[Expr]:
    """Parts of one vector of codes, each moved to its place."""
    size, fields = unit.vector_bytes, []
    if unit.whole:

        def whole(number: int) -> Expr:
            return unpacked(unit, lambda i: codes.vload([i * size], _VECTOR), number)

        if pairs:
            return [zipped_words(whole(2 * vector), whole(2 * vector + 1), half == 1)]
        return [whole(vector)]
    for width, shift in unit.fields:

        def load(i: int, start: int = size * shift) -> Expr:
            part = codes.vload([start + i * size], _VECTOR)
            return tirx.bitwise_xor(part, repeated(0x80)) if unit.inverted else part

        mask = ((1 << width) - 1) << shift
        if not pairs:
            fields.append(_field(load(vector % width), vector // width * width - shift, mask))
            continue
        even = 2 * vector
        if width > 1:
            both = load(even % width), load(even % width + 1)
        else:
            both = load(0), tirx.shift_right(load(0), repeated(1))
        zipped = zipped_words(*both, half == 1)
        fields.append(_field(zipped, even // width * width - shift, mask))
    return fields


def centred_pairs(unit: Unit, codes: Buffer, vector: int, zeros: Expr | None) -> Expr:
    """uint8 [16]: 2 rows x 8 k of codes in runs of 8, less their zero points or their middle.

    Parameters
    ----------
    unit : Unit
        Of 4 rows and runs of 8, with inverted top bits.
    codes : Buffer
        Bytes of the unit.
    vector : int
        0..7.
    zeros : PrimExpr or None
        uint8 [16].
    """

    def load(index: int) -> Expr:
        return codes.vload([unit.at(index * unit.vector_bytes)], _VECTOR)

    middle = repeated(1 << (unit.bits - 1))
    width, _ = unit.fields[0]
    down = vector // width * width
    if width == unit.bits and width > 1 and down + width == 8:
        # The topmost codes of a byte: an arithmetic shift leaves them centred.
        code = load(vector % width)
        if down:
            move = tirx.Broadcast(tirx.const(down, "int8"), 16)
            signed = tirx.shift_right(tirx.reinterpret("int8x16", code), move)
            code = tirx.reinterpret(_VECTOR, signed)
        return code if zeros is None else code - (zeros - middle)
    return centred(unit, unpacked(unit, load, vector), zeros)


def centred(unit: Unit, code: Expr, zeros: Expr | None) -> Expr:
    """uint8 [16]: codes less their zero points or their middle."""
    if zeros is not None:
        return code - zeros
    if unit.bits == 1:
        return code + code - repeated(1)
    return code - repeated(1 << (unit.bits - 1))


def _spread(source: str, values: Buffer, out: Buffer) -> None:
    made = "int32" if source == "uint8" else "float32"
    four = values.vload([0], f"{source}x4").astype(f"{made}x4")
    for c in range(2):
        lanes = [2 * c, 2 * c + 1] * 2
        b.buffer_store(out, _shuffle([four], lanes), [c, tirx.Ramp(0, 1, 4)])


def _rows(sums: Buffer, out: Buffer) -> None:
    both = [sums.vload([c, 0], "float32x4") for c in range(2)]
    for m in range(2):
        lanes = [2 * m, 2 * m + 1, 4 + 2 * m, 5 + 2 * m]
        b.buffer_store(out, _shuffle(both, lanes), [m, tirx.Ramp(0, 1, 4)])
