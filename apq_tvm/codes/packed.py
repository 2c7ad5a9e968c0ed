"""Matrices of AutoGPTQ's and AWQ's safetensors: int32 words of codes, zero points, scales.

==========  ================================  ====================================================
array       AutoGPTQ                          AWQ ("gemm")
==========  ================================  ====================================================
qweight     int32 [K bits / 32, N], along K   int32 [K, N bits / 32], along N in `AWQ_ORDER`
qzeros      int32 [G, N bits / 32], along N   int32 [G, N bits / 32], along N in `AWQ_ORDER`
scales      float16 [G, N]                    float16 [G, N]
g_idx       int32 [K], the group of a column
==========  ================================  ====================================================

Both mean ``scale (code - zero)``: our `W4zA8g128` and its like, exact, at 4 + (16 + 8) / 128 bits;
`W4A8g128` where all zero points are the middle.
AutoGPTQ stores zero points less 1 in its first version and as they are in its second: the float
weights of the model decide (auto_gptq/nn_modules/qlinear, AutoAWQ's awq/utils/packing_utils.py).
Codes of 2, 3, 4 and 8 bits are read; those of 3 lie across words. Columns whose groups are no runs
(``desc_act``) are sorted by group (`apq_tvm.formats.order`). Safetensors are opened, no pickles.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apq_tvm.codes.matrix import CodesFile, Matrix, Rows
from apq_tvm.codes.names import module_names
from apq_tvm.errors import BadInput, BadScheme
from apq_tvm.formats.order import column_order
from apq_tvm.formats.spelling import GROUP_SIZES
from apq_tvm.types import Array, QuantizedTensor, Scheme

BITS = (2, 3, 4, 8)
"""Of codes that AutoGPTQ writes."""

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Column, of eight, of each code of a word of AWQ."""

_WORD = 32


def read_safetensors(path: Path) -> CodesFile:
    """What a safetensors file, or a folder of such, has of packed matrices.

    Raises
    ------
    BadInput
        It is broken, has no packed matrix, or names something outside its folder.
    """
    files = _files(path)
    arrays: dict[str, tuple[Path, tuple[int, ...], str]] = {}
    for file in files:
        arrays |= {name: (file, *what) for name, what in _listed(file).items()}
    ends = ".qweight"
    matrices = {}
    for name in arrays:
        if name.endswith(ends):
            matrix = _matrix(name[: -len(ends)], arrays)
            matrices[matrix.name] = matrix
    if not matrices:
        raise BadInput(
            f"{path} has no array called *.qweight: it is no file of AutoGPTQ or AWQ (a model "
            "quantized otherwise is compiled from its ONNX file)"
        )
    return CodesFile(path.name, matrices, module_names)


def _files(path: Path) -> list[Path]:
    """The file, or those of a folder, none of which lies elsewhere."""
    if path.is_file():
        return [path]
    home = path.resolve()
    found = sorted(path.glob("*.safetensors"))
    for file in found:
        if file.resolve().parent != home:
            raise BadInput(f"{file} is a link to {file.resolve()}, out of its folder")
    if not found:
        raise BadInput(f"{path} has no *.safetensors")
    return found


def _listed(file: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and type of every array."""
    with _opened(file) as opened:
        slices = {name: opened.get_slice(name) for name in opened.keys()}
        return {name: (tuple(s.get_shape()), str(s.get_dtype())) for name, s in slices.items()}


class _opened:
    """A safetensors file; what it raises is of our tree."""

    def __init__(self, file: Path) -> None:
        self.file, self._stack = file, ExitStack()

    def __enter__(self) -> Any:
        from safetensors import SafetensorError, safe_open

        try:
            return self._stack.enter_context(safe_open(self.file, "numpy"))
        except (SafetensorError, OSError, ValueError) as error:
            raise BadInput(f"{self.file} is no readable safetensors file: {error}") from error

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def _matrix(name: str, arrays: Mapping[str, tuple[Path, tuple[int, ...], str]]) -> Matrix:
    """What a packed matrix is, by the shapes of its arrays."""

    def of(part: str) -> tuple[tuple[int, ...], str]:
        if f"{name}.{part}" not in arrays:
            raise BadInput(f"{name}: there is qweight, but no {part}")
        return arrays[f"{name}.{part}"][1:]

    (words, word), (scales, half), (zeros, _) = of("qweight"), of("scales"), of("qzeros")
    if word != "I32" or any(len(shape) != 2 for shape in (words, scales, zeros)):
        raise BadInput(f"{name}.qweight is {word} {list(words)}; a matrix of int32 is needed")
    groups, n = scales
    awq = words[1] != n
    width = zeros[1] * _WORD  # bits of a row of zero points
    bits = width // n if n and width % n == 0 else 0
    k = words[0] if awq else words[0] * _WORD // max(bits, 1)
    kind = f"{'AWQ' if awq else 'GPTQ'} of {bits} bits"
    sound = bits and zeros[0] == groups and groups and k % groups == 0
    if not sound or (awq and words[1] * _WORD != n * bits):
        shapes = f"qweight {list(words)}, qzeros {list(zeros)}, scales {list(scales)}"
        return Matrix(name, kind, (n, k), (), f"its arrays contradict each other: {shapes}")
    size = k // groups
    why = ""
    if bits not in BITS or (awq and bits != 4):
        why = f"codes of {bits} bits are not read: 2, 3, 4 and 8 are (AWQ: 4)"
    elif groups > 1 and size not in GROUP_SIZES:
        why = f"groups of {size}: {', '.join(map(str, GROUP_SIZES))} or a whole row are possible"
    elif half != "F16":
        why = f"scales are {half}: float16 are read"
    if why:
        return Matrix(name, kind, (n, k), (), why)
    load = partial(_load, name, dict(arrays))
    index = load("g_idx")
    try:
        order = None if index is None else _order(index, k, size)
    except BadScheme as error:
        return Matrix(name, kind, (n, k), (), str(error))
    scheme = Scheme(bits, True, group_size=-1 if groups == 1 else size)
    shifts = (0,) if awq else (1, 0)
    readings = tuple(partial(_read, load, scheme, awq, order, shift) for shift in shifts)
    return Matrix(name, kind, (n, k), readings, order=order)


def _order(index: Array, k: int, size: int) -> NDArray[np.int64] | None:
    """The order of columns that ``g_idx`` asks for.

    Raises
    ------
    BadScheme
        It is none of K groups.
    """
    if index.dtype.kind not in "iu" or index.size != k:
        raise BadScheme(f"g_idx is {index.dtype} {list(index.shape)}; {k} integers are needed")
    return column_order(index, size)


def _load(name: str, arrays: Mapping[str, tuple[Path, tuple[int, ...], str]], part: str) -> Any:
    """An array of the matrix, None if it has none such."""
    if f"{name}.{part}" not in arrays:
        return None
    with _opened(arrays[f"{name}.{part}"][0]) as opened:
        return opened.get_tensor(f"{name}.{part}")


def unpack(words: Array, bits: int, order: tuple[int, ...] = ()) -> Array:
    """Codes of the last axis of int32 words, lowest bits first: uint8 [..., 32 W / bits].

    Parameters
    ----------
    words : int32 [..., W]
    bits : int
        Codes of 3 bits lie across words: 32 in three of them.
    order : tuple of int
        Which code of a word comes where; as they are by default.
    """
    little = np.ascontiguousarray(words, "<i4").view(np.uint8)
    digits = np.unpackbits(little, axis=-1, bitorder="little")
    codes = np.packbits(digits.reshape(*words.shape[:-1], -1, bits), axis=-1, bitorder="little")
    codes = codes[..., 0]
    if order:
        codes = codes.reshape(*codes.shape[:-1], -1, len(order))[..., np.argsort(order)]
    return codes.reshape(*words.shape[:-1], -1)


def _read(
    load: Any, scheme: Scheme, awq: bool, order: NDArray[np.int64] | None, shift: int, rows: Rows
) -> QuantizedTensor:
    """Some rows, their columns in `order`; `shift` is what zero points are stored less by.

    Raises
    ------
    BadInput
        Zero points are no codes.
    """
    bits, within = scheme.bits, AWQ_ORDER if awq else ()
    words = load("qweight")
    if awq:
        codes = unpack(words, bits, within).T[rows]
    else:
        codes = unpack(np.ascontiguousarray(words.T[rows]), bits)
    if order is not None:
        codes = codes[:, order]
    zeros = unpack(load("qzeros"), bits, within).T[rows].astype(np.int16) + shift
    if int(zeros.max()) >> bits:
        raise BadInput(f"a zero point is {int(zeros.max())}, no code of {bits} bits")
    scales = np.ascontiguousarray(load("scales").T[rows])
    codes = np.ascontiguousarray(codes)
    if bool((zeros == 1 << (bits - 1)).all()):  # symmetric: the middle needs no telling
        return QuantizedTensor(codes, scales, None, replace(scheme, zero_points=False))
    return QuantizedTensor(codes, scales, np.ascontiguousarray(zeros, np.uint8), scheme)
