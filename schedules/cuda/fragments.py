"""What kernels by ``mma`` share: how weights lie, and what is decided."""

from __future__ import annotations

from dataclasses import dataclass

from apq_tvm.codegen.layouts.fragments import FragmentLayout
from apq_tvm.errors import NotApplicable
from apq_tvm.formats.balance import LEVELS, TRIPLE
from apq_tvm.ops.gpu.planes import planes_of
from apq_tvm.ops.gpu.stream import Plan
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.schedules.cuda.native import B1_AND
from apq_tvm.schedules.decide import Decide
from apq_tvm.types import DeviceProfile, Scheme


@dataclass(frozen=True)
class Weights:
    """Weights whose codes tensor cores multiply.

    Parameters
    ----------
    name : str
        In names of kernels.
    bits : int
        Of their schemes.
    planes : int
        That a code has.
    family : str
        Of formats.
    rows : int
        Of a block.
    many : int
        Tiles of rows of x that share what was read of weights, as many as there are registers for
        the sums of.
    """

    name: str
    bits: int
    planes: int
    family: str = "int"
    rows: int = 16
    many: int = 4


WEIGHTS = (
    *(Weights(f"W{bits}", bits, bits) for bits in range(1, 9)),
    Weights("W2star", 2, (LEVELS - 1).bit_length(), "balance", 16 * TRIPLE, 2),
)

MANY = 4
"""Tiles of x times blocks of weights of a warp, from which on it is x whose reads count."""

MOST_PLANES = 4
"""Planes of weights: int8 costs 8 products of the same size for 8 rows of x."""

MOST_PAIRS = 24
"""Planes of weights times those of a row of x: eight of them are a product of int8, which has to
decode weights first but multiplies 8 rows of x at once."""

LOAD_BYTES = 512
"""Of a warp's load."""

ENOUGH_ROWS = 8192
"""Rows of weights that fill a GPU without sharing K, for many rows of x: on an H200 two warps along
K win with 4096 rows and lose with 14336."""

MOST_WARPS = 8
"""Of a block of threads, side by side and along K."""

SHARED_BYTES = 48 * 1024
"""Of a block's shared memory, where a kernel asks for no more (CUDA C++ Programming Guide, "Compute
Capabilities")."""

IN_FLIGHT = 2.0
"""How much more is asked for than that latency wants: warps are not always all asking."""


def ask_plan(
    spec: LinearSpec, profile: DeviceProfile, decide: Decide, tiles: int, stacked: int = 1
) -> Plan:
    """No more warps than there are chunks, no more chunks in a round than a warp has."""
    layout = layout_of(spec, profile)
    chunks = layout.padded_k(spec.k) // layout.chunk_k
    if tiles * stacked > MANY:
        return _ask_side(layout, chunks, spec.n, decide, tiles, stacked)
    # Thirds of rows have their chunks at once: registers hold fewer.
    best = 4 if layout.thirds == 1 else 2 if tiles == 1 else 1
    warps = _first(_warps(spec, profile, layout, best), (8, 4, 2, 1, 16))
    taken = decide("warps", [w for w in warps if w <= chunks] or [1])
    own = chunks // taken
    return Plan(taken, decide("chunks", [c for c in _first(best, (4, 2, 1, 8)) if c <= own] or [1]))


def _ask_side(
    layout: FragmentLayout, chunks: int, n: int, decide: Decide, tiles: int, stacked: int
) -> Plan:
    """Where x is read more often than weights: no more warps side by side than there are rows of
    weights for, and no more along K than there is shared memory for to meet in."""
    most = -(-layout.row_blocks(n) // stacked)
    side = decide("side", [s for s in (2, 1, 4, 8) if s <= most] or [1])
    room = min(MOST_WARPS, SHARED_BYTES // (LOAD_BYTES * tiles * stacked))
    best = 1 if n >= ENOUGH_ROWS else 2
    warps = [w for w in _first(best, (1, 2, 4)) if w <= chunks and w * side <= room]
    taken = decide("warps", warps or [1])
    own = chunks // taken
    return Plan(taken, decide("chunks", [c for c in (2, 1) if c <= own]), side, stacked)


def _first(best: int, others: tuple[int, ...]) -> tuple[int, ...]:
    return (best, *(other for other in others if other != best))


def _warps(spec: LinearSpec, profile: DeviceProfile, layout: FragmentLayout, chunks: int) -> int:
    """Warps of a block by default. Where weights are in planes a chunk is little work: the fewest
    that keep memory busy with a round of `chunks` each, so that it has rounds enough."""
    if not layout.planes:
        return 8
    assert profile.gpu is not None
    asked = layout.row_blocks(spec.n) * chunks * layout.unit_loads * LOAD_BYTES
    wanted = IN_FLIGHT * profile.gpu.bandwidth * profile.gpu.latency_ns
    return next((warps for warps in (1, 2, 4) if warps * asked >= wanted), 8)


def layout_of(spec: LinearSpec, profile: DeviceProfile) -> FragmentLayout:
    """How a layer's weights lie: in planes if products of bits serve it."""
    assert spec.scheme is not None
    try:
        check_planes(spec.scheme, profile)
        planes = True
    except NotApplicable:
        planes = False
    layout = FragmentLayout.of(spec.scheme, planes)
    assert layout is not None
    return layout


def check_planes(scheme: Scheme, profile: DeviceProfile) -> None:
    """Decline what products of bits are not for.

    Raises
    ------
    NotApplicable
    """
    if B1_AND not in profile.features:
        assert profile.gpu is not None
        major, minor = divmod(profile.gpu.sm, 10)
        why = "counts xor alone" if major < 8 else "emulates it by int8"
        raise NotApplicable(f"and of bits: compute capability {major}.{minor} {why}")
    if not scheme.integer_acts:
        raise NotApplicable(f"is for activations of 1 to 8 bits, not {scheme}")
    if 0 < scheme.group_size < 128:
        raise NotApplicable(
            f"a product has 256 columns, most of them idle with groups of {scheme.group_size}"
        )
    layout = FragmentLayout.of(scheme, True)
    assert layout is not None
    bits, planes = layout.bits, planes_of(scheme.act_bits)
    if not pays(bits, planes):
        raise NotApplicable(f"{bits} planes of weights by {planes} of x: int8 is less work")


def pays(bits: int, planes: int) -> bool:
    """Whether so many planes of weights and of x are multiplied, not int8."""
    return bits <= MOST_PLANES and bits * planes <= MOST_PAIRS
