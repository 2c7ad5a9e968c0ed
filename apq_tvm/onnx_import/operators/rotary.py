"""Rotary position embeddings (arXiv:2104.09864) of onnxruntime and of ONNX opset 23."""

from __future__ import annotations

import numpy as np

from apq_tvm.onnx_import.graph import Graph
from apq_tvm.onnx_import.operators.steps import Steps
from apq_tvm.onnx_import.symbolic.carry import limit
from apq_tvm.onnx_import.symbolic.dims import Dim
from apq_tvm.onnx_import.symbolic.positions import span
from apq_tvm.types import Node

KEEP = "cosines and sines of rotary positions stay float"
"""Why a table is not quantized: its rounding would turn every query and key."""


def table_rows(steps: Steps, table: str, ids: str) -> str:
    """Rows of a table of cosines or sines, which stays float32."""
    graph = steps.graph
    array = graph.weights.get(table)
    if array is None:
        return steps("Gather", table, ids, axis=0)
    if ids in graph.weights:
        rows = array[graph.weights[ids]]
        return graph.add_weight(f"{steps.node.name}.rows", np.ascontiguousarray(rows))
    reach = span(graph, ids)
    if reach is not None:
        limit(graph, reach[1], array.shape[0])
    return steps("apq.Embedding", table, ids, keep=KEEP)


def rotate(steps: Steps, x: str, cos: str, sin: str, interleaved: bool) -> str:
    """Turn pairs of the last axis of `x` by angles with the given cosines and sines.

    Parameters
    ----------
    x : value [B, S, N, H]
    cos, sin : value [B or 1, S, R / 2]
        The first R entries of a head are turned; the rest stay.
    interleaved : bool
        Pairs are neighbours (0, 1), (2, 3) ...; else (0, R/2), (1, R/2 + 1) ...
    """
    batch, length, heads, width = steps.shape(x, 4)
    half = steps.size(steps.shape(cos, 3)[2], "rotary dimension")
    size, turned = steps.size(width, "head size"), 2 * half
    if turned > size:
        raise steps.refuse(f"it turns {turned} numbers of heads of {size}")
    rows = steps.shape(cos)
    tail = (1, half, 1) if interleaved else (1, half)
    cos, sin = (steps.reshape(v, rows[0], rows[1], *tail) for v in (cos, sin))
    part = steps.slice(x, 3, 0, turned) if turned < size else x
    if interleaved:
        part = steps.reshape(part, batch, length, heads, half, 2)
        first, second = (steps.slice(part, 4, i, i + 1) for i in (0, 1))
    else:
        first, second = (steps.slice(part, 3, i * half, (i + 1) * half) for i in (0, 1))
    real = steps("Sub", steps("Mul", first, cos), steps("Mul", second, sin))
    imaginary = steps("Add", steps("Mul", second, cos), steps("Mul", first, sin))
    if interleaved:
        both = steps("Concat", real, imaginary, axis=4)
        both = steps.reshape(both, batch, length, heads, turned)
        parts = [both]
    else:
        parts = [real, imaginary]
    if turned < size:
        parts.append(steps.slice(x, 3, turned, size))
    return parts[0] if len(parts) == 1 else steps("Concat", *parts, axis=3)


def split_heads(steps: Steps, x: str, heads: int) -> tuple[str, bool]:
    """``[B, S, N * H]`` or ``[B, N, S, H]`` as ``[B, S, N, H]``, and whether it was the latter."""
    shape = steps.shape(x, 3, 4)
    if len(shape) == 4:
        return steps.transpose(x, 0, 2, 1, 3), True
    hidden = steps.size(shape[2], "hidden size")
    if heads < 1 or hidden % heads:
        raise steps.refuse(f"num_heads={heads} does not divide the hidden size {hidden}")
    return steps.reshape(x, shape[0], shape[1], heads, hidden // heads), False


def _back(steps: Steps, y: str, shape: tuple[Dim, ...], four: bool) -> str:
    return steps.transpose(y, 0, 2, 1, 3) if four else steps.reshape(y, *shape)


def contrib_rotary(graph: Graph, node: Node) -> list[Node]:
    """``com.microsoft.RotaryEmbedding``: positions as ids [B, S], or the first one as [1].

    Raises
    ------
    UnsupportedModel
        Batches packed without padding; shapes that do not fit.
    """
    steps = Steps(graph, node)
    x, ids, cos, sin = node.inputs
    if node.attrs.get("is_packed_batching", 0):
        raise steps.refuse("batches packed without padding (is_packed_batching) cannot be compiled")
    heads, shape = int(node.attrs.get("num_heads", 0)), steps.shape(x, 3, 4)
    rotary = int(node.attrs.get("rotary_embedding_dim", 0))
    half = steps.size(steps.shape(cos, 2)[1], "rotary dimension")
    if len(shape) == 3 and not heads:
        # onnxruntime then takes the tables to span whole heads.
        heads = steps.size(shape[2], "hidden size") // (rotary or 2 * half)
    if rotary and rotary != 2 * half:
        raise steps.refuse(f"rotary_embedding_dim={rotary}, but its tables have {half} columns")
    split, four = split_heads(steps, x, heads)
    length = steps.shape(split)[1]
    if len(steps.shape(ids, 1, 2)) == 1:
        ids = steps.reshape(steps("Add", steps.range(length), ids), 1, length)
    cosines, sines = (table_rows(steps, table, ids) for table in (cos, sin))
    y = rotate(steps, split, cosines, sines, bool(node.attrs.get("interleaved", 0)))
    scale = float(node.attrs.get("scale", 1.0))
    if scale != 1.0:
        raise steps.refuse(
            f"scale={scale:g}: ONNX Runtime ignores it on CPUs, so what it means is open; multiply "
            "the input instead"
        )
    return steps.done(_back(steps, y, shape, four))


def onnx_rotary(graph: Graph, node: Node) -> list[Node]:
    """``RotaryEmbedding`` of ONNX opset 23.

    Raises
    ------
    UnsupportedModel
        Shapes that do not fit.
    """
    steps = Steps(graph, node)
    x, cos, sin = node.inputs[:3]
    ids, shape = steps.input(3), steps.shape(x, 3, 4)
    split, four = split_heads(steps, x, int(node.attrs.get("num_heads", 0)))
    if ids:
        cos, sin = (table_rows(steps, table, ids) for table in (cos, sin))
    rotary = int(node.attrs.get("rotary_embedding_dim", 0))
    half = steps.size(steps.shape(cos, 3)[2], "rotary dimension")
    if rotary and rotary != 2 * half:
        raise steps.refuse(f"rotary_embedding_dim={rotary}, but its tables have {half} columns")
    y = rotate(steps, split, cos, sin, bool(node.attrs.get("interleaved", 0)))
    return steps.done(_back(steps, y, shape, four))
