"""Dot products of packed codes with *folded* activations: most codes are never unpacked.

A byte of a field of width w holds 8/w parts of codes, s_0 in its lowest bits. Masks alone give
``m_t = s_0 + 2^w s_1 + ... + 2^(wt) s_t``, and the byte as it lies is the last of them (with its
top bit inverted, `InterleavedLayout.inverted`, a signed byte in which the topmost part is centred).
Let X_t be the int8 activation that meets m_t. The part s_t then is multiplied by X_t and, with the
parts above it, by X_u 2^(w(u-t)) in units of its own place:

    Σ_t 2^(-wt) m_t X_t = Σ_t s_t x_t,    x_t = X_t + 2^-w X_(t+1) + 2^-2w X_(t+2) + ...

So an activation is stored as ``X_t = round(x_t - 2^-w x'_(t+1))``, where x' is what the one above
it came to mean: it is rounded once, its error is at most half a step as ever, and the product is
right for exactly those x'. For W4: x'_high = X_high, X_low = round(x_low - X_high / 16), and one
unpack (an ``and``) serves two products. Between the sums of different places stands one left shift:
``((Σ m_0 X_0) 2^w + Σ m_1 X_1) 2^w + ...``.

What it costs: the scale must hold |X_t| <= 127, so it grows where the largest |x_t - 2^-w x_(t+1)|
of a group exceeds the largest |x|: by at most 1 + 2^-w (6 % for W4, 25 % for W2), on normal data by
0.1 % and 3 %. Against plain int8 the error of products on normal data grows by 2 % (W4) and 5 %
(W2); where half of x is exactly 0, as it is behind a ReLU, by 13 % and 22 %, because plain int8 has
zeros for nothing (`tests/unit/kernels/test_fold.py`). See `apq_tvm.ops.activations.fold`.

Where many rows of x share the unpacked codes, unpacking each costs less than a shift of every sum:
activations may stay as they are, *unfolded*. The topmost part of a byte then is centred by its
arithmetic shift, and summed at the same place as the others.
"""

from __future__ import annotations

from dataclasses import dataclass

from apq_tvm.tensorize.meaning.interleaved import VECTORS, Unit
from apq_tvm.tensorize.meaning.whole_codes import places, split_vectors, whole_place


@dataclass(frozen=True)
class Fold:
    """How the codes of a unit meet the activations.

    Parameters
    ----------
    unit : Unit
    zeros : bool
        True if every group has zero points, uint8 [R].
    unfolded : bool
        True if activations are not to be folded.
    """

    unit: Unit
    zeros: bool = False
    unfolded: bool = False

    @property
    def shifted(self) -> int:
        """Bits of a part that is moved down to be multiplied, 0 where none is."""
        fields = self.unit.fields
        alone = len(fields) == 1 and fields[0][0] in (2, 4) and self.unit.inverted
        return fields[0][0] if self.unfolded and alone else 0

    @property
    def width(self) -> int:
        """Bits of a part; 8 where codes must be put together, and activations are not folded."""
        fields = self.unit.fields
        if self.unit.whole or self.unfolded:
            return 8
        folds = len(fields) == 1 and fields[0][0] > 1 and self.unit.inverted
        return fields[0][0] if folds else 8

    @property
    def raw(self) -> bool:
        """Whether the last part is read where it lies, its topmost bit inverted."""
        if self.unit.whole or self.shifted:
            return True
        return self.unit.inverted and self.unit.fields[0][0] == self.width

    @property
    def parts(self) -> int:
        """Parts of a byte whose activations are folded; 1 where they are not."""
        return 8 // self.width

    @property
    def places(self) -> tuple[int, ...]:
        """Places of the sums, lowest first; the sum of all is in units of the last one."""
        if self.unit.whole:
            return places(self.unit.bits)
        if self.shifted:
            return (0, 0)
        return tuple(self.width * part for part in range(self.parts))

    @property
    def shift(self) -> int:
        """Bits by which the sum of all places is too large."""
        return self.places[-1]

    @property
    def doubled(self) -> bool:
        """Whether codes are taken twice: 1-bit codes without zero points are 2 code - 1."""
        return self.unit.bits == 1 and not self.zeros

    @property
    def middle(self) -> int:
        """The zero point where codes have none of their own (of doubled codes for 1 bit)."""
        return 1 if self.doubled else 1 << (self.unit.bits - 1)

    @property
    def vectors(self) -> int:
        """Vectors of one part of folded activations."""
        return VECTORS // self.parts

    def part(self, vector: int) -> int:
        """Index of the place at which a vector of the unit is summed."""
        if self.shifted:
            return int(vector >= VECTORS - self.shifted)
        if not self.unit.whole:
            return vector // self.vectors
        if vector in split_vectors(self.unit.bits):
            return 0
        return self.places.index(whole_place(self.unit.bits, vector))

    def members(self, part: int) -> list[int]:
        """Vectors that are summed at a place."""
        return [vector for vector in range(VECTORS) if self.part(vector) == part]

    @property
    def weights(self) -> tuple[int, ...]:
        """Of ΣX_t in ``2^shift Σ_t Σ x_t``: what a zero point is multiplied by."""
        s, w = self.shift, self.width
        if self.unit.whole or self.shifted:
            return (1 << s,) * len(self.places)
        return tuple(sum(1 << (s - w * (u - t)) for t in range(u + 1)) for u in range(self.parts))

    @property
    def corrections(self) -> tuple[int, ...]:
        """Of ΣX_t in ``2^shift`` times what the integer sum exceeds the centred one by.

        With zero points, which are taken off later: minus what is missing to the sum of codes.
        """
        last, raw = len(self.places) - 1, self.middle << self.shift
        if self.zeros:
            return tuple(-raw if self.raw and u == last else 0 for u in range(last + 1))
        all_parts = [self.middle * weight for weight in self.weights]
        if self.raw:
            all_parts[last] -= raw
        return tuple(all_parts)

    @property
    def factors(self) -> int:
        """Floats per chunk: scale and, with zero points, sum of activations, 4 times each."""
        return 8 if self.zeros else 4
