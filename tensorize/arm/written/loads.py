"""Loads of several vectors by one instruction: ``ld1 {v0.16b - v3.16b}``.

LLVM has them as intrinsics that return structures, which TIR does not know; here they are functions
of LLVM IR (TVM's ``pragma_import_llvm``) that return one long vector and are inlined. They matter
where slots are scarce: of the three a cycle that a Neoverse N1 has in LLVM's model, ``ldp`` of two
vectors takes three, ``ld1`` of four takes four.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx

Expr = Any  # tvm is untyped


def load_vectors(address: Expr, count: int) -> list[Expr]:
    """`count` (2 or 4) vectors uint8 [16] that lie one after another at `address`.

    The caller puts ``pragma_import_llvm`` of `MODULE` around what it makes of them.
    """
    both = tirx.call_extern(f"uint8x{16 * count}", f"apq_ld1x{count}", address)
    return [
        tirx.Shuffle([both], [tirx.const(16 * i + lane, "int32") for lane in range(16)])
        for i in range(count)
    ]


def _function(count: int) -> str:
    vector = "<16 x i8>"
    all_of_it = "{" + ", ".join([vector] * count) + "}"
    name = f"@llvm.aarch64.neon.ld1x{count}.v16i8.p0"
    lines = [
        f"declare {all_of_it} {name}(ptr)",
        f"define linkonce_odr <{16 * count} x i8> @apq_ld1x{count}(ptr %p) alwaysinline {{",
        f"  %r = call {all_of_it} {name}(ptr %p)",
    ]
    parts = []
    for i in range(count):
        lines.append(f"  %v{i} = extractvalue {all_of_it} %r, {i}")
        parts.append(f"%v{i}")
    lanes = 16
    while len(parts) > 1:
        joined = []
        for i in range(0, len(parts), 2):
            new, order = f"%j{lanes}_{i}", ", ".join(f"i32 {n}" for n in range(2 * lanes))
            kind = f"<{lanes} x i8>"
            pair = f"{kind} {parts[i]}, {kind} {parts[i + 1]}"
            lines.append(f"  {new} = shufflevector {pair}, <{2 * lanes} x i32> <{order}>")
            joined.append(new)
        parts, lanes = joined, 2 * lanes
    return "\n".join([*lines, f"  ret <{lanes} x i8> {parts[0]}", "}", ""])


TARGET = """target datalayout = "e-m:e-p270:32:32-p271:32:32-p272:64:64-i8:8:32-i16:16:32-i64:64-\
i128:128-n32:64-S128-Fn32"
target triple = "aarch64-linux-gnu"
"""
"""How modules of LLVM IR for 64-bit Arm Linux begin."""

MODULE = TARGET + _function(2) + _function(4)
"""LLVM IR of the functions."""
