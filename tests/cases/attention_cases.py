"""One attention over packed keys: its operands, garbage where nothing may be read, and float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from apq_tvm.formats.caches import group_size
from apq_tvm.ops.graph.attention import FOURS, PACK, attention
from apq_tvm.ops.graph.caches.coded import coded_shapes

LOWEST = np.finfo(np.float32).min

NO_NUMBER = 0x7FC0
"""A bfloat16 that is none."""


def mask_of(kind: str, batch: int, queries: int, tokens: int) -> Any:
    """What is added to scores, [B, 1, S, T] or, for ``keys``, [B, 1, S, T] of equal rows."""
    at = np.arange(tokens)[None, :]
    query = np.arange(queries)[:, None] + tokens - queries
    low = LOWEST if kind == "lowest" else -np.inf
    hidden = {
        "none": at < 0,
        "keys": at >= max(1, tokens * 3 // 4),
        "causal": at > query,
        "lowest": at > query,
        "window": (at > query) | (at < query - 9),
        "hidden": at >= 0,
    }[kind]
    mask = np.where(np.broadcast_to(hidden, (queries, tokens)), low, 0).astype(np.float32)
    return np.broadcast_to(mask, (batch, 1, queries, tokens)).copy()


def coded(rows: Any) -> tuple[Any, Any]:
    """int8 codes of rows and their float32 scales, rounded once, as one instruction does."""
    largest = np.abs(rows).max(-1, keepdims=True)
    scale = largest * np.float32(1 / 127)
    inverse = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=largest > 0)
    codes = np.rint(rows.astype(np.float64) * inverse.astype(np.float64))
    return np.ascontiguousarray(codes, np.int8), scale[..., 0]


def in_fours(codes: Any) -> Any:
    """Codes [T, B, N, H] as keys are packed; garbage where nothing may be read."""
    tokens, batch, heads, size = codes.shape
    blocks, fours = -(-tokens // PACK), -(-size // FOURS)
    packed = np.full((blocks * PACK, batch, heads, fours * FOURS), 99, np.int8)
    packed[:tokens] = 0  # columns that fill up a four multiply zeros of q, or are zeros
    packed[:tokens, ..., :size] = codes
    packed = packed.reshape(blocks, PACK, batch, heads, fours, FOURS)
    return packed.transpose(0, 2, 3, 4, 1, 5).reshape(blocks, batch, heads, fours, -1).copy()


def by_blocks(scales: Any) -> Any:
    """Scales [T, B, N, ..] as ``[ceil(T / 16), B, N, .., 16]``; NaN where nothing may be read."""
    tokens, *rest = scales.shape
    blocks = -(-tokens // PACK)
    nothing = NO_NUMBER if scales.dtype == np.uint16 else np.nan
    packed = np.full((blocks * PACK, *rest), nothing, scales.dtype)
    packed[:tokens] = scales
    return np.moveaxis(packed.reshape(blocks, PACK, *rest), 1, -1).copy()


def nibbles(rows: Any) -> tuple[Any, Any, Any]:
    """int4 codes [.., H] of rows; bfloat16 [.., 2 groups] of their scales and leasts; floats."""
    size = group_size(rows.shape[-1])
    x = rows.reshape(*rows.shape[:-1], -1, size)
    low, high = x.min(-1, keepdims=True), x.max(-1, keepdims=True)
    least = _upper(low, low < 0)
    base = floats_of(least)
    scale = _upper((high - base) * np.float32(1 / 15), True)
    step = floats_of(scale)
    inverse = np.divide(np.float32(1), step, out=np.zeros_like(step), where=step > 1e-35)
    codes = np.clip(np.rint((x - base) * inverse), 0, 15).astype(np.uint8)
    spans = np.stack([scale[..., 0], least[..., 0]], -1)
    spans = spans.reshape(*rows.shape[:-1], -1)
    return codes.reshape(rows.shape), spans, (codes * step + base).reshape(rows.shape)


def _upper(floats: Any, away: Any) -> Any:
    bits = floats.astype(np.float32).view(np.uint32)
    return (np.where(away, bits + np.uint32(0xFFFF), bits) >> 16).astype(np.uint16)


def floats_of(halves: Any) -> Any:
    """What bfloat16 is."""
    return (halves.astype(np.uint32) << 16).view(np.float32)


def keys_in_pairs(codes: Any) -> Any:
    """int4 codes [T, B, N, H] as keys are packed; garbage where nothing may be read."""
    eights = codes.reshape(*codes.shape[:-1], -1, 2, FOURS)
    pairs = eights[..., 0, :] | eights[..., 1, :] << 4
    return in_fours(pairs.reshape(*codes.shape[:-1], -1).view(np.int8)).view(np.uint8)


def values_in_pairs(codes: Any) -> Any:
    """int4 codes [T, B, N, H] as values lie."""
    half = group_size(codes.shape[-1]) // 2
    groups = codes.reshape(*codes.shape[:-1], -1, 2, half)
    return (groups[..., 0, :] | groups[..., 1, :] << 4).reshape(*codes.shape[:-1], -1)


class Problem:
    """Heads and what is done to scores; sizes are a run's."""

    def __init__(
        self, group: int, heads: int, size: int, *, width: int = 0, dtype: str = "float32",
        masked: bool = True, softcap: float = 0.0, sink: bool = False, zero_masked: bool = False,
    ) -> None:  # fmt: skip
        self.group, self.heads, self.size, self.width = group, heads, size, width or size
        self.dtype, self.masked, self.softcap = dtype, masked, softcap
        self.sink, self.zero_masked = sink, zero_masked
        self.rounds_q = False
        """Whether codes of keys are multiplied by codes of q."""

    def func(self) -> Any:
        """The PrimFunc of q [B, S, N, H] and values [T, B, Nkv, Hv]."""
        keys, scales = ("C", "B", self.heads, self.size, PACK), ()
        values = ("T", "B", self.heads, self.width)
        if self.dtype in ("int8", "int4"):
            dims = [("C", "T", "B", self.heads, columns) for columns in (self.size, self.width)]
            keys, key_scales = coded_shapes(dims[0], "keys", self.dtype)
            values, value_scales = coded_shapes(dims[1], "rows", self.dtype)
            scales = (key_scales, value_scales)
        return attention(
            ("B", "S", self.group * self.heads, self.size),
            keys,
            values,
            ("B", 1, "S", "T") if self.masked else None,
            order=(0, 2, 1, 3), order_out=(0, 2, 1, 3), scale=self.size**-0.5, dtype=self.dtype,
            softcap=self.softcap, sink=self.sink, zero_masked=self.zero_masked, scales=scales,
        )  # fmt: skip

    def _operands(self, batch: int, queries: int, tokens: int) -> tuple[Any, Any, Any, Any]:
        rng = np.random.default_rng(tokens)

        def normal(*shape: int) -> Any:
            return rng.standard_normal(shape).astype(np.float32)

        q = normal(batch, queries, self.group * self.heads, self.size)
        kept = "float32" if self.dtype in ("int8", "int4") else self.dtype
        k = normal(tokens, batch, self.heads, self.size).astype(kept)
        v = normal(tokens, batch, self.heads, self.width).astype(kept)
        return q, k, v, normal(self.group * self.heads)

    def run(
        self, run: Callable[..., None], batch: int, queries: int, tokens: int, kind: str,
        only: int | None = None,
    ) -> Any:  # fmt: skip
        """What the kernel makes of random operands, of query `only` alone if there is one."""
        q, k, v, sink = self._operands(batch, queries, tokens)
        mask = mask_of(kind, batch, queries, tokens)
        if only is not None:
            q, mask = q[:, only : only + 1].copy(), mask[:, :, only : only + 1].copy()
        y = np.full((*q.shape[:-1], self.width), np.nan, np.float32)
        run(q, *self._kept(k, v), *[mask] * self.masked, *[sink] * self.sink, y)
        return y

    def _kept(self, k: Any, v: Any) -> tuple[Any, ...]:
        """Keys and values as a cache has them."""
        if self.dtype == "int8":
            (k, key_scales), (v, value_scales) = coded(k), coded(v)
            return in_fours(k), v, by_blocks(key_scales), by_blocks(value_scales)
        if self.dtype == "int4":
            (k, key_spans, _), (v, value_spans, _) = nibbles(k), nibbles(v)
            spans = by_blocks(key_spans), by_blocks(value_spans)
            return keys_in_pairs(k), values_in_pairs(v), *spans
        tokens = len(k)
        blocks = -(-tokens // PACK)
        packed = np.full((blocks * PACK, *k.shape[1:]), np.nan, self.dtype)
        packed[:tokens] = k
        packed = packed.reshape(blocks, PACK, *k.shape[1:]).transpose(0, 2, 3, 4, 1).copy()
        return packed, v

    def expected(self, batch: int, queries: int, tokens: int, kind: str) -> Any:
        """The same in float64, of operands as they are kept and, if `rounds_q`, multiplied."""
        q, k, v, sink = self._operands(batch, queries, tokens)
        if self.dtype == "int8":
            (k, key_scales), (v, value_scales) = coded(k), coded(v)
            k, v = k * key_scales[..., None], v * value_scales[..., None]
        if self.dtype == "int4":
            k, v = nibbles(k)[-1], nibbles(v)[-1]
        if self.rounds_q:
            scale = np.float32(self.size**-0.5)
            q, steps = coded(q * scale)
            q = q * steps[..., None] / scale
        q, k, v, sink = (x.astype(np.float64) for x in (q, k, v, sink))
        k, v = (np.repeat(x, self.group, axis=2) for x in (k, v))
        scores = np.einsum("bsnd,tbnd->bnst", q, k) * self.size**-0.5
        if self.softcap:
            scores = self.softcap * np.tanh(scores / self.softcap)
        scores = scores + mask_of(kind, batch, queries, tokens)
        if self.sink:
            column = np.broadcast_to(sink[None, :, None, None], (*scores.shape[:-1], 1))
            scores = np.concatenate([scores, column], -1)
        e = np.exp(scores - scores.max(-1, keepdims=True))
        p = (e / e.sum(-1, keepdims=True))[..., :tokens]
        return np.einsum("bnst,tbnd->bsnd", p, v)

    def check(
        self, run: Callable[..., None], batch: int, queries: int, tokens: int, kind: str
    ) -> None:
        """Compare; every query must see a key."""
        if kind in ("causal", "lowest", "window"):
            queries = min(queries, tokens)
        y = self.run(run, batch, queries, tokens, kind)
        want = self.expected(batch, queries, tokens, kind)
        np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-5)
