"""Wrong use and damage of compiled modules end in one named error each, never in a crash."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from module_helpers import (
    TABLE_ROWS,
    as_scheduled,
    build,
    import_from,
    legalize,
    mixed_feeds,
    mixed_model,
    run_python,
    symbol,
    tensor,
)
from tvm import relax, te

from apq_tvm.codegen.emit import emit
from apq_tvm.errors import BuildError, OutputExists, OutputFailed, UnsupportedModel
from apq_tvm.types import CompiledModule, TensorSpec, Variant


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
    "zero": (changed(ids=IDS[:, :0]), r"'ids' has shape (3, 0)"),
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
    assert message in text


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
        except Exception as error:
            print(type(error).__name__, error)
        """
    assert (
        "WrongMachine libfuture needs the CPU feature avx9000" in run_python(code, tmp_path).stdout
    )


# ---- models that cannot be emitted ----


def leftover(call: Any) -> Any:
    n = symbol("n")
    x = tensor("x", (n, 4), "float32")
    mod = build([x], lambda bb: bb.emit(call(x)))
    spec = [TensorSpec("x", "float32", ("n", 4))]
    return as_scheduled(legalize(mod), spec, [TensorSpec("y", "float32", ("n", 4))])


def packed_call(x: Any) -> Any:
    return relax.call_dps_packed(
        "my.library.function", [x], relax.TensorType(x.ty.shape, "float32")
    )


def pure_packed(x: Any) -> Any:
    return relax.op.call_pure_packed("my.pure.function", x, ty_args=[x.ty])


@pytest.mark.parametrize(
    ("call", "name"),
    [(packed_call, "my.library.function"), (pure_packed, "my.pure.function")],
    ids=["dps", "pure"],
)
def test_leftover_calls_are_named(tmp_path: Path, call: Any, name: str) -> None:
    with pytest.raises(UnsupportedModel, match=name):
        emit(leftover(call), tmp_path / "leftover", {})
    assert list(tmp_path.iterdir()) == []


def test_shape_output(tmp_path: Path) -> None:
    n = symbol("n")
    x = tensor("x", (n, 4), "float32")
    mod = build([x], lambda bb: bb.emit(relax.ShapeExpr([n, 4])))
    spec = [TensorSpec("x", "float32", ("n", 4))]
    scheduled = as_scheduled(mod, spec, [TensorSpec("shape of x", "int64", (2,))])
    with pytest.raises(UnsupportedModel, match="'shape of x' is not a tensor"):
        emit(scheduled, tmp_path / "shape", {})


def test_symbol_that_no_input_binds(tmp_path: Path) -> None:
    n, free = symbol("n"), symbol("free")
    x = tensor("x", (n,), "float32")
    mod = legalize(build([x], lambda bb: bb.emit(relax.op.broadcast_to(x, (free, n)))))
    spec = [TensorSpec("x", "float32", ("n",))]
    scheduled = as_scheduled(mod, spec, [TensorSpec("y", "float32", ("free", "n"))])
    with pytest.raises(UnsupportedModel, match="'free' does not follow"):
        emit(scheduled, tmp_path / "free", {})


def test_limit_of_a_dimension(tmp_path: Path) -> None:
    scheduled = mixed_model()
    main = scheduled.mod["main"].with_attr("tir_var_upper_bound", {"seq": 6})
    scheduled.mod["main"] = main
    module = import_from(emit(scheduled, tmp_path / "limited", {}))
    module.run(mixed_feeds(2, 6))
    with pytest.raises(module.InputError, match="seq is 7, this model allows at most 6"):
        module.run(mixed_feeds(2, 7))
    assert module.manifest["limits"] == {"seq": 6}


def te_module(func: Any, params: list[Any], out: Any) -> Any:
    """``main`` that calls one TE function."""
    bb = relax.BlockBuilder()
    with bb.function("main", params):
        with bb.dataflow():
            kernel = bb.add_func(func, "kernel")
            y = bb.emit_output(relax.call_tir(kernel, params, out))
        bb.emit_func_output(y)
    return bb.get()


def test_limit_found_in_a_kernel(tmp_path: Path) -> None:
    """A table of 6 positions read by a loop over the sequence allows sequences of 6."""
    a = te.placeholder((symbol("n"), symbol("s")), "float32", "a")
    table = te.placeholder((6,), "float32", "table")
    func = te.create_prim_func([a, table, te.compute(a.shape, lambda i, j: a[i, j] + table[j])])
    n, s = symbol("n"), symbol("s")
    params = [tensor("x", (n, s), "float32"), tensor("table", (6,), "float32")]
    mod = te_module(func, params, relax.TensorType((n, s), "float32"))
    spec = [TensorSpec("x", "float32", ("batch", "length"))]
    positions = np.arange(6, dtype=np.float32)
    out = [TensorSpec("y", "float32", ("batch", "length"))]
    scheduled = as_scheduled(mod, spec, out, {"table": positions})
    module = import_from(emit(scheduled, tmp_path / "positions", {}))
    x = np.ones((2, 6), np.float32)
    np.testing.assert_array_equal(module.run(x=x)["y"], x + positions)
    with pytest.raises(module.InputError, match="length is 7, this model allows at most 6"):
        module.run(x=np.ones((2, 7), np.float32))


def test_condition_between_dimensions(tmp_path: Path) -> None:
    """``a[i] + b[i]`` over the length of a needs a b that is as long."""
    a = te.placeholder((symbol("n"),), "float32", "a")
    b = te.placeholder((symbol("m"),), "float32", "b")
    func = te.create_prim_func([a, b, te.compute(a.shape, lambda i: a[i] + b[i])])
    n, m = symbol("n"), symbol("m")
    params = [tensor("a", (n,), "float32"), tensor("b", (m,), "float32")]
    mod = te_module(func, params, relax.TensorType((n,), "float32"))
    spec = [TensorSpec("a", "float32", ("n",)), TensorSpec("b", "float32", ("m",))]
    scheduled = as_scheduled(mod, spec, [TensorSpec("y", "float32", ("n",))])
    module = import_from(emit(scheduled, tmp_path / "lengths", {}))
    one = np.ones(5, np.float32)
    assert (module.run(a=one[:3], b=one)["y"] == 2).all()
    with pytest.raises(module.InputError, match="do not fit together"):
        module.run(a=one, b=one[:3])


def test_lookup_without_attributes_is_checked(tmp_path: Path) -> None:
    """Ids that index a table as they are must be inside it, whoever made the kernel."""
    scheduled = mixed_model()
    for var, func in list(scheduled.mod.functions.items()):
        if var.name_hint == "take":
            plain = func.without_attr("apq.id_rows")
            scheduled.mod.update_func(var, plain)
    module = import_from(emit(scheduled, tmp_path / "lookup", {}))
    module.run(mixed_feeds(2, 2))
    for bad in (TABLE_ROWS, -1):
        with pytest.raises(module.InputError, match=f"layer take: id {bad}"):
            module.run(changed(ids=IDS + bad))


# ---- outputs ----


def contents(folder: Path) -> dict[str, bytes]:
    files = (f for f in folder.rglob("*") if f.is_file() and "__pycache__" not in f.parts)
    return {str(f.relative_to(folder)): f.read_bytes() for f in files}


def test_never_overwrites_without_force(mixed: CompiledModule) -> None:
    before = contents(mixed.path)
    with pytest.raises(OutputExists, match="errors_module exists already"):
        emit(mixed_model(), mixed.path, {})
    assert contents(mixed.path) == before


def test_force_replaces_a_module(tmp_path: Path) -> None:
    output = tmp_path / "replaced"
    emit(mixed_model(), output, {"mark": 1})
    (output / "left behind").write_text("old")
    emit(mixed_model(), output, {"mark": 2}, force=True)
    assert json.loads((output / "manifest.json").read_text())["mark"] == 2
    assert not (output / "left behind").exists()
    assert [p.name for p in tmp_path.iterdir()] == ["replaced"]


def test_force_spares_what_is_no_module(tmp_path: Path) -> None:
    output = tmp_path / "thesis"
    output.mkdir()
    (output / "chapter1.tex").write_text("years of work")
    with pytest.raises(OutputExists, match="not a compiled module"):
        emit(mixed_model(), output, {}, force=True)
    assert (output / "chapter1.tex").read_text() == "years of work"


@pytest.mark.parametrize("name", ["4bit", "mini-lm", "class", "a.b", "ünï", "apq"])
def test_names_that_do_not_import(tmp_path: Path, name: str) -> None:
    with pytest.raises(OutputFailed, match=name.split(".")[0]):
        emit(mixed_model(), tmp_path / name, {})


@pytest.mark.parametrize("limit", [100, 4_000])
def test_disk_full_leaves_the_old_output(tmp_path: Path, limit: int) -> None:
    """The weights, the first file and the largest, do not fit."""
    output = tmp_path / "kept"
    emit(mixed_model(), output, {})
    before = contents(output)
    root, helpers = Path(__file__).parents[2], Path(__file__).parent
    code = f"""
        import sys
        sys.path[:0] = [{str(root)!r}, {str(helpers)!r}]
        import resource
        from pathlib import Path
        from module_helpers import mixed_model
        from apq_tvm.codegen.emit import emit
        from apq_tvm.errors import OutputFailed
        scheduled = mixed_model()
        resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
        try:
            emit(scheduled, Path({str(output)!r}), {{}}, force=True)
        except OutputFailed as error:
            print("OutputFailed", error)
        """
    done = run_python(code, tmp_path)
    assert done.stdout.startswith("OutputFailed"), done.stdout + done.stderr
    assert str(output) in done.stdout
    assert contents(output) == before
    assert [p.name for p in tmp_path.iterdir()] == ["kept"]


@pytest.mark.parametrize("step", ["compile_sources", "link_library", "write_package"])
def test_disk_full_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    import apq_tvm.codegen.emit as stage

    output = tmp_path / "kept"
    emit(mixed_model(), output, {})
    before = contents(output)

    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(stage, step, full)
    with pytest.raises(OutputFailed, match=r"kept could not be written: No space left on device"):
        emit(mixed_model(), output, {}, force=True)
    assert contents(output) == before
    assert [p.name for p in tmp_path.iterdir()] == ["kept"]


@pytest.mark.parametrize("words", ["-shared", "-c", "-r"])
def test_disk_full_in_the_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    """A compiler that says the disk is full when it gets a certain option."""
    fake = tmp_path / "bin" / "fakecc"
    fake.parent.mkdir()
    fake.write_text(
        "#!/bin/sh\n"
        f'case " $* " in *" {words} "*) echo "No space left on device" >&2; exit 1;; esac\n'
        'exec cc "$@"\n'
    )
    fake.chmod(0o755)
    monkeypatch.setenv("CC", str(fake))
    with pytest.raises(OutputFailed, match="No space left on device"):
        emit(mixed_model(), tmp_path / "full", {})
    assert [p.name for p in tmp_path.iterdir()] == ["bin"]


def test_no_permission(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputFailed, match="could not be written"):
        emit(mixed_model(), tmp_path / "file" / "inside", {})


# ---- tools ----


def test_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(BuildError, match="apt-get install gcc"):
        emit(mixed_model(), tmp_path / "nocc", {})


def test_wrong_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler -m64")
    with pytest.raises(BuildError, match="no-such-compiler"):
        emit(mixed_model(), tmp_path / "nocc", {})


def test_compiler_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "cc --no-such-option")
    with pytest.raises(BuildError, match="no-such-option"):
        emit(mixed_model(), tmp_path / "nocc", {})


def test_call_that_does_not_fit_its_kernel(tmp_path: Path) -> None:
    """A graph that contradicts its kernel is not emitted: kernels check nothing at run time."""

    def relu(columns: int) -> Any:
        x = tensor("x", (symbol("n"), columns), "float32")
        return legalize(build([x], lambda bb: bb.emit(relax.op.nn.relu(x))))

    mod = relu(4)
    mod["wrong_kernel"] = next(f for v, f in relu(5).functions.items() if v.name_hint == "relu")
    spec = [TensorSpec("x", "float32", ("n", 4))]
    variants = {"relu": (Variant(-1, "wrong_kernel"),)}
    scheduled = as_scheduled(mod, spec, [TensorSpec("y", "float32", ("n", 4))], variants=variants)
    message = r"kernel wrong_kernel, argument 0: wants float32 \[any, 5\], gets float32 \[.*, 4\]"
    with pytest.raises(BuildError, match=message):
        emit(scheduled, tmp_path / "contradicting", {})
