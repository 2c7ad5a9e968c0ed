"""The weights file: layout, checksum, what other tools read."""

from __future__ import annotations

import ctypes
import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from apq_tvm.codegen.package.folder import COMMON
from apq_tvm.codegen.package.weights import _TYPES, ALIGNMENT, checksum, write_weights


@pytest.fixture(scope="module")
def c_checksum(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("sum") / "sum.so"
    files = [str(COMMON / f) for f in ("weights.c", "errors.c")]
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", *files, "-o", str(path)], check=True)
    function = ctypes.CDLL(str(path)).apq_checksum
    function.restype = ctypes.c_uint64
    return lambda data: function(data, ctypes.c_size_t(len(data)))


@given(words=st.binary(max_size=400).map(lambda b: b[: len(b) // 8 * 8]))
def test_c_and_python_agree(c_checksum: Any, words: bytes) -> None:
    assert checksum(words) == c_checksum(words)


def test_long_data_agree(c_checksum: Any) -> None:
    data = np.random.default_rng(0).bytes(3 << 20)
    assert checksum(data) == c_checksum(data)


@given(data=st.binary(min_size=64, max_size=64), at=st.integers(0, 511), other=st.integers(0, 511))
def test_one_or_two_flipped_bits_show(data: bytes, at: int, other: int) -> None:
    altered = bytearray(data)
    for bit in {at, other}:
        altered[bit // 8] ^= 1 << bit % 8
    assert checksum(bytes(altered)) != checksum(data)


def test_swapped_words_show() -> None:
    words = np.arange(16, dtype="<u8")
    swapped = words.copy()
    swapped[[3, 9]] = swapped[[9, 3]]
    assert checksum(words.tobytes()) != checksum(swapped.tobytes())


def test_every_type_is_read_back(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrays = {f"w.{t}": rng.integers(0, 2, (3, 5)).astype(t) for t in _TYPES}
    arrays["scalar"] = np.float32(3.5).reshape(())
    arrays["transposed"] = np.arange(12, dtype=np.float32).reshape(3, 4).T
    file = write_weights(tmp_path / "w.safetensors", arrays)
    loaded = load_file(tmp_path / "w.safetensors")
    data = (tmp_path / "w.safetensors").read_bytes()
    assert len(data) == file.file_bytes
    for name, array in arrays.items():
        np.testing.assert_array_equal(loaded[name], array)
        at = file.offsets[name]
        assert at % ALIGNMENT == 0
        assert data[at : at + array.nbytes] == array.tobytes()


def test_checksums_of_the_file(tmp_path: Path) -> None:
    arrays = {"a": np.arange(7, dtype=np.int8), "b": np.arange(100, dtype=np.float64)}
    file = write_weights(tmp_path / "w.safetensors", arrays)
    data = (tmp_path / "w.safetensors").read_bytes()
    assert checksum(data[: file.header_bytes]) == file.header_checksum
    assert checksum(data[file.header_bytes :]) == file.data_checksum
    header = json.loads(data[8 : file.header_bytes])
    assert header["__metadata__"]["checksum"] == f"{file.data_checksum:016x}"


def test_no_weights(tmp_path: Path) -> None:
    file = write_weights(tmp_path / "w.safetensors", {})
    assert file.file_bytes == file.header_bytes
    assert load_file(tmp_path / "w.safetensors") == {}


def test_same_weights_same_bytes(tmp_path: Path) -> None:
    arrays = {"a": np.ones(5, np.float16)}
    for name in ("one", "two"):
        write_weights(tmp_path / name, arrays)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
