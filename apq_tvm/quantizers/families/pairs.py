"""8-bit codes of which no two neighbours exceed 152 together (`apq_tvm.formats.integer.PAIR_SUM`).

x86 without VNNI multiplies such codes a fifth faster than others. A row's step becomes larger until
its largest pair of weights fits, or less than that, and the few pairs that do not fit then give
way: whichever loses less, each pair's excess shared so that its squared error is least. Squared
errors grow by 1.4 where weights are normal, by 1.2 where they have heavier tails.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from apq_tvm.formats.integer import PAIR_MOST, check_scale, format_of, round_scale
from apq_tvm.types import F32, QuantizedTensor, Scheme

LARGEST, MIDDLE = 127, 128
"""Of signed codes, and what is added to store them."""

LEAST_K = 33
"""Columns from which on it pays: rows of one unit lose the most, and their products are little of
the work (1 - cosine of EfficientNet-Lite0 and 2 is 0.1 and 0.2 thousandths less without them)."""

RATIOS = (1.0, 0.97, 0.94, 0.91, 0.88, 0.84, 0.8, 0.75)
"""Steps tried, relative to the one with which every pair fits."""

CHUNK = 1 << 20
"""Weights worked on at a time."""

Codes = NDArray[np.uint8]


def takes_pairs(scheme: Scheme, k: int) -> bool:
    """Whether codes of rows of `k` are chosen so: 8 bits, one scale a row, no zero points.

    And activations with zero points, as the products need them.
    """
    whole = scheme.bits == 8 and not scheme.zero_points and scheme.asymmetric_acts
    return whole and k >= LEAST_K


def quantize_pairs(
    w: F32,
    scheme: Scheme,
    name: str = "weight",
    search: bool = True,
    importance: F32 | None = None,
) -> QuantizedTensor:
    """Quantize one weight matrix, which `apq_tvm.quantizers.registry.quantize_tensor` has checked.

    Parameters
    ----------
    w : float32 [N, K]
    scheme : Scheme
        Of those that `takes_pairs`.
    name : str
        For errors.
    search : bool
        False takes the step with which every pair fits.
    importance : float32 [K], optional
        What a squared error of each column counts.

    Returns
    -------
    QuantizedTensor

    Raises
    ------
    BadScheme
        If a scale overflows float16.
    """
    n, k = w.shape
    weigh = np.ones(k, np.float32) if importance is None else importance.astype(np.float32)
    weigh = np.pad(weigh, (0, k % 2))
    codes, scales = np.empty((n, k), np.uint8), np.empty((n, 1), np.float16)
    rows = max(1, CHUNK // k)
    for start in range(0, n, rows):
        part = slice(start, start + rows)
        padded = np.pad(w[part], ((0, 0), (0, k % 2)))
        step = _step(padded)
        check_scale(step, name, format_of(scheme))
        if search:
            step = _search(padded, weigh, step)
        codes[part] = (_rounded(padded, step) + MIDDLE)[:, :k]
        scales[part] = step
    return QuantizedTensor(codes, scales, None, scheme)


def room(codes: Codes) -> tuple[Codes, Codes]:
    """How small and how large each code may become, whatever becomes of the others.

    Parameters
    ----------
    codes : uint8 [N, K]
        No pair of them too large.

    Returns
    -------
    least, most : uint8 [N, K]
        What a pair leaves of 152, its two codes share.
    """
    k = codes.shape[1]
    even = np.pad(codes, ((0, 0), (0, k % 2)), constant_values=MIDDLE)
    sizes = np.abs(even.astype(np.int16) - MIDDLE)
    pairs = sizes.reshape(len(codes), -1, 2)
    pairs += (PAIR_MOST - pairs.sum(2, keepdims=True, dtype=np.int16)) // 2
    most = np.minimum(sizes[:, :k], LARGEST)
    return (MIDDLE - most).astype(np.uint8), (MIDDLE + most).astype(np.uint8)


def _step(w: F32) -> F32:
    """[N, 1]: the least with which a row's pairs, and each of its weights, fit."""
    sizes = np.abs(w)
    with np.errstate(over="ignore"):
        pairs = (sizes[:, 0::2] + sizes[:, 1::2]).max(1, keepdims=True)
    largest = sizes.max(1, keepdims=True)
    return round_scale(np.maximum(pairs / np.float32(PAIR_MOST), largest / np.float32(LARGEST)))


def _search(w: F32, weigh: F32, plain: F32) -> F32:
    """The step of least error: of `RATIOS`, each also as it suits the codes that it gives best."""
    best, least = plain, np.full(plain.shape, np.inf)
    for ratio in RATIOS:
        step = round_scale(plain * np.float32(ratio))
        for _ in range(2):
            u = _rounded(w, step)
            rest = w - step * u
            error = np.einsum("nk,nk,k->n", rest, rest, weigh, dtype=np.float64)[:, None]
            better = error < least
            best, least = np.where(better, step, best), np.where(better, error, least)
            size = np.einsum("nk,nk,k->n", u, u, weigh)[:, None]
            fit = step + np.einsum("nk,nk,k->n", rest, u, weigh)[:, None] / np.maximum(size, 1)
            step = round_scale(np.maximum(fit, 0))
    return best


def _rounded(w: F32, step: F32) -> F32:
    """Signed codes [N, K], K even; of a pair that is too large both give way."""
    exact = np.divide(w, step, out=np.zeros_like(w), where=step > 0)
    u = np.clip(np.rint(exact), -LARGEST, LARGEST)
    row, pair = np.nonzero(np.abs(u[:, 0::2]) + np.abs(u[:, 1::2]) > PAIR_MOST)
    if not len(row):
        return u
    at = row[:, None], 2 * pair[:, None] + np.arange(2)
    two, size = u[at], np.abs(u[at])
    excess = size.sum(1) - PAIR_MOST
    short = np.abs(exact[at]) - size  # how much smaller each is already than what it stands for
    first = np.rint((excess + short[:, 1] - short[:, 0]) / 2)
    first = np.clip(first, np.maximum(0, excess - size[:, 1]), np.minimum(excess, size[:, 0]))
    u[at] = np.sign(two) * (size - np.stack([first, excess - first], 1))
    return u
