"""Whether a GPU executes the matrix products that a kernel was written with, or others instead.

PTX promises every ``mma`` to all later GPUs; where one has no such instruction, the compiler writes
several others (compute capability 9.0: ``xor`` of bits by two of ``and``; 12.0: products of bits by
eight of bytes). In machine code the name of an instruction has shape, types and operation in it, so
that it is native if no other stands there (PTX ISA, "Matrix multiply-accumulate operation using mma
instruction"; CUDA Binary Utilities, "Instruction Set Reference").
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_ENTRY = re.compile(r"\.entry\s+(\w+)")
_MMA = re.compile(
    r"\bmma\.sync\.aligned\.m(\d+)n(\d+)k(\d+)\.row\.col(?:\.satfinite)?"
    r"\.\w+\.(\w+)\.(\w+)\.\w+(?:\.(\w+)\.popc)?"
)
_EXECUTED = re.compile(r"\b[A-Z]*MMA\.\S+")
_FAMILIES = {"b": "BMMA", "u": "IMMA", "s": "IMMA", "f": "HMMA"}


def written(ptx: str) -> Mapping[str, frozenset[str]]:
    """Read PTX.

    Parameters
    ----------
    ptx : str

    Returns
    -------
    mapping of str to frozenset of str
        Kernel → how its ``mma`` begin in machine code, if they are native: ``IMMA.16832.U8.S8``.
    """
    parts = _ENTRY.split(ptx)[1:]
    return {
        name: frozenset(map(_in_machine_code, _MMA.findall(text)))
        for name, text in zip(parts[::2], parts[1::2], strict=True)
    }


def is_native(wanted: frozenset[str], machine_code: str) -> bool | None:
    """Whether a kernel's machine code has the products that were written, and no others.

    Returns
    -------
    bool or None
        None: none were written.
    """
    if not wanted:
        return None
    executed = set(_EXECUTED.findall(machine_code))
    return bool(executed) and all(name.startswith(tuple(wanted)) for name in executed)


def _in_machine_code(mma: tuple[str, ...]) -> str:
    m, n, k, a, b, operation = mma
    family = _FAMILIES.get(a[0], "")
    types = {"BMMA": f".{operation.upper()}.POPC", "IMMA": f".{a.upper()}.{b.upper()}"}
    return f"{family}.{m}{n}{k}{types.get(family, '')}"
