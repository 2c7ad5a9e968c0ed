"""AWQ and SmoothQuant: scales per input channel that make weights easier to round, or activations.

AWQ (Lin et al., "AWQ: Activation-aware Weight Quantization", MLSys 2024, section 3.2): channels
with large activations get finer steps; s = E[x²]^(r/2), r searched for least output error.
SmoothQuant (Xiao et al., ICML 2023, eq. 4): s_j = |x_j|^a / |w_j|^(1-a), which moves outliers of
the activations into the weights. Theirs are maxima, a = 0.5. But a maximum over all tokens is often
that of one token which little depends on, such as a text's first, and a channel's part of the
output goes with the norm of its weights. With the geometric mean of maximum and root mean square
for x, root mean squares for w and a = 0.6, rounding the activations of SmolLM2's layers to 8 bits
costs a third of what it costs with theirs. Both methods are folded where that is exact (`folds`),
and nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from apq_tvm.formats.families import dequantize
from apq_tvm.progress import Progress
from apq_tvm.quantizers.families import rtn
from apq_tvm.quantizers.feedback.error_feedback import damage
from apq_tvm.quantizers.inputs.folds import Fold, apply_fold, find_folds
from apq_tvm.types import F32, Calibration, ImportedModel, LayerStats, Scheme

RATIOS = tuple(i / 20 for i in range(21))
"""Exponents tried for AWQ, as in its code; 0 changes nothing."""

SMOOTHING = 0.6
"""SmoothQuant's alpha."""

SAMPLE_ROWS = 256
"""Rows of each weight whose error is measured while an exponent is searched."""

LEAST = 1e-4
"""Of a channel's size, relative to the largest: silent channels do not get boundless scales."""


def scale_model(
    model: ImportedModel,
    calibration: Calibration,
    schemes: Mapping[str, Scheme],
    method: str,
    progress: Progress,
) -> tuple[ImportedModel, Calibration, dict[str, str]]:
    """Fold AWQ's or SmoothQuant's scales into a model.

    Parameters
    ----------
    model : ImportedModel
    calibration : Calibration
    schemes : mapping of str to Scheme
        Of the linear layers that are quantized, by name.
    method : str
        ``"awq"`` or ``"smoothquant"``.
    progress : Progress

    Returns
    -------
    ImportedModel
        Computes what `model` computes.
    Calibration
        Of the scaled inputs.
    dict of str to str
        Layer → what was done, or why nothing.
    """
    folds, reasons = find_folds(model)
    notes = {name: f"{method}: not scaled, {why}" for name, why in reasons.items()}
    layers = dict(calibration.layers)
    with progress.stage(method, len(folds)):
        for fold in folds:
            progress.advance(fold.value)
            if any(name not in schemes or name not in layers for name in fold.readers):
                text = f"{method}: not scaled, layers that share its input are not quantized"
                notes.update({name: text for name in fold.readers if name in schemes})
                continue
            if method == "awq":
                scale, text = _awq(model, fold, layers, schemes)
            else:
                scale, text = _smooth(model, fold, layers), f"alpha {SMOOTHING:g}"
            notes.update({name: f"{method}: {text}" for name in fold.readers})
            if scale is not None:
                model = apply_fold(model, fold, scale)
                scaled_stats(layers, fold, scale)
    scaled = {name: text for name, text in notes.items() if name in schemes}
    return model, replace(calibration, layers=layers), scaled


def scaled_stats(layers: dict[str, LayerStats], fold: Fold, scale: F32) -> None:
    """What `layers` become when a fold's channels are divided by `scale`; changed in place."""
    by = scale[fold.channels]
    for name in fold.readers:
        stats = layers[name]
        layers[name] = replace(
            stats,
            mean_square=stats.mean_square / by**2,
            mean=stats.mean / by,
            absmax=stats.absmax / by,
            hessian=None if stats.hessian is None else stats.hessian / np.outer(by, by),
            fisher=None if stats.fisher is None else stats.fisher / by**2,
        )
    source = layers.get(fold.source)
    if source is not None and source.fisher is not None:
        layers[fold.source] = replace(source, fisher=source.fisher * scale[:, None] ** 2)


def per_source(fold: Fold, size: F32) -> F32:
    """The largest of the channels of x that come from one channel of the source, [count]."""
    most = np.zeros(fold.count, np.float32)
    np.maximum.at(most, fold.channels, size)
    largest = max(float(most.max()), float(np.finfo(np.float32).tiny))
    return np.maximum(most, np.float32(LEAST * largest))


def smooth_size(stats: LayerStats) -> F32:
    """How large each channel of x is, between its maximum and its root mean square, [K]."""
    return np.asarray(np.sqrt(stats.absmax * np.sqrt(stats.mean_square)), np.float32)


def smooth_scale(fold: Fold, size: F32, weights: list[F32], alpha: float = SMOOTHING) -> F32:
    """SmoothQuant's scale of a fold.

    Parameters
    ----------
    fold : Fold
    size : float32 [K]
        Of x.
    weights : list of float32 [N, K]
        Of the readers.
    alpha : float
        1 puts all difficulty into the weights.

    Returns
    -------
    float32 [fold.count]
    """
    steep = np.sqrt(np.mean(np.square(np.concatenate(weights)), axis=0))
    scale: F32 = per_source(fold, size) ** alpha / per_source(fold, steep) ** (1 - alpha)
    return np.asarray(scale / np.exp(np.log(scale).mean()), np.float32)


def reader_weights(model: ImportedModel, fold: Fold) -> list[F32]:
    """Weights of a fold's linear layers."""
    nodes = {node.name: node for node in model.nodes}
    return [np.asarray(model.weights[nodes[n].inputs[1]], np.float32) for n in fold.readers]


def _smooth(model: ImportedModel, fold: Fold, layers: Mapping[str, LayerStats]) -> F32:
    return smooth_scale(fold, smooth_size(layers[fold.readers[0]]), reader_weights(model, fold))


def _awq(
    model: ImportedModel,
    fold: Fold,
    layers: Mapping[str, LayerStats],
    schemes: Mapping[str, Scheme],
) -> tuple[F32 | None, str]:
    """The best scale and its exponent; None if no scale is better than 1.

    Errors of layers that share the scale are added as they hurt the model (`damage`): the value
    layer's may be tiny beside the query layer's and still be what counts.
    """
    size = per_source(fold, np.sqrt(np.max([layers[n].mean_square for n in fold.readers], axis=0)))
    weights = [w[:: max(1, len(w) // SAMPLE_ROWS)] for w in reader_weights(model, fold)]
    proxies = [proxy(schemes[name]) for name in fold.readers]
    best, least, first, exponent = None, np.inf, 0.0, 0.0
    for ratio in RATIOS:
        scale = np.asarray(size**ratio, np.float32)
        scale /= np.sqrt(scale.max() * scale.min())
        by = scale[fold.channels]
        error = 0.0
        for name, w, scheme in zip(fold.readers, weights, proxies, strict=True):
            rounded = dequantize(rtn.quantize_tensor(w * by, scheme, fold.value, False)) / by
            error += damage(w - rounded, w, layers[name])
        first = error if ratio == 0 else first
        if error < least:
            best, least, exponent = (scale if ratio else None), error, ratio
    if best is None:
        return None, "no scale lowers the error"
    return best, f"exponent {exponent:g}, error {least / max(first, 1e-30):.2f} of unscaled"


def proxy(scheme: Scheme) -> Scheme:
    """The integers that stand for a scheme while scales are searched: its bits, at most its groups.

    Other families' quantizers are too slow to run for every exponent; which channels need finer
    steps hardly depends on where the levels lie.
    """
    if scheme.family == "int":
        return scheme
    return Scheme(scheme.min_bits or scheme.bits, group_size=128)
