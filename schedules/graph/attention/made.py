"""A tensor that its only reader computes where it reads it: no function of its own, no memory.

As queries and new keys are, which rotary positions turn (Su et al., "RoFormer", arXiv:2104.09864),
however a file spells that: the fused function of it becomes an expression.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tvm_ffi
from tvm import ir, s_tir, tirx

from apq_tvm.errors import NotApplicable
from apq_tvm.ops.graph.shapes import substituted, symbols_of
from apq_tvm.schedules.graph.blocks import child_blocks, inline_producers, is_plain, is_reduction
from apq_tvm.schedules.graph.exprs import collect
from apq_tvm.schedules.graph.panel import strides
from apq_tvm.schedules.graph.rewrites.lowering import expand_math
from apq_tvm.schedules.graph.rewrites.split_guards import split_guards
from apq_tvm.schedules.graph.rewrites.vectorize import vectorize_loop
from apq_tvm.tensorize.exprs import Expr, Stmt, i64

Store = Callable[[Expr, Expr], Stmt]

LARGEST = 16
"""Loads of an element: what reads more is a function of its own."""


@dataclass(frozen=True)
class Made:
    """The elements of a tensor.

    Parameters
    ----------
    inputs : tuple of buffer
        Tensors that it is made of.
    shape : tuple of expression
        Its own, of the same symbols.
    axes : tuple of Var
        An index of it.
    value : expression
        The element there.
    """

    inputs: tuple[Any, ...]
    shape: tuple[Expr, ...]
    axes: tuple[Any, ...]
    value: Expr

    @classmethod
    def of(cls, func: Any) -> Made:
        """What a function makes.

        Parameters
        ----------
        func : tvm.tirx.PrimFunc
            Unscheduled; its last parameter is the tensor.

        Raises
        ------
        NotApplicable
            It takes more than a few loads, sums something up, or has other results too.
        """
        *inputs, made = func.params
        if not all(tirx.is_buffer_var(param) for param in func.params):
            raise NotApplicable("it takes numbers")
        sch = s_tir.Schedule(expand_math(func))
        if not all(is_plain(sch, block) for block in child_blocks(sch)):
            raise NotApplicable("it is no element-wise function")
        inline_producers(sch, func.params)
        blocks = child_blocks(sch)
        if len(blocks) != 1 or is_reduction(sch, blocks[0]):
            raise NotApplicable("it is no element-wise function")
        node = sch.get(blocks[0])
        store, axes = node.body, tuple(axis.var for axis in node.iter_vars)
        apart = len(axes) != len(store.indices) or any(
            not index.same_as(axis) for index, axis in zip(store.indices, axes, strict=True)
        )
        if apart or len(collect(store.value, ir.TensorLoad)) > LARGEST:
            raise NotApplicable("its elements take too much")
        known = {extent for given in inputs for extent in given.shape}
        if any(var not in known for e in made.shape for var in collect(e, tirx.Var)):
            raise NotApplicable("its size is not one of those that it is made of")
        return cls(tuple(inputs), tuple(made.shape), axes, store.value)

    def through(self, params: Sequence[Any], views: Sequence[Any]) -> Made:
        """The same of other tensors, read through flat views of them."""
        symbols = symbols_of(self.inputs, params)

        def element(load: Any) -> Any:
            number = next(i for i, x in enumerate(self.inputs) if x.same_as(load.source))
            steps = strides(params[number].shape)
            at = sum((i * s for i, s in zip(load.indices, steps, strict=True)), i64(0))
            return tirx.BufferLoad(views[number], [at])

        value = tvm_ffi.structural_map(substituted(self.value, symbols), (ir.TensorLoad, element))
        shape = tuple(substituted(extent, symbols) for extent in self.shape)
        return Made(tuple(params), shape, self.axes, value)

    def at(self, index: Sequence[Expr]) -> Expr:
        """An element."""
        return substituted(self.value, list(zip(self.axes, index, strict=True)))


def in_vectors(
    extent: Expr, vector_bytes: int, element: Callable[[Expr], Expr], store: Store
) -> Stmt:
    """``store(i, element(i))`` for all i, in vectors where that can be."""
    var = tirx.Var("i", "int64")
    loop = tirx.For(var, i64(0), extent, tirx.ForKind.SERIAL, store(var, element(var)))

    def vectors(node: Any) -> Any:
        return vectorize_loop(node, vector_bytes)

    return tvm_ffi.structural_map(split_guards(loop), (tirx.For, vectors))
