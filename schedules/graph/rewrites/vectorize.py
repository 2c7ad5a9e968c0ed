"""Vectorization of innermost loops whose extent is known only at run time.

TVM's ``vectorize`` wants a constant extent: a dynamic loop has to be split with a predicate, and a
predicate inside a vectorized loop makes the whole loop scalar. `vectorize_loops` works on lowered
loops (no blocks, flat buffers) instead and turns::

    for j in range(n):            # any n
        y[j] = f(x[j])
        s[0] = s[0] + g(y[j])

into a main loop of whole vectors (``unroll`` of them at a time, one accumulator each), a loop of
single vectors and one masked vector for the rest, followed by a pairwise sum of the accumulators.
Masked lanes are never read or written (``llvm.masked.load``), so nothing is padded. SSE and NEON
have no masks; the rest is a scalar loop there (LLVM makes a branch per lane of a mask). A loop that
does not fit (an index that is no linear function of the loop variable, a call without a vector
form, a dependence between iterations) is left as it was.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import tvm_ffi
from tvm import ir, sym, tirx

from apq_tvm.schedules.graph.exprs import call_name, lanes_of, masked_select, substitute, uses
from apq_tvm.tensorize.exprs import Expr, Stmt

_BINARY = (
    tirx.Add, tirx.Sub, tirx.Mul, tirx.Div, tirx.Mod, tirx.FloorDiv, tirx.FloorMod, tirx.Min,
    tirx.Max, tirx.EQ, tirx.NE, tirx.LT, tirx.LE, tirx.GT, tirx.GE, tirx.And, tirx.Or,
    tirx.LShift, tirx.RShift, tirx.BitwiseAnd, tirx.BitwiseOr, tirx.BitwiseXor,
)  # fmt: skip

# Calls that LLVM has as instructions on vectors, or splits into lanes by itself.
_LANEWISE = frozenset(
    (
        "abs", "fabs", "floor", "ceil", "round", "trunc", "nearbyint", "sqrt", "exp", "exp2", "log",
        "log2", "log10", "pow", "sin", "cos", "fma", "reinterpret", "shift_left", "shift_right",
        "bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not", "copysign",
    )
)  # fmt: skip

# Lanes of a store to one place are reduced with these; the second entry is the neutral element.
_REDUCTIONS: dict[type, Callable[[str], Expr]] = {
    tirx.Add: lambda dtype: tirx.const(0, dtype),
    tirx.Mul: lambda dtype: tirx.const(1, dtype),
    tirx.Max: lambda dtype: _lowest(dtype),
    tirx.Min: lambda dtype: tirx.infinity(dtype) if "float" in dtype else tirx.max_value(dtype),
}


def _lowest(dtype: str) -> Expr:
    return -tirx.infinity(dtype) if "float" in dtype else tirx.min_value(dtype)


class NotVector(Exception):
    """This loop cannot be vectorized; the message says why."""


def _vector_type(expr: Expr, lanes: int) -> str:
    return f"{expr.ty}x{lanes}"


@dataclass
class _Reduction:
    """One ``buffer[index] = op(buffer[index], value)`` with an index the loop does not change."""

    buffer: Any
    index: Expr
    op: type
    dtype: str
    accumulators: Any = None

    def fits(self, store: Any) -> bool:
        return bool(store.buffer.same_as(self.buffer)) and bool(
            tvm_ffi.structural_equal(store.indices[0], self.index)
        )


@dataclass
class Loop:
    """What is known of one innermost loop while it is rewritten."""

    var: Any
    lanes: int
    masks: bool = True
    stores: list[Any] = field(default_factory=list)
    reductions: list[_Reduction] = field(default_factory=list)
    analyzer: Any = field(default_factory=sym.Analyzer)

    def stride(self, index: Expr) -> Expr | None:
        """Elements between neighbouring iterations; None if they are not evenly spaced."""
        if not uses(index, self.var):
            return tirx.const(0, str(index.ty))
        coefficients = sym.detect_linear_equation(index, [self.var])
        if not coefficients or uses(coefficients[0], self.var):
            return None
        return self.analyzer.simplify(coefficients[0])


class Vectorizer:
    """Rewrites the body of one loop for one position: base, mask and accumulator set."""

    def __init__(self, loop: Loop, base: Expr, mask: Expr | None, accumulator: int) -> None:
        self.loop = loop
        self.base = base
        self.mask = mask
        self.accumulator = accumulator
        self.scope: list[tuple[Any, Any]] = []

    def wide(self, expr: Expr) -> Expr:
        """`expr` as a vector."""
        return expr if lanes_of(expr) > 1 else tirx.Broadcast(expr, self.loop.lanes)

    def expr(self, e: Expr) -> Expr:
        """`e` at `lanes` consecutive iterations; a scalar where it does not change."""
        if isinstance(e, tirx.Var):
            return self._var(e)
        if isinstance(e, ir.TensorLoad):
            return self._load(e)
        if isinstance(e, _BINARY):
            a, b = self.expr(e.a), self.expr(e.b)
            if lanes_of(a) != lanes_of(b):
                a, b = self.wide(a), self.wide(b)
            return type(e)(a, b)
        if isinstance(e, tirx.Cast):
            value = self.expr(e.value)
            lanes = lanes_of(value)
            return tirx.Cast(_vector_type(e, lanes) if lanes > 1 else str(e.ty), value)
        if isinstance(e, tirx.Not):
            return tirx.Not(self.expr(e.a))
        if isinstance(e, tirx.BitwiseNot):
            return tirx.BitwiseNot(self.expr(e.a))
        if isinstance(e, tirx.Select):
            return self._select(e.condition, e.true_value, e.false_value)
        if isinstance(e, tirx.Let):
            return self._let(e)
        if isinstance(e, ir.Call):
            return self._call(e)
        if isinstance(e, tirx.IntImm | tirx.FloatImm | ir.StringImm):
            return e
        raise NotVector(f"{type(e).__name__} has no vector form")

    def _var(self, var: Any) -> Expr:
        if var.same_as(self.loop.var):
            return tirx.Ramp(self.base, tirx.const(1, str(var.ty)), self.loop.lanes)
        for old, new in reversed(self.scope):
            if old.same_as(var):
                return new
        return var

    def _select(self, condition: Expr, yes: Expr, no: Expr) -> Expr:
        c, a, b = self.expr(condition), self.expr(yes), self.expr(no)
        if max(map(lanes_of, (c, a, b))) > 1:
            c, a, b = self.wide(c), self.wide(a), self.wide(b)
        return tirx.Select(c, a, b)

    def _let(self, e: Any) -> Expr:
        value = self.expr(e.value)
        var = tirx.Var(e.var.name, str(value.ty))
        self.scope.append((e.var, var))
        body = self.expr(e.body)
        self.scope.pop()
        return tirx.Let(var, value, body)

    def _call(self, e: Any) -> Expr:
        if not uses(e, self.loop.var) and not self.scope:
            return e
        name = call_name(e)
        if name == "if_then_else":
            return self._guarded(e)
        args = [self.expr(a) for a in e.args]
        if all(lanes_of(a) == 1 for a in args):
            return ir.Call(e.op, args, e.attrs, e.ty_args, ret_ty=e.ty)
        if name not in _LANEWISE:
            raise NotVector(f"{name} has no vector form")
        args = [self.wide(a) for a in args]
        ty = _vector_type(e, self.loop.lanes)
        return ir.Call(e.op, args, e.attrs, e.ty_args, ret_ty=ty)

    def _guarded(self, e: Any) -> Expr:
        """``if_then_else``: its branches may only be loaded where they are taken."""
        condition = self.expr(e.args[0])
        if lanes_of(condition) == 1:
            yes, no = self.wide(self.expr(e.args[1])), self.wide(self.expr(e.args[2]))
            return tirx.if_then_else(condition, yes, no)
        if not self.loop.masks:
            raise NotVector("the device has no masks")
        outer = self.mask
        other = tirx.Not(condition)
        self.mask = condition if outer is None else tirx.And(outer, condition)
        yes = self.wide(self.expr(e.args[1]))
        self.mask = other if outer is None else tirx.And(outer, other)
        no = self.wide(self.expr(e.args[2]))
        self.mask = outer
        return masked_select(condition, yes, no)

    def _index(self, buffer: Any, indices: Any) -> tuple[Expr, bool]:
        """The rewritten index and whether it is one run of consecutive elements."""
        if len(indices) != 1:
            raise NotVector(f"{buffer.name} is not flat")
        stride = self.loop.stride(indices[0])
        if stride is None:
            return self.expr(indices[0]), False
        if isinstance(stride, tirx.IntImm) and int(stride) == 0:
            return self._scalar(indices[0]), False
        base = self._scalar(substitute(indices[0], self.loop.var, self.base))
        if str(base.ty) != str(stride.ty):
            stride = stride.astype(str(base.ty))
        ramp = tirx.Ramp(base, stride, self.loop.lanes)
        return ramp, isinstance(stride, tirx.IntImm) and int(stride) == 1

    def _scalar(self, e: Expr) -> Expr:
        value = self.expr(e)
        if lanes_of(value) > 1:
            raise NotVector("an index is computed from a vector")
        return value

    def _load(self, e: Any) -> Expr:
        index, run = self._index(e.source, e.indices)
        if lanes_of(index) == 1:
            if self.mask is not None and uses(self.mask, self.loop.var):
                raise NotVector("a guarded load of one element")
            return tirx.BufferLoad(e.source, [index])
        if self.mask is None:
            pairs = _every_other(e.source, index)
            return tirx.BufferLoad(e.source, [index]) if pairs is None else pairs
        if not run:
            raise NotVector(f"{e.source.name} is gathered under a mask")
        return tirx.op.masked_load(_vector_type(e, self.loop.lanes), e.source, index, self.mask)

    def store(self, s: Any) -> Stmt:
        """One store or reduction step at this position."""
        for r in self.loop.reductions:
            if r.fits(s):
                return self._accumulate(r, s)
        return self.write(s.buffer, self.wide(self.expr(s.value)), s.indices)

    def write(self, buffer: Any, value: Expr, indices: Any) -> Stmt:
        """Store a vector where the scalar code stores at `indices`."""
        index, run = self._index(buffer, indices)
        if self.mask is None:
            return tirx.BufferStore(buffer, value, [index])
        if not run:
            raise NotVector(f"{buffer.name} is scattered under a mask")
        return tirx.Evaluate(tirx.op.masked_store(buffer, value, index, self.mask))

    def _accumulate(self, r: _Reduction, s: Any) -> Stmt:
        value = self.wide(self.expr(s.value.b))
        lanes = self.loop.lanes
        if self.mask is not None:
            neutral = tirx.Broadcast(_REDUCTIONS[r.op](r.dtype), lanes)
            value = masked_select(self.mask, value, neutral)
        at = [tirx.Ramp(tirx.const(self.accumulator * lanes, "int32"), 1, lanes)]
        return tirx.BufferStore(
            r.accumulators, r.op(tirx.BufferLoad(r.accumulators, at), value), at
        )


def _every_other(buffer: Any, index: Expr) -> Expr | None:
    """A load at stride 2 as two whole vectors and one shuffle; None for other indices.

    The second vector starts one element early, so that nothing past the last element is read.
    """
    if not isinstance(index, tirx.Ramp) or not isinstance(index.stride, tirx.IntImm):
        return None
    lanes = int(index.lanes)
    if int(index.stride) != 2 or lanes < 4:
        return None
    one, dtype = tirx.const(1, str(index.base.ty)), str(index.base.ty)
    parts = [
        tirx.BufferLoad(buffer, [tirx.Ramp(start, one, lanes)])
        for start in (index.base, index.base + tirx.const(lanes - 1, dtype))
    ]
    places = [*range(0, lanes, 2), *range(lanes + 1, 2 * lanes, 2)]
    return tirx.Shuffle(parts, [tirx.const(i, "int32") for i in places])


def _stores(body: Stmt) -> list[Any]:
    """The straight-line stores of a loop body."""
    parts = list(body.seq) if isinstance(body, tirx.SeqStmt) else [body]
    for part in parts:
        if not isinstance(part, tirx.BufferStore):
            raise NotVector(f"the body holds a {type(part).__name__}")
    return parts


def _analyse(loop: Loop) -> None:
    """Find the reductions and make sure that iterations do not depend on each other."""
    for s in loop.stores:
        if len(s.indices) != 1:
            raise NotVector(f"{s.buffer.name} is not flat")
        stride = loop.stride(s.indices[0])
        if stride is None:
            raise NotVector(f"{s.buffer.name} is stored at an irregular index")
        if loop.analyzer.can_prove_equal(stride, tirx.const(0, str(stride.ty))):
            loop.reductions.append(_reduction(loop, s))
        elif not (isinstance(stride, tirx.IntImm) and int(stride) > 0):
            raise NotVector(f"{s.buffer.name} is stored at a stride known only at run time")
    for s in loop.stores:
        reduced = any(r.fits(s) for r in loop.reductions)
        _check_loads(loop, s.value.b if reduced else s.value)


def _reduction(loop: Loop, s: Any) -> _Reduction:
    value = s.value
    if type(value) not in _REDUCTIONS:
        raise NotVector(f"{s.buffer.name} is overwritten in every iteration")
    left = value.a
    if not (
        isinstance(left, ir.TensorLoad)
        and left.source.same_as(s.buffer)
        and tvm_ffi.structural_equal(left.indices[0], s.indices[0])
    ):
        raise NotVector(f"{s.buffer.name} is not reduced")
    if any(r.fits(s) for r in loop.reductions):
        raise NotVector(f"{s.buffer.name} is reduced twice")
    return _Reduction(s.buffer, s.indices[0], type(value), str(value.ty))


def _check_loads(loop: Loop, value: Expr) -> None:
    """Every load of a buffer the loop writes must be of the element this iteration wrote."""

    loads: list[Any] = []

    def keep(load: Any) -> Any:
        loads.append(load)
        return load

    tvm_ffi.structural_map(value, (ir.TensorLoad, keep))
    for load in loads:
        for s in loop.stores:
            if load.source.same_as(s.buffer) and (
                not loop.analyzer.can_prove_equal(load.indices[0], s.indices[0])
                or any(r.fits(s) for r in loop.reductions)
            ):
                raise NotVector(f"{s.buffer.name} is read at another place than it is written")


def _combine(r: _Reduction, lanes: int, unroll: int) -> list[Stmt]:
    """Accumulators → one value → the reduced element."""
    acc = r.accumulators
    out: list[Stmt] = []

    def fold(width: int, other: int) -> Stmt:
        if width == 1:
            here, there = [tirx.const(0, "int32")], [tirx.const(other, "int32")]
        else:
            here = [tirx.Ramp(tirx.const(0, "int32"), 1, width)]
            there = [tirx.Ramp(tirx.const(other, "int32"), 1, width)]
        value = r.op(tirx.BufferLoad(acc, here), tirx.BufferLoad(acc, there))
        return tirx.BufferStore(acc, value, here)

    out.extend(fold(lanes, u * lanes) for u in range(1, unroll))
    width = lanes // 2
    while width:
        out.append(fold(width, width))
        width //= 2
    total = r.op(
        tirx.BufferLoad(r.buffer, [r.index]), tirx.BufferLoad(acc, [tirx.const(0, "int32")])
    )
    out.append(tirx.BufferStore(r.buffer, total, [r.index]))
    return out


def _emit(loop: Loop, extent: Expr, unroll: int) -> list[Stmt]:
    """Main loop, single vectors and the masked rest of a loop from 0 to `extent`."""
    dtype = str(extent.ty)
    simplify = loop.analyzer.simplify
    lanes = loop.lanes

    def const(value: int) -> Expr:
        return tirx.const(value, dtype)

    def step(base: Expr, mask: Expr | None, accumulator: int) -> list[Stmt]:
        v = Vectorizer(loop, base, mask, accumulator)
        return [v.store(s) for s in loop.stores]

    def run(count: Expr, first: Expr, vectors: int) -> list[Stmt]:
        if isinstance(count, tirx.IntImm) and int(count) == 0:
            return []
        var = tirx.Var("vo", dtype)
        body: list[Stmt] = []
        for u in range(vectors):
            body += step(first + var * const(lanes * vectors) + const(u * lanes), None, u)
        return [tirx.For(var, const(0), count, tirx.ForKind.SERIAL, tirx.stmt_seq(*body))]

    block = const(lanes * unroll)
    out = run(simplify(extent // block), const(0), unroll)
    if unroll > 1:
        done = simplify(extent // block * block)
        out += run(simplify((extent - done) // const(lanes)), done, 1)
    rest = simplify(extent % const(lanes))
    if not (isinstance(rest, tirx.IntImm) and int(rest) == 0):
        base = simplify(extent // const(lanes) * const(lanes))
        try:
            if not loop.masks:
                raise NotVector("the device has no masks")
            lane = tirx.Ramp(const(0), const(1), lanes)
            tail = tirx.stmt_seq(*step(base, tirx.LT(lane, tirx.Broadcast(rest, lanes)), 0))
            if not isinstance(rest, tirx.IntImm):
                tail = tirx.IfThenElse(rest > 0, tail, None)
        except NotVector:  # nor have gathers a masked form
            var = tirx.Var("vt", dtype)
            body = tirx.stmt_seq(*(substitute(s, loop.var, base + var) for s in loop.stores))
            tail = tirx.For(var, const(0), rest, tirx.ForKind.SERIAL, body)
        out.append(tail)
    return out


def vectorize_loop(for_loop: Any, vector_bytes: int, unroll: int = 1) -> Stmt:
    """One innermost loop as vectors, or the loop itself where it does not fit.

    Parameters
    ----------
    for_loop : tvm.tirx.For
        Lowered: flat buffers, no blocks, stores only.
    vector_bytes : int
        Of one vector register. The widest element the loop stores decides the lanes.
    unroll : int
        Vectors per iteration of the main loop, each with accumulators of its own.

    Returns
    -------
    tvm.tirx.Stmt
    """
    try:
        stores = _stores(for_loop.body)
        width = max(tvm_ffi.dtype(str(s.value.ty)).bits for s in stores)
        if any(lanes_of(s.value) > 1 for s in stores):
            raise NotVector("the body is vectorized already")
        loop = Loop(for_loop.loop_var, vector_bytes * 8 // max(width, 32), vector_bytes >= 32)
        shift = for_loop.min
        loop.stores = stores
        if not (isinstance(shift, tirx.IntImm) and int(shift) == 0):
            raise NotVector("the loop does not start at 0")
        _analyse(loop)
        if isinstance(for_loop.extent, tirx.IntImm):
            extent = int(for_loop.extent)
            if extent < 4:
                raise NotVector("too short")
            while loop.lanes > extent:
                loop.lanes //= 2
            unroll = max(1, min(unroll, extent // loop.lanes))
        before: list[Stmt] = []
        after: list[Stmt] = []
        for r in loop.reductions:
            size = loop.lanes * unroll
            r.accumulators = tirx.decl_buffer((size,), r.dtype, f"{r.buffer.name}_lanes")
            before.append(tirx.AllocBuffer(r.accumulators))
            neutral = tirx.Broadcast(_REDUCTIONS[r.op](r.dtype), loop.lanes)
            before += [
                tirx.BufferStore(
                    r.accumulators, neutral, [tirx.Ramp(tirx.const(at, "int32"), 1, loop.lanes)]
                )
                for at in range(0, size, loop.lanes)
            ]
            after += _combine(r, loop.lanes, unroll)
        return tirx.stmt_seq(*before, *_emit(loop, for_loop.extent, unroll), *after)
    except NotVector:
        return for_loop


def vectorize_loops(func: Any, vector_bytes: int, unroll: int = 1) -> Any:
    """Vectorize every innermost serial loop of a lowered function that allows it.

    Parameters
    ----------
    func : tvm.tirx.PrimFunc
        After `apq_tvm.schedules.graph.rewrites.lowering.lower_blocks`.
    vector_bytes, unroll : int
        As in `vectorize_loop`.

    Returns
    -------
    tvm.tirx.PrimFunc
    """

    def visit(node: Any) -> Any:
        if node.kind != tirx.ForKind.SERIAL:
            return node
        return vectorize_loop(node, vector_bytes, unroll)

    return func.with_body(tvm_ffi.structural_map(func.body, (tirx.For, visit)))
