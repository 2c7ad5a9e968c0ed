"""What every family of weight formats says about itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apq_tvm.formats.arrays import stored_bytes
from apq_tvm.formats.levels import Levels, check_levels, decode_levels
from apq_tvm.formats.places import Place, group_places
from apq_tvm.types import Array, QuantizedTensor, Scheme

Parse = Callable[[str], Scheme | None]


def integer_embedding(scheme: Scheme) -> Scheme:
    """Integers of at least 4 bits in groups of 32, with the layers' activations."""
    return Scheme(max(4, scheme.bits), act_bits=scheme.act_bits, group_size=32)


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
        tensor → float32 [N, K], at the widest codes where there are several widths.
    nbytes : callable
        Bytes of everything that is stored, each part at its true bits.
    embedding : callable
        Scheme of embedding tables where this family is asked for: an integer one.
    details : callable
        Sizes that differ between tensors of one scheme and shape and that kernels need to know:
        ``((name, value), ...)``, sorted by name.
    note : callable
        What a manifest should say of a scheme besides its bytes; ``""`` for nothing.
    levels : callable
        Scheme → what a code stands for, where that is a fixed value times a group's scale; None
        where it is not.
    places : callable
        tensor → its float arrays that may be refitted and learned, in the order of their terms, and
        which entry each weight reads; empty if there are none. By default `scales` alone, per
        group.
    settled : callable
        ``(array float16, scheme)``: such an array as kernels can hold it, where float16 is not
        enough said.
    top_codes : callable
        tensor → the largest code, of all columns or of each [K]; 0 where weights do not each
        depend on one code of their own.
    one_width : callable
        ``(tensor, bits)``: the tensor of one of several widths by itself.
    """

    name: str
    grammar: str
    examples: tuple[str, ...]
    parse: Parse
    check: Callable[[QuantizedTensor, str], None]
    dequantize: Callable[[QuantizedTensor], NDArray[np.float32]]
    nbytes: Callable[[QuantizedTensor], int] = stored_bytes
    embedding: Callable[[Scheme], Scheme] = integer_embedding
    details: Callable[[QuantizedTensor], tuple[tuple[str, int], ...]] = lambda tensor: ()
    note: Callable[[Scheme], str] = lambda scheme: ""
    levels: Callable[[Scheme], Levels | None] = lambda scheme: None
    places: Callable[[QuantizedTensor], list[Place]] = group_places
    settled: Callable[[Array, Scheme], Array] = lambda array, scheme: array
    top_codes: Callable[[QuantizedTensor], int | Array] = lambda t: (1 << t.scheme.bits) - 1
    one_width: Callable[[QuantizedTensor, int], QuantizedTensor] = lambda tensor, bits: tensor


def level_family(
    name: str,
    grammar: str,
    examples: tuple[str, ...],
    parse: Parse,
    levels: Callable[[Scheme], Levels],
    **more: Any,
) -> Family:
    """A family of which `levels` say all, but for what `more` gives of `Family`."""
    return Family(
        name,
        grammar,
        examples,
        parse,
        check=lambda tensor, label: check_levels(tensor, levels(tensor.scheme), label),
        dequantize=lambda tensor: decode_levels(tensor, levels(tensor.scheme)),
        levels=levels,
        top_codes=lambda tensor: len(levels(tensor.scheme).values) - 1,
        **more,
    )
