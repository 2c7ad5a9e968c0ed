"""What linear layers on GPUs want done to x: codes four to a word, threads sharing a group."""

from __future__ import annotations

from typing import Any

from apq_tvm.errors import NotApplicable
from apq_tvm.ops.gpu.attention import with_quantizer
from apq_tvm.ops.gpu.normalize import normalize_rows
from apq_tvm.ops.gpu.quantize import BLOCK, GroupQuantizer
from apq_tvm.ops.gpu.quantize import quantize_words as build_quantize_words
from apq_tvm.ops.gpu.rows import RowFactors
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.schedules.decide import Decide
from apq_tvm.schedules.linear.kernel import Preparation, zero_point
from apq_tvm.tensorize.cuda.functions import call, team_call


def quantize_words(spec: LinearSpec, factors: RowFactors) -> Preparation:
    """``(xq, xs, start)`` of `apq_tvm.ops.gpu.rows`."""
    scheme, padded = spec.scheme, factors.padded
    assert scheme is not None
    width, sum_width, steps = factors.width, factors.sum_width, factors.steps
    named = "_".join("row" if w == padded else f"g{w}" for w in (width, sum_width))
    bits = "" if scheme.act_bits == 8 else f"_A{scheme.act_bits}"
    zeros = "z" if steps.layout.zero_points else ""
    shifts = "".join(map(str, steps.exponents)) if factors.ready or factors.folded else ""

    def make(decide: Decide) -> Any:
        quantizer = GroupQuantizer(factors, scheme.act_bits, team_call)
        if not quantizer.whole_rows:
            return build_quantize_words(quantizer, quantizer.team_size, call)
        return build_quantize_words(quantizer, decide("threads", (BLOCK, 128, 512)), call)

    return Preparation(
        f"quantize_words_k{spec.k}_{padded}_{named}{bits}_W{steps.layout.bits}{zeros}"
        f"{'_s' + shifts if shifts else ''}{zero_point(spec)}",
        make,
        schedule=lambda func, profile, decide: func,
        behind=lambda producer: _behind(
            producer, GroupQuantizer(factors, scheme.act_bits, team_call)
        ),
    )


def _behind(producer: Any, quantizer: GroupQuantizer) -> Any:
    """What makes x and quantizes it, by the function that makes it alone."""
    op = str(producer.attrs.get("apq.op", ""))
    if op == "layernorm":
        return normalize_rows(producer, quantizer)
    if op == "attention":
        return with_quantizer(producer, quantizer)
    raise NotApplicable(f"{op or 'a function of Relax'} and the quantization of x are two launches")
