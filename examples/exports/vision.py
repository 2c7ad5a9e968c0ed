"""torchvision's classifiers, with norms as training leaves them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
import zoo
from torch import nn

from .one import Export, Inputs

# PyPI's torchvision has its own operators for CUDA's torch alone; the models need none.
OPERATORS = torch.library.Library("torchvision", "DEF")
for operator in ("nms", "qnms"):
    OPERATORS.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def pictures(count: int = 2, size: int = 224) -> Callable[[], Inputs]:
    """Smooth patches, normalised as ImageNet's."""

    def make() -> Inputs:

        draw = zoo.picture(*zoo.IMAGENET)
        made = draw(np.random.default_rng(0), (count, 3, size, size))
        return {"input": torch.tensor(made, dtype=torch.float32)}

    return make


def sane(model: nn.Module) -> nn.Module:
    """Norms as training leaves them, with random weights: no layer dies out."""
    generator = torch.Generator().manual_seed(1)
    for part in model.modules():
        if isinstance(part, nn.BatchNorm2d | nn.BatchNorm1d):
            part.weight.data = 0.6 + 0.8 * torch.rand(part.weight.shape, generator=generator)
            part.bias.data = 0.2 * torch.randn(part.bias.shape, generator=generator)
            part.track_running_stats = True
    return model


def settled(make: Callable[[], nn.Module], size: int = 224) -> Callable[[], nn.Module]:
    """The model after its norms saw some images, which is what keeps random depths alive."""

    def build() -> nn.Module:
        model = sane(make()).train()
        for part in model.modules():
            if isinstance(part, nn.Dropout):
                part.p = 0.0
            if isinstance(part, nn.BatchNorm2d):
                part.momentum = None
        with torch.no_grad():
            for _ in range(2):
                model(pictures(4, size)()["input"] + 0.05 * torch.randn(4, 3, size, size))
        return model.eval()

    return build


def vision() -> Iterator[Export]:
    """Classifiers by torchvision."""
    import torchvision.models as zoo_of_torch

    names = (
        "resnet18", "resnet50", "mobilenet_v3_small", "efficientnet_b0", "densenet121",
        "shufflenet_v2_x0_5", "convnext_tiny", "swin_t", "vit_b_16", "squeezenet1_1", "mnasnet0_5",
        "regnet_y_400mf", "inception_v3", "googlenet", "maxvit_t", "swin_v2_t", "vgg11_bn",
        "alexnet",
    )  # fmt: skip
    for name in names:
        build = getattr(zoo_of_torch, name)
        more = (
            {"init_weights": True, "aux_logits": False}
            if name in ("googlenet", "inception_v3")
            else {}
        )
        make = settled(lambda build=build, more=more: build(weights=None, **more))
        yield Export(name, make, pictures(), {"input": {0: "batch"}, "output": {0: "batch"}})
