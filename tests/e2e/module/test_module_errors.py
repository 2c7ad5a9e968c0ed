"""Wrong use and damage of compiled modules end in one named error each, never in a crash."""

from __future__ import annotations

import _ctypes
import ctypes
import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from apq_tvm.codegen.emit import emit
from apq_tvm.errors import BadInput
from apq_tvm.module import load_module
from apq_tvm.types import CompiledModule
from tests import manifests
from tests.e2e.module.helpers import (
    TABLE_ROWS,
    as_scheduled,
    import_from,
    mixed_feeds,
    mixed_model,
    run_python,
)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> CompiledModule:
    return emit(mixed_model(), tmp_path_factory.mktemp("errors") / "errors_module", {})


@pytest.fixture(scope="module")
def module(mixed: CompiledModule) -> ModuleType:
    return import_from(mixed)


# ---- inputs ----


def changed(**values: Any) -> dict[str, Any]:
    feeds: dict[str, Any] = {**mixed_feeds(3, 2)}
    return {**feeds, **{"x:0" if k == "x" else k: v for k, v in values.items()}}


X = np.ones((3, 8), np.float32)
IDS = np.zeros((3, 2), np.int64)
BAD_FEEDS = {
    "missing": ({"x:0": X}, "missing inputs: ids"),
    "unknown": (changed(mask=IDS), "unknown inputs: mask"),
    "misnamed": ({"x": X, "ids": IDS}, "unknown inputs: x; missing inputs: x:0"),
    "dtype": (changed(ids=IDS.astype(np.int32)), "'ids' has dtype int32, wanted int64"),
    "float for int": (changed(ids=IDS.astype(float)), "'ids' has dtype float64, wanted int64"),
    "byte order": (changed(x=X.astype(">f4")), "'x:0' has dtype >f4, wanted float32"),
    "object": (changed(ids=np.array([[None]])), "'ids' has dtype object, wanted int64"),
    "list": (changed(ids=[[1, 2]]), "'ids' is a list; wanted a numpy array"),
    "none": (changed(x=None), "'x:0' is a NoneType"),
    "rank": (changed(ids=IDS[0]), r"'ids' has shape (2), wanted (batch, seq)"),
    "high rank": (changed(x=X[None, None]), r"'x:0' has shape (1, 1, 3, 8), wanted (batch, 8)"),
    "fixed dim": (changed(x=X[:, :7]), r"'x:0' has shape (3, 7), wanted (batch, 8)"),
    "dims disagree": (
        changed(ids=IDS[:2]),
        r"'ids' has shape (2, 2), wanted (batch, seq), here (3, 2)",
    ),
    "more bytes than can be counted": (
        changed(x=np.lib.stride_tricks.as_strided(X, (3 << 56, 8), (0, 0))),
        "tensor x:0 would be too large",
    ),
    "longer than any": (
        changed(x=np.lib.stride_tricks.as_strided(X, (1 << 31, 8), (0, 0))),
        "batch is 2147483648, no dimension may be larger than 999999999",
    ),
    "id too large": (
        changed(ids=np.array([[0, 1], [2, TABLE_ROWS], [4, 5]])),
        f"layer word embeddings: id {TABLE_ROWS} (element 3) is outside its table of 10 rows; 1",
    ),
    "id too small": (changed(ids=IDS - 11), "layer word embeddings: id -11 (element 0)"),
    "id far out": (changed(ids=IDS + (1 << 62)), "layer word embeddings: id 4611686018427387904"),
}


@pytest.mark.parametrize("case", BAD_FEEDS)
def test_bad_inputs(module: ModuleType, case: str) -> None:
    feeds, message = BAD_FEEDS[case]
    with pytest.raises(module.InputError) as caught:
        module.run(feeds)
    assert message in str(caught.value)
    assert isinstance(caught.value, module.ModuleError)
    module.run(mixed_feeds(2, 2))  # and the module still works


@pytest.mark.parametrize("shape", [(1 << 60, 8), (1 << 59, 8), (1 << 62, 8), (1 << 32, 1 << 32)])
def test_bytes_that_overflow(module: ModuleType, shape: tuple[int, int]) -> None:
    """NumPy has no such array; a C program may: 2^64 bytes by strides of 0 are not 0 bytes."""
    taken = module._library.take_context()
    tensors = type(taken.given)(taken.given.types)
    tensors.point_any([X, IDS])
    given = tensors.c
    dims = ctypes.c_int64 * 2
    huge, still = dims(*shape), dims(0, 0)
    given[0].shape, given[0].strides = map(ctypes.addressof, (huge, still))
    context = taken.c
    with pytest.raises(module.InputError, match="too large"):
        module._library.check(module._library.shapes_c(context, given, taken.dims))
    with pytest.raises(module.InputError, match="too large"):
        module._library.check(module._library.run_c(context, given, given, ctypes.c_int32(0)))
    module._library.idle.append(taken)


def test_input_given_twice(module: ModuleType) -> None:
    with pytest.raises(module.InputError, match="given twice: ids"):
        module.run(mixed_feeds(1, 1), ids=IDS)


@pytest.mark.parametrize("threads", [0, -1, 1025, 1 << 40])
def test_bad_thread_count(module: ModuleType, threads: int) -> None:
    with pytest.raises(module.InputError, match="wanted 1 to 1024"):
        module.set_num_threads(threads)


def test_tensor_on_another_device(module: ModuleType) -> None:
    class Elsewhere:
        def __dlpack__(self, **options: Any) -> Any:
            raise BufferError("on a GPU")

        def __dlpack_device__(self) -> tuple[int, int]:
            return (2, 0)

    with pytest.raises(module.InputError, match="'x:0' is a Elsewhere"):
        module.run(changed(x=Elsewhere()))


def test_not_enough_memory(mixed: CompiledModule) -> None:
    """Working memory that the machine does not give is an error of the run."""
    code = """
        import resource, numpy as np, errors_module as m
        feeds = {"x:0": np.ones((400_000, 8), np.float32), "ids": np.zeros((400_000, 1), np.int64)}
        m.run({k: v[:1] for k, v in feeds.items()})
        used = int(open("/proc/self/statm").read().split()[0]) * 4096
        resource.setrlimit(resource.RLIMIT_AS, (used + 150_000_000,) * 2)
        try:
            m.run(feeds)
        except (m.RunError, MemoryError) as error:
            print(type(error).__name__, error)
        """
    done = run_python(code, mixed.path.parent)
    assert "emory" in done.stdout, done.stderr


# ---- weights ----


def damage(mixed: CompiledModule, folder: Path, change: Callable[[Path], None]) -> str:
    """What importing and running a copy with a damaged file raises."""
    copy = folder / "errors_module"
    shutil.copytree(mixed.path, copy, ignore=shutil.ignore_patterns("__pycache__"))
    change(copy)
    code = """
        import numpy as np, sys
        try:
            import errors_module as m
            m.run({"x:0": np.ones((1, 8), np.float32), "ids": np.zeros((1, 1), np.int64)})
        except Exception as error:
            print([c.__name__ for c in type(error).__mro__], error)
        """
    done = run_python(code, folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def cut_to(size: int) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "weights.safetensors"
        path.write_bytes(path.read_bytes()[:size])

    return change


def truncate(by: int) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "weights.safetensors"
        path.write_bytes(path.read_bytes()[:-by] if by else b"")

    return change


def flip(at: int) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "weights.safetensors"
        data = bytearray(path.read_bytes())
        data[at] ^= 0x80
        path.write_bytes(bytes(data))

    return change


def append(folder: Path) -> None:
    with (folder / "weights.safetensors").open("ab") as file:
        file.write(bytes(64))


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def make_folder(folder: Path) -> None:
    (folder / "weights.safetensors").unlink()
    (folder / "weights.safetensors").mkdir()


def edit_manifest(change: Callable[[Any], Any]) -> Callable[[Path], None]:
    def edited(folder: Path) -> None:
        path = folder / "manifest.json"
        manifest = json.loads(path.read_text())
        change(manifest)
        path.write_text(json.dumps(manifest))

    return edited


DAMAGES = {
    "missing": (remove("weights.safetensors"), "BadWeights", "No such file"),
    "a folder": (make_folder, "BadWeights", "weights.safetensors"),
    "empty": (truncate(0), "BadWeights", "empty"),
    "truncated": (truncate(1), "BadWeights", "truncated"),
    "cut in the header": (cut_to(50), "BadWeights", "header"),
    "too long": (append, "BadWeights", "altered"),
    "header length": (flip(6), "BadWeights", "header"),
    "header": (flip(40), "BadWeights", "header"),
    "first datum": (flip(-64), "BadWeights", "altered: checksum"),
    "last byte": (flip(-1), "BadWeights", "altered: checksum"),
    "no library": (remove("liberrors_module.so"), "LoadError", "liberrors_module.so"),
    "no manifest": (remove("manifest.json"), "LoadError", "manifest.json"),
    "manifest cut": (
        lambda f: (f / "manifest.json").write_text("{"),
        "LoadError",
        "manifest.json",
    ),
    "manifest of nothing": (
        lambda f: (f / "manifest.json").write_text("7"),
        "LoadError",
        "manifest.json is not a compiled module's",
    ),
    "manifest of other words": (
        lambda f: (f / "manifest.json").write_text('{"inputs": 1, "outputs": {}, "library": []}'),
        "LoadError",
        "manifest.json is not a compiled module's",
    ),
    "manifest without end": (
        lambda f: (f / "manifest.json").write_text("[" * 100_000),
        "LoadError",
        "manifest.json cannot be read",
    ),
    "manifest with fewer outputs": (
        edit_manifest(lambda m: m["outputs"].pop()),
        "LoadError",
        "does not belong to liberrors_module.so: other outputs",
    ),
    "manifest with fewer dimensions": (
        edit_manifest(lambda m: m["outputs"][0]["shape"].pop()),
        "LoadError",
        "does not belong to liberrors_module.so: other outputs",
    ),
    "manifest with no inputs": (
        edit_manifest(lambda m: m["inputs"].clear()),
        "LoadError",
        "does not belong to liberrors_module.so: other inputs",
    ),
    "library of another module": (
        lambda f: (f / "liberrors_module.so").write_bytes(Path(_ctypes.__file__).read_bytes()),
        "LoadError",
        "undefined symbol: errors_module_last_error",
    ),
    "library cut": (
        lambda f: (f / "liberrors_module.so").write_bytes(b"\x7fELF"),
        "LoadError",
        "liberrors_module.so",
    ),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_damaged_module(mixed: CompiledModule, tmp_path: Path, case: str) -> None:
    change, kind, message = DAMAGES[case]
    text = damage(mixed, tmp_path, change)
    assert f"'{kind}'" in text
    assert "'ModuleError'" in text
    assert "'ImportError'" in text
    assert message in text


def test_manifests_damaged_anywhere(mixed: CompiledModule, tmp_path: Path) -> None:
    """A package refuses its manifest when it is imported, or works as before."""
    good, rng = json.loads((mixed.path / "manifest.json").read_text()), np.random.default_rng(1)
    good = {key: good[key] for key in ("inputs", "outputs", "library", "precisions")}
    feeds = {"x:0": np.ones((1, 8), np.float32), "ids": np.zeros((1, 1), np.int64)}
    wanted = [value.shape for value in import_from(mixed).run(feeds).values()]
    refused = 0
    for number in range(60):
        copy = tmp_path / str(number)
        shutil.copytree(mixed.path, copy, ignore=shutil.ignore_patterns("__pycache__", "*.[aoch]"))
        changed = manifests.damaged(good, rng) | {"layers": []}
        (copy / "manifest.json").write_text(json.dumps(changed))
        try:
            module = load_module(copy)
        except BadInput as error:
            refused += 1
            assert "ModuleError" in {kind.__name__ for kind in type(error.__cause__).__mro__}, error
            continue
        with suppress(module.ModuleError):
            assert [value.shape for value in module.run(feeds).values()] == wanted
        with suppress(module.ModuleError):
            module.precisions()
    assert 5 < refused < 60


def test_weights_of_another_build(mixed: CompiledModule, tmp_path: Path) -> None:
    """The same shapes and names, other values: the header's checksum tells them apart."""
    scheduled = mixed_model()
    params = {k: v * 2 for k, v in scheduled.lowered.params.items()}
    other = as_scheduled(
        scheduled.mod,
        scheduled.lowered.packed.plan.quantized.model.inputs,
        scheduled.lowered.packed.plan.quantized.model.outputs,
        params,
    )
    built = emit(other, tmp_path / "other", {})
    source = built.path / "weights.safetensors"

    def swap(folder: Path) -> None:
        shutil.copyfile(source, folder / "weights.safetensors")

    text = damage(mixed, tmp_path / "copy", swap)
    assert "BadWeights" in text
    assert "belongs to another build" in text


# ---- machines ----


def test_another_machine(mixed: CompiledModule, tmp_path: Path) -> None:
    def change(folder: Path) -> None:
        manifest = json.loads((folder / "manifest.json").read_text())
        manifest["library"]["machine"] = "riscv64"
        (folder / "manifest.json").write_text(json.dumps(manifest))

    text = damage(mixed, tmp_path, change)
    assert "WrongMachine" in text
    assert "riscv64" in text


def test_missing_cpu_feature_is_no_sigill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that wants a feature no CPU has refuses to open."""
    import apq_tvm.codegen.emit as stage

    monkeypatch.setattr(stage, "cpu_flags", lambda target: ("avx9000",))
    emit(mixed_model(), tmp_path / "future", {})
    code = """
        try:
            import future
        except ImportError as error:  # what "import" is expected to raise
            print(type(error).__name__, error, error.name)
        """
    text = run_python(code, tmp_path).stdout
    assert "WrongMachine libfuture needs the CPU feature avx9000" in text
    assert text.endswith(" future\n")


def test_an_output_that_is_not_contiguous(module: ModuleType) -> None:
    """Python makes its outputs or asks for such; a C program may give any."""
    taken, feeds = module._library.take_context(), mixed_feeds(3, 2)
    outputs = list(module.run(feeds).values())
    given = type(taken.given)(taken.given.types)
    given.point_any([feeds["x:0"], feeds["ids"]])
    wanted = type(taken.given)([array.dtype for array in outputs])
    wide = [np.repeat(array, 2, -1) for array in outputs]
    wanted.point_any([array[..., ::2] for array in wide])
    with pytest.raises(module.InputError, match="is not contiguous"):
        module._library.check(module._library.run_c(taken.c, given.c, wanted.c, ctypes.c_int32(0)))
    module._library.idle.append(taken)
