"""Numbers for the symbols of a function's shapes.

Dimensions that nothing but a run knows are symbols, named by the text of what they are: ``seq``, or
``(past + 15) // 16`` where one follows from others.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Mapping, Sequence
from typing import Any

SIZES = (1, 128)
"""Of symbolic dimensions where the user gives none: of the first of a tensor, and of others."""

_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def evaluated(text: str, known: Mapping[str, int]) -> int | None:
    """What an expression of integers and names comes to; None for any other text.

    Names that are not `known` are of `SIZES`, the second.
    """
    try:
        return _value(ast.parse(text.replace("T.int64", ""), mode="eval").body, known)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
        return None


def _value(node: ast.expr, known: Mapping[str, int]) -> int:
    match node:
        case ast.Constant(value=int(number)):
            return int(number)
        case ast.Name(id=name):
            return known.get(name, SIZES[1])
        case ast.BinOp(left, op, right) if type(op) in _OPERATORS:
            return int(_OPERATORS[type(op)](_value(left, known), _value(right, known)))
        case ast.UnaryOp(ast.USub(), operand):
            return -_value(operand, known)
        case ast.Call(func=ast.Name(id="max" | "min" as name), args=args):
            values = [_value(arg, known) for arg in args]
            return max(values) if name == "max" else min(values)
        case ast.Call(func=ast.Attribute(attr="max" | "min" as name), args=args):
            values = [_value(arg, known) for arg in args]
            return max(values) if name == "max" else min(values)
    raise ValueError(ast.dump(node))


def numbers_of(shape: Sequence[int | str], sizes: Mapping[str, int]) -> tuple[int, ...]:
    """A shape with numbers for names and expressions."""
    known = dict(sizes)
    for axis, dim in enumerate(shape):
        if isinstance(dim, str) and dim.isidentifier():
            known.setdefault(dim, SIZES[axis > 0])
    found = [dim if isinstance(dim, int) else evaluated(dim, known) for dim in shape]
    return tuple(
        number if number is not None and number > 0 else SIZES[axis > 0]
        for axis, number in enumerate(found)
    )


def shapes_of(func: Any, sizes: Mapping[str, int]) -> tuple[tuple[int, ...], ...]:
    """Shapes of a PrimFunc's arguments, with numbers for symbols.

    Parameters
    ----------
    func : tvm.tirx.PrimFunc
    sizes : mapping of str to int
        Of some symbols, by name; of others `SIZES`, by where they are first seen.
    """
    from tvm import sym, tirx
    from tvm_ffi import structural_map

    simplify, known = sym.Analyzer().simplify, dict[Any, Any]()
    names: dict[str, int] = dict(sizes)
    found: list[tuple[Any, str, int]] = []
    for buffer in func.params:
        for axis, dim in enumerate(buffer.shape):
            if isinstance(dim, tirx.Var) and all(dim is not var for var, _, _ in found):
                default = SIZES[axis > 0 or len(buffer.shape) == 1]
                found.append((dim, str(dim.name), default))
    for _, name, default in found:  # names first: expressions are of them
        if name.isidentifier():
            names.setdefault(name, default)
    for var, name, default in found:
        size = names.get(name)
        size = evaluated(name, names) if size is None else size
        known[var] = tirx.const(size if size is not None and size > 0 else default, "int64")

    def number(dim: Any) -> int:
        value = structural_map(dim, (tirx.Var, lambda var: known.get(var, tirx.const(4, "int64"))))
        return int(simplify(value))

    return tuple(tuple(number(dim) for dim in buffer.shape) for buffer in func.params)
