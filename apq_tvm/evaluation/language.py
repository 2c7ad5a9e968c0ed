"""Scores of language models: perplexity, KL divergence to the float model, agreement."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apq_tvm.errors import BadInput
from apq_tvm.quantizers.inputs.read import MASK_NAME, TOKENS_NAME, Batch, split
from apq_tvm.types import Array, TensorSpec

CHUNK = 64
"""Tokens scored at a time: their work arrays, a few times [64, vocabulary], stay small."""

MAX_EXPONENT = 700.0
"""exp of more overflows; a model that bad has no perplexity worth telling."""


@dataclass(frozen=True)
class Language:
    """How a model is scored as a language model.

    Parameters
    ----------
    tokens, logits : str
        The input with token ids [batch, sequence], and the output [batch, sequence, vocabulary];
        ``""`` looks for them.
    window : int
        Tokens in a call; longer sequences are cut, without overlap.
    min_tokens : int
        Predicted tokens there must be.
    """

    tokens: str = ""
    logits: str = ""
    window: int = 512
    min_tokens: int = 1


@dataclass
class LanguageScore:
    """Running sums over predicted tokens, in nats."""

    tokens: int = 0
    float_loss: float = 0.0
    loss: float = 0.0
    kl: float = 0.0
    kl_max: float = 0.0
    agree: int = 0

    def add(self, reference: Array, ours: Array, targets: Array) -> None:
        """Score some tokens.

        Parameters
        ----------
        reference, ours : float [tokens, vocabulary]
            Logits of the float and of the quantized model.
        targets : int [tokens]
            The token that came next.

        Raises
        ------
        BadInput
            Shapes differ, a target lies outside the vocabulary, or logits are NaN or +infinity.
        """
        if reference.shape != ours.shape:
            raise BadInput(
                f"logits are {list(ours.shape)}, those of the float model {list(reference.shape)}: "
                "they are of two models"
            )
        vocabulary = reference.shape[-1]
        if targets.size and not 0 <= targets.min() <= targets.max() < vocabulary:
            raise BadInput(
                f"token {int(targets.max() if targets.max() >= vocabulary else targets.min())} "
                f"is outside the vocabulary of {vocabulary} that the logits have"
            )
        for start in range(0, len(targets), CHUNK):
            part = slice(start, start + CHUNK)
            self._add(reference[part], ours[part], targets[part])

    def _add(self, reference: Array, ours: Array, targets: Array) -> None:
        p, q = log_softmax(reference, "the float model"), log_softmax(ours, "the quantized model")
        rows = np.arange(len(targets))
        share = np.exp(p)
        with np.errstate(invalid="ignore"):  # a token that the float model rules out counts 0
            terms = np.where(share > 0, share * (p - q), 0)
        # Rounding can leave a sum of equal distributions a hair below 0.
        kl = np.maximum(terms.sum(axis=-1, dtype=np.float64), 0.0)
        self.tokens += len(targets)
        self.float_loss -= float(p[rows, targets].sum(dtype=np.float64))
        self.loss -= float(q[rows, targets].sum(dtype=np.float64))
        self.kl += float(kl.sum())
        self.kl_max = max(self.kl_max, float(kl.max()))
        self.agree += int((p.argmax(axis=-1) == q.argmax(axis=-1)).sum())

    def summary(self) -> dict[str, Any]:
        """``tokens``, ``perplexity``, ``float_perplexity``, ``ratio``, ``kl_mean``, ``kl_max`` (in
        nats) and ``top1``, the share of tokens whose likeliest successor is the same.

        Raises
        ------
        BadInput
            No token was predicted, or the quantized model rules out what the float model allows.
        """
        if not self.tokens:
            raise BadInput("no token is predicted: sequences need 2 unmasked tokens at least")
        if not math.isfinite(self.loss + self.float_loss + self.kl):
            raise BadInput("a model gives the next token no chance at all: perplexity is infinite")
        perplexity = math.exp(min(self.loss / self.tokens, MAX_EXPONENT))
        float_perplexity = math.exp(min(self.float_loss / self.tokens, MAX_EXPONENT))
        return {
            "tokens": self.tokens,
            "perplexity": perplexity,
            "float_perplexity": float_perplexity,
            "ratio": perplexity / float_perplexity,
            "kl_mean": self.kl / self.tokens,
            "kl_max": self.kl_max,
            "top1": self.agree / self.tokens,
        }


def log_softmax(logits: Array, who: str) -> NDArray[np.float32]:
    """Log probabilities, float32 [tokens, vocabulary]; a logit of -infinity is allowed.

    Raises
    ------
    BadInput
        NaN or +infinity.
    """
    x = np.asarray(logits, np.float32)
    top = x.max(axis=-1, keepdims=True)
    if not np.isfinite(top).all():
        raise BadInput(f"{who} gives NaN or infinite logits")
    x = x - top
    return np.asarray(x - np.log(np.exp(x).sum(axis=-1, keepdims=True)), np.float32)


def find_tokens(inputs: Sequence[TensorSpec], name: str = "") -> TensorSpec:
    """The input that holds token ids: `name`, or the one that looks like it.

    Raises
    ------
    BadInput
        There is none, or several could be.
    """
    ids = [s for s in inputs if s.dtype in ("int64", "int32") and len(s.shape) == 2]
    listed = ", ".join(s.name for s in inputs)
    if name:
        found = [s for s in ids if s.name == name]
        if not found:
            raise BadInput(
                f"{name!r} is no input of token ids, integers [batch, sequence]; "
                f"the model takes {listed}"
            )
        return found[0]
    named = [s for s in ids if TOKENS_NAME.search(s.name)]
    found = named or [s for s in ids if not MASK_NAME.search(s.name)]
    if len(found) != 1:
        raise BadInput(f"which input holds token ids? Say --tokens NAME; the model takes {listed}")
    return found[0]


def find_logits(
    outputs: Mapping[str, Array] | Mapping[str, tuple[int, ...]], ids: Array, name: str = ""
) -> str:
    """The output with logits: `name`, or the only one whose last axis can be a vocabulary.

    Parameters
    ----------
    outputs : mapping of str to ndarray
    ids : int [batch, sequence]
        Of the same call.
    name : str

    Raises
    ------
    BadInput
        There is none, or several could be.
    """
    shapes = {key: np.shape(value) for key, value in outputs.items()}
    largest = int(ids.max()) if ids.size else 0
    listed = ", ".join(f"{key} {list(shape)}" for key, shape in shapes.items())
    if name and name not in shapes:
        raise BadInput(f"the model has no output {name!r}; it gives {listed}")
    fitting = [
        key
        for key, shape in shapes.items()
        if len(shape) == 3 and shape[:2] == ids.shape and shape[2] > largest
    ]
    if name and name not in fitting:
        raise BadInput(
            f"output {name!r} {list(shapes[name])} holds no logits of tokens {list(ids.shape)} up "
            f"to {largest}: [batch, sequence, vocabulary] is needed, before any pooling"
        )
    if name:
        return name
    if len(fitting) != 1:
        which = "several outputs" if fitting else "no output"
        raise BadInput(
            f"{which} can be logits [batch, sequence, vocabulary] of tokens up to {largest}; the "
            f"model gives {listed}; say --logits NAME, or leave --perplexity away"
        )
    return fitting[0]


def windows(
    batch: Batch, inputs: Sequence[TensorSpec], tokens: TensorSpec, length: int
) -> Iterator[Batch]:
    """Cut one call's sequences into windows without overlap; a rest of 1 token is dropped.

    Every input whose first two dimensions are those of the token ids is cut alike. A call has about
    `length` tokens: sequences that are shorter share one.

    Raises
    ------
    BadInput
        The window is shorter than 2, or an input's size is fixed to another length.
    """
    if length < 2:
        raise BadInput(f"windows of {length} tokens predict nothing; 2 or more are needed")
    sequence = batch[tokens.name].shape[1]
    fixed = tokens.shape[1]
    if isinstance(fixed, int) and min(length, sequence) != fixed:
        raise BadInput(f"the model takes sequences of {fixed} tokens exactly; say --window {fixed}")
    alike = {s.name for s in inputs if s.shape[:2] == tokens.shape[:2]}
    rows = max(1, length // max(min(length, sequence), 1))
    for part in split(batch, inputs, rows):
        for start in range(0, sequence - 1, length):
            cut = slice(start, start + length)
            yield {name: a[:, cut] if name in alike else a for name, a in part.items()}


def predicted(ids: Array, mask: Array | None) -> NDArray[np.bool_]:
    """Which tokens of a call predict a counted one, bool [batch, sequence - 1]."""
    if mask is None or mask.shape != ids.shape:
        return np.ones((ids.shape[0], ids.shape[1] - 1), np.bool_)
    return np.asarray((mask[:, 1:] != 0) & (mask[:, :-1] != 0))
