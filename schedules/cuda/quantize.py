"""What linear layers on GPUs want done to x: codes in words or planes, threads sharing a group."""

from __future__ import annotations

from typing import Any

from apq_tvm.errors import NotApplicable
from apq_tvm.ops.gpu.attention import with_quantizer
from apq_tvm.ops.gpu.normalize import normalize_rows
from apq_tvm.ops.gpu.planes import PlaneFactors, PlaneQuantizer
from apq_tvm.ops.gpu.quantize import BLOCK, Factors, GroupQuantizer, quantize_groups
from apq_tvm.ops.gpu.rows import RowFactors
from apq_tvm.ops.gpu.words import WordQuantizer
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.schedules.decide import Decide
from apq_tvm.schedules.linear.kernel import Preparation, zero_point
from apq_tvm.tensorize.cuda.functions import call, team_call


def quantize_words(spec: LinearSpec, factors: RowFactors) -> Preparation:
    """``(xq, xs, start)`` of `apq_tvm.ops.gpu.rows`."""
    steps = factors.steps
    more = f"_{steps.layout.weights}{'z' if steps.layout.zero_points else ''}"
    if factors.ready or factors.folded:
        more += "_s" + "".join(map(str, steps.exponents))
    return _preparation(spec, factors, WordQuantizer, "quantize_words", more)


def quantize_planes(spec: LinearSpec, factors: PlaneFactors) -> Preparation:
    """``(planes, xs, sums)`` of `apq_tvm.ops.gpu.planes`."""
    return _preparation(spec, factors, PlaneQuantizer, "quantize_planes", "")


def _preparation(
    spec: LinearSpec, factors: Factors, make_quantizer: Any, name: str, more: str
) -> Preparation:
    scheme, padded = spec.scheme, factors.padded
    assert scheme is not None
    named = "_".join("row" if w == padded else f"g{w}" for w in (factors.width, factors.sum_width))
    bits = "" if scheme.act_bits == 8 else f"_A{scheme.act_bits}"

    def quantizer() -> GroupQuantizer:
        made: GroupQuantizer = make_quantizer(factors, scheme.act_bits, team_call)
        return made

    def make(decide: Decide) -> Any:
        mine = quantizer()
        threads = decide("threads", (BLOCK, 128, 512)) if mine.whole_rows else mine.team_size
        return quantize_groups(mine, threads, name, call)

    return Preparation(
        f"{name}_k{spec.k}_{padded}_{named}{bits}{more}{zero_point(spec)}",
        make,
        schedule=lambda func, profile, decide: func,
        behind=lambda producer: _behind(producer, quantizer()),
    )


def _behind(producer: Any, quantizer: GroupQuantizer) -> Any:
    """What makes x and quantizes it, by the function that makes it alone."""
    op = str(producer.attrs.get("apq.op", ""))
    if op == "layernorm":
        return normalize_rows(producer, quantizer)
    if op == "attention":
        return with_quantizer(producer, quantizer)
    raise NotApplicable(f"{op or 'a function of Relax'} and the quantization of x are two launches")
