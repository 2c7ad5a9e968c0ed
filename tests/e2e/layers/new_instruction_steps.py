"""What `test_new_instruction` runs in a tree with a device and an instruction of its own."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

import apq_tvm
from apq_tvm.formats import dequantize, parse_scheme
from apq_tvm.module import load_module
from apq_tvm.quantizers import quantize_tensor
from tests.onnx_models import build, save

N, K, ROWS = 70, 100, 3  # none divides by a vector, a unit of 32 or a group


def main(folder: Path) -> None:
    w = np.random.default_rng(0).standard_normal((K, N)).astype(np.float32)
    model = build([("MatMul", "x w", "y")], {"x": ("float32", ["m", K])}, "y", {"w": w})
    path = save(model, folder)
    made = apq_tvm.compile(path, folder / "made", scheme="W4A8g32", target="toycore")
    module = load_module(folder / "made")
    x = np.random.default_rng(1).standard_normal((ROWS, K)).astype(np.float32)
    exact = x @ dequantize(quantize_tensor(w.T.copy(), parse_scheme("W4A8g32"), "w")).T
    error = np.linalg.norm(module.run({"x": x})["y"] - exact) / np.linalg.norm(exact)
    (layer,) = made.manifest["layers"]
    kernels = [choice["kernel"] for choice in layer["kernels"]]
    print(json.dumps({"home": apq_tvm.__file__, "kernels": kernels, "error": float(error)}))


main(Path(sys.argv[1]))
