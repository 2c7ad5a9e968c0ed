"""One attention over packed keys: its operands, garbage where nothing may be read, and float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from apq_tvm.ops.graph.attention import FOURS, PACK, attention

LOWEST = np.finfo(np.float32).min


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
    """Scales [T, B, N] as ``[ceil(T / 16), B, N, 16]``; NaN where nothing may be read."""
    tokens, *rest = scales.shape
    blocks = -(-tokens // PACK)
    packed = np.full((blocks * PACK, *rest), np.nan, np.float32)
    packed[:tokens] = scales
    return packed.reshape(blocks, PACK, *rest).transpose(0, 2, 3, 1).copy()


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
        """Whether int8 keys are multiplied by codes of q."""

    def func(self) -> Any:
        """The PrimFunc of q [B, S, N, H] and values [T, B, Nkv, Hv]."""
        keys, scales = ("C", "B", self.heads, self.size, PACK), ()
        if self.dtype == "int8":
            keys = (*keys[:3], -(-self.size // FOURS), PACK * FOURS)
            scales = (("C", "B", self.heads, PACK),) * 2
        return attention(
            ("B", "S", self.group * self.heads, self.size),
            keys,
            ("T", "B", self.heads, self.width),
            ("B", 1, "S", "T") if self.masked else None,
            order=(0, 2, 1, 3), order_out=(0, 2, 1, 3), scale=self.size**-0.5, dtype=self.dtype,
            softcap=self.softcap, sink=self.sink, zero_masked=self.zero_masked, scales=scales,
        )  # fmt: skip

    def _operands(self, batch: int, queries: int, tokens: int) -> tuple[Any, Any, Any, Any]:
        rng = np.random.default_rng(tokens)

        def normal(*shape: int) -> Any:
            return rng.standard_normal(shape).astype(np.float32)

        q = normal(batch, queries, self.group * self.heads, self.size)
        kept = "float32" if self.dtype == "int8" else self.dtype
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
