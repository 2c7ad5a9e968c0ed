"""Which quantizer chooses the codes of which family."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from apq_tvm.errors import BadScheme
from apq_tvm.formats.families import family_of
from apq_tvm.formats.integer import check_weight
from apq_tvm.formats.scheme import check_scheme
from apq_tvm.progress import Progress, Silent
from apq_tvm.quantizers.families import (
    anyprec,
    balance,
    bcq,
    codebook,
    codebook_learn,
    levels,
    mixed,
    rtn,
    stepped,
    superblock,
    weighted,
)
from apq_tvm.quantizers.families.kept_means import keep_means
from apq_tvm.quantizers.families.kept_sums import Room, keep_row_sums, keeps_sums
from apq_tvm.quantizers.families.pairs import quantize_pairs, room, takes_pairs
from apq_tvm.quantizers.feedback import anyprec as anyprec_feedback
from apq_tvm.quantizers.quantizer import QuantContext, Quantizer
from apq_tvm.types import F32, Calibration, LayerStats, QuantizedTensor, Scheme


def _integer(w: F32, scheme: Scheme, name: str, context: QuantContext) -> QuantizedTensor:
    if context.pairs and takes_pairs(scheme, w.shape[1]):
        importance = None if context.stats is None else context.stats.mean_square
        tensor = quantize_pairs(w, scheme, name, context.search, importance)
        if not context.search or importance is not None:
            return tensor
        return _keep_sums(w, tensor, context.means, room(tensor.codes))
    if context.search and context.stats is not None:
        return weighted.quantize_weighted(w, scheme, context.stats.mean_square, name)
    tensor = rtn.quantize_tensor(w, scheme, name, context.search)
    if not context.search or not keeps_sums(scheme):
        return tensor
    return _keep_sums(w, tensor, context.means)


def _keep_sums(
    w: F32, tensor: QuantizedTensor, means: F32 | None, room: Room | None = None
) -> QuantizedTensor:
    if means is None:
        return keep_row_sums(w, tensor, room)
    return keep_means(w, tensor, means, room)


QUANTIZERS: Mapping[str, Quantizer] = {
    "int": Quantizer(_integer),
    "anyprec": Quantizer(anyprec.quantize_anyprec, feedback=anyprec_feedback.feed_back),
    "balance": Quantizer(balance.quantize_tensor),
    "bcq": Quantizer(bcq.quantize_tensor),
    "mixed": Quantizer(mixed.quantize, feeds_back=True),
    "cb": Quantizer(codebook.quantize_tensor, codebook_learn.learn),
    "super": Quantizer(superblock.quantize_tensor),
    "min": Quantizer(stepped.quantize_minima),
    "k": Quantizer(stepped.quantize_kquant),
}
"""By `Scheme.family`. A new quantizer is a file and a line here; families that say their levels
need none."""

_BY_LEVELS = Quantizer(levels.quantize_tensor)


def quantizer_of(scheme: Scheme) -> Quantizer:
    """How a scheme's codes are chosen.

    Raises
    ------
    BadScheme
        If nothing chooses them.
    """
    found = QUANTIZERS.get(scheme.family)
    if found is None and family_of(scheme).levels(scheme) is not None:
        found = _BY_LEVELS
    if found is None:
        raise BadScheme(
            f"scheme {scheme}: no quantizer chooses codes of family {scheme.family!r}; it needs a "
            "line in apq_tvm.quantizers.registry, or levels"
        )
    return found


def prepare(
    weights: Mapping[str, F32],
    scheme: Scheme,
    calibration: Calibration | None,
    progress: Progress,
) -> Any:
    """What the layers of one scheme share, such as codebooks, learned on their weights; or None."""
    learn = quantizer_of(scheme).prepare
    return None if learn is None or not weights else learn(weights, scheme, calibration, progress)


def quantize_tensor(
    w: F32,
    scheme: Scheme,
    name: str = "weight",
    search: bool = True,
    stats: LayerStats | None = None,
    shared: Any = None,
    means: F32 | None = None,
    pairs: bool = False,
) -> QuantizedTensor:
    """Quantize one weight matrix.

    Parameters
    ----------
    w : float32 [N, K]
    scheme : Scheme
    name : str
        For errors.
    search : bool
        False asks for the plainest choice, such as rounding from each group's maximum.
    stats : LayerStats, optional
        Of the layer's inputs: weights that matter more get smaller errors.
    shared : object, optional
        What the family's `Quantizer.prepare` returned for the model; by default it is prepared
        from this matrix alone.
    means : float32 [S, K], optional
        What the layer's inputs may be on average, without calibration.
    pairs : bool
        Neighbours among 8-bit codes are to fit together (`families.pairs`).

    Returns
    -------
    QuantizedTensor

    Raises
    ------
    UnsupportedModel
        If `w` is no float32 matrix or holds NaN or infinity.
    BadScheme
        If the scheme does not exist or does not fit the matrix, or nothing chooses its codes.
    """
    check_scheme(scheme, name)
    check_weight(w, name)
    quantizer = quantizer_of(scheme)
    if shared is None:
        shared = prepare({name: w}, scheme, None, Silent())
    return quantizer.tensor(w, scheme, name, QuantContext(search, stats, shared, means, pairs))
