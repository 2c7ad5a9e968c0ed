"""Fourier transforms (ONNX DFT, STFT) as products with constant matrices.

The matrices stay float in every scheme: ``apq.MatMul`` is no layer.
"""

from __future__ import annotations

import numpy as np

from apq_tvm.onnx_import.graph import Graph
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
    """DFT along one axis of constant length.

    Raises
    ------
    UnsupportedModel
        A length that is not known before run time.
    """
    steps, x = Steps(graph, node), node.inputs[0]
    shape = steps.shape(x)
    rank, parts = len(shape), steps.size(shape[-1], "last dimension")
    axis = int(node.attrs.get("axis", 1)) if graph.opset < 20 else -2
    if graph.opset >= 20 and steps.input(2):
        axis = _number(steps, steps.input(2), "axis")
    axis %= rank
    entries = steps.size(shape[axis], "signal length")
    inverse, onesided = (bool(node.attrs.get(k, 0)) for k in ("inverse", "onesided"))
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
    shape = steps.shape(x)
    rank = len(shape)
    others = [i for i in range(rank - 1) if i != axis]
    moved = steps.transpose(x, *others, axis, rank - 1)
    lead = tuple(shape[i] for i in others)
    if parts == 1:
        matrix = np.stack([matrix, np.zeros_like(matrix)], -1).reshape(matrix.shape[0], -1)
    y = transformed(steps, moved, lead, matrix)
    if parts == 1:
        y = steps.slice(y, rank - 1, 0, 1)
    back = [others.index(i) if i != axis else rank - 2 for i in range(rank - 1)]
    return steps.transpose(y, *back, rank - 1)


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
