"""What a GPU module says where it cannot run: the environment makes the simulated GPU so."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from apq_tvm import pipeline
from apq_tvm.codegen.cuda import compilers
from apq_tvm.codegen.cuda.simulator import DRIVER, Simulator
from apq_tvm.errors import BadTarget, BuildError
from apq_tvm.schedules.devices import find_profile
from tests.onnx_models import build, rand, save

ROWS = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A module called ``small``: an embedding, a layer of any-precision, one of integers."""
    folder = tmp_path_factory.mktemp("small")
    nodes = [
        ("Gather", "table ids", "rows"),
        ("MatMul", "rows w", "h"),
        ("Relu", "h", "r"),
        ("MatMul", "r v", "y"),
    ]
    weights = {"table": rand(9, 64), "w": rand(64, 96, seed=1), "v": rand(96, 32, seed=2)}
    inputs = {"ids": ("int64", ["batch", "sequence"])}
    path = save(build(nodes, inputs, "y", weights), folder)
    pipeline.compile(
        path,
        folder / "small",
        target="rtx-3090",
        scheme="W4A8g32",
        tensor_types={"n_y": "anyprec3-4"},
        images=Simulator(),
    )
    return folder


RUN = """
import numpy as np
import small
ids = np.arange({count}).reshape(1, -1) % 9
y = small.run(ids=ids)["y"]
"""


def said(program, folder: Path, env: dict[str, str], text: str = "import small") -> str:
    """The last line that a program that failed printed."""
    done = program(folder, text, env)
    assert done.returncode == 1, done.stderr
    return done.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize(
    "env, words",
    [
        ({"CUSIM_DEVICES": "0"}, ["WrongMachine", "CUDA_ERROR_NO_DEVICE"]),
        ({"CUSIM_VERSION": "11080"}, ["WrongMachine", "release 525", "CUDA 11.8"]),
        ({"CUSIM_SM": "75"}, ["WrongMachine", "rtx-3090", "simulated GPU 0", "7.5"]),
        ({"CUSIM_SM": "80"}, ["WrongMachine", "8.0", "apq-tvm targets"]),
        ({"CUSIM_MEMORY": "8192"}, ["RunError", "bytes of weights", "of 8192 are free"]),
    ],
)
def test_machines_that_do_not_fit(
    program, folder: Path, env: dict[str, str], words: list[str]
) -> None:
    line = said(program, folder, env)
    assert all(word in line for word in words), line


def test_no_driver(program, folder: Path) -> None:
    done = program(folder, "import ctypes; ctypes.CDLL('libcuda.so.1')", with_driver=False)
    if done.returncode == 0:
        pytest.skip("this machine has a driver of NVIDIA's")
    done = program(folder, "import small", with_driver=False)
    assert "WrongMachine" in done.stderr and "no NVIDIA driver on this machine" in done.stderr


def test_a_driver_that_lacks_a_function(
    program, folder: Path, driver: Path, tmp_path: Path
) -> None:
    library = (driver / DRIVER).read_bytes()
    name, other = b"\0cuGraphLaunch\0", b"\0cuGraphLaunce\0"
    assert name in library
    (tmp_path / DRIVER).write_bytes(library.replace(name, other))
    line = said(program, folder, {"LD_LIBRARY_PATH": str(tmp_path)})
    assert "WrongMachine" in line and "cuGraphLaunch" in line, line


def test_too_little_memory_for_a_run_leaves_the_module_usable(program, folder: Path) -> None:
    text = """
    import numpy as np
    import small
    ids = np.zeros((1, 4096), np.int64)
    try:
        small.run(ids=ids)
    except small.RunError as error:
        print(error)
    print(small.run(ids=ids[:, :2])["y"].shape)
    """
    done = program(folder, text, {"CUSIM_MEMORY": str(1 << 19)})
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert "no memory for" in first and "of inputs and outputs" in first
    assert second == "(1, 2, 32)"


def test_ids_outside_their_table(program, folder: Path) -> None:
    text = """
    import numpy as np
    import small
    for bad in ([[0, 9, 3]], [[1, 2, -10]], [[9, 9, 9]]):
        try:
            small.run(ids=np.array(bad))
        except small.InputError as error:
            print(error)
    print(small.run(ids=np.array([[0, -9, 8]]))["y"].shape)
    """
    done = program(folder, text)
    assert done.returncode == 0, done.stderr
    *errors, shape = done.stdout.splitlines()
    assert [e.split(": ")[1].split(" is")[0] for e in errors] == [
        "id 9 (element 1)", "id -10 (element 2)", "id 9 (element 0)",
    ]  # fmt: skip
    assert errors[2].endswith("3 of 3 ids are") and shape == "(1, 3, 32)"


def test_devices_are_listed_and_chosen(program, folder: Path) -> None:
    text = """
    import numpy as np
    import small
    ids = np.arange(4)[None]
    before = small.run(ids=ids)["y"]
    print(small.devices())
    small.set_precision(3)
    small.set_device(1)
    print(set(small.precisions().values()))
    small.set_precision(4)
    np.testing.assert_array_equal(before, small.run(ids=ids)["y"])
    small.set_device(2)
    """
    done = program(folder, text, {"CUSIM_DEVICES": "2"})
    assert done.returncode == 1
    assert done.stdout.splitlines() == ["['simulated GPU 0', 'simulated GPU 1']", "{3}"]
    last = done.stderr.strip().splitlines()[-1]
    assert "WrongMachine" in last and "there is no GPU 2, this machine has 2 (0 to 1)" in last


def test_a_fork_is_told(program, folder: Path) -> None:
    text = (
        RUN.format(count=ROWS)
        + """
import os
if os.fork() == 0:
    try:
        small.run(ids=ids)
    except small.RunError as error:
        print(error, flush=True)
    os._exit(0)
os.wait()
assert small.run(ids=ids)["y"].shape == y.shape
"""
    )
    done = program(folder, text)
    assert done.returncode == 0, done.stderr
    assert "was opened before this process was forked" in done.stdout


def test_a_kernel_that_faults_is_remembered(program, folder: Path) -> None:
    text = """
    import numpy as np
    import os
    import small
    ids = np.arange(4)[None]
    small.run(ids=ids)
    os.environ["CUSIM_FAULT"] = "embedding_kernel"
    for _ in range(2):
        try:
            small.run(ids=ids)
        except small.RunError as error:
            print(error)
        os.environ.pop("CUSIM_FAULT", None)
    """
    done = program(folder, text)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in first
    assert "an earlier run's kernel faulted" in second


def test_a_shape_is_captured_once_and_bits_have_graphs_of_their_own(
    program, folder: Path, tmp_path: Path
) -> None:
    text = """
    import numpy as np
    import small
    for rows in (4, 4, 2, 4):
        for bits in (4, 3):
            small.run(ids=np.zeros((1, rows), np.int64), bits=bits)
    """
    log = tmp_path / "log.txt"
    done = program(folder, text, {"CUSIM_LOG": str(log)})
    assert done.returncode == 0, done.stderr
    lines = log.read_text().splitlines()
    # The first shape is the larger one: nothing has to grow, and its graphs stay.
    assert lines.count("capture") == 4
    assert sum(line.startswith("graph ") for line in lines) == 8
    assert not [line for line in lines if line.startswith("launch") and "captured" not in line]


def test_memory_is_given_back(program, folder: Path, tmp_path: Path) -> None:
    text = """
    import numpy as np
    import small
    small.run(ids=np.zeros((1, 3), np.int64))
    small.set_device(0)
    """
    log = tmp_path / "log.txt"
    done = program(folder, text, {"CUSIM_LOG": str(log)})
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in log.read_text().splitlines()]
    taken = sorted(int(line[1]) for line in lines if line[0] == "alloc")
    given = sorted(int(line[1]) for line in lines if line[0] == "free")
    (weights,) = {size for size in taken if taken.count(size) == 2}
    assert sorted([*given, weights]) == taken  # all but the weights on the device it is on now


def test_memory_goes_with_the_module(program, folder: Path, tmp_path: Path) -> None:
    """When nobody holds it any more, arrays of its runs neither."""
    text = """
    import gc, sys
    import numpy as np
    import small
    y = small.run(ids=np.zeros((1, 3), np.int64), on_device=True)["y"]
    before = np.asarray(y)
    del sys.modules["small"], small
    gc.collect()
    np.testing.assert_array_equal(y, before)
    del y
    gc.collect()
    """
    log = tmp_path / "log.txt"
    done = program(folder, text, {"CUSIM_LOG": str(log)})
    assert done.returncode == 0 and not done.stderr, done.stderr
    lines = [line.split() for line in log.read_text().splitlines()]
    taken, given = (sorted(line[1] for line in lines if line[0] == w) for w in ("alloc", "free"))
    assert taken == given


def test_results_do_not_depend_on_the_order_of_threads(program, folder: Path) -> None:
    text = RUN.format(count=ROWS) + "print(y.tobytes().hex())"
    runs = {program(folder, text, {"CUSIM_SEED": str(seed)}).stdout for seed in range(3)}
    assert len(runs) == 1 and np.prod(list(map(len, runs))) > 1000


def test_a_grid_beyond_the_gpu(program, tmp_path: Path) -> None:
    """More rows than a launch has blocks for: told, and fewer rows run."""
    path = save(
        build([("MatMul", "x w", "y")], {"x": ("float32", ["m", 32])}, "y", {"w": rand(32, 16)}),
        tmp_path,
    )
    pipeline.compile(
        path, tmp_path / "tall", target="rtx-3090", scheme="W2A4g256", images=Simulator()
    )
    text = """
    import numpy as np
    import tall
    try:
        tall.run(x=np.zeros((8 * 65535 + 1, 32), np.float32))
    except tall.RunError as error:
        print(error)
    print(tall.run(x=np.zeros((5, 32), np.float32))["y"].shape)
    """
    done = program(tmp_path, text, {"CUSIM_MEMORY": str(2 << 30)})
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert "1 x 65536 x 1 blocks is beyond the GPU's: give a run fewer rows" in first
    assert second == "(5, 16)"


def test_no_compiler_of_images(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Neither NVRTC nor nvcc: the line that installs it, before anything is made."""
    monkeypatch.setattr(compilers, "find_nvrtc", lambda major: None)
    which = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "nvcc" else which(name))
    path = save(
        build([("MatMul", "x w", "y")], {"x": ("float32", ["m", 32])}, "y", {"w": rand(32, 16)}),
        tmp_path,
    )
    wanted = [("rtx-3090", "apq-tvm[cuda]")]
    if which("aarch64-linux-gnu-gcc"):
        wanted.append(("jetson-agx-thor", "apq-tvm[cuda13]"))
    for target, extra in wanted:
        with pytest.raises(BuildError, match=re.escape(f"pip install '{extra}'")):
            pipeline.compile(path, tmp_path / "m", target=target)
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize(
    "target, triple",
    [
        ("rtx-3090", "aarch64-linux-gnu"),
        ("jetson-agx-orin", "x86_64-linux-gnu"),
        ("cuda-auto", "riscv64-linux-gnu"),
        ("h200", "x86_64-windows-msvc"),
    ],
)
def test_a_triple_of_another_host(target: str, triple: str) -> None:
    with pytest.raises(BadTarget, match=f"--triple {triple}"):
        find_profile(target, triple)


def test_a_library_for_another_host(program, folder: Path, tmp_path: Path) -> None:
    """What a Jetson's module says on a PC."""
    shutil.copytree(folder / "small", tmp_path / "small")
    manifest = tmp_path / "small" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"x86_64"', '"aarch64"'))
    line = said(program, tmp_path, {})
    assert "WrongMachine" in line and "compiled for linux on aarch64" in line
