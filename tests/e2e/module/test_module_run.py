"""Compiled modules at work: values, shapes, memory layouts, threads, processes."""

from __future__ import annotations

import ctypes.util
import multiprocessing
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax, te, tirx

from apq_tvm.codegen.emit import emit
from apq_tvm.types import Array, CompiledModule, ScheduledModel, TensorSpec, Variant
from tests.e2e.module.helpers import (
    as_scheduled,
    build,
    import_from,
    legalize,
    mixed_feeds,
    mixed_model,
    mixed_reference,
    parallel_scale,
    run_python,
    symbol,
    tensor,
)

TOLERANCE = 1e-5
DTYPES = ("bool", "int8", "uint8", "int32", "int64", "float16", "float32", "float64")
SHAPES = ((1, 1), (2, 17), (3, 1), (64, 5))


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> CompiledModule:
    return emit(mixed_model(), tmp_path_factory.mktemp("mixed") / "mixed_module", {})


@pytest.fixture(scope="module")
def module(mixed: CompiledModule) -> ModuleType:
    return import_from(mixed)


@pytest.fixture(scope="module")
def parallel_compiled(tmp_path_factory: pytest.TempPathFactory) -> CompiledModule:
    return emit(parallel_scale(4096, 3.0), tmp_path_factory.mktemp("p") / "parallel_module", {})


@pytest.fixture(scope="module")
def parallel(parallel_compiled: CompiledModule) -> ModuleType:
    return import_from(parallel_compiled)


def check(module: ModuleType, feeds: dict[str, Array]) -> None:
    results = module.run(feeds)
    reference = mixed_reference(np.asarray(feeds["x:0"]), np.asarray(feeds["ids"]))
    assert list(results) == list(reference)
    for name, wanted in reference.items():
        got = results[name]
        assert got.dtype == np.asarray(wanted).dtype, name
        assert got.shape == np.asarray(wanted).shape, name
        np.testing.assert_allclose(got, wanted, rtol=TOLERANCE, atol=TOLERANCE, err_msg=name)


@pytest.mark.parametrize(("n", "s"), SHAPES)
def test_values_at_every_shape(module: ModuleType, n: int, s: int) -> None:
    check(module, mixed_feeds(n, s))


def test_plans_of_many_shapes_do_not_mix(module: ModuleType) -> None:
    """More shapes than a context keeps plans for, back and forth."""
    for round_ in range(2):
        for n in (*range(1, 12), 3, 1, 40):
            check(module, mixed_feeds(n, n % 5 + 1, seed=round_))


def test_results_belong_to_the_caller(module: ModuleType) -> None:
    first = module.run(mixed_feeds(4, 4))
    kept = {name: value.copy() for name, value in first.items()}
    module.run(mixed_feeds(4, 4, seed=1))
    for name, value in first.items():
        np.testing.assert_array_equal(value, kept[name])
        assert value.flags.writeable


def test_signature_and_manifest(module: ModuleType) -> None:
    assert [(i.name, i.dtype, i.shape) for i in module.inputs] == [
        ("x:0", "float32", ("batch", 8)),
        ("ids", "int64", ("batch", "seq")),
    ]
    assert [o.name for o in module.outputs] == list(mixed_reference(*mixed_feeds(1, 1).values()))
    assert module.manifest["library"]["name"] == "mixed_module"


def _past_a_line(array: Array, offset: int) -> Array:
    """So many bytes behind a multiple of 64."""
    block = np.zeros(array.nbytes + 128, np.uint8)
    start = -block.ctypes.data % 64 + offset
    view = block[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    view[...] = array
    return view


def unaligned(array: Array) -> Array:
    """At a multiple of the item, not of 16."""
    return _past_a_line(array, array.itemsize)


def as_numpy_has_it(array: Array) -> Array:
    """At a multiple of 16, where kernels take it as it is."""
    return _past_a_line(array, 16)


def odd_address(array: Array) -> Array:
    return _past_a_line(array, 3)


def transposed(array: Array) -> Array:
    return np.ascontiguousarray(array.T).T


def reversed_rows(array: Array) -> Array:
    return np.ascontiguousarray(array[::-1])[::-1]


def every_second(array: Array) -> Array:
    wide = np.zeros((*array.shape[:-1], 2 * array.shape[-1]), array.dtype)
    wide[..., ::2] = array
    return wide[..., ::2]


def packed_record(array: Array) -> Array:
    record = np.zeros(array.shape, np.dtype([("tag", np.uint8), ("value", array.dtype)]))
    record["value"] = array
    return record["value"]


def read_only(array: Array) -> Array:
    copy = array.copy()
    copy.flags.writeable = False
    return copy


def broadcast(array: Array) -> Array:
    return np.broadcast_to(array[:1], array.shape)


LAYOUTS = (
    unaligned,
    as_numpy_has_it,
    odd_address,
    transposed,
    reversed_rows,
    every_second,
    packed_record,
    read_only,
    broadcast,
)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda f: f.__name__)
def test_any_memory_layout(module: ModuleType, layout: Any) -> None:
    check(module, {name: layout(a) for name, a in mixed_feeds(5, 7).items()})


class DLPackOnly:
    """A tensor that is known by DLPack alone."""

    def __init__(self, array: Array) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


def test_dlpack_tensors(module: ModuleType) -> None:
    feeds = mixed_feeds(3, 2)
    results = module.run({name: DLPackOnly(a) for name, a in feeds.items()})
    np.testing.assert_array_equal(results["y"], module.run(feeds)["y"])


def test_torch_tensors(module: ModuleType) -> None:
    torch = pytest.importorskip("torch")
    feeds = mixed_feeds(3, 2)
    results = module.run({name: torch.from_numpy(a) for name, a in feeds.items()})
    np.testing.assert_array_equal(results["y"], module.run(feeds)["y"])


def test_every_dtype(tmp_path: Path) -> None:
    """Doubled (for bool: negated) and passed through a call, whatever the type."""
    n = symbol("n")
    inputs = [tensor(f"in_{d}", (n, 3), d) for d in DTYPES]

    def body(bb: Any) -> Any:
        return relax.Tuple(
            [
                bb.emit(relax.op.logical_not(x) if d == "bool" else relax.op.add(x, x))
                for d, x in zip(DTYPES, inputs, strict=True)
            ]
        )

    specs = [TensorSpec(f"in_{d}", d, ("n", 3)) for d in DTYPES]
    outputs = [TensorSpec(f"out_{d}", d, ("n", 3)) for d in DTYPES]
    scheduled = as_scheduled(legalize(build(inputs, body)), specs, outputs)
    module = import_from(emit(scheduled, tmp_path / "every_dtype", {}))
    rng = np.random.default_rng(0)
    feeds = {f"in_{d}": rng.integers(0, 2 if d == "bool" else 50, (4, 3)).astype(d) for d in DTYPES}
    results = module.run(feeds)
    for d in DTYPES:
        x = feeds[f"in_{d}"]
        assert results[f"out_{d}"].dtype == x.dtype
        np.testing.assert_array_equal(results[f"out_{d}"], ~x if d == "bool" else x + x)


ODD = ('x "quoted" */', "日本語", "a\\b %s ??/", "class")


def test_any_onnx_names(tmp_path: Path) -> None:
    """Names that are no identifiers, no ASCII, or would end a C comment or string."""
    n = symbol("n")
    inputs = [tensor(f"in{i}", (n,), "float32") for i in range(len(ODD))]

    def body(bb: Any) -> Any:
        return relax.Tuple([bb.emit(relax.op.add(x, x)) for x in inputs])

    specs = [TensorSpec(name, "float32", ('sequence "length" */',)) for name in ODD]
    scheduled = as_scheduled(legalize(build(inputs, body)), specs, specs)
    module = import_from(emit(scheduled, tmp_path / "odd_names", {}))
    feeds = {name: np.full(3, i, np.float32) for i, name in enumerate(ODD)}
    results = module.run(feeds)
    assert list(results) == list(ODD)
    assert all((results[name] == 2 * feeds[name]).all() for name in ODD)
    with pytest.raises(module.InputError) as caught:
        module.run({**feeds, ODD[1]: np.zeros((3, 3), np.float32)})
    assert ODD[1] in str(caught.value)


def test_reshapes_cost_nothing_even_if_scheduled(tmp_path: Path) -> None:
    """Scheduling hides that a kernel only reshapes; the unscheduled function still shows it."""
    scheduled = mixed_model()
    mod = tvm.IRModule(dict(scheduled.mod.functions))
    var = next(v for v in mod.get_global_vars() if v.name_hint == "reshape")
    sch = tvm.s_tir.Schedule(mod[var])
    (loop,) = sch.get_loops(sch.get_sblock("T_reshape"))
    sch.parallel(sch.split(loop, [None, 16])[0])
    mod.update_func(var, sch.mod["main"].with_attr("tirx.is_scheduled", True))
    compiled = emit(ScheduledModel(scheduled.lowered, mod, {}), tmp_path / "reshaped", {})
    assert "reshape" not in compiled.manifest["graph"]["kernels"]
    check(import_from(compiled), mixed_feeds(3, 3))


def test_two_modules_of_one_name_in_one_process(tmp_path: Path) -> None:
    for folder, factor in (("one", 2.0), ("two", 5.0)):
        emit(parallel_scale(100, factor), tmp_path / folder / "twin", {})
    code = """
        import importlib.util, numpy as np
        def load(folder):
            spec = importlib.util.spec_from_file_location(folder, folder + "/twin/__init__.py")
            module = importlib.util.module_from_spec(spec)
            import sys; sys.modules[folder] = module
            spec.loader.exec_module(module)
            return module
        one, two = load("one"), load("two")
        x = np.ones((300, 100), np.float32)
        for _ in range(3):
            assert (one.run(x=x)["y"] == 2).all() and (two.run(x=x)["y"] == 5).all()
        one.set_num_threads(1)
        assert one.num_threads() == 1
        print("fine")
        """
    done = run_python(code, tmp_path)
    assert done.stdout == "fine\n", done.stderr


def test_needs_numpy_alone(mixed: CompiledModule) -> None:
    code = """
        import sys
        before = set(sys.modules)
        import mixed_module, numpy
        roots = {name.partition(".")[0] for name in set(sys.modules) - before}
        foreign = roots - set(sys.stdlib_module_names) - {"numpy", "mixed_module"}
        print(sorted(r for r in foreign if not r.startswith("_")))
        x = numpy.ones((2, 8), numpy.float32)
        mixed_module.run({"x:0": x, "ids": numpy.zeros((2, 3), numpy.int64)})
        """
    done = run_python(code, mixed.path.parent)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[]\n"


def test_many_threads_at_once(parallel: ModuleType) -> None:
    def work(seed: int) -> bool:
        rng = np.random.default_rng(seed)
        for n in rng.integers(1, 80, 20):
            x = rng.standard_normal((n, 4096)).astype(np.float32)
            if not np.array_equal(parallel.run(x=x)["y"], x * np.float32(3)):
                return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(24)))


def test_one_thread_and_many_agree(parallel: ModuleType) -> None:
    x = np.random.default_rng(0).standard_normal((50, 4096)).astype(np.float32)
    before = parallel.num_threads()
    for threads in (1, 2, 3, 7):
        parallel.set_num_threads(threads)
        np.testing.assert_array_equal(parallel.run(x=x)["y"], x * np.float32(3))
    parallel.set_num_threads(before)


def threads_after_run(module: ModuleType) -> int:
    """For a child process: run, check, tell the threads used."""
    x = np.full((200, 4096), 2.0, np.float32)
    return int(module.num_threads()) if (module.run(x=x)["y"] == 6).all() else -1


def test_fork_after_a_run(parallel: ModuleType) -> None:
    """The child starts threads of its own."""
    parallel.set_num_threads(2)
    threads_after_run(parallel)
    child = os.fork()
    if child == 0:
        os._exit(threads_after_run(parallel) & 0xFF)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 2
    assert threads_after_run(parallel) == 2


def child_runs(module: ModuleType, queue: Any) -> None:
    with ThreadPoolExecutor(1) as pool:
        fresh = pool.submit(threads_after_run, module).result(60)
    queue.put((threads_after_run(module), fresh))


def test_multiprocessing_fork(parallel: ModuleType) -> None:
    """From a thread, while another runs; in the child on new threads and on the forked one."""
    parallel.set_num_threads(2)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(lambda: [threads_after_run(parallel) for _ in range(50)])
        process = context.Process(target=child_runs, args=(parallel, queue))
        process.start()
        assert queue.get(timeout=900) == (2, 2)
        assert set(running.result()) == {2}
    process.join()
    assert process.exitcode == 0


# Of a program that runs `first` and forks, and `second` in the child: what each tells of itself.
FORKING = """
    import os, sys, numpy as np, {first}
    x = np.full((200, 4096), 2.0, np.float32)
    {first}.set_num_threads(2)
    {first}.run(x=x)
    {before}
    child = os.fork()
    if child == 0:
        import threading, {second}
        {second}.set_num_threads(2)
        told = []
        def run():
            told.append(({second}.num_threads(), bool(({second}.run(x=x)["y"] == 6).all())))
        run()
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        print(told, flush=True)
        os._exit(0)
    os.waitpid(child, 0)
    print({first}.num_threads(), flush=True)
    """


@pytest.fixture(scope="module")
def two_modules(parallel_compiled: CompiledModule) -> Path:
    """A folder with the same module under two names: what a thread did with one is its own."""
    folder = parallel_compiled.path.parent
    if not (folder / "other").exists():
        emit(parallel_scale(4096, 3.0), folder / "other", {})
    return folder


NEEDS_OPENMP = pytest.mark.skipif(not ctypes.util.find_library("gomp"), reason="no libgomp here")


@pytest.mark.parametrize("before", ["import other", ""], ids=["opened before", "opened after"])
@pytest.mark.parametrize("threads", ["", pytest.param("openmp", marks=NEEDS_OPENMP)])
def test_a_fork_after_another_modules_run(threads: str, before: str, two_modules: Path) -> None:
    """The team of the parent's thread was libgomp's, whichever module had started it."""
    code = FORKING.format(first="parallel_module", second="other", before=before)
    done = run_python(code, two_modules, APQ_THREADS=threads)
    forked = 1 if threads == "openmp" else 2
    assert done.stdout == f"[({forked}, True), (2, True)]\n2\n", done.stdout + done.stderr


@NEEDS_OPENMP
def test_a_fork_of_a_single_thread_keeps_its_threads(two_modules: Path) -> None:
    """Nobody had a team: nothing is lost. (OpenBLAS must not have threads either.)"""
    code = FORKING.format(first="parallel_module", second="parallel_module", before="")
    code = code.replace("parallel_module.set_num_threads(2)\n    parallel_module.run(x=x)", "pass")
    alone = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "APQ_THREADS": "openmp"}
    done = run_python(code, two_modules, **alone)
    assert done.stdout.startswith("[(2, True), (2, True)]\n"), done.stdout + done.stderr


THREADS = pytest.mark.parametrize("threads", ["", "openmp"])


@THREADS
def test_a_limit_of_threads_is_no_end(threads: str, two_modules: Path) -> None:
    """libgomp ends the process where no thread can be started; a run then has fewer."""
    code = """
        import os, resource, numpy as np, parallel_module as m
        if os.getuid() == 0:  # root has no such limit
            os.setgroups([]); os.setgid(65534); os.setuid(65534)
        m.set_num_threads(4)
        x = np.full((200, 4096), 2.0, np.float32)
        resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
        for _ in range(3):
            assert (m.run(x=x)["y"] == 6).all()
        print(m.num_threads())
        """
    done = run_python(code, two_modules, OPENBLAS_NUM_THREADS="1", APQ_THREADS=threads)
    assert done.stdout == "1\n", done.stdout + done.stderr


@THREADS
def test_a_limit_of_memory_is_no_end(threads: str, two_modules: Path) -> None:
    """Nor where threads have no room for their stacks."""
    code = """
        import pathlib, resource, numpy as np, parallel_module as m
        m.set_num_threads(64)
        x = np.full((200, 4096), 2.0, np.float32)
        m.set_num_threads(1); m.run(x=x); m.set_num_threads(64)
        used = int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * 4096
        limit = used + (40 << 20)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        assert (m.run(x=x)["y"] == 6).all()
        print(m.num_threads() < 64)
        """
    done = run_python(code, two_modules, OPENBLAS_NUM_THREADS="1", APQ_THREADS=threads)
    assert done.stdout == "True\n", done.stdout + done.stderr


def test_default_threads_respect_affinity(mixed: CompiledModule) -> None:
    code = """
        import os
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        import mixed_module
        print(mixed_module.num_threads())
        """
    assert run_python(code, mixed.path.parent).stdout == "1\n"


def test_default_threads_follow_openmp_variable(mixed: CompiledModule) -> None:
    code = "import mixed_module; print(mixed_module.num_threads())"
    assert run_python(code, mixed.path.parent, OMP_NUM_THREADS="3").stdout == "3\n"


def test_openmp_on_request(two_modules: Path) -> None:
    """Where OpenMP is asked for and is not there, a warning says that the threads are ours."""
    code = """
        import numpy as np, parallel_module as m
        m.set_num_threads(2)
        x = np.full((200, 4096), 2.0, np.float32)
        assert (m.run(x=x)["y"] == 6).all()
        print(m.num_threads())
        """
    done = run_python(code, two_modules, APQ_THREADS="openmp")
    assert done.stdout == "2\n"
    there = ctypes.util.find_library("gomp")
    assert bool(there) != ("no OpenMP runtime" in done.stderr), done.stderr


@pytest.mark.parametrize(("rows", "expected"), [(1, 2.0), (2, 2.0), (3, 3.0), (4, 3.0), (5, 4.0)])
def test_variants_are_chosen_by_rows(
    rows: int, expected: float, variants_module: ModuleType
) -> None:
    x = np.ones((rows, 6), np.float32)
    assert (variants_module.run(x=x)["y"] == expected).all()


@pytest.fixture(scope="module")
def variants_module(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """``x + 1``, with kernels of their own for up to 2, up to 4 and more rows: + 1, + 2, + 3."""
    n = symbol("n")
    x = tensor("x", (n, 6), "float32")
    bb = relax.BlockBuilder()
    with bb.function("main", [x]):
        with bb.dataflow():
            base = bb.add_func(adding(1.0), "any")
            y = bb.emit_output(relax.call_tir(base, [x], relax.TensorType((n, 6), "float32")))
        bb.emit_func_output(y)
    mod = bb.get()
    for value, name in ((1.0, "few"), (2.0, "some"), (3.0, "many")):
        mod[name] = adding(value)
    variants = {"any": (Variant(2, "few"), Variant(4, "some"), Variant(-1, "many"))}
    spec = [TensorSpec("x", "float32", ("n", 6))]
    out = [TensorSpec("y", "float32", ("n", 6))]
    scheduled = as_scheduled(mod, spec, out, variants=variants)
    return import_from(emit(scheduled, tmp_path_factory.mktemp("v") / "variants_module", {}))


def adding(value: float) -> Any:
    """A kernel of x [rows, 6] that adds a number."""
    x = te.placeholder((symbol("rows"), 6), "float32", "x")
    y = te.compute(x.shape, lambda i, j: x[i, j] + tirx.const(value, "float32"), "y")
    return te.create_prim_func([x, y])
