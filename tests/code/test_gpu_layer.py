"""A GPU's layer by its shape alone is the one that a module has."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from apq_tvm import pipeline
from apq_tvm.bench.gpu.layer import TILE_ROWS, GpuLayer
from apq_tvm.bench.linear import write_model
from apq_tvm.codegen.cuda.split import split
from apq_tvm.codegen.graph.c_text import identifier
from apq_tvm.schedules.devices import find_profile

SHAPE = (70, 336)


@pytest.mark.parametrize("scheme", ["W4A8g32", "W8A8", "W1A4", "anyprec3-4", "cb2", "float"])
def test_kernels_are_a_modules(scheme: str, tmp_path: Path) -> None:
    """Their CUDA source, but for what functions are called."""
    import tvm

    profile = find_profile("rtx-3090")
    weight = np.random.default_rng(0).standard_normal(SHAPE).astype(np.float32)
    write_model(tmp_path / "linear.onnx", weight)
    plan = pipeline.plan(tmp_path / "linear.onnx", target="rtx-3090", scheme=scheme, search=False)
    made = pipeline.scheduled(plan)
    linears = {name: func.kernel.name for name, func in made.lowered.linears.items()}
    layer = GpuLayer(*SHAPE, scheme, profile)
    assert set(linears.values()) | set(made.lowered.preparations) == set(layer.functions)
    target = tvm.target.Target(dict(profile.target))
    for name, mine in (*linears.items(), *((p, p) for p in made.lowered.preparations)):
        theirs = split(made.mod, [name], target, tmp_path)[1]
        ours = split(layer.module, [mine], target, tmp_path)[1]
        assert theirs.source.replace(identifier(name), identifier(mine)) == ours.source
        assert [k.launch for k in theirs.kernels] == [k.launch for k in ours.kernels]


def test_a_tile_stands_for_all_rows() -> None:
    """Blocks of rows along the first axis, or what is the same for any number of rows."""
    layer = GpuLayer(*SHAPE, "W8A8", find_profile("rtx-3090"))
    assert layer.blocks() == {"codes": (0, 16, 5), "scales": (0, 16, 5), "row_sums": (0, 1, 70)}
    assert len(layer.packed["codes"]) * 16 == TILE_ROWS
    assert layer.nbytes() == SHAPE[0] * (SHAPE[1] + 2)
    assert layer.choice(8).kernel.startswith("gemv") and layer.choice(9).kernel.startswith("gemm")
    before, product = layer.launches(9)
    assert [launch.extents[:2] for launch in (*before, *product)] == [(9, 1), (5, 1)]
    assert GpuLayer(*SHAPE, "cb2", find_profile("rtx-3090")).blocks()["table"] == (0, 0, 0)
