"""How codes in fragment order become bytes for ``mma``, in the fewest instructions.

Codes of a field lie at a bit of their own in every byte (`apq_tvm.codegen.layouts.fragments`).
Masked where they lie they are too large by 2^place, which costs nothing: the products of such steps
have a *chain* of sums of their own, which meet shifted at the end of the group, and what they are
too large by in the end is taken off the scale. A chain costs a shift for each of its sums, a shift
of the codes one for each word: the smaller count decides.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from apq_tvm.codegen.layouts.fragments import STEP_K, FragmentLayout

_MAGIC_BITS = 22
"""An integer below 2^22 plus the bits of 1.5 x 2^23 is the float of their sum (IEEE 754)."""


@dataclass(frozen=True)
class Step:
    """32 columns of a chunk.

    Parameters
    ----------
    unit, number : int
        Of the chunk, and in the unit.
    place : int
        Codes are multiplied by 2^place.
    """

    unit: int
    number: int
    place: int


@dataclass(frozen=True)
class Steps:
    """What a warp does with a chunk.

    Parameters
    ----------
    layout : FragmentLayout
    tiles : int
        Tiles of rows of x that share what was decoded.
    """

    layout: FragmentLayout
    tiles: int

    @property
    def groups(self) -> tuple[tuple[Step, ...], ...]:
        """The steps of every group of a chunk; all of them, where a row is one group."""
        layout = self.layout
        all_steps = range(layout.chunk_k // STEP_K)
        wide = len(all_steps) if layout.group_size == -1 else layout.group_size // STEP_K
        return tuple(
            self._group([divmod(i, layout.unit_steps) for i in all_steps[at : at + wide]])
            for at in range(0, len(all_steps), wide)
        )

    def _group(self, numbers: list[tuple[int, int]]) -> tuple[Step, ...]:
        free = [self._place(number) for _, number in numbers]
        counts = Counter(free)
        base = max(counts, key=lambda place: (counts[place], place))
        kept = {place for place, count in counts.items() if count > self.tiles} | {base}
        return tuple(
            Step(unit, number, place if place in kept else base)
            for (unit, number), place in zip(numbers, free, strict=True)
        )

    def _place(self, number: int) -> int:
        """The place that wants the fewest shifts; the lowest of several."""
        fields, bits = self.layout.fields, self.layout.bits
        least = int(self.layout.signs)

        def shifts(place: int) -> int:
            lies = (number % f.per_byte * f.width for f in fields)
            return sum(at != place + f.shift for at, f in zip(lies, fields, strict=True))

        return min(range(least, 9 - bits), key=lambda place: (shifts(place), place))

    def exponent(self, group: int) -> int:
        """What a group's sums are too large by is 2^this; signs count 2 for 1 and 0."""
        return max(step.place for step in self.groups[group]) - int(self.layout.signs)

    @property
    def exponents(self) -> tuple[int, ...]:
        """Of all groups of a chunk."""
        return tuple(self.exponent(group) for group in range(len(self.groups)))

    def zero(self, group: int) -> int:
        """What is taken off a group's sums for each unit of x; layouts without zero points."""
        shift = self.exponent(group)
        return (1 if self.layout.signs else self.layout.centre) << shift

    def exact(self, group: int) -> bool:
        """True if sums of a group are below 2^22, so that their float is a matter of bits."""
        layout = self.layout
        if layout.group_size == -1:
            return False
        code = (1 << layout.bits) - 1 if layout.zero_points else layout.centre
        most = layout.group_size * 127 * code << self.exponent(group)
        return most < 1 << _MAGIC_BITS
