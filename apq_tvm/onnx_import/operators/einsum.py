"""Einsum of two tensors is a product of matrices: layers and attention are found in it then.

Keras writes its dense layers of several axes so (``EinsumDense``: ``"abc,cde->abde"``), others
their attention. Source: ONNX operators, Einsum-12.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from operator import mul

from apq_tvm.onnx_import.graph import FLOATS, Graph
from apq_tvm.onnx_import.operators.steps import Steps
from apq_tvm.onnx_import.symbolic.dims import Dim
from apq_tvm.types import Node

_SIDE = r"([A-Za-z]*(?:\.\.\.)?[A-Za-z]*)"
_EQUATION = re.compile(rf"{_SIDE},{_SIDE}(?:->{_SIDE})?", re.ASCII)
_DOTS = "9876543210"
"""What axes of ``...`` are called, aligned at their last one: they broadcast."""


@dataclass(frozen=True)
class _Product:
    """Labels of two operands and of the result, one a character and an axis, and their sizes."""

    a: str
    b: str
    out: str
    sizes: Mapping[str, Dim]

    def size(self, labels: Iterable[str]) -> Dim:
        """Entries of all these axes together."""
        return reduce(mul, (self.sizes[label] for label in labels), 1)


def einsum(graph: Graph, node: Node) -> list[Node] | None:
    """Transposes and reshapes around one MatMul; None where an equation is no such product.

    None are: one or three operands, a diagonal (``ii``), a sum over an axis of one operand alone,
    an outer product, integers, and axes that are not known to be equal.
    """
    steps = Steps(graph, node)
    product = _product(graph, node)
    if product is None:
        return None
    x, w = node.inputs
    if x in graph.weights:
        x, w = w, x
        product = _Product(product.b, product.a, product.out, product.sizes)
    a, b = product.a, product.b
    summed = "".join(label for label in a if label in b and label not in product.out)
    batch = "".join(label for label in product.out if label in a and label in b)
    rows = "".join(label for label in a if label not in b)
    columns = "".join(label for label in b if label not in a)
    # Rows of a layer keep their axes.
    groups = (*rows, summed) if w in graph.weights and not batch else (*batch, rows, summed)
    left = _arranged(steps, product, x, a, groups)
    right = _arranged(steps, product, w, b, (*batch, summed, columns))
    y = graph.fresh(f"{node.name}.product")
    steps.add(Node("MatMul", node.name, (left, right), (y,)))
    found = f"{batch}{rows}{columns}"
    apart = [product.sizes[label] for label in found]
    if len(found) != len(groups) or not (rows and columns):
        y = steps.reshape(y, *apart)
    order = [found.index(label) for label in product.out]
    return steps.done(y if order == sorted(order) else steps.transpose(y, *order))


def _arranged(
    steps: Steps, product: _Product, value: str, labels: str, groups: tuple[str, ...]
) -> str:
    """`value` with its axes in the order of `groups`, each of which becomes one axis."""
    order = [labels.index(label) for label in "".join(groups)]
    if order != sorted(order):
        value = steps.transpose(value, *order)
    if all(len(group) == 1 for group in groups):
        return value
    return steps.reshape(value, *(product.size(group) for group in groups))


def _product(graph: Graph, node: Node) -> _Product | None:
    """The equation of `node`, read; None if it is not one of two operands that share a sum."""
    match = _EQUATION.fullmatch(str(node.attrs["equation"]).replace(" ", ""))
    shapes = [graph.known_shape(value) for value in node.inputs]
    if match is None or len(shapes) != 2 or all(value in graph.weights for value in node.inputs):
        return None
    if any(graph.dtype(value) not in FLOATS for value in node.inputs):
        return None
    sides, sizes, dots = [], dict[str, Dim](), ""
    for text, shape in zip(match.groups()[:2], shapes, strict=True):
        extra = -1 if shape is None else len(shape) - len(text.replace("...", ""))
        if shape is None or extra < 0 or extra > len(_DOTS) or (extra and "..." not in text):
            return None
        found = _DOTS[len(_DOTS) - extra :]
        dots = max(dots, found, key=len)
        sides.append(text.replace("...", found))
        for label, dim in zip(sides[-1], shape, strict=True):
            if sizes.setdefault(label, dim) != dim:
                return None
    a, b = sides
    count = Counter(a + b)
    once = "".join(sorted(label for label in count if label.isalpha() and count[label] == 1))
    out = f"{dots}{once}" if match[3] is None else match[3].replace("...", dots)
    plain = all(len(set(side)) == len(side) for side in (a, b, out))
    shared = set(a) & set(b)
    if not plain or not set(out) <= set(count) or not shared - set(out):
        return None
    return _Product(a, b, out, sizes) if set(count) - shared <= set(out) else None
