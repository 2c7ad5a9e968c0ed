"""Batched matrix product of two computed operands, with the transposes around it folded in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import te, tirx

from apq_tvm.errors import NotApplicable
from apq_tvm.ops.graph.shapes import Dim, Symbols, stored_index


def broadcast_shapes(a: Sequence[Dim], b: Sequence[Dim]) -> tuple[Dim, ...]:
    """Batch shape of the product, aligned at the right as in ONNX."""
    rank = max(len(a), len(b))
    wide_a = (1,) * (rank - len(a)) + tuple(a)
    wide_b = (1,) * (rank - len(b)) + tuple(b)
    out: list[Dim] = []
    for x, y in zip(wide_a, wide_b, strict=True):
        if x != y and x != 1 and y != 1:
            raise NotApplicable(f"batch axes {x} and {y} of {tuple(a)} and {tuple(b)} differ")
        out.append(y if x == 1 else x)
    return tuple(out)


def batch_matmul(
    a_shape: Sequence[Dim],
    b_shape: Sequence[Dim],
    perm_a: Sequence[int] | None = None,
    perm_b: Sequence[int] | None = None,
    perm_out: Sequence[int] | None = None,
) -> Any:
    """ONNX MatMul: transpose(matmul(transpose(a, perm_a), transpose(b, perm_b)), perm_out).

    Parameters
    ----------
    a_shape, b_shape : sequence of int or str
        As stored, before the permutation; two axes or more; strings are dynamic dimensions.
    perm_a, perm_b, perm_out : sequence of int, optional
        As ONNX Transpose; None leaves the order. Rank of ``a``, of ``b`` and of the product.

    Returns
    -------
    tvm.tirx.PrimFunc
        ``(a float32, b float32, y float32)``, unscheduled, attr ``apq.op`` = "batch_matmul".

    Raises
    ------
    NotApplicable
        An operand has fewer than two axes, the inner sizes differ, or batch axes do not broadcast.
    """
    if len(a_shape) < 2 or len(b_shape) < 2:
        raise NotApplicable(f"operands {tuple(a_shape)} and {tuple(b_shape)} need two axes each")
    order_a = tuple(perm_a or range(len(a_shape)))
    order_b = tuple(perm_b or range(len(b_shape)))
    left = [a_shape[p] for p in order_a]
    right = [b_shape[p] for p in order_b]
    if left[-1] != right[-2]:
        raise NotApplicable(f"inner sizes {left[-1]} and {right[-2]} differ")
    product = (*broadcast_shapes(left[:-2], right[:-2]), left[-2], right[-1])
    order_out = tuple(perm_out or range(len(product)))
    symbols = Symbols()
    a = te.placeholder(symbols.shape(a_shape), "float32", "a")
    b = te.placeholder(symbols.shape(b_shape), "float32", "b")
    k = te.reduce_axis((0, symbols.dim(left[-1])), "k")

    def operand(
        tensor: Any, order: Sequence[int], dims: Sequence[Dim], batch: Sequence[Any], *inner: Any
    ) -> Any:
        used = batch[len(batch) - (len(dims) - 2) :] if len(dims) > 2 else ()
        zero = tirx.const(0, "int64")
        logical = [zero if d == 1 else i for d, i in zip(dims[:-2], used, strict=True)]
        logical += inner
        return tensor(*stored_index(order, logical))

    def element(*stored: Any) -> Any:
        *batch, m, n = stored_index(order_out, stored)
        return te.sum(
            operand(a, order_a, left, batch, m, k) * operand(b, order_b, right, batch, k, n), axis=k
        )

    out = symbols.shape([product[p] for p in order_out])
    y = te.compute(out, element, "y")
    func = te.create_prim_func([a, b, y])
    return func.with_attrs(
        {
            "apq.op": "batch_matmul",
            "op_pattern": 8,
            "apq.perm_a": list(order_a),
            "apq.perm_b": list(order_b),
            "apq.perm_out": list(order_out),
        }
    )
