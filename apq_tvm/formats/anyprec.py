"""Any-precision weights: one parent of n bits whose upper bits are every narrower model.

Park et al., "Any-Precision LLM: Low-Cost Deployment of Multiple, Different-Sized LLMs" (ICML 2024),
sections 3.3 and 4. A weight has one code of n bits; its code at width b is ``code >> (n - b)``, so
that a model of b bits is stored as the b upper bitplanes of the parent and a table of 2^b
centroids::

    w = scales[n] * centroids{b}[n // channels, code >> (bits - b)]

``anyprec3-8`` has a table for every output channel up to 5 bits, and from 6 bits on cells of 5 bits
that are divided uniformly; see `apq_tvm.formats.anyprec_cells`.

``anyprec3-8c1`` has tables of every width for every output channel, as the paper has them, whatever
they cost: those of 3..8 bits in float16 are 1008 bytes a channel, 21 bits per weight at K=384. With
``c8`` so many channels share them, with ``s`` as many as it takes until they are at most a tenth of
the codes' bytes; ``scales`` float16 [N, 1] make the rows of such a block alike.

``centroids{b}`` float16 [T, 2^b], T = ceil(N / channels). Where activations are integers kernels
look up int8 centroids of ``c`` and ``s``, ``step[t] * i`` with ``step = max |centroid| / 127``; the
quantizer chooses tables that are such multiples already (`snap`), so that decoding in numpy and in
a kernel agree, and a table is stored as one byte per centroid and a float32 step.

Activations have one int8 scale per 32 columns, `Scheme.group_size`; ``A8g64`` spells another group,
``A8`` one scale per token. Weights have no scale along K, so that nothing of them depends on it.
"""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from apq_tvm.errors import BadScheme
from apq_tvm.formats import anyprec_cells as cells
from apq_tvm.formats.arrays import check_array, check_codes
from apq_tvm.formats.family import Family
from apq_tvm.formats.places import Place
from apq_tvm.formats.spelling import check_group, parse_acts
from apq_tvm.types import F32, QuantizedTensor, Scheme

F16 = NDArray[np.float16]

TABLE_SHARE = 0.1
"""Tables of a matrix may take this share of its codes' bytes; else more channels share them."""

ACT_GROUP = 32
"""Columns that share a scale of activations where a scheme does not say."""

MAX_CHANNELS = 1 << 14
"""Most output channels that share tables."""

_LEVELS = 127
_STEP_BYTES = 4
_PATTERN = re.compile(r"ANYPREC(\d+)-(\d+)(C\d+|S)?(?:(A\d+)(?:G(\d+))?)?\Z")
_SPELLING = re.compile(r"anyprec\d-\d(?:c(\d+)|s)?\Z")


def parse_anyprec(word: str) -> Scheme | None:
    """Read ``ANYPREC3-8``, ``ANYPREC3-8C1``, ``ANYPREC3-8A32`` or ``ANYPREC3-8SA8G64``; None if it
    is none of them.

    Raises
    ------
    ValueError
        With the reason, if there are no such widths, activations, groups or blocks of channels.
    """
    match = _PATTERN.match(word)
    if match is None:
        return None
    low, high = int(match[1]), int(match[2])
    if not 1 <= low <= high <= 8:
        raise ValueError(f"widths {low}..{high}; 1 <= narrowest <= widest <= 8 is needed")
    spelling = f"anyprec{low}-{high}"
    if match[3] == "S":
        spelling += "s"
    elif match[3] is not None:
        channels = int(match[3][1:])
        if not 1 <= channels <= MAX_CHANNELS or channels & (channels - 1):
            raise ValueError(
                f"tables shared by {channels} channels; powers of 2 from 1 to {MAX_CHANNELS} are "
                "possible"
            )
        spelling += f"c{channels}"
    acts = parse_acts(match[4] or "")
    group = int(match[5] or -1) if match[4] else ACT_GROUP
    check_group(group)
    if group > 0 and acts > 8:
        raise ValueError(f"g is for integer activations; A{acts} has no activation scales")
    return Scheme(
        high, act_bits=acts, group_size=group, family="anyprec", weights=spelling, min_bits=low
    )


def spelled_channels(scheme: Scheme) -> int:
    """Output channels that share tables as the scheme spells it; 0 if `choose_channels` decides."""
    if cells.has_cells(scheme):
        return 1
    match = _SPELLING.match(scheme.weights)
    return int(match[1] or 0) if match else 0


def alone(scheme: Scheme, bits: int) -> Scheme:
    """The scheme of one width by itself, with the same activations and blocks of channels."""
    spelling = re.sub(r"\d-\d", f"{bits}-{bits}", scheme.weights, count=1)
    return replace(scheme, bits=bits, min_bits=bits, weights=spelling)


def one_width(tensor: QuantizedTensor, bits: int) -> QuantizedTensor:
    """The model of `bits` bits by itself: a prefix of the codes, one table."""
    names = _tables(alone(tensor.scheme, bits))
    table = {name: tensor.tables[name] for name in names}
    codes = tensor.codes >> np.uint8(tensor.scheme.bits - bits)
    return QuantizedTensor(codes, tensor.scales, None, alone(tensor.scheme, bits), table)


def table_name(bits: int) -> str:
    """Key in `QuantizedTensor.tables` of the centroids of one width."""
    return f"centroids{bits}"


def table_bytes(scheme: Scheme) -> int:
    """Bytes of one block's tables, all widths together."""
    if cells.has_cells(scheme):
        return cells.table_bytes(scheme)
    entries = sum(1 << b for b in scheme.widths)
    return entries + _STEP_BYTES * len(scheme.widths) if scheme.integer_acts else 2 * entries


def choose_channels(n: int, k: int, scheme: Scheme) -> int:
    """How many output channels share tables: as spelled, or the smallest power of 2 that keeps
    them small.

    Parameters
    ----------
    n, k : int
        Shape of the matrix.
    scheme : Scheme

    Returns
    -------
    int
        1 where every channel can have its own; never more than cover the matrix.
    """
    channels, spelled = 1, spelled_channels(scheme)
    while channels < min(n, MAX_CHANNELS) and (
        channels < spelled
        if spelled
        else -(-n // channels) * table_bytes(scheme) > TABLE_SHARE * n * k * scheme.bits / 8
    ):
        channels *= 2
    return channels


def channels_of(tensor: QuantizedTensor) -> int:
    """How many output channels share a table, from the tables' shape."""
    n, blocks = len(tensor.codes), len(tensor.tables[_widest_table(tensor.scheme)])
    channels = 1
    while -(-n // channels) > blocks:
        channels *= 2
    return channels


def integer_table(centroids: F16) -> tuple[NDArray[np.int8], F32]:
    """Round tables to int8.

    Parameters
    ----------
    centroids : float16 [T, E]

    Returns
    -------
    int8 [T, E], float32 [T]
        Integers and their step, 0 for a table of zeros.
    """
    values = centroids.astype(np.float32)
    step = np.abs(values).max(axis=1) / np.float32(_LEVELS)
    divisor = np.where(step > 0, step, np.float32(1))[:, None]
    return np.rint(values / divisor).astype(np.int8), step.astype(np.float32)


def restore_table(integers: NDArray[np.int8], step: F32) -> F16:
    """float16 [T, E]: what `integer_table` stands for."""
    return (integers.astype(np.float32) * step[:, None]).astype(np.float16)


def snap(centroids: F16) -> F16:
    """Round every centroid to a multiple of its table's step; a second time changes nothing."""
    return restore_table(*integer_table(centroids))


def settled(table: F16, scheme: Scheme) -> F16:
    """A table as kernels hold it."""
    if cells.has_cells(scheme):
        return cells.snap(table)
    return snap(table) if scheme.integer_acts else table


def levels_of(tensor: QuantizedTensor, bits: int) -> F32:
    """float32 [T, 2^bits]: what the codes of one width stand for, in units of a row's scale."""
    if cells.has_cells(tensor.scheme) and bits > cells.CELL_BITS:
        table = tensor.tables[table_name(cells.CELL_BITS)]
        return cells.levels(table, tensor.tables[cells.HALVES], bits)
    return tensor.tables[table_name(bits)].astype(np.float32)


def _widest_table(scheme: Scheme) -> str:
    most = min(scheme.bits, cells.CELL_BITS) if cells.has_cells(scheme) else scheme.bits
    return table_name(most)


def _tables(scheme: Scheme) -> set[str]:
    """Names of the tables that a tensor of `scheme` has."""
    if cells.has_cells(scheme):
        names = {table_name(b) for b in cells.table_widths(scheme)}
        return names | ({cells.HALVES} if scheme.bits > cells.CELL_BITS else set())
    return {table_name(b) for b in scheme.widths}


def _check(tensor: QuantizedTensor, name: str) -> None:
    scheme = tensor.scheme
    if scheme.family != "anyprec":
        raise BadScheme(f"{name}: scheme {scheme} is not any-precision")
    n, k = check_codes(tensor, name)
    check_array(f"{name}: scales", tensor.scales, "float16", (n, 1))
    wanted = _tables(scheme)
    if set(tensor.tables) != wanted:
        raise BadScheme(f"{name}: tables are {sorted(tensor.tables)}, not {sorted(wanted)}")
    widest = tensor.tables[_widest_table(scheme)]
    blocks = len(widest) if widest.ndim == 2 else 0
    for b in cells.table_widths(scheme) if cells.has_cells(scheme) else scheme.widths:
        table = tensor.tables[table_name(b)]
        check_array(f"{name}: {table_name(b)}", table, "float16", (blocks, 1 << b))
    if cells.HALVES in wanted:
        cells.check_halves(tensor.tables[cells.HALVES], blocks, name)
    if not blocks or -(-n // channels_of(tensor)) != blocks:
        raise BadScheme(
            f"{name}: {blocks} tables for {n} output channels; ceil({n} / a power of 2) is needed"
        )
    wanted_channels = choose_channels(n, k, scheme)
    if spelled_channels(scheme) and wanted_channels != channels_of(tensor):
        raise BadScheme(f"{name}: {blocks} tables for {n} output channels are not {scheme}")


def _dequantize(tensor: QuantizedTensor) -> F32:
    _check(tensor, "weight")
    width = tensor.scheme.bits
    table = levels_of(tensor, width)
    blocks = np.arange(len(tensor.codes)) // channels_of(tensor)
    # [N, K] into the flat tables: entry `code` of the row's block
    index = (blocks << width)[:, None] + tensor.codes
    return np.take(table.reshape(-1), index) * tensor.scales.astype(np.float32)


def _nbytes(tensor: QuantizedTensor) -> int:
    codes = (tensor.codes.size * tensor.scheme.bits + 7) // 8
    blocks = len(tensor.tables[_widest_table(tensor.scheme)])
    return codes + tensor.scales.nbytes + blocks * table_bytes(tensor.scheme)


def _places(tensor: QuantizedTensor) -> list[Place]:
    """Centroids of the widest codes; the rows' scales, which all widths share, stay."""
    rows = np.arange(len(tensor.codes)) // channels_of(tensor)
    codes, table = tensor.codes, _widest_table(tensor.scheme)
    if cells.HALVES in tensor.tables:
        codes = codes >> np.uint8(tensor.scheme.bits - cells.CELL_BITS)
    return [Place(table, rows, codes)]


def _embedding(scheme: Scheme) -> Scheme:
    if scheme.bits == 8:
        return Scheme(8, act_bits=scheme.act_bits)
    return Scheme(scheme.bits, act_bits=scheme.act_bits, group_size=32)


FAMILY = Family(
    name="anyprec",
    grammar=(
        "anyprec{min}-{max}[c{channels}|s][A{1..8|16|32}[g{group}]]: codes of max bits whose upper "
        "bits are every narrower model, down to min; a table of centroids per channel and width, "
        "and from 6 bits on every cell of 5 bits is divided uniformly (c1: a table of each width "
        "instead, c8: shared by 8 channels, s: by so many that tables stay below a tenth of the "
        "codes); activations are A8g32 unless it says so, with A8 they have one scale per token "
        "(groups are only theirs: weights have no scale along the input); bits are chosen at run "
        "time"
    ),
    examples=(
        "anyprec3-8",
        "anyprec2-8",
        "anyprec2-4",
        "anyprec3-8A32",
        "anyprec3-8A8",
        "anyprec3-8c1",
        "anyprec3-8s",
        "anyprec2-4sA8g64",
    ),
    parse=parse_anyprec,
    check=_check,
    dequantize=_dequantize,
    nbytes=_nbytes,
    embedding=_embedding,
    details=lambda tensor: (("channels", channels_of(tensor)),),
    places=_places,
    settled=settled,
    one_width=one_width,
)
"""Any-precision weights."""
