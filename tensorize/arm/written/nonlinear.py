"""Some groups of 4-bit codes and one row of x on cores that issue in order, by `arm_units_asm`.

The instructions come into the module as a function of LLVM IR (TVM's ``pragma_import_llvm``) around
inline assembly.
"""

from __future__ import annotations

import struct
from typing import Any

from apq_tvm.tensorize.arm.written.codebook_asm import SCRATCH
from apq_tvm.tensorize.arm.written.loads import TARGET
from apq_tvm.tensorize.arm.written.nonlinear_asm import (
    GROUPS,
    LONGEST,
    POINTERS,
    REGISTERS,
    program,
)
from apq_tvm.tensorize.meaning.lookup_span import SpanDot, SpanOperands, span_pair
from apq_tvm.tensorize.meaning.nonlinear_span import UnitsDot
from apq_tvm.tensorize.registry import register

SHORTEST = 4
"""Units of several groups from which on this order is better than LLVM's."""

_ARGUMENTS = (*POINTERS, "table", "y")


def written_groups(units: int, groups: int) -> int:
    """How many groups of so many units to compute at once, of a row that has `groups`; at least 1.

    All rows' groups are divided into as many.
    """
    fitting = (c for c in GROUPS if groups % c == 0 and c * units <= LONGEST)
    return max(fitting, default=1)


def is_in_order(dot: SpanDot) -> bool:
    """Whether there is an intrinsic here."""
    if not isinstance(dot, UnitsDot) or dot.m != 1 or dot.groups == 1:
        return False
    return SHORTEST <= dot.units <= LONGEST


def in_order_units_intrinsic(dot: UnitsDot) -> str:
    """Register (once) and name the dot product of some groups with one row of x.

    Parameters
    ----------
    dot : UnitsDot
        Which `is_in_order`.

    Returns
    -------
    str
        The intrinsic's name. Its `xs` and `extra` are those of `arm_lookup.units_intrinsic`.
    """
    name = f"apq_sdot_in_order_1x4x{dot.k}g{dot.group}_s8lut4f32"

    def implement(o: SpanOperands) -> None:
        from tvm import tirx
        from tvm.tirx.script.builder import ir as b

        def address(buffer: Any) -> Any:
            return tirx.address_of(buffer[tuple(tirx.const(0, "int64") for _ in buffer.shape)])

        buffers = {**o.arrays, "scales": o.scales, "x": o.x, "xs": o.xs, "extra": o.extra}
        pointers = [address(buffers[n]) for n in _ARGUMENTS[:-1]] + [address(o.acc)]
        with b.attr(tirx.const(0, "int32"), "pragma_import_llvm", _function(dot, name)):
            b.evaluate(tirx.call_extern("void", name, *pointers))

    return register(name, lambda: span_pair(dot, implement))


def _function(dot: UnitsDot, name: str) -> str:
    """LLVM IR of ``void name(codes, scales, x, xs, extra, table, y)``."""
    bytes_, floats = "<16 x i8>", "<4 x float>"
    unit = struct.pack(">d", dot.unit).hex()  # as LLVM writes floats
    assembly = "\\0A".join(program(dot.groups, dot.units // dot.groups))
    kinds = ["=w", *["r"] * len(POINTERS), "w", "w", "w", "0"]
    kinds += [f"~{{v{i}}}" for i in range(REGISTERS)] + [f"~{{x{i}}}" for i in SCRATCH]
    operands = [f"ptr %{n}" for n in POINTERS]
    operands += [f"{bytes_} %table0", f"{bytes_} splat (i8 15)"]
    operands += [f"{floats} splat (float 0x{unit})", f"{floats} %a"]
    lines = [
        f"define linkonce_odr void @{name}({', '.join(f'ptr %{n}' for n in _ARGUMENTS)})",
        "alwaysinline {",
        f"  %raised = load {bytes_}, ptr %table, align 16",
        f"  %table0 = sub {bytes_} %raised, splat (i8 {dot.offset})",
        f"  %a = load {floats}, ptr %y, align 16",
        f'  %r = call {floats} asm "{assembly}", "{",".join(kinds)}"({", ".join(operands)})',
        f"  store {floats} %r, ptr %y, align 16",
        "  ret void",
        "}",
        "",
    ]
    return TARGET + "\n".join(lines)
