"""Top-1 agreement of compiled image classifiers with their float models.

``python examples/images.py FOLDER`` compiles every ``*.onnx`` of a folder (one image input
[batch, 3, height, width], one output of classes) in W8A8, compares the module with ONNX Runtime on
100 images and keeps the rows in ``docs/measured/images.json``, for ``docs/accuracy.md``.
``--export`` writes torchvision's networks there first. Their weights are random, since no package
holds trained ones: BatchNorm gets the statistics of images by a pass in training mode, and scales
and shifts of its own.

Images are crops of photographs that come with matplotlib and, if it is there, scikit-learn, of any
place, size, mirroring, light and order of colours.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import measured
import numpy as np

Array = Any

NETWORKS = ("resnet18", "resnet50", "mobilenet_v3_small", "efficientnet_b0")
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def photographs() -> list[Any]:
    """Images of packages, as PIL's."""
    import matplotlib
    from PIL import Image

    found = [Path(matplotlib.get_data_path()) / "sample_data" / "grace_hopper.jpg"]
    try:
        import sklearn

        found += sorted((Path(sklearn.__file__).parent / "datasets" / "images").glob("*.jpg"))
    except ImportError:
        pass
    return [Image.open(path).convert("RGB") for path in found]


def images(count: int, height: int, width: int, seed: int = 0) -> Array:
    """float32 [count, 3, height, width], normalised as torchvision's networks want it."""
    rng, every = np.random.default_rng(seed), photographs()
    made = []
    for i in range(count):
        photo = every[i % len(every)]
        size = int(rng.uniform(0.15, 1) * min(photo.size))
        x, y = (int(rng.integers(0, extent - size + 1)) for extent in photo.size)
        crop = photo.crop((x, y, x + size, y + size)).resize((width, height))
        pixels = np.asarray(crop, np.float32)[..., rng.permutation(3)] / 255
        pixels = pixels[:: rng.choice((-1, 1)), :: rng.choice((-1, 1))]
        light = (pixels - 0.5) * rng.uniform(0.6, 1.3) + 0.5 + rng.uniform(-0.15, 0.15)
        made.append(((light.clip(0, 1) - MEAN) / DEVIATION).transpose(2, 0, 1))
    return np.ascontiguousarray(np.stack(made), np.float32)


def export(folder: Path) -> None:
    """Write torchvision's networks."""
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
                net(torch.from_numpy(images(16, 224, 224, 100 + seed)))
        torch.onnx.export(
            net.eval(), (torch.zeros(1, 3, 224, 224),), str(folder / f"{name}.onnx"),
            input_names=["x"], output_names=["y"], dynamo=False,
            dynamic_axes={"x": {0: "batch"}, "y": {0: "batch"}}, opset_version=17,
        )  # fmt: skip


def measure(path: Path, scheme: str, count: int) -> dict[str, Any]:
    """A row: cosines and top-1 agreement of one network."""
    import apq_tvm
    from apq_tvm.evaluate import evaluate
    from apq_tvm.evaluation.runners import open_session, specs_of

    (spec,) = specs_of(open_session(path, 1))
    height, width = (d if isinstance(d, int) else 224 for d in spec.shape[2:])
    with tempfile.TemporaryDirectory() as folder:
        inputs = Path(folder) / "images.npz"
        np.savez(inputs, **{spec.name: images(count, height, width)})
        apq_tvm.compile(path, Path(folder) / "module", scheme=scheme)
        (result,) = evaluate(Path(folder) / "module", path, inputs, rows=1)["outputs"].values()
    keys = ("cosine_mean", "cosine_min", "same_top")
    return {
        "model": path.stem, "scheme": scheme, "images": result["rows"],
        **{key: round(result[key], 5) for key in keys},
    }  # fmt: skip


def main() -> None:
    """Measure a folder's networks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--export", action="store_true")
    parser.add_argument("--scheme", default="W8A8")
    parser.add_argument("--only", default="")
    parser.add_argument("--count", type=int, default=100)
    args = parser.parse_args()
    if args.export:
        export(args.folder)
    for path in sorted(args.folder.glob("*.onnx")):
        if args.only in path.stem:
            row = measure(path, args.scheme, args.count)
            print(row, flush=True)
            measured.store("images", [row], merge_by=("model", "scheme"))


if __name__ == "__main__":
    main()
