"""The types that travel between stages: frozen dataclasses over numpy, free of tvm, onnx and torch.

``ImportedModel`` → ``QuantizedModel`` → ``KernelPlan`` → ``PackedModel`` → ``LoweredModel`` →
``ScheduledModel`` → ``CompiledModule``. Each carries what the next stage needs: see
docs/architecture.md.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
U8 = NDArray[np.uint8]

AnyPath = str | os.PathLike[str]
"""What every function takes where a user names a file or folder."""

DimSizes = Mapping[str, int | tuple[int, int]]
"""Sizes of symbolic dimensions, or the least and greatest they may have, by ONNX name."""

WEIGHT_INPUT = {"apq.Linear": 1, "apq.Embedding": 0}
"""Which input of a node that can be quantized is its weight."""

REGION = "apq.region/"
"""How the packed functions are called that stand in Relax for the ends of loops and branches."""


@dataclass(frozen=True)
class TensorSpec:
    """One graph input or output.

    Parameters
    ----------
    name : str
        The ONNX name, unchanged.
    dtype : str
        numpy dtype name, e.g. ``"int64"``.
    shape : tuple of int or str
        A string is a symbolic dimension, by its ONNX name.
    """

    name: str
    dtype: str
    shape: tuple[int | str, ...]


@dataclass(frozen=True)
class Node:
    """One operator of the normalised graph: ONNX semantics, except for ops called ``apq.*``.

    Parameters
    ----------
    op : str
        ONNX operator, or one of the ``apq.`` operators of `apq_tvm.onnx_import`.
    name : str
        The ONNX node name (made unique), kept for errors and reports.
    inputs, outputs : tuple of str
        Value names; ``""`` is an absent optional.
    attrs : mapping
        int, float, str, tuples of these, or numpy arrays.
    """

    op: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attrs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class State:
    """What a session of a decoder keeps from run to run (`apq_tvm.sessions`).

    Parameters
    ----------
    pasts, presents : tuple of str
        Inputs that are caches before a run, and the outputs that are the same behind it.
    feeds : mapping of str to str
        Every other input → what a session puts there: ``"ids"``, ``"mask"`` (ones),
        ``"positions"``, ``"lengths"`` (of all tokens, less 1), ``"total"`` (of all tokens) or
        ``"given"``, what the caller says once.
    logits : str
        The output that a session gives.
    past, length : str
        Dimensions: tokens of the caches, and of ``"ids"``.
    cache : str
        Type of what is kept, ``"float32"``, ``"float16"`` or ``"int8"``.
    """

    pasts: tuple[str, ...]
    presents: tuple[str, ...]
    feeds: Mapping[str, str]
    logits: str
    past: str
    length: str
    cache: str = "float32"


KEPT, ASKED = "apq_kept", "apq_asked"
"""Dimensions that the runtime gives: tokens that a session's caches hold already, 0 without one,
and the last tokens whose logits are wanted, all without one."""


@dataclass(frozen=True)
class ImportedModel:
    """A normalised ONNX graph.

    Parameters
    ----------
    name : str
        Stem of the file.
    opset : int
        ONNX opset of the default domain.
    inputs, outputs : tuple of TensorSpec
        The signature, in ONNX order.
    nodes : tuple of Node
        In topological order.
    weights : mapping of str to ndarray
        Every initializer a node reads. A weight that several layers share is stored once.
    value_specs : mapping of str to TensorSpec
        What shape inference knew of intermediate values.
    sha256 : str
        Of the ONNX file.
    limits : mapping of str to int
        Largest value of a symbolic dimension, where a table (position embeddings, a causal mask) is
        no longer; a longer input must be refused.
    least : mapping of str to int
        Smallest value of a symbolic dimension, where the user gave one; 1 elsewhere.
    lengths : mapping of str to str
        Symbolic dimensions of inputs that are a sum of others, ``"past + sequence"``. No other
        shape names them.
    quantized : mapping of str to QuantizedTensor
        By weight: the codes that the file itself holds. `weights` has what they mean in float32.
    notes : mapping of str to str
        By weight or layer: what of a file's own quantization was kept, rounded or dropped; by
        product: why it is no layer.
    batch : str
        Dimension along which a run may be cut into parts (`apq_tvm.onnx_import.apart`); ``""`` if
        there is none, and `mixed` tells why.
    state : State, optional
        What makes a session; without it, `stateless` tells why a model with caches has none.
    """

    name: str
    opset: int
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    nodes: tuple[Node, ...]
    weights: Mapping[str, Array]
    value_specs: Mapping[str, TensorSpec]
    sha256: str
    limits: Mapping[str, int] = field(default_factory=dict)
    least: Mapping[str, int] = field(default_factory=dict)
    lengths: Mapping[str, str] = field(default_factory=dict)
    quantized: Mapping[str, QuantizedTensor] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)
    batch: str = ""
    mixed: str = ""
    state: State | None = None
    stateless: str = ""


@dataclass(frozen=True)
class Scheme:
    """How a layer is quantized; `apq_tvm.formats.scheme` reads and writes the spellings.

    Parameters
    ----------
    bits : int
        Weight bits, 1..8; of the widest codes where a family mixes widths.
    zero_points : bool
        True if every group has its own zero point; False means code 2^(bits-1) is zero.
    act_bits : int
        1..8 (integers, quantized at run time), or 16 and 32 (float).
    per_token : bool
        True if activations have one scale per token even where weights are grouped (``t``).
    group_size : int
        Along K: 16, 32, 64, 128, 256, or -1 for a whole row. Of activations alone where weights
        have no scales along K (any-precision).
    family : str
        Name of the format family (`apq_tvm.formats.families`): ``"int"`` is uniform integers.
    weights : str
        How the weights' part is spelled, for families other than ``"int"``: ``"anyprec3-8"``.
    min_bits : int
        Narrowest width that can be chosen at run time; 0 if there is only `bits`.
    """

    bits: int
    zero_points: bool = False
    act_bits: int = 8
    per_token: bool = False
    group_size: int = -1
    family: str = "int"
    weights: str = ""
    min_bits: int = 0

    def __str__(self) -> str:
        weights = self.weights or f"W{self.bits}{'z' if self.zero_points else ''}"
        if self.family == "anyprec":
            acts = f"A{self.act_bits}{f'g{self.group_size}' if self.group_size > 0 else ''}"
            return weights if acts == "A8g32" else weights + acts
        if not weights.startswith("W"):
            return weights if self.act_bits == 8 else f"{weights}A{self.act_bits}"
        if weights.endswith(("s", "k")):  # super-blocks: the groups are part of the format
            return f"{weights}A{self.act_bits}"
        group = f"g{self.group_size}" if self.group_size > 0 else ""
        return f"{weights}A{self.act_bits}{'t' if self.per_token else ''}{group}"

    @property
    def integer_acts(self) -> bool:
        """True if activations are quantized to integers at run time."""
        return self.act_bits <= 8

    @property
    def act_group(self) -> int:
        """Activation group along K, -1 for a whole token."""
        return -1 if self.per_token else self.group_size

    @property
    def asymmetric_acts(self) -> bool:
        """True if activations have a zero point per token beside their scale: 8 bits, uniform
        weights whose padding can mean 0. Half the codes are unused behind a ReLU else."""
        signs = self.bits == 1 and not self.zero_points
        return self.family == "int" and self.act_bits == 8 and self.act_group == -1 and not signs

    @property
    def widths(self) -> tuple[int, ...]:
        """Widths to choose from at run time; ``(0,)`` if there is no choice."""
        return tuple(range(self.min_bits, self.bits + 1)) if self.min_bits else (0,)


@dataclass(frozen=True)
class QuantizedTensor:
    """One weight matrix as codes; integers mean ``scales[n, k // g] * (codes[n, k] - zero)``.

    Parameters
    ----------
    codes : uint8 [N, K]
        One code per weight.
    scales : float16 [N, G]
        G = ceil(K / group_size), 1 for a whole row. A short last group is a group of its own.
        Other families than integers say in their file of `apq_tvm.formats` what theirs are.
    zeros : uint8 [N, G] or None
        None means 2^(bits-1) everywhere (0.5 for bits=1: codes are -1 and +1, scaled by ``scales``,
        that is ``w = scales * (2 * code - 1)``).
    scheme : Scheme
        What the codes mean.
    tables : mapping of str to ndarray
        What else the family stores: centroids, sub-scales, outliers.
    """

    codes: U8
    scales: NDArray[np.float16]
    zeros: U8 | None
    scheme: Scheme
    tables: Mapping[str, Array] = field(default_factory=dict)


@dataclass(frozen=True)
class LayerStats:
    """What calibration knows of the input x [rows, K] of one linear layer.

    Parameters
    ----------
    mean_square, mean, absmax : float32 [K]
        E[x^2], E[x] and max |x| of every input channel.
    samples : int
        Rows seen.
    hessian : float32 [K, K] or None
        E[x xᵀ].
    fisher : float32 [N, K] or None
        E[(dL/dw)^2], where the model has a language-model loss.
    importance : float
        How much an error of the layer's output matters, by which errors of different layers
        compare: about E|dL/dy|^2 per output, but more where errors of a sample's rows add up. The
        means above weigh each row by its |dL/dy|. 0 where it was not measured.
    """

    mean_square: F32
    mean: F32
    absmax: F32
    samples: int
    hessian: F32 | None = None
    fisher: F32 | None = None
    importance: float = 0.0


@dataclass(frozen=True)
class Calibration:
    """Statistics of a model's linear layers and embedding tables on calibration inputs.

    Parameters
    ----------
    layers : mapping of str to LayerStats
        By the name of the ``apq.Linear`` node.
    sha256 : str
        Of the ONNX file they were taken from.
    sensitivity : str
        What the weights' importance is, for reports: ``"E[x^2] of the layer's input"``.
    tables : mapping of str to float
        By the name of the ``apq.Embedding`` node: what `LayerStats.importance` is for layers. Empty
        where that was not measured.
    """

    layers: Mapping[str, LayerStats]
    sha256: str
    sensitivity: str
    tables: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class QuantizedModel:
    """The graph and its quantized tensors.

    Parameters
    ----------
    model : ImportedModel
    tensors : mapping of str to QuantizedTensor
        By ``"{weight name}:{scheme}"``; layers that share weight and scheme share the entry.
    layers : mapping of str to str
        Name of an ``apq.Linear`` or ``apq.Embedding`` node → key in `tensors`. A node that is not
        here stays float.
    notes : mapping of str to str
        Name of every such node that stays float → why.
    apart : mapping of str to str
        Name of a softmax → why its attention is no kernel of its own (`apq_tvm.launches.packed`).
    """

    model: ImportedModel
    tensors: Mapping[str, QuantizedTensor]
    layers: Mapping[str, str]
    notes: Mapping[str, str] = field(default_factory=dict)
    apart: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class GpuFacts:
    """What only GPUs have; `DeviceProfile.sources` say where the figures come from.

    Parameters
    ----------
    sm : int
        Compute capability, 10 times major plus minor: 86.
    clock_mhz : int
        Boost clock.
    bandwidth : float
        Of its memory, in 10^9 bytes a second.
    shared_bytes : int
        Shared memory of a multiprocessor; a block may have 1 KiB less.
    threads : int
        Threads that a multiprocessor holds at most.
    driver : int
        Release of the oldest driver that a module must run under, such as 525: it says which
        compiler makes the images (`apq_tvm.codegen.cuda.compilers`).
    images : tuple of int
        Compute capabilities that images are made for; that of the GPU alone by default.
    latency_ns : float
        From asking memory to having it, under load: a round figure, no vendor's.
    """

    sm: int
    clock_mhz: int
    bandwidth: float
    shared_bytes: int
    threads: int
    driver: int
    images: tuple[int, ...] = ()
    latency_ns: float = 800.0


@dataclass(frozen=True)
class DeviceProfile:
    """Facts about one device, each from the vendor document in `sources`.

    Parameters
    ----------
    name : str
        What ``--target`` takes.
    target : mapping
        TVM target dict.
    features : frozenset of str
        Instruction-set extensions by LLVM name, e.g. ``{"avx2", "avx512vnni"}``.
    vector_bytes, vector_registers : int
        Of the widest vector unit.
    cores : int
        Physical cores.
    l1_bytes, l2_bytes : int
        Data caches of one core.
    sources : tuple of str
        Where the figures come from.
    in_order : bool
        True if instructions issue in program order: schedules must keep loads ahead of their uses.
    issue_width : int
        Slots for operations in a cycle, 0 where nobody knows.
    vector_pipes : int
        Pipes that multiply and add vectors of 16 bytes, 0 where nobody knows.
    paired_loads : bool
        True if compilers may make one instruction of two vector loads: it costs no more than both.
    macs_per_cycle : mapping of str to int
        int8 multiply-adds per cycle of one core, by instruction: ``"sdot"``, ``"smmla"``.
    variants : tuple of DeviceProfile
        Where a library carries code for several devices and chooses when it is loaded: which, the
        most preferred first. The profile's own facts are then those of the last, which all have.
    interleaving : str
        Layout of integer weights where the user asked for one, rows x bytes, such as ``"4x8"``
        (`apq_tvm.schedules.arm.layouts`); ``""`` leaves it to what was measured.
    measured_as : tuple of str
        Devices whose figures hold where its own folder of `apq_tvm.tuning_logs` has none, the
        nearest kin first.
    modelled_as : str
        Device whose model LLVM has for this one too, ``""`` for itself: what llvm-mca says of the
        one it says of the other.
    gpu : GpuFacts or None
        Of GPUs, whose `vector_registers` are those of a multiprocessor, `cores` the
        multiprocessors and `l2_bytes` the cache that all share.
    """

    name: str
    target: Mapping[str, Any]
    features: frozenset[str]
    vector_bytes: int
    vector_registers: int
    cores: int
    l1_bytes: int
    l2_bytes: int
    sources: tuple[str, ...]
    in_order: bool = False
    issue_width: int = 0
    vector_pipes: int = 0
    paired_loads: bool = True
    macs_per_cycle: Mapping[str, int] = field(default_factory=dict)
    variants: tuple[DeviceProfile, ...] = ()
    interleaving: str = ""
    measured_as: tuple[str, ...] = ()
    modelled_as: str = ""
    gpu: GpuFacts | None = None

    @property
    def triple(self) -> str:
        """Of the processor that the library runs on; a GPU's host."""
        return str(self.target.get("host", self.target).get("mtriple", ""))

    @property
    def host_arch(self) -> str:
        """First part of `triple`: ``"x86_64"`` or ``"aarch64"``."""
        return self.triple.split("-")[0]

    @property
    def arch(self) -> str:
        """What its kernels are for: ``"x86_64"``, ``"aarch64"`` or ``"cuda"``."""
        return "cuda" if self.gpu else self.host_arch


@dataclass(frozen=True)
class KernelChoice:
    """The kernel one layer gets for M in ``[m_min, m_max]``, and why.

    Parameters
    ----------
    kernel : str
        Name of the kernel in the one table of its device family.
    layout : str
        Weight layout, as in `apq_tvm.codegen.layouts`.
    m_min, m_max : int
        Inclusive rows of activations; `m_max` -1 means no upper limit.
    width : int
        Bits it is for, where they are chosen at run time; else 0.
    rejected : tuple of (str, str)
        Faster kernels that declined, with their reasons.
    decisions : tuple of (str, object)
        What the tuner found; empty for the defaults.
    source : str
        The record that says so; ``""`` without one.
    """

    kernel: str
    layout: str
    m_min: int
    m_max: int
    rejected: tuple[tuple[str, str], ...] = ()
    width: int = 0
    decisions: tuple[tuple[str, Any], ...] = ()
    source: str = ""


@dataclass(frozen=True)
class KernelPlan:
    """Kernels per layer: names of layers → choices ordered by width, then by `m_min`.

    `variants` are the plans for `DeviceProfile.variants`, where the library chooses when it is
    loaded; `choices` are then those of the first. `records` are the tuner's for the device
    (`apq_tvm.schedules.recorded.Records`), None for the defaults.
    """

    quantized: QuantizedModel
    profile: DeviceProfile
    choices: Mapping[str, tuple[KernelChoice, ...]]
    variants: tuple[KernelPlan, ...] = ()
    records: Any = None


@dataclass(frozen=True)
class PackedTensor:
    """A tensor's bytes in a layout: named arrays (``codes``, ``scales``, ...) for a kernel."""

    layout: str
    arrays: Mapping[str, Array]


@dataclass(frozen=True)
class PackedModel:
    """Weights in their kernels' layouts.

    Parameters
    ----------
    plan : KernelPlan
    tensors : mapping of str to PackedTensor
        By layer name. Layers that share a tensor and a layout share the entry's arrays.
    """

    plan: KernelPlan
    tensors: Mapping[str, PackedTensor]


@dataclass(frozen=True)
class Variant:
    """One of the PrimFuncs that a call chooses from at run time.

    Parameters
    ----------
    m_max : int
        Rows of the call's first argument up to which it is the one, -1 for no limit.
    func : str
        PrimFunc name; ``""`` runs nothing.
    width : int
        Bits it is for, where they are chosen at run time; 0 for any.
    args : tuple of int or None
        Which of the call's arguments it takes, in its order; None for all.
    """

    m_max: int
    func: str
    width: int = 0
    args: tuple[int, ...] | None = None


@dataclass(frozen=True)
class LoweredModel:
    """The whole graph in Relax, kernels unscheduled.

    Parameters
    ----------
    packed : PackedModel
    mod : tvm.IRModule
        ``main`` and the PrimFuncs it calls.
    params : mapping of str to ndarray
        Weight parameters of ``main`` by name, in order, after the graph inputs.
    variants : mapping of str to tuple of Variant
        PrimFunc name in a Relax call → what runs instead, ordered by width, then by `m_max`.
    linears : mapping of str to LinearFunc
        PrimFunc name → the kernel it is of and what was decided (`apq_tvm.lower.operators.linear`).
    preparations : mapping of str to Preparation
        PrimFunc name → what kernels want done to x (`apq_tvm.schedules.linear.kernel`).
    apart : mapping of str to str
        By the name of an attention that its kernel declined here, which plain operators compute:
        why.
    gathered : mapping of str to sequence of str
        PrimFunc name of a preparation of windows → the layers that read it first.
    """

    packed: PackedModel
    mod: Any
    params: Mapping[str, Array]
    variants: Mapping[str, tuple[Variant, ...]]
    linears: Mapping[str, Any]
    preparations: Mapping[str, Any] = field(default_factory=dict)
    apart: Mapping[str, str] = field(default_factory=dict)
    gathered: Mapping[str, list[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Scheduled:
    """How one PrimFunc came to its schedule.

    Parameters
    ----------
    rule : str
        Name of the rule or kernel.
    decisions : mapping of str to object
        What was decided.
    alternatives : mapping of str to tuple
        What each was chosen from, the default first: the space a tuner searches.
    source : str
        The tuner's record that answered, ``""`` for defaults.
    """

    rule: str
    decisions: Mapping[str, Any] = field(default_factory=dict)
    alternatives: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    source: str = ""


@dataclass(frozen=True)
class ScheduledModel:
    """`LoweredModel` with every PrimFunc scheduled.

    Parameters
    ----------
    lowered : LoweredModel
    mod : tvm.IRModule
    schedules : mapping of str to Scheduled
        By PrimFunc name.
    """

    lowered: LoweredModel
    mod: Any
    schedules: Mapping[str, Scheduled]


@dataclass(frozen=True)
class CompiledModule:
    """A module on disk and its manifest."""

    path: Path
    manifest: Mapping[str, Any]
