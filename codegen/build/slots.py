"""Integers that are bound come out of slots, which LLVM code generation does not look through.

TVM 0.27 binds each variable in an analyzer as it writes LLVM IR, simplifies its value there, and
puts what it stands for back wherever it is used. Where values are bound to quotients, minima and
selections of one another that grows with every level: of a GEMM it took 1.0 s of 1.1, and the code
is the same to the byte.
"""

from __future__ import annotations

from typing import Any

import tvm_ffi
from tvm import ir, sym, tirx

from apq_tvm.schedules.graph.exprs import collect

_INTEGERS = ("int32", "int64")
_COSTLY = (tirx.FloorDiv, tirx.FloorMod, tirx.Div, tirx.Mod, tirx.Min, tirx.Max, tirx.Select)
_SHORT = (tirx.IntImm, tirx.Var, ir.Call)
_ZERO = tirx.const(0, "int32")


def bind_slots(func: Any) -> Any:
    """Store the values of scalar integers in slots, in front of the bindings, which read them.

    Parameters
    ----------
    func : tvm.tirx.PrimFunc
        After all passes.

    Returns
    -------
    tvm.tirx.PrimFunc
        What is known to be even stays: code generation asks for the alignment of addresses, and
        nothing else. Of such a value the quotients and the like that are not even have slots. LLVM
        keeps all of them in registers.
    """
    return func.with_body(tvm_ffi.structural_map(func.body, (tirx.Bind, _Slots().bound)))


class _Slots:
    """One function's."""

    def __init__(self) -> None:
        self._known = sym.Analyzer()

    def bound(self, bind: Any) -> Any:
        """The binding of a scalar integer with the slots in front of it."""
        value = bind.value
        if str(bind.var.ty) not in _INTEGERS or isinstance(value, _SHORT):
            return bind
        before: list[Any] = []

        def stored(part: Any) -> Any:
            slot = tirx.decl_buffer((1,), str(part.ty), bind.var.name)
            before.extend((tirx.AllocBuffer(slot), tirx.BufferStore(slot, part, [_ZERO])))
            return tirx.BufferLoad(slot, [_ZERO])

        def odd_stored(part: Any) -> Any:
            return part if str(part.ty) not in _INTEGERS or self._even(part) else stored(part)

        if not self._even(value):
            value = stored(value)
        else:
            # The variables of a Let are no one's outside, and what a call guards stays behind it.
            if not collect(value, tirx.Let) and not collect(value, ir.Call):
                value = tvm_ffi.structural_map(value, [(kind, odd_stored) for kind in _COSTLY])
            self._known.bind(bind.var, value)
        return tirx.stmt_seq(*before, tirx.Bind(bind.var, value))

    def _even(self, value: Any) -> bool:
        return int(self._known.modular_set(value).coeff) % 2 == 0
