"""Which layout integer weights have on 64-bit Arm: 4x4, 4x8 or 8x8 (rows x bytes), core by core.

``W4r4k4s`` is 4x4, ``W4r4k8s`` 4x8, ``W4r8k8s`` 8x8 (`apq_tvm.codegen.layouts.interleaved`). All
kernels of a layer read one copy of its weights, so one layout must serve every M. Cores without
smmla have 4x4; those with it what was measured to be best (`MEASURED`), which ``--layout`` of
``compile`` and ``bench static`` overrules.
"""

from __future__ import annotations

from collections.abc import Mapping

from apq_tvm.codegen.layouts import InterleavedLayout
from apq_tvm.errors import NotApplicable
from apq_tvm.ops.linear_spec import LinearSpec
from apq_tvm.types import DeviceProfile, Scheme

PLAIN = "4x4"
INTERLEAVINGS = (PLAIN, "4x8", "8x8")

PAIRED_BITS = (2, 3, 4, 8)
"""Of codes that 4x8 and 8x8 are for."""

ROWS = (1, 4, 8, 16, 128)
"""M of the figures in `MEASURED`."""

SHARES = (0.6, 0.1, 0.1, 0.1, 0.1)
"""Of the multiply-adds, by M, in what is to be fast: mostly decode, of one sequence."""

MEASURED: Mapping[str, Mapping[int, Mapping[str, tuple[float, ...]]]] = {}
"""Device -> bits -> layout -> MACs per cycle of whole calls by `ROWS`, 512 x 4096, llvm-mca 22.

Schemes are W2A8g32, W3A8g32, W4A8g32 and W8A8; ``python examples/measure_arm.py layouts`` prints
the table.
"""

_SAME_MODEL = {"cortex-x2": "graviton4", "cortex-x3": "graviton4", "cortex-x4": "graviton4"}
"""Cores for which LLVM has another's model."""


def in_pairs(spec: LinearSpec, rows: int) -> InterleavedLayout:
    """The layout of a layer in runs of 8 k."""
    assert spec.scheme is not None
    return InterleavedLayout.of_pairs(spec.scheme, rows)


def figures(bits: int, profile: DeviceProfile) -> Mapping[str, tuple[float, ...]]:
    """MACs per cycle by layout, as `MEASURED`; empty where nothing was measured."""
    name = _SAME_MODEL.get(profile.name, profile.name)
    return MEASURED.get(name, {}).get(bits, {})


def interleaving(scheme: Scheme, profile: DeviceProfile) -> str:
    """Which of `INTERLEAVINGS` the weights of a scheme have on a device."""
    possible = scheme.family == "int" and scheme.bits in PAIRED_BITS and scheme.act_bits == 8
    if not possible or scheme.group_size == 16 or "i8mm" not in profile.features:
        return PLAIN
    if profile.interleaving:
        return profile.interleaving
    found = figures(scheme.bits, profile)
    return min(found, key=lambda name: _cycles(found[name]), default=PLAIN)


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
    found = figures(scheme.bits, profile)
    if not found or PLAIN not in (mine, chosen):
        raise NotApplicable(f"is for weights in {mine}; on {profile.name} they are in {chosen}")
    pairs = zip(ROWS, found[mine], found[chosen], strict=True)
    measured = ", ".join(f"M={m} {a:g}/{b:g}" for m, a, b in pairs)
    raise NotApplicable(f"{mine} is slower on {profile.name} than {chosen}: {measured} MACs/cycle")


def _cycles(macs: tuple[float, ...]) -> float:
    """Cycles per multiply-add in what is to be fast."""
    return sum(share / rate for share, rate in zip(SHARES, macs, strict=True))
