"""GGUF files for tests: a writer, encoders of plain blocks, and what every block means in loops.

The loops are llama.cpp's formulas (ggml-quants.c, ``dequantize_row_*``) one weight at a time, so
that `apq_tvm.codes.blocks` is held against something that shares nothing with it.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

NUMBERS = {
    "F32": (0, 1, 4), "F16": (1, 1, 2), "Q4_0": (2, 32, 18), "Q4_1": (3, 32, 20),
    "Q5_0": (6, 32, 22), "Q5_1": (7, 32, 24), "Q8_0": (8, 32, 34), "Q2_K": (10, 256, 84),
    "Q3_K": (11, 256, 110), "Q4_K": (12, 256, 144), "Q5_K": (13, 256, 176),
    "Q6_K": (14, 256, 210), "IQ4_XS": (23, 256, 136), "BF16": (30, 1, 2),
}  # fmt: skip
"""Name of a type → its number, weights of a block, bytes of one."""

HALVES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82),
    "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
}  # fmt: skip
"""Where a block has float16."""


def text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def value_bytes(value: Any) -> bytes:
    """A value with its type: int, float, str or list of str."""
    if isinstance(value, str):
        return struct.pack("<I", 8) + text(value)
    if isinstance(value, list):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(text, value))
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    return struct.pack("<II", 4, value)


def write(
    path: Path, tensors: Mapping[str, tuple[str, Any]], values: Mapping[str, Any] | None = None
) -> Path:
    """Write a file of matrices, given as type and uint8 [N, bytes] or float32 [N, K]."""
    values = {"general.architecture": "llama", **(values or {})}
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(values))
    head += b"".join(text(key) + value_bytes(value) for key, value in values.items())
    body = b""
    for name, (kind, data) in tensors.items():
        number, block, nbytes = NUMBERS[kind]
        if kind == "F32":
            data = np.ascontiguousarray(data, np.float32).view(np.uint8).reshape(len(data), -1)
        n, k = len(data), data.shape[1] // nbytes * block
        head += text(name) + struct.pack("<IQQIQ", 2, k, n, number, len(body))
        body += data.tobytes()
        body += b"\0" * (-len(body) % 32)
    path.write_bytes(head + b"\0" * (-len(head) % 32) + body)
    return path


def encode(kind: str, w: Any) -> Any:
    """Rows of Q4_0, Q4_1 or Q8_0 blocks of float32 weights [N, K], rounded to nearest."""
    groups = np.asarray(w, np.float32).reshape(len(w), -1, 32)
    low, high = groups.min(-1), groups.max(-1)
    most = np.abs(groups).max(-1)
    step = {"Q4_0": most / 7, "Q4_1": (high - low) / 15, "Q8_0": most / 127}[kind]
    step = step.astype(np.float16)
    start = low.astype(np.float16) if kind == "Q4_1" else np.zeros_like(step)
    wide = np.where(step == 0, 1, step).astype(np.float32)[..., None]
    codes = np.rint((groups - start.astype(np.float32)[..., None]) / wide).astype(int)
    parts = [step[..., None].view(np.uint8)]
    if kind == "Q8_0":
        parts.append(codes.astype(np.int8).view(np.uint8))
    else:
        codes = np.clip(codes + (8 if kind == "Q4_0" else 0), 0, 15).astype(np.uint8)
        if kind == "Q4_1":
            parts.append(start[..., None].view(np.uint8))
        parts.append(codes[..., :16] | codes[..., 16:] << 4)
    return np.concatenate(parts, -1).reshape(len(w), -1)


def random_blocks(kind: str, n: int, k: int, seed: int = 0, size: float = 0.1) -> Any:
    """Any bytes, but scales that are numbers up to `size`: uint8 [n, bytes]."""
    rng, (_, block, nbytes) = np.random.default_rng(seed), NUMBERS[kind]
    raw = rng.integers(0, 256, (n, k // block, nbytes), dtype=np.uint8)
    for at in HALVES[kind]:
        half = rng.uniform(-size, size, (n, k // block, 1)).astype(np.float16)
        raw[..., at : at + 2] = half.view(np.uint8)
    return raw.reshape(n, -1)


def meaning(kind: str, raw: Any) -> Any:
    """float32 [N, K] of rows of blocks, in loops."""
    nbytes = NUMBERS[kind][2]
    rows = raw.reshape(len(raw), -1, nbytes)
    return np.array([[_block(kind, b) for b in row] for row in rows]).reshape(len(raw), -1)


def _half(b: Any, at: int) -> Any:
    return np.float32(b[at : at + 2].view(np.float16)[0])


def _block(kind: str, b: Any) -> Any:
    f, ints = np.float32, b.astype(int)
    if kind in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"):
        return [_small(kind, b, ints, i) for i in range(32)]
    out = []
    for i in range(256):
        n, j, at = i // 128, i % 128 // 32, i % 32
        if kind == "Q2_K":
            q, small = ints[16 + 32 * n + at] >> 2 * j & 3, ints[i // 16]
            out.append(_half(b, 80) * f(small & 15) * f(q) - _half(b, 82) * f(small >> 4))
        elif kind == "Q3_K":
            q = ints[32 + 32 * n + at] >> 2 * j & 3
            q -= 0 if ints[at] >> (4 * n + j) & 1 else 4
            g = i // 16
            low = ints[96 + g % 8] >> (4 if g >= 8 else 0) & 15
            sub = (low | (ints[104 + g % 4] >> 2 * (g // 4) & 3) << 4) - 32
            out.append(_half(b, 108) * f(sub) * f(q))
        elif kind == "Q6_K":
            q = ints[64 * n + 32 * (j % 2) + at] >> (4 if j >= 2 else 0) & 15
            q |= (ints[128 + 32 * n + at] >> 2 * j & 3) << 4
            out.append(_half(b, 208) * f(b[192 + i // 16].view(np.int8)) * f(q - 32))
        else:
            five, g = kind == "Q5_K", i // 32
            q = ints[(48 if five else 16) + 32 * (g // 2) + at] >> 4 * (g % 2) & 15
            q |= (ints[16 + at] >> g & 1) << 4 if five else 0
            s = ints[4:16]
            if g < 4:
                sub, least = s[g] & 63, s[g + 4] & 63
            else:
                sub = s[g + 4] & 15 | s[g - 4] >> 6 << 4
                least = s[g + 4] >> 4 | s[g] >> 6 << 4
            out.append(_half(b, 0) * f(sub) * f(q) - _half(b, 2) * f(least))
    return out


def _small(kind: str, b: Any, ints: Any, i: int) -> Any:
    d, f = _half(b, 0), np.float32
    if kind == "Q8_0":
        return d * f(b[2 + i].view(np.int8))
    q = ints[len(b) - 16 + i % 16] >> 4 * (i // 16) & 15
    if kind[1] == "5":
        first = 4 if kind == "Q5_1" else 2
        q |= (ints[first + i // 8] >> i % 8 & 1) << 4
    if kind[-1] == "0":
        return d * f(q - (8 if kind[1] == "4" else 16))
    return d * f(q) + _half(b, 2)


def pairs(weight: Any, heads: int) -> Any:
    """Rows of q or k as llama.cpp's converter stores them: halves of heads become pairs."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip


def llama(
    path: Path, weights: Mapping[str, Any], heads: int, kv_heads: int, kind: str = "Q8_0"
) -> Path:
    """The file of a Llama whose float weights have Hugging Face's names; its head is its table."""
    tensors = {"token_embd.weight": (kind, encode(kind, weights["model.embed_tokens.weight"]))}
    for name, weight in weights.items():
        parts = name.split(".", 3)
        own = NAMES.get(parts[-1].removesuffix(".weight"))
        if own is not None:
            count = {"attn_q": heads, "attn_k": kv_heads}.get(own)
            weight = pairs(weight, count) if count else weight
            tensors[f"blk.{parts[2]}.{own}.weight"] = (kind, encode(kind, weight))
    values = {
        "llama.attention.head_count": heads,
        "llama.attention.head_count_kv": kv_heads,
        "tokenizer.ggml.tokens": ["a", "b", "<s>"],
    }
    return write(path, tensors, values)
