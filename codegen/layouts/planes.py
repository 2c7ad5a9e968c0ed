"""The any-precision layouts ``planes{min}-{max}r8`` and ``cells{min}-{max}r8``: bitplanes.

A model of b bits reads b of them.

Plane 0 holds the most significant bit of every code. Byte k of a plane's row block is the bits of
its eight rows: bit t belongs to row t. A register of V consecutive bytes is then V consecutive k of
eight rows; a few masked merges of b registers make eight registers of codes, each of one row, in
the order of the activations, whatever V is. So one layout serves every vector width.

Arrays, in kernel argument order:

- ``planes`` uint8 [bits, NB, Kp]: plane after plane, so that those not asked for are never touched;
- ``scales`` float16 [NB, 8];
- per width b ``centroids{b}`` [T, 2^b]: int8 with ``steps{b}`` float32 [T] where activations are
  integers (`apq_tvm.formats.anyprec.integer_table`), else float16. Where fewer than eight channels
  share a table, T covers NB * 8 rows.

``cells{min}-{max}r8`` (`apq_tvm.formats.anyprec_cells`) has int8 ``centroids{b}`` up to 5 bits, for
every row its own and without steps, then ``halves`` uint8 [T, 32] where there are wider widths.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np

from apq_tvm.codegen.layouts.layout import Details, Shapes, WeightLayout
from apq_tvm.errors import PackError
from apq_tvm.formats import anyprec_cells as cells
from apq_tvm.formats.anyprec import channels_of, integer_table, restore_table, table_name
from apq_tvm.tensorize.meaning.planes import ROWS, cell_value, plane_code
from apq_tvm.types import Array, QuantizedTensor, Scheme

STEP_K = 32
"""K is padded to a multiple of this, as that of quantized activations is."""


@dataclass(frozen=True)
class PlanesLayout(WeightLayout):
    """How one any-precision matrix [N, K] lies in memory.

    Parameters
    ----------
    min_bits, bits : int
        Narrowest and widest width.
    integer : bool
        True if tables are int8.
    channels : int
        Output channels that share a table, a power of 2.
    cells : bool
        Whether cells of 5 bits are divided uniformly.

    Raises
    ------
    PackError
        If a parameter is out of range.
    """

    min_bits: int
    bits: int
    integer: bool
    channels: int
    cells: bool = False

    pattern: ClassVar[re.Pattern[str]] = re.compile(r"(?:planes|cells)([1-8])-([1-8])r8\Z")

    def __post_init__(self) -> None:
        if not 1 <= self.min_bits <= self.bits <= 8:
            raise PackError(f"layout widths {self.min_bits}..{self.bits}: 1..8 are possible")
        if self.channels < 1 or self.channels & (self.channels - 1):
            raise PackError(f"layout channels={self.channels}: a power of 2 is needed")

    @classmethod
    def of(cls, scheme: Scheme, details: Details) -> Self:
        """The layout of tensors of an any-precision scheme with these details."""
        sizes = dict(details)
        if "channels" not in sizes:
            raise PackError(f"scheme {scheme}: the channels that share a table are not known")
        divided = cells.has_cells(scheme)
        integer = scheme.integer_acts or divided
        return cls(scheme.min_bits, scheme.bits, integer, sizes["channels"], divided)

    @classmethod
    def named(cls, match: re.Match[str], scheme: Scheme | None, details: Details) -> Self | None:
        """Everything comes from the scheme."""
        return cls.choose(scheme, details, 0)

    @classmethod
    def choose(cls, scheme: Scheme | None, details: Details, lanes: int) -> Self | None:
        """The layout of `scheme`, whatever the vectors; None if it is not any-precision."""
        if scheme is None or scheme.family != "anyprec":
            return None
        return cls.of(scheme, details)

    def holds(self, tensor: QuantizedTensor) -> bool:
        """Whether it has the widths of its scheme, and as many channels share a table."""
        scheme = tensor.scheme
        if scheme.family != "anyprec":
            return False
        if self != self.of(scheme, (("channels", self.channels),)):
            return False
        return channels_of(tensor) == self.channels

    @property
    def name(self) -> str:
        """``planes{min}-{max}r8`` or ``cells{min}-{max}r8``."""
        return f"{'cells' if self.cells else 'planes'}{self.min_bits}-{self.bits}r8"

    @property
    def rows(self) -> int:
        """R, rows of one block."""
        return ROWS

    @property
    def widths(self) -> tuple[int, ...]:
        """Widths that have a table."""
        widths = tuple(range(self.min_bits, self.bits + 1))
        if not self.cells or self.bits <= cells.CELL_BITS:
            return widths
        return tuple(b for b in widths if b <= cells.CELL_BITS) or (cells.CELL_BITS,)

    @property
    def halves(self) -> bool:
        """Whether there are widths that divide cells."""
        return self.cells and self.bits > cells.CELL_BITS

    def divides(self, bits: int) -> bool:
        """Whether a width divides cells."""
        return self.cells and bits > cells.CELL_BITS

    @property
    def tables_per_block(self) -> int:
        """Tables that the rows of one block use."""
        return max(1, ROWS // self.channels)

    def padded_k(self, k: int) -> int:
        """K rounded up to whole steps."""
        return -(-k // STEP_K) * STEP_K

    def tables(self, n: int) -> int:
        """T, tables of each width."""
        return -(-self.row_blocks(n) * ROWS // self.channels)

    def shapes(self, n: int, k: int) -> Shapes:
        """Shape and dtype of every packed array of an [n, k] matrix, in kernel argument order."""
        blocks, tables = self.row_blocks(n), self.tables(n)
        shapes: Shapes = {
            "planes": ((self.bits, blocks, self.padded_k(k)), "uint8"),
            "scales": ((blocks, ROWS), "float16"),
        }
        for b in self.widths:
            dtype = "int8" if self.integer else "float16"
            shapes[table_name(b)] = ((tables, 1 << b), dtype)
            if self.integer and not self.cells:
                shapes[f"steps{b}"] = ((tables,), "float32")
        if self.halves:
            shapes[cells.HALVES] = ((tables, cells.CELLS), "uint8")
        return shapes

    def arrays(self, tensor: QuantizedTensor) -> dict[str, Array]:
        """The packed arrays of a tensor that was checked."""
        n, k = tensor.codes.shape
        blocks, kp, tables = self.row_blocks(n), self.padded_k(k), self.tables(n)
        padded = np.zeros((blocks * ROWS, kp), np.uint8)
        padded[:n, :k] = tensor.codes
        codes = padded.reshape(blocks, ROWS, kp)
        planes = np.empty((self.bits, blocks, kp), np.uint8)
        for p in range(self.bits):
            bit = (codes >> (self.bits - 1 - p)) & 1  # [NB, 8, Kp]
            planes[p] = np.packbits(bit, axis=1, bitorder="little")[:, 0]
        scales = np.zeros(blocks * ROWS, np.float16)
        scales[:n] = tensor.scales[:, 0]
        arrays: dict[str, Array] = {"planes": planes, "scales": scales.reshape(blocks, ROWS)}
        for b in self.widths:
            source = tensor.tables[table_name(b)]
            table = np.zeros((tables, 1 << b), np.float16)
            table[: len(source)] = source
            if self.cells:
                arrays[table_name(b)] = cells.integers(table)
            elif self.integer:
                arrays[table_name(b)], arrays[f"steps{b}"] = integer_table(table)
            else:
                arrays[table_name(b)] = table
        if self.halves:
            halves = np.zeros((tables, cells.CELLS), np.uint8)
            halves[:n] = tensor.tables[cells.HALVES]
            arrays[cells.HALVES] = halves
        return arrays

    def tensor(
        self, arrays: Mapping[str, Array], n: int, k: int, scheme: Scheme
    ) -> QuantizedTensor:
        """The tensor whose packed arrays these are; exact where tables can hold its centroids."""
        planes, blocks = arrays["planes"], self.row_blocks(n)
        codes = np.zeros((blocks, ROWS, self.padded_k(k)), np.uint8)
        for p in range(self.bits):
            bit = np.unpackbits(planes[p][:, None], axis=1, bitorder="little")  # [NB, 8, Kp]
            codes |= bit << (self.bits - 1 - p)
        tables, count = {}, -(-n // self.channels)
        for b in self.widths:
            table = arrays[table_name(b)]
            if self.cells:
                table = cells.restored(table)
            elif self.integer:
                table = restore_table(table, arrays[f"steps{b}"])
            tables[table_name(b)] = table[:count].copy()
        if self.halves:
            tables[cells.HALVES] = arrays[cells.HALVES][:count].copy()
        return QuantizedTensor(
            np.ascontiguousarray(codes.reshape(blocks * ROWS, -1)[:n, :k]),
            arrays["scales"].reshape(-1, 1)[:n].copy(),
            None,
            scheme,
            tables,
        )

    def code(self, planes: Any, block: Any, lane: Any, k: Any, bits: int) -> Any:
        """TensorIR int32 expression of a code of `bits` bits."""
        return plane_code(lambda p: planes[p, block, k], lane, bits)

    def weight(
        self, arrays: Mapping[str, Any], block: Any, lane: Any, k: Any, bits: int = 0
    ) -> Any:
        """TensorIR float32 expression of the weight of row ``block * 8 + lane``, column `k`."""
        width = bits or self.bits
        code = self.code(arrays["planes"], block, lane, k, width)
        table = (block * ROWS + lane) // self.channels
        scale = arrays["scales"][block, lane].astype("float32")
        if self.divides(width):
            cell = code >> (width - cells.CELL_BITS)
            centroid = arrays[table_name(cells.CELL_BITS)][table, cell]
            value = cell_value(centroid, arrays[cells.HALVES][table, cell], code, width)
            return value.astype("float32") * (scale * self.factor(width))
        value = arrays[table_name(width)][table, code].astype("float32")
        if self.cells:
            return value * (scale * self.factor(width))
        if self.integer:
            value = value * arrays[f"steps{width}"][table]
        return value * scale

    def factor(self, bits: int) -> Any:
        """float32: the step of a width where cells are divided, in a row's scale."""
        from tvm import tirx

        fine = cells.FINE if bits > cells.CELL_BITS + 1 else 1
        return tirx.const(1 / (cells.UNITS * fine), "float32")
