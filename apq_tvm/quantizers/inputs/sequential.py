"""Statistics of what layers read behind layers that are quantized already, for ``gptq``.

A calibration file knows what layers read in the float model. GPTQ (Frantar et al., ICLR 2023,
section 4, "Setup") measures H of each layer on what comes out of the quantized layers before it, so
that codes make good what these broke. Here the calibration's inputs walk through the model as it is
quantized: up to a layer, whose statistics are taken, and on through its codes. Activations are
rounded as kernels round them, biases corrected, and rows weighed by the float model's |dL/dy| where
the calibration weighed them. Widths of any-precision layers take turns, call by call.

Layers that share a weight with others keep the statistics of the float model. So do all layers of a
model with loops or branches, whose nodes cannot be run up to a layer.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from apq_tvm.errors import ApqError, BadInput
from apq_tvm.extras import require
from apq_tvm.formats.families import dequantize
from apq_tvm.onnx_import.symbolic.regions import STARTS
from apq_tvm.progress import Progress
from apq_tvm.quantizers.inputs.calibration_file import CalibrationFile
from apq_tvm.quantizers.inputs.calls import read_calls
from apq_tvm.types import (
    F32,
    AnyPath,
    Array,
    Calibration,
    ImportedModel,
    LayerStats,
    QuantizedTensor,
    Scheme,
)

Calls = Sequence[Mapping[str, Array]]

DATA = "data"
"""Note of a calibration file: where its inputs lie, relative to its own folder."""

MOST_PRODUCTS = 1e14
"""Multiplications above which statistics are not taken anew unless asked for: about an hour of two
cores. Counted, not timed, so that one machine chooses as another does."""

GRADIENT = 3
"""Passes that the weights of rows cost: one forward and two backward."""


def sequential_calls(
    model: ImportedModel,
    path: AnyPath,
    file: CalibrationFile,
    asked: bool | None,
    progress: Progress,
) -> Calls | None:
    """The calibration's inputs, if statistics are to be taken behind quantized layers.

    Parameters
    ----------
    model : ImportedModel
    path : str or path
        Of the calibration file.
    file : CalibrationFile
    asked : bool or None
        True and False force the choice; None takes them where inputs and time allow.
    progress : Progress
        Told the choice, as a stage of its own.

    Returns
    -------
    sequence of mapping or None

    Raises
    ------
    BadInput
        They are asked for and cannot be had: the inputs are gone or others, the model has loops or
        branches, torch is not installed.
    """
    calls: Calls | None = None
    why = "as asked"
    products = _products(model, file)
    if asked is None and products > MOST_PRODUCTS:
        why = (
            f"behind quantized ones it takes {products:.0e} multiplications, more than "
            f"{MOST_PRODUCTS:.0e}; --sequential takes it"
        )
    elif asked is not False:
        try:
            calls = _calls(model, path, file)
        except ApqError as error:
            if asked:
                raise BadInput(f"--sequential: {error}") from error
            why = str(error)
    whose = f"the float model's layers ({why})" if calls is None else "layers behind quantized ones"
    with progress.stage(f"gptq: H of {whose}"):
        return calls


def _products(model: ImportedModel, file: CalibrationFile) -> float:
    """Multiplications of a walk."""
    total, passes = 0.0, 1 + GRADIENT * _weighed(file)
    for node in model.nodes:
        stats = file.calibration.layers.get(node.name)
        if node.op == "apq.Linear" and stats is not None:
            n, k = model.weights[node.inputs[1]].shape
            total += float(stats.samples) * k * (k + passes * n)
    return total


def _weighed(file: CalibrationFile) -> bool:
    return bool(json.loads(file.notes.get("run", "{}")).get("weigh"))


def _calls(model: ImportedModel, path: AnyPath, file: CalibrationFile) -> Calls:
    """The inputs that a calibration file was made from.

    Raises
    ------
    BadInput
        Why they cannot be had.
    """
    run = json.loads(file.notes.get("run", "{}"))
    if DATA not in file.notes or "samples" not in run:
        raise BadInput(f"{path} does not say where its inputs are; run apq-tvm calibrate anew")
    data = Path(path).parent / file.notes[DATA]
    if not data.is_file():
        raise BadInput(f"the inputs of {path} are no longer at {data}; run apq-tvm calibrate anew")
    if hashlib.sha256(data.read_bytes()).hexdigest() != run.get("inputs"):
        raise BadInput(f"{data} is no longer what {path} was made from; run apq-tvm calibrate anew")
    if any(node.op in STARTS for node in model.nodes):
        raise BadInput(f"{model.name} has loops or branches, which inputs cannot be run up to")
    require("torch")
    return read_calls(model, data, run["samples"], run["rows"])[0]


class Walk:
    """Calibration inputs on their way through a model that is quantized as they go.

    Parameters
    ----------
    model : ImportedModel
        With scales folded in, where there are such.
    calls : sequence of mapping
    schemes : mapping of str to Scheme
        Of the linear layers that are quantized, by name.
    weigh : bool
        Weigh rows by the float model's |dL/dy|.
    progress : Progress
    """

    def __init__(
        self,
        model: ImportedModel,
        calls: Calls,
        schemes: Mapping[str, Scheme],
        weigh: bool,
        progress: Progress,
    ) -> None:
        from apq_tvm.quantizers.learn.distill import tuned_widths
        from apq_tvm.quantizers.learn.result_loss import mask_of
        from apq_tvm.quantizers.learn.row_weights import row_weights
        from apq_tvm.quantizers.torch.graph import TorchGraph

        self.model, self.schemes = model, schemes
        self.graph = TorchGraph(model)
        self.at = {node.name: i for i, node in enumerate(model.nodes)}
        started = [self.graph.begin(call) for call in calls]
        self.values = [dict(values) for values, _ in started]
        self.symbols = [symbols for _, symbols in started]
        self.masks = [mask_of(model, call) for call in calls]
        widths = tuned_widths(schemes.values())
        self.widths = [widths[i % len(widths)] for i in range(len(calls))]
        self.weights = row_weights(self.graph, calls, set(schemes), progress) if weigh else ()
        self.done = 0
        self.codes: dict[str, QuantizedTensor] = {}
        self.biases: dict[str, F32] = {}

    def stats(self, name: str, before: LayerStats) -> LayerStats:
        """What a layer reads, all quantized layers before it as they were `decided`.

        Parameters
        ----------
        name : str
            A linear layer that the walk has not passed.
        before : LayerStats
            What the calibration knows of it: Fisher information and importance stay.
        """
        from apq_tvm.quantizers.inputs.row_sums import Sums
        from apq_tvm.quantizers.inputs.statistics import rows_read
        from apq_tvm.quantizers.torch.round import fake_activations

        self._advance(self.at[name])
        node = self.model.nodes[self.at[name]]
        sums = Sums.zero(self.model.weights[node.inputs[1]].shape[1], True)
        for i, values in enumerate(self.values):
            rows = rows_read(values[node.inputs[0]], self.masks[i], name)
            weights = self.weights[i].get(name) if self.weights else None
            sums.add(fake_activations(rows, self.schemes[name]), weights)
        found = sums.stats()
        return replace(found, fisher=before.fisher, importance=before.importance)

    def decided(self, names: Sequence[str], tensor: QuantizedTensor, known: Calibration) -> None:
        """Layers that share a weight were quantized; their biases are corrected as by
        `correct_biases`."""
        for name in names:
            node = self.model.nodes[self.at[name]]
            self.codes[name] = tensor
            stats = known.layers.get(name)
            biased = node.op == "apq.Linear" and len(node.inputs) > 2 and node.inputs[2]
            if biased and stats is not None and not tensor.scheme.min_bits:
                weight = np.asarray(self.model.weights[node.inputs[1]], np.float32)
                lost = (weight - dequantize(tensor)) @ stats.mean
                self.biases[name] = (self.model.weights[node.inputs[2]] + lost).astype(np.float32)

    def _advance(self, to: int) -> None:
        """Run all calls up to node `to`, which is not run."""
        from apq_tvm.quantizers.torch.graph import as_tensor
        from apq_tvm.quantizers.torch.ops import F, Tensor, torch
        from apq_tvm.quantizers.torch.round import fake_activations
        from apq_tvm.types import Node

        nodes = self.model.nodes[self.done : to]
        keep = {value for node in self.model.nodes[to:] for value in node.inputs if value}
        decoded: dict[tuple[str, int], Tensor] = {}

        def weight(name: str, width: int) -> Tensor:
            bits = width if self.codes[name].scheme.min_bits else 0
            if (name, bits) not in decoded:
                decoded[(name, bits)] = as_tensor(dequantize(self.codes[name], bits))
            return decoded[(name, bits)]

        with torch.no_grad():
            for i, values in enumerate(self.values):

                def product(
                    node: Node, x: Tensor, w: Tensor, bias: Tensor | None, call: int = i
                ) -> Tensor:
                    if node.name not in self.codes:
                        return F.linear(x, w, bias)
                    if node.name in self.biases:
                        bias = as_tensor(self.biases[node.name])
                    x = fake_activations(x, self.codes[node.name].scheme)
                    return F.linear(x, weight(node.name, self.widths[call]), bias)

                def lookup(node: Node, table: Tensor, ids: Tensor) -> Tensor:
                    from apq_tvm.quantizers.torch.graph import plain_lookup

                    known = node.name in self.codes
                    return plain_lookup(node, weight(node.name, 0) if known else table, ids)

                self.values[i] = self.graph.run_nodes(
                    nodes, values, self.symbols[i], keep, product, lookup=lookup
                )
        self.done = max(self.done, to)
