"""Which quantizer chooses the codes of which family."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apq_tvm.progress import Progress
from apq_tvm.quantizers.families import (
    anyprec,
    balance,
    bcq,
    codebook,
    codebook_learn,
    mixed,
    nonlinear,
    rtn,
    superblock,
    weighted,
)
from apq_tvm.types import Calibration, LayerStats, QuantizedTensor, Scheme

F32 = NDArray[np.float32]


@dataclass(frozen=True)
class QuantContext:
    """What a quantizer may use besides the weights.

    Parameters
    ----------
    search : bool
        False asks for the plainest choice: no search for smaller error.
    stats : LayerStats or None
        Of the layer's inputs, where the model was calibrated.
    shared : object
        What `Quantizer.prepare` returned.
    """

    search: bool = True
    stats: LayerStats | None = None
    shared: Any = None


@dataclass(frozen=True)
class Quantizer:
    """How one family's codes are chosen.

    Parameters
    ----------
    tensor : callable
        ``(w float32 [N, K], scheme, name, context) -> QuantizedTensor``.
    prepare : callable or None
        ``(weights by name, scheme, calibration or None, progress) -> shared``: run once per model
        and scheme where layers share something, such as codebooks.
    feeds_back : bool
        True if `tensor` itself rounds with error feedback where it is given H.
    """

    tensor: Callable[[F32, Scheme, str, QuantContext], QuantizedTensor]
    prepare: Callable[[Mapping[str, F32], Scheme, Calibration | None, Progress], Any] | None = None
    feeds_back: bool = False


def _integer(w: F32, scheme: Scheme, name: str, context: QuantContext) -> QuantizedTensor:
    if context.search and context.stats is not None:
        return weighted.quantize_weighted(w, scheme, context.stats.mean_square, name)
    return rtn.quantize_tensor(w, scheme, name, context.search)


QUANTIZERS: Mapping[str, Quantizer] = {
    "int": Quantizer(_integer),
    "anyprec": Quantizer(anyprec.quantize_anyprec),
    "balance": Quantizer(balance.quantize_tensor),
    "bcq": Quantizer(bcq.quantize_tensor),
    "mixed": Quantizer(mixed.quantize, feeds_back=True),
    "cb": Quantizer(codebook.quantize_tensor, codebook_learn.learn),
    "nl": Quantizer(nonlinear.quantize_tensor),
    "super": Quantizer(superblock.quantize_tensor),
}
"""By `Scheme.family`. A new quantizer is a file and a line here."""


def prepare(
    weights: Mapping[str, F32],
    scheme: Scheme,
    calibration: Calibration | None,
    progress: Progress,
) -> Any:
    """What the layers of one scheme share, such as codebooks, learned on their weights; or None."""
    learn = QUANTIZERS[scheme.family].prepare
    return None if learn is None or not weights else learn(weights, scheme, calibration, progress)


def quantize_tensor(
    w: F32,
    scheme: Scheme,
    name: str = "weight",
    search: bool = True,
    stats: LayerStats | None = None,
    shared: Any = None,
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

    Returns
    -------
    QuantizedTensor

    Raises
    ------
    UnsupportedModel
        If `w` is no float32 matrix or holds NaN or infinity.
    BadScheme
        If the scheme does not exist or does not fit the matrix.
    """
    from apq_tvm.formats.integer import check_weight
    from apq_tvm.formats.scheme import check_scheme
    from apq_tvm.progress import Silent

    check_scheme(scheme, name)
    check_weight(w, name)
    quantizer = QUANTIZERS[scheme.family]
    if shared is None:
        shared = prepare({name: w}, scheme, None, Silent())
    return quantizer.tensor(w, scheme, name, QuantContext(search, stats, shared))
