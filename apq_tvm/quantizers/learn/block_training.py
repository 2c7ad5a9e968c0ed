"""One block while it is learned: its layers' parameters, the loss, and the steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from apq_tvm.quantizers.inputs.folds import Fold
from apq_tvm.quantizers.learn.blocks import Block
from apq_tvm.quantizers.learn.distill import schedule
from apq_tvm.quantizers.learn.learned import Learned
from apq_tvm.quantizers.learn.learning_run import Fed, Run, Streams, tables_of
from apq_tvm.quantizers.learn.losses import akl_loss, dlc_loss, length_loss
from apq_tvm.quantizers.learn.result_loss import tokens_of
from apq_tvm.quantizers.torch.decode import Decoder
from apq_tvm.quantizers.torch.graph import Product, TorchGraph, Values, as_tensor, half_products
from apq_tvm.quantizers.torch.moving import MovingCodes
from apq_tvm.quantizers.torch.ops import F, Tensor, torch
from apq_tvm.quantizers.torch.round import LearnedRounding, fake_activations
from apq_tvm.types import Array, Node, Scheme

BALANCE_RATE = 5e-3
CLIP_RATE = 1e-2
"""Learning rates of balance vectors, and of clipping and compensation (section 4.1)."""

FINE_RATE = 2e-3
"""Of float arrays and biases, relative to their mean size; it falls as that of ``distill``."""


CROSSED = 1.0
"""Distances of two codes that a weight could cross if all steps went one way. On the first block of
MiniLM-L3 (W2A8g64, 112 x 64 tokens, 8 epochs, scales at twice `FINE_RATE`) 1 lowers the loss on
data kept apart from .124 to .110, 0.2 to .116, 8 not at all; scales alone do not either."""

Rounding = LearnedRounding | MovingCodes | Decoder

Balance = Mapping[str, tuple[Fold, Tensor]]


@dataclass
class LearnedLayer:
    """One layer while its block is learned."""

    node: Node
    scheme: Scheme
    weight: Tensor
    bias: Tensor | None
    rounding: Rounding
    columns: list[tuple[Fold, Tensor]] = field(default_factory=list)
    rows: list[Tensor] = field(default_factory=list)
    divides: list[tuple[Fold, Tensor]] = field(default_factory=list)
    outer: tuple[Tensor, Tensor] | None = None
    shift: Tensor | None = None

    def full(self) -> Tensor:
        """The float weight with balance and compensation folded in."""
        w = self.weight
        if self.outer is not None:
            unit = self.weight.abs().mean()  # so that one learning rate suits all layers
            w = w + unit * self.outer[0][:, None] * self.outer[1][None, :]
        for fold, log in self.columns:
            w = w * log.exp()[torch.from_numpy(fold.channels)]
        for log in self.rows:
            w = w / log.exp()[:, None]
        return w

    def weight_at(self, bits: int) -> Tensor:
        """The weight as it is quantized now, at a width where there are several."""
        if isinstance(self.rounding, LearnedRounding):
            return self.rounding.weight(self.full())
        return self.rounding.weight(bits)

    def biased(self) -> Tensor | None:
        """The bias as learned, balance folded in."""
        bias = self.bias
        if bias is None:
            return None
        if self.shift is not None:
            bias = bias + self.shift * bias.detach().abs().mean().clamp_min(1e-3)
        for log in self.rows:
            bias = bias / log.exp()
        return bias


def layers_of(
    run: Run, block: Block, fed: Fed, balance: Balance | None = None, compensated: bool = False
) -> dict[str, LearnedLayer]:
    """The block's quantized layers, ready to be learned.

    Parameters
    ----------
    run : Run
    block : Block
    fed : Fed
        Layers with codes of today.
    balance : dict of str to (Fold, Tensor), optional
        Balance vectors of ``abq``, their logarithms, by the value that they divide.
    compensated : bool
        The block's last layer learns a compensation.
    """
    layers: dict[str, LearnedLayer] = {}
    start = {node.name: node for node in run.quantized.model.nodes}
    for node in block.nodes:
        key = run.quantized.layers.get(node.name)
        if node.op != "apq.Linear" or key is None:
            continue
        tensor = fed.tensors.get(node.name, run.quantized.tensors[key])
        weight = as_tensor(np.asarray(run.model.weights[node.inputs[1]], np.float32))
        named = start[node.name].inputs
        bias = run.quantized.model.weights[named[2]] if len(named) > 2 and named[2] else None
        bias = fed.biases.get(node.name, bias)
        rounding: Rounding
        if run.kind == "abq":
            rounding = LearnedRounding(tensor, _balanced(weight, node, balance), node.name)
        elif run.kind == "train":
            rounding = MovingCodes(tensor, weight, node.name)
        else:
            rounding = Decoder(tensor, node.name)
        layer = LearnedLayer(
            node, tensor.scheme, weight, None if bias is None else as_tensor(bias), rounding
        )
        if layer.bias is not None:
            layer.shift = torch.zeros(len(layer.bias), requires_grad=True)
        if compensated and node.name == block.down:
            ones, zeros = torch.ones(len(weight)), torch.zeros(weight.shape[1])
            layer.outer = (ones.requires_grad_(), zeros.requires_grad_())
        layers[node.name] = layer
    for fold, log in (balance or {}).values():
        for name in fold.readers:
            layers[name].columns.append((fold, log))
            if fold.source in layers:
                continue
            layers[name].divides.append((fold, log))
        if fold.source in layers:
            layers[fold.source].rows.append(log)
    return layers


def _balanced(weight: Tensor, node: Node, balance: Balance | None) -> Tensor:
    """The weight with its input's balance vector multiplied in."""
    if not balance or node.inputs[0] not in balance:
        return weight
    fold, log = balance[node.inputs[0]]
    return weight * log.detach().exp()[torch.from_numpy(fold.channels)]


def _product(layers: Mapping[str, LearnedLayer], bits: int) -> Product:
    """Linear layers as they are quantized now; weights are decoded once per step."""

    def product(node: Node, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        layer = layers.get(node.name)
        if layer is None:
            return F.linear(x, w, bias)
        for fold, log in layer.divides:
            x = x / log.exp()[torch.from_numpy(fold.channels)]
        x = fake_activations(x, layer.scheme)
        return F.linear(x, layer.weight_at(bits), layer.biased())

    return product


@dataclass(frozen=True)
class Lesson:
    """A block that is learned, and from what.

    Parameters
    ----------
    graph : TorchGraph
    block : Block
    layers : mapping of str to LearnedLayer
    streams : Streams
    targets : sequence of (dict, Tensor)
        Per call what the float block gives.
    tables : dict
        Quantized embeddings.
    folded : mapping of (str, int) to ndarray
        Float weights of the graph that are not the model's: node and input index.
    """

    graph: TorchGraph
    block: Block
    layers: Mapping[str, LearnedLayer]
    streams: Streams
    targets: Sequence[tuple[Values, Tensor]]
    tables: Values
    folded: Mapping[tuple[str, int], Array] = field(default_factory=dict)

    def judge(self, calls: Sequence[int]) -> float:
        """Mean loss over calls, as the block is quantized now."""
        with torch.no_grad():
            return sum(float(self.loss(call)) for call in calls) / len(calls)

    def loss(self, call: int) -> Tensor:
        """On one call: DLC + AKL (ABQ-LLM, eq. (5)) and the error of length, without padding."""
        block, streams = self.block, self.streams
        full, mixed = self.targets[call]
        mask = streams.masks[call]
        with half_products():
            got = self.graph.run_nodes(
                block.nodes,
                streams.quantized[call],
                streams.symbols[call],
                {block.output, *block.attention},
                _product(self.layers, streams.widths[call]),
                tables_of(block, self.tables),
            )
        values = (got[block.output].float(), full[block.output], mixed)
        out, target, fed = (_tokens(x, mask) for x in values)
        maps = [
            [_tokens(side[name].float(), mask) for name in block.attention] for side in (got, full)
        ]
        return dlc_loss(out, target, fed) + akl_loss(*maps) + length_loss(out, target)


def train(lesson: Lesson, epochs: int) -> None:
    """Optimize one block; the parameters with the least loss over an epoch stay."""
    targets = lesson.targets
    groups = parameter_groups(lesson.layers)
    flat = [p for group in groups for p in group["params"]]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.0)
    best, kept = float("inf"), [p.detach().clone() for p in flat]
    step, steps = 0, len(targets) * epochs
    for epoch in range(epochs + 1):
        total, before = 0.0, [p.detach().clone() for p in flat]
        for call in torch.randperm(len(targets)).tolist():
            with torch.set_grad_enabled(epoch < epochs):
                loss = lesson.loss(call)
            total += float(loss.detach())
            if epoch < epochs:
                for group in optimizer.param_groups:
                    group["lr"] = group["rate"] * (schedule(step, steps) if group["falls"] else 1)
                step += 1
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(flat, 1.0)
                optimizer.step()
        if total < best:
            best, kept = total, before
    restore(flat, kept)


def restore(parameters: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Give parameters values that they had."""
    with torch.no_grad():
        for parameter, value in zip(parameters, values, strict=True):
            parameter.copy_(value)


def _tokens(x: Tensor, mask: Tensor | None) -> Tensor:
    """Rows of tokens that are no padding: of a stream [B, S, K], or of maps [B, heads, S, S]."""
    if mask is None or x.ndim != 4 or x.shape[:2] == mask.shape:
        return tokens_of(x, mask)
    if x.shape[0] == mask.shape[0] and x.shape[2] == mask.shape[1]:
        return x[mask[:, None, :].expand(x.shape[:3])]
    return x


def parameter_groups(layers: Mapping[str, LearnedLayer], steps: int = 1) -> list[dict[str, Any]]:
    """Parameters by learning rate; those of codes can cross `CROSSED` codes in so many steps."""
    balance = {id(log): log for layer in layers.values() for _, log in layer.columns}
    clip: list[Tensor] = []
    fine: list[Tensor] = []
    moving: list[Tensor] = []
    for layer in layers.values():
        (clip if isinstance(layer.rounding, LearnedRounding) else fine).extend(
            layer.rounding.parameters()
        )
        clip += layer.outer or ()
        fine += [] if layer.shift is None else [layer.shift]
        moving += layer.rounding.moving() if isinstance(layer.rounding, MovingCodes) else []
    rates = (
        (list(balance.values()), BALANCE_RATE, False, False),
        (clip, CLIP_RATE, False, False),
        (fine, 2 * FINE_RATE if moving else FINE_RATE, True, False),
        (moving, CROSSED / steps, True, True),
    )
    return [
        {"params": params, "lr": rate, "rate": rate, "falls": falls, "moves": moves}
        for params, rate, falls, moves in rates
        if params
    ]


def with_block(
    learned: Learned,
    lesson: Lesson,
) -> Learned:
    """`learned` and what a block's layers have become."""
    tensors, weights = dict(learned.tensors), {**learned.weights, **lesson.folded}
    model, layers = lesson.graph.model, lesson.layers
    nodes = {node.name: node for node in model.nodes}
    divided: dict[int, tuple[Fold, Tensor]] = {}
    with torch.no_grad():
        for name, layer in layers.items():
            tensors[name] = layer.rounding.finish(layer.full())
            bias = layer.biased()
            if bias is not None:
                weights[(name, 2)] = bias.numpy().copy()
            divided.update({id(log): (fold, log) for fold, log in layer.divides})
        for fold, log in divided.values():
            norm = nodes[fold.source]
            for index in fold.divided:
                weight = model.weights[norm.inputs[index]]
                weights[(fold.source, index)] = (weight / log.exp().numpy()).astype(np.float32)
    return replace(learned, tensors=tensors, weights=weights)
