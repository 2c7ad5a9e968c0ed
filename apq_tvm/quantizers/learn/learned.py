"""What block-wise learning leaves: quantized tensors and changed float weights, layer by layer.

They are kept as they are: codes, scales, zeros and tables of every layer, and the weights of norms
and biases that balance vectors were folded into. So whatever was learned, and for whatever format,
``apq-tvm compile --calibration FILE --method learned`` has nothing left to decide.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from apq_tvm.errors import BadInput
from apq_tvm.formats import parse_scheme
from apq_tvm.formats.families import check_tensor
from apq_tvm.quantizers.exactly import exactly
from apq_tvm.quantizers.inputs.folds import replace_weights
from apq_tvm.types import Array, ImportedModel, QuantizedTensor, Scheme


@dataclass(frozen=True)
class Learned:
    """The result of one learning run.

    Parameters
    ----------
    kind : str
        One of `apq_tvm.quantizers.learn.learning_run.KINDS`.
    tensors : mapping of str to QuantizedTensor
        By the name of the ``apq.Linear`` node.
    weights : mapping of (str, int) to ndarray
        Float weights that changed: node name and input index.
    scheme : str
        What was asked for; of single layers rules or a budget may have said otherwise.
    """

    kind: str
    tensors: Mapping[str, QuantizedTensor] = field(default_factory=dict)
    weights: Mapping[tuple[str, int], Array] = field(default_factory=dict)
    scheme: str = ""

    def types(self, scheme: Scheme | None) -> dict[str, str]:
        """Rules that `quantize` is given before the user's own: layer → the scheme it was learned
        in; none if another one is asked for than was then."""
        if str(scheme) != self.scheme:
            return {}
        return {exactly(node): str(t.scheme) for node, t in self.tensors.items()}

    def check(self, schemes: Mapping[str, Scheme]) -> None:
        """Refuse to be used for schemes it was not learned for.

        Parameters
        ----------
        schemes : mapping of str to Scheme
            Of the linear layers that are quantized, by name.

        Raises
        ------
        BadInput
            A learned layer has another scheme now: balance folded into the float weights would be
            left without its codes.
        """
        for node, tensor in self.tensors.items():
            if str(schemes.get(node)) != str(tensor.scheme):
                raise BadInput(
                    f"layer {node!r} was learned as {tensor.scheme}, not {schemes.get(node)}; "
                    f"compile with --scheme {tensor.scheme}, or learn anew"
                )

    def apply(self, model: ImportedModel) -> ImportedModel:
        """The model with the float weights that were learned.

        Layers that shared a weight have one each, since each learned codes of its own.

        Raises
        ------
        BadInput
            A layer is not in the model.
        """
        names = {node.name for node in model.nodes}
        for node, _ in self.weights:
            if node not in names:
                raise BadInput(f"what was learned names a node {node!r} that the model lacks")
        linear = {node.name: node.inputs[1] for node in model.nodes if node.op == "apq.Linear"}
        uses = Counter(linear.values())
        own = {
            (node, 1): model.weights[linear[node]]
            for node in self.tensors
            if node in linear and uses[linear[node]] > 1
        }
        return replace_weights(model, own | dict(self.weights), "learned")


def to_arrays(learned: Learned) -> tuple[dict[str, Array], dict[str, str]]:
    """Arrays and metadata for a calibration file; the inverse of `from_arrays`."""
    arrays: dict[str, Array] = {}
    nodes = list(learned.tensors)
    for i, node in enumerate(nodes):
        tensor = learned.tensors[node]
        arrays[f"learned.{i}.codes"] = tensor.codes
        arrays[f"learned.{i}.scales"] = tensor.scales
        if tensor.zeros is not None:
            arrays[f"learned.{i}.zeros"] = tensor.zeros
        for name, table in tensor.tables.items():
            arrays[f"learned.{i}.table.{name}"] = np.asarray(table)
    weights = [[node, index] for node, index in learned.weights]
    for i, array in enumerate(learned.weights.values()):
        arrays[f"learned.weight.{i}"] = array
    about = {
        "kind": learned.kind,
        "scheme": learned.scheme,
        "layers": [[node, str(learned.tensors[node].scheme)] for node in nodes],
        "weights": weights,
    }
    return arrays, {"learned": json.dumps(about)}


def from_arrays(arrays: Mapping[str, Array], metadata: Mapping[str, str]) -> Learned | None:
    """What a calibration file holds that was learned, None if nothing.

    Raises
    ------
    BadInput
        Arrays are missing or do not fit their scheme.
    """
    if "learned" not in metadata:
        return None
    try:
        about: dict[str, Any] = json.loads(metadata["learned"])
        tensors = {}
        for i, (node, spelling) in enumerate(about["layers"]):
            scheme = parse_scheme(spelling)
            assert scheme is not None
            start = f"learned.{i}.table."
            tables = {k.removeprefix(start): a for k, a in arrays.items() if k.startswith(start)}
            tensors[node] = QuantizedTensor(
                arrays[f"learned.{i}.codes"],
                arrays[f"learned.{i}.scales"],
                arrays.get(f"learned.{i}.zeros"),
                scheme,
                tables,
            )
            check_tensor(tensors[node], f"learned layer {node!r}")
        weights = {
            (str(node), int(index)): arrays[f"learned.weight.{i}"]
            for i, (node, index) in enumerate(about["weights"])
        }
        return Learned(about["kind"], tensors, weights, about.get("scheme", ""))
    except (KeyError, ValueError, TypeError) as error:
        raise BadInput(f"what was learned is damaged ({error!r}); learn anew") from error
