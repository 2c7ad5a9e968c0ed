"""Which matrix of a file of codes is which weight of a model: by name, by shape, and by values.

Names lead to a matrix, and where there are none every matrix of the same shape may be it. Values
decide: a model's float weight and what the codes mean differ by no more than the rounding, and two
matrices that have nothing to do with each other by more than the length of either. So a file of
another model is noticed, and so is the order of rows that q and k have: llama.cpp's converter puts
those of every head in pairs for its rotary embedding, Hugging Face's models have halves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from apq_tvm.codes.gathers import gather_inputs
from apq_tvm.codes.matrix import CodesFile, Matrix, Reading, Rows, beside, values
from apq_tvm.codes.names import whole_of
from apq_tvm.errors import BadInput, BadScheme
from apq_tvm.formats import check_tensor
from apq_tvm.progress import Progress, Silent
from apq_tvm.types import (
    F32,
    WEIGHT_INPUT,
    AnyPath,
    Array,
    ImportedModel,
    QuantizedTensor,
)

FARTHEST = 0.7
"""Error of codes, relative to the weights, from which on they are of other weights: rounding to two
bits comes to 0.3, independent weights to 1.4."""

SAMPLE = 96
"""Rows that are compared, the first and the last among them."""


@dataclass(frozen=True)
class _Found:
    """Where the codes of a weight are: rows of one or several matrices, by one reading."""

    parts: tuple[tuple[Matrix, Rows], ...]
    reading: int
    error: float

    def rows(self) -> QuantizedTensor | F32 | None:
        """All rows; None where parts are of several kinds, or of columns in several orders."""
        orders = [() if matrix.order is None else matrix.order for matrix, _ in self.parts]
        if not all(np.array_equal(orders[0], order) for order in orders):
            return None
        return beside([matrix.readings[self.reading](rows) for matrix, rows in self.parts])

    @property
    def order(self) -> NDArray[np.int64] | None:
        """Of its columns, as `Matrix.order`."""
        return self.parts[0][0].order

    def error_of(self, wanted: Rows, weight: F32) -> float:
        """The largest relative distance of some rows of a part to those of the weight."""
        errors, start = [], 0
        for matrix, rows in self.parts:
            inside = wanted[(wanted >= start) & (wanted < start + len(rows))]
            if len(inside):
                reading, ours = matrix.readings[self.reading], matrix.sorted(weight[inside])
                errors.append(_distance(reading, rows[inside - start], ours))
            start += len(rows)
        return max(errors)

    def __str__(self) -> str:
        names = " + ".join(matrix.name for matrix, _ in self.parts)
        kinds = " + ".join(dict.fromkeys(matrix.kind for matrix, _ in self.parts))
        return f"{names}, {kinds}"


@dataclass(frozen=True)
class Kept:
    """A model with the codes of a file.

    Parameters
    ----------
    model : ImportedModel
        `quantized` has the codes, `weights` what they mean, `notes` where they came from.
    missing : mapping of str to str
        Name of every layer and table that has none → why.
    """

    model: ImportedModel
    missing: Mapping[str, str]


def read_codes(path: AnyPath) -> CodesFile:
    """Read a GGUF file, or the safetensors of AutoGPTQ or AWQ (a file or its folder).

    Raises
    ------
    BadInput
        It is missing, of another kind, or broken.
    """
    from apq_tvm.codes.gguf import read_gguf
    from apq_tvm.codes.packed import read_safetensors

    path = Path(path)
    if path.is_dir() or (path.is_file() and path.suffix == ".safetensors"):
        return read_safetensors(path)
    if not path.is_file():
        raise BadInput(f"{path}: no such file of codes; GGUF or safetensors are read")
    with path.open("rb") as file:
        mark = file.read(4)
    if mark != b"GGUF":
        raise BadInput(
            f"{path} is neither GGUF nor safetensors: files of codes are those, and never pickles"
        )
    return read_gguf(path)


def keep_codes(model: ImportedModel, path: AnyPath, progress: Progress | None = None) -> Kept:
    """Give every linear layer and table of a model the codes that a file has for it.

    Parameters
    ----------
    model : ImportedModel
    path : str or path
        GGUF, or safetensors of AutoGPTQ or AWQ.
    progress : Progress, optional

    Returns
    -------
    Kept

    Raises
    ------
    BadInput
        The file is broken, or of another model: the message names the nearest matrix.
    """
    progress = progress or Silent()
    file = read_codes(path)
    matcher = _Matcher(file)
    readers: dict[str, list[str]] = {}
    for node in model.nodes:
        if node.op in WEIGHT_INPUT:
            readers.setdefault(node.inputs[WEIGHT_INPUT[node.op]], []).append(node.name)
    quantized, weights, notes = dict(model.quantized), dict(model.weights), dict(model.notes)
    missing: dict[str, str] = {}
    orders: dict[str, NDArray[np.int64]] = {}
    kept = 0
    with progress.stage("codes", len(readers)):
        for weight, nodes in readers.items():
            progress.advance(weight)
            found = matcher.find(np.asarray(weights[weight], np.float32), (weight, *nodes))
            if isinstance(found, str):
                missing |= dict.fromkeys(nodes, found)
                continue
            whole = _whole(found, file.label)
            if whole is None:
                why = f"{found} of {file.label} are of several kinds, which one layer cannot have"
                missing |= dict.fromkeys(nodes, why)
                continue
            kept += 1
            weights[weight] = values(whole)
            if found.order is not None:
                orders[weight] = found.order
            if isinstance(whole, QuantizedTensor):
                quantized[weight] = whole
                notes[weight] = f"codes of {file.label} ({found})"
            else:
                quantized.pop(weight, None)
                notes[weight] = f"float in {file.label} ({found})"
    if not kept and matcher.worst is None and missing:
        layer, why = next(iter(missing.items()))
        raise BadInput(
            f"{path} has no codes for any weight of {model.name}; is it of another model? The "
            f"first, {layer}: {why}"
        )
    if not kept or matcher.strangers > kept:
        raise BadInput(_of_another(path, model, matcher, kept, len(readers)))
    model = replace(model, quantized=quantized, weights=weights, notes=notes)
    return Kept(gather_inputs(model, orders), missing)


def _whole(found: _Found, label: str) -> QuantizedTensor | F32 | None:
    """All rows, checked."""
    whole = found.rows()
    try:
        if isinstance(whole, QuantizedTensor):
            check_tensor(whole, f"{found} of {label}")
        elif whole is not None and not np.isfinite(whole).all():
            raise BadScheme(f"{found} of {label} holds a value that is not finite")
    except BadScheme as error:
        raise BadInput(str(error)) from error
    return whole


def _of_another(
    path: AnyPath, model: ImportedModel, matcher: _Matcher, kept: int, count: int
) -> str:
    """The error of a file that is of another model."""
    why = f"{kept} of {count} weights of {model.name} are in it"
    if matcher.worst is not None:
        weight, found = matcher.worst
        why += (
            f"; the codes of {found} are {found.error:.0%} away from {weight!r}, where rounding "
            f"would be less than {FARTHEST:.0%}"
        )
    return f"{path} is of another model: {why}. Give the ONNX file that these codes were made from"


class _Matcher:
    """Finds matrices by names, shapes and values; each is one weight's but for a head and its
    table."""

    def __init__(self, file: CodesFile) -> None:
        self.file = file
        self.strangers = 0
        self.worst: tuple[str, _Found] | None = None
        self._taken: set[str] = set()

    def find(self, weight: F32, names: tuple[str, ...]) -> _Found | str:
        """Where the codes of a weight [N, K] are, or why they are nowhere."""
        refusals: list[str] = []
        best: _Found | None = None
        for parts in self._named(weight.shape, names, refusals):
            best = _nearer(best, self._judged(weight, parts, refusals))
        if best is not None and best.error > FARTHEST:
            self.strangers += 1
            self.worst = self.worst or (names[0], best)
        if best is None or best.error > FARTHEST:
            for parts in self._shaped(weight):
                best = _nearer(best, self._judged(weight, parts, refusals))
        if best is not None and best.error <= FARTHEST:
            self._taken |= {matrix.name for matrix, _ in best.parts}
            return best
        if best is not None:
            refusals.append(f"{best} is {best.error:.0%} away, so it is of other weights")
        n, k = weight.shape
        why = "; ".join(dict.fromkeys(refusals)) or f"no matrix {n}x{k} is left that is close"
        return f"no codes in {self.file.label}: {why}"

    def _named(
        self, shape: tuple[int, ...], names: tuple[str, ...], refusals: list[str]
    ) -> Iterator[tuple[tuple[Matrix, Rows], ...]]:
        """Parts that names lead to, of the right shape."""
        have = self.file.matrices
        for aliases in dict.fromkeys(a for name in names for a in self.file.aliases(name)):
            parts = tuple((have[a], np.arange(have[a].shape[0])) for a in aliases if a in have)
            if not parts and len(aliases) == 1:
                parts = self._inside(aliases[0], shape)
            if not parts or len(parts) < len(aliases) > 1:
                continue
            rows = sum(len(mine) for _, mine in parts)
            if (rows, parts[0][0].shape[1]) == shape:
                yield parts
            else:
                why = parts[0][0].refusal or f"it is {rows}x{parts[0][0].shape[1]}"
                refusals.append(f"{aliases[0]}: {why}")

    def _inside(self, name: str, shape: tuple[int, ...]) -> tuple[tuple[Matrix, Rows], ...]:
        """Rows of a matrix that has several weights side by side."""
        found = whole_of(name)
        matrix = self.file.matrices.get(found[0]) if found else None
        if matrix is None or found is None or matrix.shape[1] != shape[1]:
            return ()
        total, n = matrix.shape[0], shape[0]
        _, index, count = found
        first = total - (count - index) * n if index else 0  # parts behind the first are alike
        if not 0 <= first <= total - n:
            return ()
        return ((matrix, np.arange(first, first + n)),)

    def _shaped(self, weight: F32) -> Iterator[tuple[tuple[Matrix, Rows], ...]]:
        """Matrices of the weight's shape that nothing has yet, whose first row is alike."""
        for matrix in self.file.matrices.values():
            if matrix.shape != weight.shape or matrix.name in self._taken or not matrix.readings:
                continue
            ends = np.array([0, weight.shape[0] - 1])
            away = float("inf")
            with suppress(BadInput):  # such a matrix is refused where its name is known
                away = _distance(matrix.readings[0], ends, matrix.sorted(weight[ends]))
            if away <= FARTHEST:
                yield ((matrix, np.arange(matrix.shape[0])),)

    def _judged(
        self, weight: F32, parts: tuple[tuple[Matrix, Rows], ...], refusals: list[str]
    ) -> _Found | None:
        """The order of rows and the reading of least error."""
        for matrix, _ in parts:
            if not matrix.readings:
                refusals.append(f"{matrix.name}: {matrix.refusal}")
                return None
        wanted = np.unique(np.linspace(0, len(weight) - 1, SAMPLE).round().astype(np.intp))
        best: _Found | None = None
        for reading in range(min(len(matrix.readings) for matrix, _ in parts)):
            for paired in (False, True):
                if paired and not any(_paired(matrix) for matrix, _ in parts):
                    continue
                tried = tuple((m, _halves(m, rows) if paired else rows) for m, rows in parts)
                found = _Found(tried, reading, 0.0)
                try:
                    error = found.error_of(wanted, weight)
                except BadInput as reason:
                    refusals.append(f"{found}: {reason}")
                    continue
                best = _nearer(best, replace(found, error=error))
        return best


def _nearer(one: _Found | None, other: _Found | None) -> _Found | None:
    if one is None or other is None:
        return one or other
    return other if other.error < one.error else one


def _paired(matrix: Matrix) -> bool:
    return matrix.heads > 0 and matrix.shape[0] % (2 * matrix.heads) == 0


def _halves(matrix: Matrix, rows: Rows) -> Rows:
    """Rows in pairs (0, 1), (2, 3), ... of every head, as two halves."""
    if not _paired(matrix):
        return rows
    return np.ascontiguousarray(rows.reshape(matrix.heads, -1, 2).swapaxes(1, 2).reshape(-1))


def _distance(reading: Reading, rows: Rows, ours: Array) -> float:
    """|codes' values - ours| / |ours|, infinite where values are not finite."""
    with np.errstate(over="ignore", invalid="ignore"):
        theirs = _decoded(reading(rows))
        away = float(np.linalg.norm((theirs - ours).astype(np.float64)))
    size = float(np.linalg.norm(ours.astype(np.float64)))
    if not np.isfinite(away):
        return float("inf")
    return away / size if size > 0 else (0.0 if away == 0 else float("inf"))


def _decoded(found: QuantizedTensor | F32) -> F32:
    try:
        return values(found)
    except BadScheme:  # scales that are not finite
        return np.full((1, 1), np.nan, np.float32)
