"""The ONNX backend node tests, and several of them as one model: a compile costs seconds."""

from __future__ import annotations

import importlib
import pickle
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

CONSTANT = "@constants"
"""Behind the name of a case whose inputs after the first became weights."""


@dataclass(frozen=True)
class Case:
    """One model with what it computes.

    Parameters
    ----------
    name : str
    model : bytes
        An ``onnx.ModelProto``.
    feeds, wanted : dict of str to ndarray
        By the name of the input or output; others than arrays make `plain` False.
    rtol, atol : float
    """

    name: str
    model: bytes
    feeds: dict[str, Any]
    wanted: dict[str, Any]
    rtol: float
    atol: float

    @property
    def proto(self) -> onnx.ModelProto:
        """The model."""
        return onnx.ModelProto.FromString(self.model)

    @property
    def key(self) -> tuple[Any, ...]:
        """What the models of a group have in common."""
        model = self.proto
        return tuple(sorted((o.domain, o.version) for o in model.opset_import))


def collect(*files: str) -> Iterator[Case]:
    """Every node case of the onnx package, or those of some of its files.

    One with several inputs comes twice, once with all but the first as weights.
    """
    from onnx.backend.test.case import node

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for file in files:
            importlib.import_module(f"{node.__name__}.{file}")
        found = list(node._NodeTestCases) if files else node.collect_testcases(None)
    for case in sorted(found, key=lambda c: c.name):
        if case.model is None or not case.data_sets:
            continue
        graph = case.model.graph
        given, wanted = ([_array(v) for v in part] for part in case.data_sets[0])
        feeds = {i.name: v for i, v in zip(graph.input, given, strict=False)}
        results = {o.name: v for o, v in zip(graph.output, wanted, strict=False)}
        data = case.model.SerializeToString()
        plain = Case(case.name, data, feeds, results, case.rtol, case.atol)
        yield plain
        if len(feeds) > 1 and all(_numeric(v) for v in feeds.values()):
            yield _with_weights(plain)


def every() -> list[Case]:
    """Every node case, those of one opset side by side."""
    return sorted(collect(), key=lambda case: (case.key, case.name))


def _array(value: Any) -> Any:
    return numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else value


def _numeric(value: Any) -> bool:
    return isinstance(value, np.ndarray | np.generic) and np.asarray(value).dtype.kind not in "OUS"


def _with_weights(case: Case) -> Case:
    model = case.proto
    first, *others = case.feeds
    for name in others:
        model.graph.initializer.append(numpy_helper.from_array(np.asarray(case.feeds[name]), name))
    kept = [i for i in model.graph.input if i.name == first]
    del model.graph.input[:]
    model.graph.input.extend(kept)
    feeds = {first: case.feeds[first]}
    return Case(
        case.name + CONSTANT, model.SerializeToString(), feeds, case.wanted, case.rtol, case.atol
    )


def store(cases: Sequence[Case], folder: Path) -> None:
    """A file for each case, for other processes."""
    folder.mkdir(parents=True, exist_ok=True)
    for case in cases:
        (folder / f"{case.name}.pkl").write_bytes(pickle.dumps(case))


def load(folder: Path, name: str) -> Case:
    """A case that `store` stored."""
    case = pickle.loads((folder / f"{name}.pkl").read_bytes())
    assert isinstance(case, Case)
    return case


def join(cases: Sequence[Case]) -> onnx.ModelProto:
    """One model of all, every name behind ``c<number>.``."""
    whole = cases[0].proto
    for part in (whole.graph.node, whole.graph.input, whole.graph.output, whole.graph.initializer):
        del part[:]
    del whole.graph.value_info[:]
    for number, case in enumerate(cases):
        graph = case.proto.graph
        _rename(graph, number)
        whole.graph.node.extend(graph.node)
        whole.graph.input.extend(graph.input)
        whole.graph.output.extend(graph.output)
        whole.graph.initializer.extend(graph.initializer)
        whole.ir_version = max(whole.ir_version, case.proto.ir_version)
    return whole


def _rename(graph: onnx.GraphProto, number: int) -> None:
    """Every name of the graph and of graphs inside, which read what is outside, becomes `own`."""
    for node in graph.node:
        node.name = own(number, node.name) if node.name else ""
        for names in (node.input, node.output):
            names[:] = [own(number, name) if name else "" for name in names]
        for attribute in node.attribute:
            for inner in (*attribute.graphs, attribute.g):
                _rename(inner, number)
    for value in (*graph.input, *graph.output, *graph.initializer):
        value.name = own(number, value.name)


def own(number: int, name: str) -> str:
    """The name a value of the case has in the joined model."""
    return f"c{number}.{name}"
