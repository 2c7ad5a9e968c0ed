"""Weights of layouts in fragment order as TensorIR says them, which generic kernels read."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from built import built
from coded_tensors import tensor_of
from tvm import te

from apq_tvm.codegen.layouts import FragmentLayout
from apq_tvm.formats import dequantize
from apq_tvm.formats.scheme import parse_scheme

N, K = 50, 300


@pytest.mark.parametrize("planes", (False, True))
@pytest.mark.parametrize("name", ("W1A8", "W3A8g64", "W5zA8g128", "W8A8", "W2*A8", "W2*A8g32"))
def test_weight_expression_means_the_format(name: str, planes: bool) -> None:
    scheme = parse_scheme(name)
    assert scheme is not None
    tensor = tensor_of(scheme, N, K)
    layout = FragmentLayout.of(scheme, planes)
    assert layout is not None
    packed, shapes = layout.pack(tensor).arrays, layout.shapes(N, K)
    held = {key: te.placeholder(shape, dtype, key) for key, (shape, dtype) in shapes.items()}

    def weight(n: Any, k: Any) -> Any:
        return layout.weight(held, n // layout.rows, n % layout.rows, k)

    y = np.zeros((N, K), np.float32)
    func = te.create_prim_func([*held.values(), te.compute((N, K), weight)])
    built(func, "llvm")(*(packed[key] for key in held), y)
    np.testing.assert_allclose(y, dequantize(tensor), rtol=1e-6)
