"""What the inputs of every linear layer look like: E[x²], E[x], max |x|, E[x xᵀ] and Fisher.

Rows are weighed by how much the model's result depends on them, |dL/dy| of the layer's output y:
in language models nearly all attention rests on the first token, whose value must stay near zero,
while its activations in the residual stream are so large that their error does not matter. An
unweighed E[x xᵀ] has both the wrong way round: with it, error feedback in the value layers of
SmolLM2 at 3 bits makes perplexity 15 times worse, not better. |dL/dy|², as L's growth to second
order would have it, is not what counts either: its tail is so heavy that few of 65536 rows of text
matter (28 in SmolLM2's first key layer, by Kish's (Σr)² / Σr²), and codes are fit to those. Its
root leaves ten to four hundred times as many. L is the next-token loss; a model that is no language
model gets random projections of its outputs, whose gradients are on average the outputs'
derivatives. Padding tokens do not count.

Sums are kept, so that a run can stop after any call and go on later.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apq_tvm.errors import BadInput
from apq_tvm.progress import Progress, Silent
from apq_tvm.quantizers.torch_graph import Product, TorchGraph, plain_product
from apq_tvm.quantizers.torch_ops import F, Tensor, torch
from apq_tvm.types import Array, Calibration, ImportedModel, LayerStats, Node

MIN_ROWS = 64
"""Rows (tokens) below which statistics are refused: a mean over fewer says little of a layer."""

MASK_NAME = re.compile(r"(^|_|\.)attention_mask$|^mask$|(^|_)attn_mask$")
IDS_NAME = re.compile(r"(^|_|\.)input_ids$")

MEAN_SQUARE = "E[x^2] of the layer's input"
WEIGHED = "E[x^2] of the layer's input, rows weighed by |dL/dy|"
FISHER = "Fisher information of the next-token loss"


@dataclass
class Sums:
    """Running weighted sums over a layer's input rows, float64 except for the large `hessian`.

    Parameters
    ----------
    square, total : float64 [K]
    absmax : float32 [K]
    rows : int
    weight : float
        Sum of the rows' weights.
    hessian : float32 [K, K] or None
        Sum of x xᵀ.
    power : float
        Sum of the rows' |dL/dy|².
    """

    square: NDArray[np.float64]
    total: NDArray[np.float64]
    absmax: NDArray[np.float32]
    rows: int = 0
    weight: float = 0.0
    hessian: NDArray[np.float32] | None = None
    power: float = 0.0

    @staticmethod
    def zero(k: int, hessian: bool) -> Sums:
        """Nothing seen yet."""
        h = np.zeros((k, k), np.float32) if hessian else None
        return Sums(np.zeros(k), np.zeros(k), np.zeros(k, np.float32), hessian=h)

    def add(self, x: Tensor, weights: Tensor | None = None) -> None:
        """Count rows x float32 [rows, K], each with its weight float32 [rows] or 1.

        Layers whose rows are weighed count the squares of the weights as `power`.
        """
        if not len(x):
            return
        weighed = x if weights is None else x * weights[:, None]
        self.square += (weighed * x).sum(0, dtype=torch.float64).numpy()
        self.total += weighed.sum(0, dtype=torch.float64).numpy()
        np.maximum(self.absmax, x.abs().amax(0).numpy(), out=self.absmax)
        self.rows += len(x)
        self.weight += float(len(x) if weights is None else weights.double().sum())
        self.power += 0.0 if weights is None else float(weights.double().square().sum())
        if self.hessian is not None:
            torch.from_numpy(self.hessian).addmm_(weighed.T, x)

    def stats(self) -> LayerStats:
        """The weighted means."""
        weight = self.weight or 1.0  # a layer on which the result does not depend
        return LayerStats(
            mean_square=(self.square / weight).astype(np.float32),
            mean=(self.total / weight).astype(np.float32),
            absmax=self.absmax,
            samples=self.rows,
            hessian=None if self.hessian is None else self.hessian / np.float32(weight),
        )


@dataclass
class State:
    """How far a calibration is.

    Parameters
    ----------
    calls : int
        Calls counted.
    sums : dict of str to Sums
        By the node's name, or, without weights, by the value that layers read.
    fisher : dict of str to float32 [N, K]
        Sum over sequences of (dL/dw)^2, by node.
    """

    calls: int = 0
    sums: dict[str, Sums] = field(default_factory=dict)
    fisher: dict[str, NDArray[np.float32]] = field(default_factory=dict)


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
    mask_name = next((s.name for s in model.inputs if MASK_NAME.search(s.name)), None)
    state = state or State()
    progress = progress or Silent()
    with progress.stage("calibrate", len(calls)):
        for i, call in enumerate(calls):
            progress.advance()
            if i < state.calls:
                continue
            mask = call[mask_name] if mask_name else None
            if weigh or fisher:
                _count_gradients(graph, call, mask, state, hessian, weigh, fisher)
            if not weigh:
                _count_inputs(graph, call, mask, readers, state, hessian)
            state.calls = i + 1
            if checkpoint is not None:
                checkpoint(state)
    return state


def finish(model: ImportedModel, state: State) -> Calibration:
    """The statistics of every linear layer.

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
            if stats is None or stats.samples < MIN_ROWS:
                rows = 0 if stats is None else stats.samples
                raise BadInput(
                    f"too few samples: layer {node.name!r} saw {rows} rows of input (padding not "
                    f"counted), at least {MIN_ROWS} are needed; give more or longer inputs"
                )
            seen = state.fisher.get(node.name)
            mean = None if seen is None else seen / np.float32(max(state.calls, 1))
            importance = 0.0
            if node.name in means:
                outputs = len(model.weights[node.inputs[1]])
                importance = state.sums[node.name].power / (stats.samples * outputs)
            layers[node.name] = replace(stats, fisher=mean, importance=importance)
    sensitivity = WEIGHED if weighed else MEAN_SQUARE
    return Calibration(layers, model.sha256, FISHER if state.fisher else sensitivity)


def linear_readers(model: ImportedModel) -> dict[str, list[Node]]:
    """Linear layers by the value they read."""
    readers: dict[str, list[Node]] = {}
    for node in model.nodes:
        if node.op == "apq.Linear":
            readers.setdefault(node.inputs[0], []).append(node)
    return readers


def language_model(model: ImportedModel) -> tuple[str, str]:
    """Names of a causal language model's token ids and logits.

    Raises
    ------
    BadInput
        If it has no int input of ids [batch, sequence], or no one output [batch, sequence, V] that
        follows it.
    """
    ids = [s for s in model.inputs if IDS_NAME.search(s.name)] or [
        s for s in model.inputs if s.dtype.startswith("int") and len(s.shape) == 2
    ]
    if len(ids) == 1:
        logits = [
            s
            for s in model.outputs
            if s.dtype.startswith("float") and len(s.shape) == 3 and s.shape[:2] == ids[0].shape
        ]
        named = [s for s in logits if "logits" in s.name] or logits
        if len(named) == 1 and "logits" in named[0].name:
            return ids[0].name, named[0].name
    raise BadInput(
        f"{model.name} has no language-model loss: an input of ids [batch, sequence] and an output "
        "'logits' [batch, sequence, vocabulary] are needed; leave --fisher away"
    )


def mask_of(model: ImportedModel, call: Mapping[str, Array]) -> Tensor | None:
    """Which tokens of a call are no padding, bool [B, S]; None if the model has no mask."""
    name = next((s.name for s in model.inputs if MASK_NAME.search(s.name)), None)
    return None if name is None else torch.as_tensor(call[name]) != 0


def is_language_model(model: ImportedModel) -> bool:
    """Whether `language_model` finds a loss."""
    try:
        language_model(model)
    except BadInput:
        return False
    return True


def next_token_loss(logits: Tensor, ids: Tensor, mask: Tensor | None) -> Tensor:
    """Mean cross entropy of every next token; padding tokens are no targets.

    Parameters
    ----------
    logits : Tensor [B, S, V]
    ids : int Tensor [B, S]
    mask : Tensor [B, S] or None
        0 where a token is padding.

    Returns
    -------
    Tensor []
    """
    targets = ids[:, 1:].long()
    if mask is not None:
        targets = torch.where(mask[:, 1:] != 0, targets, -100)
    return F.cross_entropy(
        logits[:, :-1].reshape(-1, logits.shape[-1]), targets.reshape(-1), ignore_index=-100
    )


def rows_read(x: Tensor, mask: Any, name: str) -> Tensor:
    """x [..., K] as float32 [rows, K], without the rows of padding tokens.

    Raises
    ------
    BadInput
        If a value is NaN or infinite.
    """
    if mask is not None and x.ndim >= 3 and tuple(x.shape[:2]) == tuple(mask.shape):
        x = x[torch.as_tensor(mask != 0)]
    x = x.detach().reshape(-1, x.shape[-1]).float()
    if not bool(torch.isfinite(x).all()):
        raise BadInput(
            f"layer {name!r} reads NaN or infinity from the calibration inputs; the inputs or the "
            "model are broken"
        )
    return x


def weigh_rows(gradient: Tensor) -> Tensor:
    """Weights of rows, float32 [rows], by the gradients of what they become, [rows, N]."""
    return gradient.norm(dim=-1)


def _count_inputs(
    graph: TorchGraph,
    call: Mapping[str, Array],
    mask: Array | None,
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
    mask: Array | None,
    state: State,
    hessian: bool,
    weigh: bool,
    fisher: bool,
) -> None:
    """One call's sums weighed by |dL/dy|, and squared gradients per layer, also of shared weights.

    Rows are counted while the gradient passes, so that only one layer's is held.
    """
    leaves: dict[str, Tensor] = {}

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

            y.register_hook(count)
        return y

    loss = result_loss(graph, call, mask, product)
    if not fisher:
        loss.backward()
        return
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    for name, gradient in zip(leaves, gradients, strict=True):
        squared = gradient.square().numpy()
        if name in state.fisher:
            state.fisher[name] += squared
        else:
            state.fisher[name] = squared


def result_loss(
    graph: TorchGraph, call: Mapping[str, Array], mask: Array | Tensor | None, product: Product
) -> Tensor:
    """The next-token loss, or random projections of all float outputs where there is none.

    Parameters
    ----------
    graph : TorchGraph
    call : mapping of str to ndarray
    mask : [B, S] or None
        0 where a token is padding.
    product : callable
        See `TorchGraph.run_nodes`.

    Returns
    -------
    Tensor []

    Raises
    ------
    BadInput
        If no float output depends on a linear layer.
    """
    model = graph.model
    given = None if mask is None else torch.as_tensor(mask)
    if is_language_model(model):
        ids, logits = language_model(model)
        result = graph.run(call, keep=[logits], product=product)[logits]
        return next_token_loss(result, torch.as_tensor(call[ids]), given)
    names = [spec.name for spec in model.outputs if spec.dtype.startswith("float")]
    total = torch.zeros(())
    for value in graph.run(call, keep=names, product=product).values():
        noise = torch.randn(value.shape, generator=torch.Generator().manual_seed(0))
        if given is not None and value.ndim >= 3 and value.shape[:2] == given.shape:
            noise[given == 0] = 0
        size = value.detach().square().mean().sqrt().clamp_min(1e-30)
        total = total + (value * noise).sum() / (size * noise.count_nonzero())
    if not total.requires_grad:
        raise BadInput(f"no float output of {model.name} depends on a linear layer")
    return total
