"""ONNX's node cases at every type that the operator's schema allows: one case an operator, retyped.

What they should give says ONNX Runtime; where it has no such kernel, nothing does, and the case
only has to be compiled and run, or to be refused by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from onnx import checker, defs, helper

from apq_tvm.onnx_import.ops import SUPPORTED
from tests.node_cases.cases import CONSTANT, Case
from tests.onnx_models import session_of

TYPES = {
    f"tensor({name})": np.dtype(kind)
    for name, kind in {
        **{name: name for name in "bool int8 int16 int32 int64 float16".split()},
        **{f"u{name}": f"u{name}" for name in "int8 int16 int32 int64".split()},
        **{"float": "float32", "double": "float64", "bfloat16": ml_dtypes.bfloat16},
    }.items()
}
ALIKE = (("int16", "uint16"), ("uint32", "uint64"), ("float64", "bfloat16"))
"""Pairs whose kernels are made by the same rules: in `make test-all` an operator has one of two."""
UNDEFINED = frozenset(("ReduceProd.T.int32",))
"""Overflows, where ONNX Runtime's own result is no remainder."""


def typed(cases: Sequence[Case]) -> Iterator[Case]:
    """The cases of single operators with each type in turn, of each reduction and direction one.

    Indices, axes and sizes are weights, as in models; what has no ONNX Runtime's result wants none.
    """
    seen = set[tuple[str, ...]]()
    for case in cases:
        model = case.proto
        node = model.graph.node[0]
        told = [a.s.decode() for a in node.attribute if a.name in ("reduction", "direction")]
        single = len(model.graph.node) == 1 and not node.domain and node.op_type in SUPPORTED
        key = (node.op_type, *told)
        if single and key not in seen and CONSTANT not in case.name and _of_numbers(case):
            seen.add(key)
            yield from _retyped(case, ".".join(key))


def in_turns(cases: Iterable[Case]) -> Iterator[tuple[Case, bool]]:
    """Each case, and whether it is its type's turn: of two alike an operator has one, the next the
    other.
    """
    pair = {kind: (kinds, turn) for kinds in ALIKE for turn, kind in enumerate(kinds)}
    last: dict[tuple[str, ...], tuple[str, int]] = {}
    for case in cases:
        of, kind = case.name.rsplit(".", 1)
        if kind not in pair:
            yield case, True
            continue
        kinds, turn = pair[kind]
        before, number = last.get(kinds, ("", 0))
        number += of != before
        last[kinds] = of, number
        yield case, number % 2 == turn


def _of_numbers(case: Case) -> bool:
    values = case.feeds.values()
    return all(isinstance(v, np.ndarray) and v.dtype.kind not in "OUS" for v in values)


def _retyped(case: Case, name: str) -> Iterator[Case]:
    model = case.proto
    node = model.graph.node[0]
    opset = next(o.version for o in model.opset_import if not o.domain)
    schema = defs.get_schema(node.op_type, opset)
    read, made = (
        {value: formal[min(i, len(formal) - 1)].type_str for i, value in enumerate(values) if value}
        for values, formal in ((node.input, schema.inputs), (node.output, schema.outputs))
    )
    for constraint in schema.type_constraints:
        parameter = constraint.type_param_str
        for text in constraint.allowed_type_strs:
            if text in TYPES and parameter in read.values():
                kind = TYPES[text]
                made_of = {v for v, formal in (read | made).items() if formal == parameter}
                found = _with_type(case, f"{name}.{parameter}.{kind.name}", made_of, kind)
                if found is not None:
                    yield found


def _with_type(case: Case, name: str, values: set[str], kind: np.dtype[Any]) -> Case | None:
    """The case with these inputs and outputs of a type; None where ONNX forbids that."""
    model, feeds = case.proto, dict(case.feeds)
    for info in (*model.graph.input, *model.graph.output):
        if info.name in values:
            info.type.tensor_type.elem_type = helper.np_dtype_to_tensor_dtype(kind)
    feeds |= {value: _cast(feeds[value], kind) for value in values & feeds.keys()}
    first = next(iter(feeds))
    sizes = [v for v in feeds if v != first and v not in values and feeds[v].dtype.kind == "i"]
    model.graph.initializer.extend(onnx.numpy_helper.from_array(feeds.pop(v), v) for v in sizes)
    kept = [info for info in model.graph.input if info.name in feeds]
    del model.graph.input[:]
    model.graph.input.extend(kept)
    try:
        checker.check_model(model, full_check=True)
    except (checker.ValidationError, onnx.shape_inference.InferenceError):
        return None
    wanted = {} if name in UNDEFINED else _by_onnxruntime(model, feeds)
    return Case(name, model.SerializeToString(), feeds, wanted, 1e-3, 1e-5)


def _cast(array: Any, kind: np.dtype[Any]) -> Any:
    """Small whole numbers of an array of floats, where the type has no others."""
    if array.dtype.kind == "f" and kind.kind in "iub":
        array = np.round(np.nan_to_num(array) * 3)
    if kind.kind == "b":
        return array.astype(bool) if array.dtype.kind == "b" else np.round(array) % 2 != 0
    return (np.abs(array) if kind.kind == "u" else array).astype(kind)


def _by_onnxruntime(model: onnx.ModelProto, feeds: dict[str, Any]) -> dict[str, Any]:
    names = [output.name for output in model.graph.output]
    try:
        results = session_of(model.SerializeToString()).run(names, feeds)
        return dict(zip(names, results, strict=True))
    except Exception:  # of many kinds: no such kernel, or none that takes these numbers
        return {}
