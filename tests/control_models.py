"""Loops and branches of all kinds, joined into one model."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

RNG = np.random.default_rng(0)
ROWS = "n"
LIST = -1
"""Stands for the type of a sequence of float tensors."""
OUTPUTS = (
    "either beside first second rows doubled grown state scanned nested picked steps recurred "
    "sized cached last early tall stacked strung entries final strip piece wide_again tower one_of "
    "another"
).split()


def _value(name: str, kind: int = TensorProto.FLOAT, shape: Any = None) -> Any:
    if kind == LIST:
        return helper.make_tensor_sequence_value_info(name, TensorProto.FLOAT, shape)
    return helper.make_tensor_value_info(name, kind, shape)


def _constant(name: str, value: Any) -> Any:
    array = numpy_helper.from_array(np.asarray(value))
    return helper.make_node("Constant", [], [name], value=array)


def _body(
    nodes: list[Any],
    outputs: str,
    inputs: str = "",
    loop: bool = False,
    ints: str = "",
    lists: str = "",
) -> Any:
    """A graph of `nodes`; of a loop it takes the round, here ``i``, and a condition ``go``."""
    kinds = dict.fromkeys(ints.split(), TensorProto.INT32) | dict.fromkeys(lists.split(), LIST)
    given = [_value("i", TensorProto.INT64, []), _value("go", TensorProto.BOOL, [])] if loop else []
    given += [_value(name, kinds.get(name, TensorProto.FLOAT)) for name in inputs.split()]
    made = [_value(name, kinds.get(name, TensorProto.FLOAT)) for name in outputs.split()]
    if loop:
        made[0] = _value(outputs.split()[0], TensorProto.BOOL, [])
    return helper.make_graph(nodes, "body", given, made)


node = helper.make_node


def _branches() -> list[Any]:
    """Both branches hold a layer of one weight and share names; which runs depends on data, and the
    second alone reads what stands before both."""
    then = _body(
        [
            node("MatMul", ["x", "w"], ["m"]),
            node("Relu", ["m"], ["r"]),
            node("Concat", ["m", "r"], ["both"], axis=0),
        ],
        "r both m",
    )
    other = _body(
        [
            node("MatMul", ["x", "w"], ["m"]),
            node("Neg", ["m"], ["k"]),
            node("Add", ["k", "calm"], ["r"]),
            node("Concat", ["k", "r"], ["both"], axis=0),
        ],
        "r both k",
    )
    return [
        _constant("zero", np.float32(0)),
        node("ReduceSum", ["x"], ["total"], keepdims=0),
        node("Greater", ["total", "zero"], ["positive"]),
        node("Abs", ["x"], ["calm"]),
        node(
            "If", ["positive"], ["one", "beside", "sized_as"], then_branch=then, else_branch=other
        ),
        node("Shape", ["sized_as"], ["size"]),  # it is known, and the last result unread then
        node("Expand", ["one", "size"], ["either"]),
    ]


def _twins() -> list[Any]:
    """Two choices by one condition, which read nothing else."""

    def number(value: float) -> Any:
        return _body([_constant("r", np.float32(value))], "r")

    return [
        node("If", ["positive"], ["one_of"], then_branch=number(1), else_branch=number(2)),
        node("If", ["positive"], ["another"], then_branch=number(3), else_branch=number(4)),
    ]


def _loops() -> list[Any]:
    """As many rounds as rows, with values that change places and one row each; until a sum is
    large; three."""
    swap = _body(
        [
            node("Identity", ["go"], ["on"]),
            node("MatMul", ["a", "w"], ["m"]),
            node("Tanh", ["m"], ["b_next"]),
            node("Add", ["b", "x0"], ["plus"]),
            node("Cast", ["i"], ["number"], to=1),
            node("Mul", ["plus", "number"], ["numbered"]),
            node("Reshape", ["i", "as_list"], ["at"]),
            node("Add", ["at", "as_one"], ["next"]),
            node("Slice", ["x", "at", "next"], ["mine"]),
            node("Add", ["numbered", "mine"], ["row"]),
        ],
        "on b b_next row",
        "a b",
        loop=True,
    )
    until = _body(
        [
            node("Add", ["v", "v"], ["twice"]),
            node("ReduceSum", ["twice"], ["sum"], keepdims=0),
            node("Less", ["sum", "hundred"], ["again"]),
        ],
        "again twice",
        "v",
        loop=True,
    )
    grow = _body(
        [node("Identity", ["go"], ["on"]), node("Concat", ["v", "v"], ["vv"], axis=0)],
        "on vv",
        "v",
        loop=True,
    )
    return [
        _constant("at_0", np.int64(0)),
        _constant("as_list", np.array([-1])),
        _constant("as_one", np.array([1])),
        _constant("three", np.int64(3)),
        _constant("hundred", np.float32(100)),
        _constant("yes", np.array(True)),
        node("Shape", ["x"], ["shape"]),
        node("Gather", ["shape", "at_0"], ["count"]),
        node("Gather", ["x", "at_0"], ["x0"]),
        node("Abs", ["x0"], ["x0_abs"]),
        node("Loop", ["count", "yes", "x0", "x0"], ["first", "second", "rows"], body=swap),
        node("Loop", ["", "yes", "x0_abs"], ["doubled"], body=until),
        node("Loop", ["three", "", "x"], ["grown"], body=grow),
    ]


def _while() -> list[Any]:
    """As tf2onnx writes a recurrent layer: a counter, and weights and a length as states."""
    body = _body(
        [
            _constant("one", np.int32(1)),
            node("Gather", ["x", "k"], ["row"]),
            node("Add", ["row", "v"], ["sum"]),
            node("MatMul", ["sum", "matrix"], ["product"]),
            node("Tanh", ["product"], ["v_next"]),
            node("Add", ["k", "one"], ["k_next"]),
            *(node("Cast", [v], [f"{v}_float"], to=1) for v in ("k_next", "length", "i")),
            node("Less", ["k_next_float", "length_float"], ["more"]),
            node("LessOrEqual", ["i_float", "length_float"], ["few"]),
            node("And", ["more", "few"], ["on"]),
        ],
        "on k_next v_next matrix length v_next",
        "k v matrix length",
        loop=True,
        ints="k k_next length",
    )
    return [
        node("Cast", ["count"], ["count_32"], to=TensorProto.INT32),
        node("Cast", ["count"], ["count_float"], to=1),
        node("Less", ["zero", "count_float"], ["some"]),
        _constant("at_first", np.int32(0)),
        node(
            "Loop",
            ["", "some", "at_first", "x0", "w", "count_32"],
            ["steps", "left", "same", "length", "recurred"],
            body=body,
        ),
    ]


def _nested() -> list[Any]:
    """A Scan from the end; an If in a Loop, one whose condition is known inside of another."""
    step = _body(
        [node("Add", ["s", "e"], ["s_next"]), node("Mul", ["s_next", "e"], ["out"])],
        "s_next out",
        "s e",
    )
    odd = _body([node("Add", ["v", "x0"], ["r"])], "r")
    even = _body([node("Mul", ["v", "half"], ["r"])], "r")
    rounds = _body(
        [
            node("Identity", ["go"], ["on"]),
            _constant("two", np.int64(2)),
            node("Mod", ["i", "two"], ["rest"]),
            node("Cast", ["rest"], ["is_odd"], to=TensorProto.BOOL),
            node("If", ["is_odd"], ["next"], then_branch=odd, else_branch=even),
        ],
        "on next",
        "v",
        loop=True,
    )
    known = node("If", ["wide"], ["r"], then_branch=odd_of("x"), else_branch=_unsupported())
    outer = _body(
        [
            node("Shape", ["x"], ["dims"]),
            _constant("at_1", np.int64(1)),
            node("Gather", ["dims", "at_1"], ["width"]),
            _constant("eight", np.int64(8)),
            node("Equal", ["width", "eight"], ["wide"]),
            known,
        ],
        "r",
    )
    plain = _body([node("Identity", ["x"], ["r"])], "r")
    return [
        _constant("half", np.float32(0.5)),
        node(
            "Scan",
            ["x0", "x"],
            ["state", "scanned"],
            body=step,
            num_scan_inputs=1,
            scan_input_directions=[1],
            scan_output_axes=[1],
        ),
        node("Loop", ["count", "", "x"], ["nested"], body=rounds),
        node("If", ["positive"], ["picked"], then_branch=outer, else_branch=plain),
    ]


def _of_other_sizes() -> list[Any]:
    """Branches of different sizes; one alone reads a cache, which then has as many rows as ``x``;
    a loop that collects until a sum is large."""
    more = _body([node("Concat", ["x", "x0_row", "x"], ["r"], axis=0)], "r")
    plain = _body([node("Identity", ["x"], ["r"])], "r")
    fed = _body(
        [
            node("ReduceSum", ["cache", "first_axis"], ["sum"], keepdims=0),
            node("Add", ["sum", "x"], ["r"]),
        ],
        "r",
    )
    until = _body(
        [
            node("Add", ["v", "v"], ["twice"]),
            node("ReduceSum", ["twice"], ["sum"], keepdims=0),
            node("Less", ["sum", "hundred"], ["again"]),
            node("Relu", ["twice"], ["entry"]),
        ],
        "again twice entry",
        "v",
        loop=True,
    )
    return [
        _constant("first_axis", np.array([0])),
        _constant("twenty", np.int64(20)),
        node("Unsqueeze", ["x0", "first_axis"], ["x0_row"]),
        node("If", ["positive"], ["sized"], then_branch=more, else_branch=plain),
        node("If", ["positive"], ["cached"], then_branch=fed, else_branch=plain),
        node("Loop", ["twenty", "yes", "x0_abs"], ["last", "early"], body=until),
    ]


def odd_of(value: str) -> Any:
    """A branch that adds a row."""
    return _body([node("Add", [value, "x0"], ["r"])], "r")


def _unsupported() -> Any:
    """A branch that cannot be compiled."""
    nodes = [node("Optional", ["x"], ["o"]), node("OptionalGetElement", ["o"], ["r"])]
    return _body(nodes, "r")


def _lists() -> list[Any]:
    """Lists of Python: pieces of a tensor, what rounds append, and a list that rounds read."""
    append = _body(
        [
            node("Identity", ["go"], ["on"]),
            node("SequenceAt", ["x_rows", "i"], ["row"]),
            node("Add", ["row", "v"], ["sum"]),
            node("SequenceInsert", ["list", "sum"], ["longer"]),
            node("Unsqueeze", ["sum", "first_axis"], ["sums"]),
            node("Concat", ["sums", "sums"], ["twice"], axis=0),
            node("Concat", ["tensor", "twice"], ["taller"], axis=0),
        ],
        "on sum longer taller",
        "v list tensor",
        loop=True,
        lists="list longer",
    )
    until = _body(
        [
            node("Add", ["v", "v"], ["double"]),
            node("ReduceSum", ["double"], ["sum"], keepdims=0),
            node("Less", ["sum", "hundred"], ["again"]),
            node("Concat", ["tensor", "double"], ["longer"], axis=0),
        ],
        "again double longer",
        "v tensor",
        loop=True,
    )
    return [
        node("SplitToSequence", ["x"], ["x_rows"], keepdims=0),
        node("SequenceEmpty", [], ["nothing"]),
        node("Loop", ["count", "", "x0", "nothing", "x"], ["walked", "sums", "tall"], body=append),
        node("ConcatFromSequence", ["sums"], ["stacked"], axis=1, new_axis=1),
        node("ConcatFromSequence", ["sums"], ["strung"], axis=0),
        node("SequenceLength", ["sums"], ["entries"]),
        _constant("last_one", np.int64(-1)),
        node("SequenceAt", ["sums", "last_one"], ["final"]),
        node("Loop", ["twenty", "yes", "x0_abs", "x0"], ["walked_on", "strip"], body=until),
        node("SplitToSequence", ["x", "three"], ["pieces"], axis=1),
        node("SequenceAt", ["pieces", "last_one"], ["piece"]),
        node("SequenceErase", ["pieces", "at_0"], ["fewer"]),
        node("SequenceInsert", ["fewer", "x", "at_0"], ["changed"]),
        node("ConcatFromSequence", ["changed"], ["wide_again"], axis=-1),
        node("SplitToSequence", ["x"], ["kept"], axis=1),
        node("ConcatFromSequence", ["kept"], ["tower"], axis=0),
    ]


def joined() -> onnx.ModelProto:
    """One model; its inputs are ``x`` [n, 8] and ``cache`` [2, n, 8], its outputs `OUTPUTS`."""
    weight = (RNG.standard_normal((8, 8)) * 0.4).astype(np.float32)
    graph = helper.make_graph(
        [*_branches(), *_twins(), *_loops(), *_while(), *_nested(), *_of_other_sizes(), *_lists()],
        "control",
        [_value("x", shape=[ROWS, 8]), _value("cache", shape=[2, ROWS, 8])],
        [helper.make_empty_tensor_value_info(name) for name in OUTPUTS],
        [numpy_helper.from_array(weight, "w")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def feeds() -> list[dict[str, Any]]:
    """One row and many, of either sign; the cache of the branch that does not run is empty."""
    made = []
    for rows in (1, 5, 40):
        x = np.abs(RNG.standard_normal((rows, 8)) / rows).astype(np.float32)
        cache = RNG.standard_normal((2, rows, 8)).astype(np.float32)
        made += [{"x": x, "cache": cache}, {"x": -x, "cache": cache[:, : rows // 2]}]
    return made
