"""What every family of weight formats says about itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from apq_tvm.types import QuantizedTensor, Scheme


def no_details(tensor: QuantizedTensor) -> tuple[tuple[str, int], ...]:
    """For families whose arrays have the same shapes for every [N, K] matrix."""
    return ()


def no_note(scheme: Scheme) -> str:
    """For families of which bits per weight say enough."""
    return ""


@dataclass(frozen=True)
class Family:
    """One way to store weights in few bits.

    Parameters
    ----------
    name : str
        `Scheme.family`.
    grammar : str
        One line for ``apq-tvm formats``: the spelling and what it means.
    examples : tuple of str
        Valid spellings, for hints and lists.
    parse : callable
        Upper-case word → `Scheme`, None if the word is not of this family. Raises ValueError with
        the reason where it is, but means nothing.
    check : callable
        ``(tensor, name)``: raises `BadScheme` where arrays do not fit the scheme.
    dequantize : callable
        ``(tensor, bits)`` → float32 [N, K]; `bits` 0 is all of them.
    nbytes : callable
        Bytes of everything that is stored, each part at its true bits.
    details : callable
        Sizes that differ between tensors of one scheme and shape and that kernels need to know:
        ``((name, value), ...)``, sorted by name.
    embedding : callable
        Scheme of embedding tables where this family is asked for: an integer one.
    note : callable
        What a manifest should say of a scheme besides its bytes; ``""`` for nothing.
    """

    name: str
    grammar: str
    examples: tuple[str, ...]
    parse: Callable[[str], Scheme | None]
    check: Callable[[QuantizedTensor, str], None]
    dequantize: Callable[[QuantizedTensor, int], NDArray[np.float32]]
    nbytes: Callable[[QuantizedTensor], int]
    embedding: Callable[[Scheme], Scheme]
    details: Callable[[QuantizedTensor], tuple[tuple[str, int], ...]] = no_details
    note: Callable[[Scheme], str] = no_note
