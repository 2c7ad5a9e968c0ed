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

from collections.abc import Callable
from typing import Any

from apq_tvm.codegen.layouts.mixed import MixedLayout
from apq_tvm.errors import NotApplicable
from apq_tvm.formats.mixed import GROUP
from apq_tvm.ops.activations.mixed import mixed_activations
from apq_tvm.ops.few_rows.mixed import MixedBlocking, mixed_linear
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.schedules.decide import Decide
from apq_tvm.schedules.linear.checks import check_features
from apq_tvm.schedules.linear.kernel import (
    Choice,
    Instruction,
    LinearKernel,
    Preparation,
)
from apq_tvm.schedules.linear.quantize import task_rows
from apq_tvm.schedules.linear.spans import schedule_spans
from apq_tvm.schedules.linear.streams import choose_streams
from apq_tvm.tensorize.pairs.mixed_dot import MixedInstruction, mixed_intrinsic
from apq_tvm.tensorize.pairs.reduce import reduce_intrinsic
from apq_tvm.types import DeviceProfile

AHEADS = (8192, 12288, 4096, 2048, 0)
"""Software prefetch distances in bytes."""

SPAN = 16
"""Word rows whose second-order scales are decoded together, at most."""


def schedule_mixed_activations(func: Any, profile: DeviceProfile, decide: Decide) -> Any:
    """Parallel tasks, reductions over 16 lanes by shuffles; the rest is scheduled as written."""
    from tvm import s_tir

    sch = s_tir.Schedule(func)
    (task,) = sch.get_loops(sch.get_sblock("task"))
    sch.parallel(task)
    for name, operation in (("top", "max"), ("total", "add"), ("total_tail", "add")):
        try:
            block = sch.get_sblock(name)
        except s_tir.ScheduleError:  # K has no short last group, or no whole one
            continue
        (loop,) = sch.get_loops(block)[-1:]
        sch.decompose_reduction(block, loop)
        sch.tensorize(loop, reduce_intrinsic(operation, 16))
    return sch.mod["main"]


def _prepare(choice: Choice, layout: MixedLayout) -> Preparation:
    """Activations rounded to int8 and permuted (`apq_tvm.ops.activations.mixed`)."""
    n, k = choice.spec.n, choice.spec.k
    copy = "outliers" in layout.shapes(n, k)
    bits = layout.scheme.act_bits
    key = f"quantize_k{k}_{layout.scheme.weights.replace('.', 'p')}A{bits}"
    key += "_copy" if copy else ""

    def make(decide: Decide) -> Any:
        return mixed_activations(layout, k, copy, task_rows(k, decide), bits)

    return Preparation(key, make, ("permutation",), schedule_mixed_activations)


def mixed_kernel(
    instruction: MixedInstruction,
    m_tile: int,
    rows_of: Callable[[DeviceProfile], int],
    aheads: tuple[int, ...] = AHEADS,
) -> LinearKernel:
    """The record of one kernel for M >= m_tile.

    Parameters
    ----------
    instruction : MixedInstruction
    m_tile : int
    rows_of : callable
        Rows that are interleaved on a device, whatever its kernels.
    aheads : tuple of int
        Prefetch distances to try.
    """
    rows = instruction.rows

    def layout_of(spec: LinearSpec, profile: DeviceProfile) -> MixedLayout:
        assert spec.scheme is not None
        return MixedLayout(rows_of(profile), spec.scheme)

    def check(spec: LinearSpec, profile: DeviceProfile) -> None:
        layout = layout_of(spec, profile)
        assert spec.scheme is not None
        if not 2 <= spec.scheme.act_bits <= 8:
            raise NotApplicable(f"is for integer activations of 2 to 8 bits, not {spec.scheme}")
        if 2 * GROUP * layout.wide_groups(spec.k) * 15 * 127 >= 1 << 31:
            raise NotApplicable(f"K={spec.k}: products of 4-bit codes may exceed int32")
        check_features(profile, instruction.features, instruction.lanes or rows)
        if layout.rows != rows:
            raise NotApplicable(f"wants {rows} rows interleaved; {layout.name} has {layout.rows}")

    def ask(spec: LinearSpec, profile: DeviceProfile, decide: Decide) -> MixedBlocking:
        layout = layout_of(spec, profile)
        choices = (1, 2, 4) if m_tile == 1 else (1, 2)
        streams = choose_streams(decide, choices, layout.row_blocks(spec.n))
        triples = layout.triples(spec.k)
        span = max(s for s in range(1, SPAN + 1) if triples % s == 0)
        return MixedBlocking(m_tile, streams, span, decide("ahead", aheads))

    def func(choice: Choice) -> Any:
        return mixed_linear(choice.spec, layout_of(choice.spec, choice.profile), choice.plan)

    def schedule(sch: Any, choice: Choice) -> None:
        def intrinsic(name: str) -> str:
            return mixed_intrinsic(instruction, name.startswith("wide"), m_tile, choice["ahead"])

        schedule_spans(sch, choice, intrinsic)

    return LinearKernel(
        "gemv",
        "mixed24",
        8,
        Instruction(instruction.name, instruction.features, rows),
        m_tile,
        check=check,
        layout=layout_of,
        func=func,
        schedule=schedule,
        ask=ask,
        prepare=lambda choice: _prepare(choice, layout_of(choice.spec, choice.profile)),
        family="mixed",
        m_named=m_tile,
    )
