"""What a model's result is judged by where gradients tell how much it depends on a layer.

The next-token loss; a model that is no language model gets random projections of its outputs, whose
gradients are on average the outputs' derivatives. Padding tokens do not count.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from apq_tvm.errors import BadInput
from apq_tvm.quantizers.torch.graph import Lookup, Product, TorchGraph
from apq_tvm.quantizers.torch.ops import F, Tensor, torch
from apq_tvm.types import Array, ImportedModel

MASK_NAME = re.compile(r"(^|_|\.)attention_mask$|^mask$|(^|_)attn_mask$")
IDS_NAME = re.compile(r"(^|_|\.)input_ids$")


def mask_of(model: ImportedModel, call: Mapping[str, Array]) -> Tensor | None:
    """Which tokens of a call are no padding, bool [B, S]; None if the model has no mask."""
    name = next((s.name for s in model.inputs if MASK_NAME.search(s.name)), None)
    return None if name is None else torch.as_tensor(call[name]) != 0


def tokens_of(x: Tensor, mask: Tensor | None) -> Tensor:
    """Rows of tokens that are no padding, of values [B, S, ...]; others as they are."""
    return x if mask is None or x.ndim < 3 or x.shape[:2] != mask.shape else x[mask]


def is_language_model(model: ImportedModel) -> bool:
    """Whether `language_model` finds a loss."""
    try:
        language_model(model)
    except BadInput:
        return False
    return True


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


def result_loss(
    graph: TorchGraph, call: Mapping[str, Array], product: Product, lookup: Lookup | None = None
) -> Tensor:
    """The next-token loss, or random projections of all float outputs where there is none.

    Parameters
    ----------
    graph : TorchGraph
    call : mapping of str to ndarray
    product, lookup : callable
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
    mask = mask_of(model, call)
    if is_language_model(model):
        ids, logits = language_model(model)
        result = graph.run(call, [logits], product, lookup)[logits]
        return next_token_loss(result, torch.as_tensor(call[ids]), mask)
    names = [spec.name for spec in model.outputs if spec.dtype.startswith("float")]
    total = torch.zeros(())
    for value in graph.run(call, names, product, lookup).values():
        noise = torch.randn(value.shape, generator=torch.Generator().manual_seed(0))
        if mask is not None and value.ndim >= 3 and value.shape[:2] == mask.shape:
            noise[~mask] = 0
        size = value.detach().square().mean().sqrt().clamp_min(1e-30)
        total = total + (value * noise).sum() / (size * noise.count_nonzero())
    if not total.requires_grad:
        raise BadInput(f"no float output of {model.name} depends on a linear layer")
    return total
