"""TVM's errors in building kernels, as ours."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from apq_tvm.errors import BuildError, gist
from apq_tvm.schedules.graph.exprs import signature

_MOST = 4
"""Functions that a message has, where TVM's names none."""

_REMEDY = (
    "dimensions of a fixed size (--dim DIM=SIZE) or a layer in float (--tensor-type NAME=float) "
    "may help; please report it"
)


def unbuilt(mod: Any, names: Sequence[str], error: Exception) -> BuildError:
    """The error of ours for one that TVM raised.

    Parameters
    ----------
    mod : tvm.IRModule
    names : sequence of str
        Functions of `mod` that were to be built.
    error : Exception

    Returns
    -------
    BuildError
        It has the functions that TVM's message names, or the first few, with what they take.
    """
    words = set(re.findall(r"\w+", str(error)))
    named = [name for name in names if name in words] or list(names)
    told = [f"{name} ({signature(mod[name])})" for name in named[:_MOST]]
    others = [f"{len(named) - _MOST} others"] if len(named) > _MOST else []
    functions = " and ".join([*told, *others])
    return BuildError(f"TVM could not build {functions}: {gist(error)}; {_REMEDY}")
