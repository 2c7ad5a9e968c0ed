"""``mixed24``: which groups get 4 bits, which weights stay in 16, and codes with error feedback.

After "Fast and Efficient 2-bit LLM Inference on GPU" (ICCAD 2024), sections 3.3 and 4.3: groups of
16 input channels are ranked by ``S_i = Σ w² / [H⁻¹]_kk²`` (eq. (9)), and the largest weights of the
2-bit groups are kept in 16 bits. Without H its diagonal E[x²] stands for it, and without
calibration all channels count the same. The paper finetunes the weights on this split; here columns
are rounded one after another with error feedback (`apq_tvm.quantizers.feedback.error_feedback`)
where H is known.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from apq_tvm.errors import BadInput, BadScheme
from apq_tvm.formats.integer import MAX_SCALE, check_weight
from apq_tvm.formats.mixed import GROUP, Sizes, sub_scale_bits, wide_columns
from apq_tvm.quantizers.families.mixed_scales import NarrowScales, encode, narrow_scales, row_scales
from apq_tvm.quantizers.feedback.error_feedback import DAMPING, Columns, feedback_of, walk
from apq_tvm.quantizers.quantizer import QuantContext
from apq_tvm.types import F32, Array, LayerStats, QuantizedTensor, Scheme


@dataclass(frozen=True)
class Importance:
    """What calibration says about the input channels.

    Parameters
    ----------
    inverse : float32 [K]
        Diagonal of H⁻¹.
    diagonal : float32 [K]
        What a channel's squared error counts, relative to the others.
    hessian : float32 [K, K] or None
    """

    inverse: F32
    diagonal: F32
    hessian: F32 | None

    @classmethod
    def of(cls, stats: LayerStats | None, k: int, name: str) -> Importance:
        """From H, else from its diagonal E[x²], else all the same.

        Raises
        ------
        BadInput
            If the statistics are not finite, not of K channels, or H cannot be factored.
        """
        if stats is None:
            return cls(np.ones(k, np.float32), np.ones(k, np.float32), None)
        if stats.hessian is not None:
            if stats.hessian.shape != (k, k):
                raise BadInput(
                    f"layer {name!r}: H has shape {list(stats.hessian.shape)}; [{k}, {k}] is "
                    "needed: calibrate with this very model"
                )
            upper = feedback_of(stats.hessian, name).upper
            inverse: F32 = np.einsum("ik,ik->k", upper, upper)
            return cls(inverse, np.reciprocal(inverse), stats.hessian)
        square = stats.mean_square
        if square.shape != (k,) or not np.isfinite(square).all() or (square < 0).any():
            raise BadInput(
                f"layer {name!r}: E[x²] must be {k} finite values, none negative; calibrate anew"
            )
        mean = float(square.mean()) or 1.0
        damped = (square / mean + DAMPING).astype(np.float32)  # as H is damped
        return cls(np.reciprocal(damped), damped, None)


def sensitivity(w: F32, inverse: F32) -> NDArray[np.float64]:
    """S of every group of 16 input channels, eq. (9).

    Parameters
    ----------
    w : float32 [N, K]
    inverse : float32 [K]
        Diagonal of H⁻¹.

    Returns
    -------
    float64 [ceil(K / 16)]
    """
    k = w.shape[1]
    channel = np.einsum("nk,nk->k", w, w, dtype=np.float64) / inverse.astype(np.float64) ** 2
    padded = np.zeros(-(-k // GROUP) * GROUP)
    padded[:k] = channel
    total: NDArray[np.float64] = padded.reshape(-1, GROUP).sum(1)
    return total


def quantize(w: F32, scheme: Scheme, name: str, context: QuantContext) -> QuantizedTensor:
    """Quantize one weight matrix to ``mixed24``.

    Parameters
    ----------
    w : float32 [N, K]
    scheme : Scheme
    name : str
        For errors.
    context : QuantContext
        Without `search` scales are taken from ranges; `stats` of the layer's input rank the groups,
        and with H errors are fed back.

    Returns
    -------
    QuantizedTensor

    Raises
    ------
    UnsupportedModel
        If `w` is no float32 matrix or holds NaN or infinity.
    BadScheme
        If a scale overflows float16.
    BadInput
        If the statistics do not fit or H is singular beyond damping.
    """
    check_weight(w, name)
    n, k = w.shape
    sizes = Sizes.of(scheme, n, k)
    importance = Importance.of(context.stats, k, name)
    wide = np.zeros(sizes.groups, np.uint8)
    order = np.argsort(-sensitivity(w, importance.inverse), kind="stable")
    wide[order[: sizes.wide]] = 1
    with np.errstate(over="ignore", invalid="ignore"):  # what overflows is refused by name
        work = _Work(w, wide, sizes, importance, context.search, name)
        if importance.hessian is not None:
            work.feed_back(importance.hessian)
        else:
            work.quantize_all()
    return work.tensor(scheme)


class _Work:
    """The parts of one tensor as they are chosen, group by group or all at once."""

    def __init__(
        self,
        w: F32,
        wide: NDArray[np.uint8],
        sizes: Sizes,
        importance: Importance,
        search: bool,
        name: str,
    ) -> None:
        self.w, self.wide, self.sizes, self.search, self.name = w, wide, sizes, search, name
        n, k = w.shape
        self.is_wide = wide_columns(wide, k)
        self.importance = importance.diagonal.copy()
        self.number = np.cumsum(wide == 0) - 1  # of every 2-bit group among them
        self.bits = sub_scale_bits(sizes.narrow)
        self.kept = self._outliers()  # bool [N, K]
        rows, zeros = row_scales(
            np.ascontiguousarray(w[:, self.is_wide]), self.importance[self.is_wide], search, name
        )
        self.rows, self.row_zeros = rows, zeros
        self.codes = np.zeros((n, k), np.uint8)
        self.outliers = np.zeros(self.kept.shape, np.float16) if sizes.outliers else None
        self.narrow = NarrowScales(
            np.zeros((n, sizes.narrow), np.uint8),
            np.zeros((n, sizes.narrow), np.uint8),
            np.zeros((sizes.super_rows, sizes.narrow), np.float16),
            np.zeros((sizes.super_rows, sizes.narrow), np.uint8),
        )

    def feed_back(self, hessian: F32) -> None:
        """Round group after group, each making good the errors of those before it.

        First the 2-bit groups, those whose inputs are largest before the others, then the 4-bit
        groups, whose finer steps can take up most. (On SmolLM2's layers E|x (W - Ŵ)ᵀ|² is 15 % less
        than in the natural order, and 7 % less than by the size of inputs alone.) A short last
        group stays last.
        """
        k = hessian.shape[0]
        groups = np.arange(k // GROUP)
        power = hessian.diagonal()[: len(groups) * GROUP].reshape(-1, GROUP).sum(1)
        groups = groups[np.lexsort((-power, self.wide[: len(groups)]))]
        columns = (groups[:, None] * GROUP + np.arange(GROUP)).reshape(-1)
        columns = np.concatenate((columns, np.arange(len(columns), k)))
        ordered = np.ascontiguousarray(hessian[np.ix_(columns, columns)])
        feedback = feedback_of(ordered, self.name)
        # The walk's own price of an error in column k is (error / U_kk)².
        self.importance[columns] = feedback.upper.diagonal() ** -2
        walk(
            np.ascontiguousarray(self.w[:, columns]),
            feedback,
            lambda now, at: self.quantize_columns(now, columns[at]),
            group=GROUP,
            enter_group=lambda now, at: self.enter_group(now, columns[at]),
        )

    def _outliers(self) -> NDArray[np.bool_]:
        """The largest weights of the 2-bit groups, weighed by what their channels count."""
        kept = np.zeros(self.w.shape, bool)
        if self.sizes.outliers:
            size = np.abs(self.w) * np.sqrt(self.importance)
            size[:, self.is_wide] = -1
            last = size.size - self.sizes.outliers
            kept.reshape(-1)[np.argpartition(size.reshape(-1), last)[last:]] = True
        return kept

    def enter_group(self, w: F32, columns: Columns) -> None:
        """Choose a 2-bit group's scales from its present weights [N, 16]."""
        if not self.is_wide[columns[0]]:
            self._choose(w[:, None], columns[None], np.array([self.number[columns[0] // GROUP]]))

    def _choose(self, w: F32, columns: Columns, numbers: Columns) -> None:
        """Scales of groups `numbers`, whose weights are [N, J, C] at `columns` [J, C]."""
        dense = np.where(self.kept[:, columns], np.float32(0), w)
        found = narrow_scales(
            dense, self.importance[columns], self.bits[numbers], self.search, self.name
        )
        self.narrow.sub_scales[:, numbers] = found.sub_scales
        self.narrow.sub_zeros[:, numbers] = found.sub_zeros
        self.narrow.super_scales[:, numbers] = found.super_scales
        self.narrow.super_zeros[:, numbers] = found.super_zeros

    def quantize_columns(self, w: F32, columns: Columns) -> F32:
        """Round columns of one group, [N, C]; what they decode to."""
        wide = bool(self.is_wide[columns[0]])
        if wide:
            step, zero = self.rows, self.row_zeros
        else:
            number = self.number[columns[0] // GROUP]
            step, zero = self._steps(number), self.narrow.sub_zeros[:, number].astype(np.float32)
        code = encode(w, step, zero, 15 if wide else 3)
        self.codes[:, columns] = code
        value = (code - zero[:, None]) * step[:, None]
        kept = self.kept[:, columns]
        if self.outliers is not None and kept.any():
            left = np.where(kept, w - value, 0)
            if np.abs(left).max() > MAX_SCALE:
                raise BadScheme(
                    f"{self.name}: an outlier exceeds {MAX_SCALE:.0f}, the largest float16; keep "
                    "this tensor float (--tensor-type NAME=float)"
                )
            left = left.astype(np.float16)
            self.outliers[:, columns] = left
            value += left
        return np.asarray(value, np.float32)

    def _steps(self, number: int) -> F32:
        one = NarrowScales(
            self.narrow.sub_scales[:, number : number + 1],
            self.narrow.sub_zeros[:, number : number + 1],
            self.narrow.super_scales[:, number : number + 1],
            self.narrow.super_zeros[:, number : number + 1],
        )
        return one.steps[:, 0]

    def quantize_all(self) -> None:
        """Without feedback: all whole 2-bit groups at once, then what each column becomes."""
        k = self.w.shape[1]
        starts = np.flatnonzero(self.wide == 0) * GROUP
        whole = starts[starts + GROUP <= k]
        if len(whole):
            columns = whole[:, None] + np.arange(GROUP)
            self._choose(self.w[:, columns], columns, self.number[whole // GROUP])
        for start in starts[len(whole) :]:  # a short last group
            columns = np.arange(start, k)
            self._choose(
                self.w[:, None, start:], columns[None], np.array([self.number[start // GROUP]])
            )
        for start in range(0, k, GROUP):
            columns = np.arange(start, min(start + GROUP, k))
            self.quantize_columns(self.w[:, columns], columns)

    def tensor(self, scheme: Scheme) -> QuantizedTensor:
        """What was chosen, as the format wants it."""
        rows, columns = np.nonzero(self.kept)  # row by row, columns rising
        start = np.zeros(len(self.w) + 1, np.int32)
        np.cumsum(np.bincount(rows, minlength=len(self.w)), out=start[1:])
        values = np.zeros(0, np.float16) if self.outliers is None else self.outliers[rows, columns]
        tables: dict[str, Array] = {
            "wide": self.wide,
            "sub_scales": self.narrow.sub_scales,
            "sub_zeros": self.narrow.sub_zeros,
            "super_scales": self.narrow.super_scales,
            "super_zeros": self.narrow.super_zeros,
            "row_start": start,
            "columns": columns.astype(np.int32),
            "outliers": values,
        }
        return QuantizedTensor(
            self.codes,
            self.rows.astype(np.float16)[:, None],
            self.row_zeros.astype(np.uint8)[:, None],
            scheme,
            tables,
        )
