"""Dimensions of the importer as TIR: every one that is no polynomial is a variable of its own.

A size such as ``(height + 31) // 32`` stands in the shapes of a hundred tensors. Written out, each
comparison of shapes takes TVM's simplifier through all of it, and a convolutional network of
dynamic size took minutes. Here it is one variable, which ``main`` gets as part of a shape
parameter, and the emitted C computes it once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import tvm_ffi
from tvm import relax, tirx

from apq_tvm.errors import UnsupportedModel
from apq_tvm.onnx_import.graph import defined
from apq_tvm.onnx_import.symbolic.dims import Call, Expr, evaluate, parse
from apq_tvm.types import ASKED, KEPT, ImportedModel

CONDITIONS = "apq.conditions"
"""Attribute of ``main``: triples of two extents that must be equal and the node that says so."""

GIVEN = "apq.given"
"""Attribute of ``main``: dimensions that the runtime gives, in the order of its table."""

RUN_SIZES = "apq.run_sizes"
"""Attribute of ``main``: dimensions that it computes from data."""

ATTRIBUTE = "apq.dims"
"""Attribute of ``main``: derived dimension → its expression over the input dimensions."""


class Dims:
    """Dimension attributes as TIR.

    Parameters
    ----------
    model : ImportedModel
        Every shape in it is looked through, so that all derived dimensions are known at once.
    """

    def __init__(self, model: ImportedModel) -> None:
        self._run = {
            name: tirx.Var(name, "int64")
            for node in model.nodes
            for name in dict.fromkeys(defined(node))
        }
        names = (KEPT, ASKED) if model.state is not None else ()
        self._given = {name: tirx.Var(name, "int64") for name in names}
        self.symbols: dict[str, Any] = {**self._run, **self._given}
        self._derived: dict[str, Any] = {}
        self.conditions: list[tuple[Any, Any, str]] = []
        for text in _texts(model):
            if text not in self._derived and is_derived(text):
                number = len(self._derived)
                self._derived[text] = tirx.Var(f"dim{number}", "int64")

    def __call__(self, dim: int | str) -> Any:
        """One dimension: an int64 constant, a variable, or a polynomial of variables.

        Raises
        ------
        ValueError
            A symbol that no input has.
        """
        if isinstance(dim, str) and dim in self._derived:
            return self._derived[dim]
        value = evaluate(dim, self.symbols, tirx.min, tirx.max)
        return tirx.const(value, "int64") if isinstance(value, int) else value

    def shape(self, dims: Iterable[int | str]) -> list[Any]:
        """Extents of a shape."""
        return [self(dim) for dim in dims]

    def known(self, dims: Iterable[int | str]) -> list[Any] | None:
        """`shape`, or None where the importer knows some dimension by no expression."""
        try:
            return self.shape(dims)
        except ValueError:
            return None

    def require(self, have: Iterable[Any], want: Iterable[Any], node: str) -> None:
        """Let every run check that the extents of a value are what `node` takes them for.

        Not by ``match_cast`` alone: TVM 0.27 takes it for proof, and drops it.
        """
        for here, there in zip(have, want, strict=True):
            if tvm_ffi.structural_equal(here, there):
                continue
            if isinstance(here, tirx.IntImm) and isinstance(there, tirx.IntImm):
                raise UnsupportedModel(f"{node}: a dimension is {here}, but must be {there}")
            self.conditions.append((here, there, node))

    def parameter(self) -> Any:
        """The parameter of ``main`` that binds variables no input has; None if there are none."""
        bound = [*self._derived.values(), *self._run.values(), *self._given.values()]
        return relax.Var("dims", relax.ShapeType(bound)) if bound else None

    @property
    def run_sizes(self) -> list[str]:
        """Those of these variables that ``apq.Sizes`` gives their values."""
        return list(self._run)

    @property
    def given(self) -> list[str]:
        """Those that the runtime gives: `apq_tvm.types.KEPT` and so on."""
        return list(self._given)

    def expressions(self) -> Mapping[str, Any]:
        """Name of each derived variable → what it is, over the input dimensions."""
        return {
            var.name: evaluate(text, self.symbols, tirx.min, tirx.max)
            for text, var in self._derived.items()
        }


def is_derived(text: str) -> bool:
    """Whether a dimension is more than a polynomial of symbols."""
    if not any(mark in text for mark in ("//", "%", "min(", "max(")):
        return False
    dim = parse(text)
    return isinstance(dim, Expr) and any(
        isinstance(atom, Call) for atoms, _ in dim.terms for atom in atoms
    )


def _texts(model: ImportedModel) -> Iterable[str]:
    for node in model.nodes:
        if node.op.startswith("apq."):
            for value in node.attrs.values():
                for entry in value if isinstance(value, tuple) else ():
                    if isinstance(entry, str):
                        yield entry
    for spec in model.value_specs.values():
        for dim in spec.shape:
            # Unknown ones are named after their value, whatever that is called.
            if isinstance(dim, str) and not dim.startswith(f"{spec.name}_dim_"):
                yield dim
