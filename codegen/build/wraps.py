"""Loops that LLVM must leave scalar: they read at indices that wrap around.

Of an index ``i % 8`` LLVM 22's loop vectorizer assumes that it does not wrap, and forgets to check
that where it can prove that it does: 16 lanes of ``x[i % 8]`` are then read from ``x[0:16]``
(llvm/llvm-project, pull requests 191498 and 225086). It happens with rotary positions on cores for
which LLVM takes vectors of 16 lanes.
"""

from __future__ import annotations

from typing import Any

import tvm_ffi
from tvm import tirx

from apq_tvm.schedules.graph.exprs import collect, lanes_of

_REMAINDERS = (tirx.Mod, tirx.FloorMod)
_BITS = (tirx.BitwiseAnd, tirx.LShift)


def keep_scalar(func: Any) -> Any:
    """Let a loop in which an index may wrap use its variable in a way that LLVM has no vectors for.

    Parameters
    ----------
    func : tvm.tirx.PrimFunc
        Without blocks and without loops to vectorize.

    Returns
    -------
    tvm.tirx.PrimFunc
        The use (``llvm.fake.use`` in LLVM's language reference) costs no instruction. Loops over
        vectors are left as they are: LLVM makes no wider ones of them.
    """

    def kept(loop: Any) -> Any:
        if loop.kind != tirx.ForKind.SERIAL or _has_vectors(loop.body) or not _wraps(loop):
            return loop
        use = tirx.call_llvm_intrin("void", "llvm.fake.use", loop.loop_var)
        body = tirx.SeqStmt([tirx.Evaluate(use), loop.body])
        words = (loop.thread_binding, loop.annotations, loop.step)
        return tirx.For(loop.loop_var, loop.min, loop.extent, loop.kind, body, *words)

    return func.with_body(tvm_ffi.structural_map(func.body, (tirx.For, kept)))


def _wraps(loop: Any) -> bool:
    """Whether it has a remainder of its variable, or of what is bound in it, by an even number.

    By odd ones LLVM divides; what masks bits or casts to fewer is a remainder to it.
    """
    body = loop.body
    remainders = [found for kind in _REMAINDERS for found in collect(body, kind)]
    values = [found.a for found in remainders if _is_even(found.b)]
    values += [found for kind in _BITS for found in collect(body, kind)]
    values += [c.value for c in collect(body, tirx.Cast) if _narrows(c)]
    inner = [loop.loop_var, *(bind.var for bind in collect(body, tirx.Bind))]
    return any(
        var.same_as(own) for value in values for var in collect(value, tirx.Var) for own in inner
    )


def _is_even(divisor: Any) -> bool:
    return not isinstance(divisor, tirx.IntImm) or divisor.value % 2 == 0


def _narrows(cast: Any) -> bool:
    """Whether an integer loses bits."""
    old, new = (tvm_ffi.dtype(str(e.ty)) for e in (cast.value, cast))
    kinds = ("int", "uint")
    return all(str(d).startswith(kinds) for d in (old, new)) and new.bits < old.bits


def _has_vectors(body: Any) -> bool:
    return any(lanes_of(store.value) > 1 for store in collect(body, tirx.BufferStore))
