"""Bytes of ``mixed24`` tiles and of the words beside them (`apq_tvm.codegen.layouts.mixed`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from apq_tvm.formats.mixed import GROUP
from apq_tvm.tensorize.meaning.mixed import SUB_MASKS, SUB_SHIFTS, TRIPLE, ZERO_SHIFTS, words_at
from apq_tvm.types import U8, Array

VECTORS = 4
"""Vectors of a tile."""


@dataclass(frozen=True)
class MixedTiles:
    """Tiles of R rows: codes uint8 [NB * R, groups, 16] to bytes and back.

    Parameters
    ----------
    rows : int
        R.
    """

    rows: int

    def _vectors(self, codes: U8) -> U8:
        """[NB * R, G, 16] -> [NB, G, 4, 4R]."""
        blocks = codes.reshape(-1, self.rows, codes.shape[1], VECTORS, 4)
        # [NB, R, G, 4, 4] -> [NB, G, 4, R, 4]
        moved = blocks.transpose(0, 2, 3, 1, 4)
        return np.ascontiguousarray(moved).reshape(len(blocks), codes.shape[1], VECTORS, -1)

    def _rows(self, vectors: U8) -> U8:
        """Inverse of `_vectors`."""
        blocks, groups = vectors.shape[:2]
        apart = vectors.reshape(blocks, groups, VECTORS, self.rows, 4).transpose(0, 3, 1, 2, 4)
        return np.ascontiguousarray(apart).reshape(blocks * self.rows, groups, GROUP)

    def pack_narrow(self, codes: U8) -> U8:
        """[NB * R, 3T, 16] -> [NB, T, 12R]."""
        v = self._vectors(codes)
        tiles = v[:, :, 0] | v[:, :, 1] << 2 | v[:, :, 2] << 4 | v[:, :, 3] << 6  # [NB, 3T, 4R]
        return np.ascontiguousarray(tiles).reshape(len(v), -1, words_at(self.rows))

    def unpack_narrow(self, packed: U8) -> U8:
        """Inverse of `pack_narrow`."""
        tiles = np.ascontiguousarray(packed).reshape(len(packed), -1, 1, 4 * self.rows)
        shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
        return self._rows((tiles >> shifts) & np.uint8(3))

    def pack_wide(self, codes: U8) -> U8:
        """[NB * R, T4, 16] -> [NB, T4, 8R]."""
        v = self._vectors(codes)
        loads = v[:, :, :2] | v[:, :, 2:] << 4  # [NB, T4, 2, 4R]
        return np.ascontiguousarray(loads).reshape(len(v), -1, 8 * self.rows)

    def unpack_wide(self, packed: U8) -> U8:
        """Inverse of `pack_wide`."""
        loads = np.ascontiguousarray(packed).reshape(*packed.shape[:2], 2, 4 * self.rows)
        return self._rows(np.concatenate((loads & np.uint8(15), loads >> 4), axis=2))

    def pack_words(self, tables: Mapping[str, Array], blocks: int, triples: int) -> U8:
        """[NB, T, 2R]: zeros and sub-scales of triples, low byte first."""
        n, rows = len(tables["sub_zeros"]), blocks * self.rows
        parts = np.zeros((2, rows, triples, TRIPLE), np.uint16)
        for part, key in zip(parts, ("sub_zeros", "sub_scales"), strict=True):
            part.reshape(rows, -1)[:n, : tables[key].shape[1]] = tables[key]
        words = np.zeros(parts.shape[1:3], "<u2")
        for i in range(TRIPLE):
            words |= parts[0, :, :, i] << ZERO_SHIFTS[i] | parts[1, :, :, i] << SUB_SHIFTS[i]
        # [NB * R, T] -> [NB, T, R]
        by_block = words.reshape(-1, self.rows, words.shape[1]).transpose(0, 2, 1)
        return np.ascontiguousarray(by_block).view(np.uint8)

    def unpack_words(self, packed: U8, n: int, narrow: int) -> dict[str, Array]:
        """``sub_scales`` and ``sub_zeros``, uint8 [n, narrow], of `narrow` 2-bit groups."""
        # [NB, T, 2R] -> [NB, T, R] -> [NB * R, T]
        words = np.ascontiguousarray(packed).view("<u2").transpose(0, 2, 1)
        words = words.reshape(-1, words.shape[2])[:n]
        zeros = np.stack([words >> ZERO_SHIFTS[i] & 3 for i in range(TRIPLE)], axis=2)
        subs = np.stack([words >> SUB_SHIFTS[i] & SUB_MASKS[i] for i in range(TRIPLE)], axis=2)
        return {
            "sub_scales": subs.reshape(n, -1)[:, :narrow].astype(np.uint8),
            "sub_zeros": zeros.reshape(n, -1)[:, :narrow].astype(np.uint8),
        }
