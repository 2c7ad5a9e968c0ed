"""A node as the file spells it: operators of our own are not for files, others have a schema."""

from __future__ import annotations

from typing import TYPE_CHECKING

from apq_tvm.errors import ImportFailed, UnsupportedModel

if TYPE_CHECKING:
    import onnx

INTERNAL = "apq."
MOST_VALUES = 10_000
"""Inputs and outputs of a node: each takes its time."""


def check_node(proto: onnx.NodeProto, op: str, name: str, opset: int) -> None:
    """Refuse a node that no exporter writes.

    Parameters
    ----------
    proto : onnx.NodeProto
    op : str
        The operator with its domain, as in `apq_tvm.types.Node`.
    name : str
        Of the node, for messages.
    opset : int
        Of the default domain.

    Raises
    ------
    UnsupportedModel
        An operator of this compiler itself: what its attributes say is trusted. Very many inputs.
    ImportFailed
        Attributes, or numbers of inputs or outputs, that the operator's schema does not have.
    """
    if op.startswith(INTERNAL):
        raise UnsupportedModel(
            f"node {name!r}: {op} is an operator of this compiler itself, which no file can hold; "
            "compile the ONNX model that it was made from"
        )
    if len(proto.input) + len(proto.output) > MOST_VALUES:
        raise UnsupportedModel(
            f"{op} {name!r} has {len(proto.input)} inputs and {len(proto.output)} outputs, up to "
            f"{MOST_VALUES} together can be compiled"
        )
    if not any(proto.output):
        raise ImportFailed(f"{op} {name!r} has no output")
    if "." in op or op == "Constant":  # no schema, or read as a weight
        return
    if any(attribute.HasField("g") for attribute in proto.attribute):
        return  # the checker knows no names from around a body; its nodes come one by one
    from onnx import checker, defs

    if not defs.has(op, max_inclusive_version=opset):
        return  # reported with all other unsupported operators
    if defs.get_schema(op, opset).deprecated:
        return
    context = checker.C.CheckerContext()
    context.ir_version, context.opset_imports = checker.DEFAULT_CONTEXT.ir_version, {"": opset}
    try:
        checker.check_node(proto, context)
    except checker.ValidationError as error:
        reason = str(error).partition("\n")[0].strip()
        raise ImportFailed(f"{op} {name!r} is malformed: {reason}") from error
