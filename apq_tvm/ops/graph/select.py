"""What selects elements by their values: NonZero, Unique, NonMaxSuppression.

Each is one loop after the other, as later ones depend on what earlier ones took.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script.builder import ir as b

from apq_tvm.ops.graph.shapes import Dim, Symbols


def _int(value: int) -> Any:
    return tirx.const(value, "int64")


@contextmanager
def _function(op: str, builder: IRBuilder) -> Iterator[None]:
    with builder, b.prim_func(s_tir=True):
        b.func_name(op)
        b.func_attr({"apq.op": op, "op_pattern": 8, "tirx.noalias": True})
        yield


def _buffer(name: str, shape: Sequence[Any], dtype: str) -> Any:
    return b.match_buffer(b.arg(name, b.handle()), list(shape), dtype)


@contextmanager
def _once() -> Iterator[None]:
    """A block that runs once."""
    with b.grid(_int(1)) as loop, b.sblock("once"):
        b.axis.remap("S", [loop])
        yield


def _register(dtype: str = "int64") -> Any:
    return b.sblock_alloc_buffer((_int(1),), dtype)


def _set(register: Any, value: Any) -> None:
    b.buffer_store(register, value, [_int(0)])


@contextmanager
def _if(condition: Any) -> Iterator[None]:
    with b.If(condition), b.Then():
        yield


def non_zero(data: Sequence[Dim], count: Dim) -> Any:
    """Indices of what is true, in the order of memory.

    Parameters
    ----------
    data : sequence of int or str
        Shape of x, bool.
    count : int or str
        How many are true; more are left out.

    Returns
    -------
    tvm.tirx.PrimFunc
        ``(x, y int64 [rank, count])``.
    """
    symbols, builder = Symbols(), IRBuilder()
    shape, columns = symbols.shape(data), symbols.dim(count)
    with _function("non_zero", builder):
        x = _buffer("x", shape, "bool")
        y = _buffer("y", (_int(len(shape)), columns), "int64")
        with _once():
            at = _register()
            _set(at, _int(0))
            with ExitStack() as loops:
                where = [loops.enter_context(b.serial(_int(0), extent)) for extent in shape]
                with _if(tirx.all(x[tuple(where)], at[0] < columns)):
                    for row, index in enumerate(where):
                        b.buffer_store(y, index, [_int(row), at[0]])
                    _set(at, at[0] + 1)
    return builder.get()


def unique(rows: Sequence[Dim], dtype: str, *, in_order: bool) -> Any:
    """The different rows of x.

    A merge sort of row numbers; equal rows keep their order, so the first of them is the least.

    Parameters
    ----------
    rows : sequence of int or str
        Shape of x, [n, inner].
    dtype : str
    in_order : bool
        Sorted, instead of as they come.

    Returns
    -------
    tvm.tirx.PrimFunc
        ``(x, first [n], inverse [n], times [n], count [1], order [n], other [n])``, all int64:
        per different row, where it stands first and how often it is there; per row, which of
        them it is; how many differ; and scratch memory.
    """
    symbols, builder = Symbols(), IRBuilder()
    n, inner = symbols.shape(rows)
    with _function("unique", builder):
        x = _buffer("x", (n, inner), dtype)
        first, inverse, times = (_buffer(k, (n,), "int64") for k in ("first", "inverse", "times"))
        count = _buffer("count", (_int(1),), "int64")
        order, other = (_buffer(k, (n,), "int64") for k in ("order", "other"))
        with _once():
            sign = _register("int32")

            def compare(left: Any, right: Any) -> None:
                """-1, 0 or 1 in `sign`."""
                _set(sign, tirx.const(0, "int32"))
                with b.serial(_int(0), inner) as c, _if(sign[0] == 0):
                    p, q = x[left, c], x[right, c]
                    less, more = tirx.const(-1, "int32"), tirx.const(1, "int32")
                    zero = tirx.const(0, "int32")
                    _set(sign, tirx.Select(p < q, less, tirx.Select(q < p, more, zero)))

            _merge_sort(order, other, n, compare, sign)
            # The first row of the run that a row is in, kept where its number will stand.
            start = _register()
            with b.serial(_int(0), n) as i:
                with _if(i > 0):
                    compare(order[tirx.max(i - 1, _int(0))], order[i])
                with _if(tirx.any(i == 0, sign[0] != 0)):
                    _set(start, order[i])
                b.buffer_store(inverse, start[0], [order[i]])
            b.buffer_store(count, _int(0), [_int(0)])
            with b.serial(_int(0), n) as i:
                row = order[i] if in_order else i
                with _if(inverse[row] == row):
                    b.buffer_store(first, row, [count[0]])
                    b.buffer_store(times, _int(0), [count[0]])
                    b.buffer_store(other, count[0], [row])
                    b.buffer_store(count, count[0] + 1, [_int(0)])
            with b.serial(_int(0), n) as i, _if(n > 0):
                b.buffer_store(inverse, other[inverse[i]], [i])
                b.buffer_store(times, times[inverse[i]] + 1, [inverse[i]])
    return builder.get()


def _merge_sort(order: Any, other: Any, n: Any, compare: Any, sign: Any) -> None:
    """Row numbers into `order`, the least row first; rounds of runs twice as long."""
    left, right, take = _register(), _register(), _register("bool")
    with b.serial(_int(0), n) as i, _if(n > 0):
        b.buffer_store(order, i, [i])
    with b.serial(_int(0), _int(31)) as level:
        width = _int(1) << level
        with _if(width < n):
            with b.serial(_int(0), n) as i:
                begin = tirx.floordiv(i, width * 2) * (width * 2)
                middle, end = tirx.min(begin + width, n), tirx.min(begin + width * 2, n)
                with _if(i == begin):
                    _set(left, begin)
                    _set(right, middle)
                with b.If(tirx.any(left[0] >= middle, right[0] >= end)):
                    with b.Then():
                        _set(take, left[0] < middle)
                    with b.Else():
                        compare(order[tirx.min(left[0], n - 1)], order[tirx.min(right[0], n - 1)])
                        _set(take, sign[0] <= 0)
                with b.If(take[0]):
                    with b.Then():
                        b.buffer_store(other, order[left[0]], [i])
                        _set(left, left[0] + 1)
                    with b.Else():
                        b.buffer_store(other, order[right[0]], [i])
                        _set(right, right[0] + 1)
            with b.serial(_int(0), n) as i, _if(n > 0):
                b.buffer_store(order, other[i], [i])


def non_max_suppression(
    boxes: Sequence[Dim], scores: Sequence[Dim], rows: Dim, *, center: bool
) -> Any:
    """Boxes by falling score, without those that overlap a better one of their class.

    Parameters
    ----------
    boxes, scores : sequence of int or str
        [batch, n, 4] and [batch, classes, n], float32.
    rows : int or str
        The most there can be.
    center : bool
        Boxes are center and size, not two corners.

    Returns
    -------
    tvm.tirx.PrimFunc
        ``(boxes, scores, limit int64 [1], overlap [1], least [1], selected int64 [rows, 3],
        count int64 [1], order int64 [n])``; the last is scratch memory.
    """
    symbols, builder = Symbols(), IRBuilder()
    batch, n, four = symbols.shape(boxes)
    classes, most = symbols.dim(scores[1]), symbols.dim(rows)
    with _function("non_max_suppression", builder):
        box = _buffer("boxes", (batch, n, four), "float32")
        score = _buffer("scores", (batch, classes, n), "float32")
        limit = _buffer("limit", (_int(1),), "int64")
        overlap, least = (_buffer(k, (_int(1),), "float32") for k in ("overlap", "least"))
        selected = _buffer("selected", (most, _int(3)), "int64")
        count = _buffer("count", (_int(1),), "int64")
        order = _buffer("order", (n,), "int64")
        with _once():
            found, taken, begin = _register(), _register(), _register()
            best, place, free = _register("float32"), _register(), _register("bool")
            pick, kept = _register(), _register()
            b.buffer_store(count, _int(0), [_int(0)])
            with b.serial(_int(0), batch) as i, b.serial(_int(0), classes) as c:
                _set(begin, count[0])
                _set(found, _int(0))
                with b.serial(_int(0), n) as j, _if(score[i, c, j] > least[0]):
                    b.buffer_store(order, j, [found[0]])
                    _set(found, found[0] + 1)
                _set(taken, _int(0))
                with b.While(tirx.all(found[0] > 0, taken[0] < limit[0], count[0] < most)):
                    # The best of what is left, the first of equals; the rest closes up behind it.
                    _set(place, _int(0))
                    _set(best, score[i, c, order[0]])
                    with b.serial(_int(0), found[0]) as j, _if(score[i, c, order[j]] > best[0]):
                        _set(best, score[i, c, order[j]])
                        _set(place, j)
                    _set(pick, order[place[0]])
                    for column, value in enumerate((i, c, pick[0])):
                        b.buffer_store(selected, value, [count[0], _int(column)])
                    b.buffer_store(count, count[0] + 1, [_int(0)])
                    _set(taken, taken[0] + 1)
                    _set(kept, _int(0))
                    with b.serial(_int(0), found[0]) as j:
                        ratio = _overlaps(box, i, pick[0], order[j], overlap[0], center)
                        _set(free, tirx.all(order[j] != pick[0], tirx.Not(ratio)))
                        with _if(free[0]):
                            b.buffer_store(order, order[j], [kept[0]])
                            _set(kept, kept[0] + 1)
                    _set(found, kept[0])
    return builder.get()


def _overlaps(box: Any, i: Any, first: Any, second: Any, most: Any, center: bool) -> Any:
    """Whether the intersection of two boxes is more than `most` of their union."""

    def spans(which: Any) -> list[tuple[Any, Any]]:
        one = [box[i, which, _int(k)] for k in range(4)]
        if center:
            half = tirx.const(0.5, "float32")
            pairs = [(one[k] - one[k + 2] * half, one[k] + one[k + 2] * half) for k in (0, 1)]
        else:
            pairs = [(one[k], one[k + 2]) for k in (0, 1)]
        return [(tirx.min(p, q), tirx.max(p, q)) for p, q in pairs]

    zero = tirx.const(0.0, "float32")
    a, c = spans(first), spans(second)
    common, left, right = tirx.const(1.0, "float32"), None, None
    for (low, high), (other_low, other_high) in zip(a, c, strict=True):
        common = common * tirx.max(tirx.min(high, other_high) - tirx.max(low, other_low), zero)
        left = high - low if left is None else left * (high - low)
        right = other_high - other_low if right is None else right * (other_high - other_low)
    assert left is not None and right is not None
    # ONNX Runtime: boxes without area or a common part overlap nothing.
    sound = tirx.all(left > zero, right > zero, common > zero)
    return tirx.all(sound, common / (left + right - common) > most)
