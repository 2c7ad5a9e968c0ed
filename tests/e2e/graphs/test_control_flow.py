"""Loops and branches through the whole pipeline, against ONNX Runtime."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import apq_tvm
from apq_tvm.module import load_module
from tests import control_models
from tests.onnx_models import save, session_of


def test_control_flow(tmp_path: Path) -> None:
    """Every round and either branch; a layer that both branches hold is prepared in each."""
    path = save(control_models.joined(), tmp_path)
    apq_tvm.compile(path, tmp_path / "compiled", scheme="float")
    module, session = load_module(tmp_path / "compiled"), session_of(path)
    names = control_models.OUTPUTS
    for given in control_models.feeds():
        got = module.run(given)
        for name, value in zip(names, session.run(names, given), strict=True):
            np.testing.assert_allclose(got[name], value, rtol=1e-4, atol=1e-5, err_msg=name)
