"""Registers TensorIntrin pairs on demand: TVM refuses a second registration of a name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_registered: set[str] = set()


def register(name: str, make: Callable[[], tuple[Any, Any]]) -> str:
    """Register a pair once per process.

    Parameters
    ----------
    name : str
        ``apq_<instr>_<m>x<n>x<k>_<lhs><rhs><acc>`` and what else tells pairs apart.
    make : callable
        Gives ``(desc, impl)`` PrimFuncs; called the first time only.

    Returns
    -------
    str
        `name`, for ``Schedule.tensorize``.
    """
    from tvm.s_tir import TensorIntrin

    if name not in _registered:
        desc, impl = make()
        TensorIntrin.register(name, desc, impl, override=True)
        _registered.add(name)
    return name
