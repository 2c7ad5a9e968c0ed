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

MEASURED: Mapping[str, Mapping[str, Mapping[str, tuple[float, ...]]]] = {
    "graviton3": {
        "W2A8g32": {
            "4x4": (24.3, 34.0, 43.8, 53.8, 67.3),
            "4x8": (24.3, 51.0, 63.6, 63.7, 67.4),
            "8x8": (24.3, 51.0, 63.6, 63.6, 67.4),
        },
        "W3A8g32": {
            "4x4": (17.6, 26.5, 37.8, 49.1, 66.3),
            "4x8": (10.1, 28.6, 45.8, 45.9, 65.6),
            "8x8": (10.2, 30.3, 30.3, 30.3, 30.3),
        },
        "W4A8g32": {
            "4x4": (29.9, 40.8, 45.9, 55.3, 67.6),
            "4x8": (30.0, 56.6, 67.8, 67.9, 67.8),
            "8x8": (30.0, 56.6, 67.8, 67.9, 67.8),
        },
        "W4A8g128": {
            "4x4": (36.9, 43.4, 64.0, 78.9, 99.1),
            "4x8": (37.0, 75.1, 90.3, 90.4, 99.7),
            "8x8": (37.0, 75.3, 90.2, 90.3, 99.7),
        },
        "W8A8": {
            "4x4": (36.2, 47.7, 75.5, 94.5, 121.1),
            "4x8": (41.3, 98.5, 106.8, 106.9, 122.2),
            "8x8": (39.3, 102.6, 106.7, 106.8, 122.3),
        },
    },
    "graviton4": {
        "W2A8g32": {
            "4x4": (24.2, 34.0, 39.7, 49.6, 63.4),
            "4x8": (24.3, 50.9, 53.6, 53.6, 63.4),
            "8x8": (24.3, 50.9, 53.5, 53.6, 63.4),
        },
        "W3A8g32": {
            "4x4": (18.9, 27.6, 34.4, 45.2, 62.4),
            "4x8": (10.9, 32.4, 44.3, 44.3, 61.9),
            "8x8": (10.9, 32.4, 32.4, 32.4, 32.4),
        },
        "W4A8g32": {
            "4x4": (29.0, 38.4, 40.5, 50.2, 63.5),
            "4x8": (29.1, 52.5, 55.0, 55.0, 63.7),
            "8x8": (30.0, 52.2, 55.0, 55.0, 63.6),
        },
        "W4A8g128": {
            "4x4": (37.6, 40.7, 55.5, 70.5, 92.5),
            "4x8": (36.0, 68.7, 83.6, 83.7, 92.8),
            "8x8": (36.5, 75.2, 83.6, 83.7, 92.8),
        },
        "W8A8": {
            "4x4": (34.0, 41.5, 61.9, 82.0, 114.4),
            "4x8": (37.4, 81.9, 91.0, 91.2, 116.6),
            "8x8": (37.4, 96.0, 91.0, 91.1, 116.6),
        },
    },
    "neoverse-n2": {
        "W2A8g32": {
            "4x4": (10.1, 16.3, 21.1, 26.3, 33.6),
            "4x8": (12.1, 25.5, 31.9, 31.9, 33.7),
            "8x8": (12.1, 25.5, 31.8, 31.9, 33.6),
        },
        "W3A8g32": {
            "4x4": (9.1, 14.2, 18.1, 23.9, 33.0),
            "4x8": (5.2, 15.5, 23.5, 23.5, 32.7),
            "8x8": (5.1, 13.8, 13.8, 13.8, 13.8),
        },
        "W4A8g32": {
            "4x4": (12.9, 19.8, 22.0, 27.0, 33.7),
            "4x8": (15.0, 28.3, 34.0, 34.0, 33.9),
            "8x8": (15.0, 28.3, 34.0, 34.0, 33.9),
        },
        "W4A8g128": {
            "4x4": (18.3, 23.3, 30.0, 38.0, 49.4),
            "4x8": (18.9, 37.6, 45.2, 45.2, 49.7),
            "8x8": (18.9, 37.7, 45.2, 45.2, 49.7),
        },
        "W8A8": {
            "4x4": (15.7, 26.3, 42.0, 50.5, 61.3),
            "4x8": (25.2, 50.8, 53.5, 53.5, 61.8),
            "8x8": (23.7, 52.2, 53.4, 53.5, 61.3),
        },
    },
    "cortex-x4": {
        "W2A8g32": {
            "4x4": (24.3, 34.0, 41.6, 52.1, 67.0),
            "4x8": (24.3, 51.0, 63.7, 63.7, 67.2),
            "8x8": (24.3, 51.0, 63.7, 63.7, 67.1),
        },
        "W3A8g32": {
            "4x4": (18.9, 29.6, 36.5, 48.0, 66.1),
            "4x8": (10.1, 27.4, 46.9, 46.9, 65.4),
            "8x8": (10.1, 27.8, 27.8, 27.8, 27.8),
        },
        "W4A8g32": {
            "4x4": (29.9, 40.8, 43.4, 53.6, 67.3),
            "4x8": (30.0, 56.6, 67.9, 68.0, 67.6),
            "8x8": (30.0, 56.6, 67.9, 68.0, 67.6),
        },
        "W4A8g128": {
            "4x4": (37.7, 40.8, 59.5, 75.5, 98.6),
            "4x8": (37.7, 75.3, 90.4, 90.5, 99.2),
            "8x8": (37.7, 75.4, 90.4, 90.5, 99.2),
        },
        "W8A8": {
            "4x4": (37.4, 44.6, 72.1, 91.8, 120.6),
            "4x8": (41.5, 104.7, 107.0, 107.1, 122.4),
            "8x8": (41.3, 102.7, 106.9, 107.0, 122.4),
        },
    },
}
"""Device -> scheme -> layout -> MACs per cycle of whole calls by `ROWS`, 256 x 4096, llvm-mca 22:
``python examples/measure_arm.py layouts`` with the devices' names."""

LOSS = 0.05
"""Most that the layout of a device may be slower than 4x4 at any of `ROWS`."""

TIE = 0.01
"""Layouts are alike up to this; the one of the largest blocks then executes fewer instructions."""

_SAME_MODEL = {
    "cortex-x2": "graviton4",
    "cortex-x3": "graviton4",
    "cortex-a710": "neoverse-n2",
}
"""Cores for which LLVM has another's model."""


def in_pairs(spec: LinearSpec, rows: int) -> InterleavedLayout:
    """The layout of a layer in runs of 8 k."""
    assert spec.scheme is not None
    return InterleavedLayout.of_pairs(spec.scheme, rows)


def figures(scheme: Scheme, profile: DeviceProfile) -> Mapping[str, tuple[float, ...]]:
    """MACs per cycle by layout, of the measured scheme most like it; empty without any."""
    long = scheme.group_size == -1 or scheme.group_size >= 128
    like = {4: "W4A8g128" if long else "W4A8g32", 8: "W8A8"}
    name = _SAME_MODEL.get(profile.name, profile.name)
    return MEASURED.get(name, {}).get(like.get(scheme.bits, f"W{scheme.bits}A8g32"), {})


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
    raise NotApplicable(
        f"is for weights in {mine}, which are in {chosen} on {profile.name}; MACs per cycle of "
        f"{mine} and {chosen}: {measured}"
    )


def _loss(macs: tuple[float, ...], plain: tuple[float, ...]) -> float:
    """By how much some figure is below that of 4x4, at most."""
    return max(1 - mine / theirs for mine, theirs in zip(macs, plain, strict=True))


def _cycles(macs: tuple[float, ...]) -> float:
    """Cycles per multiply-add in what is to be fast."""
    return sum(share / rate for share, rate in zip(SHARES, macs, strict=True))
