"""Dimensions that must be equal, and shapes that are broadcast.

Broadcasting two different symbols, or a symbol with a number other than 1, needs them equal (or one
of them 1, which no exporter means): such pairs are recorded in `Graph.same`, and the import starts
over with one of them replaced.
"""

from __future__ import annotations

from apq_tvm.onnx_import.graph import Graph, Shape
from apq_tvm.onnx_import.symbolic.dims import (
    Call,
    Dim,
    Expr,
    calls,
    equal,
    is_run,
    run_symbols,
    symbol,
    symbols,
)


def unify(graph: Graph, a: Dim | None, b: Dim | None) -> Dim | None:
    """The one dimension that two which must be equal stand for.

    A symbol is replaced by another or by a number. One that equals a sum of others is only noted:
    most often that sum becomes a symbol too, once others have been replaced.
    """
    if a is None or b is None:
        return b if a is None else a
    if a == b:
        return a
    for one, other in ((a, b), (b, a)):
        if is_symbol(one) and is_run(str(one)) and _is_earlier(other, one):
            graph.same[str(one)] = str(other)
            return other
    if run_symbols(a) or run_symbols(b):
        return a if isinstance(a, int) else b
    inside = tuple(graph.inside)
    for one, other in ((a, b), (b, a)):
        if is_symbol(one) and (isinstance(other, int) or is_symbol(other)):
            if inside:
                graph.found_inside.setdefault((inside, str(one)), str(other))
            else:
                graph.same[str(one)] = str(other)
            return other
    for one, other in ((a, b), (b, a)):
        if is_symbol(one) and not inside and (cut := _cut(other)) is not None:
            graph.sums.setdefault(cut[0], str(cut[1] + one))
            return one
    if (apart := _apart(a, b)) is not None:
        unify(graph, *apart)
        return a
    for one, other in ((a, b), (b, a)):
        if is_symbol(one) and _is_sum(other) and not symbols(one) & symbols(other):
            if inside:
                graph.sums_inside.setdefault((inside, str(one)), str(other))
            else:
                graph.sums.setdefault(str(one), str(other))
    return a if isinstance(a, int) else b


def _apart(a: Dim, b: Dim) -> tuple[Dim, Dim] | None:
    """Two symbols, or one and a number, that are equal where two sums with them are: what is left
    of ``past_key + sequence`` and ``past_value + sequence``."""
    if is_symbol(a) or is_symbol(b):
        return None
    more: list[Dim] = []
    less: list[Dim] = []
    rest = a - b
    for atoms, coefficient in rest.terms if isinstance(rest, Expr) else ():
        if not atoms:
            (more if coefficient > 0 else less).append(abs(coefficient))
        elif len(atoms) == abs(coefficient) == 1 and isinstance(atoms[0], str):
            (more if coefficient > 0 else less).append(symbol(atoms[0]))
        else:
            return None
    return (more[0], less[0]) if len(more) == len(less) == 1 else None


def _cut(dim: Dim) -> tuple[str, Dim] | None:
    """``(x, past)`` of ``max(x - min(past, x), 0)``: what is left of a mask cut behind the past."""
    call = _lone(dim, "max")
    if call is None or call.b != 0 or not isinstance(call.a, Expr):
        return None
    terms = {coefficient: atoms for atoms, coefficient in call.a.terms}
    if len(call.a.terms) != 2 or set(terms) != {1, -1} or len(terms[1]) != 1:
        return None
    (whole,), inner = terms[1], _lone(-call.a + symbol(str(terms[1][0])), "min")
    if not isinstance(whole, str) or inner is None:
        return None
    pasts = [dim for dim in (inner.a, inner.b) if dim != symbol(whole)]
    return (whole, pasts[0]) if len(pasts) == 1 and whole not in symbols(pasts[0]) else None


def _lone(dim: Dim, fn: str) -> Call | None:
    """`dim` as a call of `fn` and nothing else."""
    found = calls(dim)
    call = next(iter(found)) if len(found) == 1 else None
    return call if call is not None and call.fn == fn and str(dim) == str(call) else None


def of_caches(graph: Graph, a: Dim, size: Dim) -> bool:
    """Whether a part `a` of an axis is all of it where caches are what their names say.

    Nothing proves either: that a mask as long as the first layer's cache, which is cut to that of
    another layer, means caches of one length; and that integers which are cut to what a cache and
    the new tokens are together are a mask of those.
    """
    lengths = {str(dim) for dim in graph.cache_dims()}
    apart = _apart(a, size)
    if apart is not None and {str(dim) for dim in apart} <= lengths:
        unify(graph, *apart)
        return True
    whole_numbers = [s for s in graph.inputs if s.dtype.startswith(("bool", "int", "uint"))]
    masks = {dim for spec in whole_numbers for dim in spec.shape}
    whole = is_symbol(size) and str(size) in masks - lengths
    both = bool(symbols(a) & lengths) and bool(symbols(a) - lengths)
    if graph.inside or not (whole and both and _is_sum(a)):
        return False
    graph.sums.setdefault(str(size), str(a))
    return True


def is_symbol(dim: Dim) -> bool:
    """Whether `dim` is one symbol and nothing else."""
    return isinstance(dim, Expr) and symbols(dim) == {str(dim)}


def _is_earlier(dim: Dim, than: Dim) -> bool:
    """Whether a run knows `dim` before it knows the symbol `than`."""
    last = int(str(than).removeprefix("run"))
    return all(int(name.removeprefix("run")) < last for name in run_symbols(dim))


def _is_sum(dim: Dim) -> bool:
    """Whether `dim` is a sum of different symbols and a number."""
    return isinstance(dim, Expr) and all(
        not atoms or (len(atoms) == coefficient == 1 and isinstance(atoms[0], str))
        for atoms, coefficient in dim.terms
    )


def broadcast(graph: Graph, *shapes: Shape | None) -> Shape | None:
    """Multidirectional broadcasting (ONNX, "Broadcasting in ONNX")."""
    if any(shape is None for shape in shapes):
        return None
    known: list[Shape] = [shape for shape in shapes if shape is not None]
    rank = max((len(shape) for shape in known), default=0)
    result: list[Dim | None] = []
    for axis in range(-rank, 0):
        dims = [shape[axis] for shape in known if len(shape) >= -axis]
        wide = [dim for dim in dims if dim != 1]
        if not wide:
            result.append(1)
        elif any(dim is None for dim in wide):
            # A number other than 1 settles it; a symbol may itself be 1.
            result.append(next((d for d in wide if isinstance(d, int)), None))
        else:
            dim = wide[0]
            for other in wide[1:]:
                dim = unify(graph, dim, other)
            result.append(dim)
    return tuple(result)


def matmul_shape(graph: Graph, a: Shape, b: Shape) -> Shape | None:
    """Shape of ``numpy.matmul``."""
    if not a or not b:
        return None
    unify(graph, a[-1], b[-2] if len(b) > 1 else b[0])
    lead = broadcast(graph, a[:-2], b[:-2]) or ()
    rows = (a[-2],) if len(a) > 1 else ()
    columns = (b[-1],) if len(b) > 1 else ()
    return (*lead, *rows, *columns)


def same_shape(a: Shape | None, b: Shape | None) -> bool:
    """Whether two shapes are known and always equal."""
    if a is None or b is None or len(a) != len(b):
        return False
    return all(
        x is not None and y is not None and equal(x, y) is True for x, y in zip(a, b, strict=True)
    )
