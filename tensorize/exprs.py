"""Expressions that ops, intrinsics and schedules write: constants, regions, LLVM's intrinsics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Expr = Any
Buffer = Any
Stmt = Any
PrimFunc = Any
"""What annotations call tvm's objects: tvm is untyped."""

MAGIC = 1.5 * 2.0**23
"""Added to it, a float32 below 2^22 rounds to an integer: there the unit is 1."""

MAGIC_BITS = 0x4B400000
"""The pattern of `MAGIC`: an integer below 2^22 added to it gives that of the float sum."""


def i64(value: int) -> Expr:
    """An int64 constant: all extents and indices of the PrimFuncs are int64."""
    from tvm import tirx

    return tirx.const(int(value), "int64")


def i32(value: int) -> Expr:
    """An int32 constant."""
    from tvm import tirx

    return tirx.const(value, "int32")


def f32(value: float) -> Expr:
    """A float32 constant."""
    from tvm import tirx

    return tirx.const(value, "float32")


def splat(value: int | float, dtype: str, lanes: int = 16) -> Expr:
    """A constant in every lane."""
    from tvm import tirx

    return tirx.Broadcast(tirx.const(value, dtype), lanes)


def shuffled(vector: Expr, lanes: int, order: Sequence[int]) -> Expr:
    """Lanes `order` of a vector of `lanes`; there may be more of them than it has."""
    from tvm import tirx

    copies = -(-len(order) // lanes)  # TVM wants no more indices than lanes
    return tirx.Shuffle([vector] * copies, [tirx.const(i, "int32") for i in order])


def magnitude_bits(value: Expr) -> Expr:
    """The pattern of a float32 without its sign: orders like the magnitude, NaN above infinity."""
    from tvm import tirx

    return tirx.bitwise_and(tirx.reinterpret("int32", value), i32(0x7FFFFFFF))


def whole(buffer: Buffer) -> Any:
    """All of a buffer, as a region."""
    return buffer[tuple(slice(0, extent) for extent in buffer.shape)]


def loose_operand(
    name: str, shape: tuple[int, ...], dtype: str, align: int, strides: Any = None
) -> Buffer:
    """Declare one operand of a pair member; it may lie anywhere that `align` allows."""
    from tvm.tirx.script.builder import ir as b

    handle = b.arg(name, b.handle())
    return b.match_buffer(handle, shape, dtype, strides=strides, align=align, offset_factor=1)


def member(
    operands: Sequence[tuple[Any, ...]], body: Callable[..., None], updated: bool = False
) -> Any:
    """PrimFunc of a pair, whose last operand is written, whose others are read.

    Parameters
    ----------
    operands : sequence of tuple
        Arguments of `loose_operand`.
    body : callable
        Emits what it does, given the buffers.
    updated : bool
        Whether the last operand is read too.
    """
    from tvm.script.ir_builder import IRBuilder
    from tvm.tirx.script.builder import ir as b

    with IRBuilder() as builder, b.prim_func(s_tir=True):
        b.func_name("member")
        buffers = [loose_operand(*declared) for declared in operands]
        with b.sblock("root"):
            b.reads(*map(whole, (*buffers[-1:] * updated, *buffers[:-1])))
            b.writes(whole(buffers[-1]))
            body(*buffers)
    return builder.get()


def moved_bytes(vector: Expr, left: int, size: int) -> Expr:
    """uint8 [size] shifted left (right if negative), whose bits cross into neighbours.

    In 16-bit lanes: x86 has no 8-bit shift.
    """
    from tvm import tirx

    if not left:
        return vector
    words = tirx.reinterpret(f"uint16x{size // 2}", vector)
    move = tirx.shift_left if left > 0 else tirx.shift_right
    amount = tirx.Broadcast(tirx.const(abs(left), "uint16"), size // 2)
    return tirx.reinterpret(f"uint8x{size}", move(words, amount))


def llvm(dtype: str, name: str, *operands: Expr) -> Expr:
    """A call of an intrinsic of LLVM without side effects."""
    from tvm import tirx

    return tirx.call_llvm_pure_intrin(dtype, name, *operands)


def neon(dtype: str, name: str, *operands: Expr) -> Expr:
    """A call of an intrinsic of AArch64's Advanced SIMD."""
    return llvm(dtype, f"llvm.aarch64.neon.{name}", *operands)


def x86(dtype: str, name: str, *operands: Expr) -> Expr:
    """A call of an intrinsic of x86."""
    return llvm(dtype, f"llvm.x86.{name}", *operands)


def prefetch_line(place: Expr, write: bool = False, first: bool = True) -> None:
    """Ask for the cache line of a buffer's element, to read or `write` it.

    In the `first` cache, or in the second where there is more than that one holds. A prefetch never
    faults, so the element may lie past the end.
    """
    from tvm import tirx
    from tvm.tirx.script.builder import ir as b

    arguments = [tirx.const(v, "int32") for v in (int(write), 3 if first else 2, 1)]  # data
    address = tirx.address_of(place)
    b.evaluate(tirx.call_llvm_intrin("void", "llvm.prefetch", address, *arguments))


def prefetch(codes: Buffer, nbytes: int, distance: int, lead: Sequence[Expr] = ()) -> None:
    """Prefetch a unit's cache lines `distance` bytes ahead of ``codes[*lead]``, 0 for none.

    A prefetch never faults, so the address may lie past the end of the weights.
    """
    for line in range(0, nbytes if distance else 0, 64):
        prefetch_line(codes[(*lead, i64(distance + line))])
