"""Images made small: the block format of LZ4, which 40 lines of C undo (`runtime/cuda/unpack.c`).

Kernels of a module are alike, and PTX is text: 189 and 337 KB of a model become 60 and 50. Format:
"LZ4 Block Format Description", https://github.com/lz4/lz4/blob/dev/doc/lz4_Block_format.md.
"""

from __future__ import annotations

_LEAST, _FAR = 4, 65535
"""Bytes of a copy at least; how far back it begins at most."""

_LAST, _END = 5, 12
"""The last bytes are literals, and no copy begins among the last 12."""

_STEP = 32
"""Bytes that are compared at once."""


def squeeze(data: bytes) -> bytes:
    """Compress `data`, taking the latest place where four bytes stood."""
    out, seen = bytearray(), dict[bytes, int]()
    latest, end = seen.get, len(data) - _END
    at = begun = 0
    while at < end:
        word = data[at : at + _LEAST]
        found = latest(word, -_FAR - 1)
        seen[word] = at
        if at - found > _FAR:
            at += 1
            continue
        long = _equal(data, found, at)
        _put(out, data[begun:at], at - found, long)
        for inside in range(at + 1, min(at + long, end), 3):
            seen[data[inside : inside + _LEAST]] = inside
        at += long
        begun = at
    _put(out, data[begun:], 0, 0)
    return bytes(out)


def _equal(data: bytes, first: int, second: int) -> int:
    """Bytes that are equal from both places on, of which four are known to be."""
    most = len(data) - _LAST - second
    long = _LEAST
    while long < most:
        one = data[first + long : first + long + _STEP]
        other = data[second + long : second + long + _STEP]
        if one != other:
            # The lowest bit that differs; past the end there is none, or one that is too far.
            bits = int.from_bytes(one, "little") ^ int.from_bytes(other, "little")
            return min(long + ((bits & -bits).bit_length() - 1 >> 3), most) if bits else most
        long += _STEP
    return most


def _put(out: bytearray, literals: bytes, back: int, long: int) -> None:
    """Literals and, where `long` is not 0, the copy behind them."""
    fresh, more = len(literals), long - _LEAST if long else 0
    out.append((fresh if fresh < 15 else 15) << 4 | (more if more < 15 else 15))
    if fresh >= 15:
        _put_rest(out, fresh)
    out += literals
    if long:
        out += back.to_bytes(2, "little")
        if more >= 15:
            _put_rest(out, more)


def _put_rest(out: bytearray, count: int) -> None:
    """What of a count of 15 or more its four bits do not hold."""
    out += b"\xff" * ((count - 15) // 255) + bytes([(count - 15) % 255])
