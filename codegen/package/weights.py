"""Weights files: safetensors, laid out so that every tensor can be used where it is mapped.

Format: https://github.com/huggingface/safetensors ("Format"): 8 bytes of header length, a JSON
header, the data without holes. Here the data start at a multiple of 64 bytes (spaces after the
JSON) and so does every tensor (uint8 tensors named ``_pad.N`` fill the gaps).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from apq_tvm.codegen.graph.c_source import WeightsFile
from apq_tvm.codegen.graph.plain import Array

ALIGNMENT = 64
_TYPES = {
    "bool": "BOOL",
    "int8": "I8",
    "uint8": "U8",
    "int16": "I16",
    "uint16": "U16",
    "int32": "I32",
    "uint32": "U32",
    "int64": "I64",
    "uint64": "U64",
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
}
_CHUNK_WORDS = 1 << 17


def checksum(data: bytes | NDArray[np.uint8], start: int = 0, seed: int | None = None) -> int:
    """Compute the checksum of ``apq_checksum`` (runtime/apq_runtime.h).

    Parameters
    ----------
    data : bytes-like
        A multiple of 8 bytes long.
    start : int
        Number of the first 64-bit word, to continue a sum.
    seed : int or None
        Sum so far; None starts with the number of bytes.

    Returns
    -------
    int
        Below 2^64.
    """
    words = np.frombuffer(data, dtype="<u8")
    total = len(words) * 8 if seed is None else seed
    for at in range(0, len(words), _CHUNK_WORDS):
        w = words[at : at + _CHUNK_WORDS].copy()
        w ^= w >> np.uint64(32)
        w *= np.uint64(0x9E3779B97F4A7C15)
        w ^= w >> np.uint64(29)
        odd = np.arange(start + at, start + at + len(w), dtype=np.uint64) * np.uint64(
            2
        ) + np.uint64(1)
        total = (total + int((w * odd).sum(dtype=np.uint64))) % (1 << 64)
    return total


def write_weights(
    path: Path, weights: Mapping[str, Array], progress: Callable[[int], None] | None = None
) -> WeightsFile:
    """Write a weights file.

    Parameters
    ----------
    path : Path
    weights : mapping of str to ndarray
        In the order they are stored.
    progress : callable or None
        Called with the bytes of each tensor written.

    Returns
    -------
    WeightsFile
        Offsets and checksums for the module table.

    Raises
    ------
    OSError
        The file could not be written.
    """
    header: dict[str, object] = {}
    pads: dict[str, int] = {}
    relative: dict[str, int] = {}
    end = 0
    for name, array in weights.items():
        relative[name] = end
        header[name] = {
            "dtype": _TYPES[str(array.dtype)],
            "shape": list(array.shape),
            "data_offsets": [end, end + array.nbytes],
        }
        end += array.nbytes
        pads[name] = -end % ALIGNMENT
        if pads[name]:
            span = [end, end + pads[name]]
            header[f"_pad.{len(header)}"] = {
                "dtype": "U8",
                "shape": [pads[name]],
                "data_offsets": span,
            }
            end += pads[name]
    data_sum = end
    word = 0
    for name, array in weights.items():
        flat = _bytes_of(array, pads[name])
        data_sum = checksum(flat, word, data_sum)
        word += len(flat) // 8
    header["__metadata__"] = {"format": "apq", "checksum": f"{data_sum:016x}"}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % ALIGNMENT)
    head = len(text).to_bytes(8, "little") + text
    with path.open("wb") as file:
        file.write(head)
        for name, array in weights.items():
            file.write(_bytes_of(array, pads[name]).data)
            if progress is not None:
                progress(array.nbytes)
    return WeightsFile(
        offsets={name: len(head) + at for name, at in relative.items()},
        header_bytes=len(head),
        file_bytes=len(head) + end,
        header_checksum=checksum(head),
        data_checksum=data_sum,
    )


def _bytes_of(array: Array, pad: int) -> NDArray[np.uint8]:
    """The array's bytes and its padding, without a copy where none is needed."""
    little = array.astype(array.dtype.newbyteorder("<"), copy=False)
    flat = np.ascontiguousarray(little).reshape(-1).view(np.uint8)
    return np.concatenate([flat, np.zeros(pad, np.uint8)]) if pad else flat
