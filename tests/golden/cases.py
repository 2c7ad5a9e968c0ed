"""What the golden check hashes: devices, schemes, shapes and sets of decisions."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import TypeVar

from apq_tvm.formats import FAMILIES, parse_scheme
from apq_tvm.formats.anyprec_cells import has_cells
from apq_tvm.formats.integer import PAIR_MOST, PAIR_SUM
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.schedules.devices import PROFILES, find_profile
from apq_tvm.types import DeviceProfile, Scheme

T = TypeVar("T")

PROFILES_IN_FULL = (
    "znver4", "alderlake", "cascadelake", "znver3", "skylake-avx512", "x86-64", "sapphirerapids",
    "graviton3", "graviton4", "graviton2", "cortex-a55", "cortex-a510", "cortex-a72", "rtx-3090",
)  # fmt: skip
"""One of each set of instructions: their kernels are hashed; of all others what is selected."""

SMMLA, LAYOUTS = "graviton3", ("4x8", "8x8")
"""A device that may store integer weights in several layouts, and those; hashed in full, too."""

INTEGERS = (
    *(f"W{bits}A8g32" for bits in range(1, 9)),
    "W2zA8g64", "W3zA8", "W4zA8g32", "W8zA8g64", "W4A8g16", "W4A8g128", "W3A8", "W4A8tg128", "W8A8",
    "W4A16g128", "W3zA16g32", "W8A32", "W1A1", "W2A2g32", "W4A4g32", "W3zA4", "W2A4tg64", "W8A6",
)  # fmt: skip

SHAPES = ((50, 160, "gelu"), (264, 512, ""))
"""N, K and the activation, with which go bias and residual: edges, by the default decisions; and
enough for threads, by others."""


class Hashed:
    """Decisions that look random but hang on their names alone, not on the order of questions."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def __call__(self, name: str, choices: Sequence[T]) -> T:
        """The same choice for the same name and number of choices."""
        return choices[zlib.crc32(f"{self._seed} {name}".encode()) % len(choices)]


WIDTHS = (
    *(f"bcq{bits}g32{acts}" for bits in range(1, 9) for acts in ("", "A32")),
    *(f"W{bits}A{acts}" for bits in range(1, 9) for acts in ("4tg32", "16g32", "8")),
    "anyprec1-8sA8", "anyprec1-8sA32", "anyprec1-8A8", "anyprec1-8A8g16", "W8A2", "W7A1", "W5A1",
)  # fmt: skip
"""Of kernels that are listed for every width."""


@cache
def schemes() -> tuple[Scheme | None, ...]:
    """Representative schemes of every family; None is float32."""
    names = dict.fromkeys((*INTEGERS, *WIDTHS))
    for family in FAMILIES[1:]:
        names.update(dict.fromkeys(family.examples))
    return (None, *map(parse_scheme, names))


def spec_of(scheme: Scheme | None, shape: tuple[int, int, str]) -> LinearSpec:
    """The kernel problem of a layer of `shape`."""
    n, k, activation = shape
    if scheme is not None and scheme.family == "anyprec":
        channels = 1 if "c1" in str(scheme) or has_cells(scheme) else 16
        sizes: tuple[tuple[str, int], ...] = (("channels", channels),)
    else:
        sizes = ((PAIR_SUM, PAIR_MOST),) if str(scheme) == "W8A8" else ()
    return LinearSpec(
        n, k, scheme, bool(activation), activation, bool(activation), sizes,
        asymmetric=scheme is not None and scheme.asymmetric_acts,
    )  # fmt: skip


def in_full() -> tuple[DeviceProfile, ...]:
    """Devices whose kernels are hashed."""
    named = {profile.name: profile for profile in PROFILES}
    stored = [
        replace(find_profile(SMMLA, layout=layout), name=f"{SMMLA}-{layout}", measured_as=(SMMLA,))
        for layout in LAYOUTS
    ]
    return (*(named[name] for name in PROFILES_IN_FULL), *stored)


def profiles() -> list[DeviceProfile]:
    """Every device, those that are hashed in full first."""
    rest = [p for p in PROFILES if p.name not in PROFILES_IN_FULL and not p.variants]
    return [*in_full(), *rest]
