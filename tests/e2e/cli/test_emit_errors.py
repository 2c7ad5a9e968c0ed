"""What cannot be emitted, and tools that are missing or fail, end in one named error each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax, s_tir, te, tirx

import apq_tvm
from apq_tvm import lower
from apq_tvm.codegen.build.kernels import build_kernels
from apq_tvm.codegen.cuda.split import split
from apq_tvm.codegen.emit import emit
from apq_tvm.errors import BuildError, UnsupportedModel
from apq_tvm.schedules.devices import find_profile
from apq_tvm.schedules.graph import rules
from apq_tvm.schedules.linear.kernel import LinearKernel
from apq_tvm.types import TensorSpec, Variant
from tests import onnx_models
from tests.e2e.module.helpers import (
    TABLE_ROWS,
    as_scheduled,
    build,
    import_from,
    legalize,
    mixed_feeds,
    mixed_model,
    symbol,
    tensor,
)


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


def test_a_pass_that_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """TVM's own error is none of ours; functions that it names are told."""

    def failing(mod: Any, _: Any) -> Any:
        names = [gv.name_hint for gv in mod.functions if gv.name_hint != "main"]
        raise ValueError(f"Traceback\nInternalError: no size of {names[0]}")

    made = tvm.transform.module_pass(failing, opt_level=0, name="Failing")
    monkeypatch.setattr(lower, "bound_fusion", lambda: made)
    model = onnx_models.build([("Exp", "x", "y")], {"x": ("float32", ["rows", 4])}, "y")
    path = onnx_models.save(model, tmp_path)
    told = (
        r"pass Failing fails \(of tir_exp\): InternalError: no size of tir_exp; .*--dim rows=SIZE"
    )
    with pytest.raises(UnsupportedModel, match=told):
        apq_tvm.compile(path, tmp_path / "compiled", scheme="float")


def refuse(func: Any) -> None:
    """TVM's message ends with what is wrong, after a listing of the function."""
    s_tir.Schedule(func).get_sblock("absent")


def test_a_schedule_that_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(rules, "schedule_generic", lambda func, *_: refuse(func))
    model = onnx_models.build([("Exp", "x", "y")], {"x": ("float32", ["rows", 4])}, "y")
    told = (
        r"model: TVM cannot schedule tir_exp \(float32 \[rows, 4\], float32 \[rows, 4\]\): "
        r"Cannot find a block with the name: absent; .*--dim rows=SIZE"
    )
    with pytest.raises(UnsupportedModel, match=told):
        apq_tvm.compile(onnx_models.save(model, tmp_path), tmp_path / "compiled")


def test_a_schedule_of_a_layer_that_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(LinearKernel, "scheduled", lambda _, __, func: refuse(func))
    weight = np.ones((64, 64), np.float32)
    nodes = [("MatMul", "x w", "y")]
    model = onnx_models.build(nodes, {"x": ("float32", [2, 64])}, "y", {"w": weight})
    told = r"model, layer n_y: TVM cannot schedule .*W8A8.*absent; .*--tensor-type NAME=float"
    with pytest.raises(UnsupportedModel, match=told):
        apq_tvm.compile(onnx_models.save(model, tmp_path), tmp_path / "compiled", scheme="W8A8")


@pytest.mark.parametrize("device", ["znver4", "rtx-3090"])
def test_a_function_that_cannot_be_built(tmp_path: Path, device: str) -> None:
    """TVM's message names it; with its shape it is told from others."""
    a = te.placeholder((symbol("rows"), 4), "float32", "a")
    right = te.create_prim_func([a, te.compute(a.shape, lambda i, j: a[i, j] * 2)])
    unbound = tirx.Evaluate(tirx.call_extern("int32", "f", tirx.Var("free", "int32")))
    mod = tvm.IRModule({"right": right, "wrong": right.with_body(unbound)})
    target = tvm.target.Target(dict(find_profile(device).target))
    make = split if device.startswith("rtx") else build_kernels
    told = r"not build wrong \(float32 \[rows, 4\], .*Check failed: .*\(free,\).*; .*--dim"
    with pytest.raises(BuildError, match=told):
        make(mod, ["right", "wrong"], target, tmp_path)


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


@pytest.mark.parametrize("dim", ["s", "Selected"])
def test_limit_found_in_a_kernel(tmp_path: Path, dim: str) -> None:
    """A table of 6 positions read by a loop over the sequence allows sequences of 6.

    However the model calls it: a name is no ``Select`` that would guard the read.
    """
    a = te.placeholder((symbol("n"), symbol(dim)), "float32", "a")
    table = te.placeholder((6,), "float32", f"{dim}_table")
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
            module.run({**mixed_feeds(3, 2), "ids": np.full((3, 2), bad)})


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
