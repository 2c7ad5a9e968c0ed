"""A pass that changes every function of a module by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tvm


def each_function(change: Callable[[Any], Any], name: str) -> Any:
    """Make a pass of what changes one function.

    Parameters
    ----------
    change : callable
        ``change(tvm.tirx.PrimFunc)`` gives another one.
    name : str
        Of the pass.

    Returns
    -------
    tvm.ir.transform.Pass
    """

    def run(mod: Any, _: Any) -> Any:
        functions = {function: change(func) for function, func in mod.functions.items()}
        return tvm.IRModule(functions, attrs=mod.attrs)

    return tvm.transform.module_pass(run, opt_level=0, name=name)
