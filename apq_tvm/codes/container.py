"""The container of GGUF: which tensors a file has, of what type, and where their bytes lie.

Written from the format's description (ggml, docs/gguf.md), versions 2 and 3, little-endian::

    "GGUF", uint32 version, uint64 tensors, uint64 entries
    entries:  string key, uint32 type, value          string: uint64 length, bytes
    tensors:  string name, uint32 rank, uint64 extents (innermost first), uint32 type, uint64 offset
    padding to general.alignment (32), then the tensors' bytes, from which offsets count

A file may come from anywhere: every length is held against what the file has before anything is
read or made of it, strings of a vocabulary are skipped, and a tensor's bytes are read when they are
wanted. (The ``gguf`` package, 0.19, makes Python objects of every token first: 9 MB of empty
strings cost it 16 s and half a gigabyte. Where a length points behind the file it reads less, or
answers with numpy's errors.)
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from apq_tvm.errors import BadInput
from apq_tvm.types import U8

VERSIONS = (2, 3)

MOST = 1 << 21
"""Entries of the file, strings in all its arrays, and tensors: models have fewer."""

LONGEST = 1 << 16
"""Bytes of a name, a key or a value that is kept."""

DEEPEST = 2
"""Arrays in arrays."""

KEPT = 4096
"""Numbers of an array that is kept; longer ones belong to a vocabulary."""

FEW = 4
"""Less than one row in so many is read row by row."""

_NUMBERS = "BbHhIif?__QqD"
"""Types 0 to 12 of values as `struct` spells them: 8 is a string, 9 an array, D a double."""

_STRING, _ARRAY = 8, 9

TYPES: Mapping[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210), 16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136), 24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4),
    27: ("I64", 1, 8), 28: ("F64", 1, 8), 29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17),
}  # fmt: skip
"""Number of a type → its name, weights of a block and bytes of one (ggml.h, ggml-common.h)."""


@dataclass(frozen=True)
class Entry:
    """One tensor.

    Parameters
    ----------
    name, type : str
    shape : tuple of int
        Outermost first, as numpy has it.
    start, nbytes : int
        Where its bytes lie in the file; 0 bytes of a type that is not known.
    """

    name: str
    type: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


@dataclass(frozen=True)
class Container:
    """What a file holds.

    Parameters
    ----------
    path : Path
    values : mapping of str to object
        Numbers, strings that are not long and short arrays of numbers, by key.
    tensors : mapping of str to Entry
    """

    path: Path
    values: Mapping[str, Any]
    tensors: Mapping[str, Entry]

    def read(self, entry: Entry, rows: NDArray[np.intp]) -> U8:
        """Bytes of some rows of a matrix, uint8 [rows, bytes of one].

        Raises
        ------
        BadInput
            The file is shorter by now.
        """
        n, width = entry.shape[0], entry.nbytes // entry.shape[0]
        try:
            with self.path.open("rb") as file:
                if len(rows) * FEW > n:
                    file.seek(entry.start)
                    data = np.fromfile(file, np.uint8, entry.nbytes)
                    if data.size == entry.nbytes:
                        return data.reshape(n, width)[rows]
                else:
                    parts = []
                    for row in rows.tolist():
                        file.seek(entry.start + row * width)
                        parts.append(file.read(width))
                    data = np.frombuffer(b"".join(parts), np.uint8)
                    if data.size == len(rows) * width:
                        return data.reshape(len(rows), width)
        except OSError as error:
            raise BadInput(f"{self.path} cannot be read: {error}") from error
        raise BadInput(f"{self.path} became shorter while it was read")


def read_container(path: Path) -> Container:
    """Read what a GGUF file says of itself.

    Raises
    ------
    BadInput
        It is missing, no GGUF file of a version that is known, truncated, or contradicts itself;
        the message names the entry or the tensor.
    """
    try:
        with path.open("rb") as file:
            return _Reader(path, file, path.stat().st_size).container()
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror or error}") from error


class _Reader:
    """Reads on from where it is; never past the end."""

    def __init__(self, path: Path, file: BinaryIO, size: int) -> None:
        self.path, self.file, self.size = path, file, size
        self.at = self.strings = 0

    def fail(self, what: str) -> BadInput:
        return BadInput(f"{self.path} is no sound GGUF file: {what}")

    def take(self, count: int, what: str) -> bytes:
        self.skip(count, what, move=False)
        data = self.file.read(count)
        if len(data) != count:
            raise self.fail(f"it ends within {what}")
        self.at += count
        return data

    def skip(self, count: int, what: str, move: bool = True) -> None:
        if count > self.size - self.at:
            left = self.size - self.at
            raise self.fail(f"{what} takes {count} bytes, {left} are left; it is truncated or lies")
        if move:
            self.at += count
            self.file.seek(self.at)

    def number(self, code: str, what: str) -> Any:
        code = code.replace("D", "d")
        (value,) = struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}"), what))
        return value

    def string(self, what: str) -> str:
        length = self.number("Q", what)
        if length > LONGEST:
            raise self.fail(f"{what} is a text of {length} bytes; names have up to {LONGEST}")
        return self.take(length, what).decode("utf-8", "replace")

    def container(self) -> Container:
        if self.take(4, "its mark") != b"GGUF":
            raise self.fail("it does not begin with GGUF")
        version = self.number("I", "its version")
        if version not in VERSIONS:
            raise self.fail(f"it is of version {version}; 2 and 3, little-endian, can be read")
        tensors, entries = (self.number("Q", "its counts") for _ in range(2))
        if max(tensors, entries) > MOST:
            raise self.fail(f"it says it has {tensors} tensors and {entries} entries")
        values: dict[str, Any] = {}
        for index in range(entries):
            key = self.string(f"the key of entry {index}")
            values[key] = self.value(self.number("I", f"entry {key!r}"), f"entry {key!r}")
        found = [self.tensor(index) for index in range(tensors)]
        alignment = values.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 0 < alignment <= LONGEST:
            raise self.fail(f"general.alignment is {alignment!r}")
        first = -(-self.at // alignment) * alignment
        placed = {entry.name: self.placed(entry, first) for entry in found}
        if len(placed) != len(found):
            raise self.fail("two tensors have one name")
        return Container(self.path, values, placed)

    def value(self, kind: int, what: str, depth: int = 0) -> Any:
        """One value; None for what nobody asks for."""
        if kind == _STRING:
            length = self.number("Q", what)
            if length <= LONGEST:
                return self.take(length, what).decode("utf-8", "replace")
            self.skip(length, what)
            return None
        if kind == _ARRAY:
            return self.array(what, depth)
        if kind >= len(_NUMBERS):
            raise self.fail(f"{what} is of a type {kind} that does not exist")
        return self.number(_NUMBERS[kind], what)

    def skip_strings(self, count: int, what: str) -> None:
        """Past so many strings, as fast as Python goes: a vocabulary has 10^5 of them and more."""
        read, at = self.file.read, self.at
        for _ in range(count):
            length = int.from_bytes(read(8), "little")
            at += 8 + length
            if at > self.size:
                raise self.fail(f"{what} ends behind the file; it is truncated or lies")
            if length < LONGEST:
                read(length)
            else:
                self.file.seek(at)
        self.at = at

    def array(self, what: str, depth: int) -> Any:
        kind, count = self.number("I", what), self.number("Q", what)
        if kind in (_STRING, _ARRAY):
            self.strings += count
            if self.strings > MOST or depth >= DEEPEST:
                raise self.fail(f"{what} has {count} texts or arrays; {MOST} in all are the most")
            if kind == _STRING:
                self.skip_strings(count, what)
            else:
                for _ in range(count):
                    self.array(what, depth + 1)
            return None
        if kind >= len(_NUMBERS):
            raise self.fail(f"{what} is an array of a type {kind} that does not exist")
        code = _NUMBERS[kind].replace("D", "d")
        width = struct.calcsize(f"<{code}")
        if count > KEPT:
            self.skip(count * width, what)
            return None
        return struct.unpack(f"<{count}{code}", self.take(count * width, what))

    def tensor(self, index: int) -> Entry:
        """What the file says of a tensor; `start` still counts from where the bytes begin."""
        name = self.string(f"the name of tensor {index}")
        what = f"tensor {name!r}"
        rank = self.number("I", what)
        if not 1 <= rank <= 4:
            raise self.fail(f"{what} has {rank} axes")
        shape = tuple(self.number("Q", what) for _ in range(rank))[::-1]
        kind, start = self.number("I", what), self.number("Q", what)
        label, block, nbytes = TYPES.get(kind, (f"type {kind}", 1, 0))
        if prod(shape) < 1 or shape[-1] % block:
            raise self.fail(f"{what} of {label}, in blocks of {block}, is {list(shape)}")
        return Entry(name, label, shape, start, prod(shape) // block * nbytes)

    def placed(self, entry: Entry, first: int) -> Entry:
        """The tensor with its place in the file, checked."""
        start = first + entry.start
        if start + entry.nbytes > self.size:
            raise self.fail(
                f"tensor {entry.name!r} of {entry.type} {list(entry.shape)} lies at bytes {start} "
                f"to {start + entry.nbytes} of {self.size}; the file is truncated or lies"
            )
        return Entry(entry.name, entry.type, entry.shape, start, entry.nbytes)
