"""Which kernel each quantized layer gets, per range of M, and why the others were turned down.

``select`` walks the device's kernels in their order of preference. A kernel that declines raises
`NotApplicable`; its reason is kept. The first kernel that fits fixes the layer's weight layout
(weights are stored once), so kernels of another layout are turned down too. For which M a kernel is
chosen was measured (`apq_tvm.schedules.linear.thresholds`). Every M from 1 on is covered, or the
model cannot be compiled for this device.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from apq_tvm import formats
from apq_tvm.codegen.layouts import embedding_layout
from apq_tvm.errors import NotApplicable, UnsupportedModel
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.schedules.linear.preferences import PREFERENCES
from apq_tvm.schedules.linear.thresholds import THRESHOLDS, rows_of
from apq_tvm.types import DeviceProfile, KernelChoice, KernelPlan, Node, QuantizedModel

if TYPE_CHECKING:
    from apq_tvm.schedules.linear.kernel import LinearKernel
    from apq_tvm.schedules.recorded import Advice, Records

    _Fitting = tuple[LinearKernel, int, int]
    """A kernel, and fewest and most rows that it is chosen for."""


def linear_spec(quantized: QuantizedModel, node: Node) -> LinearSpec:
    """The kernel problem of one ``apq.Linear`` node.

    Parameters
    ----------
    quantized : QuantizedModel
    node : Node
        An ``apq.Linear`` of ``quantized.model``.

    Returns
    -------
    LinearSpec
        With ``scheme=None`` where the layer stays float.
    """
    n, k = quantized.model.weights[node.inputs[1]].shape
    tensor = quantized.tensors.get(quantized.layers.get(node.name, ""))
    operands = (*node.inputs, "", "")
    return LinearSpec(
        n=n,
        k=k,
        scheme=tensor.scheme if tensor else None,
        bias=bool(operands[2]),
        activation=node.attrs.get("activation", ""),
        residual=bool(operands[3]),
        details=formats.details(tensor) if tensor else (),
        after=bool(node.attrs.get("after", False)),
        asymmetric=tensor is not None and tensor.scheme.asymmetric_acts,
    )


def epilogue(spec: LinearSpec) -> list[str]:
    """What follows the product, in order: of ``bias``, the activation's name and ``residual``."""
    last = ("residual" if spec.residual else "", spec.activation)
    parts = ("bias" if spec.bias else "", *(last if spec.after else last[::-1]))
    return [part for part in parts if part]


def choose(
    spec: LinearSpec,
    kernels: Sequence[LinearKernel],
    profile: DeviceProfile,
    layer: str,
    records: Records | None = None,
) -> tuple[KernelChoice, ...]:
    """Cover M = 1, 2, ... with the most preferred kernels that share one layout.

    Parameters
    ----------
    spec : LinearSpec
    kernels : sequence of LinearKernel
        In order of preference.
    profile : DeviceProfile
    layer : str
        For the error.
    records : Records, optional
        Of the tuner: other kernels and decisions for some rows.

    Returns
    -------
    tuple of KernelChoice
        Ordered by width (where bits are chosen at run time), then by `m_min`, without gaps; the
        last of each width has no upper limit.

    Raises
    ------
    UnsupportedModel
        Some M is left without a kernel; the message holds every kernel's reason.
    """
    rejected: list[tuple[str, str]] = []
    fitting: list[_Fitting] = []
    layout = ""
    for kernel in kernels:
        if not kernel.is_for(spec):
            continue
        try:
            kernel.check(spec, profile)
            least, most = rows_of(kernel, spec, profile)
        except NotApplicable as reason:
            rejected.append((kernel.name, str(reason)))
            continue
        name = kernel.layout(spec, profile).name
        layout = layout or name
        if name == layout:
            fitting.append((kernel, least, most))
        else:
            clash = f"wants layout {name}; the weights are stored as {layout}"
            rejected.append((kernel.name, clash))
    widths = spec.scheme.widths if spec.scheme else (0,)
    if fitting and not rejected and fitting[0][0].kind == "generic":
        why = f"is for other families of formats than {spec.scheme}"
        rejected.append(("every other kernel", why))
    chosen = [
        KernelChoice(kernel.name, layout, m_min, m_max, tuple(rejected), width)
        for width in widths
        for kernel, m_min, m_max in _cover(
            [f for f in fitting if f[0].width == width], spec, profile, layer, rejected
        )
    ]
    if not records:
        return tuple(chosen)
    mine = {kernel.name: kernel for kernel, _, _ in fitting}
    advice = records.advice(spec, mine, profile)
    return tuple(_joined(piece for choice in chosen for piece in _advised(choice, advice, mine)))


def _joined(pieces: Iterable[KernelChoice]) -> list[KernelChoice]:
    """Ranges of rows, those that follow each other and differ in nothing else as one."""
    made: list[KernelChoice] = []
    for piece in pieces:
        if made and replace(made[-1], m_max=piece.m_max) == replace(piece, m_min=made[-1].m_min):
            made[-1] = replace(made[-1], m_max=piece.m_max)
        else:
            made.append(piece)
    return made


def _advised(
    choice: KernelChoice, advice: Sequence[Advice], kernels: Mapping[str, LinearKernel]
) -> Iterator[KernelChoice]:
    """A choice cut into ranges of rows by what records say, the first that holds for each."""
    fit = [a for a in advice if kernels[a.kernel].width == choice.width]
    last = choice.m_max if choice.m_max >= 0 else math.inf
    starts = {choice.m_min}
    for each in fit:
        low, high = max(each.rows[0], kernels[each.kernel].m_tile), each.rows[1]
        starts |= {m for m in (low, high + 1) if m > 0 and choice.m_min < m <= last}
    ends = [*sorted(starts)[1:], 0]
    for start, after in zip(sorted(starts), ends, strict=True):
        end = after - 1 if after else choice.m_max
        piece = replace(choice, m_min=start, m_max=end)
        for each in fit:
            low, high = max(each.rows[0], kernels[each.kernel].m_tile), each.rows[1]
            if low <= start and (high < 0 or 0 <= end <= high):
                piece = replace(piece, source=each.source)
                if not each.stays:
                    piece = replace(piece, kernel=each.kernel, decisions=each.decisions)
                break
        yield piece


def _cover(
    fitting: Sequence[_Fitting],
    spec: LinearSpec,
    profile: DeviceProfile,
    layer: str,
    rejected: Sequence[tuple[str, str]],
) -> Iterator[tuple[LinearKernel, int, int]]:
    """Kernels and the M they are used for, from 1 up to the last that has no limit."""
    m = 1
    while m != 0:  # 0 stands for "past infinity"
        covering = [i for i, k in enumerate(fitting) if k[1] <= m and not 0 <= k[2] < m]
        if not covering:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in rejected) or "no kernels"
            raise UnsupportedModel(
                f"{layer}: no kernel of {profile.name} computes [{m}, {spec.k}] x [{spec.n}, "
                f"{spec.k}] in {spec.scheme} ({reasons}); keep the layer float with --tensor-type"
            )
        best = covering[0]
        kernel, _, most = fitting[best]
        # A more preferred kernel takes over where its own range starts.
        ends = [least for _, least, _ in fitting[:best] if least > m]
        if most >= 0:
            ends.append(most + 1)
        end = min(ends, default=0)
        yield kernel, m, end - 1
        m = end


def select(
    quantized: QuantizedModel,
    profile: DeviceProfile,
    kernels: Sequence[LinearKernel],
    records: Records | None = None,
) -> KernelPlan:
    """Choose kernels for every ``apq.Linear`` and the layout of every ``apq.Embedding``.

    Parameters
    ----------
    quantized : QuantizedModel
    profile : DeviceProfile
    kernels : sequence of LinearKernel
        The device's kernels in order of preference.
    records : Records, optional
        Of the tuner, as `choose` takes them.

    Returns
    -------
    KernelPlan
        Float layers are in it too, with a float kernel. An embedding that shares its codes with a
        linear layer shares that one's layout, so that they are stored once.

    Raises
    ------
    UnsupportedModel
        A layer that no kernel of the device computes.
    BadLog
        What was measured for the device is not to be read, or is for kernels that do not exist.
    """
    THRESHOLDS.check(kernels, profile)
    PREFERENCES.check(kernels, profile)
    choices: dict[str, tuple[KernelChoice, ...]] = {}
    memo: dict[LinearSpec, tuple[KernelChoice, ...]] = {}
    layouts: dict[str, str] = {}
    for node in quantized.model.nodes:
        if node.op == "apq.Linear":
            spec = linear_spec(quantized, node)
            if spec not in memo:
                memo[spec] = choose(spec, kernels, profile, node.name, records)
            choices[node.name] = memo[spec]
            if node.name in quantized.layers:
                layouts[quantized.layers[node.name]] = memo[spec][0].layout
    for node in quantized.model.nodes:
        if node.op == "apq.Embedding" and node.name in quantized.layers:
            key = quantized.layers[node.name]
            layout = layouts.get(key) or embedding_layout(quantized.tensors[key].scheme).name
            choices[node.name] = (KernelChoice("embedding", layout, 1, -1),)
    ordered = {n.name: choices[n.name] for n in quantized.model.nodes if n.name in choices}
    return KernelPlan(quantized, profile, ordered, records=records)


def by_name(kernels: Sequence[LinearKernel]) -> Mapping[str, LinearKernel]:
    """Kernels by their names."""
    return {kernel.name: kernel for kernel in kernels}
