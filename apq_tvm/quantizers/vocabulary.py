"""Language models: the head and the table of a vocabulary get 6 bits where fewer are asked for.

Their rounding is not averaged out by what comes after: the head's is in the logits themselves, the
table's in every layer. SmolLM2's own file of 4-bit blocks has its table, which is its head, in 8.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from apq_tvm.quantizers.exactly import exactly
from apq_tvm.types import WEIGHT_INPUT, ImportedModel, Node, QuantizedTensor, Scheme

if TYPE_CHECKING:
    from apq_tvm.quantizers.learn.learned import Learned

LEAST_BITS = 6
"""Of heads and tables, unless ``--tensor-type`` says otherwise."""

LEAST_ROWS = 256
"""A vocabulary has a row for every byte at least; smaller tables are of something else."""

NOTE = f"{LEAST_BITS} bits, as it is of a vocabulary (--tensor-type says otherwise)"
"""What is said of such a layer."""


def vocabulary_layers(model: ImportedModel) -> list[Node]:
    """Heads, linear layers with as many outputs as a table has rows, and those tables.

    Parameters
    ----------
    model : ImportedModel

    Returns
    -------
    list of Node
        Empty where there is no head: an encoder's table is like any other.
    """
    tables = [node for node in model.nodes if node.op == "apq.Embedding" and _rows(model, node)]
    sizes = {_rows(model, node) for node in tables}
    heads = [
        node for node in model.nodes if node.op == "apq.Linear" and _rows(model, node) in sizes
    ]
    sizes = {_rows(model, node) for node in heads}
    return [*heads, *(node for node in tables if _rows(model, node) in sizes)]


def vocabulary_types(
    model: ImportedModel,
    scheme: Scheme | None,
    learned: Mapping[str, QuantizedTensor] | None = None,
) -> dict[str, str]:
    """Rules that `quantize` is given before the user's own: layer → its scheme.

    Parameters
    ----------
    model : ImportedModel
    scheme : Scheme or None
        What every layer is asked for.
    learned : mapping of str to QuantizedTensor, optional
        Layers whose codes were learned; those keep their schemes.

    Returns
    -------
    dict of str to str
        Nothing where it has `LEAST_BITS` or leaves bits to be chosen at run time. Layers whose
        codes the file has keep them.
    """
    if scheme is None or scheme.bits >= LEAST_BITS or scheme.min_bits:
        return {}
    learned = learned or {}
    more = Scheme(LEAST_BITS, act_bits=scheme.act_bits, group_size=32)
    if scheme.family == "int":
        more = replace(scheme, bits=LEAST_BITS)
    return {
        exactly(node.name): str(more)
        for node in vocabulary_layers(model)
        if not {node.inputs[WEIGHT_INPUT[node.op]]} & (model.quantized.keys() | model.notes.keys())
        and "keep" not in node.attrs
        and (node.name not in learned or learned[node.name].scheme == more)
    }


def default_types(
    model: ImportedModel, scheme: Scheme | None, learned: Learned | None = None
) -> tuple[dict[str, str], dict[str, str]]:
    """Rules before the user's own: `vocabulary_types`, and the schemes of what was learned."""
    if learned is None:
        return vocabulary_types(model, scheme), {}
    return vocabulary_types(model, scheme, learned.tensors), learned.types(scheme)


def named(rules: Iterable[str], nodes: Iterable[Node]) -> list[str]:
    """Names of the layers that some of `vocabulary_types` are for."""
    own = set(rules)
    return [node.name for node in nodes if exactly(node.name) in own]


def _rows(model: ImportedModel, node: Node) -> int:
    """Rows of a node's weight, 0 where they are too few for a vocabulary."""
    rows = int(model.weights[node.inputs[WEIGHT_INPUT[node.op]]].shape[0])
    return rows if rows >= LEAST_ROWS else 0
