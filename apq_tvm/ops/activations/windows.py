"""Quantization of the windows of an image, gathered on the way: no float im2col.

Codes, scales and sums are those of `apq_tvm.ops.activations.quantize` of the rows that
`apq_tvm.ops.images.windows` makes, which exist only a few at a time, in cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import tirx
from tvm.tirx.script.builder import ir as b

from apq_tvm.errors import NotApplicable
from apq_tvm.ops.activations.quantize import checked_widths, each_part
from apq_tvm.ops.activations.windows_frame import QuantizeWindows
from apq_tvm.ops.activations.windows_lines import LANES, LineWindows, takes_lines
from apq_tvm.ops.activations.windows_strips import StripWindows, strip_lanes
from apq_tvm.ops.blocks import each, row_tasks
from apq_tvm.ops.graph.shapes import Dim
from apq_tvm.ops.images.windows import Geometry
from apq_tvm.tensorize.exprs import MAGIC, MAGIC_BITS, Expr, PrimFunc, f32, i64, whole

SCRATCH = 4096
"""float32 in the rows of a task: with their codes they stay in the first cache."""


def quantize_windows(
    shape: Sequence[Dim],
    geometry: Geometry,
    channels: tuple[int, int],
    groups: tuple[int, int],
    lanes: int,
    bits: int,
    asymmetric: bool = False,
    scratch: int = SCRATCH,
    unsigned: bool = False,
) -> PrimFunc:
    """Quantize the windows of an image to int8, or to fewer bits in int8.

    Parameters
    ----------
    shape : sequence of int or str
        Of the image [N, *sizes, C]; strings are dynamic dimensions.
    geometry : Geometry
    channels : tuple of int
        The first one that is read, and how many.
    groups : tuple of int
        Columns that share a scale, and a sum; -1 for a whole row.
    lanes, bits, asymmetric, unsigned
        As in `apq_tvm.ops.activations.quantize.quantize_activations`.
    scratch : int
        float32 in the rows of a task; of strips and lines, whose codes share a scale, nothing.

    Returns
    -------
    tvm.tirx.PrimFunc
        ``(x f32 [N, *sizes, C], xq i8 [M, Kp], xs f32 [M, Ga], xsum i32 [M, Gw])``, M the number
        of output positions.

    Raises
    ------
    NotApplicable
        The groups do not divide each other, or activations of one bit.
    """
    if bits == 1:
        raise NotApplicable("padding has no sign: activations of one bit need K columns")
    k, rounding = geometry.taps * channels[1], (bits, asymmetric, unsigned)
    padded, width, sum_width = checked_widths(k, *groups, bits)
    if sum_width == padded:
        sizes, in_strips = (k, padded, width, sum_width), strip_lanes(geometry, channels[1])
        if in_strips:
            strips = StripWindows(*sizes, in_strips, 1, *rounding)
            return strips.of(shape, geometry, channels)
        if takes_lines(geometry, channels == (0, shape[-1])):
            lines = LineWindows(*sizes, LANES, 1, *rounding)
            return lines.of(shape, geometry, channels)
    rows = max(1, scratch // padded)
    quantize = _Windows(k, padded, width, sum_width, min(lanes, sum_width), rows, *rounding)
    return quantize.of(shape, geometry, channels)


class _Windows(QuantizeWindows):
    name = "quantize_windows"

    def write(self, m: Expr) -> None:
        with row_tasks(m, self.row_block, [whole(self.x)], [whole(self.xq)]) as (first, mine):
            self.rows = b.sblock_alloc_buffer((self.row_block, self.padded), "float32", align=64)
            with each("gather", mine) as row:
                self._gather(first, row)
            with each("row", mine) as row:
                self._quantized(first, row)

    def rounded(self, value: Expr, middle: Expr | None) -> Expr:
        """By the unit of a large float: 127 / absmax keeps finite values in range by itself."""
        magic = f32(MAGIC) if middle is None else f32(MAGIC) - middle
        pattern = tirx.reinterpret("int32", value + magic)
        return pattern - tirx.const(MAGIC_BITS, "int32")

    def _gather(self, first: Expr, row: Expr) -> None:
        self.gather.copy(self.gather.at(first + row), self.rows, [row])
        if self.padded > self.k:
            with b.serial(0, i64(self.padded - self.k)) as c:
                b.buffer_store(self.rows, f32(0.0), [row, c + i64(self.k)])

    def _quantized(self, first: Expr, row: Expr) -> None:
        def group(number: Expr, x: Any, suffix: str) -> None:
            self._group(first + row, number, x, suffix)

        sizes = (self.padded, self.padded, self.width)
        each_part(self.rows, row, sizes, ("group", "tail_group"), group)
