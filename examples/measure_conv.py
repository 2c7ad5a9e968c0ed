"""Times convolution nets in W8A8 beside ONNX Runtime's float32 and QDQ int8: docs/speed-x86.md.

``python examples/measure_conv.py NAME...`` takes names of torchvision's models, whose weights are
random, or paths of ONNX files; ``--size 1x3x640x640`` is for inputs whose sizes are open, and
``--scheme W7A8`` for other codes. Rivals are the float32 model and `quantize_static` of it, QDQ,
per channel, int8 weights, uint8 and int8 activations: the fastest counts. All take turns in one
process; one thread is timed by its own clock, which stands while others use the core, two by the
wall's. Rows lie in ``docs/measured/conv_TARGET.json``, a file for each machine. ``--target znver3``
measures code for other machines here; `avx2_only` gives it the rivals of such machines.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import avx2_only
import doc_tables
import measure
import measured
import numpy as np

# torch's threads, which are libgomp's, are not to spin for long while others are timed.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

BATCHES, THREADS = (1, 8), (1, 2)
SECONDS, LEAST_ROUNDS = 15.0, 5
NAMES = ("resnet18", "resnet50", "mobilenet_v3_small", "efficientnet_b0")

Array = Any


def exported(name: str, folder: Path) -> Path:
    """A model of torchvision with random weights, its statistics those of noise."""
    import torch

    torch.manual_seed(0)
    net = getattr(measured.torchvision_models(), name)(weights=None).train()
    for part in net.modules():
        if isinstance(part, torch.nn.BatchNorm2d):
            part.momentum = None
        elif isinstance(part, torch.nn.Dropout):
            part.p = 0
    with torch.no_grad():
        for _ in range(2):
            net(torch.randn(4, 3, 224, 224))
    path = folder / f"{name}.onnx"
    axes = {"x": {0: "batch"}, "y": {0: "batch"}}
    torch.onnx.export(
        net.eval(), (torch.randn(1, 3, 224, 224),), str(path), opset_version=17, dynamo=False,
        input_names=["x"], output_names=["y"], dynamic_axes=axes,
    )  # fmt: skip
    return path


def quantized(path: Path, folder: Path, shape: tuple[int, ...]) -> Iterator[tuple[str, Path]]:
    """The model in QDQ, by type of activations; of old files in opset 17."""
    import onnx
    from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static

    model = onnx.load(path)
    if model.opset_import[0].version < 13:
        path = folder / "newer.onnx"
        onnx.save(onnx.version_converter.convert_version(model, 17), path)
    name = model.graph.input[0].name

    class Noise(CalibrationDataReader):
        def __init__(self) -> None:
            rng = np.random.default_rng(1)
            self.left = [{name: rng.standard_normal(shape, np.float32)} for _ in range(3)]

        def get_next(self) -> Any:
            return self.left.pop() if self.left else None

    for kind in ("QUInt8", "QInt8"):
        target = folder / f"{kind}.onnx"
        quantize_static(
            path, target, Noise(), per_channel=True,
            weight_type=QuantType.QInt8, activation_type=QuantType[kind],
        )  # fmt: skip
        yield kind, target


def session(path: Path, threads: int) -> Any:
    """ONNX Runtime's, whose threads do not spin while others are timed."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 3
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def least(runs: dict[str, Callable[[], Any]], threads: int) -> dict[str, float]:
    """Least microseconds of each, which take turns."""
    clock = time.thread_time if threads == 1 else time.perf_counter
    best = dict.fromkeys(runs, float("inf"))
    began, rounds = time.monotonic(), 0
    while rounds < LEAST_ROUNDS or time.monotonic() - began < SECONDS:
        for name, run in runs.items():
            start = clock()
            run()
            best[name] = min(best[name], (clock() - start) * 1e6)
        rounds += 1
    return best


def cosine(found: Array, wanted: Array) -> float:
    """Of the angle between two answers."""
    a, b = found.ravel(), wanted.ravel()
    return round(float(a @ b / np.linalg.norm(a) / np.linalg.norm(b)), 4)


def rows(
    path: Path, target: str, scheme: str, shape: tuple[int, ...], folder: Path, counts: list[int]
) -> Iterator[dict[str, Any]]:
    """One row per batch and number of threads."""
    import apq_tvm
    from apq_tvm.module import load_module

    began = time.monotonic()
    apq_tvm.compile(path, folder / "module", scheme=scheme, target=target)
    seconds = round(time.monotonic() - began, 1)
    rivals = {"fp32": path, **dict(quantized(path, folder, shape))}
    module = load_module(folder / "module")
    for threads in counts:
        module.set_num_threads(threads)
        sessions = {rival: session(at, threads) for rival, at in rivals.items()}
        feeds = sessions["fp32"].get_inputs()[0].name
        for batch in BATCHES:
            x = np.random.default_rng(0).standard_normal((batch, *shape[1:]), np.float32)
            feed = {feeds: x}
            mine = next(iter(module.run(feed).values()))
            theirs = {rival: of.run(None, feed)[0] for rival, of in sessions.items()}
            runs = {"ours": lambda feed=feed: module.run(feed)}
            for rival, of in sessions.items():
                runs[rival] = lambda of=of, feed=feed: of.run(None, feed)
            times = least(runs, threads)
            best = min(times[rival] for rival in rivals)
            yield {
                "model": path.stem if scheme == "W8A8" else f"{path.stem}, {scheme}",
                "target": target,
                "batch": batch,
                "threads": threads,
                "us": round(times["ours"]),
                "rivals_us": {rival: round(times[rival]) for rival in rivals},
                "ratio": round(best / times["ours"], 2),
                "cosine": cosine(mine, theirs["fp32"]),
                "rivals_cosine": {r: cosine(y, theirs["fp32"]) for r, y in theirs.items()},
                "compile_s": seconds,
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=NAMES)
    parser.add_argument("--size", default="1x3x224x224", help="of the input")
    parser.add_argument("--scheme", default="W8A8")
    parser.add_argument("--target", default="host")
    parser.add_argument("--threads", type=int, nargs="*", default=THREADS)
    arguments = parser.parse_args()
    shape = tuple(map(int, arguments.size.split("x")))
    machine = measure.place()
    target = machine["target"] if arguments.target == "host" else arguments.target
    table = f"conv_{machine['target']}" + ("_avx2" if avx2_only.told() else "")
    for name in arguments.models:
        with tempfile.TemporaryDirectory(prefix="apq-conv-") as made:
            path = Path(name) if name.endswith(".onnx") else exported(name, Path(made))
            given = (path, target, arguments.scheme, shape, Path(made), arguments.threads)
            for row in rows(*given):
                print(row, flush=True)
                keys = ("model", "target", "batch", "threads")
                measured.store(table, [row], machine, merge_by=keys)
    doc_tables.render_all()


if __name__ == "__main__":
    main()
