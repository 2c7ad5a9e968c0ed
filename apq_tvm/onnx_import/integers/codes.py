"""Integer codes that a file already holds: kept as they are, in one of our integer formats.

A weight that came quantized travels through the import twice: as its float32 meaning among the
weights of the `Graph`, which every pass may use, and as `Codes` beside it. What turns a matrix over
or multiplies it by a scale does the same to its codes. At the end each layer's codes become a
`QuantizedTensor`; **no code is ever changed**. What can change is the scale: our integer formats
store float16, so a float32 scale is rounded once and the largest relative change is noted. Groups
that are not ours become ours by repeating scales: a block of 512 is two of 256, one scale for the
whole tensor is one per row. Zero points that are no integers, or no codes, become minima
(`apq_tvm.formats.minimum`). Where even that cannot say it (a scale per input channel, scales beyond
float16), the layer stays float and the note says why.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from apq_tvm.errors import UnsupportedModel
from apq_tvm.formats import minimum
from apq_tvm.formats.integer import MAX_SCALE
from apq_tvm.formats.spelling import GROUP_SIZES
from apq_tvm.types import Array, Node, QuantizedTensor, Scheme

CODE_BITS = {"int8": 8, "uint8": 8, "int4": 4, "uint4": 4, "int2": 2, "uint2": 2}
"""Element types of ONNX whose values are codes, and their bits."""

LARGEST_CHANGE = 0.01
"""A scale that float16 changes by more than this share (deep among the subnormals) is not kept, nor
a minimum that it changes by more than this share of a scale."""


@dataclass(frozen=True)
class Codes:
    """A matrix of integers and what they mean: ``(value - zero) * scale``, in blocks.

    Parameters
    ----------
    values : ndarray of integers [R, C]
        As the file stores them: ``low .. low + 2^bits - 1``.
    bits : int
    low : int
        Least value: 0, or -2^(bits-1) where the element type is signed.
    scale : float32 [r, c]
        Entry ``[i // block[0], j // block[1]]`` scales ``values[i, j]``.
    zero : ndarray [r, c] or None
        Zero points in the numbering of `values`, integers or floats; None means 0.
    block : tuple of int
        Rows and columns that share a scale.
    source : str
        Where they come from, for notes: ``"MatMulNBits of 4 bits"``.
    """

    values: Array
    bits: int
    low: int
    scale: Array
    zero: Array | None
    block: tuple[int, int]
    source: str

    @property
    def transposed(self) -> Codes:
        """The codes of the matrix turned over."""
        zero = None if self.zero is None else self.zero.T
        return replace(
            self, values=self.values.T, scale=self.scale.T, zero=zero, block=self.block[::-1]
        )

    def times(self, factor: Array) -> Codes | None:
        """The codes of ``matrix * factor``; None if the factor is finer than the scales.

        Parameters
        ----------
        factor : float [], [1, C], [R, 1] or [C]
        """
        rows, columns = self.values.shape
        wide = factor.astype(np.float32).reshape((1,) * (2 - factor.ndim) + factor.shape)
        if wide.shape == (1, 1):
            return replace(self, scale=(self.scale * wide).astype(np.float32))
        if wide.shape not in ((1, columns), (rows, 1), (1, 1)):
            return None
        block = (
            1 if wide.shape[0] == rows and rows > 1 else self.block[0],
            1 if wide.shape[1] == columns and columns > 1 else self.block[1],
        )
        scale = self._spread(self.scale, block) * wide
        zero = None if self.zero is None else self._spread(self.zero, block)
        return replace(self, scale=scale.astype(np.float32), zero=zero, block=block)

    def reordered(self, columns: Array) -> Codes | None:
        """The codes of ``matrix[:, columns]``; None if columns have scales of their own."""
        if self.block[1] != self.values.shape[1]:
            return None
        return replace(self, values=np.ascontiguousarray(self.values[:, columns]))

    def minus(self, offset: Array) -> Codes | None:
        """The codes of ``matrix - offset`` while the scale is still 1; else None."""
        if self.zero is not None or not bool((self.scale == 1).all()):
            return None
        ones = replace(self, scale=np.ones((1, 1), np.float32), block=self.values.shape)
        spread = ones.times(offset)
        if spread is None:
            return None
        scale = np.ones_like(spread.scale)
        return replace(spread, scale=scale, zero=spread.scale)

    def matrices(self, shape: tuple[int, ...]) -> Codes:
        """The codes of a stack [..., K, N], whose matrices lie one below the other: [... K, N].

        A weight of more than two axes may be [Cout, everything else] instead (`of_dequantize`).
        No block is then of more than one matrix.
        """
        k, n = shape[-2:]
        rows, width = self.block[0] * (self.values.shape[1] // n), min(self.block[1], n)
        made = replace(self, values=self.values.reshape(-1, n), block=(rows, width))
        if rows <= k:
            return made

        def repeated(entries: Array) -> Array:
            return np.repeat(entries, rows // k, axis=0)[: len(made.values) // k]

        zero = None if self.zero is None else repeated(self.zero)
        return replace(made, scale=repeated(self.scale), zero=zero, block=(k, width))

    def entry(self, shape: tuple[int, ...], axis: int, index: int) -> Codes:
        """Of a stack of this shape (`matrices`) the part ``[index : index + 1]`` along an axis."""
        return self._each(shape, lambda array: array.take([index], axis), self.block)

    def side_by_side(self, shape: tuple[int, ...]) -> Codes:
        """Of a stack of this shape (`matrices`) all matrices in one, [K, ... N]."""

        def beside(array: Array) -> Array:
            wide = array.reshape(-1, *array.shape[-2:]).swapaxes(0, 1)
            return wide.reshape(len(wide), -1)

        return self._each(shape, beside, self.block)

    def turned(self, shape: tuple[int, ...]) -> Codes:
        """Of a stack of this shape (`matrices`) each matrix turned over."""
        return self._each(shape, lambda array: array.swapaxes(-1, -2), self.block[::-1])

    def _each(
        self, shape: tuple[int, ...], change: Callable[[Array], Array], block: tuple[int, int]
    ) -> Codes:
        def changed(entries: Array) -> Array:
            made = change(entries.reshape(*shape[:-2], -1, entries.shape[1]))
            return made.reshape(-1, made.shape[-1])

        zero = None if self.zero is None else changed(self.zero)
        return replace(
            self, values=changed(self.values), scale=changed(self.scale), zero=zero, block=block
        )

    def _spread(self, entries: Array, block: tuple[int, int]) -> Array:
        """Entries of blocks as entries of smaller blocks: one row or column each, or unchanged."""
        rows, columns = self.values.shape
        if block[0] != self.block[0]:
            entries = np.repeat(entries, self.block[0], axis=0)[:rows]
        if block[1] != self.block[1]:
            entries = np.repeat(entries, self.block[1], axis=1)[:, :columns]
        return entries


def of_integers(array: Array, source: str) -> Codes | None:
    """A constant matrix of code type as codes of scale 1; None if it is no such matrix."""
    bits = CODE_BITS.get(array.dtype.name)
    if bits is None or array.ndim != 2 or not array.size:
        return None
    low = -(1 << (bits - 1)) if array.dtype.name.startswith("int") else 0
    return Codes(array, bits, low, np.ones((1, 1), np.float32), None, array.shape, source)


def of_dequantize(
    x: Array, scale: Array, zero: Array | None, attrs: Mapping[str, Any]
) -> Codes | None:
    """What a DequantizeLinear of a constant matrix means; None if it is none of codes.

    Weights of a convolution [Cout, ...] are the matrix [Cout, everything else] where a scale is for
    an output channel or for all. With scales along their last axes, [..., K, N] are matrices one
    below the other (`Codes.matrices`).
    """
    if x.ndim > 2:
        per_row = scale.size == 1 or int(attrs.get("axis", 1)) % x.ndim == 0
        if not x.size:
            return None
        if not per_row or attrs.get("block_size", 0):
            return _of_stack(x, scale, zero, attrs)
        x, attrs = x.reshape(x.shape[0], -1), {"axis": 0}
    codes = of_integers(x, "")
    if codes is None:
        return None
    axis, size = int(attrs.get("axis", 1)) % 2, int(attrs.get("block_size", 0))
    source = f"DequantizeLinear of {x.dtype.name}"
    if size:
        length = min(size, x.shape[axis])
        block = (length, 1) if axis == 0 else (1, length)
        entries = scale
        source += f" in blocks of {size}"
    elif scale.size == 1:
        block, entries = x.shape, scale.reshape(1, 1)
    else:
        block = (1, x.shape[1]) if axis == 0 else (x.shape[0], 1)
        entries = scale.reshape((-1, 1) if axis == 0 else (1, -1))
        source += f" along axis {axis}"
    zeros = None if zero is None else zero.reshape(entries.shape).astype(np.int32)
    return replace(codes, scale=entries.astype(np.float32), zero=zeros, block=block, source=source)


def _of_stack(x: Array, scale: Array, zero: Array | None, attrs: Mapping[str, Any]) -> Codes | None:
    """`of_dequantize` of matrices one below the other; None where scales are along other axes."""
    (k, n), size = x.shape[-2:], int(attrs.get("block_size", 0))
    axis = int(attrs.get("axis", 1)) % x.ndim - x.ndim
    codes = of_integers(x.reshape(-1, n), f"DequantizeLinear of {x.dtype.name}")
    if codes is None or axis < -2 or (size and x.shape[axis] % size):
        return None

    def entries(array: Array) -> Array:
        if not size:  # one for each row or column of every matrix
            one = array.reshape((-1, 1) if axis == -2 else (1, -1))
            array = np.broadcast_to(one, (*x.shape[:-2], *one.shape))
        return array.reshape(-1, array.shape[-1])

    if size:
        block = (size, 1) if axis == -2 else (1, size)
        source = f"{codes.source} in blocks of {size}"
    else:
        block = (1, n) if axis == -2 else (k, 1)
        source = f"{codes.source} along axis {axis}"
    zeros = None if zero is None else entries(zero).astype(np.int32)
    scales = entries(scale).astype(np.float32)
    return replace(codes, scale=scales, zero=zeros, block=block, source=source)


def follow(node: Node, weights: Mapping[str, Array], codes: Mapping[str, Codes]) -> Codes | None:
    """Codes of the constant that `node` computes from constants, if it is a quantized matrix.

    Besides DequantizeLinear this knows the spelling of exporters that have only older operators:
    ``Cast`` of the integers to float, less zero points, times scales.

    Raises
    ------
    UnsupportedModel
        Scales that are NaN or infinite.
    """
    x = node.inputs[0]
    given = codes.get(x)
    if node.op == "DequantizeLinear":
        check_scales(weights[node.inputs[1]], node.inputs[1])
        zero = weights[node.inputs[2]] if len(node.inputs) > 2 else None
        return of_dequantize(weights[x], weights[node.inputs[1]], zero, node.attrs)
    if node.op == "Cast":
        return given or of_integers(weights[x], f"{weights[x].dtype.name} times scales")
    if node.op == "Transpose" and given is not None:
        return _moved(given, weights[x].shape, node.attrs.get("perm"))
    if node.op == "Mul" and (given is not None or node.inputs[1] in codes):
        by = weights[node.inputs[1] if given is not None else x]
        return (given or codes[node.inputs[1]]).times(by)
    if node.op == "Div" and given is not None:
        with np.errstate(divide="ignore"):
            return given.times(1 / weights[node.inputs[1]])
    if node.op == "Sub" and given is not None:
        return given.minus(weights[node.inputs[1]])
    return None


def _moved(codes: Codes, shape: tuple[int, ...], perm: Sequence[int] | None) -> Codes | None:
    """The codes of a transposed weight, where axes before the last two stay in their places."""
    rank = len(shape)
    order = tuple(reversed(range(rank))) if perm is None else tuple(perm)
    if order == tuple(range(rank)):
        return codes
    if rank < 2 or order != (*range(rank - 2), rank - 1, rank - 2):
        return None
    return codes.matrices(shape).turned(shape)


def check_scales(scale: Array, name: str, reader: str = "") -> None:
    """Refuse scales that are NaN or infinite.

    Raises
    ------
    UnsupportedModel
        Naming them and the first bad place.
    """
    bad = ~np.isfinite(scale.astype(np.float32))
    if bad.any():
        at = ", ".join(map(str, np.unravel_index(int(bad.argmax()), bad.shape)))
        raise UnsupportedModel(
            f"scales {name!r}{reader}: {int(bad.sum())} of {scale.size} are NaN or infinite, the "
            f"first at [{at}]; quantize the model again"
        )


def to_tensor(codes: Codes) -> tuple[QuantizedTensor | None, str]:
    """Codes of a weight [N, K] as a tensor of ours.

    Returns
    -------
    QuantizedTensor or None
        With exactly these codes, numbered from 0; activations are left for the user to choose. None
        if no integer format of ours can say what they mean.
    str
        What was rounded, or why there is no tensor.
    """
    n, k = codes.values.shape
    scale, zero, size = codes.scale, codes.zero, codes.block[1]
    where = f"codes of the file ({codes.source})"
    if codes.block[0] != 1:
        scale = np.repeat(scale, codes.block[0], axis=0)[:n]
        zero = None if zero is None else np.repeat(zero, codes.block[0], axis=0)[:n]
    group = -1
    if scale.shape[1] > 1:
        fitting = [g for g in GROUP_SIZES if size % g == 0]
        if not fitting:
            return None, f"{where} share a scale in groups of {size} along K={k}; ours are of " + (
                f"{', '.join(map(str, GROUP_SIZES))} or a whole row"
            )
        group = fitting[-1]
        count = -(-k // group)
        scale = np.repeat(scale, size // group, axis=1)[:, :count]
        zero = None if zero is None else np.repeat(zero, size // group, axis=1)[:, :count]
    half, change, reason = _round_scales(scale)
    if reason:
        return None, f"{where} have {reason}"
    numbered = codes.values if not codes.low else codes.values.astype(np.int16) - codes.low
    values = np.ascontiguousarray(numbered, np.uint8)
    rounded = f"; scales rounded to float16 change by at most {change:.2%}" if change else ""
    zeros, reason = _zeros(zero, codes, scale.shape)
    if not reason:
        scheme = Scheme(codes.bits, zeros is not None, group_size=group)
        return QuantizedTensor(values, half, zeros, scheme), where + rounded
    if zero is None or codes.bits not in minimum.BITS or not np.isfinite(zero).all():
        return None, f"{where} have {reason}"
    if group == -1:
        group, count = GROUP_SIZES[-1], -(-k // GROUP_SIZES[-1])
        half, scale, zero = (np.repeat(array, count, axis=1) for array in (half, scale, zero))
    mins, off = _minima(scale, zero.astype(np.float64) - codes.low)
    if off > LARGEST_CHANGE:
        return None, f"{where} have {reason}, which float16 can only say {off:.0%} of a step off"
    scheme = minimum.scheme(codes.bits, group)
    note = f"{where}{rounded}; {reason}, but minima in float16, at most {off:.2%} of a step off"
    return QuantizedTensor(values, half, None, scheme, tables={"mins": mins}), note


def _round_scales(scale: Array) -> tuple[Any, float, str]:
    """Scales as float16, their largest relative change, and why that is too much."""
    with np.errstate(over="ignore"):
        half = np.ascontiguousarray(scale.astype(np.float16))
    if not np.isfinite(half).all():
        largest = float(np.abs(scale).max())
        return half, 0.0, f"a scale of {largest:g}, beyond {MAX_SCALE:.0f}, the largest float16"
    given = scale.astype(np.float64)
    change = np.abs(half.astype(np.float64) - given)
    share = np.divide(change, np.abs(given), out=np.zeros_like(change), where=given != 0)
    worst = float(share.max(initial=0.0))
    if worst > LARGEST_CHANGE:
        at = float(np.abs(given).reshape(-1)[int(share.argmax())])
        return half, worst, f"a scale of {at:g}, which float16 can only say {worst:.0%} off"
    return half, worst, ""


def _minima(scale: Array, zero: Array) -> tuple[Any, float]:
    """``scale * zero`` as float16, and by how many scales it is off at most."""
    exact = scale.astype(np.float64) * zero
    with np.errstate(over="ignore"):
        half = np.ascontiguousarray(exact.astype(np.float16))
    change, steps = np.abs(half - exact), np.abs(scale.astype(np.float64))
    share = np.divide(change, steps, out=np.zeros_like(change), where=steps != 0)
    return half, float(share.max(initial=0.0))


def _zeros(zero: Array | None, codes: Codes, shape: tuple[int, ...]) -> tuple[Any, str]:
    """Zero points numbered like the codes, None where all are the middle; and what is wrong."""
    middle = 1 << (codes.bits - 1)
    if zero is None:
        zero = np.zeros(shape, np.int32)
    shifted = zero.astype(np.float64) - codes.low
    if not np.isfinite(shifted).all() or bool((shifted != np.rint(shifted)).any()):
        return None, "zero points that are no integers"
    if bool((shifted < 0).any() or (shifted >= 2 * middle).any()):
        return None, f"zero points outside 0..{2 * middle - 1}"
    if bool((shifted == middle).all()):
        return None, ""
    return np.ascontiguousarray(shifted, np.uint8), ""


__all__ = ["CODE_BITS", "Codes", "check_scales", "follow", "of_integers", "to_tensor"]
