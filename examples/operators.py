"""Single operators of the sizes that models have: what `measure_operators.py` times."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

Sizes = tuple[int, ...]
FILTERED = ("Conv", "ConvTranspose", "MaxPool", "AveragePool", "Resize", "InstanceNormalization")
"""Operators whose number of channels is a number, whatever else is symbolic."""


@dataclass(frozen=True)
class Case:
    """One node: float32 inputs, then constants.

    Parameters
    ----------
    op : str
    inputs : sequence of tuple of int
        Shapes.
    constants : sequence of array
    attrs : mapping
    outputs : int
    """

    op: str
    inputs: Sequence[Sizes]
    constants: Sequence[Any] = ()
    attrs: Mapping[str, Any] = field(default_factory=dict)
    outputs: int = 1

    @property
    def name(self) -> str:
        """What tells it from others."""
        sizes = " ".join("x".join(map(str, shape)) for shape in self.inputs)
        given = [f"{key}={value}" for key, value in self.attrs.items()]
        for array in self.constants:
            small = array.size < 9
            given.append(str(array.tolist()) if small else "x".join(map(str, array.shape)))
        return f"{self.op} {sizes} {' '.join(given)}".strip()

    @property
    def linear(self) -> bool:
        """Whether it has weights that a scheme quantizes."""
        weighted = self.op in ("Conv", "ConvTranspose", "LSTM", "GRU", "MatMul")
        return weighted and bool(self.constants)

    def model(self, symbolic: bool) -> onnx.ModelProto:
        """A model of the node alone; of `symbolic` sizes equal numbers are one dimension."""
        inputs = [f"x{i}" for i in range(len(self.inputs))]
        constants = {f"c{i}": array for i, array in enumerate(self.constants)}
        outputs = [f"y{i}" for i in range(self.outputs)]
        node = helper.make_node(self.op, [*inputs, *constants], outputs, **self.attrs)
        shapes = [self._named(shape) if symbolic else shape for shape in self.inputs]
        infos = [
            helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape)
            for name, shape in zip(inputs, shapes, strict=True)
        ]
        graph = helper.make_graph(
            [node], "one", infos, [helper.make_empty_tensor_value_info(out) for out in outputs],
            [numpy_helper.from_array(array, name) for name, array in constants.items()],
        )  # fmt: skip
        made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
        return onnx.shape_inference.infer_shapes(made)

    def _named(self, shape: Sizes) -> list[int | str]:
        kept = 1 if self.op in FILTERED else len(shape) - 1
        return [d if d == 1 or i == kept else f"d{d}" for i, d in enumerate(shape)]

    def feeds(self, rng: np.random.Generator) -> dict[str, Any]:
        """Noise."""
        return {
            f"x{i}": rng.standard_normal(shape).astype(np.float32)
            for i, shape in enumerate(self.inputs)
        }


def _weight(*shape: int) -> Any:
    return (np.random.default_rng(0).standard_normal(shape) / 10).astype(np.float32)


def _numbers(*values: int) -> Any:
    return np.array(values, np.int64)


def _conv(
    shape: Sizes, outputs: int, kernel: int, stride: int = 1, dilation: int = 1, group: int = 1
) -> Case:
    """Padded such that its size stays, but for strides."""
    rank, pad = len(shape) - 2, (kernel - 1) * dilation // 2
    attrs = {
        "strides": [stride] * rank, "dilations": [dilation] * rank, "pads": [pad] * 2 * rank,
        "group": group,
    }  # fmt: skip
    weight = _weight(outputs, shape[1] // group, *[kernel] * rank)
    return Case("Conv", [shape], [weight, _weight(outputs)], attrs)


def _transposed(shape: Sizes, outputs: int, kernel: int, stride: int, pad: int) -> Case:
    rank = len(shape) - 2
    weight = _weight(shape[1], outputs, *[kernel] * rank)
    attrs = {"strides": [stride] * rank, "pads": [pad] * 2 * rank}
    return Case("ConvTranspose", [shape], [weight, _weight(outputs)], attrs)


def _pool(op: str, shape: Sizes, kernel: int, stride: int, pad: int) -> Case:
    rank = len(shape) - 2
    attrs = {"kernel_shape": [kernel] * rank, "strides": [stride] * rank, "pads": [pad] * 2 * rank}
    return Case(op, [shape], attrs=attrs)


def cases() -> Iterator[Case]:
    """All of them."""
    for shape, *how in (
        ((1, 1, 16000), 64, 400, 160), ((1, 512, 3199), 512, 3, 2), ((1, 64, 4000), 64, 3, 1, 64),
        ((1, 128, 7500), 128, 3, 1, 1024), ((1, 256, 400), 256, 31, 1, 1, 256),
        ((1, 128, 10000), 1, 7), ((1, 768, 499), 768, 127, 1, 1, 16), ((1, 3, 224, 224), 64, 7, 2),
        ((1, 3, 224, 224), 96, 11, 4), ((1, 64, 56, 56), 64, 3), ((1, 512, 7, 7), 512, 3),
        ((1, 256, 14, 14), 256, 3, 1, 12), ((1, 32, 112, 112), 32, 3, 1, 1, 32),
        ((1, 96, 56, 56), 96, 7, 1, 1, 96), ((1, 64, 64, 64), 64, 3, 1, 8, 64),
        ((1, 256, 28, 28), 256, 3, 1, 1, 32), ((1, 256, 28, 28), 256, 3, 1, 1, 16),
        ((1, 64, 128, 128), 3, 3), ((1, 64, 128, 128), 1, 1), ((1, 64, 80, 401), 64, 1),
        ((16, 16, 32, 32), 16, 3), ((1, 17, 50, 50), 19, 3), ((1, 16, 16, 32, 32), 16, 3),
    ):  # fmt: skip
        yield _conv(shape, *how)
    for shape, *how in (
        ((1, 512, 50), 256, 16, 8, 4), ((1, 64, 56, 56), 32, 2, 2, 0),
        ((1, 64, 28, 28), 64, 4, 2, 1),
        ((1, 21, 28, 28), 21, 64, 32, 16), ((1, 513, 100), 1, 1024, 256, 0),
    ):  # fmt: skip
        yield _transposed(shape, *how)
    for op in ("MaxPool", "AveragePool"):
        for shape, *how in (
            ((1, 64, 112, 112), 3, 2, 1), ((1, 256, 20, 20), 13, 1, 6),
            ((1, 3, 512, 512), 16, 16, 0), ((1, 4, 200, 200), 31, 1, 15),
            ((1, 16, 16000), 400, 160, 0),
        ):  # fmt: skip
            yield _pool(op, shape, *how)
    for left, right in (
        ((1, 512), (512, 512)), ((1, 4096), (4096, 11008)), ((1, 197, 768), (768, 3072)),
        ((4096, 33), (33, 65)), ((12, 64, 64), (12, 64, 64)), ((512, 512), (512, 1)),
    ):  # fmt: skip
        yield Case("MatMul", [left], [_weight(*right)])
    for left, right in (
        ((12, 128, 64), (12, 64, 128)), ((1, 12, 1, 64), (1, 12, 64, 1024)),
        ((512, 512), (512, 512)),
        ((1, 12, 1, 1024), (1, 12, 1024, 64)), ((8, 1024), (1024,)), ((2048, 1), (1, 2048)),
        ((10000, 4, 4), (10000, 4, 4)),
    ):  # fmt: skip
        yield Case("MatMul", [left, right])
    for mode in ("nearest", "linear", "cubic"):
        for shape, scales in (((1, 64, 40, 40), (2, 2)), ((1, 3, 300, 300), (0.37, 0.61))):
            sizes = np.array([1, 1, *scales], np.float32)
            yield Case("Resize", [shape], [np.zeros(0, np.float32), sizes], {"mode": mode})
    for op in ("ReduceSum", "ReduceMean", "ReduceMax", "ReduceLogSumExp"):
        for shape, axes in (
            ((64, 3000), [1]), ((3000, 64), [0]), ((8, 64, 56, 56), [2, 3]), ((8, 512, 512), [1]),
            ((1, 116, 64, 64), [2, 3]), ((1, 64, 64, 116), [1, 2]), ((1000000,), [0]),
        ):  # fmt: skip
            yield Case(op, [shape], [_numbers(*axes)], {"keepdims": 0})
    for op in ("Softmax", "LogSoftmax", "ArgMax", "Hardmax"):
        for shape, axis in (((64, 3000), 1), ((1, 19, 256, 256), 1), ((16, 12, 1, 1024), -1)):
            yield Case(op, [shape], attrs={"axis": axis})
    for shape, axis in (((1, 128, 768), -1), ((1000, 33), -1), ((4, 64, 28, 28), -1)):
        yield Case("LayerNormalization", [shape], [_weight(shape[axis])] * 2, {"axis": axis})
    for shape in ((1, 32, 256, 256), (1, 512, 3000)):
        yield Case("InstanceNormalization", [shape], [_weight(shape[1])] * 2)
    for shape, perm in (
        ((1, 64, 56, 56), [0, 2, 3, 1]), ((1024, 1024), [1, 0]),
        ((8, 64, 8, 64, 4), [0, 2, 4, 1, 3]),
        ((100000, 3), [1, 0]),
    ):  # fmt: skip
        yield Case("Transpose", [shape], attrs={"perm": perm})
    yield Case("DepthToSpace", [(1, 48, 100, 100)], attrs={"blocksize": 4, "mode": "CRD"})
    yield Case("SpaceToDepth", [(1, 12, 320, 320)], attrs={"blocksize": 2})
    yield Case("CumSum", [(4, 300, 1000)], [np.array(1, np.int64)])
    yield Case("TopK", [(1, 50257)], [_numbers(100)], {"axis": 1}, 2)
    yield Case("Tile", [(1, 64, 30, 30)], [_numbers(1, 1, 3, 3)])
    yield Case("Pad", [(1, 64, 56, 56)], [_numbers(0, 0, 3, 3, 0, 0, 3, 3)], {"mode": "reflect"})
    yield Case("Concat", [(1, 64, 56, 56)] * 2, attrs={"axis": 1})
    yield Case("Einsum", [(1, 64, 300, 25), (25, 25)], attrs={"equation": "nctv,vw->nctw"})
    yield Case("Einsum", [(8, 512, 512), (512,)], attrs={"equation": "bld,d->bl"})
    for op in "Exp Log Tanh Sigmoid Erf Sin Cos Atan Softplus Mish HardSwish Sqrt Floor".split():
        yield Case(op, [(1, 64, 56, 56)])
    for exponent in (2, 3, 0.5, 1.7):
        yield Case("Pow", [(1, 64, 56, 56)], [np.array(exponent, np.float32)])
    for op, gates in (("LSTM", 4), ("GRU", 3)):
        weights = [_weight(1, gates * 128, 40), _weight(1, gates * 128, 128)]
        yield Case(op, [(100, 1, 40)], weights, {"hidden_size": 128})
