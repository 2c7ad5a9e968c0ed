"""Quantization by a calibration file: ``compile --calibration --method --target-bpw``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from apq_tvm.errors import BadScheme
from apq_tvm.formats import parse_scheme
from apq_tvm.progress import Progress, Silent
from apq_tvm.quantizers.budget import BudgetPlan, choose_schemes, default_candidates
from apq_tvm.quantizers.calibration_file import load
from apq_tvm.quantizers.codebook_file import load_codebooks
from apq_tvm.quantizers.learned import Learned, from_arrays
from apq_tvm.quantizers.plan import planned_layers, quantize, scheme_of_weights
from apq_tvm.types import AnyPath, Calibration, ImportedModel, QuantizedModel, Scheme


@dataclass(frozen=True)
class Guidance:
    """What guides the choice of codes and schemes.

    Parameters
    ----------
    calibration : str, path or None
        File of ``apq-tvm calibrate``.
    method : str
        One of `apq_tvm.quantizers.calibrated.METHODS`.
    target_bpw : float or None
        Bits per weight to meet by choosing a scheme for every layer.
    candidates : tuple of str
        Schemes to choose from; integers of all widths and groups if none are given.
    codebooks : str, path or None
        File of ``apq-tvm codebooks``, for schemes such as cb3; without it they are learned on the
        model itself.
    """

    calibration: AnyPath | None = None
    method: str = "rtn"
    target_bpw: float | None = None
    candidates: Sequence[str] = ()
    codebooks: AnyPath | None = None


def quantize_guided(
    model: ImportedModel,
    scheme: Scheme | str | None,
    tensor_types: Mapping[str, str],
    guidance: Guidance,
    search: bool = True,
    progress: Progress | None = None,
) -> QuantizedModel:
    """Quantize a model as a calibration file and a budget say.

    Parameters
    ----------
    model : ImportedModel
    scheme, tensor_types, search, progress
        See `quantize`. With a budget `scheme` says how activations are quantized and whether
        weights have zero points; layers that `tensor_types` names are not chosen for.
    guidance : Guidance

    Returns
    -------
    QuantizedModel
        Its notes have every chosen layer's measured error.

    Raises
    ------
    BadInput
        If the file is missing, damaged or of another model, or the method needs more than it holds.
    BadScheme
        If the budget cannot be met; see also `quantize`.
    """
    progress = progress or Silent()
    calibration: Calibration | None = None
    learned: Learned | None = None
    if guidance.calibration is not None:
        file = load(guidance.calibration, model)
        calibration, learned = file.calibration, from_arrays(file.extra, file.notes)
    plan: BudgetPlan | None = None
    types = dict(tensor_types)
    if guidance.target_bpw is not None:
        plan = plan_budget(model, scheme, tensor_types, guidance, calibration, progress)
        types = {**plan.tensor_types(), **tensor_types}
    books = load_codebooks(guidance.codebooks) if guidance.codebooks else None
    quantized = quantize(
        model, scheme, types, search, progress, calibration, guidance.method, learned, books
    )
    if plan is None:
        return quantized
    notes = dict(quantized.notes)
    for node, error in plan.errors.items():
        text = f"chosen for {guidance.target_bpw:g} bits per weight, output error {error:.2g}"
        notes[node] = "; ".join(filter(None, (notes.get(node, ""), text)))
    return replace(quantized, notes=notes)


def plan_budget(
    model: ImportedModel,
    scheme: Scheme | str | None,
    tensor_types: Mapping[str, str],
    guidance: Guidance,
    calibration: Calibration | None,
    progress: Progress,
) -> BudgetPlan:
    """Schemes of the layers that no rule names, to meet ``guidance.target_bpw``.

    Raises
    ------
    BadScheme
        If `scheme` is float, nothing is left to choose for, or the budget cannot be met.
    """
    default = parse_scheme(scheme) if isinstance(scheme, str) else scheme
    if default is None:
        raise BadScheme(
            "--target-bpw chooses integer schemes; --scheme float leaves none to choose"
        )
    free = planned_layers(model, default, tensor_types)
    linear = {node.inputs[1] for node in model.nodes if node.op == "apq.Linear"}
    layers = {node: weight for node, weight in free.items() if weight in linear}
    if not layers:
        raise BadScheme(f"--target-bpw: no layer of {model.name} is left to choose a scheme for")
    candidates = guidance.candidates or default_candidates(default)
    assert guidance.target_bpw is not None
    chosen = set(layers.values())
    fixed = {
        weight: scheme
        for weight, scheme in scheme_of_weights(model, default, tensor_types).items()
        if weight not in chosen
    }
    return choose_schemes(
        model, layers, candidates, guidance.target_bpw, calibration, progress, fixed
    )
