"""Threads that work on one thing together, and what they find of it (``tensorize/cuda/team.cuh``).

A kernel here is what one thread does: its loops are over blocks and threads at once, statements
below them are in order, and what threads tell each other goes through a `Team` or shared memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tvm import tirx
from tvm.tirx.script.builder import ir as b

from apq_tvm.tensorize.exprs import Expr, i64

Call = Callable[..., Expr]
"""``(function, type of what it gives, *arguments)`` → a call of a device function of teams
(`apq_tvm.tensorize.cuda.functions`)."""

WARP = 32


class Team:
    """Neighbouring threads: a power of 2 up to a warp, or a whole block of whole warps.

    Parameters
    ----------
    size : int
    thread : Expr
        int32: this thread's number in the block.
    call : callable
    """

    def __init__(self, size: int, thread: Expr, call: Call) -> None:
        self._call, self.size, self.lane, self.number = call, size, thread % size, thread // size
        self._scratch = shared(WARP, "int32") if size > WARP else None

    def find(self, what: str, value: Expr) -> Expr:
        """``max`` or ``sum`` of the threads' int32 or float32, known to each of them."""
        found, dtype = local(1, value.ty.dtype), str(value.ty.dtype)
        if self._scratch is None:
            size = tirx.const(self.size, "int32")
            given = self._call(f"apq_team_{what}_{dtype}", dtype, value, size)
        else:
            place = tirx.address_of(self._scratch[0])
            given = self._call(f"apq_block_{what}_{dtype}", dtype, value, place)
        b.buffer_store(found, given, [0])
        return found[0]

    @contextmanager
    def share(self, count: int) -> Iterator[Expr]:
        """A loop in which the team's threads take `count` things in turns: one's number, int32."""
        turns = -(-count // self.size)
        with b.serial(0, turns) as turn:
            at = self.lane if turns == 1 else turn * self.size + self.lane
            if count % self.size == 0:
                yield at
            else:
                with b.If(at < count), b.Then():
                    yield at


def local(count: int, dtype: str) -> Any:
    """A thread's own array."""
    return b.sblock_alloc_buffer((count,), dtype, scope="local")


def shared(count: int, dtype: str) -> Any:
    """A block's array."""
    return b.sblock_alloc_buffer((count,), dtype, scope="shared")


def meet() -> None:
    """All threads of the block come here before one goes on."""
    b.evaluate(tirx.call_intrin("void", "tirx.tvm_storage_sync", "shared"))


def meet_warp(call: Call) -> None:
    """All threads of the warp come here before one goes on, and see what the others stored."""
    b.evaluate(call("apq_warp_meet", "void"))


def last(bound: Expr, index: Expr) -> Expr:
    """`index`, or the last one below `bound`: what comes of that is not stored."""
    return tirx.min(index, bound - i64(1))
