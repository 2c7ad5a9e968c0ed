"""What ONNX Runtime's tool for transformers makes of encoders (its ContribOperators.md)."""

from __future__ import annotations

from itertools import pairwise
from math import sqrt

import numpy as np

from apq_tvm.onnx_import.graph import Graph
from apq_tvm.onnx_import.operators.attend import Heads, added, attend
from apq_tvm.onnx_import.operators.multi_head import causal, padding, split_heads
from apq_tvm.onnx_import.operators.standard import reduced
from apq_tvm.onnx_import.operators.steps import Steps
from apq_tvm.onnx_import.symbolic.dims import Dim
from apq_tvm.types import Node

X, WEIGHT, BIAS, MASK, PAST, SCORES, PAST_LENGTH = range(7)


def packed_attention(graph: Graph, node: Node) -> list[Node]:
    """``com.microsoft.Attention``: one layer makes queries, keys and values of an input.

    Raises
    ------
    UnsupportedModel
        Rotary positions, a past that shares its buffer with the present, masks of other shapes.
    """
    steps, (x, weight) = Steps(graph, node), node.inputs[:2]
    count = int(node.attrs.get("num_heads", 0))
    if count < 1:
        raise steps.refuse(f"its attribute num_heads is {count}, but must be positive")
    if node.attrs.get("do_rotary", 0) or steps.input(PAST_LENGTH):
        raise steps.refuse("rotary positions, and a past that shares its buffer with the present")
    q, k, v = (split_heads(steps, part, count) for part in _projected(steps, x, weight))
    k, v = (steps.transpose(part, 0, 2, 1, 3) for part in (k, v))
    batch, length, _, size = steps.shape(q, 4)
    offset: Dim = 0
    if steps.input(PAST):
        _, _, heads, offset, width = steps.shape(steps.input(PAST), 5)
        olds = (steps.slice(steps.input(PAST), 0, at, at + 1) for at in (0, 1))
        k, v = (
            steps("Concat", steps.reshape(old, batch, heads, offset, width), new, axis=2)
            for old, new in zip(olds, (k, v), strict=True)
        )
    total = steps.shape(k, 4)[2]
    mask = added(
        steps,
        padding(steps, steps.input(MASK), batch, total),
        causal(steps, length, total, offset),
        steps.input(SCORES),
    )
    scale = float(node.attrs.get("scale", 0.0)) or 1 / sqrt(steps.size(size, "head size"))
    found = attend(steps, q, k, v, Heads(count, count), scale, mask)
    present = ""
    if steps.wants(1):
        present = steps("Concat", steps.unsqueeze(k, 0), steps.unsqueeze(v, 0), axis=0)
    return steps.done(found.output, present)


def _projected(steps: Steps, x: str, weight: str) -> list[str]:
    """Queries, keys and values [B, S, ..]: the columns of one product."""
    graph, node = steps.graph, steps.node
    wide = steps.size(steps.shape(weight, 2)[1], "number of columns")
    sizes = [int(n) for n in node.attrs.get("qkv_hidden_sizes", ())] or [wide // 3] * 3
    if len(sizes) != 3 or sum(sizes) != wide:
        raise steps.refuse(f"its weight has {wide} columns for {' + '.join(map(str, sizes))}")
    y = graph.fresh(f"{node.name}.qkv")
    steps.add(Node("MatMul", node.name, (x, weight), (y,)))
    if steps.input(BIAS):
        y = steps("Add", y, steps.input(BIAS))
    ends = [int(end) for end in np.cumsum([0, *sizes])]
    return [steps.slice(y, 2, *part) for part in pairwise(ends)]


def embed_layer_norm(graph: Graph, node: Node) -> list[Node]:
    """``EmbedLayerNormalization``: the sum of embeddings of tokens, positions and segments,
    normalised; how many tokens the mask allows; that sum."""
    steps = Steps(graph, node)
    ids, segments, words, places, kinds, gamma, beta, mask, positions = (
        *node.inputs,
        *[""] * 9,
    )[:9]
    batch, length = steps.shape(ids, 2)
    at = positions or steps.range(length)
    total = steps("Add", steps("Gather", words, ids, axis=0), steps("Gather", places, at, axis=0))
    if segments and kinds:
        total = steps("Add", total, steps("Gather", kinds, segments, axis=0))
    epsilon = float(node.attrs.get("epsilon", 1e-12))
    y = graph.fresh(f"{node.name}.normal")
    norm = Node(
        "LayerNormalization",
        node.name,
        (total, gamma, beta),
        (y,),
        {"axis": -1, "epsilon": epsilon},
    )
    steps.add(norm)
    lengths = ""
    if steps.wants(1) and mask:
        one = steps.number(1, str(graph.dtype(mask)))
        allowed = steps("Cast", steps("Equal", mask, one), to=6)
        lengths = steps.reshape(reduced(steps, "ReduceSum", allowed, (1,)), batch)
    elif steps.wants(1):
        lengths = steps.expand(steps.constant(np.zeros(1, np.int32)), batch)
    return steps.done(y, lengths, total if steps.wants(2) else "")
