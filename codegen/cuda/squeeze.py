"""Images made small: the block format of LZ4, which 40 lines of C undo (`runtime/cuda/unpack.c`).

Kernels of a module are alike, and PTX is text: 189 and 337 KB of a model become 60 and 50. Format:
"LZ4 Block Format Description", https://github.com/lz4/lz4/blob/dev/doc/lz4_Block_format.md.
"""

from __future__ import annotations

_LEAST, _FAR = 4, 65535
"""Bytes of a copy at least; how far back it begins at most."""

_LAST, _END = 5, 12
"""The last bytes are literals, and no copy begins among the last 12."""


def squeeze(data: bytes) -> bytes:
    """Compress `data`, taking the latest place where four bytes stood."""
    out, seen = bytearray(), dict[bytes, int]()
    at = begun = 0
    while at < len(data) - _END:
        word = data[at : at + _LEAST]
        found = seen.get(word, -_FAR - 1)
        seen[word] = at
        if at - found > _FAR:
            at += 1
            continue
        long = _equal(data, found, at)
        _put(out, data[begun:at], at - found, long)
        for inside in range(at + 1, min(at + long, len(data) - _END), 3):
            seen[data[inside : inside + _LEAST]] = inside
        at += long
        begun = at
    _put(out, data[begun:], 0, 0)
    return bytes(out)


def _equal(data: bytes, first: int, second: int) -> int:
    """Bytes that are equal from both places on, of which four are known to be."""
    long, most = _LEAST, len(data) - _LAST - second
    step = 64
    while long < most and step:
        some = min(step, most - long)
        if data[first + long : first + long + some] == data[second + long : second + long + some]:
            long += some
        else:
            step //= 2
    return long


def _put(out: bytearray, literals: bytes, back: int, long: int) -> None:
    """Literals and, where `long` is not 0, the copy behind them."""
    fresh, more = len(literals), max(long - _LEAST, 0)
    out.append(min(fresh, 15) << 4 | min(more, 15))
    _put_rest(out, fresh)
    out += literals
    if long:
        out += back.to_bytes(2, "little")
        _put_rest(out, more)


def _put_rest(out: bytearray, count: int) -> None:
    if count >= 15:
        out += b"\xff" * ((count - 15) // 255) + bytes([(count - 15) % 255])
