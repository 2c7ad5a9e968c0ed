"""What is timed of a language model, and which of its tensors are ids, cache and the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from apq_tvm.errors import BadInput
from apq_tvm.quantizers.inputs.read import MASK_NAME, TOKENS_NAME
from apq_tvm.types import Array, TensorSpec

CACHE_RANK = 4
"""[batch, heads, tokens, channels], in any order."""


class Decoder(Protocol):
    """A model that remembers the tokens it was given."""

    def prefill(self, ids: Sequence[int]) -> None:
        """Forget everything and take a prompt."""

    def step(self, token: int) -> None:
        """Take one more token, up to its logits."""

    def rewind(self, length: int) -> None:
        """Forget all but the first `length` tokens."""


@dataclass(frozen=True)
class Ports:
    """The tensors of a decoder.

    Parameters
    ----------
    ids : TensorSpec
    caches : tuple of (TensorSpec, str)
        Inputs of earlier tokens, and the outputs that hold them with the new ones.
    axis : int
        Of tokens in a cache.
    masks, positions : tuple of TensorSpec
        Inputs of ones for every token, and of the numbers of the new ones.
    """

    ids: TensorSpec
    caches: tuple[tuple[TensorSpec, str], ...]
    axis: int
    masks: tuple[TensorSpec, ...]
    positions: tuple[TensorSpec, ...]

    def empty(self, spec: TensorSpec, length: int = 0) -> Array:
        """A cache of `length` tokens, of zeros."""
        shape = [1 if isinstance(d, str) else d for d in spec.shape]
        shape[self.axis] = length
        return np.zeros(shape, np.dtype(spec.dtype))

    def feeds(self, ids: Sequence[int], past: int) -> dict[str, Array]:
        """All inputs but the caches, for new tokens behind `past` others."""
        rows = np.array([ids])
        feeds = {self.ids.name: rows.astype(self.ids.dtype)}
        for spec in self.masks:
            feeds[spec.name] = np.ones((1, past + len(ids)), np.dtype(spec.dtype))
        for spec in self.positions:
            feeds[spec.name] = np.arange(past, past + len(ids))[None].astype(spec.dtype)
        return feeds

    def cache_bytes(self, length: int) -> int:
        """Bytes of keys and values of so many tokens."""
        return sum(self.empty(spec, 1).nbytes for spec, _ in self.caches) * length


def find_ports(
    inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], where: Any = "the model"
) -> Ports:
    """Tell a decoder's tensors apart by names, types and ranks.

    Parameters
    ----------
    inputs, outputs : sequence of TensorSpec
    where : object
        What messages call the model.

    Raises
    ------
    BadInput
        It has no ids, no cache, or an input that is neither.
    """
    ids = [s for s in inputs if TOKENS_NAME.search(s.name)]
    past = [s for s in inputs if len(s.shape) == CACHE_RANK and np.dtype(s.dtype).kind == "f"]
    masks = tuple(s for s in inputs if MASK_NAME.search(s.name))
    positions = tuple(s for s in inputs if "position" in s.name)
    if len(ids) != 1 or not past:
        have = ", ".join(s.name for s in inputs)
        raise BadInput(
            f"{where} is no decoder with a cache: it takes {have}; wanted are input_ids and "
            "past keys and values, as exporters call them"
        )
    rest = {s.name for s in inputs} - {s.name for s in (*ids, *past, *masks, *positions)}
    if rest:
        what = "neither ids nor a cache, a mask or positions by its name"
        raise BadInput(f"{where}: input {min(rest)!r} is {what}; such models cannot be timed here")
    present = [s.name for s in outputs if len(s.shape) == CACHE_RANK]
    named = [_present(s.name) for s in past]
    pairs = named if set(named) <= set(present) else present
    if len(pairs) != len(past):
        raise BadInput(f"{where} takes {len(past)} caches and gives {len(pairs)}")
    batch = ids[0].shape[0]
    grows = [i for i, d in enumerate(past[0].shape) if isinstance(d, str) and d != batch]
    if len(grows) != 1:
        raise BadInput(f"{where}: which axis of {past[0].name} {past[0].shape} is tokens?")
    return Ports(ids[0], tuple(zip(past, pairs, strict=True)), grows[0], masks, positions)


def _present(name: str) -> str:
    """What exporters call the output of a cache's input."""
    return name.replace("past_key_values", "present").replace("past", "present")
