"""What `test_new_format` runs in a tree that has `minifloat`: every step, its figures as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import tiny_llama

import apq_tvm
from apq_tvm import pipeline
from apq_tvm.errors import BadScheme
from apq_tvm.evaluation.simulate import Simulation
from apq_tvm.formats import bits_per_weight, dequantize, parse_scheme
from apq_tvm.learn import learn_codes
from apq_tvm.module import load_module
from apq_tvm.onnx_import import import_onnx
from apq_tvm.quantizers import quantize, quantize_tensor
from apq_tvm.quantizers.feedback.refit import refit, row_errors
from apq_tvm.quantizers.inputs.calibration_file import load
from apq_tvm.quantizers.learn.learned import from_arrays
from apq_tvm.types import QuantizedModel
from tests.onnx_models import build, save

N, K = 70, 100  # neither divides by a vector, a unit of 32 or a group

IDS = {"input_ids": tiny_llama.ids(8, 16)}


def matrix() -> dict[str, Any]:
    """Errors of one matrix, rounded plainly and by search, and before and after a refit."""
    scheme = parse_scheme("FP4")
    assert scheme is not None
    w = np.random.default_rng(0).standard_normal((40, 100)).astype(np.float32)
    h = np.cov(np.random.default_rng(1).standard_normal((100, 300))).astype(np.float32)
    plain, searched = (quantize_tensor(w, scheme, search=search) for search in (False, True))
    return {
        "bits": bits_per_weight(quantize_tensor(w[:, :96], scheme)),
        "rtn": [float(np.square(dequantize(t) - w).mean()) for t in (plain, searched)],
        "refit": [
            float(row_errors(dequantize(t) - w, h).sum()) for t in (plain, refit(w, plain, h))
        ],
    }


def codes(files: tuple[Path, Path, Path], folder: Path) -> dict[str, Any]:
    """Squared error of the logits by how codes were chosen, and what abq says."""
    model = import_onnx(files[0])
    exact = Simulation(quantize(model, None)).run(IDS)["logits"]

    def error(quantized: QuantizedModel) -> float:
        return float(np.square(Simulation(quantized).run(IDS)["logits"] - exact).mean())

    def by(method: str, name: Path) -> float:
        file = load(name, model)
        known = from_arrays(file.extra, file.notes)
        quantized = quantize(
            model, "fp4", calibration=file.calibration, method=method, learned=known
        )
        return error(quantized)

    found: dict[str, Any] = {method: by(method, files[2]) for method in ("rtn", "gptq")}
    for kind in ("finetune", "distill", "abq"):
        try:
            learn_codes(
                *files, folder / kind, kind=kind, scheme="fp4", method="gptq", epochs=2, rows=1
            )
            found[kind] = by("learned", folder / kind)
        except BadScheme as refusal:
            found[kind] = str(refusal)
    return found


def module(folder: Path) -> dict[str, Any]:
    """How far a compiled layer is from its decoded weights, and what it is made of."""
    rng = np.random.default_rng(2)
    weights = {"w": rng.standard_normal((K, N)).astype(np.float32)}
    inputs = {"x": ("float32", ["rows", K])}
    path = save(build([("MatMul", "x w", "y")], inputs, "y", weights), folder)
    plan = pipeline.plan(path, target="host", scheme="fp4A32")
    pipeline.build(plan, folder / "module")
    loaded, (tensor,), errors = load_module(folder / "module"), plan.quantized.tensors.values(), []
    for rows in (1, 3, 17):
        x = rng.standard_normal((rows, K)).astype(np.float32)
        wanted = x @ dequantize(tensor).T
        errors.append(float(np.abs(loaded.run(x=x)["y"] - wanted).max() / np.abs(wanted).max()))
    (layer,) = loaded.manifest["layers"]
    return {
        "errors": errors,
        "kernels": [kernel["kernel"] for kernel in layer["kernels"]],
        "layout": layer["layout"],
    }


def main() -> None:
    """Every step in the folder that is named."""
    folder = Path(sys.argv[1])
    files = tiny_llama.calibrated(folder)
    found = {
        "home": apq_tvm.__file__,
        "matrix": matrix(),
        "codes": codes(files, folder),
        "module": module(folder),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
