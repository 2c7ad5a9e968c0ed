"""``com.microsoft.DynamicQuantizeLSTM``: an LSTM whose weights are integers, and its codes stay.

A direction has one scale for all, or one per column (onnxruntime docs/ContribOperators.md).
"""

from __future__ import annotations

from apq_tvm.onnx_import.graph import Graph
from apq_tvm.onnx_import.integers.quantized import columns
from apq_tvm.onnx_import.operators.recurrent.layer import Direction, Layer, R, W
from apq_tvm.onnx_import.operators.recurrent.operators import lstm_steps
from apq_tvm.onnx_import.operators.steps import Steps
from apq_tvm.types import Node

W_SCALE, W_ZERO, R_SCALE, R_ZERO = 8, 9, 10, 11
SCALES = {W: (W_SCALE, W_ZERO), R: (R_SCALE, R_ZERO)}


class QuantizedLayer(Layer):
    """Weights [D, K, G * H] of integers."""

    def matrix(self, index: int, direction: Direction) -> str:
        """The float matrix of a direction, with its codes.

        Raises
        ------
        UnsupportedModel
            Weights, scales or zero points are no constants, or do not fit each other.
        """
        steps, graph = self.steps, self.steps.graph
        given = [steps.input(i) for i in (index, *SCALES[index])]
        if any(name and name not in graph.weights for name in given):
            raise steps.refuse("its weights, scales and zero points must be constants")
        parts = [
            graph.add_weight(f"{name}.{direction.index}", graph.weights[name][direction.index])
            if name
            else ""
            for name in given
        ]
        source = f"DynamicQuantizeLSTM of {graph.dtype(given[0])}"
        matrix = columns(graph, parts[0], parts[1], parts[2], source, steps.node)
        if matrix is None:
            raise steps.refuse(
                f"its weights {graph.describe(given[0])} do not fit their scales "
                f"{graph.describe(given[1])}"
            )
        return matrix


def dynamic_quantize_lstm(graph: Graph, node: Node) -> list[Node]:
    """An LSTM of dequantized weights; activations are rounded by the scheme."""
    layer = QuantizedLayer(Steps(graph, node), 4, ("Sigmoid", "Tanh", "Tanh"))
    note = "activations are rounded by the scheme, not by the file's DynamicQuantizeLSTM"
    for direction in layer.directions:
        for part in ("input", "recurrent"):
            graph.notes[f"{direction.name}.{part}"] = note
    return lstm_steps(layer)
