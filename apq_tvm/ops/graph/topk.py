"""The k best along an axis (ONNX TopK): a heap whose root is the worst of those kept so far.

O(n log k) without scratch memory: the heap lies in the output, and is sorted there at the end. Of
equal elements the one with the lower index is the better. Most elements of a long row are worse
than the root: whether any of a block is not is found by vectors.
"""

from __future__ import annotations

from functools import reduce
from operator import add
from typing import Any

from tvm import tirx

BLOCK = 64
"""Elements that are compared with the root at once."""


def topk(dtype: str, k: int | None, *, largest: bool = True) -> Any:
    """The `k` best along the middle axis of a [outer, n, inner] tensor, the best first.

    Parameters
    ----------
    dtype : str
        Of x and of the values.
    k : int or None
        At most n, which the module checks by ``apq.least``; None: what the outputs have.
    largest : bool
        Larger is better.

    Returns
    -------
    tvm.tirx.PrimFunc
        ``(x, values, indices int64)``, the latter [outer, k, inner]; attrs ``apq.op`` = "topk".
    """
    from tvm.script.ir_builder import IRBuilder
    from tvm.tirx.script.builder import ir as b

    outer, n, inner = shape = [tirx.Var(name, "int64") for name in ("outer", "n", "inner")]
    size = tirx.Var("k", "int64") if k is None else _int(k)
    with IRBuilder() as builder:
        with b.prim_func(s_tir=True):
            b.func_name("topk")
            b.func_attr({"apq.op": "topk", "op_pattern": 8, "tirx.noalias": True})
            x = b.match_buffer(b.arg("x", b.handle()), shape, dtype)
            kept = [outer, size, inner]
            values = b.match_buffer(b.arg("values", b.handle()), kept, dtype)
            ids = b.match_buffer(b.arg("indices", b.handle()), kept, "int64")
            with b.grid(outer, inner) as loops, b.sblock("topk"):
                o, i = b.axis.remap("SS", loops)
                heap = _Heap(b, values, ids, (o, i), _depth(k, size), largest)
                with b.serial(0, size) as j:
                    heap.hold(x[o, j, i], j)
                    heap.rise(j)

                def take(j: Any) -> None:
                    with b.If(heap.worse(*heap.at(_int(0)), x[o, j, i], j)), b.Then():
                        heap.hold(x[o, j, i], j)
                        heap.sink(size)

                blocks = (n - size) // BLOCK
                with b.serial(0, blocks) as block:
                    first = size + block * BLOCK
                    with b.If(heap.is_behind_any(lambda t: x[o, first + t, i])), b.Then():
                        with b.serial(0, BLOCK) as t:
                            take(first + t)
                with b.serial(0, (n - size) % BLOCK) as t:
                    take(size + blocks * BLOCK + t)
                with b.serial(0, size - 1) as r:
                    last = size - 1 - r
                    heap.hold(*heap.at(last))
                    heap.move(_int(0), last)
                    heap.sink(last)
    return builder.get().with_attr("apq.least", [[n, size]])


def _depth(k: int | None, size: Any) -> Any:
    """Levels of a heap of `size` entries below its root."""
    if k is not None:
        return _int(max(k.bit_length() - 1, 0))
    levels = [tirx.Cast("int64", size >= _int(1 << level)) for level in range(1, 31)]
    return reduce(add, levels)


def _int(value: int) -> Any:
    return tirx.const(value, "int64")


class _Heap:
    """Statements about the heap of one row; the buffers of one element are its registers."""

    def __init__(
        self, b: Any, values: Any, ids: Any, row: tuple[Any, Any], depth: Any, largest: bool
    ) -> None:
        self._b, self._values, self._ids = b, values, ids
        self._row, self._largest = row, largest
        self._depth = depth
        self._place = b.sblock_alloc_buffer((_int(1),), "int64")
        self._child = b.sblock_alloc_buffer((_int(1),), "int64")
        self._value = b.sblock_alloc_buffer((_int(1),), values.dtype)
        self._index = b.sblock_alloc_buffer((_int(1),), "int64")
        self._count = b.sblock_alloc_buffer((_int(1),), "int32")

    def at(self, place: Any) -> tuple[Any, Any]:
        """Value and index of an entry."""
        o, i = self._row
        return self._values[o, place, i], self._ids[o, place, i]

    def worse(self, v: Any, j: Any, w: Any, m: Any) -> Any:
        """Whether (v, j) comes behind (w, m)."""
        behind = v < w if self._largest else v > w
        return tirx.any(behind, tirx.all(v == w, j > m))

    def is_behind_any(self, element: Any) -> Any:
        """Whether the root comes behind ``element(t)`` for any t of a block behind all so far."""
        b, root = self._b, self.at(_int(0))[0]
        b.buffer_store(self._value, root, [0])
        b.buffer_store(self._count, tirx.const(0, "int32"), [0])
        with b.serial(0, BLOCK) as t:
            value, here = element(t), self._value[0]
            behind = here < value if self._largest else here > value
            b.buffer_store(self._count, self._count[0] + tirx.Cast("int32", behind), [0])
        return self._count[0] > 0

    def hold(self, value: Any, index: Any) -> None:
        """Keep an entry in the registers."""
        self._b.buffer_store(self._value, value, [0])
        self._b.buffer_store(self._index, index, [0])

    def move(self, source: Any, target: Any) -> None:
        """Copy an entry."""
        self._put(target, *self.at(source))

    def _put(self, place: Any, value: Any, index: Any) -> None:
        o, i = self._row
        self._b.buffer_store(self._values, value, [o, place, i])
        self._b.buffer_store(self._ids, index, [o, place, i])

    def rise(self, place: Any) -> None:
        """Put the registers into a heap whose last entry, `place`, is free."""
        b = self._b
        b.buffer_store(self._place, place, [0])
        with b.serial(0, self._depth):
            here = self._place[0]
            parent = tirx.max(here - 1, _int(0)) // 2
            above = self.at(parent)
            with b.If(tirx.all(here > 0, self.worse(self._value[0], self._index[0], *above))):
                with b.Then():
                    self.move(parent, here)
                    b.buffer_store(self._place, parent, [0])
        self._put(self._place[0], self._value[0], self._index[0])

    def sink(self, size: Any) -> None:
        """Put the registers into a heap of `size` entries whose root is free."""
        b = self._b
        b.buffer_store(self._place, _int(0), [0])
        with b.serial(0, self._depth):
            b.buffer_store(self._child, self._place[0] * 2 + 1, [0])
            with b.If(self._child[0] < size), b.Then():
                left, right = self._child[0], tirx.min(self._child[0] + 1, size - 1)
                with b.If(self.worse(*self.at(right), *self.at(left))), b.Then():
                    b.buffer_store(self._child, right, [0])
                pick = self._child[0]
                with b.If(self.worse(*self.at(pick), self._value[0], self._index[0])), b.Then():
                    self.move(pick, self._place[0])
                    b.buffer_store(self._place, pick, [0])
        self._put(self._place[0], self._value[0], self._index[0])
