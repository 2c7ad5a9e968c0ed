"""Images made small in Python are undone in C; what is damaged is refused, whatever it holds."""

from __future__ import annotations

import ctypes
import shutil
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from apq_tvm.codegen.cuda.squeeze import squeeze
from apq_tvm.codegen.package.folder import RUNTIME

TEXTS = st.lists(st.sampled_from([b"mov.u32 %r1", b"\n", b"ab", b"aaaaaaaaaaaaaaa", b"\0" * 300]))
DATA = st.one_of(st.binary(max_size=400), TEXTS.map(b"".join))


@pytest.fixture(scope="module")
def unpack(tmp_path_factory: pytest.TempPathFactory):
    """``(packed, bytes) -> bytes or None`` by the runtime's own C; what it writes is fenced."""
    cc = shutil.which("cc")
    if cc is None:
        pytest.skip("no C compiler")
    path = tmp_path_factory.mktemp("unpack") / "unpack.so"
    includes = [f"-I{RUNTIME / part}" for part in ("common", "cuda")]
    source = str(RUNTIME / "cuda" / "unpack.c")
    subprocess.run([cc, "-shared", "-fPIC", *includes, source, "-o", str(path)], check=True)
    function = ctypes.CDLL(str(path)).apq_unpack
    function.argtypes = (ctypes.c_char_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_size_t)

    def run(packed: bytes, size: int) -> bytes | None:
        fence = b"\xa5" * 64
        buffer = ctypes.create_string_buffer(fence + bytes(size) + fence, size + 128)
        sound = function(packed, len(packed), ctypes.addressof(buffer) + 64, size)
        assert buffer.raw[:64] == fence and buffer.raw[64 + size :] == fence
        return buffer.raw[64 : 64 + size] if sound else None

    return run


@given(DATA)
def test_what_was_made_small_comes_back(unpack, data: bytes) -> None:
    packed = squeeze(data)
    assert unpack(packed, len(data)) == data
    assert unpack(packed, len(data) + 1) is None
    assert not data or unpack(packed, len(data) - 1) is None


@given(st.binary(max_size=64), st.integers(0, 512))
def test_anything_is_read_without_harm(unpack, packed: bytes, size: int) -> None:
    unpack(packed, size)


def test_text_of_kernels_becomes_a_fifth() -> None:
    lines = (f"  ld.global.u32 %r{i}, [%rd{i % 7}+{4 * i}];\n" for i in range(4000))
    text = "".join(lines).encode()
    assert len(squeeze(text)) * 3 < len(text)
