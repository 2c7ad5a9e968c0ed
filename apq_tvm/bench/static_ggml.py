"""ggml's matrix products from a published aarch64 library, judged as our kernels are.

The library's functions ``ggml_gemv_q4_0_4x4_q8_0`` and so on are called under qemu on weights and
activations in ggml's own layouts (``ggml/src/ggml-cpu/repack.h`` and ``repack.cpp``): blocks of 32
along K with one float16 scale; blocks of R rows of weights interleaved in chunks of B bytes for a
function called ``RxB``, four rows of activations likewise for a product of matrices.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from apq_tvm.bench.rivals import relative_error
from apq_tvm.bench.trace import BINUTILS, Instruction, Trace, executed, run, symbols, trace
from apq_tvm.errors import BadInput
from apq_tvm.types import Scheme

BLOCK = 32
"""Values of one scale, QK4_0 and QK8_0 of ggml-common.h."""

SYSROOT = "/usr/aarch64-linux-gnu"

_NAME = re.compile(r"ggml_gem[vm]_(q4_0|q8_0)_(4|8)x(4|8)_q8_0")
_BITS = {"q4_0": 4, "q8_0": 8}


@dataclass(frozen=True)
class Product:
    """A pair of functions of a library: ``ggml_gemv_{layout}_q8_0``, ``ggml_gemm_{layout}_q8_0``.

    Parameters
    ----------
    library : Path
    kind : str
        ``"q4_0"`` or ``"q8_0"``.
    rows, chunk : int
        Rows of weights in a block, bytes of one row in a chunk.
    """

    library: Path
    kind: str
    rows: int
    chunk: int

    def symbol(self, name: str) -> str:
        """The function's name; `name` is ``"gemv"`` or ``"gemm"``."""
        return f"ggml_{name}_{self.kind}_{self.rows}x{self.chunk}_q8_0"


@dataclass(frozen=True)
class Call:
    """What one call did.

    Parameters
    ----------
    counted : Trace
    code : list of Instruction
        What the library executed.
    error : float
        Mean error of the result against the exact product with the weights' codes, relative to its
        root mean square.
    """

    counted: Trace
    code: list[Instruction]
    error: float

    @property
    def fallback(self) -> bool:
        """True if ggml has nothing but plain C for this core behind the function's name."""
        return any(i.function.endswith("_generic") for i in self.code)


def find_products(text: str, scheme: Scheme | None) -> list[Product]:
    """The products in ``FILE[:symbol]`` that compute a layer of a scheme, if any.

    Raises
    ------
    BadInput
        The file is missing, is no aarch64 library of ggml, or has no such function.
    """
    name, _, symbol = (text, "", "") if Path(text).is_file() else text.rpartition(":")
    library = Path(name)
    if not library.is_file():
        raise BadInput(f"--against {text!r} is no file, nor FILE:symbol")
    names = [s.name for s in symbols(library)]
    if symbol and symbol not in names:
        raise BadInput(f"--against {text!r}: {library.name} does not define {symbol}")
    found = [match for match in map(_NAME.fullmatch, [symbol] if symbol else names) if match]
    if not found:
        raise BadInput(
            f"--against {text!r}: bench static can call ggml_gemv_q4_0_4x4_q8_0 and its like "
            "(q4_0, q8_0; 4x4, 4x8, 8x8; gemv, gemm), of an aarch64 libggml-cpu"
        )
    products = {Product(library, m[1], int(m[2]), int(m[3])) for m in found}
    wanted = (
        scheme.bits
        if scheme and scheme.family == "int" and scheme.group_size == BLOCK and scheme.integer_acts
        else 0
    )
    fitting = [p for p in products if _BITS[p.kind] == wanted]
    return sorted(fitting, key=lambda p: (p.rows, p.chunk))


def call(product: Product, n: int, k: int, m: int, folder: Path, cpu: str) -> Call:
    """Call a product on random weights and activations under qemu.

    Raises
    ------
    BadInput
        ggml's blocks do not divide the layer.
    BuildError
        A tool is missing, or the library cannot be loaded.
    """
    if k % BLOCK or n % product.rows:
        raise BadInput(
            f"{product.symbol('gemv')}: {n}x{k} is no multiple of {product.rows}x{BLOCK}"
        )
    rng = np.random.default_rng(n + k)
    bits = _BITS[product.kind]
    codes = rng.integers(-(2 ** (bits - 1)), 2 ** (bits - 1), (n, k // BLOCK, BLOCK), np.int8)
    scales = rng.uniform(0.01, 0.02, (n, k // BLOCK)).astype(np.float16)
    x = rng.standard_normal((m, k)).astype(np.float32)
    acts, act_scales = quantize_rows(x)
    packed = codes if bits == 8 else pack_nibbles(codes)
    fours = m - m % 4
    parts = [
        interleave(packed, scales, product.rows, product.chunk),
        interleave(acts[:fours], act_scales[:fours], 4, product.chunk),
        interleave(acts[fours:], act_scales[fours:], 1, BLOCK),
    ]
    arguments, results = folder / "ggml_arguments", folder / "ggml_results"
    arguments.write_bytes(b"".join(struct.pack("<Q", len(p)) + p for p in parts))
    library = product.library.resolve()
    words = [str(library), product.symbol("gemm"), product.symbol("gemv"), str(k), str(m), str(n),
             str(arguments), str(results)]  # fmt: skip
    options = ("-cpu", cpu, "-L", SYSROOT, "-E", f"LD_LIBRARY_PATH={library.parent}")
    counted = trace(_program(folder), words, folder, options)
    data = results.read_bytes()
    (base,) = struct.unpack_from("<Q", data)
    y = np.frombuffer(data, np.float32, m * n, 8).reshape(m, n)
    dense = (codes * scales[..., None].astype(np.float64)).reshape(n, k)
    error, _ = relative_error(y, x, dense)
    return Call(counted, executed(library, symbols(library), counted, base), error)


def quantize_rows(x: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.float16]]:
    """Round [M, K] to q8_0: codes [M, K / 32, 32] and scales [M, K / 32]."""
    blocks = x.reshape(len(x), -1, BLOCK)
    scales = np.abs(blocks).max(axis=2) / 127
    inverse = np.divide(1, scales, out=np.zeros_like(scales), where=scales > 0)
    return np.rint(blocks * inverse[..., None]).astype(np.int8), scales.astype(np.float16)


def pack_nibbles(codes: NDArray[np.int8]) -> NDArray[np.int8]:
    """Two's complement nibbles of [..., 32] as bytes [..., 16]: value i and value i + 16."""
    low, high = codes[..., : BLOCK // 2], codes[..., BLOCK // 2 :]
    return (low & 15) | (high << 4)


def interleave(
    blocks: NDArray[np.int8], scales: NDArray[np.float16], rows: int, chunk: int
) -> bytes:
    """Lay out blocks [rows of the matrix, K / 32, bytes] as ggml does.

    Every `rows` rows give, for each block along K, their scales and then their bytes, `chunk` of
    one row after `chunk` of the row before.
    """
    n, count, size = blocks.shape
    split = blocks.reshape(n // rows, rows, count, size // chunk, chunk)
    mixed = split.transpose(0, 2, 3, 1, 4).reshape(n // rows, count, rows * size)
    grouped = scales.reshape(n // rows, rows, count).transpose(0, 2, 1)
    halves = np.ascontiguousarray(grouped).view(np.int8)  # [n / rows, count, 2 * rows]
    return np.concatenate([halves, mixed], axis=2).tobytes()


def _program(folder: Path) -> Path:
    path = folder / "static_ggml"
    if not path.is_file():
        source = str(Path(__file__).with_suffix(".c"))
        run([f"{BINUTILS}gcc", "-O1", "-no-pie", source, "-ldl", "-o", str(path)])
    return path
