"""Let expressions become stack slots, which TVM's simplifier does not look through.

TVM 0.27's simplifier puts the value of a ``Let``, and of the statement ``Bind``, back wherever the
variable stands, and so does LLVM code generation before it asks for bounds. The functions of
`apq_tvm.ops.math` use values several times and nest, so each level multiplies the work:
``erf(tanh(log(exp(x))))`` kept the compiler busy for minutes. LLVM keeps the slots in registers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tvm_ffi
from tvm import ir, tirx

from apq_tvm.schedules.graph.exprs import call_name, collect, lanes_of, uses


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
        lane wide. What an ``if_then_else`` guards is computed in a statement ``if``.
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
        few such scalars and are left as they are, so are functions where no size is unknown but
        one in front, a number of rows or images.
    """
    if func.attrs is not None and str(func.attrs.get("apq.op", "")) == "linear":
        return func
    shapes = [param.shape for param in func.params if tirx.is_buffer_var(param)]
    front = _unknown([extent for shape in shapes for extent in shape[:1]])
    behind = _unknown([extent for shape in shapes for extent in shape[1:]])
    if not behind and len(front) < 2:
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


def _unknown(extents: Sequence[Any]) -> set[str]:
    return {var.name for extent in extents for var in collect(extent, tirx.Var)}


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
    guards = [c for c in collect(given, ir.Call) if call_name(c) == "if_then_else"]
    if any(collect(guard, tirx.Let) for guard in guards):
        if any(lanes_of(guard.args[0]) > 1 for guard in guards):
            return [], given  # no statement says for each lane what holds
        return _Guarded().spilled(given)
    found: list[tuple[Any, Any]] = []

    def take(let: Any) -> Any:
        if not any(let.var.same_as(var) for var, _ in found):
            found.append((let.var, let.value))
        return let.body

    value = tvm_ffi.structural_map(given, (tirx.Let, take))
    before: list[Any] = []
    loads: list[tuple[Any, Any]] = []

    for var, bound in _by_use(found):
        slot = _Slot(var.name, bound.ty)
        before += [slot.made, slot.store(_replaced(bound, loads))]
        loads.append((var, slot.load))
    return before, _replaced(value, loads)


class _Slot:
    """A value on the stack, of one lane or a vector's."""

    def __init__(self, name: str, kind: Any) -> None:
        scalar, _, lanes = str(kind).partition("x")
        zero, count = tirx.const(0, "int32"), int(lanes or 1)
        self._at = tirx.Ramp(zero, tirx.const(1, "int32"), count) if count > 1 else zero
        self._buffer = tirx.decl_buffer((count,), scalar, name)
        self.made = tirx.AllocBuffer(self._buffer)
        self.load = tirx.BufferLoad(self._buffer, [self._at])

    def store(self, value: Any) -> Any:
        return tirx.BufferStore(self._buffer, value, [self._at])


class _Guarded:
    """Slots of a value in which an ``if_then_else`` guards a ``Let``.

    Such a guard becomes a variable too, whose slot a statement ``if`` fills. A slot is filled in
    front of what reads it, within the same case of a guard: nothing is computed that was not.
    """

    def __init__(self) -> None:
        self._lets: list[tuple[Any, Any]] = []
        self._guards: list[tuple[Any, Any]] = []

    def spilled(self, given: Any) -> tuple[list[Any], Any]:
        """Statements, and the value that reads the slots they fill."""
        rules = ((tirx.Let, self._take_let), (ir.Call, self._take_guard))
        value = tvm_ffi.structural_map(given, rules)
        before, loads = self._filled([value], [])
        return before, _replaced(value, loads)

    def _take_let(self, let: Any) -> Any:
        if not any(let.var.same_as(var) for var, _ in self._lets):
            self._lets.append((let.var, let.value))
        return let.body

    def _take_guard(self, call: Any) -> Any:
        if call_name(call) != "if_then_else" or not self._read_by(*call.args[1:]):
            return call
        var = tirx.Var("guarded", call.ty)
        self._guards.append((var, call))
        return var

    def _read_by(self, *values: Any) -> list[tuple[Any, Any]]:
        """Bindings that any of the values reads itself, in the order of their definitions."""
        known = [*self._lets, *self._guards]
        return [b for b in known if any(uses(value, b[0]) for value in values)]

    def _filled(
        self, values: Sequence[Any], seen: list[tuple[Any, Any]]
    ) -> tuple[list[Any], list[tuple[Any, Any]]]:
        """Statements for all that the values read, and loads by variable, those seen among them."""
        before: list[Any] = []
        loads = list(seen)

        def fill(var: Any, bound: Any) -> None:
            if any(var.same_as(known) for known, _ in loads):
                return
            guard = any(var.same_as(other) for other, _ in self._guards)
            for other in self._read_by(bound.args[0]) if guard else self._read_by(bound):
                fill(*other)
            slot = _Slot(var.name, bound.ty)
            if guard:
                condition, *cases = bound.args
                for other in self._read_by(cases[0]):
                    if uses(cases[1], other[0]):
                        fill(*other)  # whichever case it is
                then, other_case = (self._case(case, slot, loads) for case in cases)
                stored = tirx.IfThenElse(_replaced(condition, loads), then, other_case)
            else:
                stored = slot.store(_replaced(bound, loads))
            before.extend((slot.made, stored))
            loads.append((var, slot.load))

        for binding in self._read_by(*values):
            fill(*binding)
        return before, loads

    def _case(self, value: Any, slot: _Slot, seen: list[tuple[Any, Any]]) -> Any:
        before, loads = self._filled([value], seen)
        return tirx.stmt_seq(*before, slot.store(_replaced(value, loads)))


def _replaced(expr: Any, loads: Sequence[tuple[Any, Any]]) -> Any:
    """Every variable that has a slot as a load of it."""

    def read(var: Any) -> Any:
        return next((load for known, load in loads if known.same_as(var)), var)

    return tvm_ffi.structural_map(expr, (tirx.Var, read))


def _by_use(found: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Every binding after those it uses."""
    ordered: list[tuple[Any, Any]] = []
    while found:
        ready = [b for b in found if not any(uses(b[1], other) for other, _ in found)]
        ordered += ready
        found = [b for b in found if not any(b[0].same_as(done) for done, _ in ready)]
    return ordered
