"""What is where: arguments of attention as flat views, and strides by logical axes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tvm import sym, tirx

from apq_tvm.ops.graph.attention import Attended
from apq_tvm.ops.graph.shapes import stored_index
from apq_tvm.schedules.graph.attention.codes import padded
from apq_tvm.schedules.graph.attention.made import Made
from apq_tvm.schedules.graph.attention.maker import maker_of
from apq_tvm.schedules.graph.attention.scratch import BLOCK, Rows
from apq_tvm.schedules.graph.panel import flat_views, strides
from apq_tvm.tensorize.exprs import Expr, Stmt, i64

if TYPE_CHECKING:
    from apq_tvm.tensorize.meaning.four_dot import FourDot


@dataclass(frozen=True)
class Problem:
    """Flat arguments and their strides, by logical axes."""

    spec: Attended
    q: Any
    keys: Any
    values: Any
    mask: Any
    sink: Any
    y: Any
    q_steps: tuple[Expr, ...]
    """Of batch, head of keys, head in the group, query; columns last."""
    y_steps: tuple[Expr, ...]
    mask_steps: tuple[Expr, ...]
    value_steps: tuple[Expr, ...]
    """Of token, batch, head."""
    key_steps: tuple[Expr, ...]
    """Likewise, of 16 tokens."""
    batch: Expr
    heads: int
    queries: Expr
    tokens: Expr
    size: int
    width: int
    columns: int
    """Of a row of q in scratch."""
    made: Made | None
    """What q is made of, where it is no argument."""
    vector_bytes: int
    key_scales: Any = None
    value_scales: Any = None
    scale_steps: tuple[Expr, ...] = ()
    """Of 16 tokens, batch, head."""
    span_steps: tuple[Expr, ...] = ()
    """Likewise, of values that are int4."""
    dot: FourDot | None = None
    """What multiplies codes of keys as they are; without it they become floats."""

    def parts(self, rows: Rows) -> Expr:
        """How many parts of so many blocks the keys are."""
        keys = rows.part * BLOCK
        return sym.Analyzer().simplify((self.tokens + i64(keys - 1)) // i64(keys))


def read_problem(
    func: Any, vector_bytes: int, dot: FourDot | None = None
) -> tuple[list[Stmt], Problem]:
    """Views of the arguments, and what they mean; int8 keys are for `dot`, if there is one."""
    spec = Attended.of(func)
    declared, views = flat_views(func)
    made, params, views = _made(func, views)
    rest = list(zip(params[3:-1], views[3:-1], strict=True))
    scales = [rest.pop(0) for _ in range(2 * spec.coded)]
    mask = rest.pop(0) if spec.masked else None
    q, keys, values, y = params[0], params[1], params[2], params[-1]
    logical = [q.shape[p] for p in spec.order]
    steps = [strides(q.shape)[p] for p in spec.order]
    out = stored_index(spec.order_out, strides(y.shape))  # by logical axes
    spread = [strides(values.shape)[p] for p in spec.order_values]
    by_key, size = strides(keys.shape), int(logical[-1])
    problem = Problem(
        spec, views[0], views[1], views[2], mask[1] if mask else None,
        rest[0][1] if spec.sink else None, views[-1],
        _grouped(steps, spec.group), _grouped(out, spec.group),
        _mask_steps(mask[0].shape, logical, spec.group) if mask else (),
        (*spread[:2], spread[2] if len(spread) == 4 else i64(0)), tuple(by_key[:3]),
        keys.shape[1], int(keys.shape[2]), logical[-2],
        values.shape[spec.order_values[0]], size, int(y.shape[-1]),
        padded(size) if spec.coded else size,
        made, vector_bytes,
    )  # fmt: skip
    if scales:
        steps, other = (strides(scale.shape)[:3] for scale, _ in scales)
        by_scale = {"key_scales": scales[0][1], "value_scales": scales[1][1]}
        problem = replace(problem, **by_scale, dot=dot, scale_steps=tuple(steps))
        if spec.nibbles:
            problem = replace(problem, span_steps=tuple(other))
    return declared, problem


def _made(func: Any, views: list[Any]) -> tuple[Made | None, list[Any], list[Any]]:
    """What q is made of, if it is, and arguments and views with one in its place."""
    params, known = list(func.params), maker_of(func)
    if known is None:
        return None, params, views
    count = len(known[0].params) - 1
    made = Made.of(known[0]).through(params[:count], views[:count])
    q = tirx.decl_buffer(made.shape, "float32", "q")
    return made, [q, *params[count:]], [None, *views[count:]]


def _grouped(steps: Sequence[Expr], group: int) -> tuple[Expr, ...]:
    """Strides of batch, head of keys, head in the group, query and column."""
    if len(steps) == 5:
        return tuple(steps)
    if len(steps) == 3:
        return (steps[0], i64(0), i64(0), *steps[1:])
    return (steps[0], steps[1] * i64(group), *steps[1:])


def _mask_steps(shape: Sequence[Expr], logical: Sequence[Expr], group: int) -> tuple[Expr, ...]:
    """Strides of batch, head of keys, head in the group and query, 0 where the mask repeats."""
    own = strides(shape)
    kept = [i64(0) if _is_one(d) else s for d, s in zip(shape[:-1], own[:-1], strict=True)]
    steps = [i64(0)] * (len(logical) - len(shape)) + kept
    return _grouped([*steps, i64(1)], group)[:4]


def _is_one(extent: Expr) -> bool:
    return isinstance(extent, tirx.IntImm) and int(extent) == 1
