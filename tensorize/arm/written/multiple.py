"""Loads of several consecutive vectors by one ld1, which TVM cannot call: it returns a struct.

On Neoverse N1 and Cortex-A76, of three instructions a cycle, ``ldr q`` takes two slots, ``ldp q``
three and ld1 one for each vector (LLVM's AArch64SchedNeoverseN1.td, after Arm's Software
Optimization Guide, PJDOC-466751330-9685). Each vector is a function of the address in LLVM's own
language; inlined, they are one instruction.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

Expr = Any  # tvm is untyped


def _source(count: int) -> str:
    result = "{ " + ", ".join(["<16 x i8>"] * count) + " }"
    name = f"@llvm.aarch64.neon.ld1x{count}.v16i8.p0"
    lines = [f"declare {result} {name}(ptr)"]
    for i in range(count):
        lines += [
            f"define linkonce_odr hidden <16 x i8> @apq_ld1x{count}_{i}(ptr %p)",
            "    alwaysinline nounwind willreturn memory(read) {",
            f"  %all = call {result} {name}(ptr %p)",
            f"  %one = extractvalue {result} %all, {i}",
            "  ret <16 x i8> %one",
            "}",
        ]
    return "\n".join(lines)


@contextmanager
def multiple_loads(count: int) -> Iterator[None]:
    """Code that calls `load_multiple` with this count; to be entered while TIR is built."""
    import tvm
    from tvm import tirx
    from tvm.tirx.script.builder import ir as b

    source = tvm.ir.StringImm(_source(count))
    with b.attr(tirx.const(0, "int32"), "pragma_import_llvm", source):
        yield


def load_multiple(count: int, first: Expr) -> list[Expr]:
    """`count` vectors int8x16 that follow each other from the element `first` of a buffer on."""
    from tvm import tirx

    address = tirx.address_of(first)
    return [tirx.call_pure_extern("int8x16", f"apq_ld1x{count}_{i}", address) for i in range(count)]
