"""What the inputs of every linear layer look like: E[x²], E[x], max |x|, E[x xᵀ] and Fisher.

Rows are weighed by how much the model's result depends on them, |dL/dy| of the layer's output y: in
language models nearly all attention rests on the first token, whose value must stay near zero,
while its activations in the residual stream are so large that their error does not matter. An
unweighed E[x xᵀ] has both the wrong way round: with it, error feedback in the value layers of
SmolLM2 at 3 bits makes perplexity 15 times worse, not better. |dL/dy|², as L's growth to second
order would have it, is not what counts either: its tail is so heavy that few of 65536 rows of text
matter (28 in SmolLM2's first key layer, by Kish's (Σr)² / Σr²), and codes are fit to those. Its
root leaves ten to four hundred times as many. L is `apq_tvm.quantizers.learn.result_loss`. Padding
tokens do not count.

How much a whole layer matters (`LayerStats.importance`) is another question: what is off by δ pulls
the result by <dL/dW, δ>, summed over the tokens of a sample before it is squared. Where a result is
a mean over tokens, their errors add up: those of MiniLM-L6's last layers weigh 5 to 20 times what a
sum of squares over tokens says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from apq_tvm.errors import BadInput
from apq_tvm.progress import Progress, Silent
from apq_tvm.quantizers.inputs.row_sums import PULLS, State, Sums
from apq_tvm.quantizers.learn.result_loss import language_model, mask_of, result_loss
from apq_tvm.quantizers.torch.graph import TorchGraph, plain_lookup, plain_product
from apq_tvm.quantizers.torch.ops import Tensor, torch
from apq_tvm.types import Array, Calibration, ImportedModel, LayerStats, Node

MIN_ROWS = 64
"""Rows (tokens) below which statistics are refused: a mean over fewer says little of a layer."""

DAMPING, TINY = 0.01, 1e-30
"""Of H where it is inverted, as error feedback does: a share of its mean diagonal."""

MEAN_SQUARE = "E[x^2] of the layer's input"
WEIGHED = "E[x^2] of the layer's input, rows weighed by |dL/dy|"
FISHER = "Fisher information of the next-token loss"


def collect(
    model: ImportedModel,
    calls: Sequence[Mapping[str, Array]],
    *,
    hessian: bool = True,
    fisher: bool = False,
    weigh: bool = True,
    state: State | None = None,
    checkpoint: Callable[[State], None] | None = None,
    progress: Progress | None = None,
) -> State:
    """Run the model on calibration inputs and sum up what its linear layers read.

    Parameters
    ----------
    model : ImportedModel
    calls : sequence of mapping
        Checked inputs, one mapping of arrays by name per call of the model.
    hessian : bool
        Sum x xᵀ too: 4 K² bytes per layer.
    fisher : bool
        Sum the squared gradients of the next-token loss too: 4 N K bytes per layer.
    weigh : bool
        Weigh rows by |dL/dy|, which takes a gradient per call; without it layers that read one
        value share its sums.
    state : State, optional
        Where an interrupted run stood; its calls are not run again.
    checkpoint : callable, optional
        Called with the state after every call.
    progress : Progress, optional

    Returns
    -------
    State

    Raises
    ------
    BadInput
        If a layer reads NaN or infinity, or `fisher` is asked of a model without a language-model
        loss.
    UnsupportedModel
        If the model has operators that do not run in torch.
    """
    graph = TorchGraph(model)
    readers = linear_readers(model)
    if not readers:
        raise BadInput(f"{model.name} has no linear layers: there is nothing to calibrate")
    if fisher:
        language_model(model)
    state = state or State()
    progress = progress or Silent()
    with progress.stage("calibrate", len(calls)):
        for i, call in enumerate(calls):
            progress.advance()
            if i < state.calls:
                continue
            mask = mask_of(model, call)
            if weigh or fisher:
                _count_gradients(graph, call, mask, state, hessian, weigh, fisher)
            if not weigh:
                _count_inputs(graph, call, mask, readers, state, hessian)
            state.calls = i + 1
            if checkpoint is not None:
                checkpoint(state)
    return state


def finish(model: ImportedModel, state: State) -> Calibration:
    """The statistics of every linear layer and table, but for layers that no sample reached (in the
    other branch of an ``If``).

    Raises
    ------
    BadInput
        If fewer than `MIN_ROWS` rows were seen.
    """
    layers = {}
    means = {name: sums.stats() for name, sums in state.sums.items()}
    weighed = False
    for name, nodes in linear_readers(model).items():
        for node in nodes:
            stats = means.get(node.name) or means.get(name)
            weighed = weighed or node.name in means
            if stats is None:
                continue
            if stats.samples < MIN_ROWS:
                raise BadInput(
                    f"too few samples: layer {node.name!r} saw {stats.samples} rows of input "
                    f"(padding not counted), at least {MIN_ROWS} are needed; give more or longer "
                    "inputs"
                )
            seen = state.fisher.get(node.name)
            mean = None if seen is None else seen / np.float32(max(state.calls, 1))
            importance = 0.0
            if node.name in means:
                outputs = len(model.weights[node.inputs[1]])
                importance = _importance(state.pulls[node.name], stats) / outputs
            layers[node.name] = replace(stats, fisher=mean, importance=importance)
    if not layers:
        raise BadInput(f"no sample reaches a linear layer of {model.name}; give other inputs")
    sensitivity = WEIGHED if weighed else MEAN_SQUARE
    return Calibration(
        layers, model.sha256, FISHER if state.fisher else sensitivity, _tables(model, state, layers)
    )


def _importance(pulls: Array, stats: LayerStats) -> float:
    """E<dL/dW, δ>² of a token, of rows δ for whom E|x δᵀ|² is 1, the same in all directions of x:
    as error feedback leaves them."""
    k, square = pulls.shape[1], stats.mean_square
    if stats.hessian is None:
        told = np.square(pulls) / np.maximum(square, TINY)
    else:
        damped = stats.hessian + np.diag(np.full(k, DAMPING * square.mean() + TINY, np.float32))
        told = pulls * np.linalg.solve(damped, pulls.T).T
    total: float = told.sum(dtype=np.float64) / (k * stats.samples)
    return float(total)


def _tables(
    model: ImportedModel, state: State, layers: Mapping[str, LayerStats]
) -> dict[str, float]:
    """Importance of embedding tables, per token as that of layers: positions are looked up once for
    a whole batch, whose gradients they get together."""
    tokens = max(stats.samples for stats in layers.values())
    widths = {n.name: model.weights[n.inputs[0]].shape[1] for n in model.nodes
              if n.op == "apq.Embedding"}  # fmt: skip
    return {name: power / (tokens * widths[name]) for name, power in state.tables.items()}


def linear_readers(model: ImportedModel) -> dict[str, list[Node]]:
    """Linear layers by the value they read."""
    readers: dict[str, list[Node]] = {}
    for node in model.nodes:
        if node.op == "apq.Linear":
            readers.setdefault(node.inputs[0], []).append(node)
    return readers


def rows_read(x: Tensor, mask: Tensor | None, name: str) -> Tensor:
    """x [..., K] as float32 [rows, K], without the rows of padding tokens.

    Raises
    ------
    BadInput
        If a value is NaN or infinite.
    """
    if mask is not None and x.ndim >= 3 and tuple(x.shape[:2]) == tuple(mask.shape):
        x = x[mask]
    x = x.detach().reshape(-1, x.shape[-1]).float()
    if not bool(torch.isfinite(x).all()):
        raise BadInput(
            f"layer {name!r} reads NaN or infinity from the calibration inputs; the inputs or the "
            "model are broken"
        )
    return x


def by_sample(x: Tensor, mask: Tensor | None) -> Tensor:
    """float32 [samples, rows, width], of padding tokens 0; a matrix has a row of each sample."""
    if mask is not None and x.ndim >= 3 and tuple(x.shape[:2]) == tuple(mask.shape):
        x = x * mask.reshape(*mask.shape, *[1] * (x.ndim - 2))
    return x.detach().reshape(len(x), -1 if x.ndim > 2 else 1, x.shape[-1]).float()


def weigh_rows(gradient: Tensor) -> Tensor:
    """Weights of rows, float32 [rows], by the gradients of what they become, [rows, N]."""
    return gradient.norm(dim=-1)


def _count_inputs(
    graph: TorchGraph,
    call: Mapping[str, Array],
    mask: Tensor | None,
    readers: Mapping[str, list[Node]],
    state: State,
    hessian: bool,
) -> None:
    seen: set[str] = set()

    def product(node: Node, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        value = node.inputs[0]
        if value not in seen:
            seen.add(value)
            sums = state.sums.setdefault(value, Sums.zero(x.shape[-1], hessian))
            sums.add(rows_read(x, mask, readers[value][0].name))
        return plain_product(node, x, w, bias)

    with torch.no_grad():
        graph.run(call, product=product)


def _count_gradients(
    graph: TorchGraph,
    call: Mapping[str, Array],
    mask: Tensor | None,
    state: State,
    hessian: bool,
    weigh: bool,
    fisher: bool,
) -> None:
    """One call's sums weighed by |dL/dy|, and squared gradients per layer, also of shared weights.

    Rows are counted while the gradient passes, so that only one layer's is held.
    """
    leaves: dict[str, Tensor] = {}
    found: dict[str, Tensor] = {}
    chance = torch.Generator().manual_seed(state.calls)

    def pull(name: str, x: Tensor, gradient: Tensor) -> None:
        x, g = by_sample(x, mask), by_sample(gradient, mask)
        signs = torch.randint(0, 2, (len(g), g.shape[-1]), generator=chance) * 2.0 - 1.0
        rows = torch.einsum("bs,bsk->bk", torch.einsum("bsn,bn->bs", g, signs), x)
        places = (torch.arange(len(x)) + state.calls * len(x)) % PULLS
        sums = state.pulls.setdefault(name, np.zeros((PULLS, x.shape[-1]), np.float32))
        torch.from_numpy(sums).index_add_(0, places, rows)

    def lookup(node: Node, table: Tensor, ids: Tensor) -> Tensor:
        found[node.name] = plain_lookup(node, table, ids).requires_grad_()
        return found[node.name]

    def product(node: Node, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        if fisher:
            w = leaves[node.name] = w.detach().requires_grad_()
        y = plain_product(node, x, w, bias)
        if not y.requires_grad:
            y.requires_grad_()
        if weigh:
            rows = rows_read(x, mask, node.name)

            def count(gradient: Tensor) -> None:
                sums = state.sums.setdefault(node.name, Sums.zero(x.shape[-1], hessian))
                sums.add(rows, weigh_rows(rows_read(gradient, mask, node.name)))
                pull(node.name, x, gradient)

            y.register_hook(count)
        return y

    loss = result_loss(graph, call, product, lookup if weigh else None)
    loss.backward()
    for name, y in found.items():
        power = 0.0  # of a table that the result does not depend on
        if y.grad is not None:
            power = float(rows_read(y.grad, mask, name).double().square().sum())
        state.tables[name] = state.tables.get(name, 0.0) + power
    for name, w in leaves.items():
        squared = (torch.zeros_like(w) if w.grad is None else w.grad.square()).numpy()
        if name in state.fisher:
            state.fisher[name] += squared
        else:
            state.fisher[name] = squared
