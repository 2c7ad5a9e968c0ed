"""Assembly text as the body of an intrinsic.

The instructions come into the module as a function of LLVM IR around inline assembly, which LLVM
inlines where TVM calls it: its constants stay in registers from call to call.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tvm import tirx
from tvm.tirx.script.builder import ir as b

from apq_tvm.tensorize.exprs import Buffer, i64

TARGET = """target datalayout = "e-m:e-p270:32:32-p271:32:32-p272:64:64-i8:8:32-i16:16:32-i64:64-\
i128:128-n32:64-S128-Fn32"
target triple = "aarch64-linux-gnu"
"""
"""How modules of LLVM IR for 64-bit Arm Linux begin."""


def call_function(name: str, source: str, buffers: Iterable[Buffer]) -> None:
    """Call function `name` of some LLVM IR with the addresses of `buffers`."""
    pointers = [tirx.address_of(each[tuple([i64(0)] * len(each.shape))]) for each in buffers]
    with b.attr(tirx.const(0, "int32"), "pragma_import_llvm", TARGET + source):
        b.evaluate(tirx.call_extern("void", name, *pointers))


def asm_call(
    result: str, lines: Sequence[str], kinds: Sequence[str], operands: Sequence[str], more: str = ""
) -> str:
    """LLVM IR of a call of assembly.

    Parameters
    ----------
    result : str
        Its type.
    lines : sequence of str
        Of assembly.
    kinds : sequence of str
        Constraints of result and operands, and what is overwritten besides.
    operands : sequence of str
        With their types.
    more : str
        ``sideeffect`` or nothing.
    """
    text = "\\0A".join(lines)
    return f'call {result} asm {more}"{text}", "{",".join(kinds)}"({", ".join(operands)})'
