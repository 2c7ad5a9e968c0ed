"""Kernels that are equal but for their names are built once: gathers of several layers, say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from apq_tvm.codegen.graph.plain import Call, Graph
from apq_tvm.schedules.recorded import fingerprint


def share_kernels(graph: Graph, mod: Any) -> None:
    """Let calls run the first of equal kernels.

    Parameters
    ----------
    graph : Graph
        Changed: calls and their variants.
    mod : tvm.IRModule
        Holds every kernel, scheduled.
    """
    first: dict[str, str] = {}
    same = {name: first.setdefault(fingerprint(mod[name]), name) for name in graph.kernels()}

    def shared(call: Call) -> Call:
        variants = tuple(replace(v, func=same.get(v.func, v.func)) for v in call.variants)
        return replace(call, kernel=same.get(call.kernel, call.kernel), variants=variants)

    graph.steps = [shared(step) if isinstance(step, Call) else step for step in graph.steps]
