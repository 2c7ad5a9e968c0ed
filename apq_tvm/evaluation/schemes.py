"""One scheme after another on one model and one set of inputs, in torch, without compiling."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from apq_tvm.errors import BadScheme
from apq_tvm.evaluation.compare import Reference, read_calls
from apq_tvm.evaluation.language import Language
from apq_tvm.evaluation.layers import layer_errors
from apq_tvm.evaluation.simulate import Simulation
from apq_tvm.formats.scheme import parse_at, parse_scheme
from apq_tvm.progress import Progress, Silent
from apq_tvm.quantizers.inputs.cache_balance import for_caches
from apq_tvm.quantizers.stored import storage
from apq_tvm.quantizers.vocabulary import default_types
from apq_tvm.types import AnyPath, ImportedModel, QuantizedModel


class SchemeEvaluator:
    """Quantizes a model by scheme and compares it with the float model.

    Parameters
    ----------
    model : ImportedModel
    inputs : str or path
        npz of inputs.
    rows : int
        Batch entries of a call.
    language : Language or None
        Score logits too.
    calibration : str, path or None
        File of ``apq-tvm calibrate``.
    sequential : bool or None
        As of `apq_tvm.Guidance`.
    tensor_types : mapping of str to str, optional
        As `apq_tvm.compile` takes it.
    layers : bool
        Measure every layer's own errors.
    activations : bool
        Round activations where the scheme says so.
    vocabulary : bool
        Give heads and tables of a vocabulary 6 bits at least, as `apq_tvm.compile` does; False
        gives every layer the scheme.
    kv : str
        As of `Simulation`; the float model's caches are floats.
    keep : bool
        Keep the float model's outputs for the next scheme, in a temporary folder.
    progress : Progress, optional

    Raises
    ------
    BadInput
        The inputs or the calibration do not fit the model.
    MissingPackage
        torch is not installed.
    """

    def __init__(
        self,
        model: ImportedModel,
        inputs: AnyPath,
        *,
        rows: int = 32,
        language: Language | None = None,
        calibration: AnyPath | None = None,
        sequential: bool | None = None,
        tensor_types: Mapping[str, str] | None = None,
        layers: bool = True,
        activations: bool = True,
        vocabulary: bool = False,
        kv: str = "f32",
        keep: bool = True,
        progress: Progress | None = None,
    ) -> None:
        self.model, self.progress = model, progress or Silent()
        self.tensor_types = dict(tensor_types or {})
        self.layers, self.activations, self.vocabulary = layers, activations, vocabulary
        self.kv = kv
        self.calls = read_calls(inputs, model.inputs, rows, language)
        self.file: Any = None
        self.path, self.sequential = calibration, sequential
        if calibration is not None:
            from apq_tvm.quantizers.inputs.calibration_file import load

            self.file = load(calibration, model)
        plain = Simulation(QuantizedModel(model, {}, {}))
        names = [spec.name for spec in model.outputs]
        self.reference = Reference(self.calls, plain.run, names, keep)
        self._last: tuple[str, QuantizedModel] | None = None

    def close(self) -> None:
        """Delete the float model's outputs."""
        self.reference.close()

    def __enter__(self) -> SchemeEvaluator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def quantize(self, scheme: str, method: str = "rtn") -> QuantizedModel:
        """Quantize the model; widths of one any-precision scheme share the work."""
        from apq_tvm.quantizers import quantize
        from apq_tvm.quantizers.inputs.sequential import sequential_calls

        key = f"{scheme} {method}"
        if self._last is None or self._last[0] != key:
            self._last = None  # two at once would be twice the memory
            options: dict[str, Any] = {}
            if self.file is not None:
                options = {"calibration": self.file.calibration}
                if method.endswith("gptq") and self.path is not None:
                    options["calls"] = sequential_calls(
                        self.model, self.path, self.file, self.sequential, self.progress
                    )
                if method == "learned":
                    options["learned"] = _learned(self.file)
            model = self.model
            if self.file is not None:
                model, _ = for_caches(model, self.file.extra, self.kv, method == "learned")
            learned = options.get("learned")
            first, known = default_types(self.model, parse_scheme(scheme), learned)
            quantized = quantize(
                model,
                scheme,
                {**(first if self.vocabulary else {}), **known, **self.tensor_types},
                progress=self.progress,
                method=method,
                **options,
            )
            self._last = (key, quantized)
        return self._last[1]

    def evaluate(self, scheme: str, method: str = "rtn") -> dict[str, Any]:
        """Measure one scheme.

        Parameters
        ----------
        scheme : str
            ``W4A8g32``, ``anyprec3-8@4``, ...
        method : str
            How codes are chosen (`apq_tvm.quantizers.calibrated.METHODS`).

        Returns
        -------
        dict
            ``scheme``, ``method``, ``bits_per_weight`` (of all weights, as ``inspect`` counts),
            ``linear_bits_per_weight`` and ``embedding_bits_per_weight`` (of quantized layers, 0 if
            none): what is read at the scheme's width. ``linear_stored_bits_per_weight``, which is
            more where other widths are stored too, ``weight_error`` and
            ``output_error`` (means over linear layers, None where not measured), ``outputs``,
            ``language`` (`Comparison.summary`), ``layers`` (`layer_errors`), ``seconds`` by step.

        Raises
        ------
        BadScheme
            The scheme does not exist or does not fit, or quantizes nothing.
        BadInput
            What `Comparison.add` refuses.
        """
        _, bits = parse_at(scheme)
        started = time.perf_counter()
        quantized = self.quantize(scheme.partition("@")[0], method)
        if not quantized.layers:
            raise BadScheme(f"{scheme} quantizes no layer of {self.model.name}")
        middle = time.perf_counter()
        simulation = Simulation(quantized, bits, self.activations, self.kv)
        summary = self.reference.compare(simulation.run, self.progress, scheme)
        del simulation
        layers: list[dict[str, Any]] = []
        if self.layers:
            with self.progress.stage("layers"):
                batches = self.calls.batches
                layers = layer_errors(quantized, batches, bits, self.activations)
        read = storage(quantized, bits)
        linear = [layer for layer in layers if layer["op"] == "apq.Linear"]
        return {
            "scheme": scheme,
            "method": method,
            "bits_per_weight": read.all.bits,
            "linear_bits_per_weight": read.linear.bits,
            "linear_stored_bits_per_weight": storage(quantized).linear.bits,
            "embedding_bits_per_weight": read.embedding.bits,
            "weight_error": _mean([layer["weight_error"] for layer in linear]),
            "output_error": _mean([layer["output_error"] for layer in linear]),
            **summary,
            "layers": layers,
            "seconds": {
                "quantize": round(middle - started, 2),
                "evaluate": round(time.perf_counter() - middle, 2),
            },
        }


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _learned(file: Any) -> Any:
    """What a calibration file holds of ``apq-tvm calibrate --learn``; None if nothing."""
    from apq_tvm.quantizers.learn.learned import from_arrays

    return from_arrays(file.extra, file.notes)
