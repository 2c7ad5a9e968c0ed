"""What a quantizer is given, and what it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from apq_tvm.progress import Progress
from apq_tvm.quantizers.feedback.error_feedback import Feedback
from apq_tvm.types import F32, Calibration, LayerStats, QuantizedTensor, Scheme


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
    means : float32 [S, K] or None
        Estimates of what the layer's inputs are on average, where it was not calibrated.
    pairs : bool
        Neighbours among 8-bit codes are to fit together (`families.pairs`).
    """

    search: bool = True
    stats: LayerStats | None = None
    shared: Any = None
    means: F32 | None = None
    pairs: bool = False


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
    feedback : callable or None
        ``(w, tensor, feedback) -> QuantizedTensor``: error feedback of the family's own, where a
        code does not stand for one value (`apq_tvm.quantizers.feedback.gptq`).
    """

    tensor: Callable[[F32, Scheme, str, QuantContext], QuantizedTensor]
    prepare: Callable[[Mapping[str, F32], Scheme, Calibration | None, Progress], Any] | None = None
    feeds_back: bool = False
    feedback: Callable[[F32, QuantizedTensor, Feedback], QuantizedTensor] | None = None
