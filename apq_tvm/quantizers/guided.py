"""Quantization by files: ``compile --calibration --method --target-bpw --codes``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from apq_tvm.codes import keep_codes
from apq_tvm.errors import BadInput, BadScheme
from apq_tvm.formats import parse_scheme
from apq_tvm.formats.caches import is_coded
from apq_tvm.progress import Progress, Silent
from apq_tvm.quantizers.budget import (
    BudgetPlan,
    choose_schemes,
    default_candidates,
    sample_rows,
    stored_bits,
)
from apq_tvm.quantizers.codebook_file import load_codebooks
from apq_tvm.quantizers.inputs.cache_balance import for_caches, joined, passed_over
from apq_tvm.quantizers.inputs.calibration_file import load
from apq_tvm.quantizers.inputs.sequential import sequential_calls
from apq_tvm.quantizers.learn.learned import Learned, from_arrays
from apq_tvm.quantizers.plan import planned_layers, quantize, ruled_layers, scheme_of_layers
from apq_tvm.quantizers.registry import quantize_tensor
from apq_tvm.quantizers.stored import Stored, float_weights
from apq_tvm.quantizers.vocabulary import NOTE, default_types, named
from apq_tvm.types import (
    WEIGHT_INPUT,
    AnyPath,
    Calibration,
    ImportedModel,
    QuantizedModel,
    Scheme,
)


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
        Bits per weight to meet, of all that the module stores, by choosing a scheme for every layer
        and embedding table.
    candidates : tuple of str
        Schemes to choose from; integers of all widths and groups if none are given. Embedding
        tables choose among the integers of them, or among those if there is none.
    codebooks : str, path or None
        File of ``apq-tvm codebooks``, for schemes such as cb3; without it they are learned on the
        model itself.
    codes : str, path or None
        GGUF file, or safetensors of AutoGPTQ or AWQ, whose codes are kept bit for bit
        (`apq_tvm.codes`); layers that have none in it get the scheme.
    sequential : bool or None
        Error feedback measures layers behind those quantized before them, on the calibration's
        inputs: True and False force it, None does so where inputs and time allow
        (`apq_tvm.quantizers.inputs.sequential`).

    Raises
    ------
    BadInput
        If there are candidates and no budget to choose among them for.
    """

    calibration: AnyPath | None = None
    method: str = "rtn"
    target_bpw: float | None = None
    candidates: Sequence[str] = ()
    codebooks: AnyPath | None = None
    codes: AnyPath | None = None
    sequential: bool | None = None

    def __post_init__(self) -> None:
        if self.candidates and self.target_bpw is None:
            raise BadInput(
                "--candidate names schemes that --target-bpw chooses among; without a budget every "
                "layer has --scheme"
            )


def quantize_guided(
    model: ImportedModel,
    scheme: Scheme | str | None,
    tensor_types: Mapping[str, str],
    guidance: Guidance,
    search: bool = True,
    progress: Progress | None = None,
    kv: str = "f32",
    pairs: bool = False,
) -> QuantizedModel:
    """Quantize a model as a calibration file and a budget say.

    Parameters
    ----------
    model : ImportedModel
    scheme, tensor_types, search, progress
        See `quantize`. With a budget `scheme` says how activations are quantized and whether
        weights have zero points; layers and tables that `tensor_types` names are not chosen for.
    guidance : Guidance
    kv : str
        Caches of a session; of codes queries and keys are balanced as the calibration file says.
    pairs : bool
        See `quantize`.

    Returns
    -------
    QuantizedModel
        Its notes have every chosen layer's measured error.

    Raises
    ------
    BadInput
        If the file is missing, damaged or of another model, or the method needs more than it holds.
    BadScheme
        If the budget cannot be met: the message says which one can; see also `quantize`.
    """
    progress = progress or Silent()
    calibration: Calibration | None = None
    learned: Learned | None = None
    missing: Mapping[str, str] = {}
    if guidance.codes is not None:
        kept = keep_codes(model, guidance.codes, progress)
        model, missing = kept.model, kept.missing
    if guidance.calibration is not None:
        file = load(guidance.calibration, model)
        calibration, learned = file.calibration, from_arrays(file.extra, file.notes)
        if guidance.codes is not None:
            if is_coded(kv):
                missing = joined(missing, passed_over(model, file.extra))
        else:
            model, missing = for_caches(model, file.extra, kv, guidance.method == "learned")
    plan: BudgetPlan | None = None
    first: dict[str, str] = {}
    known: dict[str, str] = {}  # schemes of what was learned
    if guidance.target_bpw is not None:
        plan = plan_budget(model, scheme, tensor_types, guidance, calibration, progress)
        first = plan.tensor_types()
    else:
        default = parse_scheme(scheme) if isinstance(scheme, str) else scheme
        made = learned if guidance.method == "learned" else None
        first, known = default_types(model, default, made)
    calls = None
    if guidance.calibration is not None and guidance.method.endswith("gptq"):
        calls = sequential_calls(model, guidance.calibration, file, guidance.sequential, progress)
    books = load_codebooks(guidance.codebooks) if guidance.codebooks else None
    quantized = quantize(
        model, scheme, {**first, **known, **tensor_types}, search, progress, calibration,
        guidance.method, learned, books, calls, pairs,
    )  # fmt: skip
    more = dict(missing)
    if plan is not None:
        aim = f"chosen for {guidance.target_bpw:g} bits per weight, output error"
        more = joined(more, {node: f"{aim} {error:.2g}" for node, error in plan.errors.items()})
    else:
        overruled = ruled_layers(model, tensor_types)
        chosen = [node for node in named(first, model.nodes) if node not in overruled]
        more = joined(more, dict.fromkeys(chosen, NOTE))
    return replace(quantized, notes=joined(quantized.notes, more))


def plan_budget(
    model: ImportedModel,
    scheme: Scheme | str | None,
    tensor_types: Mapping[str, str],
    guidance: Guidance,
    calibration: Calibration | None,
    progress: Progress,
) -> BudgetPlan:
    """Schemes of the layers and tables that no rule names, to meet ``guidance.target_bpw``.

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
    layers = planned_layers(model, default, tensor_types)
    if not layers:
        raise BadScheme(f"--target-bpw: no layer of {model.name} is left to choose a scheme for")
    candidates = guidance.candidates or default_candidates(default)
    integers = [c for c in candidates if (s := parse_scheme(c)) and s.family == "int"]
    assert guidance.target_bpw is not None
    return choose_schemes(
        model,
        layers,
        candidates,
        guidance.target_bpw,
        calibration,
        progress,
        stored_besides(model, layers, scheme_of_layers(model, default, tensor_types)),
        integers or default_candidates(default),
    )


def stored_besides(
    model: ImportedModel, layers: Mapping[str, str], schemes: Mapping[str, Scheme]
) -> Stored:
    """What is stored whatever is chosen for `layers`: floats, and layers that have a scheme.

    Parameters
    ----------
    model : ImportedModel
    layers : mapping of str to str
        Layer → name of its weight.
    schemes : mapping of str to Scheme
        Of every layer that is quantized.

    Returns
    -------
    Stored
        A weight that one of `layers` reads as well adds only the bytes of its other form.
    """
    floats = float_weights(model, schemes)
    forms = {
        (node.inputs[WEIGHT_INPUT[node.op]], schemes[node.name])
        for node in model.nodes
        if node.name in schemes and node.name not in layers
    }
    coded = 0
    for name, scheme in forms:
        sample = sample_rows(np.asarray(model.weights[name], np.float32))
        rows = len(model.weights[name])
        coded += -(-stored_bits(quantize_tensor(sample, scheme, name), rows) // 8)
    names = {*floats, *(name for name, _ in forms)} - set(layers.values())
    return Stored(
        sum(model.weights[name].size for name in names),
        coded + sum(model.weights[name].nbytes for name in floats),
    )
