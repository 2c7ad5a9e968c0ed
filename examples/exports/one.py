"""One model to export: how it is made, its inputs, and both of torch's exporters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

Inputs = dict[str, torch.Tensor]
Axes = dict[str, dict[int, str]]


@dataclass(frozen=True)
class Export:
    """One model.

    Parameters
    ----------
    name : str
    make : callable
        The module, in inference mode.
    inputs : callable
        Tensors by name, in the order of the module's arguments.
    axes : mapping
        Names of the dimensions that stay symbolic, by input or output and position.
    outputs : tuple of str
    exporters : tuple of str
        ``"script"`` (TorchScript) and ``"dynamo"``.
    opset : int
    """

    name: str
    make: Callable[[], nn.Module]
    inputs: Callable[[], Inputs]
    axes: Axes
    outputs: tuple[str, ...] = ("output",)
    exporters: tuple[str, ...] = ("script", "dynamo")
    opset: int = 17

    def write(self, folder: Path, exporter: str) -> Path:
        """Export and keep the inputs beside it."""
        torch.manual_seed(0)
        model, inputs = self.make().eval(), self.inputs()
        path = folder / f"{self.name}{'' if exporter == 'script' else '_dynamo'}.onnx"
        common = {"input_names": list(inputs), "output_names": list(self.outputs)}
        with torch.no_grad():
            if exporter == "script":
                with traceable(model):
                    torch.onnx.export(
                        model, tuple(inputs.values()), path, dynamo=False,
                        opset_version=self.opset, dynamic_axes=self.axes, **common,
                    )  # fmt: skip
            else:
                dims = {
                    name: torch.export.Dim.AUTO
                    for axes in self.axes.values()
                    for name in axes.values()
                }
                shapes: tuple[Any, ...] = tuple(
                    {axis: dims[name] for axis, name in self.axes.get(key, {}).items()}
                    for key in inputs
                )
                if isinstance(model, Plain):
                    shapes = (shapes,)
                torch.onnx.export(
                    model, tuple(inputs.values()), path, dynamo=True, dynamic_shapes=shapes,
                    external_data=False, **common,
                )  # fmt: skip
        np.savez(path.with_suffix(".npz"), **{k: v.numpy() for k, v in inputs.items()})
        return path


class Plain(nn.Module):
    """A transformers model as a function of tensors that gives tensors."""

    def __init__(self, model: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.model, self.call = model, call

    def forward(self, *tensors: torch.Tensor) -> Any:
        return self.call(self.model, *tensors)


@contextmanager
def traceable(model: nn.Module) -> Iterator[None]:
    """Transformers' masks without ``vmap``, which TorchScript cannot trace: optimum has others."""
    if not isinstance(model, Plain):
        yield
        return
    from optimum.exporters.onnx import model_patcher as patched
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as masks

    before = {kind: masks[kind] for kind in ("eager", "sdpa")}
    masks.register("eager", patched.eager_mask_without_vmap)
    masks.register("sdpa", patched.sdpa_mask_without_vmap)
    try:
        yield
    finally:
        for kind, function in before.items():
            masks.register(kind, function)
