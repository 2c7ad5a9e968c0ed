"""Small models in Relax, compiled to modules for the tests of emission."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import tvm
from tvm import relax, tirx

from apq_tvm.types import (
    Array,
    CompiledModule,
    DeviceProfile,
    ImportedModel,
    KernelPlan,
    LoweredModel,
    PackedModel,
    QuantizedModel,
    ScheduledModel,
    TensorSpec,
    Variant,
)

# Runs on every x86-64 machine of the last ten years; Arm machines get their own baseline.
BASELINE = {"x86_64": "x86-64-v3", "aarch64": "generic"}
TABLE_ROWS = 10


def profile(mcpu: str | None = None) -> DeviceProfile:
    """A device profile with what emission reads: name and target."""
    target = {"kind": "llvm", "mcpu": mcpu or BASELINE[os.uname().machine], "num-cores": 2}
    return DeviceProfile("test", target, frozenset(), 32, 16, 2, 32768, 1 << 20, ())


def as_scheduled(
    mod: Any,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    params: Mapping[str, Array] | None = None,
    variants: Mapping[str, tuple[Variant, ...]] | None = None,
    mcpu: str | None = None,
) -> ScheduledModel:
    """Wrap a Relax module of ``call_tir`` as what `emit` takes."""
    model = ImportedModel("test", 17, tuple(inputs), tuple(outputs), (), {}, {}, "")
    plan = KernelPlan(QuantizedModel(model, {}, {}), profile(mcpu), {})
    lowered = LoweredModel(PackedModel(plan, {}), mod, params or {}, variants or {}, {})
    return ScheduledModel(lowered, mod, {})


def legalize(mod: Any) -> Any:
    """Lower Relax operators to ``call_tir`` of TOPI's functions, one each."""
    t = relax.transform
    return tvm.ir.transform.Sequential([t.LegalizeOps(), t.DeadCodeElimination()])(mod)


def tensor(name: str, shape: Sequence[Any], dtype: str) -> Any:
    """A Relax parameter."""
    return relax.Var(name, relax.TensorType(shape, dtype))


def symbol(name: str) -> Any:
    """A dynamic dimension."""
    return tirx.Var(name, "int64")


def build(params: Sequence[Any], body: Any) -> Any:
    """An IRModule whose ``main`` returns what `body(builder)` gives, a tuple of expressions."""
    bb = relax.BlockBuilder()
    with bb.function("main", list(params)):
        with bb.dataflow():
            result = bb.emit_output(body(bb))
        bb.emit_func_output(result)
    return bb.get()


def id_checked(mod: Any, kernel: str, layer: str) -> Any:
    """Give a ``take(table, ids, out)`` kernel the attributes that make the module check its ids."""
    for var, func in list(mod.functions.items()):
        if var.name_hint == kernel:
            attrs = {"apq.layer": layer, "apq.ids_arg": 1, "apq.id_rows": TABLE_ROWS}
            mod.update_func(var, func.with_attrs(attrs))
    return mod


def mixed_arrays() -> dict[str, Array]:
    """Weights of `mixed_model`; the last two have the same content."""
    rng = np.random.default_rng(7)
    return {
        "dense.weight": rng.standard_normal((8, 24)).astype(np.float32),
        "table": rng.standard_normal((TABLE_ROWS, 5)).astype(np.float32),
        "scale": np.linspace(-1, 1, 200, dtype=np.float32),
        "scale.copy": np.linspace(-1, 1, 200, dtype=np.float32),
    }


def mixed_model() -> ScheduledModel:
    """Every kind of input, output and value the emitter distinguishes, in one small graph."""
    n, s = symbol("batch"), symbol("seq")
    arrays = mixed_arrays()
    inputs = [tensor("x", (n, 8), "float32"), tensor("ids", (n, s), "int64")]
    weights = [tensor(k.replace(".", "_"), v.shape, "float32") for k, v in arrays.items()]
    big = relax.const(np.arange(300, dtype=np.int32).reshape(3, 100))

    def body(bb: Any) -> Any:
        x, ids = inputs
        dense, table, scale, copy = weights
        y = bb.emit(relax.op.nn.relu(relax.op.matmul(x, dense)))
        parts = bb.emit(relax.op.split(y, 2, axis=1))
        total = bb.emit(relax.op.sum(y))
        rows = bb.emit(relax.op.take(table, ids, axis=0, mode="fast"))
        flat = bb.emit(relax.op.reshape(y, (n * 24,)))
        both = bb.emit(relax.op.add(scale, copy))
        shifted = bb.emit(relax.op.add(flat, relax.const(1.5, "float32")))
        return relax.Tuple(
            [y, x, big, y, flat, total, parts[1], rows, both, shifted, relax.const(2.5, "float32")]
        )

    mod = id_checked(legalize(build([*inputs, *weights], body)), "take", "word embeddings")
    specs = [
        TensorSpec("x:0", "float32", ("batch", 8)),
        TensorSpec("ids", "int64", ("batch", "seq")),
    ]
    outputs = [
        TensorSpec("y", "float32", ("batch", 24)),
        TensorSpec("input again", "float32", ("batch", 8)),
        TensorSpec("constant", "int32", (3, 100)),
        TensorSpec("y again", "float32", ("batch", 24)),
        TensorSpec("flat", "float32", ("24*batch",)),
        TensorSpec("total", "float32", ()),
        TensorSpec("half", "float32", ("batch", 12)),
        TensorSpec("rows", "float32", ("batch", "seq", 5)),
        TensorSpec("both", "float32", (200,)),
        TensorSpec("shifted", "float32", ("24*batch",)),
        TensorSpec("scalar", "float32", ()),
    ]
    return as_scheduled(mod, specs, outputs, arrays)


def mixed_reference(x: Array, ids: Array) -> dict[str, Array]:
    """What `mixed_model` computes, in numpy."""
    a = mixed_arrays()
    y = np.maximum(x @ a["dense.weight"], 0)
    return {
        "y": y,
        "input again": x,
        "constant": np.arange(300, dtype=np.int32).reshape(3, 100),
        "y again": y,
        "flat": y.reshape(-1),
        "total": y.sum(),
        "half": y[:, 12:],
        "rows": a["table"][ids],
        "both": 2 * a["scale"],
        "shifted": y.reshape(-1) + np.float32(1.5),
        "scalar": np.float32(2.5),
    }


def mixed_feeds(n: int, s: int, seed: int = 0) -> dict[str, Array]:
    """Random inputs of `mixed_model`."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n, 8)).astype(np.float32)
    return {"x:0": x, "ids": rng.integers(0, TABLE_ROWS, (n, s))}


def parallel_scale(extent: int, factor: float) -> ScheduledModel:
    """``y = factor * x`` for x float32 [n, extent], its rows in parallel."""
    n = symbol("n")
    x = tensor("x", (n, extent), "float32")
    mod = legalize(build([x], lambda bb: bb.emit(relax.op.multiply(x, relax.const(factor)))))
    for var, func in list(mod.functions.items()):
        if isinstance(func, tirx.PrimFunc):
            sch = tvm.s_tir.Schedule(func)
            rows, _ = sch.get_loops(sch.get_sblock("T_multiply"))
            sch.parallel(rows)
            mod.update_func(var, sch.mod["main"])
    spec = [TensorSpec("x", "float32", ("n", extent))]
    return as_scheduled(mod, spec, [TensorSpec("y", "float32", ("n", extent))])


def import_from(compiled: CompiledModule) -> ModuleType:
    """Import a module as a user does, from the folder that holds it."""
    sys.path.insert(0, str(compiled.path.parent))
    try:
        importlib.invalidate_caches()
        return importlib.import_module(compiled.path.name)
    finally:
        sys.path.pop(0)


def run_python(code: str, folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter whose path starts with `folder`."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), **env},
        timeout=900,
        check=False,
    )
