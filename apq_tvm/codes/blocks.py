"""Blocks of GGUF as tensors of ours, code for code.

======  ===========  ==============================================================================
type    scheme       what a block means, and how it becomes ours
======  ===========  ==============================================================================
Q4_0    W4A8g32      32 codes, d float16: ``d (q - 8)``; the same
Q5_0    W5A8g32      32 codes, d float16: ``d (q - 16)``; the same
Q8_0    W8A8g32      32 signed codes, d float16: ``d q``; codes are numbered from -128 on
Q4_1    W4mA8g32     32 codes, d, m float16: ``d q + m``; the minimum is -m, exact
Q5_1    W5mA8g32     the same with 5 bits
Q2_K    W2sA8        16 groups of 16: ``d s q - dmin m``, s and m 4 bits; the same
Q3_K    W3kA8        16 groups of 16: ``d (s - 32) (q - 4)``, s 6 bits; s - 32 lies in an int8
Q4_K    W4kA8        8 groups of 32: ``d s q - dmin m``, s and m 6 bits; they lie in a byte each
Q5_K    W5kA8        the same with 5 bits
Q6_K    W6kA8        16 groups of 16: ``d s (q - 32)``, s int8; the same
======  ===========  ==============================================================================

Layouts of the blocks are those of ggml-common.h and of dequantize_row_* in ggml-quants.c.

All are exact: no code, scale or minimum changes, and `apq_tvm.formats.dequantize` gives the float32
numbers that llama.cpp's own decoder gives, bit for bit. Bits per weight are equal but for Q3_K,
Q4_K and Q5_K, whose 6-bit numbers take a byte here: 1/8 bit more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from apq_tvm.formats import kquant, minimum, superblock
from apq_tvm.types import F32, U8, Array, QuantizedTensor, Scheme

Decode = Callable[[U8], QuantizedTensor | F32]
"""Blocks uint8 [N, B, bytes of one] → the matrix."""


def _half(blocks: U8, at: int) -> Array:
    """A float16 of every block, [N, B]."""
    return np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16)[..., 0]


def _flat(values: Array) -> Array:
    """[N, B, ...] -> [N, all]."""
    return np.ascontiguousarray(values.reshape(len(values), -1))


def _nibbles(packed: U8) -> U8:
    """[..., bytes] -> [..., 2, bytes]: low nibbles, then high ones."""
    return np.stack([packed & 15, packed >> 4], axis=-2)


def _fifth_bits(blocks: U8, at: int) -> U8:
    """32 bits of every block, [N, B, 32] of 0 or 16."""
    bits = np.unpackbits(blocks[..., at : at + 4], axis=-1, bitorder="little")
    return np.asarray(bits << np.uint8(4), np.uint8)


def _small(bits: int, minima: bool) -> Decode:
    """Q4_0, Q4_1, Q5_0 and Q5_1: scale, minimum, fifth bits, nibbles."""

    def decode(blocks: U8) -> QuantizedTensor:
        first = 4 if minima else 2
        codes = _nibbles(blocks[..., -16:]).reshape(*blocks.shape[:2], 32)
        if bits == 5:
            codes = codes | _fifth_bits(blocks, first)
        scales = _half(blocks, 0)
        if not minima:
            return QuantizedTensor(_flat(codes), scales, None, Scheme(bits, group_size=32))
        scheme = minimum.scheme(bits, 32)
        return QuantizedTensor(_flat(codes), scales, None, scheme, {"mins": -_half(blocks, 2)})

    return decode


def _q8_0(blocks: U8) -> QuantizedTensor:
    codes = blocks[..., 2:] ^ np.uint8(0x80)  # two's complement + 128
    return QuantizedTensor(_flat(codes), _half(blocks, 0), None, Scheme(8, group_size=32))


def _crumbs(packed: U8) -> U8:
    """2-bit codes [N, B, 64] -> [N, B, 256]: 32 bytes are four times 32 codes."""
    halves = packed.reshape(*packed.shape[:2], 2, 1, 32)
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    return np.asarray((halves >> shifts) & 3, np.uint8).reshape(*packed.shape[:2], 256)


def _q2_k(blocks: U8) -> QuantizedTensor:
    small, codes = blocks[..., :16], _crumbs(blocks[..., 16:80])
    tables = {
        "min_scales": _half(blocks, 82),
        "subs": _flat(small & 15),
        "mins": _flat(small >> 4),
    }
    scheme = Scheme(2, group_size=superblock.GROUP, family=superblock.NAME, weights="W2s")
    return QuantizedTensor(_flat(codes), _half(blocks, 80), None, scheme, tables)


def _kquant(bits: int, codes: U8, scales: Array, tables: Mapping[str, Array]) -> QuantizedTensor:
    size = kquant.KINDS[bits].group
    scheme = Scheme(bits, group_size=size, family=kquant.NAME, weights=f"W{bits}k")
    return QuantizedTensor(_flat(codes), scales, None, scheme, tables)


def _q3_k(blocks: U8) -> QuantizedTensor:
    high = np.unpackbits(blocks[..., :32, None], axis=-1, bitorder="little")  # [N, B, 32, 8]
    high = high.swapaxes(-1, -2).reshape(*blocks.shape[:2], 256)
    codes = _crumbs(blocks[..., 32:96]) | high << np.uint8(2)
    packed = blocks[..., 96:108]
    low = _nibbles(packed[..., :8]).reshape(*blocks.shape[:2], 16)
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    upper = ((packed[..., None, 8:] >> shifts) & 3).reshape(*blocks.shape[:2], 16)
    subs = (low | upper << np.uint8(4)).astype(np.int8) - np.int8(32)
    return _kquant(3, codes, _half(blocks, 108), {"subs": _flat(subs)})


def _q45_k(bits: int) -> Decode:
    """Q4_K and Q5_K: scales, 8 sub-scales and 8 minima in 12 bytes, fifth bits, nibbles."""

    def decode(blocks: U8) -> QuantizedTensor:
        packed = blocks[..., 4:16]
        first, second, third = packed[..., :4], packed[..., 4:8], packed[..., 8:]
        subs = np.concatenate([first & 63, (third & 15) | (first >> 6) << np.uint8(4)], -1)
        mins = np.concatenate([second & 63, (third >> 4) | (second >> 6) << np.uint8(4)], -1)
        pairs = blocks[..., -128:].reshape(*blocks.shape[:2], 4, 32)
        codes = _nibbles(pairs).reshape(*blocks.shape[:2], 256)
        if bits == 5:
            high = np.unpackbits(blocks[..., 16:48, None], axis=-1, bitorder="little")
            high = high.swapaxes(-1, -2).reshape(*blocks.shape[:2], 256)  # bit c is of codes 32c
            codes = codes | high << np.uint8(4)
        tables = {
            "subs": _flat(subs), "min_scales": _half(blocks, 2), "mins": _flat(mins),
        }  # fmt: skip
        return _kquant(bits, codes, _half(blocks, 0), tables)

    return decode


def _q6_k(blocks: U8) -> QuantizedTensor:
    lead = blocks.shape[:2]
    low = _nibbles(blocks[..., :128].reshape(*lead, 2, 64)).reshape(*lead, 256)
    codes = low | _crumbs(blocks[..., 128:192]) << np.uint8(4)
    subs = np.ascontiguousarray(blocks[..., 192:208]).view(np.int8)
    return _kquant(6, codes, _half(blocks, 208), {"subs": _flat(subs)})


def _floats(dtype: str) -> Decode:
    return lambda blocks: _flat(blocks).view(dtype).astype(np.float32)


def _bfloat16(blocks: U8) -> F32:
    return (_flat(blocks).view("<u2").astype(np.uint32) << 16).view(np.float32)


DECODERS: Mapping[str, Decode] = {
    "F32": _floats("<f4"), "F16": _floats("<f2"), "F64": _floats("<f8"), "BF16": _bfloat16,
    "Q4_0": _small(4, False), "Q4_1": _small(4, True),
    "Q5_0": _small(5, False), "Q5_1": _small(5, True), "Q8_0": _q8_0,
    "Q2_K": _q2_k, "Q3_K": _q3_k, "Q4_K": _q45_k(4), "Q5_K": _q45_k(5), "Q6_K": _q6_k,
}  # fmt: skip
"""By name of the type."""
