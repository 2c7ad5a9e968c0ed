"""ABQ-LLM's losses of one block (AAAI 2025, section 3.2), one of length that they lack, and that of
whole language models."""

from __future__ import annotations

from collections.abc import Sequence

from apq_tvm.quantizers.torch.ops import F, Tensor, torch

SMALLEST = 1e-6
"""Cosines and shares are not taken below this before a logarithm."""


def dlc_loss(quantized: Tensor, full: Tensor, full_on_quantized: Tensor) -> Tensor:
    """Double log of cosine similarity, eq. (2); the mean over tokens.

    Parameters
    ----------
    quantized : Tensor [..., K]
        Output of the quantized block, fed by quantized blocks.
    full : Tensor [..., K]
        Of the float block, fed by float blocks.
    full_on_quantized : Tensor [..., K]
        Of the float block, fed by quantized blocks.

    Returns
    -------
    Tensor []
        0 where all three point one way.
    """
    return _log_cosine(quantized, full) + _log_cosine(quantized, full_on_quantized)


def akl_loss(quantized: Sequence[Tensor], full: Sequence[Tensor]) -> Tensor:
    """Two-way Kullback-Leibler divergence of attention maps, eq. (4); the mean over rows.

    Parameters
    ----------
    quantized, full : sequence of Tensor [..., S]
        Attention maps: rows are shares that sum to 1.

    Returns
    -------
    Tensor []
        0 for no maps. D(q||f) + D(f||q) is Σ (q - f) (log q - log f).
    """
    total = torch.zeros(())
    for q, f in zip(quantized, full, strict=True):
        logs = q.clamp_min(SMALLEST).log() - f.clamp_min(SMALLEST).log()
        total = total + ((q - f) * logs).sum(-1).mean()
    return total


def length_loss(quantized: Tensor, full: Tensor) -> Tensor:
    """Squared error relative to each token's length: cosines leave the length free, sums do not.

    Parameters
    ----------
    quantized, full : Tensor [..., K]

    Returns
    -------
    Tensor []
    """
    error = (quantized - full).square().sum(-1)
    return (error / full.square().sum(-1).clamp_min(SMALLEST)).mean()


def kl_loss(quantized: Tensor, full: Tensor) -> Tensor:
    """Kullback-Leibler divergence D(full || quantized) of next-token distributions; the mean.

    Parameters
    ----------
    quantized, full : Tensor [..., V]
        Logits.

    Returns
    -------
    Tensor []
        In nats per token.
    """
    logs, wanted = (F.log_softmax(x.flatten(0, -2), -1) for x in (quantized, full))
    return F.kl_div(logs, wanted, reduction="batchmean", log_target=True)


def _log_cosine(a: Tensor, b: Tensor) -> Tensor:
    return -F.cosine_similarity(a, b, dim=-1).clamp_min(SMALLEST).log().mean()
