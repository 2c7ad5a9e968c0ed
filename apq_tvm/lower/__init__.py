"""``lower``: the whole graph becomes one IRModule; this is where Relax appears.

Quantized layers are ``call_tir`` of unscheduled PrimFuncs of `apq_tvm.ops`; everything else comes
from TVM's ONNX importer and is legalized and fused here.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import tvm
from tvm import relax

from apq_tvm.errors import UnsupportedModel, fixed_sizes, gist
from apq_tvm.lower.aligned import legalize_reshape, views_again
from apq_tvm.lower.behind import prepare_behind
from apq_tvm.lower.dims import ATTRIBUTE, Dims
from apq_tvm.lower.fusion import bound_fusion
from apq_tvm.lower.operators.arithmetic import ARITHMETIC
from apq_tvm.lower.operators.attention import AttentionLowering
from apq_tvm.lower.operators.cache import cache_converter
from apq_tvm.lower.operators.channels_first import ChannelsFirstLowering
from apq_tvm.lower.operators.channels_last import ChannelsLastLowering
from apq_tvm.lower.operators.indexing import indexing_converters
from apq_tvm.lower.operators.linear import LinearLowering
from apq_tvm.lower.operators.nodes import node_converters
from apq_tvm.lower.operators.places import place_converters
from apq_tvm.lower.operators.reductions import reduction_converters
from apq_tvm.lower.operators.run_sizes import RunSizeLowering
from apq_tvm.lower.operators.shapes import ShapeLowering
from apq_tvm.lower.regions import region_converters
from apq_tvm.lower.relax_import import import_graph
from apq_tvm.lower.views import fold_views
from apq_tvm.lower.where_read import where_read
from apq_tvm.types import (
    WEIGHT_INPUT,
    Array,
    DeviceProfile,
    ImportedModel,
    LoweredModel,
    PackedModel,
)

if TYPE_CHECKING:
    from apq_tvm.schedules.decide import DecideOf

__all__ = ["lower"]


def lower(
    packed: PackedModel,
    kernels: Mapping[str, Any],
    decide: DecideOf,
) -> LoweredModel:
    """Lower to Relax with unscheduled PrimFuncs.

    Parameters
    ----------
    packed : PackedModel
    kernels : mapping of str to LinearKernel
        The device's linear kernels by name.
    decide : DecideOf
        For kernels and preparations.

    Returns
    -------
    LoweredModel

    Raises
    ------
    UnsupportedModel
        A node whose shape or operator Relax cannot express, or a pass of TVM that fails; the
        message names it.
    """
    params, of_layer = _params(packed)
    # ``main``'s parameters exist only once the import runs, hence the late lookup.
    variables: dict[str, Any] = {}
    model = packed.plan.quantized.model
    dims = Dims(model)

    def layer_params(layer: str) -> dict[str, Any]:
        return {array: variables[param] for array, param in of_layer[layer].items()}

    shapes = ShapeLowering(dims)
    windows = ChannelsLastLowering(shapes.extents)
    attentions = AttentionLowering(packed.plan.profile, dims)
    linears = LinearLowering(packed.plan, kernels, decide, layer_params, windows)
    converters = {
        "apq.Cache": cache_converter(dims, packed.plan.profile),
        "apq.Linear": linears.convert,
        **attentions.converters(),
        **node_converters(packed, layer_params),
        **ARITHMETIC,
        **indexing_converters(packed.plan.quantized.model),
        **place_converters(packed.plan.quantized.model),
        **shapes.converters(),
        **region_converters(dims, model.value_specs),
        **windows.converters(),
        **ChannelsFirstLowering(dims, model.value_specs).converters(),
        **RunSizeLowering(dims).converters(),
        **reduction_converters(model),
    }
    visible = {
        name
        for node in model.nodes
        for i, name in enumerate(node.inputs)
        if node.name not in packed.tensors or i != WEIGHT_INPUT[node.op]
    }
    hidden = frozenset(model.weights) - visible
    # TVM's importer prints on standard output, which belongs to --json.
    with contextlib.redirect_stdout(sys.stderr):
        mod = import_graph(model, converters, params, hidden, variables, dims)
        linears.finish()
        mod = prepare_behind(mod, linears.always_prepared())
        mod = _fuse(fold_views(mod), model, packed.plan.profile)
    return LoweredModel(
        packed, mod, params, linears.variants, linears.funcs, linears.preparations,
        attentions.declined, linears.gathered,
    )  # fmt: skip


def _params(packed: PackedModel) -> tuple[dict[str, Array], dict[str, dict[str, str]]]:
    """Name every packed array once: ``{param: array}``, ``{layer: {array name: param}}``."""
    params: dict[str, Array] = {}
    of_layer: dict[str, dict[str, str]] = {}
    known: dict[int, str] = {}
    for layer, tensor in packed.tensors.items():
        of_layer[layer] = {}
        for array_name, array in tensor.arrays.items():
            param = known.setdefault(id(array), f"{layer}.{array_name}")
            params[param] = array
            of_layer[layer][array_name] = param
    return params, of_layer


def _fuse(mod: tvm.IRModule, model: ImportedModel, profile: DeviceProfile) -> tvm.IRModule:
    """Legalize and fuse what is still Relax; our PrimFuncs are opaque to this.

    Raises
    ------
    UnsupportedModel
        A pass of TVM fails; the message has the functions that TVM's names, if it names any.
    """
    derived = dict(mod["main"].attrs.get(ATTRIBUTE, {}))
    reshape = partial(legalize_reshape, derived=derived)
    passes = (
        relax.transform.DecomposeOpsForInference(),
        relax.transform.LegalizeOps({"relax.reshape": reshape}),
        relax.transform.AnnotateTIROpPattern(),
        relax.transform.FoldConstant(),
        bound_fusion(),
        relax.transform.FuseOps(),
        relax.transform.FuseTIR(),
        # A schedule would hide that a PrimFunc only renames indices.
        relax.transform.RewriteDataflowReshape(),
        views_again,
        *(() if profile.gpu else (where_read,)),
        relax.transform.DeadCodeElimination(),
    )
    for each in passes:
        try:
            mod = each(mod)
        except Exception as error:  # TVM's own errors have no base
            raise UnsupportedModel(_failed(mod, model, each.info.name, error)) from error
    return mod


def _failed(mod: tvm.IRModule, model: ImportedModel, name: str, error: Exception) -> str:
    words = set(re.findall(r"\w+", str(error)))
    named = sorted({gv.name_hint for gv in mod.functions} & words - {"main"})
    where = f" (of {', '.join(named)})" if named else ""
    remedy = fixed_sizes(spec.shape for spec in model.inputs)
    return f"{model.name}: TVM's pass {name} fails{where}: {gist(error)}; {remedy}"
