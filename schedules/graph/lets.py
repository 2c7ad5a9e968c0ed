"""Let expressions become stack slots, which TVM's simplifier does not look through.

TVM 0.27's simplifier puts the value of a ``Let``, and of the statement ``Bind``, back wherever the
variable stands, and so does LLVM code generation before it asks for bounds. The functions of
`apq_tvm.ops.math` use values several times and nest, so each level multiplies the work:
``erf(tanh(log(exp(x))))`` kept the compiler busy for minutes. LLVM keeps the slots in registers.
"""

from __future__ import annotations

from typing import Any

import tvm_ffi
from tvm import ir, tirx

from apq_tvm.schedules.graph.exprs import call_name, collect, uses


def spill_lets(func: Any) -> Any:
    """Store the value of every ``Let`` in a slot of its own, in front of the store that reads it.

    Parameters
    ----------
    func : tvm.tirx.PrimFunc
        Scheduled.

    Returns
    -------
    tvm.tirx.PrimFunc
        Functions with loops that TVM has yet to vectorize are left as they are: a slot would be one
        lane wide. So are stores whose ``Let`` stands inside an ``if_then_else``: what the condition
        guards must not be computed before it.
    """
    if any(loop.kind == tirx.ForKind.VECTORIZED for loop in collect(func.body, tirx.For)):
        return func
    rules = ((tirx.BufferStore, _spill_store), (tirx.Evaluate, _spill_masked_store))
    return func.with_body(tvm_ffi.structural_map(func.body, rules))


LARGE = 5000
"""Variables of a value, all bindings put back, from which on TVM takes longer for it than LLVM.

That of ``gelu`` has 13000, of ``silu`` 2000."""


def spill_large(func: Any) -> Any:
    """Store values of every ``Let`` in slots, lanes and all, where putting them back costs much.

    Meant for what TVM has vectorized: ``gelu`` of 16 lanes then takes a tenth of the time, and
    LLVM keeps the slots in registers.

    Parameters
    ----------
    func : tvm.tirx.PrimFunc
        Without loops to vectorize.

    Returns
    -------
    tvm.tirx.PrimFunc
    """

    def spilled(store: Any) -> Any:
        return _spill_store(store) if size_put_back(store.value) > LARGE else store

    return func.with_body(tvm_ffi.structural_map(func.body, (tirx.BufferStore, spilled)))


_COSTLY = (tirx.FloorDiv, tirx.FloorMod, tirx.Div, tirx.Mod, tirx.Min, tirx.Max, tirx.Select)


def hide_binds(func: Any) -> Any:
    """Let scalars that are bound to quotients, minima and the like come out of slots.

    Parameters
    ----------
    func : tvm.tirx.PrimFunc
        Without blocks, or with opaque ones.

    Returns
    -------
    tvm.tirx.PrimFunc
        TVM's simplifier would put such a value back at every use, and then ask itself what is known
        of each index: most of what a kernel on images of unknown sizes took. Linear layers have
        few such scalars and are left as they are, so are functions with one unknown size or none.
    """
    if func.attrs is not None and str(func.attrs.get("apq.op", "")) == "linear":
        return func
    extents = [extent for p in func.params if tirx.is_buffer_var(p) for extent in p.shape]
    unknown = {var.name for extent in extents for var in collect(extent, tirx.Var)}
    if len(unknown) < 2:
        return func

    def hidden(bind: Any) -> Any:
        value = bind.value
        kind = str(bind.var.ty)
        if kind not in ("int64", "int32") or not any(collect(value, k) for k in _COSTLY):
            return bind
        slot = tirx.decl_buffer((1,), kind, bind.var.name)
        zero = tirx.const(0, "int32")
        return tirx.stmt_seq(
            tirx.AllocBuffer(slot),
            tirx.BufferStore(slot, value, [zero]),
            tirx.Bind(bind.var, tirx.BufferLoad(slot, [zero])),
        )

    return func.with_body(tvm_ffi.structural_map(func.body, (tirx.Bind, hidden)))


def size_put_back(value: Any) -> int:
    """Variables in `value` if what its bindings stand for stood in their place, again and again."""
    lets = collect(value, tirx.Let)
    sizes: dict[int, int] = {}

    def size(expr: Any) -> int:
        return sum(map(of, collect(expr, tirx.Var)))

    def of(var: Any) -> int:
        number = next((i for i, let in enumerate(lets) if let.var.same_as(var)), None)
        if number is None:
            return 1
        if number not in sizes:
            sizes[number] = size(lets[number].value)
        return sizes[number]

    return size(value) if lets else 0


def _spill_store(store: Any) -> Any:
    before, value = _spilled(store.value)
    if not before:
        return store
    return tirx.stmt_seq(*before, tirx.BufferStore(store.buffer, value, list(store.indices)))


def _spill_masked_store(statement: Any) -> Any:
    """What a tail's masked store writes; the loads in it are masked themselves."""
    call = statement.value
    if not isinstance(call, ir.Call) or call_name(call) != "masked_store":
        return statement
    buffer, given, *rest = call.args
    before, value = _spilled(given)
    if not before:
        return statement
    return tirx.stmt_seq(*before, tirx.Evaluate(tirx.op.masked_store(buffer, value, *rest)))


def _spilled(given: Any) -> tuple[list[Any], Any]:
    """Statements that store every ``Let`` of a value in a slot, and the value that reads them."""
    if _guards_a_let(given):
        return [], given
    found: list[tuple[Any, Any]] = []

    def take(let: Any) -> Any:
        if not any(let.var.same_as(var) for var, _ in found):
            found.append((let.var, let.value))
        return let.body

    value = tvm_ffi.structural_map(given, (tirx.Let, take))
    before: list[Any] = []
    loads: list[tuple[Any, Any]] = []

    def read_slots(expr: Any) -> Any:
        def read(var: Any) -> Any:
            return next((load for known, load in loads if known.same_as(var)), var)

        return tvm_ffi.structural_map(expr, (tirx.Var, read))

    for var, bound in _by_use(found):
        scalar, lanes = _scalar_and_lanes(bound)
        slot = tirx.decl_buffer((lanes,), scalar, var.name)
        zero = tirx.const(0, "int32")
        at = tirx.Ramp(zero, tirx.const(1, "int32"), lanes) if lanes > 1 else zero
        before += [tirx.AllocBuffer(slot), tirx.BufferStore(slot, read_slots(bound), [at])]
        loads.append((var, tirx.BufferLoad(slot, [at])))
    return before, read_slots(value)


def _scalar_and_lanes(value: Any) -> tuple[str, int]:
    scalar, _, lanes = str(value.ty).partition("x")
    return scalar, int(lanes or 1)


def _by_use(found: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Every binding after those it uses."""
    ordered: list[tuple[Any, Any]] = []
    while found:
        ready = [b for b in found if not any(uses(b[1], other) for other, _ in found)]
        ordered += ready
        found = [b for b in found if not any(b[0].same_as(done) for done, _ in ready)]
    return ordered


def _guards_a_let(value: Any) -> bool:
    guards = [c for c in collect(value, ir.Call) if call_name(c) == "if_then_else"]
    return any(collect(guard, tirx.Let) for guard in guards)
