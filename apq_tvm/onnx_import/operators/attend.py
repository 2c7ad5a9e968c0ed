"""The core of every attention operator: scores, softcap, mask, softmax and the mix of values."""

from __future__ import annotations

from dataclasses import dataclass

from apq_tvm.onnx_import.operators.steps import Steps
from apq_tvm.onnx_import.symbolic.dims import Dim


@dataclass(frozen=True)
class Attended:
    """What `attend` computes.

    Parameters
    ----------
    output : value [B, S, N * Hv]
    scores, capped, masked, probabilities : value [B, N, S, T]
        After the product and its scale, the softcap, the mask, the softmax.
    """

    output: str
    scores: str
    capped: str
    masked: str
    probabilities: str


@dataclass(frozen=True)
class Heads:
    """How queries share keys and values: head n reads key head ``n // group``."""

    count: int
    kv: int

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.count // self.kv


def attend(
    steps: Steps,
    q: str,
    k: str,
    v: str,
    heads: Heads,
    scale: float,
    mask: str = "",
    softcap: float = 0.0,
    sink: str = "",
    zero_masked: bool = False,
) -> Attended:
    """softmax(softcap(q kᵀ * scale) + mask) v.

    Parameters
    ----------
    q : value [B, S, N, H]
    k, v : value [B, Nkv, T, H]
    heads : Heads
    scale : float
    mask : value [.., S, T] broadcastable to [B, N, S, T], of four dimensions
        Added to the scores; ``""`` is none.
    softcap : float
        ``c * tanh(score / c)``; 0 is none.
    sink : value [N]
        A score per head that takes its share of the softmax and has no value (attention sinks,
        arXiv:2309.17453); ``""`` is none.
    zero_masked : bool
        Rows that are masked altogether give 0 instead of NaN.
    """
    batch, length, _, size = steps.shape(q, 4)
    total, width = steps.shape(k, 4)[2], steps.shape(v, 4)[3]
    whole = (batch, heads.count, length, total)
    inner: tuple[Dim, ...] = whole
    if heads.group == 1:
        q = steps.transpose(q, 0, 2, 1, 3)
        k = steps.transpose(k, 0, 1, 3, 2)
    else:
        inner = (batch, heads.kv, heads.group, length, total)
        q = steps.reshape(q, batch, length, heads.kv, heads.group, size)
        q = steps.transpose(q, 0, 2, 3, 1, 4)
        k = steps.transpose(steps.reshape(k, batch, heads.kv, 1, total, size), 0, 1, 2, 4, 3)
        v = steps.reshape(v, batch, heads.kv, 1, total, width)
        mask = _grouped(steps, mask, heads) if mask else ""
    scores = steps("Mul", steps("MatMul", q, k), steps.number(scale))
    capped = scores
    if softcap:
        bent = steps("Tanh", steps("Div", scores, steps.number(softcap)))
        capped = steps("Mul", bent, steps.number(softcap))
    masked = steps("Add", capped, mask) if mask else capped
    wide = masked
    if sink:
        ones = (1,) * (len(inner) - 2)
        shape = (1, heads.count, *ones) if heads.group == 1 else (1, heads.kv, heads.group, 1, 1)
        column = steps.expand(steps.reshape(sink, *shape), *inner[:-1], 1)
        wide = steps("Concat", masked, column, axis=len(inner) - 1)
    p = steps("Softmax", wide, axis=len(inner) - 1)
    if zero_masked:
        p = steps("Where", steps("IsNaN", p), steps.number(0.0), p)
    if sink:
        p = _without_last(steps, p, inner)
    y = steps("MatMul", p, v)
    order = (0, 2, 1, 3) if heads.group == 1 else (0, 3, 1, 2, 4)
    y = steps.reshape(steps.transpose(y, *order), batch, length, heads.count * width)
    stages = [scores, capped, masked, p]
    if heads.group != 1:
        stages = [steps.reshape(s, *whole) for s in stages]
    return Attended(y, *stages)


def _grouped(steps: Steps, mask: str, heads: Heads) -> str:
    """A mask [b, n, s, t] for scores [B, Nkv, G, S, T]."""
    b, n, s, t = steps.shape(mask, 4)
    return steps.reshape(mask, b, *((1, 1) if n == 1 else (heads.kv, heads.group)), s, t)


def _without_last(steps: Steps, p: str, shape: tuple[object, ...]) -> str:
    """All but the last column."""
    axis = len(shape) - 1
    attrs = {
        "shape": tuple(d if isinstance(d, int) else str(d) for d in shape),
        "axes": (axis,),
        "starts": (0,),
        "steps": (1,),
    }
    return steps("apq.Slice", p, **attrs)


def outside(steps: Steps, rows: str, total: str, left: int = -1, right: int = 0) -> str:
    """Which keys a query must not read, by position.

    Parameters
    ----------
    rows : value int64 [.., S, 1]
        Positions of the queries.
    total : value int64 [T]
        Positions of the keys.
    left, right : int
        Keys farther back, or farther ahead, are masked; -1 is no limit.

    Returns
    -------
    value bool [.., S, T], or ``""`` if nothing is masked
    """
    found = []
    if right >= 0:
        last = rows if not right else steps("Add", rows, steps.number(right, "int64"))
        found.append(steps("Greater", total, last))
    if left >= 0:
        first = steps("Sub", rows, steps.number(left, "int64"))
        found.append(steps("Less", total, first))
    if len(found) == 2:
        return steps("Or", *found)
    return found[0] if found else ""


def additive(steps: Steps, forbidden: str, low: float = float("-inf")) -> str:
    """0 where a key may be read, `low` where it is forbidden."""
    return steps("Where", forbidden, steps.number(low), steps.number(0.0))


def added(steps: Steps, *masks: str) -> str:
    """The sum of the masks that are there."""
    present = [mask for mask in masks if mask]
    if not present:
        return ""
    total = present[0]
    for mask in present[1:]:
        total = steps("Add", total, mask)
    return total
