"""Which layout integer weights have on 64-bit Arm: 4x4, 4x8 or 8x8 (rows x bytes), core by core.

``W4r4k4s`` is 4x4, ``W4r4k8s`` 4x8, ``W4r8k8s`` 8x8 (`apq_tvm.codegen.layouts.interleaved`). All
kernels of a layer read one copy of its weights, so one layout must serve every M. Cores without
smmla have 4x4; those with it what was measured to be best (`apq_tvm.tuning_logs`: whole calls,
llvm-mca 22), which ``--layout`` of ``compile`` and ``bench static`` overrules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from apq_tvm.codegen.layouts import UNIT_K, InterleavedLayout
from apq_tvm.errors import NotApplicable
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.schedules.linear.checks import check_integer
from apq_tvm.schedules.linear.kernel import Instruction
from apq_tvm.tuning_logs import read_log
from apq_tvm.types import DeviceProfile, Scheme

LANES = 4
"""Rows of a vector: the R of 4x4."""

PLAIN = "4x4"
INTERLEAVINGS = (PLAIN, "4x8", "8x8")

PAIRED_BITS = (2, 3, 4, 8)
"""Of codes that 4x8 and 8x8 are for."""

ROWS = (1, 4, 8, 16, 128)
"""M of the figures."""

SHARES = (0.6, 0.1, 0.1, 0.1, 0.1)
"""Of the multiply-adds, by M, in what is to be fast: mostly decode, of one sequence."""

LOSS = 0.05
"""Most that the layout of a device may be slower than 4x4 at any of `ROWS`."""

TIE = 0.01
"""Layouts are alike up to this; the one of the largest blocks then executes fewer instructions."""

LOG = "layouts"


def in_pairs(spec: LinearSpec, rows: int) -> InterleavedLayout:
    """The layout of a layer in runs of 8 k."""
    assert spec.scheme is not None
    return InterleavedLayout.of_pairs(spec.scheme, rows)


def parse(log: Any) -> Mapping[str, Mapping[str, Sequence[float]]]:
    """MACs per cycle by scheme, layout and `ROWS` of what a log holds.

    Raises
    ------
    ValueError
        Names the key that is missing or holds something else.
    """
    if not isinstance(log, dict) or not isinstance(log.get("measured"), str):
        raise ValueError("measured is missing: say by what, and when")
    found = log.get("macs_per_cycle")
    if not isinstance(found, dict) or log.get("m") != list(ROWS):
        raise ValueError(f"macs_per_cycle, for m {list(ROWS)}, is missing")
    for scheme, rates in found.items():
        if list(rates) != list(INTERLEAVINGS) or any(len(r) != len(ROWS) for r in rates.values()):
            raise ValueError(f"macs_per_cycle.{scheme}: a figure each of {INTERLEAVINGS} is needed")
    return found


def figures(scheme: Scheme, profile: DeviceProfile) -> Mapping[str, Sequence[float]]:
    """MACs per cycle by layout and `ROWS`, of the measured scheme most like it; or empty."""
    long = scheme.group_size == -1 or scheme.group_size >= 128
    like = {4: "W4A8g128" if long else "W4A8g32", 8: "W8A8"}
    found = read_log(profile.modelled_as or profile.name, LOG, parse) or {}
    return found.get(like.get(scheme.bits, f"W{scheme.bits}A8g32"), {})


def interleaving(scheme: Scheme, profile: DeviceProfile) -> str:
    """Which of `INTERLEAVINGS` the weights of a scheme have on a device."""
    integers = scheme.family == "int" and scheme.bits in PAIRED_BITS and scheme.act_bits == 8
    if not integers or scheme.group_size == 16 or "i8mm" not in profile.features:
        return PLAIN
    if profile.interleaving:
        return profile.interleaving
    found = figures(scheme, profile)
    # In the order of `INTERLEAVINGS`: the largest blocks last.
    possible = [name for name in found if _loss(found[name], found[PLAIN]) <= LOSS]
    if not possible:
        return PLAIN
    fewest = min(_cycles(found[name]) for name in possible)
    return [name for name in possible if _cycles(found[name]) <= (1 + TIE) * fewest][-1]


def check_layout(spec: LinearSpec, profile: DeviceProfile, layout: InterleavedLayout) -> None:
    """Decline a kernel for a layout that the layer's weights do not have.

    Raises
    ------
    NotApplicable
        With the figures that decided.
    """
    scheme = spec.scheme
    assert scheme is not None
    chosen, mine = interleaving(scheme, profile), f"{layout.rows}x{layout.run}"
    if mine == chosen:
        return
    if profile.interleaving:
        raise NotApplicable(f"is for weights in {mine}; --layout {chosen} was asked for")
    found = figures(scheme, profile)
    if not found:
        raise NotApplicable(f"is for weights in {mine}; on {profile.name} they are in {chosen}")
    pairs = zip(ROWS, found[mine], found[chosen], strict=True)
    measured = ", ".join(f"M={m} {a:g} to {b:g}" for m, a, b in pairs)
    same = f" (those of {profile.modelled_as}, whose model it has)" if profile.modelled_as else ""
    raise NotApplicable(
        f"is for weights in {mine}, which are in {chosen} on {profile.name}; MACs per cycle of "
        f"{mine} and {chosen}: {measured}{same}"
    )


def check_folded(
    spec: LinearSpec,
    profile: DeviceProfile,
    instruction: Instruction,
    layout: InterleavedLayout,
) -> None:
    """Decline what products of folded activations with `layout` cannot compute, or not here.

    Raises
    ------
    NotApplicable
    """
    check_integer(spec, profile, instruction.features, LANES)
    scheme = spec.scheme
    assert scheme is not None
    if scheme.act_bits != 8:
        raise NotApplicable(f"is for activations of 8 bits, not {scheme}")
    if 0 < scheme.group_size < UNIT_K:
        raise NotApplicable(f"groups of {scheme.group_size} have {UNIT_K} codes at least")
    check_layout(spec, profile, layout)


def _loss(macs: Sequence[float], plain: Sequence[float]) -> float:
    """By how much some figure is below that of 4x4, at most."""
    return max(1 - mine / theirs for mine, theirs in zip(macs, plain, strict=True))


def _cycles(macs: Sequence[float]) -> float:
    """Cycles per multiply-add in what is to be fast."""
    return sum(share / rate for share, rate in zip(SHARES, macs, strict=True))
