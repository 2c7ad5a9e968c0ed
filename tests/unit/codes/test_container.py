"""GGUF files that are broken or lie are refused in words, at once and without much memory."""

from __future__ import annotations

import struct
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from apq_tvm.codes.container import read_container
from apq_tvm.codes.gguf import read_gguf
from apq_tvm.codes.match import read_codes
from apq_tvm.errors import BadInput
from tests.cases.gguf_files import random_blocks, text, value_bytes, write

SECONDS, MEGABYTES = 5.0, 4


def good(path: Path) -> bytes:
    tensors = {
        "blk.0.attn_q.weight": ("Q4_1", random_blocks("Q4_1", 4, 64)),
        "output_norm.weight": ("F32", np.ones((1, 8), np.float32)),
    }
    values = {"llama.attention.head_count": 2, "tokenizer.ggml.tokens": ["a", "b"] * 9}
    return write(path, tensors, values).read_bytes()


def refused(path: Path, data: bytes, match: str) -> None:
    path.write_bytes(data)
    started = time.perf_counter()
    with pytest.raises(BadInput, match=match):
        read_gguf(path)
    assert time.perf_counter() - started < SECONDS
    if len(data) < 1 << 10:  # watching every allocation is slow
        tracemalloc.start()
        with pytest.raises(BadInput):
            read_gguf(path)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < MEGABYTES << 20


def test_a_sound_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    good(path)
    file = read_container(path)
    assert file.values["llama.attention.head_count"] == 2
    entry = file.tensors["blk.0.attn_q.weight"]
    assert (entry.type, entry.shape) == ("Q4_1", (4, 64))
    raw = random_blocks("Q4_1", 4, 64)
    for rows in ([0, 1, 2, 3], [3], [2, 0]):
        np.testing.assert_array_equal(file.read(entry, np.array(rows)), raw[rows])
    assert read_gguf(path).matrices["blk.0.attn_q.weight"].heads == 2


def test_cut_anywhere_it_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    data = good(path)
    last = 32 - len(data) % 32  # bytes behind the last tensor do not matter
    for size in range(0, len(data) - 32 - last):
        path.write_bytes(data[:size])
        with pytest.raises(BadInput, match="sound GGUF file"):
            read_container(path)


@pytest.mark.parametrize("seed", range(8))
def test_any_bytes_changed_it_is_read_or_refused(seed: int, tmp_path: Path) -> None:
    path, rng = tmp_path / "a.gguf", np.random.default_rng(seed)
    data = good(path)
    for _ in range(60):
        changed = bytearray(data)
        for at in rng.integers(0, len(data) - 320, 4):
            changed[at] = int(rng.integers(0, 256))
        path.write_bytes(changed)
        try:
            for matrix in read_gguf(path).matrices.values():
                for reading in matrix.readings:
                    reading(np.arange(1))
        except BadInput:
            pass


def head(tensors: int, entries: int, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, entries)


def info(name: str, extents: tuple[int, ...], kind: int = 3, offset: int = 0) -> bytes:
    sizes = struct.pack(f"<I{len(extents)}Q", len(extents), *extents)
    return text(name) + sizes + struct.pack("<IQ", kind, offset)


HUGE = 2**63
CASES = {
    "another mark": (b"GGML" + bytes(60), "does not begin with GGUF"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "version"),
    "many tensors": (head(HUGE, 0), "it says it has"),
    "many entries": (head(0, HUGE), "it says it has"),
    "entries that are not there": (head(0, 1 << 20), "the key of entry 0"),
    "a long key": (head(0, 1) + struct.pack("<Q", HUGE) + bytes(99), f"text of {HUGE} bytes"),
    "a long string": (
        head(0, 1) + text("a") + struct.pack("<IQ", 8, HUGE) + bytes(99),
        f"entry 'a' takes {HUGE} bytes, 99 are left",
    ),
    "a long array": (
        head(0, 1) + text("a") + struct.pack("<IIQ", 9, 10, HUGE) + bytes(99), "entry 'a' takes"
    ),
    "an array of many strings": (
        head(0, 1) + text("a") + struct.pack("<IIQ", 9, 8, HUGE) + bytes(99), "texts or arrays"
    ),
    "many empty strings": (
        head(0, 1) + text("a") + struct.pack("<IIQ", 9, 8, 1 << 21) + bytes(9 << 20),
        "sound GGUF file",
    ),
    "arrays in arrays": (
        head(0, 1) + text("a") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 99, "arrays"
    ),
    "a type that is none": (head(0, 1) + text("a") + struct.pack("<I", 99), "does not exist"),
    "alignment 0": (
        head(1, 1) + text("general.alignment") + value_bytes(0) + info("w", (32, 1)) + bytes(64),
        "general.alignment is 0",
    ),
    "no axes": (head(1, 0) + info("w", ()) + bytes(64), "'w' has 0 axes"),
    "no rows": (head(1, 0) + info("w", (32, 0)) + bytes(64), r"'w' of Q4_1.*\[0, 32\]"),
    "half a block": (head(1, 0) + info("w", (48, 2)) + bytes(64), r"in blocks of 32, is \[2, 48\]"),
    "sizes that overflow": (
        head(1, 0) + info("w", (1 << 40, 1 << 40)) + bytes(64), "'w' of Q4_1 .* lies at bytes"
    ),
    "a tensor outside": (
        head(1, 0) + info("w", (32, 1), offset=HUGE) + bytes(64), "'w' of Q4_1 .* lies at bytes"
    ),
    "two of one name": (
        head(2, 0) + info("w", (32, 1)) + info("w", (32, 1)) + bytes(128), "two tensors"
    ),
    "parts": (head(0, 1) + text("split.count") + value_bytes(3) + bytes(64), "one of 3 parts"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_lies_is_refused(case: str, tmp_path: Path) -> None:
    refused(tmp_path / "a.gguf", *CASES[case])


def test_other_files_are_refused(tmp_path: Path) -> None:
    pickle = tmp_path / "pytorch_model.bin"
    pickle.write_bytes(b"\x80\x02}q\x00.")
    with pytest.raises(BadInput, match=r"neither GGUF nor safetensors.*never pickles"):
        read_codes(pickle)
    with pytest.raises(BadInput, match="no such file of codes"):
        read_codes(tmp_path / "absent.gguf")
    broken = tmp_path / "a.safetensors"
    broken.write_bytes(struct.pack("<Q", HUGE) + b"{}")
    with pytest.raises(BadInput, match="no readable safetensors file"):
        read_codes(broken)
