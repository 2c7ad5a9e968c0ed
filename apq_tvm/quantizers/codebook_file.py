"""Codebook files: safetensors with the codebooks of one or several schemes, for other models.

One array per scheme, named by its spelling without activations (``cb2``, ``cb3c8``), int8 [C,
2^bits]; the metadata say which model they were learned on. A few hundred bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from apq_tvm.errors import ApqError, BadInput, BadScheme
from apq_tvm.formats import parse_scheme
from apq_tvm.formats.codebook import NAME, check_codebooks, codebook_count
from apq_tvm.progress import Progress, Silent
from apq_tvm.quantizers.families.codebook_learn import learn
from apq_tvm.quantizers.inputs.calibration_file import read_arrays, write_arrays
from apq_tvm.types import AnyPath, ImportedModel, Scheme

VERSION = "1"

Books = Mapping[str, NDArray[np.int8]]
"""Spelling of a scheme's weights → its codebooks."""


def save_codebooks(path: AnyPath, books: Books, source: str) -> None:
    """Write codebooks.

    Parameters
    ----------
    path : str or path
    books : mapping of str to int8 [C, 2^bits]
    source : str
        What they were learned on.

    Raises
    ------
    BadScheme
        If a name is no codebook scheme or an array does not fit it.
    OutputFailed
        It could not be written.
    """
    for name, book in books.items():
        _check(name, book)
    write_arrays(path, books, {"apq_codebooks": VERSION, "source": source})


def load_codebooks(path: AnyPath) -> dict[str, NDArray[np.int8]]:
    """Read codebooks, checked.

    Raises
    ------
    BadInput
        The file is missing, broken, of another version, or no codebook file.
    """
    if not Path(path).is_file():
        raise BadInput(f"{path}: no such codebook file; make one with apq-tvm codebooks")
    arrays, metadata = read_arrays(path)
    if metadata.get("apq_codebooks") != VERSION:
        found = metadata.get("apq_codebooks")
        what = "is no codebook file" if found is None else f"is of version {found}"
        raise BadInput(f"{path} {what}; make one with apq-tvm codebooks")
    try:
        for name, book in arrays.items():
            _check(name, book)
    except ApqError as error:
        raise BadInput(f"{path}: {error}") from None
    return arrays


def codebooks_for(books: Books, scheme: Scheme) -> NDArray[np.int8]:
    """The codebooks of `scheme`: what `Quantizer.prepare` would learn.

    Raises
    ------
    BadInput
        There are none for it.
    """
    found = books.get(scheme.weights)
    if found is None:
        have = ", ".join(sorted(books)) or "nothing"
        raise BadInput(f"the codebook file has no codebooks for {scheme}; it has {have}")
    return found


def learn_codebooks(
    model: ImportedModel, schemes: tuple[str, ...], progress: Progress | None = None
) -> dict[str, NDArray[np.int8]]:
    """What ``apq-tvm codebooks MODEL --scheme cb2 ... -o FILE`` saves.

    Parameters
    ----------
    model : ImportedModel
    schemes : tuple of str
        Codebook schemes.
    progress : Progress, optional

    Raises
    ------
    BadScheme
        One of them has no codebooks.
    BadInput
        The model has no linear layer.
    """
    weights = {
        node.inputs[1]: np.asarray(model.weights[node.inputs[1]], np.float32)
        for node in model.nodes
        if node.op == "apq.Linear"
    }
    if not weights:
        raise BadInput(f"{model.name} has no linear layer to learn codebooks from")
    found = {}
    for text in schemes:
        scheme = _scheme(text)
        found[scheme.weights] = learn(weights, scheme, None, progress or Silent())
    return found


def _scheme(text: str) -> Scheme:
    scheme = parse_scheme(text)
    if scheme is None or scheme.family != NAME:
        raise BadScheme(f"{text} is no scheme with codebooks; cb2, cb3 and cb4 are")
    return scheme


def _check(name: str, book: NDArray[np.int8]) -> None:
    scheme = _scheme(name)
    if scheme.weights != name:
        raise BadScheme(f"codebooks are named {name!r}; {scheme.weights!r} is needed")
    check_codebooks(f"codebooks {name}", book, scheme.bits, codebook_count(scheme))
    if (np.diff(book.astype(np.int32), axis=1) < 0).any():
        raise BadScheme(f"codebooks {name}: centroids must ascend")
