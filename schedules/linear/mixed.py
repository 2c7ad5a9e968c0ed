"""Kernels for ``mixed24`` weights: they are streamed through once for every few rows of x.

What the decisions mean, and why their defaults come first on x86 (4096x4096, M=1, one thread of
Zen 5, AVX-512, out of cache; minima of kernels that took turns while the machine did other work):

- one stream: records take 188 us, codes, triples and both kinds of second-order scales in four
  arrays 208 to 225 (AVX2: 262 against 289; two rows of x: 196 against 222).
- ``streams``: row blocks read at once. Two take 215 us: their outliers make one pause of two.
- ``ahead``: software prefetch distance in bytes. 8 KB: 188 us, 12 KB: 189, 16 KB: 193. While
  outliers are multiplied no code is asked for, so the distance has to span that pause.

The outliers are multiplied beside the dense part, after each row block, from lines that were asked
for before it: 131 in a row block of 4096 columns, seven instructions each, in 62 ns of 440
(512x4096, which L2 holds). Other ways took as long, so the plain one stayed: their products 16 at a
time and added up across vectors (54 to 62 ns; 27 of them to gather x lane by lane, and more by
``vgatherdps``), the same spread over the row block, lanes that stay with their rows and are padded.
"""

from __future__ import annotations

from typing import Any

from apq_tvm.codegen.layouts.mixed import MixedLayout
from apq_tvm.errors import NotApplicable
from apq_tvm.formats.mixed import GROUP
from apq_tvm.ops.few_rows.mixed import MixedBlocking, mixed_linear
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.schedules.decide import Decide
from apq_tvm.schedules.linear.checks import check_features
from apq_tvm.schedules.linear.kernel import LinearKernel, Preparation, legacy
from apq_tvm.schedules.linear.quantize import ELEMENTS_PER_TASK
from apq_tvm.schedules.linear.streams import choose_streams
from apq_tvm.tensorize.meaning.mixed import MixedInstruction, mixed_intrinsic
from apq_tvm.tensorize.pairs.reduce import reduce_intrinsic
from apq_tvm.tensorize.x86.dot import VNNI512
from apq_tvm.types import DeviceProfile

M_TILES = (4, 2, 1)
"""Rows of x that share decoded weights; a kernel is for at least that many rows."""

AHEADS = (8192, 12288, 4096, 2048, 0)
"""Software prefetch distances in bytes."""

SPAN = 16
"""Word rows whose second-order scales are decoded together, at most."""


def mixed_layout(spec: LinearSpec, profile: DeviceProfile) -> MixedLayout:
    """16 rows where a kernel has 512-bit vectors, else 8.

    Raises
    ------
    NotApplicable
        If the layer is of another family.
    """
    if spec.scheme is None or spec.scheme.family != "mixed":
        raise NotApplicable(f"is for mixed24, not {spec.scheme or 'float32 weights'}")
    wide = profile.vector_bytes >= 64 and bool(profile.features & set(VNNI512.features))
    return MixedLayout(16 if wide else 8, spec.scheme)


def mixed_preparation(
    spec: LinearSpec, profile: DeviceProfile, decide: Decide
) -> Preparation | None:
    """Activations rounded to int8 and permuted (`apq_tvm.ops.activations.mixed`)."""
    from apq_tvm.ops.activations.mixed import mixed_activations

    layout = mixed_layout(spec, profile)
    copy = "outliers" in layout.shapes(spec.n, spec.k)
    bits, task = layout.scheme.act_bits, max(1, ELEMENTS_PER_TASK // spec.k)
    func = mixed_activations(layout, spec.k, copy, task, bits)
    key = f"quantize_k{spec.k}_{layout.scheme.weights.replace('.', 'p')}A{bits}"
    return Preparation(key + ("_copy" if copy else ""), func, ("permutation",))


def schedule_mixed_activations(func: Any, profile: DeviceProfile, decide: Decide) -> Any:
    """Reductions over 16 lanes by shuffles; the rest is scheduled as written."""
    from tvm import s_tir

    sch = s_tir.Schedule(func)
    for name, operation in (("top", "max"), ("total", "add"), ("total_tail", "add")):
        try:
            block = sch.get_sblock(name)
        except s_tir.ScheduleError:  # K has no short last group, or no whole one
            continue
        (loop,) = sch.get_loops(block)[-1:]
        sch.decompose_reduction(block, loop)
        sch.tensorize(loop, reduce_intrinsic(operation, 16))
    return sch.mod["main"]


def _blocking(
    spec: LinearSpec, layout: MixedLayout, decide: Decide, m_tile: int, aheads: tuple[int, ...]
) -> MixedBlocking:
    choices = (1, 2, 4) if m_tile == 1 else (1, 2)
    streams = choose_streams(decide, choices, layout.row_blocks(spec.n))
    triples = layout.triples(spec.k)
    span = max(s for s in range(1, SPAN + 1) if triples % s == 0)
    return MixedBlocking(m_tile, streams, span, decide("ahead", aheads))


def mixed_kernel(
    instruction: MixedInstruction, m_tile: int, aheads: tuple[int, ...] = AHEADS
) -> LinearKernel:
    """The record of one kernel for M >= m_tile; `aheads` are the prefetch distances to try."""
    rows = instruction.rows

    def check(spec: LinearSpec, profile: DeviceProfile) -> None:
        layout = mixed_layout(spec, profile)
        assert spec.scheme is not None
        if not 2 <= spec.scheme.act_bits <= 8:
            raise NotApplicable(f"is for integer activations of 2 to 8 bits, not {spec.scheme}")
        if 2 * GROUP * layout.wide_groups(spec.k) * 15 * 127 >= 1 << 31:
            raise NotApplicable(f"K={spec.k}: products of 4-bit codes may exceed int32")
        check_features(profile, instruction.features, instruction.lanes or rows)
        if layout.rows != rows:
            raise NotApplicable(f"wants {rows} rows interleaved; {layout.name} has {layout.rows}")

    def func(spec: LinearSpec, profile: DeviceProfile, decide: Decide) -> Any:
        layout = mixed_layout(spec, profile)
        return mixed_linear(spec, layout, _blocking(spec, layout, decide, m_tile, aheads))

    def schedule(sch: Any, spec: LinearSpec, profile: DeviceProfile, decide: Decide) -> None:
        layout = mixed_layout(spec, profile)
        blocking = _blocking(spec, layout, decide, m_tile, aheads)
        for s in range(blocking.streams):
            for name, wide in (("narrow", False), ("wide", True)):
                block = sch.get_sblock(f"{name}{s}")
                count = (1 if wide else 2) + (m_tile > 1)
                first = sch.get_loops(block)[-count]
                sch.tensorize(first, mixed_intrinsic(instruction, wide, m_tile, blocking.ahead))

    return legacy(
        name=f"mixed_24A8_{instruction.name}_r{rows}m{m_tile}",
        m_min=m_tile,
        m_max=-1,
        check=check,
        layout=mixed_layout,
        func=func,
        schedule=schedule,
        family="mixed",
        prepare=mixed_preparation,
    )
