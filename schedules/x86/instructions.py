"""Instructions of x86 as kernel records name them."""

from __future__ import annotations

from apq_tvm.schedules.linear.kernel import Instruction
from apq_tvm.tensorize.x86.dot import DotInstruction

FMA = {
    16: Instruction("fma", ("avx512f",), 16),
    8: Instruction("fma", ("fma",), 8),
    4: Instruction("fma", (), 4),
}
"""By float lanes; 4 are in every x86-64, which multiplies and adds one after the other."""


MADDWD = Instruction("maddwd", ("avx2",), 8)
"""Of words: 8-bit codes where ``vpmaddubsw`` saturates."""


VNNI = frozenset({"avxvnni", "avx512vnni"})
"""Features with either of which there is ``vpdpbusd``, which sums products of any bytes exactly."""


def dot_record(instruction: DotInstruction) -> Instruction:
    """Of a dot product of integers."""
    return Instruction(instruction.name, ("|".join(instruction.features),), instruction.rows)
