"""What a manifest says of its module's layers: formats, kernels, why others were turned down."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from apq_tvm import formats
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.quantizers.stored import storage
from apq_tvm.select import epilogue, linear_spec
from apq_tvm.types import (
    WEIGHT_INPUT,
    ImportedModel,
    KernelPlan,
    Node,
    QuantizedModel,
    ScheduledModel,
    Scheme,
)

PRODUCTS = ("MatMul", "Conv", "ConvTranspose", "apq.Depthwise")
"""Of constants, maybe, and no layers."""

DEFAULT = "default"
"""Where decisions come from without a record of the tuner."""


def describe(plan: KernelPlan, scheduled: Sequence[ScheduledModel]) -> dict[str, Any]:
    """The compiler's part of ``manifest.json``; ``emit`` adds sizes, signature and checksums.

    Parameters
    ----------
    plan : KernelPlan
    scheduled : sequence of ScheduledModel
        The model on every device that the library is for, the most preferred first.

    Returns
    -------
    dict
        ``target``, ``features``, ``stored``, ``batch`` (the ``dimension`` along which large runs
        are cut into parts, or a ``note`` why there is none), ``attention`` (`describe_attention`),
        ``session`` (`describe_session`; where a model with caches has none, ``stateless`` is why),
        ``tuning`` (`describe_tuning`),
        ``layers``, ``products`` (`describe_products`), ``functions``,
        ``onnx_sha256``; where there are several devices also ``variants``, a list of ``target``,
        ``features`` and ``layers`` of each. ``layers`` and ``functions`` are then those of the
        first.
    """
    model = plan.quantized.model
    described = {
        "target": plan.profile.name,
        "features": sorted(plan.profile.features),
        "onnx_sha256": plan.quantized.model.sha256,
        "stored": describe_stored(plan.quantized),
        "batch": {"dimension": plan.quantized.model.batch, "note": plan.quantized.model.mixed},
        "session": describe_session(model),
        "stateless": model.stateless,
        **describe_attention(plan.quantized, scheduled),
        "tuning": describe_tuning(plan),
        "layers": describe_layers(plan, scheduled[0]),
        "products": describe_products(model),
        "functions": [
            {
                "name": name,
                "schedule": made.rule,
                "decisions": dict(made.decisions),
                "source": made.source or DEFAULT,
            }
            for name, made in sorted(scheduled[0].schedules.items())
            if name not in scheduled[0].lowered.linears
        ],
    }
    return {**described, **describe_variants(plan, scheduled)}


def describe_session(model: ImportedModel) -> dict[str, Any] | None:
    """``session``: inputs by what goes there, caches, the output that is given; None if none."""
    if model.state is None:
        return None
    state = model.state
    return {
        "feeds": dict(state.feeds),
        "caches": dict(zip(state.pasts, state.presents, strict=True)),
        "logits": state.logits,
        "cache": state.cache,
    }


def describe_attention(
    quantized: QuantizedModel, scheduled: Sequence[ScheduledModel] = ()
) -> dict[str, Any]:
    """``attention``: how many are one kernel, and by name why others are ``apart``.

    Those that kernels declined when they were lowered, on any device, are among the latter. Where
    keys are int8, ``scores`` are the instructions that multiply them, or ``"float"``.
    """
    apart = dict(quantized.apart)
    joined = {node.name for node in quantized.model.nodes if node.op == "apq.Attention"}
    for made in scheduled:
        apart.update(made.lowered.apart)
        joined -= set(made.lowered.apart)
    if not joined and not apart:
        return {}
    every = [one.decisions for made in scheduled for one in made.schedules.values()]
    scores = sorted({str(taken["scores"]) for taken in every if "scores" in taken})
    said = {"scores": scores} if scores else {}
    return {"attention": {"kernels": len(joined), "apart": apart, **said}}


def describe_tuning(plan: KernelPlan) -> dict[str, Any]:
    """``tuning``: how many ``records`` of the tuner there were, and ``remarks`` on those that could
    not be used."""
    plans = plan.variants or (plan,)
    known = [p.records for p in plans if p.records is not None]
    return {
        "records": sum(len(records.records) for records in known),
        "remarks": list(dict.fromkeys(text for records in known for text in records.remarks)),
    }


def describe_stored(quantized: QuantizedModel) -> dict[str, int]:
    """``stored``: ``weights`` and ``bytes`` of all there is, ``quantized_*`` of what is coded."""
    stored = storage(quantized)
    return {
        "weights": stored.all.weights,
        "bytes": stored.all.nbytes,
        "quantized_weights": stored.quantized.weights,
        "quantized_bytes": stored.quantized.nbytes,
    }


def describe_layers(
    plan: KernelPlan, scheduled: ScheduledModel | None = None
) -> list[dict[str, Any]]:
    """``layers``: `describe_layer` of every layer that was planned."""
    nodes = {node.name: node for node in plan.quantized.model.nodes}
    linears = scheduled.lowered.linears.values() if scheduled else ()
    decided = {
        (made.kernel.name, made.choice.spec, made.planned.decisions): made.choice.decisions
        for made in linears
    }
    return [describe_layer(plan, nodes[name], decided) for name in plan.choices]


def describe_products(model: ImportedModel) -> dict[str, str]:
    """``products``: by name, why a product or convolution with constants is no layer."""
    products = [node.name for node in model.nodes if node.op in PRODUCTS]
    return {name: model.notes[name] for name in products if name in model.notes}


def describe_variants(plan: KernelPlan, scheduled: Sequence[ScheduledModel] = ()) -> dict[str, Any]:
    """``variants`` of a library for several devices; nothing for one."""
    if not plan.variants:
        return {}
    variants = [
        {
            "target": variant.profile.name,
            "features": sorted(variant.profile.features),
            "layers": describe_layers(variant, made),
        }
        for variant, made in zip_longest(plan.variants, scheduled)
    ]
    return {"variants": variants}


def describe_layer(
    plan: KernelPlan,
    node: Node,
    decided: Mapping[tuple[str, LinearSpec, tuple[Any, ...]], Mapping[str, Any]],
) -> dict[str, Any]:
    """One entry of ``layers``: format, size and kernels of one layer.

    Parameters
    ----------
    plan : KernelPlan
    node : Node
        An ``apq.Linear`` or ``apq.Embedding``.
    decided : mapping
        (kernel, problem, what records say) → its decisions; empty before anything is scheduled.

    Returns
    -------
    dict
        Keys ``name, op, n, k, scheme, activations, details, epilogue, bits_per_weight, bytes,
        layout, kernels, rejected`` and ``note``. `bytes` counts codes, scales, zeros and tables
        without the layout's padding; ``bits`` of a kernel is the width it is for, 0 where there is
        no choice; ``decisions`` what was decided for it, ``source`` by which record of the tuner.
    """
    quantized = plan.quantized
    choices = plan.choices[node.name]
    spec = linear_spec(quantized, node) if node.op == "apq.Linear" else None
    weight = quantized.model.weights[node.inputs[WEIGHT_INPUT[node.op]]]
    tensor = quantized.tensors.get(quantized.layers.get(node.name, ""))
    n, k = weight.shape
    nbytes = formats.nbytes(tensor) if tensor else weight.nbytes
    return {
        "name": node.name,
        "op": node.op,
        "n": n,
        "k": k,
        "scheme": str(tensor.scheme) if tensor else "float",
        "activations": activations(tensor.scheme) if tensor and spec else "",
        "details": dict(formats.details(tensor)) if tensor else {},
        "epilogue": "+".join(epilogue(spec)) if spec else "",
        "bits_per_weight": round(nbytes * 8 / weight.size, 4),
        "bytes": nbytes,
        "layout": choices[0].layout,
        "kernels": [
            {
                "bits": c.width,
                "m_min": c.m_min,
                "m_max": c.m_max,
                "kernel": c.kernel,
                "decisions": dict(
                    decided.get((c.kernel, spec, c.decisions), dict(c.decisions)) if spec else {}
                ),
                "source": c.source or DEFAULT,
            }
            for c in choices
        ],
        "rejected": [{"kernel": name, "reason": why} for name, why in choices[0].rejected],
        "note": _note(quantized, node),
    }


def activations(scheme: Scheme) -> str:
    """How a layer's activations are quantized, in words."""
    if not scheme.integer_acts:
        return "float"
    span = "token" if scheme.act_group == -1 else f"group of {scheme.act_group}"
    kind = "asymmetric" if scheme.asymmetric_acts else "symmetric"
    return f"{kind} int{scheme.act_bits} per {span}"


def _note(quantized: QuantizedModel, node: Node) -> str:
    """Why a layer is float or how its codes were chosen, and what its family says of the scheme."""
    tensor = quantized.tensors.get(quantized.layers.get(node.name, ""))
    family = formats.family_of(tensor.scheme).note(tensor.scheme) if tensor else ""
    return "; ".join(filter(None, (quantized.notes.get(node.name, ""), family)))
