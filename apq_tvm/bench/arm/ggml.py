"""ggml's matrix products from a published aarch64 library, judged as our kernels are.

The library's functions ``ggml_gemv_q4_0_4x4_q8_0`` and so on are called under qemu on weights in
ggml's own layouts (``ggml/src/ggml-common.h``, ``ggml/src/ggml-cpu/repack.cpp``): blocks of 32
along K with one float16 scale; blocks of R rows interleaved in chunks of B bytes for a function
called ``RxB``. The library itself rounds the activations, which is counted apart.
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

CODES = {
    "q4_0": tuple(range(-8, 8)),
    "q8_0": tuple(range(-128, 128)),
    "iq4_nl": (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113),
}
"""What the codes of a kind of block mean, in units of the scale (kvalues_iq4nl of ggml)."""

_NAME = re.compile(r"ggml_gem[vm]_(q4_0|q8_0|iq4_nl)_(4|8)x(4|8)_q8_0")


@dataclass(frozen=True)
class Product:
    """A pair of functions of a library: ``ggml_gemv_{layout}_q8_0``, ``ggml_gemm_{layout}_q8_0``.

    Parameters
    ----------
    library : Path
    kind : str
        Of block, a key of `CODES`.
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
class Ran:
    """What one call executed: all of it, and the library's code."""

    counted: Trace
    code: list[Instruction]

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
            f"({', '.join(CODES)}; 4x4, 4x8, 8x8; gemv, gemm), of an aarch64 libggml-cpu"
        )
    products = {Product(library, m[1], int(m[2]), int(m[3])) for m in found}
    fitting = [p for p in products if scheme and p.kind == _kind(scheme)]
    return sorted(fitting, key=lambda p: (p.rows, p.chunk))


def _kind(scheme: Scheme) -> str:
    """The kind of block that is nearest to a scheme."""
    if scheme.family == "nl":
        return "iq4_nl"
    if scheme.family == "int" and scheme.integer_acts and scheme.group_size == BLOCK:
        return {4: "q4_0", 8: "q8_0"}.get(scheme.bits, "")
    return ""


def call(
    product: Product, n: int, k: int, m: int, folder: Path, cpu: str
) -> tuple[Ran, Ran, float]:
    """Call a product on random weights and activations under qemu.

    Returns
    -------
    Ran, Ran, float
        The product, the preparation of its activations, and the mean error of the result against
        the exact product with the weights' codes, relative to its root mean square.

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
    values = np.array(CODES[product.kind])
    codes = rng.integers(0, len(values), (n, k // BLOCK, BLOCK), np.uint8)
    scales = rng.uniform(0.01, 0.02, (n, k // BLOCK)).astype(np.float16)
    x = rng.standard_normal((m, k)).astype(np.float32)
    arguments = folder / "ggml_arguments"
    stored = interleave(pack(codes, product.kind), scales, product.rows, product.chunk)
    arguments.write_bytes(x.tobytes() + stored)
    prepared, _ = _run(product, "prepare", (k, m, n), arguments, cpu)
    ran, y = _run(product, "product", (k, m, n), arguments, cpu)
    dense = (values[codes] * scales[..., None].astype(np.float64)).reshape(n, k)
    return ran, prepared, relative_error(y, x, dense)[0]


def _run(
    product: Product, mode: str, sizes: tuple[int, int, int], arguments: Path, cpu: str
) -> tuple[Ran, NDArray[np.float32]]:
    folder, library = arguments.parent, product.library.resolve()
    results = folder / "ggml_results"
    words = [
        *(str(library), product.symbol("gemm"), product.symbol("gemv")),
        *(f"ggml_quantize_mat_q8_0_4x{product.chunk}", mode),
        *map(str, sizes),
        *(str(arguments), str(results)),
    ]
    options = ("-cpu", cpu, "-L", SYSROOT, "-E", f"LD_LIBRARY_PATH={library.parent}")
    counted = trace(_program(folder), words, folder, options)
    data = results.read_bytes()
    (base,) = struct.unpack_from("<Q", data)
    _, m, n = sizes
    y = np.frombuffer(data, np.float32, m * n, 8).reshape(m, n)
    return Ran(counted, executed(library, symbols(library), counted, base)), y


def pack(codes: NDArray[np.uint8], kind: str) -> NDArray[np.uint8]:
    """Store codes [..., 32] as ggml does once it interleaves them.

    Integers in two's complement; of 4 bits, value i and value i + 16 share byte i.
    """
    sign = {"q8_0": 0x80, "q4_0": 8}.get(kind, 0)
    stored = codes ^ np.uint8(sign)
    if kind == "q8_0":
        return stored
    return stored[..., : BLOCK // 2] | stored[..., BLOCK // 2 :] << np.uint8(4)


def interleave(
    blocks: NDArray[np.uint8], scales: NDArray[np.float16], rows: int, chunk: int
) -> bytes:
    """Lay out blocks [rows of the matrix, K / 32, bytes] as ggml does.

    Every `rows` rows give, for each block along K, their scales and then their bytes, `chunk` of
    one row after `chunk` of the row before.
    """
    n, count, size = blocks.shape
    split = blocks.reshape(n // rows, rows, count, size // chunk, chunk)
    mixed = split.transpose(0, 2, 3, 1, 4).reshape(n // rows, count, rows * size)
    grouped = scales.reshape(n // rows, rows, count).transpose(0, 2, 1)
    halves = np.ascontiguousarray(grouped).view(np.uint8)  # [n / rows, count, 2 * rows]
    return np.concatenate([halves, mixed], axis=2).tobytes()


def _program(folder: Path) -> Path:
    path = folder / "static_ggml"
    if not path.is_file():
        source = str(Path(__file__).with_suffix(".c"))
        run([f"{BINUTILS}gcc", "-O1", "-no-pie", source, "-ldl", "-o", str(path)])
    return path
