"""Where a model falls apart into blocks: at the residual Adds through which everything later goes.

A transformer's block is an attention part and a feed-forward part; attention maps are outputs of
Softmax. What later blocks read besides the residual stream (masks, rotary tables) must not depend
on any layer that is quantized.
"""

from __future__ import annotations

from dataclasses import dataclass

from apq_tvm.errors import UnsupportedModel
from apq_tvm.onnx_import.symbolic.regions import STARTS
from apq_tvm.types import ImportedModel, Node

ATTENTION = ("apq.Softmax", "Softmax")
MOVES = ("Reshape", "apq.Reshape", "Transpose", "Squeeze", "Unsqueeze", "Identity")


@dataclass(frozen=True)
class Block:
    """Consecutive nodes of the graph.

    Parameters
    ----------
    nodes : tuple of Node
        In topological order.
    output : str
        The residual stream after it, or the value the last block leaves.
    live : frozenset of str
        Values that it makes, or that are older, and later nodes or the model's outputs read.
    layers : tuple of str
        Names of its linear layers.
    attention : tuple of str
        Its attention maps, values.
    down : str
        Name of the last linear layer before the Add, ``""`` if there is none.
    """

    nodes: tuple[Node, ...]
    output: str
    live: frozenset[str]
    layers: tuple[str, ...]
    attention: tuple[str, ...]
    down: str


def find_blocks(model: ImportedModel) -> tuple[Block, ...]:
    """Cut a model into blocks.

    Parameters
    ----------
    model : ImportedModel

    Returns
    -------
    tuple of Block
        In order; together they hold every node once. What follows the last residual Add (a head) is
        not among them. A model without residual Adds is one block up to its first float output.
    """
    nodes = model.nodes
    regions = [node.name for node in nodes if node.op in STARTS]
    if regions:
        raise UnsupportedModel(
            f"block-wise learning cuts a model at its residual sums, not inside of loops and "
            f"branches: {', '.join(map(repr, regions))}; calibrate without it"
        )
    past, maker = _ancestors(model)
    cuts = [out for out in _residuals(model, past, maker) if _is_cut(model, out, past, maker)]
    if not cuts:
        float_outputs = [s.name for s in model.outputs if s.dtype.startswith("float")]
        cuts = [name for name in float_outputs if name in maker][:1]
    parts: list[tuple[list[int], str]] = []
    done = 0
    for out in cuts:
        mask = past[maker[out]] & ~done
        done |= mask
        members = [i for i in range(len(nodes)) if mask >> i & 1]
        attends = any(nodes[i].op in ATTENTION for i in members)
        if parts and not attends and any(nodes[i].op in ATTENTION for i in parts[-1][0]):
            parts[-1] = (sorted(parts[-1][0] + members), out)
        else:
            parts.append((members, out))
    return tuple(_block(model, parts, at) for at in range(len(parts)))


def _ancestors(model: ImportedModel) -> tuple[list[int], dict[str, int]]:
    """Per node a bit mask of the nodes it depends on, itself included; who makes each value."""
    maker = {out: i for i, node in enumerate(model.nodes) for out in node.outputs if out}
    past: list[int] = []
    for i, node in enumerate(model.nodes):
        mask = 1 << i
        for value in node.inputs:
            if value in maker:
                mask |= past[maker[value]]
        past.append(mask)
    return past, maker


def _residuals(model: ImportedModel, past: list[int], maker: dict[str, int]) -> list[str]:
    """Sums of a value and something computed from it, in order."""

    def feeds(a: str, b: str) -> bool:
        """Whether b is computed from a, a node's output or the model's input."""
        if b not in maker:
            return False
        if a in maker:
            return a != b and bool(past[maker[b]] >> maker[a] & 1)
        return any(a in model.nodes[i].inputs for i in range(len(past)) if past[maker[b]] >> i & 1)

    found = []
    for node in model.nodes:
        if node.op == "apq.Linear":
            residual = node.inputs[3] if len(node.inputs) > 3 else ""
            if residual and (feeds(residual, node.inputs[0]) or residual == node.inputs[0]):
                found.append(node.outputs[0])
        elif node.op == "Add" and not any(v in model.weights for v in node.inputs):
            a, b = node.inputs
            if feeds(a, b) or feeds(b, a):
                found.append(node.outputs[0])
    return found


def _is_cut(model: ImportedModel, out: str, past: list[int], maker: dict[str, int]) -> bool:
    """Whether later nodes read nothing else of what came before, save masks and tables."""
    before = past[maker[out]]
    layers = sum(
        1 << i for i, n in enumerate(model.nodes) if n.op in ("apq.Linear", "apq.Embedding")
    )
    if not before & layers:
        return False
    for i, node in enumerate(model.nodes):
        if before >> i & 1:
            continue
        for value in node.inputs:
            if value == out or value not in maker or not before >> maker[value] & 1:
                continue
            if past[maker[value]] & layers:
                return False
    return True


def _block(model: ImportedModel, parts: list[tuple[list[int], str]], at: int) -> Block:
    members, out = parts[at]
    nodes = tuple(model.nodes[i] for i in members)
    done = {i for part, _ in parts[: at + 1] for i in part}
    later = {v for i, n in enumerate(model.nodes) if i not in done for v in n.inputs if v}
    later |= {spec.name for spec in model.outputs} | {out}
    made = {v for i in done for v in model.nodes[i].outputs} | {s.name for s in model.inputs}
    linear = [node for node in nodes if node.op == "apq.Linear"]
    return Block(
        nodes,
        out,
        frozenset(later & made),
        tuple(node.name for node in linear),
        tuple(node.outputs[0] for node in nodes if node.op in ATTENTION),
        _down(nodes, out),
    )


def _down(nodes: tuple[Node, ...], out: str) -> str:
    """The linear layer whose product is added to the stream at `out`."""
    maker = {v: node for node in nodes for v in node.outputs}
    node = maker.get(out)
    if node is None or node.op == "apq.Linear":
        return node.name if node else ""
    for value in node.inputs:
        source = maker.get(value)
        while source is not None and source.op in MOVES:
            source = maker.get(source.inputs[0])
        if source is not None and source.op == "apq.Linear":
            return source.name
    return ""
