"""Running comparison of two models' outputs, row by row: cosine and error of floats, equality of
integers.

Ids, labels and masks are equal or not: how far 7 is from 9 says nothing, and a cosine between ids
that were only passed through would make a mean over outputs look better than the model is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apq_tvm.errors import BadInput
from apq_tvm.types import Array


@dataclass
class Agreement:
    """Running comparison of one output of floats, row by row, in float64.

    Parameters
    ----------
    name : str
        Of the output.
    """

    name: str
    rows: int = 0
    cosine_sum: float = 0.0
    cosine_min: float = 1.0
    max_abs_error: float = 0.0
    error2: float = 0.0
    reference2: float = 0.0
    same_top: int = 0

    def add(self, ours: Array, reference: Array, mask: Array | None) -> None:
        """Compare two arrays of one call; a row is a vector along the last axis.

        Parameters
        ----------
        ours, reference : ndarray
            One output of one call.
        mask : [batch, sequence] or None
            Token-level outputs are compared where it is not 0.

        Raises
        ------
        BadInput
            The shapes differ (the module was not compiled from this model), or one side is NaN or
            infinite where the other is not.
        """
        _check_shapes(self.name, ours, reference)
        a, b = rows_of(ours, mask), rows_of(reference, mask)
        if not a.size:
            return
        with np.errstate(invalid="ignore"):
            error = np.where(a == b, 0.0, np.abs(a - b))
        if not np.isfinite(error).all():
            raise BadInput(
                f"output {self.name!r}: the module or the float model gives NaN or infinity where "
                "the other does not"
            )
        cosine = row_cosine(a, b)
        self.rows += len(cosine)
        self.cosine_sum += float(cosine.sum())
        self.cosine_min = min(self.cosine_min, float(cosine.min()))
        self.max_abs_error = max(self.max_abs_error, float(error.max()))
        self.same_top += int((a.argmax(axis=1) == b.argmax(axis=1)).sum())
        finite = np.isfinite(b)
        self.error2 += float(np.square(error[finite]).sum())
        self.reference2 += float(np.square(b[finite]).sum())

    def summary(self) -> dict[str, Any]:
        """Return ``cosine_mean``, ``cosine_min``, ``max_abs_error``, ``rows``, ``relative_error``
        (the root of all rows' squared errors over their squares) and ``same_top``: the share of
        rows whose largest number stands at the same place, top-1 agreement where rows are classes.
        """
        return {
            "cosine_mean": self.cosine_sum / self.rows if self.rows else 1.0,
            "cosine_min": self.cosine_min,
            "max_abs_error": self.max_abs_error,
            "relative_error": relative(self.error2, self.reference2),
            "same_top": self.same_top / self.rows if self.rows else 1.0,
            "rows": self.rows,
        }


@dataclass
class IntegerAgreement:
    """Running comparison of one output of integers or truth values.

    Parameters
    ----------
    name : str
        Of the output.
    """

    name: str
    rows: int = 0
    numbers: int = 0
    equal: int = 0
    max_abs_error: float = 0.0

    def add(self, ours: Array, reference: Array, mask: Array | None) -> None:
        """Compare two arrays of one call; see `Agreement.add`.

        Raises
        ------
        BadInput
            The shapes differ.
        """
        _check_shapes(self.name, ours, reference)
        self.rows += len(rows_of(reference, mask))
        if mask is not None and reference.shape[:2] == mask.shape:
            ours, reference = ours[mask != 0], reference[mask != 0]
        self.numbers += reference.size
        self.equal += int((ours == reference).sum())
        error = np.abs(ours.astype(np.float64) - reference.astype(np.float64))
        self.max_abs_error = max(self.max_abs_error, float(error.max(initial=0.0)))

    def summary(self) -> dict[str, Any]:
        """Return ``equal``, the share of ``numbers`` that are, ``max_abs_error`` and ``rows``."""
        return {
            "equal": self.equal / self.numbers if self.numbers else 1.0,
            "numbers": self.numbers,
            "max_abs_error": self.max_abs_error,
            "rows": self.rows,
        }


def agreement_of(name: str, reference: Array) -> Agreement | IntegerAgreement:
    """How an output is compared, by the type that the float model gives it."""
    return IntegerAgreement(name) if reference.dtype.kind in "iub" else Agreement(name)


def _check_shapes(name: str, ours: Array, reference: Array) -> None:
    if ours.shape != reference.shape:
        raise BadInput(
            f"output {name!r} has shape {ours.shape} in the module but "
            f"{reference.shape} in the ONNX model: the module is of another model"
        )


def rows_of(values: Array, mask: Array | None) -> NDArray[np.float64]:
    """Flatten an output to the rows that are compared, float64 [rows, width].

    A token-level output, [batch, sequence, ...] where `mask` is [batch, sequence], keeps unmasked
    tokens only. One that holds a single number per token ([batch, sequence]) is one row per batch
    entry, with masked tokens set to 0. Without a batch axis everything is one row.
    """
    x = np.asarray(values).astype(np.float64)
    if mask is not None and x.ndim >= 2 and x.shape[:2] == mask.shape:
        keep = mask != 0
        if x.ndim == 2:
            return np.where(keep, x, 0.0)
        return np.asarray(x[keep]).reshape(-1, x.shape[-1])
    if x.ndim < 2:
        return x.reshape(1, -1)
    return x.reshape(-1, x.shape[-1])


def row_cosine(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    """Cosine of rows, float64 [rows]: 1 where they are equal, 0 where one is 0 or holds a NaN."""
    norms = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    dots = np.einsum("rk,rk->r", a, b)
    finite = np.isfinite(norms) & (norms > 0)
    cosine = np.divide(dots, norms, out=np.zeros_like(dots), where=finite)
    return np.where((a == b).all(axis=1), 1.0, np.clip(cosine, -1.0, 1.0))


def relative(error: float, reference: float) -> float:
    """Ratio of norms from their squares; an error beside nothing is 1, as if all were lost."""
    if reference > 0:
        return math.sqrt(error / reference)
    return 0.0 if error == 0 else 1.0
