"""What GEMMs with panels of centred int8 are told of weights and of the schedule."""

from __future__ import annotations

from dataclasses import dataclass

from apq_tvm.tensorize.meaning.rounding import SUM_LIMIT

_ACT_MAX = 127


@dataclass(frozen=True)
class CentredGroups:
    """What is common to int8 weights, however they are stored.

    Parameters
    ----------
    k : int
        Columns of quantized activations.
    group : int
        Weights of a row that share a scale; divides `k`.
    largest : int
        Largest magnitude of a weight, with what a zero point adds.
    planes : int
        Parts that a weight is the sum of, each with its own scale. In the panel they are groups
        that follow each other and share their columns of x.
    """

    k: int
    group: int
    largest: int
    planes: int = 1

    @property
    def groups(self) -> int:
        """Scales of a row."""
        return self.k // self.group

    @property
    def whole(self) -> bool:
        """Whether a row has one scale."""
        return self.group == self.k and self.planes == 1

    def starts_at_magic(self, products: int) -> bool:
        """Whether no sum of so many products can leave the range in which integers are floats."""
        return products * self.largest * _ACT_MAX < SUM_LIMIT


@dataclass(frozen=True)
class CentredTuning:
    """What a GEMM leaves to schedules.

    Parameters
    ----------
    pairs : bool
        Order of the sums.
    parts : int
        Of a panel's column vectors, for tiles whose sums would not all fit the registers; more
        than one with pairs alone.
    stretch : int
        K of one iteration, at most, where a group has less.
    loaded : int
        Rows of vectors of a tile whose sums start from memory instead of a register, -1 for all:
        that takes no vector pipe, but on Neoverse N1 more slots.
    """

    pairs: bool
    parts: int = 1
    stretch: int = 128
    loaded: int = -1
