"""Where loops and branches start and end, in Relax: calls that nothing is moved across.

A call of a packed function is opaque to every pass; all that a region reads goes through the call
at its start, all that it makes through the one at its end. `apq_tvm.codegen.graph.regions` reads
the calls back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tvm import relax

from apq_tvm.lower.dims import Dims
from apq_tvm.lower.operators.linear import known_shape
from apq_tvm.lower.relax_import import Convert
from apq_tvm.types import REGION, Node, TensorSpec

ENDLESS = (1 << 63) - 1


def region_converters(dims: Dims, specs: Mapping[str, TensorSpec]) -> dict[str, Convert]:
    """Converters of the operators that `apq_tvm.onnx_import.control.regions` describes."""

    def given(name: str, value: Any, node: Node) -> Any:
        """The type of a value that passes a branch's start or end: its sizes may change there."""
        spec = specs.get(name)
        shape = dims.known(spec.shape) if spec is not None else None
        return relax.TensorType(shape or known_shape(value, node), value.ty.dtype)

    def loop(bb: relax.BlockBuilder, node: Node, inputs: Sequence[Any]) -> Any:
        attrs = node.attrs
        trip, *values = inputs
        if trip is None:
            given = attrs["trip"]
            trip = dims(ENDLESS if given is None else given)
        else:
            trip = bb.emit(trip)
        first = len(values) - len(attrs["backward"])
        outs = [relax.TensorType((), "int64")]
        outs += [_like(value, node) for value in values[:first]]
        outs += [_entry(value, node) for value in values[first:]]
        counts = (attrs["carried"], attrs["captured"], int(attrs["conditional"]))
        return _call(bb, "loop", [*counts, attrs["backward"]], values, outs, trip)

    def end_loop(bb: relax.BlockBuilder, node: Node, inputs: Sequence[Any]) -> Any:
        carried = node.attrs["carried"]
        outs = [_like(value, node) for value in inputs[1 : 1 + carried]]
        trip = node.attrs["trip"]
        for value in inputs[1 + carried :]:
            shape = [dims(trip), *known_shape(value, node)]
            outs.append(relax.TensorType(shape, value.ty.dtype))
        return _call(bb, "end_loop", [carried, node.attrs["backward"]], inputs, outs)

    def branch(bb: relax.BlockBuilder, node: Node, inputs: Sequence[Any]) -> Any:
        pairs = zip(node.outputs[1:], inputs[1:], strict=True)
        outs = [relax.TensorType((), "bool"), *(given(*pair, node) for pair in pairs)]
        kind = "then" if node.op == "apq.Then" else "else"
        return _call(bb, kind, [len(inputs) - 1], inputs, outs)

    def end_if(bb: relax.BlockBuilder, node: Node, inputs: Sequence[Any]) -> Any:
        count = node.attrs["results"]
        pairs = zip(node.outputs, inputs[2 : 2 + count], strict=True)
        outs = [given(*pair, node) for pair in pairs]
        return _call(bb, "end_if", [count], inputs, outs)

    return {
        "apq.Loop": loop,
        "apq.EndLoop": end_loop,
        "apq.Then": branch,
        "apq.Else": branch,
        "apq.EndIf": end_if,
    }


def _call(
    bb: relax.BlockBuilder,
    kind: str,
    counts: Sequence[Any],
    inputs: Sequence[Any],
    outs: Sequence[Any],
    *first: Any,
) -> Any:
    name = REGION + "/".join([kind, *map(str, counts)])
    args = [*first, *(bb.emit(value) for value in inputs)]
    return bb.emit(relax.call_dps_packed(name, args, list(outs)))


def _like(value: Any, node: Node) -> Any:
    return relax.TensorType(known_shape(value, node), value.ty.dtype)


def _entry(value: Any, node: Node) -> Any:
    """One entry along the first axis."""
    return relax.TensorType(known_shape(value, node)[1:], value.ty.dtype)
