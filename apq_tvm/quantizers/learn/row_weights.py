"""How much a model's result depends on every row that its layers give."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from apq_tvm.progress import Progress
from apq_tvm.quantizers.inputs.statistics import rows_read, weigh_rows
from apq_tvm.quantizers.learn.learning_run import RowWeights
from apq_tvm.quantizers.learn.result_loss import mask_of, result_loss
from apq_tvm.quantizers.torch.graph import TorchGraph, half_products, plain_product
from apq_tvm.quantizers.torch.ops import Tensor
from apq_tvm.types import Array, Node


def row_weights(
    graph: TorchGraph,
    calls: Sequence[Mapping[str, Array]],
    layers: Collection[str],
    progress: Progress,
) -> RowWeights:
    """|dL/dy| of every row of the float model's layers (`apq_tvm.quantizers.inputs.statistics`).

    Parameters
    ----------
    graph : TorchGraph
    calls : sequence of mapping
    layers : collection of str
        Nodes that count.
    progress : Progress

    Returns
    -------
    sequence of mapping of str to float32 Tensor [rows]
    """
    found: list[dict[str, Tensor]] = []
    with progress.stage("weigh rows", len(calls)):
        for call in calls:
            progress.advance()
            mask = mask_of(graph.model, call)
            weights: dict[str, Tensor] = {}

            def product(
                node: Node,
                x: Tensor,
                w: Tensor,
                bias: Tensor | None,
                mask: Tensor | None = mask,
                weights: dict[str, Tensor] = weights,
            ) -> Tensor:
                y = plain_product(node, x, w, bias)
                if not y.requires_grad:
                    y.requires_grad_()
                if node.name in layers:
                    name = node.name
                    y.register_hook(
                        lambda g: weights.__setitem__(name, weigh_rows(rows_read(g, mask, name)))
                    )
                return y

            with half_products():
                loss = result_loss(graph, call, product)
            loss.backward()
            found.append(weights)
    return found
