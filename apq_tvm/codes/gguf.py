"""Matrices of a GGUF file."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from apq_tvm.codes.blocks import DECODERS
from apq_tvm.codes.container import TYPES, Container, Entry, read_container
from apq_tvm.codes.matrix import CodesFile, Matrix, Rows
from apq_tvm.codes.names import gguf_names
from apq_tvm.errors import BadInput
from apq_tvm.types import F32, QuantizedTensor

_BLOCKS = {name: (block, nbytes) for name, block, nbytes in TYPES.values()}


def read_gguf(path: Path) -> CodesFile:
    """What a GGUF file has of matrices.

    Raises
    ------
    BadInput
        `apq_tvm.codes.container.read_container`; or it is one of several parts.
    """
    container = read_container(path)
    parts = container.values.get("split.count", 1)
    if isinstance(parts, int) and parts > 1:
        raise BadInput(
            f"{path} is one of {parts} parts; join them (llama-gguf-split --merge) and give the "
            "whole file"
        )
    matrices = {
        entry.name: _matrix(container, entry)
        for entry in container.tensors.values()
        if len(entry.shape) == 2
    }
    return CodesFile(path.name, matrices, gguf_names)


def _matrix(container: Container, entry: Entry) -> Matrix:
    n, k = entry.shape
    if entry.type not in DECODERS:
        reads = ", ".join(name for name in DECODERS if name[0] == "Q")
        why = f"{entry.type} is not read: {reads} and floats are"
        return Matrix(entry.name, entry.type, (n, k), (), why)
    reading = partial(_read, container, entry)
    return Matrix(entry.name, entry.type, (n, k), (reading,), heads=_heads(container, entry.name))


def _read(container: Container, entry: Entry, rows: Rows) -> QuantizedTensor | F32:
    """Some rows, decoded."""
    block, nbytes = _BLOCKS[entry.type]
    raw = container.read(entry, rows)
    return DECODERS[entry.type](raw.reshape(len(rows), entry.shape[1] // block, nbytes))


def _heads(container: Container, name: str) -> int:
    """Heads whose rows llama.cpp's converter puts in pairs, for its rotary embedding."""
    what = {"attn_q": "head_count", "attn_k": "head_count_kv"}
    parts = name.split(".")
    if len(parts) != 4 or parts[2] not in what:
        return 0
    values, arch = container.values, container.values.get("general.architecture", "")
    found = values.get(f"{arch}.attention.{what[parts[2]]}")
    found = values.get(f"{arch}.attention.head_count") if found is None else found
    if isinstance(found, tuple) and parts[1].isdecimal() and int(parts[1]) < len(found):
        found = found[int(parts[1])]
    return found if isinstance(found, int) and 0 < found <= 1 << 16 else 0
