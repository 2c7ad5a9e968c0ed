"""The normalised graph in torch, operator by operator, so that it has gradients and can be watched.

It is the one source of layer inputs, of H and Fisher information, and of block-wise optimization.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from apq_tvm.errors import BadInput, UnsupportedModel
from apq_tvm.onnx_import.control.execute import Runner, execute
from apq_tvm.onnx_import.symbolic.regions import MARKERS
from apq_tvm.quantizers.torch.ops import ACTIVATIONS, OPS, F, Tensor, resolve, torch
from apq_tvm.types import Array, ImportedModel, Node

Values = dict[str, Tensor]

Product = Callable[[Node, Tensor, Tensor, Tensor | None], Tensor]
"""``(node, x, w, bias) -> x · wᵀ + bias``: takes the place of a linear layer's product. Activation
and residual follow as ever."""

Lookup = Callable[[Node, Tensor, Tensor], Tensor]
"""``(node, table, ids) -> rows``: takes the place of an embedding's lookup."""


class TorchGraph:
    """A model that runs in torch.

    Parameters
    ----------
    model : ImportedModel

    Raises
    ------
    UnsupportedModel
        Naming every operator that has no torch meaning here, and its nodes.
    """

    def __init__(self, model: ImportedModel) -> None:
        missing: dict[str, list[str]] = defaultdict(list)
        for node in model.nodes:
            if node.op not in OPS and node.op != "apq.Linear" and node.op not in MARKERS:
                missing[node.op].append(repr(node.name))
            elif node.op == "Softmax" and model.opset < 13:
                missing["Softmax of an opset below 13"].append(repr(node.name))
        if missing:
            listed = "; ".join(f"{op}: {', '.join(names)}" for op, names in sorted(missing.items()))
            raise UnsupportedModel(
                "calibrate, eval --scheme and report run the model in torch, which does not know "
                f"{listed} here; compile without calibration, and eval the module"
            )
        self.model = model
        self.weights: Values = {name: as_tensor(w) for name, w in model.weights.items()}

    def begin(self, feeds: Mapping[str, Array]) -> tuple[Values, dict[str, int]]:
        """The values a run starts with, and the sizes of symbolic dimensions.

        Raises
        ------
        BadInput
            An input is missing.
        """
        values: Values = {}
        symbols: dict[str, int] = {}
        for spec in self.model.inputs:
            if spec.name not in feeds:
                raise BadInput(f"input {spec.name!r} is missing")
            values[spec.name] = as_tensor(feeds[spec.name])
            for dim, size in zip(spec.shape, feeds[spec.name].shape, strict=True):
                if isinstance(dim, str):
                    symbols[dim] = size
        return values, symbols

    def run_nodes(
        self,
        nodes: Sequence[Node],
        values: Mapping[str, Tensor],
        symbols: Mapping[str, int],
        keep: Collection[str],
        product: Product | None = None,
        weights: Mapping[str, Tensor] | None = None,
        lookup: Lookup | None = None,
    ) -> Values:
        """Run some nodes, in order.

        Parameters
        ----------
        nodes : sequence of Node
        values : mapping of str to Tensor
            At least what the nodes read and none of them makes; not changed.
        symbols : mapping of str to int
        keep : collection of str
            Values to return; others are dropped after their last reader, so that memory stays low.
        product : callable, optional
            Takes the place of linear layers' products.
        weights : mapping of str to Tensor, optional
            Take the place of the model's, by name.
        lookup : callable, optional
            Takes the place of embeddings' lookups.

        Returns
        -------
        dict of str to Tensor
            What `keep` names and is there.
        """
        last = {name: i for i, node in enumerate(nodes) for name in node.inputs}
        live = dict(values)
        kept = frozenset(keep)
        replaced = weights or {}

        def read(name: str) -> Tensor:
            if not name:
                return None
            if name in replaced:
                return replaced[name]
            return live[name] if name in live else self.weights[name]

        def run(i: int, node: Node) -> None:
            given = [read(name) for name in node.inputs]
            if lookup is not None and node.op == "apq.Embedding":
                results: Sequence[Tensor] = (lookup(node, given[0], given[1]),)
            else:
                results = _run(node, given, symbols, product or plain_product)
            for name, result in zip(node.outputs, results, strict=False):
                if name:
                    live[name] = result
            for name in {*node.inputs, *node.outputs}:
                if name not in kept and last.get(name, i) == i:
                    live.pop(name, None)

        runner = Runner(run, read, live.__setitem__, torch.tensor, torch.stack)
        execute(nodes, runner, symbols)
        return {name: live[name] for name in kept if name in live}

    def run(
        self,
        feeds: Mapping[str, Array],
        keep: Collection[str] | None = None,
        product: Product | None = None,
        lookup: Lookup | None = None,
    ) -> Values:
        """Run the whole model.

        Parameters
        ----------
        feeds : mapping of str to ndarray
        keep : collection of str, optional
            Values to return; the model's outputs by default.
        product, lookup : callable, optional
            See `run_nodes`.

        Returns
        -------
        dict of str to Tensor
        """
        values, symbols = self.begin(feeds)
        wanted = [spec.name for spec in self.model.outputs] if keep is None else keep
        nodes = self.model.nodes
        return self.run_nodes(nodes, values, symbols, wanted, product, lookup=lookup)


def plain_product(node: Node, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    """What a linear layer does."""
    return F.linear(x, w, bias)


def plain_lookup(node: Node, table: Tensor, ids: Tensor) -> Tensor:
    """What an embedding does."""
    rows: Tensor = OPS[node.op](node.attrs, table, ids)
    return rows


def half_products() -> AbstractContextManager[Any]:
    """Products in bfloat16 where the processor has them, 4 times as fast as in float32.

    For training, not for measuring: the error, 2^-9, is below that of int8 activations.
    """
    if not torch.cpu.get_capabilities().get("avx512_bf16", False):
        return nullcontext()
    half: AbstractContextManager[Any] = torch.autocast("cpu", dtype=torch.bfloat16)
    return half


def as_tensor(array: Array) -> Tensor:
    """A numpy array as tensor, without a copy where torch can write to it."""
    array = np.ascontiguousarray(array) if array.ndim else np.array(array)
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def _run(
    node: Node, given: list[Tensor], symbols: Mapping[str, int], product: Product
) -> Sequence[Tensor]:
    if node.op == "apq.Linear":
        x, w, bias, residual = (*given, None, None)[:4]
        activation, y = ACTIVATIONS[node.attrs["activation"]], product(node, x, w, bias)
        if node.attrs.get("after"):
            return (activation(y + residual),)
        y = activation(y)
        return (y if residual is None else y + residual,)
    attrs = resolve(node.attrs, symbols)
    if node.op == "Split":
        attrs["outputs"] = len(node.outputs)
    result = OPS[node.op](attrs, *given)
    return result if isinstance(result, tuple) else (result,)
