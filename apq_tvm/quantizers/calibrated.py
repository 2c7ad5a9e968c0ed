"""What calibration adds to quantizing: scales before it, feedback in it, biases after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from apq_tvm.errors import BadInput
from apq_tvm.formats.families import dequantize
from apq_tvm.formats.integer import PAIR_MOST
from apq_tvm.progress import Progress
from apq_tvm.quantizers.families.kept_sums import keeps_sums
from apq_tvm.quantizers.families.pairs import takes_pairs
from apq_tvm.quantizers.feedback.gptq import improve, layer_feedback, quantize_fed_back
from apq_tvm.quantizers.inputs.calibration_file import check_model
from apq_tvm.quantizers.inputs.expected import expected_means
from apq_tvm.quantizers.inputs.folds import replace_weights
from apq_tvm.quantizers.inputs.scaling import scale_model
from apq_tvm.quantizers.inputs.sequential import Calls, Walk
from apq_tvm.quantizers.learn.learned import Learned
from apq_tvm.quantizers.registry import quantize_tensor, quantizer_of
from apq_tvm.types import (
    F32,
    Array,
    Calibration,
    ImportedModel,
    LayerStats,
    QuantizedModel,
    QuantizedTensor,
    Scheme,
)

METHODS = ("rtn", "gptq", "awq", "smoothquant", "awq+gptq", "smoothquant+gptq", "learned")
"""How codes are chosen: each family's own way; with error feedback; after scales that AWQ or
SmoothQuant finds; after such scales with error feedback; as ``apq-tvm calibrate --learn`` learned
them."""


class Method:
    """One way to choose the codes of a model's layers.

    Parameters
    ----------
    name : str
        One of `METHODS`.
    calibration : Calibration or None
    learned : Learned or None
        What a calibration file holds of it.
    search : bool
        Search scales for least error.
    pairs : bool
        Neighbours among 8-bit codes are to fit together, unless error feedback or learning chooses
        them (`families.pairs`).

    Raises
    ------
    BadInput
        If there is no such method, or it needs a calibration that is not given.
    """

    def __init__(
        self,
        name: str,
        calibration: Calibration | None,
        learned: Learned | None = None,
        search: bool = True,
        pairs: bool = False,
    ) -> None:
        if name not in METHODS:
            raise BadInput(f"method {name!r}: one of {', '.join(METHODS)} is possible")
        if name != "rtn" and calibration is None:
            raise BadInput(
                f"method {name} needs calibration data: run apq-tvm calibrate and give its file "
                "with --calibration"
            )
        if name == "learned" and learned is None:
            raise BadInput(
                "the calibration file holds nothing learned; run apq-tvm calibrate with --learn, "
                "or use another method"
            )
        self.name, self.calibration, self.search = name, calibration, search
        scaling, _, feedback = name.rpartition("+")
        self.feeds_back = feedback == "gptq"
        self.scaling = scaling or feedback
        self.pairs = pairs and not self.feeds_back
        self.learned = learned if name == "learned" else None
        self.notes: dict[str, str] = {}
        self.means: dict[str, F32] = {}
        self._walk: Walk | None = None

    def prepare(
        self, model: ImportedModel, schemes: Mapping[str, Scheme], progress: Progress
    ) -> ImportedModel:
        """The model to quantize: with scales folded in, or with what was learned.

        Parameters
        ----------
        model : ImportedModel
        schemes : mapping of str to Scheme
            Of the linear layers that are quantized, by name.
        progress : Progress

        Raises
        ------
        BadInput
            If the calibration, or what was learned, is of another model or of other schemes.
        """
        if self.calibration is None:
            if self.search and any(map(keeps_sums, schemes.values())):
                self.means = expected_means(model)
            return model
        check_model(self.calibration, model, "the calibration")
        if self.scaling in ("awq", "smoothquant"):
            model, self.calibration, self.notes = scale_model(
                model, self.calibration, schemes, self.scaling, progress
            )
        elif self.learned is not None:
            self.learned.check(schemes)
            model = self.learned.apply(model)
        return model

    def walk(
        self,
        model: ImportedModel,
        calls: Calls,
        schemes: Mapping[str, Scheme],
        progress: Progress,
    ) -> None:
        """Take statistics anew on `calls`, behind the layers that are quantized already."""
        if self.calibration is None or not self.feeds_back:
            return
        weigh = any(stats.importance for stats in self.calibration.layers.values())
        self._walk = Walk(model, calls, schemes, weigh, progress)

    def look(self, nodes: Sequence[str], is_table: bool) -> None:
        """Take the statistics of a layer that comes next; of layers that share a weight they stay
        those of the float model."""
        known = None if self.calibration is None else self.calibration.layers.get(nodes[0])
        if self._walk is None or self.calibration is None or known is None:
            return
        if is_table or len(nodes) > 1:
            return
        stats = self._walk.stats(nodes[0], known)
        layers = {**self.calibration.layers, nodes[0]: stats}
        self.calibration = replace(self.calibration, layers=layers)
        self._note(nodes, "H behind quantized layers")

    def decided(self, nodes: Sequence[str], tensor: QuantizedTensor) -> None:
        """What layers that share a weight were quantized to."""
        if self._walk is not None and self.calibration is not None:
            self._walk.decided(nodes, tensor, self.calibration)

    def stats(self, nodes: Sequence[str]) -> LayerStats | None:
        """What is known of the inputs of layers that share a weight."""
        layers = self.calibration.layers if self.calibration else {}
        found = [layers[node] for node in nodes if node in layers]
        return pooled(found) if found else None

    def tensor(
        self,
        model: ImportedModel,
        nodes: Sequence[str],
        weight: F32,
        scheme: Scheme,
        name: str,
        shared: Any,
        is_table: bool = False,
    ) -> QuantizedTensor:
        """Quantize a weight.

        Parameters
        ----------
        model : ImportedModel
            As `prepare` returned it.
        nodes : sequence of str
            The layers that read it.
        weight : float32 [N, K]
        scheme : Scheme
        name : str
            Of the weight, for errors.
        shared : object
            What the family's ``prepare`` returned.
        is_table : bool
            The codes are an embedding's too: its rows are read one by one, so that no column can
            make good another's error.

        Raises
        ------
        ApqError
            See `quantize_tensor` and `layer_feedback`.
        """
        if self.learned is not None:
            for node in nodes:
                if (known := self.learned.tensors.get(node)) is not None:
                    self.notes[node] = f"learned ({self.learned.kind})"
                    return known
        stats = self.stats(nodes)
        if stats is None and self.calibration is not None and not is_table:
            self._note(nodes, "no calibration sample reached it")
        if stats is not None and quantizer_of(scheme).feeds_back:
            tensor = quantize_tensor(weight, scheme, name, self.search, stats, shared)
            if self.feeds_back or stats.hessian is not None:
                feedback = layer_feedback(stats, weight.shape[1], nodes[-1])
                self._note(nodes, "error feedback", feedback.note())
                if self.feeds_back:
                    tensor = improve(weight, tensor, feedback.hessian, nodes[-1])
            return tensor
        if stats is None or not self.feeds_back:
            means = None if is_table or stats is not None else self._means(nodes, scheme)
            pairs = not is_table and self._pairs(nodes, scheme, weight)
            return quantize_tensor(weight, scheme, name, self.search, stats, shared, means, pairs)
        if is_table:
            self._note(nodes, "gptq: without feedback, its codes are an embedding table's too")
            return quantize_tensor(weight, scheme, name, self.search, stats, shared)
        # Where the bias is corrected afterwards, the mean error does not count.
        # Layers that share a weight have means of their own.
        centred = len(nodes) == 1 and _has_bias(model, nodes[0]) and not scheme.min_bits
        feedback = layer_feedback(
            stats, weight.shape[1], nodes[-1], centred=centred, act_order=True
        )
        self._note(nodes, "gptq", feedback.note())
        return quantize_fed_back(weight, scheme, name, stats, feedback, self.search, shared)

    def _means(self, nodes: Sequence[str], scheme: Scheme) -> F32 | None:
        """What layers that share a weight are expected to read."""
        known = [self.means[node] for node in nodes if node in self.means]
        if not known or not keeps_sums(scheme):
            return None
        self._note(nodes, "rounded by the expected means of its inputs")
        return np.asarray(np.mean(known, axis=0), np.float32)

    def _pairs(self, nodes: Sequence[str], scheme: Scheme, weight: F32) -> bool:
        """Whether neighbours among the codes of layers that share a weight are to fit together."""
        wanted = self.pairs and takes_pairs(scheme, weight.shape[1])
        if wanted:
            self._note(nodes, f"no two neighbouring codes exceed {PAIR_MOST} together")
        return wanted

    def _note(self, nodes: Sequence[str], *parts: str) -> None:
        """Say what was done to layers, after what scaling did."""
        for node in nodes:
            known = self.notes.get(node, "")
            self.notes[node] = "; ".join(filter(None, (known, *parts)))

    def finish(self, quantized: QuantizedModel) -> QuantizedModel:
        """Correct biases for the mean error, and note what was done."""
        notes = {**quantized.notes}
        for node, text in self.notes.items():
            if node in quantized.layers:
                notes[node] = "; ".join(filter(None, (notes.get(node, ""), text)))
        quantized = replace(quantized, notes=notes)
        if self.calibration is None or self.name == "learned":
            return quantized
        return correct_biases(quantized, self.calibration)


def pooled(found: Sequence[LayerStats]) -> LayerStats:
    """What layers that share a weight read together.

    Every row counts about as calibration weighed it, by its |dL/dy|, or all the same.
    """
    if len(found) == 1:
        return found[0]
    measured = any(stats.importance for stats in found)
    rows = np.array([stats.samples for stats in found], np.float64)
    sizes = [np.sqrt(stats.importance) if measured else 1.0 for stats in found]
    weights = rows * sizes
    shares = (weights / (weights.sum() or 1.0)).astype(np.float32)

    def mean(arrays: Sequence[F32 | None]) -> F32 | None:
        known = [array for array in arrays if array is not None]
        if len(known) < len(arrays):
            return None
        return np.asarray(sum(s * a for s, a in zip(shares, known, strict=True)), np.float32)

    square, first = mean([s.mean_square for s in found]), mean([s.mean for s in found])
    assert square is not None and first is not None
    return LayerStats(
        mean_square=square,
        mean=first,
        absmax=np.max([s.absmax for s in found], axis=0),
        samples=int(rows.sum()),
        hessian=mean([s.hessian for s in found]),
        fisher=mean([s.fisher for s in found]),
        importance=float(rows @ [s.importance for s in found] / rows.sum()),
    )


def correct_biases(
    quantized: QuantizedModel, calibration: Calibration, add: bool = False
) -> QuantizedModel:
    """Add what rounding takes from the mean output, ``(W - Ŵ) E[x]``, to the biases.

    After Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction",
    ICCV 2019, section 4.2, with the measured E[x].

    Parameters
    ----------
    quantized : QuantizedModel
    calibration : Calibration
    add : bool
        Give a bias to layers that have none.

    Returns
    -------
    QuantizedModel
        Layers with several widths keep their biases: the mean error differs between widths.
    """
    model = quantized.model
    changes: dict[tuple[str, int], Array] = {}
    for node in model.nodes:
        stats = calibration.layers.get(node.name)
        key = quantized.layers.get(node.name)
        if node.op != "apq.Linear" or stats is None or key is None:
            continue
        has = _has_bias(model, node.name)
        tensor = quantized.tensors[key]
        if tensor.scheme.min_bits or not (has or add):
            continue
        weight = np.asarray(model.weights[node.inputs[1]], np.float32)
        shift = (weight - dequantize(tensor)) @ stats.mean
        bias = model.weights[node.inputs[2]] if has else np.zeros(len(shift), np.float32)
        changes[(node.name, 2)] = (bias + shift).astype(np.float32)
    return replace(quantized, model=replace_weights(model, changes, "corrected"))


def _has_bias(model: ImportedModel, name: str) -> bool:
    node = next(node for node in model.nodes if node.name == name)
    return len(node.inputs) > 2 and bool(node.inputs[2])
