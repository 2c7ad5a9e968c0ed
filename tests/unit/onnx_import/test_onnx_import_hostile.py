"""Files that no exporter writes: refused by name, before their numbers allocate anything."""

from __future__ import annotations

import resource
import time
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import helper
from onnx_models import build, rand, save

from apq_tvm.errors import ImportFailed, UnsupportedModel
from apq_tvm.onnx_import import import_onnx
from apq_tvm.onnx_import.control.loops import MANY_NODES

HUGE = 1 << 40
X = {"x": ("float32", ["b", 8])}
IMAGE = {"x": ("float32", [1, 4, 16, 16])}
FIXED = {"x": ("float32", [2, 8])}
SECONDS, MEGABYTES = 2, 300


def refused(path: Path, words: str) -> None:
    """Importing fails with a message that has all `words`, soon and in little memory."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    with pytest.raises((ImportFailed, UnsupportedModel)) as caught:
        import_onnx(path)
    assert time.process_time() - start < SECONDS
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MEGABYTES << 10
    for word in words.split():
        assert word in str(caught.value), str(caught.value)


# Operators of our own

OWN = {
    "Linear": ("x w", {"activation": "gelu"}, {"w": rand(6, 8)}),
    "Embedding": ("w i", {"keep": "x"}, {"w": rand(5, 8), "i": np.array([1])}),
    "MatMul": ("x x", {"perm_a": [0, 1], "perm_b": [1, 0], "perm_out": [0, 1]}, {}),
    "Softmax": ("x", {"scale": 2.0}, {}),
    "Gelu": ("x", {"approximate": "none"}, {}),
    "AppendCache": ("x x i", {"shape": [1, 1, HUGE, 8]}, {"i": np.array([0])}),
    "Reshape": ("x", {"shape": ["b * 99", "8"]}, {}),
    "Expand": ("x", {"shape": [HUGE, 8]}, {}),
    "Slice": ("x", {"axes": [1], "starts": [-100], "steps": [1], "shape": [2, 1000]}, {}),
    "Full": ("_", {"shape": [HUGE], "value": np.zeros(1, np.float32), "dtype": "float32"}, {}),
    "Range": ("_", {"shape": [HUGE], "start": 0, "delta": 1, "dtype": "int64"}, {}),
    "Dims": ("_", {"dims": ["__import__('os')"], "shape": [1], "dtype": "int64"}, {}),
}


@pytest.mark.parametrize("name", OWN)
def test_internal_operators_are_not_for_files(name: str, tmp_path: Path) -> None:
    read, attrs, weights = OWN[name]
    for domain in ("apq.", "", "ai.onnx."):
        model = build([("Identity", read, "y", attrs)], X, "y", weights, domains={"apq": 1})
        model.graph.node[0].op_type = name if domain == "apq." else f"apq.{name}"
        model.graph.node[0].domain = domain[:-1]
        refused(save(model, tmp_path), f"'n_y' apq.{name} compiler itself")


# Attributes and constant inputs

CONV = {"w": rand(6, 4, 3, 3)}
POOL = {"kernel_shape": [2, 2]}
INT = {"s": np.array([HUGE, HUGE]), "one": np.array([1]), "minus": np.array([-5])}
HOSTILE: dict[str, tuple[Any, ...]] = {
    # name: (operator, inputs of the graph, inputs, attributes, weights, what the message says)
    "unknown attribute": ("Relu", X, "x", {"shape": [4]}, {}, "n_y shape"),
    "attribute of another type": ("Softmax", X, "x", {"axis": "last"}, {}, "n_y axis"),
    "attribute missing": ("Concat", X, "x x", {}, {}, "n_y axis"),
    "too many inputs": ("Relu", X, "x x x", {}, {}, "n_y"),
    "axis out of range": ("Softmax", X, "x", {"axis": 7}, {}, "n_y"),
    "huge axis": ("Concat", X, "x x", {"axis": HUGE}, {}, "n_y"),
    "axis of a scale": ("DequantizeLinear", {"x": ("int8", ["b", 8])}, "x v", {"axis": -9},
                        {"v": rand(8)}, "n_y axis"),
    "perm no permutation": ("Transpose", X, "x", {"perm": [0, 0]}, {}, "n_y"),
    "perm too long": ("Transpose", X, "x", {"perm": [0, 1, 2]}, {}, "n_y"),
    "scale too short": ("LayerNormalization", X, "x w", {}, {"w": rand(3)}, "n_y 'w'"),
    "scale of other channels": ("InstanceNormalization", IMAGE, "x w b", {},
                                {"w": rand(3), "b": rand(4)}, "n_y scale [3] 4"),
    "scale of other groups": ("GroupNormalization", IMAGE, "x w w", {"num_groups": 2},
                              {"w": rand(4)}, "n_y scale [4] 2"),
    "groups of channels": ("GroupNormalization", IMAGE, "x w w", {"num_groups": 3}, {"w": rand(3)},
                           "n_y num_groups 3 4"),
    "slope of others": ("PRelu", IMAGE, "x w", {}, {"w": rand(3, 1, 1)}, "n_y slope"),
    "slope of more axes": ("PRelu", X, "x w", {}, {"w": rand(2, 1, 1)}, "n_y slope"),
    "hidden size of others": ("LSTM", {"x": ("float32", [5, 2, 8])}, "x w r", {"hidden_size": HUGE},
                              {"w": rand(1, 16, 8), "r": rand(1, 16, 4)}, "n_y hidden_size"),
    "axes twice": ("ReduceSum", X, "x a", {}, {"a": np.array([1, -1])}, "n_y"),
    "axes out of range": ("Squeeze", X, "x a", {}, {"a": np.array([HUGE])}, "n_y"),
    "unsqueezed twice": ("Unsqueeze", X, "x a", {}, {"a": np.array([0, 0])}, "n_y"),
    "group 0": ("Conv", IMAGE, "x w", {"group": 0}, CONV, "n_y group"),
    "group -1": ("Conv", IMAGE, "x w", {"group": -1}, CONV, "n_y group"),
    "group does not divide": ("Conv", IMAGE, "x w", {"group": 4}, CONV, "n_y"),
    "strides 0": ("Conv", IMAGE, "x w", {"strides": [0, 0]}, CONV, "n_y strides"),
    "huge strides": ("Conv", IMAGE, "x w", {"strides": [HUGE, 1]}, CONV, "n_y strides"),
    "dilations 0": ("Conv", IMAGE, "x w", {"dilations": [0, 1]}, CONV, "n_y dilations"),
    "too few strides": ("Conv", IMAGE, "x w", {"strides": [1]}, CONV, "n_y"),
    "negative pads": ("Conv", IMAGE, "x w", {"pads": [-9, 0, 0, 0]}, CONV, "n_y pads"),
    "huge pads": ("Conv", IMAGE, "x w", {"pads": [HUGE] * 4}, CONV, "n_y pads"),
    "pads of 2 GB": ("Conv", IMAGE, "x w", {"pads": [1 << 30] * 4}, CONV, "n_y elements"),
    "another kernel": ("Conv", IMAGE, "x w", {"kernel_shape": [9, 9]}, CONV, "n_y kernel_shape"),
    "bias too short": ("Conv", IMAGE, "x w b", {}, {**CONV, "b": rand(2)}, "n_y bias"),
    "weight of another rank": ("Conv", IMAGE, "x w", {}, {"w": rand(6, 4, 3)}, "n_y"),
    "transposed channels": ("ConvTranspose", IMAGE, "x w", {"group": 3},
                            {"w": rand(4, 2, 3, 3)}, "n_y"),
    "output_padding": ("ConvTranspose", IMAGE, "x w", {"output_padding": [-7, 0]},
                       {"w": rand(4, 2, 3, 3)}, "n_y output_padding"),
    "kernel 0": ("MaxPool", IMAGE, "x", {"kernel_shape": [0, 0]}, {}, "n_y kernel_shape"),
    "kernel -1": ("AveragePool", IMAGE, "x", {"kernel_shape": [-1, 2]}, {}, "n_y kernel_shape"),
    "pool strides 0": ("MaxPool", IMAGE, "x", {**POOL, "strides": [0, 1]}, {}, "n_y strides"),
    "pool larger than input": ("MaxPool", IMAGE, "x", {"kernel_shape": [99, 99]}, {}, "n_y"),
    "pool of a matrix": ("MaxPool", FIXED, "x", POOL, {}, "n_y"),
    "blocksize 0": ("DepthToSpace", IMAGE, "x", {"blocksize": 0}, {}, "n_y blocksize"),
    "LRN size": ("LRN", IMAGE, "x", {"size": -3}, {}, "n_y size"),
    "Pad to 2^40": ("Pad", FIXED, "x s", {}, {"s": np.array([0, 0, 0, HUGE])}, "n_y elements"),
    "Pad to less than nothing": ("Pad", FIXED, "x s", {}, {"s": np.array([0, -9, 0, 0])}, "n_y"),
    "Pad by too few": ("Pad", FIXED, "x s", {}, {"s": np.array([1])}, "n_y"),
    "Expand to 2^80": ("Expand", {"x": ("float32", [1, 1])}, "x s", {}, INT, "n_y elements"),
    "Tile to 2^80": ("Tile", FIXED, "x s", {}, INT, "n_y elements"),
    "Tile -5 times": ("Tile", FIXED, "x s", {}, {"s": np.array([-5, 1])}, "n_y"),
    "ConstantOfShape 2^80": ("ConstantOfShape", X, "s", {}, INT, "n_y elements"),
    "ConstantOfShape -5": ("ConstantOfShape", X, "minus", {}, INT, "n_y"),
    "Range of 2^40": ("Range", X, "a s d", {},
                      {"a": np.array(0), "s": np.array(HUGE), "d": np.array(1)}, "n_y elements"),
    "OneHot of 2^40": ("OneHot", {"x": ("int64", [4])}, "x s v", {},
                       {"s": np.array(HUGE), "v": np.array([0, 1], np.float32)}, "n_y"),
    "Resize by 2^30": ("Resize", IMAGE, "x _ s", {},
                       {"s": np.array([1, 1, 2**30, 2**30], np.float32)}, "n_y"),
    "Resize by 0": ("Resize", IMAGE, "x _ s", {}, {"s": np.zeros(4, np.float32)}, "n_y"),
    "Resize by NaN": ("Resize", IMAGE, "x _ s", {}, {"s": np.full(4, np.nan, np.float32)}, ""),
    "Resize to 2^40": ("Resize", IMAGE, "x _ _ s", {}, {"s": np.array([1, 1, HUGE, 2])}, "n_y"),
    "Reshape to more": ("Reshape", FIXED, "x s", {}, {"s": np.array([7, 9])}, "n_y"),
    "Reshape to -2": ("Reshape", FIXED, "x s", {}, {"s": np.array([-2, -8])}, "n_y"),
    "Reshape to two unknowns": ("Reshape", FIXED, "x s", {}, {"s": np.array([-1, -1])}, "n_y"),
    "Split into negative": ("Split", FIXED, "x s", {"axis": 1}, {"s": np.array([-8, 16])}, "n_y"),
    "Split into more": ("Split", FIXED, "x s", {"axis": 1}, {"s": np.array([800, 8])}, "n_y"),
    "Split into 2^31": ("Split", FIXED, "x", {"axis": 1, "num_outputs": 2**31 - 1}, {}, "n_y"),
    "10^4 inputs": ("Concat", FIXED, " ".join(["x"] * 10**4), {"axis": 0}, {}, "n_y inputs"),
    "QuantizeLinear by 0": ("QuantizeLinear", FIXED, "x s", {}, {"s": np.float32(0)}, "n_y 0"),
    "QuantizeLinear by NaN": ("QuantizeLinear", FIXED, "x s", {}, {"s": np.float32(np.nan)},
                              "n_y NaN"),
    "DequantizeLinear by inf": ("DequantizeLinear", {"x": ("int8", [4])}, "x s", {},
                                {"s": np.float32(np.inf)}, "n_y infinite"),
    "step 0": ("Slice", FIXED, "x z o o z", {}, {"z": np.array([0]), "o": np.array([1])}, "n_y"),
    "Slice axes twice": ("Slice", FIXED, "x z o a", {},
                         {"z": np.zeros(2, int), "o": np.ones(2, int), "a": np.ones(2, int)},
                         "n_y"),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_numbers(case: str, tmp_path: Path) -> None:
    op, inputs, read, attrs, weights, words = HOSTILE[case]
    made = "y z" if op == "Split" else "y"
    nodes = [(op, read, made, attrs), ("Identity", "x", "same")]
    refused(save(build(nodes, inputs, f"{made} same", weights), tmp_path), words)
    # The same where nothing is computed by hand: all inputs are constants.
    constants = {k: np.zeros([d if isinstance(d, int) else 3 for d in s], t)
                 for k, (t, s) in inputs.items()}  # fmt: skip
    other = {"other": ("float32", [1])}
    nodes = [(op, read, made, attrs), ("Identity", "other", "same")]
    refused(save(build(nodes, other, f"{made} same", weights | constants), tmp_path), words)


def test_folding_has_a_budget(tmp_path: Path) -> None:
    """Forty doublings of a constant are not computed."""
    nodes: list[Any] = [("Concat", "c c", "c0", {"axis": 0})]
    nodes += [("Concat", f"c{i} c{i}", f"c{i + 1}", {"axis": 0}) for i in range(40)]
    nodes += [("ReduceSum", "c40", "s", {"keepdims": 0}), ("Add", "x s", "y")]
    path = save(build(nodes, X, "y", {"c": rand(1000)}), tmp_path)
    refused(path, "elements")


def test_sizes_have_bounds(tmp_path: Path) -> None:
    """Squaring a size again and again: neither numbers nor expressions grow without end."""
    start = time.process_time()
    for source in ("Shape", "Constant"):
        nodes: list[Any] = [("Shape", "x", "n0")] if source == "Shape" else []
        nodes += [("Mul", f"n{i} n{i}", f"n{i + 1}") for i in range(60)]
        nodes += [("Add", f"n{i + 1} n{i}", f"m{i}") for i in range(60)]
        nodes += [("ConstantOfShape", "m59", "y")]
        weights = {} if source == "Shape" else {"n0": np.array([3, 5])}
        shape = ["a", "b"] if source == "Shape" else [1, 1]
        path = save(build(nodes, {"x": ("float32", shape)}, "y", weights), tmp_path)
        if source == "Shape":
            assert import_onnx(path).outputs[0].shape  # a run computes and checks it
        else:
            with pytest.raises(ImportFailed, match="non-negative"):
                import_onnx(path)
    assert time.process_time() - start < 2 * SECONDS


def test_interpolation_has_a_bound(tmp_path: Path) -> None:
    """A few bytes that ask for a matrix of 65536 x 98304; found by the importer's fuzzer."""
    inputs = {"x": ("float32", [1, 1, 1 << 16, 8])}
    for scale, more in ((1.500001, {"mode": "linear"}), (0.5, {"mode": "cubic", "antialias": 1})):
        weights = {"s": np.array([1, 1, scale, 1], np.float32)}
        refused(
            save(build([("Resize", "x _ s", "y", more)], inputs, "y", weights, 18), tmp_path),
            f"n_y 65536 {scale:g}",
        )


def test_joined_groups_have_a_bound(tmp_path: Path) -> None:
    """A prime number of groups cannot be joined in parts; zeros between all would take 34 GB."""
    groups, before = 65521, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    inputs, weights = {"x": ("float32", [1, groups, 2, 2])}, {"w": rand(2 * groups, 1, 1, 1)}
    path = save(build([("Conv", "x w", "y", {"group": groups})], inputs, "y", weights), tmp_path)
    assert import_onnx(path).outputs[0].shape == (1, 2 * groups, 2, 2)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MEGABYTES << 10


SLOW: dict[str, tuple[Any, ...]] = {
    # What onnx's reference computes in Python: (operator, inputs, attributes, opset).
    "Resize": ("image _ image_scales", {"mode": "cubic"}, 17),
    "Conv": ("image image", {"pads": [128] * 4}, 17),
    "RoiAlign": ("image boxes numbers", {"sampling_ratio": 1 << 20}, 17),
    "GridSample": ("image grid", {}, 20),
    "LRN": ("image", {"size": 9999}, 17),
    "Einsum": ("row row row", {"equation": "i,j,k->"}, 17),
    "DFT": ("signal", {"axis": 1}, 17),
}


def test_folding_takes_no_time(tmp_path: Path) -> None:
    """Constants of 65536 entries that a few bytes make, read by slow operators."""
    start = time.process_time()
    for op, (read, attrs, opset) in SLOW.items():
        weights = {"n": np.array([1 << 16]), "square": np.array([1, 1, 256, 256]),
                   "line": np.array([1, 1 << 16, 1]), "pairs": np.array([1, 128, 256, 2]),
                   "image_scales": np.array([1, 1, 1.01, 1.01], np.float32),
                   "boxes": rand(9, 4), "numbers": np.zeros(9, np.int64)}  # fmt: skip
        nodes: list[Any] = [("ConstantOfShape", "n", "row"), ("Reshape", "row square", "image")]
        nodes += [("Reshape", "row pairs", "grid"), ("Reshape", "row line", "signal")]
        nodes += [(op, read, "y", attrs), ("Identity", "x", "same")]
        path = save(build([*nodes, ("Abs", "y", "z")], X, "z same", weights, opset), tmp_path)
        with suppress(ImportFailed, UnsupportedModel):
            import_onnx(path)
    assert time.process_time() - start < SECONDS * 2


def test_files_have_few_nodes_inside(tmp_path: Path) -> None:
    """Functions and loops that multiply, and a Scan over more inputs than there are."""
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("own", 1)]
    start = time.process_time()
    for calls, count, word in ((2, 40, "nodes"), (1, 3000, "deep"), (1, 1, "itself")):
        functions = []
        for i in range(count):
            last = i + 1 == count and count > 1
            op, domain = ("Relu", "") if last else (f"f{(i + 1) % count}", "own")
            names = ["a", *(f"t{j}" for j in range(calls - 1)), "b"]
            nodes = [helper.make_node(op, [x], [y], domain=domain) for x, y in pairwise(names)]
            functions.append(helper.make_function("own", f"f{i}", ["a"], ["b"], nodes, opsets))
        model = build([("own.f0", "x", "y")], X, "y", domains={"own": 1})
        model.functions.extend(functions)
        refused(save(model, tmp_path), word)
    value = helper.make_tensor_value_info
    body = helper.make_graph([helper.make_node("Relu", ["s"], ["t"])], "in", [], [])
    for level in range(8):
        ends = [value(f"o{level}", 9, []), value("t", 1, None)]
        takes = [value("i", 7, []), value(f"g{level}", 9, []), value("s", 1, None)]
        nodes = [*body.node, helper.make_node("Identity", [f"g{level}"], [f"o{level}"])]
        body = helper.make_graph(nodes, "body", takes, ends)
        loop = helper.make_node("Loop", ["n", "go", "s"], ["t"], body=body)
        body = helper.make_graph([loop], "in", [], [])
    weights = {"n": np.array(16), "go": np.array(True)}
    model = build([("Identity", "x", "s"), ("Identity", "t", "y")], X, "y", weights)
    model.graph.node.insert(1, loop)
    assert len(import_onnx(save(model, tmp_path)).nodes) < 4 * MANY_NODES
    assert time.process_time() - start < SECONDS * 4
    scan = helper.make_node("Scan", ["x", "x"], ["y"], body=loop.attribute[0].g)
    scan.attribute.append(helper.make_attribute("num_scan_inputs", 1 << 31))
    model.graph.node[1].CopyFrom(scan)
    del model.graph.node[2]
    refused(save(model, tmp_path), "num_scan_inputs 2147483648")


def test_inputs_have_bounds(tmp_path: Path) -> None:
    model = build([("Relu", "x", "y")], {"x": ("uint8", [HUGE, 1 << 62])}, "y")
    refused(save(model, tmp_path), f"'x' {HUGE}")
    refused(save(build([("Relu", "x", "y")], {"x": ("uint8", [1] * 65)}, "y"), tmp_path), "65 axes")
    for kind in (0, 99):
        model = build([("Relu", "x", "y")], X, "y")
        model.graph.input[0].type.tensor_type.elem_type = kind
        refused(save(model, tmp_path), f"'x' type {kind}")


def test_attributes_that_no_schema_sees(tmp_path: Path) -> None:
    model = build([("LeakyRelu", "x", "y")], X, "y")
    model.graph.node[0].attribute.add(name="alpha", ref_attr_name="q", type=1)
    refused(save(model, tmp_path), "n_y alpha refers")
    data = build([("Gelu", "x", "y", {"approximate": "tanhh"})], X, "y", opset=20)
    path = save(data, tmp_path)
    path.write_bytes(path.read_bytes().replace(b"tanhh", b"\xff\xfeaaa"))
    refused(path, "n_y approximate")
    model = build([("If", "c", "y", {"then_branch": 3})], {**X, "c": ("bool", [])}, "y")
    refused(save(model, tmp_path), "n_y then_branch")
    refused(save(build([("Cast", "x", "y", {"to": 8})], X, "y"), tmp_path), "n_y strings")


FAR, ENTRY = {"i": np.array(1 << 62)}, {"i": np.array(0)}
LISTS: dict[str, tuple[Any, ...]] = {
    # name: (nodes, weights, what the message says)
    "of lists": ([("SequenceConstruct", "x", "s"), ("SequenceInsert", "s s", "t"),
                  ("ConcatFromSequence", "t", "y", {"axis": 0})], {}, "n_y 's'"),
    "that is no list": ([("SequenceAt", "x i", "y")], ENTRY, "n_y 'x'"),
    "that is an output": ([("SequenceConstruct", "x x", "y")], {}, "'y' sequence"),
    "read as a tensor": ([("SequenceConstruct", "x x", "s"), ("Relu", "s", "y")], {}, "n_y 's'"),
    "read past its end": ([("SequenceConstruct", "x x", "s"), ("SequenceAt", "s i", "y")], FAR,
                          "n_y 2 entries"),
    "of nothing": ([("SequenceEmpty", "", "s"), ("ConcatFromSequence", "s", "y", {"axis": 0})],
                   {}, "n_y no entries"),
    "joined along no axis": ([("SequenceConstruct", "x x", "s"),
                              ("ConcatFromSequence", "s", "y", {"axis": HUGE})], {}, "n_y axis"),
    "of pieces of 0": ([("SplitToSequence", "x i", "s", {"axis": 1}), ("SequenceLength", "s", "y")],
                       ENTRY, "n_s pieces"),
    "of as many pieces as data say": (
        [("Cast", "x", "c", {"to": 7}), ("Reshape", "c flat", "r"),
         ("SplitToSequence", "x r", "s", {"axis": 1}), ("SequenceLength", "s", "y")],
        {"flat": np.array([-1])}, "n_s pieces depends"),
    "that grows": ([("SequenceEmpty", "", "s0"), ("SequenceLength", "s9999", "y"),
                    *(("SequenceInsert", f"s{i} x", f"s{i + 1}") for i in range(9999))],
                   {}, "entries"),
}  # fmt: skip


@pytest.mark.parametrize("case", LISTS)
def test_lists(case: str, tmp_path: Path) -> None:
    nodes, weights, words = LISTS[case]
    refused(save(build(nodes, X, "y", weights), tmp_path), words)


def test_as_many_nodes_as_nobody_writes(tmp_path: Path) -> None:
    nodes = [("Relu", f"v{i}", f"v{i + 1}") for i in range(100_000)]
    path = save(build(nodes, {"v0": ("float32", [4])}, "v100000"), tmp_path)
    refused(path, "100000 nodes Loop")


def test_a_thousand_names_of_one_size(tmp_path: Path) -> None:
    names = [f"x{i}" for i in range(1000)]
    inputs = {name: ("float32", [f"d{name}"]) for name in names}
    path = save(build([("Sum", " ".join(names), "y")], inputs, "y"), tmp_path)
    start = time.process_time()
    assert len({spec.shape for spec in import_onnx(path).inputs}) == 1
    assert time.process_time() - start < SECONDS


def test_an_old_opset_that_ends_the_converter(tmp_path: Path) -> None:
    """Slice with text for its ends is a segmentation fault in onnx's converter."""
    nodes = [("Slice", "x", "y", {"starts": [1], "ends": "x"})]
    refused(save(build(nodes, X, "y", opset=8), tmp_path), "opset 8 malformed")


def test_equal_names_take_no_time(tmp_path: Path) -> None:
    """Three thousand nodes of one name, in the wrong order."""
    nodes = [("Relu", f"v{i}", f"v{i + 1}") for i in range(3_000)]
    model = build(nodes[::-1], {"v0": ("float32", [4])}, "v3000")
    for node in model.graph.node:
        node.name = "same"
    start = time.process_time()
    names = [node.name for node in import_onnx(save(model, tmp_path)).nodes]
    assert len(set(names)) == len(names)
    assert time.process_time() - start < 60
