"""Fourier transforms (ONNX DFT, STFT) as products with matrices.

The matrices stay float in every scheme: ``apq.MatMul`` is no layer. They are constants, but for a
transform along an axis of any length, which computes its own.
"""

from __future__ import annotations

import numpy as np

from apq_tvm.onnx_import.graph import Graph, type_number
from apq_tvm.onnx_import.operators.steps import Steps
from apq_tvm.onnx_import.symbolic.dims import Dim, floordiv, product
from apq_tvm.types import Array, Node

LARGEST = 1 << 24
"""Entries of a matrix: frames of 4096 have half as many."""


def dft_matrix(entries: int, length: int, parts: int, outputs: int, inverse: bool) -> Array:
    """The transform as a matrix [entries * parts, outputs * 2].

    Parameters
    ----------
    entries : int
        Of the signal; those behind `length` are cut off.
    length : int
        Of the transform; a shorter signal is padded with 0.
    parts : int
        1 for a real signal, 2 where real and imaginary parts lie side by side.
    outputs : int
        Frequencies wanted.
    inverse : bool

    Returns
    -------
    ndarray
        float64.

    Raises
    ------
    ValueError
        The matrix is empty or larger than a file may ask for.
    """
    if not (0 < length <= LARGEST and 0 < entries * outputs <= LARGEST):
        raise ValueError(
            f"a transform of {entries} entries, padded to {length}, into {outputs} frequencies; a "
            f"matrix of at most {LARGEST} is made"
        )
    t, k = np.arange(entries)[:, None], np.arange(outputs)[None, :]
    angle = (t * k % length) * (2 * np.pi / length) * (1 if inverse else -1)
    wave = np.exp(1j * angle) * (t < length) / (length if inverse else 1)
    matrix = np.zeros((entries, parts, outputs, 2))
    matrix[:, 0, :, 0], matrix[:, 0, :, 1] = wave.real, wave.imag
    if parts == 2:
        matrix[:, 1, :, 0], matrix[:, 1, :, 1] = -wave.imag, wave.real
    return matrix.reshape(entries * parts, outputs * 2)


def transformed(steps: Steps, x: str, lead: tuple[Dim, ...], matrix: Array) -> str:
    """`x` as [*lead, entries * parts] times `matrix`, as [*lead, outputs, 2]."""
    rows = steps.reshape(x, product(lead), matrix.shape[0])
    dtype = str(steps.graph.dtype(x))
    weight = steps.graph.add_weight(f"{steps.node.name}.dft", matrix.astype(dtype))
    plain = {"perm_a": (0, 1), "perm_b": (0, 1), "perm_out": (0, 1)}
    y = steps("apq.MatMul", rows, weight, **plain)
    return steps.reshape(y, *lead, matrix.shape[1] // 2, 2)


def dft(graph: Graph, node: Node) -> list[Node]:
    """DFT along one axis.

    Raises
    ------
    UnsupportedModel
        A length that is not known before run time, but for that of the whole axis; of a half
        spectrum's inverse that too.
    """
    steps, x = Steps(graph, node), node.inputs[0]
    shape = steps.shape(x)
    rank, parts = len(shape), steps.size(shape[-1], "last dimension")
    axis = int(node.attrs.get("axis", 1)) if graph.opset < 20 else -2
    if graph.opset >= 20 and steps.input(2):
        axis = _number(steps, steps.input(2), "axis")
    axis %= rank
    inverse, onesided = (bool(node.attrs.get(k, 0)) for k in ("inverse", "onesided"))
    if not isinstance(shape[axis], int) and not steps.input(1) and not (inverse and onesided):
        return steps.done(_of_any_length(steps, x, axis, inverse, onesided))
    entries = steps.size(shape[axis], "signal length")
    length = _number(steps, steps.input(1), "dft_length") if steps.input(1) else entries
    if inverse and onesided:
        return steps.done(_real_inverse(steps, x, axis, entries, length if steps.input(1) else 0))
    outputs = length // 2 + 1 if onesided else length
    matrix = dft_matrix(entries, length, parts, outputs, inverse)
    return steps.done(_along(steps, x, axis, matrix, 2))


def _real_inverse(steps: Steps, x: str, axis: int, entries: int, length: int) -> str:
    """From the first half of a spectrum to a real signal: the other half is its mirror image."""
    length = length or 2 * (entries - 1)
    kept = min(entries, length // 2 + 1)
    half = dft_matrix(entries, length, 2, length, True).reshape(entries, 2, length, 2)
    half[kept:] = 0
    mirrored = np.arange(1, length - length // 2)  # those that stand for two
    half[mirrored[mirrored < kept]] *= 2
    return _along(steps, x, axis, half[..., :1].reshape(entries * 2, length), 1)


def _along(steps: Steps, x: str, axis: int, matrix: Array, parts: int) -> str:
    """The transform along `axis` of [..., parts]."""
    rank = len(steps.shape(x))
    moved, lead = _axis_last(steps, x, axis)
    if parts == 1:
        matrix = np.stack([matrix, np.zeros_like(matrix)], -1).reshape(matrix.shape[0], -1)
    y = transformed(steps, moved, lead, matrix)
    if parts == 1:
        y = steps.slice(y, rank - 1, 0, 1)
    return _axis_back(steps, y, axis)


def _axis_last(steps: Steps, x: str, axis: int) -> tuple[str, tuple[Dim, ...]]:
    """`x` with `axis` before its last one, of parts; the dimensions before that."""
    shape = steps.shape(x)
    others = [i for i in range(len(shape) - 1) if i != axis]
    moved = steps.transpose(x, *others, axis, len(shape) - 1)
    return moved, tuple(shape[i] for i in others)


def _axis_back(steps: Steps, y: str, axis: int) -> str:
    rank = len(steps.shape(y))
    others = [i for i in range(rank - 1) if i != axis]
    back = [others.index(i) if i != axis else rank - 2 for i in range(rank - 1)]
    return steps.transpose(y, *back, rank - 1)


def _of_any_length(steps: Steps, x: str, axis: int, inverse: bool, onesided: bool) -> str:
    """The transform of a whole axis, whose cosines and sines are computed in every run."""
    length, dtype = steps.shape(x)[axis], str(steps.graph.dtype(x))
    outputs = floordiv(length, 2) + 1 if onesided else length
    count = steps.dim(length)
    t, k = steps.reshape(steps.range(length), length, 1), steps.range(outputs)
    turns = steps("Cast", steps("Mod", steps("Mul", t, k), count), to=type_number(dtype))
    size = steps("Cast", count, to=type_number(dtype))
    angle = steps("Mul", turns, steps("Div", steps.number(2 * np.pi, dtype), size))
    cosines, sines = steps("Cos", angle), steps("Sin", angle)
    moved, lead = _axis_last(steps, x, axis)
    last = len(lead) + 1
    parts = [
        steps.reshape(steps.slice(moved, last, i, i + 1), *lead, length)
        for i in range(steps.size(steps.shape(x)[-1], "last dimension"))
    ]
    real, imaginary = steps("MatMul", parts[0], cosines), steps("MatMul", parts[0], sines)
    if not inverse:
        imaginary = steps("Neg", imaginary)
    if len(parts) == 2:
        sign = "Sub" if inverse else "Add"
        real = steps(sign, real, steps("MatMul", parts[1], sines))
        imaginary = steps("Add", imaginary, steps("MatMul", parts[1], cosines))
    both = [steps.reshape(part, *lead, outputs, 1) for part in (real, imaginary)]
    y = steps("Concat", *both, axis=last)
    return _axis_back(steps, steps("Div", y, size) if inverse else y, axis)


def stft(graph: Graph, node: Node) -> list[Node]:
    """STFT: frames of the signal, each times the window, transformed.

    Raises
    ------
    UnsupportedModel
        Step or frame length are not known before run time.
    """
    steps, signal, window = Steps(graph, node), node.inputs[0], ""
    shape = steps.shape(signal)
    parts = steps.size(shape[2], "last dimension") if len(shape) == 3 else 1
    step = _number(steps, node.inputs[1], "frame_step")
    window = steps.input(2)
    if steps.input(3):
        length = _number(steps, steps.input(3), "frame_length")
    elif window:
        length = steps.size(steps.shape(window)[0], "window length")
    else:
        raise steps.refuse("it has neither a window nor a frame length")
    if isinstance(shape[1], int) and shape[1] < length:
        raise steps.refuse(f"its signal of {shape[1]} is shorter than a frame of {length}")
    count = floordiv(shape[1] - length, step) + 1
    starts = steps("Mul", steps.range(count), steps.number(step, "int64"))
    offsets = steps.constant(np.arange(length, dtype=np.int64))
    places = steps("Add", steps.reshape(starts, count, 1), offsets)
    flat = steps.reshape(signal, shape[0], shape[1], parts)
    frames = steps("Gather", flat, places, axis=1)  # [batch, count, length, parts]
    if window:
        size = steps.size(steps.shape(window)[0], "window length")
        if size != length:
            raise steps.refuse(f"its window of {size} does not have the frame length {length}")
        frames = steps("Mul", frames, steps.reshape(window, length, 1))
    onesided = bool(node.attrs.get("onesided", 1))
    outputs = length // 2 + 1 if onesided else length
    matrix = dft_matrix(length, length, parts, outputs, False)
    return steps.done(transformed(steps, frames, (shape[0], count), matrix))


def _number(steps: Steps, value: str, what: str) -> int:
    """A constant integer."""
    from apq_tvm.onnx_import.symbolic.values import contents

    found = contents(steps.graph, value)
    if found is None or found.size != 1 or not isinstance(found.reshape(-1)[0], int):
        raise steps.refuse(f"its {what} {value!r} is not known before run time; make it a constant")
    number = int(found.reshape(-1)[0])
    if not 0 < number <= LARGEST:
        raise steps.refuse(f"its {what} is {number}, not 1 to {LARGEST}")
    return number
