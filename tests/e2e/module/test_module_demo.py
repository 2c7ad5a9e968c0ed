"""The demo model in float, imported by Relax and unscheduled, against ONNX Runtime."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import numpy as np
import onnx
import onnxruntime
import pytest
import tvm
from tvm import relax
from tvm.relax.frontend.onnx import from_onnx

from apq_tvm.codegen.emit import emit
from apq_tvm.types import Array, TensorSpec
from tests.e2e.module.helpers import as_scheduled, import_from, run_python

SHAPES = ((1, 128), (2, 17), (3, 1))
TOLERANCE = 2e-5
ARENA_LIMIT = 1.3

pytestmark = [pytest.mark.model, pytest.mark.slow]


def spec(value: onnx.ValueInfoProto) -> TensorSpec:
    kind = value.type.tensor_type
    dtype = str(onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type))
    return TensorSpec(value.name, dtype, tuple(d.dim_param or d.dim_value for d in kind.shape.dim))


@pytest.fixture(scope="module")
def module(demo_onnx: Path, tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    model = onnx.load(demo_onnx)
    t = relax.transform
    passes = [
        t.DecomposeOpsForInference(),
        t.LegalizeOps(),
        t.AnnotateTIROpPattern(),
        t.FoldConstant(),
        t.FuseOps(),
        t.FuseTIR(),
        t.DeadCodeElimination(),
    ]
    mod = tvm.ir.transform.Sequential(passes)(from_onnx(model, keep_params_in_input=False))
    inputs, outputs = [spec(v) for v in model.graph.input], [spec(v) for v in model.graph.output]
    output = tmp_path_factory.mktemp("demo") / "demo_float"
    return import_from(emit(as_scheduled(mod, inputs, outputs), output, {}))


def feeds(batch: int, length: int) -> dict[str, Array]:
    rng = np.random.default_rng(batch * 1000 + length)
    mask = np.ones((batch, length), np.int64)
    mask[:, length // 2 + 1 :] = 0
    return {"input_ids": rng.integers(0, 30522, (batch, length)), "attention_mask": mask}


@pytest.mark.parametrize(("batch", "length"), SHAPES)
def test_matches_onnxruntime(demo_onnx: Path, module: ModuleType, batch: int, length: int) -> None:
    session = onnxruntime.InferenceSession(demo_onnx)
    wanted = session.run(None, feeds(batch, length))
    results = module.run(**feeds(batch, length))
    assert list(results) == [o.name for o in session.get_outputs()]
    for name, got, reference in zip(results, results.values(), wanted, strict=True):
        assert got.dtype == reference.dtype
        np.testing.assert_allclose(got, reference, atol=TOLERANCE, rtol=0, err_msg=name)


@pytest.mark.parametrize(("batch", "length"), SHAPES)
def test_arena_is_near_the_live_set(module: ModuleType, batch: int, length: int) -> None:
    code = f"""
        import numpy as np, demo_float as m
        ids = np.ones(({batch}, {length}), np.int64)
        m.run(input_ids=ids, attention_mask=ids)
        used = m.memory()
        print(used["arena"] <= {ARENA_LIMIT} * used["live"], used)
        """
    done = run_python(code, Path(module.__file__ or "").parent.parent)
    assert done.stdout.startswith("True"), done.stdout + done.stderr
