"""Tokens of a decoder, one after the other: how the next one is chosen, and drafts at fewer bits.

Sampling is what users of other tools know: temperature, then the `top_k` largest, then those that
are `top_p` of all together (Holtzman et al., arXiv:1904.09751), then those at least `min_p` times
as probable as the first (Nguyen et al., arXiv:2407.01082).

Drafts follow Leviathan et al., arXiv:2211.17192: a few tokens are guessed at few bits of the
weights, then checked at all bits at once. What comes out is distributed as without drafts, and the
same where the most probable token is taken.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]


@dataclass
class Sampler:
    """How the next token is chosen.

    Parameters
    ----------
    temperature : float
        0 takes the most probable token, whatever the others say.
    top_k : int
        0 is no limit.
    top_p, min_p : float
        1 and 0 are no limits.
    seed : int, optional
        By default every sampler draws its own numbers.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    random: np.random.Generator = field(init=False, repr=False)

    def __post_init__(self) -> None:
        for name, least, most in (("temperature", 0, 100), ("top_p", 0, 1), ("min_p", 0, 1)):
            value = getattr(self, name)
            if not least <= value <= most:
                raise ValueError(f"{name}={value}: wanted {least} to {most}")
        if operator.index(self.top_k) < 0:
            raise ValueError(f"top_k={self.top_k}: wanted 0 or more")
        self.random = np.random.default_rng(self.seed)

    def probabilities(self, logits: NDArray[Any]) -> F64:
        """Of every token [vocabulary], after all limits."""
        scores = np.asarray(logits, np.float64)
        if self.temperature == 0:
            chosen = np.zeros(scores.shape)
            chosen[int(np.argmax(scores))] = 1.0
            return chosen
        if 0 < self.top_k < scores.size:
            least = np.partition(scores, -self.top_k)[-self.top_k]
            scores = np.where(scores < least, -np.inf, scores)
        p: F64 = np.exp((scores - scores.max()) / self.temperature)
        p /= p.sum()
        if self.top_p < 1:
            order = np.argsort(-p, kind="stable")
            before = np.cumsum(p[order]) - p[order]
            p[order[(before >= self.top_p) & (before > 0)]] = 0.0
        p[p < self.min_p * p.max()] = 0.0
        p /= p.sum()
        return p

    def choose(self, logits: NDArray[Any]) -> int:
        """Token of logits [vocabulary]."""
        if self.temperature == 0:
            return int(np.argmax(logits))
        return self.draw(self.probabilities(logits))

    def draw(self, p: F64) -> int:
        """Token of probabilities [vocabulary]."""
        return int(np.searchsorted(np.cumsum(p), self.random.random() * p.sum(), side="right"))


@dataclass
class Drafted:
    """How many tokens were guessed, and how many of those were right."""

    guessed: int = 0
    accepted: int = 0

    @property
    def acceptance(self) -> float:
        """Share of the guesses that were right; 0 before the first."""
        return self.accepted / self.guessed if self.guessed else 0.0


def tokens(
    session: Any,
    ids: Any,
    count: int,
    sampler: Sampler,
    stop: Collection[int] = (),
    bits: int | Callable[[int], int] = 0,
    draft: tuple[int, int] | None = None,
    drafted: Drafted | None = None,
) -> Iterator[int]:
    """Tokens behind `ids`, one by one, as they are computed.

    Parameters
    ----------
    session : Session
        Of one sequence; it goes on from the tokens that it has. What is given out is in it, but for
        the last token.
    ids : array_like of int [tokens]
        At least one.
    count : int
        At most so many; fewer where the session is full or a token of `stop` comes, which is given
        out too.
    sampler : Sampler
    stop : collection of int
    bits : int or callable
        Of the weights, or what gives them for the number of each token.
    draft : (int, int), optional
        Bits of guesses, and how many are guessed at once.
    drafted : Drafted, optional
        Counts guesses.
    """
    at = bits if callable(bits) else lambda number: bits
    ends, made = frozenset(stop), 0
    pending = [sampler.choose(session.prefill(np.reshape(ids, (-1,)), bits=at(0)))]
    while True:
        for place, token in enumerate(pending):
            made += 1
            last = token in ends or made == count
            if last:  # what was accepted behind it is nobody's
                session.rewind(len(pending) - 1 - place)
            yield token
            if last:
                return
        room = session.capacity - session.length
        if room < 1:
            return
        ahead = 0 if draft is None else min(draft[1], count - made - 1, room - 1)
        if draft is None or ahead < 1:
            pending = [sampler.choose(session.step(pending[-1], bits=at(made)))]
        else:
            pending = _guess(session, pending[-1], draft[0], ahead, at(made), sampler)
            if drafted is not None:
                drafted.guessed += ahead
                drafted.accepted += len(pending) - 1


def _guess(
    session: Any, token: int, few: int, ahead: int, bits: int, sampler: Sampler
) -> list[int]:
    """Guess tokens behind `token` at few bits and check them at all: those that are right, and the
    one behind them. All but the last are in the session then.
    """
    greedy = sampler.temperature == 0
    guesses: list[int] = []
    guessed: list[F64] = []
    for _ in range(ahead):
        logits = session.step(guesses[-1] if guesses else token, bits=few)
        guessed.append(np.empty(0) if greedy else sampler.probabilities(logits))
        guesses.append(sampler.choose(logits) if greedy else sampler.draw(guessed[-1]))
    session.rewind(ahead)
    found = session.prefill([token, *guesses], last=ahead + 1, bits=bits)
    for number, guess in enumerate(guesses):
        if greedy:
            other = int(np.argmax(found[number]))
            right = other == guess
        else:
            p, q = sampler.probabilities(found[number]), guessed[number]
            right = sampler.random.random() * q[guess] < p[guess]
            other = guess if right else sampler.draw(np.maximum(p - q, 0.0))
        if not right:
            session.rewind(ahead - number)
            return [*guesses[:number], other]
    return [*guesses, sampler.choose(found[ahead])]
