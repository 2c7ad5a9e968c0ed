"""Floor divisions by what is no constant, lowered before TVM's ``LowerIntrin`` looks at them.

That pass (``src/tirx/transform/lower_intrin.cc``, 0.27) first asks the analyzer whether the divisor
may be negative. Of spans of rows, bound to one another, that takes half a second a kernel, more
than all other passes together, and ends without an answer. What it writes then is written here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tvm
import tvm_ffi
from tvm import sym, tirx
from tvm.ir import Call, StringImm

from apq_tvm.codegen.build.each import each_function

_QUOTIENT, _REST = "apq_floordiv", "apq_floormod"


def hide_divisions(func: Any) -> Any:
    """Make calls of floor divisions and remainders by variable integers.

    Parameters
    ----------
    func : tvm.tirx.PrimFunc
        Lowered to loops.

    Returns
    -------
    tvm.tirx.PrimFunc
        Constant divisors are left to ``LowerIntrin``, and those whose sign is seen at once.
    """
    known = sym.Analyzer().const_int_bound

    def hidden(name: str) -> Callable[[Any], Any]:
        def hide(node: Any) -> Any:
            divisor = node.b
            whole = str(divisor.ty) in ("int32", "int64")
            if not whole or isinstance(divisor, tirx.IntImm) or known(divisor).min_value >= 0:
                return node
            return tirx.call_pure_extern(str(node.ty), name, node.a, divisor)

        return hide

    rules = ((tirx.FloorDiv, hidden(_QUOTIENT)), (tirx.FloorMod, hidden(_REST)))
    return func.with_body(tvm_ffi.structural_map(func.body, rules))


def lower_hidden(func: Any) -> Any:
    """Write what `hide_divisions` hid, as ``LowerIntrin`` writes what it knows nothing of.

    Parameters
    ----------
    func : tvm.tirx.PrimFunc
        After ``LowerIntrin``.

    Returns
    -------
    tvm.tirx.PrimFunc
    """

    def show(call: Any) -> Any:
        name = call.args[0] if call.args else None
        if not isinstance(name, StringImm) or name.value not in (_QUOTIENT, _REST):
            return call
        _, a, b = call.args
        whole = str(call.ty)
        rest = tirx.Var("rmod", whole)
        if name.value == _REST:
            value = tirx.Select(_same_sign(b, rest), rest, b + rest)
        else:
            quotient = tirx.Var("rdiv", whole)
            value = tirx.Select(_same_sign(b, rest), quotient, quotient - 1)
            value = tirx.Let(quotient, tirx.truncdiv(a, b), value)
        return tirx.Let(rest, tirx.truncmod(a, b), value)

    return func.with_body(tvm_ffi.structural_map(func.body, (Call, show)))


def _same_sign(divisor: Any, rest: Any) -> Any:
    """Whether truncating is flooring."""
    zero = tirx.const(0, str(rest.ty))
    above = tirx.And(divisor >= zero, rest >= zero)
    return tirx.Or(above, tirx.And(divisor < zero, rest <= zero))


def around(passes: Any) -> Any:
    """TVM's last passes for hosts with divisions hidden from them."""
    show = each_function(lower_hidden, "apq.LowerHiddenDivisions")

    def run(mod: Any, _: Any) -> Any:
        hidden = {name: hide_divisions(func) for name, func in mod.functions.items()}
        done = passes(tvm.IRModule(hidden, attrs=mod.attrs))
        plain = all(func.body.same_as(mod[name].body) for name, func in hidden.items())
        return done if plain else show(done)

    return tvm.transform.module_pass(run, opt_level=0, name="apq.AroundDivisions")
