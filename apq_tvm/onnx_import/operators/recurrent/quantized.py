"""``com.microsoft.DynamicQuantizeLSTM``: an LSTM whose weights are integers, and its codes stay.

A direction has one scale for all, or one per column (onnxruntime docs/ContribOperators.md). What it
multiplies is rounded to uint8 with one range for all steps of the input, and for all rows of a
state, where the import keeps the roundings of a file (`Graph.as_written`).
"""

from __future__ import annotations

from apq_tvm.onnx_import.graph import Graph
from apq_tvm.onnx_import.integers.quantized import columns
from apq_tvm.onnx_import.integers.written import as_integers
from apq_tvm.onnx_import.operators.recurrent.layer import Direction, Layer, R, W
from apq_tvm.onnx_import.operators.recurrent.operators import lstm_steps
from apq_tvm.onnx_import.operators.steps import Steps
from apq_tvm.types import Node

W_SCALE, W_ZERO, R_SCALE, R_ZERO = 8, 9, 10, 11
SCALES = {W: (W_SCALE, W_ZERO), R: (R_SCALE, R_ZERO)}


class QuantizedLayer(Layer):
    """Weights [D, K, G * H] of integers."""

    def __init__(self, steps: Steps, gates: int, functions: tuple[str, ...]) -> None:
        super().__init__(steps, gates, functions)
        self.exact = steps.graph.as_written
        self._parts: dict[tuple[str, int], str] = {}

    def matrix(self, index: int, direction: Direction) -> str:
        """The matrix of a direction: of floats, with its codes, or, of an exact layer, of integers.

        Raises
        ------
        UnsupportedModel
            Weights, scales or zero points are no constants, or do not fit each other.
        """
        graph, (weight, scale, zero) = self.steps.graph, self._given(index, direction)
        source = f"DynamicQuantizeLSTM of {graph.dtype(weight)}"
        matrix = columns(graph, weight, scale, zero, source, self.steps.node)
        if matrix is None:
            raise self.steps.refuse(
                f"its weights {graph.describe(self.steps.input(index))} do not fit their scales "
                f"{graph.describe(self.steps.input(SCALES[index][0]))}"
            )
        return weight if self.exact else matrix

    def product(self, index: int, direction: Direction, x: str, matrix: str) -> str:
        """``x · matrix``; of an exact layer a product of integers."""
        if not self.exact:
            return super().product(index, direction, x, matrix)
        _, scale, zero = self._given(index, direction)
        return as_integers(self.steps, (x, "", ""), (matrix, scale, zero))

    def _given(self, index: int, direction: Direction) -> list[str]:
        """A direction's integers, scales and zero points."""
        steps, graph = self.steps, self.steps.graph
        given = [steps.input(i) for i in (index, *SCALES[index])]
        if any(name and name not in graph.weights for name in given):
            raise steps.refuse("its weights, scales and zero points must be constants")
        parts = []
        for name in given:
            part = (name, direction.index)
            if name and part not in self._parts:
                array = graph.weights[name][direction.index]
                self._parts[part] = graph.add_weight(f"{name}.{direction.index}", array)
            parts.append(self._parts[part] if name else "")
        return parts


def dynamic_quantize_lstm(graph: Graph, node: Node) -> list[Node]:
    """An LSTM of dequantized weights; activations are rounded by the scheme."""
    layer = QuantizedLayer(Steps(graph, node), 4, ("Sigmoid", "Tanh", "Tanh"))
    if layer.exact:
        return lstm_steps(layer)
    note = "activations are rounded by the scheme, not by the file's DynamicQuantizeLSTM"
    for direction in layer.directions:
        for part in ("input", "recurrent"):
            graph.notes[f"{direction.name}.{part}"] = note
    return lstm_steps(layer)
