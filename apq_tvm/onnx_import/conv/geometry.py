"""Where the windows of a convolution or pooling lie, as attributes of the ``apq.`` operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from apq_tvm.onnx_import.symbolic.dims import Dim
from apq_tvm.types import Node


def window_attrs(node: Node, kernel: Sequence[int], sizes: Sequence[Dim]) -> dict[str, Any]:
    """``kernel, strides, dilations, begins, ends, auto`` of a node (ONNX operator specification).

    Parameters
    ----------
    node : Node
        Conv, MaxPool or AveragePool.
    kernel : sequence of int
    sizes : sequence of int or Expr
        Of the input's spatial axes.

    Returns
    -------
    dict
        With ``auto`` where sizes that ``SAME_UPPER`` or ``SAME_LOWER`` need are not known.
    """
    rank = len(kernel)
    ones = (1,) * rank
    strides = tuple(int(v) for v in node.attrs.get("strides") or ones)
    dilations = tuple(int(v) for v in node.attrs.get("dilations") or ones)
    attrs = {"kernel": tuple(kernel), "strides": strides, "dilations": dilations, "auto": ""}
    auto = node.attrs.get("auto_pad", "NOTSET") or "NOTSET"
    if not auto.startswith("SAME"):
        pads = tuple(int(v) for v in node.attrs.get("pads") or (0,) * (2 * rank))
        pads = (0,) * (2 * rank) if auto == "VALID" else pads
        return {**attrs, "begins": pads[:rank], "ends": pads[rank:]}
    begins, ends = [], []
    for size, k, s, d in zip(sizes, kernel, strides, dilations, strict=True):
        if not isinstance(size, int):
            return {**attrs, "begins": (), "ends": (), "auto": auto}
        total = max((-(-size // s) - 1) * s + (k - 1) * d + 1 - size, 0)
        begins.append(total // 2 if auto == "SAME_UPPER" else total - total // 2)
        ends.append(total - begins[-1])
    return {**attrs, "begins": tuple(begins), "ends": tuple(ends)}
