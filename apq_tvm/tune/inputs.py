"""Inputs of a linear layer that leave no doubt what is right, ordinary and extreme ones.

Activations are made from codes, so that every rounding to integers finds those codes: values lie
within a fifth of a step of them, and the largest exactly on one. So results do not depend on how a
kernel's rounding breaks ties, and the reference is a product of float64.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from apq_tvm.tensorize.meaning.spans.folded_rows import FoldedRows
from apq_tvm.tensorize.meaning.unsigned_rows import UnsignedRows
from apq_tvm.tune.program import Expected
from apq_tvm.types import F32, F64, Array, Scheme

MeantRows = FoldedRows | UnsignedRows
"""What x comes to mean where that is not what plain rounding gives."""

JITTER = 0.2
"""Of a step: how far values lie from their codes."""

RELATIVE_ERROR = 2e-6
"""Of float32 sums, against the sum of the products' magnitudes."""

APPROXIMATE = ("anyprec", "bcq", "mixed")
"""Families whose kernels round more than weights and activations (tables of int8, outliers): the
default is what others must equal."""

LOOSE = 2e4
"""Tolerances by which such a default may miss the exact product."""

EXTREMES = 7
"""Kinds of extreme rows."""


@dataclass(frozen=True)
class Activations:
    """A set of inputs.

    Parameters
    ----------
    x : float32 [M, K]
    values : float64 [M, K]
        What a kernel multiplies: x as it is rounded.
    """

    x: F32
    values: F64


def activations(scheme: Scheme | None, k: int, m: int, seed: int) -> list[Activations]:
    """Sets of inputs: the first is random, the others have every kind of extreme row.

    Parameters
    ----------
    scheme : Scheme or None
        How activations are rounded.
    k, m : int
    seed : int
    """
    rng = np.random.default_rng(seed)
    made = [_rounded(scheme, k, np.full(m, -1), rng)]
    for start in range(0, EXTREMES, m):
        kinds = (np.arange(m) + start) % EXTREMES
        made.append(_rounded(scheme, k, kinds, rng))
    return made


def _rounded(scheme: Scheme | None, k: int, kinds: Array, rng: np.random.Generator) -> Activations:
    """Rows of the kinds given, -1 for random ones."""
    if scheme is None or not scheme.integer_acts:
        codes = rng.standard_normal((len(kinds), k))
        _set_extremes(codes, kinds, 3.0)
        x = (codes * _steps(kinds, rng, 1)).astype(np.float32)
        return Activations(x, x.astype(np.float64))
    group = k if scheme.act_group == -1 else min(scheme.act_group, k)
    groups = -(-k // group)
    limit = float((1 << max(scheme.act_bits - 1, 1)) - 1)
    signs = scheme.act_bits == 1
    codes = np.rint(rng.standard_normal((len(kinds), groups * group)) * limit / 3)
    codes = np.clip(codes, -limit, limit)
    codes = np.where(codes < 0, -1.0, 1.0) if signs else codes
    _set_extremes(codes, kinds, limit, signs)
    codes[:, k:] = 0
    steps = _steps(kinds, rng, groups)
    noise = rng.uniform(-JITTER, JITTER, codes.shape) * (codes != 0)
    first = np.arange(groups) * group  # a whole code of the largest magnitude in every group
    zero = kinds == 0
    if scheme.asymmetric_acts:
        return _asymmetric(codes[:, :k], noise[:, :k], steps, zero, rng)
    codes[np.ix_(~zero, first)] = limit
    noise[np.abs(codes) >= limit] = 0
    codes[zero] = 0
    noise[zero] = 0
    steps = np.repeat(steps, group, axis=1)[:, :k]
    x = ((codes + noise)[:, :k] * steps).astype(np.float32)
    return Activations(x, codes[:, :k] * steps)


def _asymmetric(
    codes: Array, noise: Array, steps: Array, zero: Array, rng: np.random.Generator
) -> Activations:
    """Rows with zero points: 253 steps from the least to the largest, of which 0 is one."""
    codes = np.clip(codes, -125, 126)
    middle = rng.integers(-120, 120, (len(codes), 1)).astype(np.float64)
    exact = codes + noise
    exact[:, 0], codes[:, 0] = 126.75, 127
    exact[:, 1], codes[:, 1] = -126.25, -126
    x, values = (exact + middle) * steps, (codes + middle) * steps
    x[zero], values[zero] = 0, 0
    return Activations(x.astype(np.float32), values)


def _set_extremes(codes: Array, kinds: Array, limit: float, signs: bool = False) -> None:
    """Overwrite rows by kind: 0 zeros, 1 the largest, 2 alternating, 3 one value, 4 the least."""
    codes[kinds == 1] = limit
    codes[kinds == 2] = limit * (1 - 2 * (np.arange(codes.shape[1]) % 2))
    if not signs:
        codes[kinds == 3] = 0
        codes[kinds == 3, 0] = limit
    codes[kinds == 4] = -limit
    codes[kinds == 0] = 0


def _steps(kinds: Array, rng: np.random.Generator, groups: int) -> Array:
    """Sizes of a step, powers of 2 times a bit: tiny for kind 5, huge for kind 6."""
    steps = np.exp2(rng.integers(-8, -2, (len(kinds), groups))).astype(np.float64)
    steps[kinds == 5] *= 2.0**-40
    steps[kinds == 6] *= 2.0**40
    return steps


def expected(values: F64, weight: F32, slack: Array | float = 0.0) -> Expected:
    """The product [M, N] of what is multiplied, and how far from it a kernel may be.

    `slack` is added to that, of every row.
    """
    want = values @ weight.T.astype(np.float64)
    with np.errstate(over="ignore", under="ignore"):
        reach = (np.abs(values) @ np.abs(weight.T).astype(np.float64)).max(axis=1)
    tolerance = (RELATIVE_ERROR * reach + 1e-35 + slack).astype(np.float32)
    return Expected(want.astype(np.float32), tolerance)


def expected_folded(x: F32, rows: MeantRows, weight: F32, scales: Array | None) -> Expected:
    """As `expected`, of a kernel whose activations are folded, or unsigned codes.

    Parameters
    ----------
    x : float32 [M, K]
    rows : MeantRows
    weight : float32 [N, K]
    scales : ndarray [N, groups] or None
        Of the weights' codes.

    Notes
    -----
    What a chunk's sum is too large by is rounded by half a step of an activation and of a code;
    rows with zero points are multiplied and moved in one operation or in two, so that one of their
    codes may be another.
    """
    values, steps = rows.values(x)
    slack = np.zeros(len(x))
    if rows.rounds and scales is not None:
        of_chunks = np.abs(scales.astype(np.float64))
        times = -(-steps.shape[1] // of_chunks.shape[1])
        repeated = np.repeat(of_chunks, times, axis=1)[:, : steps.shape[1]]
        slack += 0.5 * (steps @ repeated.T).max(axis=1)
    if rows.asymmetric:
        slack += steps.max(axis=1) * float(np.abs(weight).max(initial=0))
    return expected(values, weight, slack)
