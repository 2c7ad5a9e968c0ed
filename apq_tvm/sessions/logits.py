"""A session computes the logits that are asked for: the last tokens' rows go to the head."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from apq_tvm.errors import NotApplicable
from apq_tvm.sessions.caches import Pair
from apq_tvm.types import ASKED, ImportedModel, Node, TensorSpec

ROWWISE = ("Cast", "Div", "Mul", "Tanh", "apq.Activation")
"""What may stand between the head and its output: scales, a softcap."""


def only_asked(
    model: ImportedModel, pairs: Sequence[Pair], nodes: list[Node], length: str
) -> tuple[str, list[Node], dict[str, TensorSpec]]:
    """Let the head see the last `ASKED` rows of ``[batch, sequence, width]``.

    Returns
    -------
    str
        The output that holds logits.
    list of Node
    dict of str to TensorSpec
        Of values, as they are then.

    Raises
    ------
    NotApplicable
        There is more than one output beside the caches, or it is not made by a linear layer.
    """
    presents = {pair.present for pair in pairs}
    others = [spec for spec in model.outputs if spec.name not in presents]
    if len(others) != 1:
        names = ", ".join(spec.name for spec in others) or "none"
        raise NotApplicable(f"outputs beside the caches are {names}; wanted one, the logits")
    makers = {name: node for node in nodes for name in node.outputs}
    uses = Counter(name for node in nodes for name in node.inputs)
    value, behind = others[0].name, []
    node = makers.get(value)
    while node is not None and node.op in ROWWISE:
        behind.append(value)
        free = [name for name in node.inputs if name in makers]
        node = makers[free[0]] if len(free) == 1 and uses[free[0]] == 1 else None
        value = node.outputs[0] if node is not None else ""
    spec = model.value_specs.get(node.inputs[0]) if node is not None else None
    if node is None or node.op != "apq.Linear" or any(node.inputs[3:]) or spec is None:
        raise NotApplicable(f"'{others[0].name}' is not made by a linear layer alone")
    if len(spec.shape) != 3 or spec.shape[1] != length:
        raise NotApplicable(f"'{others[0].name}' is not made of one row per token")
    rows = f"{node.inputs[0]}.asked"
    shape = (spec.shape[0], ASKED, spec.shape[2])
    attrs = {"axes": (1,), "starts": (f"{length} - {ASKED}",), "steps": (1,), "shape": shape}
    last = Node("apq.Slice", f"{node.name}.asked", (node.inputs[0],), (rows,), attrs)
    head = replace(node, inputs=(rows, *node.inputs[1:]))
    at = nodes.index(node)
    specs = {name: one for name, one in model.value_specs.items() if name not in behind}
    specs |= {rows: TensorSpec(rows, spec.dtype, shape)}
    for name in (*behind, *node.outputs):
        if name in model.value_specs:
            one = model.value_specs[name]
            specs[name] = replace(one, shape=(one.shape[0], ASKED, *one.shape[2:]))
    return others[0].name, [*nodes[:at], last, head, *nodes[at + 1 :]], specs
