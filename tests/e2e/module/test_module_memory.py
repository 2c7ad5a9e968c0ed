"""What a compiled module holds in memory: mapped weights, a planned arena, nothing per run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from tvm import relax

from apq_tvm.codegen.emit import emit
from apq_tvm.types import CompiledModule, ScheduledModel, TensorSpec
from tests.e2e.module.helpers import (
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

MIB = 1 << 20
ARENA_LIMIT = 1.3  # arena over the largest live set
WIDTH = 512
SLACK = 6 * MIB  # stacks, code of the library, the allocator's own blocks


def tower() -> ScheduledModel:
    """Widens and narrows six times, with skips to the end; 24 MiB of weights."""
    n = symbol("n")
    x = tensor("x", (n, WIDTH), "float32")
    rng = np.random.default_rng(0)
    params = {f"w{i}": rng.standard_normal((WIDTH, 4 * WIDTH)).astype(np.float32) for i in range(6)}
    weights = [tensor(name, w.shape, "float32") for name, w in params.items()]

    def body(bb: Any) -> Any:
        y, skips = x, []
        for w in weights:
            row = bb.emit(relax.op.max(w, axis=0, keepdims=True))
            wide = bb.emit(relax.op.add(bb.emit(relax.op.concat([y, y, y, y], axis=1)), row))
            half = bb.emit(relax.op.split(wide, 4, axis=1))
            skips.append(bb.emit(half[1]))
            y = bb.emit(relax.op.multiply(half[0], half[3]))
        for skip in skips:
            y = bb.emit(relax.op.add(y, skip))
        return y

    mod = legalize(build([x, *weights], body))
    spec = [TensorSpec("x", "float32", ("n", WIDTH))]
    return as_scheduled(mod, spec, [TensorSpec("y", "float32", ("n", WIDTH))], params)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> CompiledModule:
    return emit(tower(), tmp_path_factory.mktemp("memory") / "tower_module", {})


def test_peak_memory(compiled: CompiledModule) -> None:
    """Import and runs add at most the weights, 1.3 times the live set, and the result."""
    code = """
        import gc, json, numpy as np, ctypes, pathlib
        def status(key):
            text = pathlib.Path("/proc/self/status").read_text()
            return int(text.split(key + ":")[1].split()[0]) * 1024
        x = np.ones((6000, 512), np.float32)
        x.sum()
        before = status("VmRSS")
        import tower_module as m
        y = m.run(x=x)["y"]
        for _ in range(3):
            y = m.run(x=x)["y"]
        peak, used = status("VmHWM"), m.memory()
        maps = pathlib.Path("/proc/self/smaps").read_text()
        mine = maps.split("weights.safetensors")[1].split("VmFlags")[0]
        copied = int(mine.split("Anonymous:")[1].split()[0])
        print(json.dumps({"grown": peak - before, "result": y.nbytes, "copied": copied, **used}))
        """
    done = run_python(code, compiled.path.parent)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    weights = compiled.manifest["weights"]["file_bytes"]
    assert weights > 24 * MIB
    assert seen["live"] > 60 * MIB
    assert seen["arena"] <= ARENA_LIMIT * seen["live"]
    assert seen["copied"] == 0
    # Two results are alive while the next one replaces the last.
    assert seen["grown"] <= weights + ARENA_LIMIT * seen["live"] + 2 * seen["result"] + SLACK


def test_weights_can_lie_in_huge_pages(compiled: CompiledModule) -> None:
    """They are private memory of whole huge pages then, and mean the same."""
    code = """
        import numpy as np, pathlib, tower_module as m
        x = np.linspace(-1, 1, 3 * 512, dtype=np.float32).reshape(3, 512)
        print(m.run(x=x)["y"].astype(np.float64).sum())
        print("weights.safetensors" in pathlib.Path("/proc/self/maps").read_text())
        m.verify()
        """
    mapped = run_python(code, compiled.path.parent).stdout.split()
    huge = run_python(code, compiled.path.parent, APQ_HUGE_PAGES="1")
    assert huge.returncode == 0, huge.stderr
    assert mapped[1] == "True"
    assert huge.stdout.split() == [mapped[0], "False"]


def test_a_run_allocates_nothing_after_the_first(compiled: CompiledModule) -> None:
    """Counted with glibc's allocator statistics around the C function."""
    code = """
        import ctypes, numpy as np, tower_module as m
        class Info(ctypes.Structure):
            _fields_ = [(n, ctypes.c_size_t) for n in ("arena ordblks smblks hblks hblkhd "
                        "usmblks fsmblks uordblks fordblks keepcost").split()]
        libc = ctypes.CDLL(None)
        libc.mallinfo2.restype = Info
        m.set_num_threads(1)
        real, seen = m._library.run_c, []
        def counted(*args):
            before = libc.mallinfo2()
            code = real(*args)
            after = libc.mallinfo2()
            seen.append((after.uordblks + after.hblkhd) - (before.uordblks + before.hblkhd))
            return code
        m._library.run_c = counted
        for n in (64, 64, 64, 8, 64):
            x = m.ports.aligned_empty((n, 512), np.dtype(np.float32))
            x[...] = 1
            m.run(x=x)
        print(seen[1:])
        """
    done = run_python(code, compiled.path.parent)
    assert done.stdout == "[0, 0, 0, 0]\n", done.stdout + done.stderr


def test_weights_are_plain_safetensors(tmp_path: Path) -> None:
    """Other tools read the file; equal arrays are stored once; every tensor is aligned."""
    compiled = emit(mixed_model(), tmp_path / "plain", {})
    path = compiled.path / "weights.safetensors"
    loaded = load_file(path)
    arrays = {k: v for k, v in loaded.items() if not k.startswith("_pad.")}
    for name, array in mixed_model().lowered.params.items():
        if name != "scale.copy":
            np.testing.assert_array_equal(arrays.pop(name), array)
    (constant,) = arrays.values()
    np.testing.assert_array_equal(constant, np.arange(300, dtype=np.int32).reshape(3, 100))
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header.pop("__metadata__")
    assert (8 + size) % 64 == 0
    for name, entry in header.items():
        assert name.startswith("_pad.") or entry["data_offsets"][0] % 64 == 0


def test_contexts_are_reused(tmp_path: Path) -> None:
    """Calls one after another share one context."""
    module = import_from(emit(mixed_model(), tmp_path / "reused", {}))
    for _ in range(5):
        module.run(mixed_feeds(2, 2))
    assert len(module._library.idle) == 1
