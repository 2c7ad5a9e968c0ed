"""Every family of weight formats, and what they all answer."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from apq_tvm.errors import BadScheme
from apq_tvm.formats import (
    anyprec,
    balance,
    bcq,
    codebook,
    half,
    integer,
    kquant,
    minimum,
    mixed,
    nonlinear,
    superblock,
)
from apq_tvm.formats.family import Family
from apq_tvm.types import QuantizedTensor, Scheme

FAMILIES: tuple[Family, ...] = (
    integer.FAMILY,
    anyprec.FAMILY,
    balance.FAMILY,
    bcq.FAMILY,
    mixed.FAMILY,
    codebook.FAMILY,
    nonlinear.FAMILY,
    half.FAMILY,
    minimum.FAMILY,
    kquant.FAMILY,
    superblock.FAMILY,
)
"""A new family is a file and a line here."""


def family_of(scheme: Scheme) -> Family:
    """The family of a scheme.

    Raises
    ------
    BadScheme
        If there is none of its name.
    """
    for family in FAMILIES:
        if family.name == scheme.family:
            return family
    names = ", ".join(family.name for family in FAMILIES)
    raise BadScheme(f"scheme {scheme}: no family is called {scheme.family!r}; there are {names}")


def check_tensor(tensor: QuantizedTensor, name: str) -> None:
    """Refuse a tensor whose arrays do not fit its scheme.

    Raises
    ------
    BadScheme
        With the tensor's name and what is wrong.
    """
    family_of(tensor.scheme).check(tensor, name)


def dequantize(tensor: QuantizedTensor, bits: int = 0) -> NDArray[np.float32]:
    """Decode a quantized matrix to float32 [N, K].

    Parameters
    ----------
    tensor : QuantizedTensor
    bits : int
        Width, where the scheme leaves a choice; 0 for the widest.

    Raises
    ------
    BadScheme
        If its arrays do not fit its scheme, or it has no such width.
    """
    family = family_of(tensor.scheme)
    if bits and bits not in tensor.scheme.widths:
        have = tensor.scheme.widths
        choice = f"{have[0]}..{have[-1]} are possible" if have[0] else "there is no choice of bits"
        raise BadScheme(f"scheme {tensor.scheme} at {bits} bits: {choice}")
    return family.dequantize(family.one_width(tensor, bits) if bits else tensor)


def nbytes(tensor: QuantizedTensor) -> int:
    """Bytes of codes, scales, tables and outliers, without a layout's padding."""
    return family_of(tensor.scheme).nbytes(tensor)


def nbytes_at(tensor: QuantizedTensor, bits: int) -> int:
    """Bytes that a product at a run-time width reads: its planes and its table; 0 is all."""
    return nbytes(family_of(tensor.scheme).one_width(tensor, bits) if bits else tensor)


def bits_per_weight(tensor: QuantizedTensor) -> float:
    """Bits per weight of a tensor, scales, zero points and tables included."""
    return 8 * nbytes(tensor) / tensor.codes.size


def details(tensor: QuantizedTensor) -> tuple[tuple[str, int], ...]:
    """Sizes of a tensor that its scheme and shape do not tell (`Family.details`)."""
    return family_of(tensor.scheme).details(tensor)


def embedding_scheme(scheme: Scheme) -> Scheme:
    """The scheme of embedding tables in a model whose layers have `scheme`: an integer one."""
    return family_of(scheme).embedding(scheme)
