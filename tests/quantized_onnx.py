"""Small models that come quantized, and the codes that are in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from onnx_models import build, only, rand, save

from apq_tvm.formats import dequantize
from apq_tvm.types import ImportedModel, QuantizedTensor

MS = {"com.microsoft": 1}
RNG = np.random.default_rng(0)
HALF = 2.0**-10  # of float16 scales beside float32 ones


def kept(model: ImportedModel, op: str = "apq.Linear") -> QuantizedTensor:
    """The tensor of the only layer."""
    tensor = model.quantized[only(model, op).inputs[1 if op == "apq.Linear" else 0]]
    weight = model.weights[only(model, op).inputs[1 if op == "apq.Linear" else 0]]
    error = np.abs(dequantize(tensor) - weight).max()
    assert error <= HALF * np.abs(weight).max()
    return tensor


def pack(codes: np.ndarray, bits: int) -> np.ndarray:
    """uint8 codes [..., n] in bytes, the first one lowest."""
    per = 8 // bits
    shape = (*codes.shape[:-1], -(-codes.shape[-1] // per) * per)
    padded = np.zeros(shape, np.uint8)
    padded[..., : codes.shape[-1]] = codes
    parts = padded.reshape(*shape[:-1], -1, per)
    return np.bitwise_or.reduce(parts << (np.arange(per, dtype=np.uint8) * bits), axis=-1)


TYPES = {
    "int8": (np.int8, 8, 13),
    "uint8": (np.uint8, 8, 13),
    "int4": (ml_dtypes.int4, 4, 21),
    "uint4": (ml_dtypes.uint4, 4, 21),
    "int2": (ml_dtypes.int2, 2, 25),
    "uint2": (ml_dtypes.uint2, 2, 25),
}


def integers(kind: str, *shape: int, small: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Random values of a type, and the codes 0 .. 2^bits - 1 that they are.

    `small` ones are of the middle half: two of them times two uint8 fit an int16, in which ONNX
    Runtime adds products on x86 without VNNI.
    """
    dtype, bits, _ = TYPES[kind]
    ends = (1 << bits - 2, 3 << bits - 2) if small else (0, 1 << bits)
    codes = RNG.integers(*ends, shape)
    low = 1 << (bits - 1) if kind.startswith("int") else 0
    return (codes - low).astype(dtype), codes.astype(np.uint8)


def nbits(
    folder: Path,
    bits: int = 4,
    block: int = 32,
    n: int = 6,
    k: int = 64,
    zeros: str = "",
    extra: str = "",
    attrs: dict[str, Any] | None = None,
    **weights: np.ndarray,
) -> tuple[Path, np.ndarray, np.ndarray | None]:
    """A MatMulNBits, its codes [N, K] and zero points [N, blocks]."""
    blocks = -(-k // block)
    codes = RNG.integers(0, 1 << bits, (n, k)).astype(np.uint8)
    padded = np.zeros((n, blocks * block), np.uint8)
    padded[:, :k] = codes
    given = {
        "w": pack(padded, bits).reshape(n, blocks, -1),
        "s": (np.abs(rand(n * blocks)) / 10 + 0.01).astype(np.float32),
    }
    zero = RNG.integers(0, 1 << bits, (n, blocks)).astype(np.uint8) if zeros else None
    if zeros == "packed":
        assert zero is not None
        given["z"] = pack(zero, bits).reshape(-1)
    elif zeros == "float":
        assert zero is not None
        given["z"] = zero.astype(np.float32).reshape(-1)
    words = f"x w s {'z' if zeros else '_'} {extra}"
    sizes = {"K": k, "N": n, "bits": bits, "block_size": block}
    node = ("com.microsoft.MatMulNBits", words, "y", {**sizes, **(attrs or {})})
    inputs = {"x": ("float32", ["b", "s0", k])}
    path = save(build([node], inputs, "y", {**given, **weights}, domains=MS), folder)
    return path, codes, zero
