"""Layouts ``W{bits}mr{R}k4`` and ``W{bits}kr{R}k4``: codes like integers', other steps, minima.

Codes lie exactly as those of `apq_tvm.codegen.layouts.interleaved`, so that its intrinsics serve;
what a group's codes are multiplied by (`InterleavedLayout.step`) and what is taken off
(`InterleavedLayout.least`) differ:

- ``m`` (`apq_tvm.formats.minimum`): ``scales`` and ``mins`` float16 [NB, G, R];
- ``k`` (`apq_tvm.formats.kquant`): ``scales`` float16 [NB, S, R] of super-blocks, ``subs`` int8 or
  uint8 [NB, G, R] and, with minima, ``min_scales`` like the first and ``mins`` like the second.

Groups past the last have scales of 0.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np

from apq_tvm.codegen.layouts.interleaved import InterleavedLayout
from apq_tvm.codegen.layouts.layout import Details, Shapes
from apq_tvm.formats import kquant, minimum
from apq_tvm.tensorize.meaning.interleaved import UNIT_K, decode
from apq_tvm.types import Array, QuantizedTensor, Scheme

_FAMILIES = {"m": minimum.NAME, "k": kquant.NAME}


@dataclass(frozen=True)
class SteppedLayout(InterleavedLayout):
    """How one matrix of codes with minima, or of k-quants, lies in memory.

    Parameters
    ----------
    letter : str
        ``m`` or ``k``.
    """

    letter: str = "m"

    pattern: ClassVar[re.Pattern[str]] = re.compile(r"W([2-6])([mk])r(\d+)k4([st]?)\Z")

    @classmethod
    def named(cls, match: re.Match[str], scheme: Scheme | None, details: Details) -> Self | None:
        """Groups come from the scheme."""
        if scheme is None or scheme.family != _FAMILIES[match[2]]:
            return None
        inverted, whole = bool(match[4]), match[4] == "t"
        size = scheme.group_size
        return cls(scheme.bits, int(match[3]), size, False, inverted, whole, letter=match[2])

    @classmethod
    def choose(cls, scheme: Scheme | None, details: Details, lanes: int) -> Self | None:
        """One vector of int32 lanes; None for other schemes."""
        if scheme is None or scheme.family not in _FAMILIES.values():
            return None
        (letter,) = (x for x, family in _FAMILIES.items() if family == scheme.family)
        like = InterleavedLayout.of_lanes(scheme, lanes)
        size = scheme.group_size
        return cls(scheme.bits, lanes, size, False, like.inverted, like.whole, letter=letter)

    @property
    def name(self) -> str:
        """That of integers, with the letter behind the bits."""
        return super().name.replace("r", f"{self.letter}r", 1)

    @property
    def minima(self) -> bool:
        """Whether groups have a minimum; codes are counted from 0 then."""
        return self.letter == "m" or kquant.KINDS[self.bits].minima

    @property
    def pad_code(self) -> int:
        """Code of padding, which means 0 where codes have a middle."""
        return 0 if self.minima else super().pad_code

    @property
    def _per_span(self) -> int:
        """Groups that share a float16 scale."""
        return kquant.KINDS[self.bits].per_super if self.letter == "k" else 1

    def _small(self, k: int) -> dict[str, tuple[int, str]]:
        """Entries of a row and type of every array besides codes."""
        groups = self.padded_groups(k)
        spans = -(-groups // self._per_span)
        if self.letter == "m":
            return {"scales": (spans, "float16"), "mins": (spans, "float16")}
        kind = kquant.KINDS[self.bits]
        small = {"scales": (spans, "float16"), "subs": (groups, kind.sub_type)}
        if kind.minima:
            small |= {"min_scales": (spans, "float16"), "mins": (groups, "uint8")}
        return small

    def shapes(self, n: int, k: int) -> Shapes:
        """Shape and dtype of every packed array of an [n, k] matrix, in kernel argument order."""
        blocks = self.row_blocks(n)
        codes = (blocks, self.padded_k(k) // UNIT_K, self.unit_bytes)
        small = self._small(k).items()
        return {
            "codes": (codes, "uint8"),
            **{name: ((blocks, length, self.rows), dtype) for name, (length, dtype) in small},
        }

    def arrays(self, tensor: QuantizedTensor) -> dict[str, Array]:
        """The packed arrays of a tensor that was checked."""
        n, k = tensor.codes.shape
        arrays: dict[str, Array] = {"codes": self._pack_codes(self._padded_codes(tensor))}
        for name, (length, _) in self._small(k).items():
            values = tensor.scales if name == "scales" else tensor.tables[name]
            padded = np.zeros((self.row_blocks(n) * self.rows, length), values.dtype)
            padded[:n, : values.shape[1]] = values
            split = padded.reshape(-1, self.rows, length)  # [NB, R, length]
            arrays[name] = np.ascontiguousarray(split.transpose(0, 2, 1))
        return arrays

    def tensor(
        self, arrays: Mapping[str, Array], n: int, k: int, scheme: Scheme | None
    ) -> QuantizedTensor:
        """The tensor whose packed arrays, checked, these are."""
        assert scheme is not None
        codes = np.ascontiguousarray(self._unpack_codes(arrays["codes"])[:n, :k])
        groups = self.groups(k)
        spans = -(-groups // self._per_span)
        tables: dict[str, Array] = {}
        for name, (length, dtype) in self._small(k).items():
            rows = arrays[name].transpose(0, 2, 1).reshape(-1, length)[:n]
            own = spans if dtype == "float16" else groups
            tables[name] = np.ascontiguousarray(rows[:, :own])
        return QuantizedTensor(codes, tables.pop("scales"), None, scheme, tables)

    def step(self, arrays: Mapping[str, Any], block: Any, group: Any, lane: Any) -> Any:
        """float32: the group's scale, or that of its super-block times its sub-scale."""
        scale = arrays["scales"][block, self._span_of(group), lane].astype("float32")
        if "subs" not in arrays:
            return scale
        return scale * arrays["subs"][block, group, lane].astype("float32")

    def least(self, arrays: Mapping[str, Any], block: Any, group: Any, lane: Any) -> Any:
        """float32: the group's minimum, None where there are none."""
        if not self.minima:
            return None
        least = arrays["mins"][block, group, lane].astype("float32")
        if "min_scales" not in arrays:
            return least
        return arrays["min_scales"][block, self._span_of(group), lane].astype("float32") * least

    def _span_of(self, group: Any) -> Any:
        return group // self._per_span if self._per_span > 1 else group

    def weight(
        self, arrays: Mapping[str, Any], block: Any, lane: Any, k: Any, bits: int = 0
    ) -> Any:
        """TensorIR float32 expression of the weight of row ``block * R + lane``, column `k`."""
        from tvm import tirx

        unit, group, codes = k // UNIT_K, k // self.group_size, arrays["codes"]
        place = self.unit.place(lane, k % UNIT_K // 4, k % 4)
        code = decode(self.unit, lambda byte: codes[block, unit, byte], *place)
        if not self.minima:
            code = code - tirx.const(1 << (self.bits - 1), "int32")
        value = code.astype("float32") * self.step(arrays, block, group, lane)
        least = self.least(arrays, block, group, lane)
        return value if least is None else value - least
