"""A stand-in for a compiled module: y = 2 x + error, z = tokens unchanged, with its ONNX model."""

from __future__ import annotations

import json
from pathlib import Path

CODE = """
import numpy as np

class ModuleError(Exception):
    pass

ERROR = {error}
threads = 2

def num_threads():
    return threads

def set_num_threads(count):
    global threads
    threads = count

def memory():
    return {{"arena": 2000, "live": 1000}}

def run(feeds):
    x, mask = feeds["x"], feeds["attention_mask"]
    if len(x) > 50:
        raise ModuleError("input 'x' is too long")
    return {{"y": (2 * x + ERROR * (x > 0)).astype(np.float32), "z": mask}}
"""


def layer(name: str, kernel: str = "apq_vnni_gemv", **more: object) -> dict[str, object]:
    """One entry of a manifest's layers."""
    return {
        "name": name,
        "op": "apq.Linear",
        "n": 64,
        "k": 32,
        "scheme": "W4A8g32",
        "bits_per_weight": 4.5,
        "bytes": 64 * 32 * 9 // 16,
        "layout": "W4r16k4",
        "kernels": [
            {"m_min": 1, "m_max": 1, "kernel": kernel, "decisions": {}},
            {"m_min": 2, "m_max": 15, "kernel": "small", "decisions": {"streams": 2}},
            {"m_min": 16, "m_max": -1, "kernel": "large", "decisions": {}},
        ],
        "rejected": [{"kernel": "faster", "reason": f"K=32 of {name} is too short"}],
        "note": "",
        **more,
    }


MANIFEST = {
    "target": "x86-64-v4",
    "features": ["avx2", "avx512vnni"],
    "inputs": [{"name": "x", "dtype": "float32", "shape": ["batch", "seq", 4]}],
    "outputs": [{"name": "y", "dtype": "float32", "shape": ["batch", "seq", 4]}],
    "stored": {
        "weights": 3 * 64 * 32,
        "bytes": 2 * 64 * 32 * 9 // 16 + 64 * 32 * 4,
        "quantized_weights": 2 * 64 * 32,
        "quantized_bytes": 2 * 64 * 32 * 9 // 16,
    },
    "layers": [
        layer("query"),
        layer("key"),
        layer("classifier", scheme="float", bits_per_weight=32.0, bytes=64 * 32 * 4),
    ],
    "functions": [{"name": "gather1", "schedule": "generic"}],
    "timings": {"import": 0.5},
}


def write(folder: Path, error: float = 0.0) -> Path:
    """Write the module into `folder`; `error` is added to y where x is positive."""
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(CODE.format(error=error))
    (folder / "manifest.json").write_text(json.dumps(MANIFEST))
    return folder


def write_onnx(path: Path) -> Path:
    """Write the float model: y = x + x, z = attention_mask."""
    import onnx
    from onnx import TensorProto, helper

    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [
            helper.make_node("Add", ["x", "x"], ["y"]),
            helper.make_node("Identity", ["attention_mask"], ["z"]),
        ],
        "fake",
        [
            value("x", TensorProto.FLOAT, ["batch", "seq", 4]),
            value("attention_mask", TensorProto.INT64, ["batch", "seq"]),
        ],
        [
            value("y", TensorProto.FLOAT, ["batch", "seq", 4]),
            value("z", TensorProto.INT64, ["batch", "seq"]),
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, path)
    return path
