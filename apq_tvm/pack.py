"""``pack``: every layer's weights go into the layout its kernels read."""

from __future__ import annotations

from apq_tvm import formats
from apq_tvm.codegen.layouts import weight_layout
from apq_tvm.formats.integer import ROW_SUMS, row_sums
from apq_tvm.progress import Progress
from apq_tvm.types import Array, KernelPlan, PackedModel, PackedTensor


def pack(plan: KernelPlan, progress: Progress) -> PackedModel:
    """Run the layout transforms.

    Parameters
    ----------
    plan : KernelPlan
    progress : Progress

    Returns
    -------
    PackedModel
        Layers that share a weight and a layout share one `PackedTensor`.

    Raises
    ------
    PackError
        Codes do not fit the layout.
    """
    quantized = plan.quantized
    weight_of = {n.name: n.inputs[1] for n in quantized.model.nodes if n.op == "apq.Linear"}
    packed: dict[tuple[str, str], PackedTensor] = {}
    tensors: dict[str, PackedTensor] = {}
    sums: dict[str, Array] = {}
    with progress.stage("pack", len(plan.choices)):
        for layer, choices in plan.choices.items():
            layout = choices[0].layout
            source = quantized.layers.get(layer) or weight_of[layer]
            key = (source, layout)
            if key not in packed:
                tensor = quantized.tensors.get(source)
                if tensor is None:
                    weight = quantized.model.weights[source]
                    packed[key] = weight_layout(layout, None).pack(weight, layer)
                else:
                    found = weight_layout(layout, tensor.scheme, formats.details(tensor))
                    packed[key] = found.pack(tensor, layer)
            tensors[layer] = packed[key]
            coded = quantized.tensors.get(source)
            if layer in weight_of and coded is not None and coded.scheme.asymmetric_acts:
                if source not in sums:
                    sums[source] = row_sums(coded)
                arrays = {**packed[key].arrays, ROW_SUMS: sums[source]}
                tensors[layer] = PackedTensor(layout, arrays)
            progress.advance(layer)
    return PackedModel(plan, tensors)
