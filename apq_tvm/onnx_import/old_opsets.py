"""Models of opsets before 11, by ONNX's converter."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from apq_tvm.errors import UnsupportedModel

if TYPE_CHECKING:
    import onnx

OLDEST_OPSET = 11
SECONDS = 60
# Only numbers that say shapes, scales or axes are of interest to the converter.
LARGEST_WEIGHT = 1 << 10

# A process of its own: files that no exporter writes end it (onnx 1.23: Slice with a
# string for its ends is a SIGSEGV). Modules are found where this process finds them.
PROGRAM = """
import sys
sys.path[:] = sys.argv[2:]
import onnx
from onnx import version_converter
model = onnx.ModelProto.FromString(sys.stdin.buffer.read())
try:
    model = version_converter.convert_version(model, int(sys.argv[1]))
except Exception as error:
    sys.exit(str(error).strip() or type(error).__name__)
sys.stdout.buffer.write(model.SerializeToString())
"""


Aside = Mapping[tuple[str, ...], "Sequence[onnx.AttributeProto]"]
"""Attributes that are not in the model, by the outputs of the node they are of."""


def convert(model: onnx.ModelProto, opset: int) -> tuple[onnx.ModelProto, Aside]:
    """The model at opset 11, without the large attributes of operators of other domains.

    Raises
    ------
    UnsupportedModel
        The converter does not know how, or failed.
    """
    import onnx
    from onnx import helper

    # The converter knows weights only as inputs with a default, as files of that time have them.
    inputs, weights = {value.name for value in model.graph.input}, list(model.graph.initializer)
    for weight in weights:
        if weight.name not in inputs:
            kind = helper.make_tensor_type_proto(weight.data_type, list(weight.dims))
            model.graph.input.append(helper.make_value_info(weight.name, kind))
    aside = _set_aside(model.graph)
    large = [weight for weight in weights if weight.ByteSize() > LARGEST_WEIGHT]
    del model.graph.initializer[:]
    model.graph.initializer.extend(w for w in weights if w.ByteSize() <= LARGEST_WEIGHT)
    converted = onnx.ModelProto.FromString(_run(model.SerializeToString(), opset))
    converted.graph.initializer.extend(large)
    if opset < 7:
        _by_channel(converted.graph)
    return _asymmetric(converted), aside


def _set_aside(graph: onnx.GraphProto) -> Aside:
    """Take the attributes of large operators of other domains, which the converter leaves alone."""
    taken = {}
    for node in graph.node:
        if node.domain not in ("", "ai.onnx") and node.ByteSize() > LARGEST_WEIGHT:
            taken[tuple(node.output)] = list(node.attribute)
            del node.attribute[:]
    return taken


def _run(data: bytes, opset: int) -> bytes:
    """The bytes of the converted model."""
    command = [sys.executable, "-c", PROGRAM, str(OLDEST_OPSET), *sys.path]
    try:
        done = subprocess.run(
            command, input=data, capture_output=True, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        reason = f"it takes more than {SECONDS} s"
    else:
        if not done.returncode:
            return done.stdout
        ended = f"its converter ended with status {done.returncode}: the file is malformed"
        reason = done.stderr.decode(errors="replace").strip() if done.returncode == 1 else ended
    raise UnsupportedModel(
        f"the model has opset {opset}, older than {OLDEST_OPSET}, and onnx cannot convert it "
        f"({reason}); export it again with a newer opset"
    )


def _by_channel(graph: onnx.GraphProto) -> None:
    """Slopes of PRelu as opset 6 meant them, one a channel: axis 1, not the last."""
    from onnx import helper

    known = {v.name: len(v.type.tensor_type.shape.dim) for v in (*graph.input, *graph.value_info)}
    nodes = []
    for at, node in enumerate(graph.node):
        if node.op_type == "PRelu" and known.get(node.input[1]) == 1:
            behind = list(range(1, known.get(node.input[0], 0) - 1))
            if behind:
                slope = f"{node.input[1]}.slope{at}"
                nodes.append(helper.make_node("Unsqueeze", [node.input[1]], [slope], axes=behind))
                node.input[1] = slope
        nodes.append(node)
    del graph.node[:]
    graph.node.extend(nodes)


def _asymmetric(model: onnx.ModelProto) -> onnx.ModelProto:
    """Resize as opset 10 and Upsample meant it: the converter leaves opset 11's defaults."""
    from onnx import helper

    for node in model.graph.node:
        if node.op_type == "Resize" and node.domain in ("", "ai.onnx"):
            had = {attribute.name for attribute in node.attribute}
            for key, value in (
                ("coordinate_transformation_mode", "asymmetric"),
                ("nearest_mode", "floor"),
            ):
                if key not in had:
                    node.attribute.append(helper.make_attribute(key, value))
    return model
