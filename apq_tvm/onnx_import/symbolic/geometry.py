"""Where the windows of a convolution or pooling lie over an image (ONNX, ``auto_pad``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from apq_tvm.errors import ImportFailed
from apq_tvm.onnx_import.symbolic.dims import Dim, as_attr, floordiv, maximum, minimum
from apq_tvm.types import Node


@dataclass(frozen=True)
class Windows:
    """How windows lie over the spatial axes of an image, one entry per axis.

    Parameters
    ----------
    kernel, strides, dilations : tuple of int
    begins, ends : tuple of int or Expr
        Padding before and behind; the windows of ``ceil_mode`` may reach past it.
    out : tuple of int or Expr
        Number of windows.
    """

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    begins: tuple[Dim, ...]
    ends: tuple[Dim, ...]
    out: tuple[Dim, ...]

    @property
    def fixed(self) -> bool:
        """Whether all padding is known."""
        return all(isinstance(pad, int) for pad in (*self.begins, *self.ends))

    @property
    def attrs(self) -> dict[str, Any]:
        """Attributes of the ``apq.`` operators over windows."""
        pads = {"begins": self.begins, "ends": self.ends}
        return {
            "kernel": self.kernel,
            "strides": self.strides,
            "dilations": self.dilations,
            **{name: tuple(as_attr(dim) for dim in dims) for name, dims in pads.items()},
        }


def windows(node: Node, extents: Sequence[Dim], kernel: Sequence[int]) -> Windows:
    """Padding and number of windows of a convolution or pooling over `extents`.

    Raises
    ------
    ImportFailed
        The attributes do not fit the image; the message names the node.
    """
    rank, attrs = len(extents), node.attrs
    strides, dilations = (
        tuple(int(v) for v in attrs.get(key) or (1,) * rank) for key in ("strides", "dilations")
    )
    pads = tuple(int(v) for v in attrs.get("pads") or (0,) * (2 * rank))
    auto, up = attrs.get("auto_pad") or "NOTSET", bool(attrs.get("ceil_mode", 0))
    if (len(kernel), len(strides), len(dilations), len(pads)) != (rank, rank, rank, 2 * rank) or (
        min((*kernel, *strides, *dilations), default=1) < 1
    ):
        raise ImportFailed(
            f"{node.op} {node.name!r}: kernel_shape {list(kernel)}, strides {list(strides)}, "
            f"dilations {list(dilations)} and pads {list(pads)} do not fit {rank} spatial axes"
        )
    spans = []
    for i, extent in enumerate(extents):
        reach = (kernel[i] - 1) * dilations[i] + 1
        spans.append(along(extent, reach, strides[i], pads[i::rank], auto, up))
    begins, ends, out = zip(*spans, strict=True) if spans else ((), (), ())
    return Windows(tuple(kernel), strides, dilations, begins, ends, out)


def along(
    extent: Dim, reach: Dim, step: int, pads: Sequence[int], auto: str, up: bool
) -> tuple[Dim, Dim, Dim]:
    """Padding before and behind, and number of windows, along one axis.

    Parameters
    ----------
    extent : int or Expr
    reach : int or Expr
        Positions from the first to the last that a window covers.
    step : int
    pads : sequence of int
        Before and behind.
    auto : str
        ONNX's ``auto_pad``.
    up : bool
        ONNX's ``ceil_mode``.
    """
    if auto.startswith("SAME"):
        count = floordiv(extent + (step - 1), step)
        total = maximum((count - 1) * step + reach - extent, 0)
        return (*halves(total, auto == "SAME_UPPER"), count)
    first, last = (0, 0) if auto == "VALID" else pads
    free = extent + (first + last) - reach
    count = floordiv(free, step) + 1
    if up and auto == "NOTSET":
        # The last window must start inside the image or the padding before it.
        inside = floordiv(extent + (first - 1), step) + 1
        count = minimum(floordiv(free + (step - 1), step) + 1, inside)
    return first, last, count


def halves(total: Dim, upper: bool) -> tuple[Dim, Dim]:
    """Padding before and behind; the odd one lies behind where it is `upper`."""
    half = floordiv(total, 2)
    return (half, total - half) if upper else (total - half, half)
