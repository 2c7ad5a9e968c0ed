"""One attention over packed keys: its operands, garbage where nothing may be read, and float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from apq_tvm.ops.graph.attention import PACK, attention

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


class Problem:
    """Heads and what is done to scores; sizes are a run's."""

    def __init__(
        self, group: int, heads: int, size: int, *, width: int = 0, dtype: str = "float32",
        masked: bool = True, softcap: float = 0.0, sink: bool = False, zero_masked: bool = False,
    ) -> None:  # fmt: skip
        self.group, self.heads, self.size, self.width = group, heads, size, width or size
        self.dtype, self.masked, self.softcap = dtype, masked, softcap
        self.sink, self.zero_masked = sink, zero_masked

    def func(self) -> Any:
        """The PrimFunc of q [B, S, N, H] and values [T, B, Nkv, Hv]."""
        return attention(
            ("B", "S", self.group * self.heads, self.size),
            ("C", "B", self.heads, self.size, PACK),
            ("T", "B", self.heads, self.width),
            ("B", 1, "S", "T") if self.masked else None,
            order=(0, 2, 1, 3), order_out=(0, 2, 1, 3), scale=self.size**-0.5, dtype=self.dtype,
            softcap=self.softcap, sink=self.sink, zero_masked=self.zero_masked,
        )  # fmt: skip

    def _operands(self, batch: int, queries: int, tokens: int) -> tuple[Any, Any, Any, Any]:
        rng = np.random.default_rng(tokens)

        def normal(*shape: int) -> Any:
            return rng.standard_normal(shape).astype(np.float32)

        q = normal(batch, queries, self.group * self.heads, self.size)
        k = normal(tokens, batch, self.heads, self.size).astype(self.dtype)
        v = normal(tokens, batch, self.heads, self.width).astype(self.dtype)
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
        blocks = -(-tokens // PACK)
        packed = np.full((blocks * PACK, *k.shape[1:]), np.nan, self.dtype)
        packed[:tokens] = k
        packed = packed.reshape(blocks, PACK, *k.shape[1:]).transpose(0, 2, 3, 4, 1).copy()
        y = np.full((*q.shape[:-1], self.width), np.nan, np.float32)
        run(q, packed, v, *[mask] * self.masked, *[sink] * self.sink, y)
        return y

    def expected(self, batch: int, queries: int, tokens: int, kind: str) -> Any:
        """The same in float64."""
        q, k, v, sink = (x.astype(np.float64) for x in self._operands(batch, queries, tokens))
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
