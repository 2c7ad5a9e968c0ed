"""Tensors that lie in a GPU's memory go in and come out by DLPack, without a copy."""

from __future__ import annotations

import os
import subprocess
import textwrap
from pathlib import Path

import numpy as np
import pytest

from apq_tvm import pipeline
from apq_tvm.codegen.cuda.simulator import Simulator
from tests.onnx_models import build, rand, save
from tests.small_llama import inputs, small_llama


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A module called ``small``, and the decoder ``llama``."""
    folder = tmp_path_factory.mktemp("tensors")
    nodes = [("MatMul", "x w", "h"), ("Relu", "h", "y"), ("Neg", "h", "z")]
    path = save(build(nodes, {"x": ("float32", ["m", 64])}, "y z", {"w": rand(64, 48)}), folder)
    for name, onnx in (("small", path), ("llama", small_llama(folder / "llama.onnx"))):
        pipeline.compile(
            onnx, folder / name, target="rtx-3090", scheme="W4A8g32", images=Simulator()
        )
    return folder


BEGIN = """
import ctypes, gc
import numpy as np
import small
x = np.arange(3 * 64, dtype=np.float32).reshape(3, 64) / 64
wanted = small.run(x=x)

class Lent:
    '''A tensor of another library: it owns nothing and says where it lies.'''
    def __init__(self, array, device=None, skip=0):
        self.array, self.device, self.skip, self.streams = array, device, skip, []
    def __dlpack_device__(self):
        return self.device or self.array.__dlpack_device__()
    def __dlpack__(self, *, stream=None):
        self.streams.append(stream)
        capsule = self.array.__dlpack__()
        tensor = small.device_array._lent[max(small.device_array._lent)][0]
        tensor.device_type, tensor.device_id = self.__dlpack_device__()
        tensor.byte_offset = self.skip
        return capsule
"""


def passes(program, folder: Path, text: str, **env: str) -> None:
    done = program(folder, BEGIN + textwrap.dedent(text), env)
    assert done.returncode == 0, done.stderr


def test_outputs_stay_and_go_in_again(program, folder: Path) -> None:
    passes(
        program,
        folder,
        """
        there = small.run(x=small.to_device(x), on_device=["y"])
        assert type(there["y"]).__name__ == "DeviceArray" and type(there["z"]) is np.ndarray
        np.testing.assert_array_equal(np.asarray(there["y"]), wanted["y"])
        np.testing.assert_array_equal(there["z"], wanted["z"])
        everything = small.run(x=x, on_device=True)
        np.testing.assert_array_equal(np.asarray(everything["z"], np.float64), wanted["z"])
        assert everything["y"].__dlpack_device__() == (2, 0) and everything["y"].nbytes == 576
        assert "(3, 48)" in repr(everything["y"])
        """,
    )


def test_tensors_of_other_libraries(program, folder: Path) -> None:
    """Aligned or not, in the device's memory or managed; their stream is waited for by them."""
    passes(
        program,
        folder,
        """
        lent = Lent(small.to_device(x))
        np.testing.assert_array_equal(small.run(x=lent)["y"], wanted["y"])
        assert lent.streams[0] > 2  # a stream's address, not a number that stands for one
        np.testing.assert_array_equal(small.run(x=Lent(lent.array, (13, 5)))["y"], wanted["y"])
        shifted = np.zeros((4, 64), np.float32)
        shifted.ravel()[1:193] = x.ravel()
        odd = small.to_device(shifted)
        odd._dims[0] = 3
        np.testing.assert_array_equal(small.run(x=Lent(odd, skip=4))["y"], wanted["y"])
        del lent, odd
        gc.collect()
        small.device_array.forget()
        assert not small.device_array._lent and small._library.arrays == 0
        """,
    )


@pytest.mark.parametrize(
    "tensor, words",
    [
        ("Lent(small.to_device(x), (2, 1))", ["'x' is in the memory of GPU 1", "runs on GPU 0"]),
        ("Lent(small.to_device(x), (10, 0))", ["'x' is a Lent that numpy cannot read by DLPack"]),
        ("small.to_device(x.astype(np.float64))", ["code 2 with 64 bits, wanted code 2 with 32"]),
        ("small.to_device(x[:, :32])", ["shape (3, 32), wanted (m, 64)"]),
        ("small.to_device(np.array(['a']))", ["cannot lie in a GPU's memory"]),
    ],
)
def test_bad_tensors_are_refused(program, folder: Path, tensor: str, words: list[str]) -> None:
    done = program(folder, BEGIN + f"small.run(x={tensor})", {})
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert "InputError" in last and all(word in last for word in words), last


def test_what_is_not_contiguous_is_refused(program, folder: Path) -> None:
    passes(
        program,
        folder,
        """
        array = small.to_device(x)
        steps = (ctypes.c_int64 * 2)(1, 3)
        array._tensor.strides = ctypes.addressof(steps)
        try:
            small.run(x=array)
        except small.InputError as error:
            assert "'x' lies in the GPU's memory and is not contiguous" in str(error), error
        else:
            raise AssertionError
        """,
    )


def test_arrays_hold_their_device(program, folder: Path) -> None:
    """It cannot be changed under them; they go with the last who holds them."""
    passes(
        program,
        folder,
        """
        kept = small.run(x=x, on_device=True)
        capsule = kept["y"].__dlpack__()
        del kept
        try:
            small.set_device(1)
        except small.RunError as error:
            assert "1 arrays lie in the memory of GPU 0" in str(error), error
        else:
            raise AssertionError
        del capsule
        gc.collect()
        small.set_device(1)
        y = small.run(x=x, on_device=True)["y"]
        assert y.__dlpack_device__() == (2, 1)
        for bad in ({"on_device": "q"}, {"on_device": ["y", "q"]}):
            try:
                small.run(x=x, **bad)
            except small.InputError as error:
                assert "unknown outputs: q" in str(error), error
            else:
                raise AssertionError
        try:
            y.__dlpack__(dl_device=(1, 0))
        except BufferError:
            pass
        else:
            raise AssertionError
        """,
        CUSIM_DEVICES="2",
    )


def test_graphs_are_captured_when_tensors_come_again(program, folder: Path, tmp_path: Path) -> None:
    """Numpy's at once, a program's own the second time; what lies elsewhere gets its own."""
    log = tmp_path / "log"
    passes(
        program,
        folder,
        """
        a, b = small.to_device(x), small.to_device(-x)
        for source in (a, b, a, a, b, a):
            y = small.run(x=source)["y"]
            np.testing.assert_array_equal(y, wanted["y"] if source is a else small.run(x=-x)["y"])
        """,
        CUSIM_LOG=str(log),
    )
    lines = log.read_text().splitlines()
    words = [line.split()[0] for line in lines]
    assert words.count("captured") == 3  # numpy's, a's and b's
    assert words.count("graph") == 3 + 3 + 1


def test_a_c_program(program, folder: Path, driver: Path, tmp_path: Path) -> None:
    """With memory of the device's, and a stream."""
    small, source = folder / "small", Path(__file__).with_name("device_memory.c")
    flags = ["-std=c11", "-Wall", "-Wextra", "-Werror", f"-I{small}", f"-L{small}", "-lsmall"]
    command = ["cc", str(source), *flags, "-o", str(tmp_path / "main")]
    subprocess.run(command, check=True)
    done = subprocess.run(
        [tmp_path / "main", small / "weights.safetensors"],
        env={**os.environ, "LD_LIBRARY_PATH": f"{small}:{driver}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    np.save(tmp_path / "y.npy", np.array(done.stdout.split(), np.float32).reshape(3, 48))
    passes(
        program,
        folder,
        f"""
        np.testing.assert_allclose(wanted["y"], np.load({str(tmp_path / "y.npy")!r}), atol=1e-5)
        """,
    )


def test_a_cache_never_crosses_the_bus(program, folder: Path, tmp_path: Path) -> None:
    """Token by token with the cache on the device, as at once; ids and logits alone are copied."""
    np.savez(tmp_path / "feeds.npz", **inputs(5))
    log = tmp_path / "log"
    text = f"""
    import numpy as np
    import llama
    feeds = dict(np.load({str(tmp_path / "feeds.npz")!r}))
    ids, past = feeds.pop("input_ids"), feeds
    whole = llama.run(input_ids=ids, **past)["logits"]
    caches = {{name.replace("past_key_values", "present") for name in past}}
    past = {{name: llama.to_device(value) for name, value in past.items()}}
    log = open({str(log)!r}, "a")
    for at in range(5):
        print("token", file=log, flush=True)
        step = llama.run({{"input_ids": ids[:, at : at + 1], **past}}, on_device=caches)
        np.testing.assert_allclose(step["logits"][0, 0], whole[0, at], atol=1e-3)
        past = {{name: step[name.replace("past_key_values", "present")] for name in past}}
    """
    done = program(folder, text, {"CUSIM_LOG": str(log)})
    assert done.returncode == 0, done.stderr
    for token in log.read_text().split("token\n")[1:]:
        moved = [line.split() for line in token.splitlines() if "load" in line]
        uploads = [int(size) for way, size in moved if way == "upload"]
        assert uploads == [8]  # the id
        assert max(int(size) for _, size in moved) == 4 * 40  # the logits
