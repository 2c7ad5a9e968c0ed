"""Every way a file can be wrong has an error that names what is wrong."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx_models import build, check, ops, rand, save

from apq_tvm.errors import ImportFailed, UnsupportedModel
from apq_tvm.onnx_import import import_onnx
from apq_tvm.quantizers.plan import quantize

X = {"x": ("float32", ["b", 8])}
LAYER = [("MatMul", "x w", "y")]


def layer(opset: int = 17) -> onnx.ModelProto:
    return build(LAYER, X, "y", {"w": rand(8, 6)}, opset)


# The file


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ImportFailed, match=r"absent\.onnx.*No such file"):
        import_onnx(tmp_path / "absent.onnx")


def test_folder_instead_of_a_file(tmp_path: Path) -> None:
    with pytest.raises(ImportFailed, match="Is a directory"):
        import_onnx(tmp_path)


@pytest.mark.parametrize("data", [b"", b"PK\x03\x04" * 64, b"hello world\n", bytes(300)])
def test_not_onnx(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(data)
    with pytest.raises(ImportFailed, match=r"model\.onnx.*not an ONNX file"):
        import_onnx(path)


def test_truncated_anywhere(tmp_path: Path) -> None:
    data = layer().SerializeToString()
    path = tmp_path / "model.onnx"
    for size in range(0, len(data), 7):
        path.write_bytes(data[:size])
        with pytest.raises((ImportFailed, UnsupportedModel)):
            import_onnx(path)


def test_a_string_works_as_path(tmp_path: Path) -> None:
    assert import_onnx(str(save(layer(), tmp_path))).name == "model"


# External data


def external(tmp_path: Path, location: str, length: int | None = None, offset: int = 0) -> Path:
    """A model whose weight ``w`` lies in another file."""
    model = layer()
    weight = model.graph.initializer[0]
    raw = numpy_helper.to_array(weight).tobytes()
    weight.ClearField("raw_data")
    weight.data_location = TensorProto.EXTERNAL
    entries = {"location": location, "offset": offset, "length": length or len(raw)}
    for key, value in entries.items():
        weight.external_data.add(key=key, value=str(value))
    return save(model, tmp_path)


def write_weight(path: Path, offset: int = 0) -> bytes:
    raw = rand(8, 6).tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(offset) + raw)
    return raw


@pytest.mark.parametrize("location", ["w.bin", "data/w.bin"])
@pytest.mark.parametrize("offset", [0, 3, 4096])
def test_external_data_is_mapped(tmp_path: Path, location: str, offset: int) -> None:
    write_weight(tmp_path / location, offset)
    path = external(tmp_path, location, offset=offset)
    assert ops(check(path, {"b": 3})) == {"apq.Linear": 1}


@pytest.mark.parametrize("location", ["w.bin", "w\0.bin", "w" * 5000])
def test_external_data_missing(tmp_path: Path, location: str) -> None:
    with pytest.raises(ImportFailed, match=r"'w'.*w.*missing"):
        import_onnx(external(tmp_path, location))


@pytest.mark.parametrize("dims", [[1 << 32, 1 << 32], [0, 1 << 62], [1] * 65, [-8, -6]])
def test_weights_of_impossible_shapes(tmp_path: Path, dims: list[int]) -> None:
    model = layer()
    model.graph.initializer[0].dims[:] = dims
    with pytest.raises(ImportFailed, match="'w' has the impossible shape"):
        import_onnx(save(model, tmp_path))


def test_external_data_truncated(tmp_path: Path) -> None:
    write_weight(tmp_path / "w.bin")
    data = (tmp_path / "w.bin").read_bytes()
    (tmp_path / "w.bin").write_bytes(data[:-1])
    with pytest.raises(ImportFailed, match=r"'w'.*192.*w\.bin.*191.*truncated"):
        import_onnx(external(tmp_path, "w.bin"))


def test_external_data_of_another_length(tmp_path: Path) -> None:
    write_weight(tmp_path / "w.bin")
    with pytest.raises(ImportFailed, match=r"'w'.*\[8, 6\].*192 bytes.*100"):
        import_onnx(external(tmp_path, "w.bin", length=100))


@pytest.mark.parametrize(
    "location",
    ["/etc/passwd", "../w.bin", "a/../../w.bin", "", "C:\\w.bin", "..\\w.bin", "\\\\host\\w"],
)
def test_external_data_outside_the_folder(tmp_path: Path, location: str) -> None:
    write_weight(tmp_path / "w.bin")
    folder = tmp_path / "model"
    folder.mkdir()
    with pytest.raises(ImportFailed, match=r"'w'.*not a file inside the model's folder"):
        import_onnx(external(folder, location))


@pytest.mark.parametrize("linked", ["file", "folder"])
def test_external_data_through_a_link(tmp_path: Path, linked: str) -> None:
    write_weight(tmp_path / "elsewhere" / "w.bin")
    folder = tmp_path / "model"
    folder.mkdir()
    if linked == "file":
        (folder / "w.bin").symlink_to(tmp_path / "elsewhere" / "w.bin")
        path = external(folder, "w.bin")
    else:
        (folder / "data").symlink_to(tmp_path / "elsewhere")
        path = external(folder, "data/w.bin")
    with pytest.raises(ImportFailed, match=r"'w'.*link"):
        import_onnx(path)


def test_external_data_that_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "w.bin")
    with pytest.raises(ImportFailed, match=r"'w'.*no regular file"):
        import_onnx(external(tmp_path, "w.bin"))


def test_external_data_at_no_number(tmp_path: Path) -> None:
    write_weight(tmp_path / "w.bin")
    path = external(tmp_path, "w.bin")
    model = onnx.ModelProto.FromString(path.read_bytes())
    model.graph.initializer[0].external_data[1].value = "here"
    with pytest.raises(ImportFailed, match=r"'w'.*no number"):
        import_onnx(save(model, tmp_path))


def test_weight_of_the_wrong_size(tmp_path: Path) -> None:
    model = layer()
    model.graph.initializer[0].raw_data = b"\0" * 100
    with pytest.raises(ImportFailed, match=r"'w'.*does not fill its shape"):
        import_onnx(save(model, tmp_path))


# The graph


def test_cycle(tmp_path: Path) -> None:
    nodes = [("Add", "x z", "a"), ("Relu", "a", "b"), ("Neg", "b", "z"), ("Relu", "z", "y")]
    with pytest.raises(ImportFailed, match=r"cycle.*'n_a', 'n_z', 'n_b'|cycle.*n_a.*n_b"):
        import_onnx(save(build(nodes, X, "y"), tmp_path))


def test_value_nobody_makes(tmp_path: Path) -> None:
    with pytest.raises(ImportFailed, match="Add 'n_y' reads 'ghost'"):
        import_onnx(save(build([("Add", "x ghost", "y")], X, "y"), tmp_path))


def test_output_nobody_makes(tmp_path: Path) -> None:
    with pytest.raises(ImportFailed, match="graph output 'z'"):
        import_onnx(save(build(LAYER, X, "y z", {"w": rand(8, 6)}), tmp_path))


def test_an_output_that_is_listed_twice_is_one(tmp_path: Path) -> None:
    model = layer()
    model.graph.output.append(model.graph.output[0])
    assert [spec.name for spec in import_onnx(save(model, tmp_path)).outputs] == ["y"]


@pytest.mark.parametrize("what", ["input", "weight", "value"])
def test_names_that_occur_twice(tmp_path: Path, what: str) -> None:
    model = layer()
    graph = model.graph
    if what == "input":
        graph.input.append(graph.input[0])
    elif what == "weight":
        graph.initializer.append(numpy_helper.from_array(rand(8, 6, seed=9), "w"))
    else:
        graph.node.append(graph.node[0])
    name = {"input": "x", "output": "y", "weight": "w", "value": "y"}[what]
    with pytest.raises(ImportFailed, match=f"{what} names must be unique: '{name}'"):
        import_onnx(save(model, tmp_path))


def test_a_constant_and_a_weight_of_one_name(tmp_path: Path) -> None:
    model = layer()
    value = numpy_helper.from_array(rand(8, 6))
    model.graph.node.insert(0, helper.make_node("Constant", [], ["w"], value=value))
    with pytest.raises(ImportFailed, match="unique: 'w'"):
        import_onnx(save(model, tmp_path))


def test_an_input_that_only_shadows_a_weight_is_no_input(tmp_path: Path) -> None:
    model = layer()
    model.graph.input.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, [8, 6]))
    assert [spec.name for spec in import_onnx(save(model, tmp_path)).inputs] == ["x"]


def test_shapes_that_contradict_each_other(tmp_path: Path) -> None:
    with pytest.raises(
        ImportFailed, match=r"MatMul 'n_y'.*'x' float32\[b, 8\].*'w' float32\[7, 6\]"
    ):
        import_onnx(save(build(LAYER, X, "y", {"w": rand(7, 6)}), tmp_path))


def test_constants_that_contradict_each_other(tmp_path: Path) -> None:
    nodes = [("Reshape", "w t", "r"), ("MatMul", "x r", "y")]
    weights = {"w": rand(8, 6), "t": np.array([7, 6])}
    with pytest.raises(ImportFailed, match="Reshape 'n_r'"):
        import_onnx(save(build(nodes, X, "y", weights), tmp_path))


def test_control_flow(tmp_path: Path) -> None:
    """Bodies of other operators than If, Loop and Scan, also inside of a branch."""
    inner = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["z"])],
        "inner",
        [],
        [helper.make_empty_tensor_value_info("z")],
    )
    branch = helper.make_graph(
        [helper.make_node("SequenceMap", ["x"], ["z"], name="each", body=inner)],
        "branch",
        [],
        [helper.make_empty_tensor_value_info("z")],
    )
    model = build([("Relu", "x", "r")], {**X, "c": ("bool", [])}, "y")
    node = helper.make_node(
        "If", ["c"], ["y"], name="choose", then_branch=branch, else_branch=inner
    )
    model.graph.node.append(node)
    with pytest.raises(UnsupportedModel, match=r"control flow.*SequenceMap 'each'"):
        import_onnx(save(model, tmp_path))


def test_all_unsupported_operators_at_once(tmp_path: Path) -> None:
    nodes = [
        ("Optional", "x", "a"),
        ("Optional", "x", "b"),
        ("com.example.Magic", "x", "c"),
        ("Optional", "m", "d"),
        ("Unheard", "p", "e"),
    ]
    inputs = {**X, "m": ("float32", [3, 3]), "p": ("float32", [1, 1, 4])}
    model = build(nodes, inputs, "a b c d e", domains={"com.example": 1})
    with pytest.raises(UnsupportedModel) as raised:
        import_onnx(save(model, tmp_path))
    message = str(raised.value)
    assert "Optional (optionals are no tensors): 'n_a', 'n_b', 'n_d'" in message
    assert "com.example.Magic: 'n_c'" in message
    assert "Unheard: 'n_e'" in message


def test_unsupported_operators_on_constants_or_nowhere_do_no_harm(tmp_path: Path) -> None:
    nodes = [
        ("NonZero", "w", "i"),
        ("Gather", "i zero", "rows", {"axis": 0}),
        ("Gather", "x rows", "y", {"axis": 1}),
        ("Unique", "m", "unread"),
    ]
    inputs = {**X, "m": ("float32", [3, 3])}
    weights = {"w": np.array([0, 1, 1, 0], np.int64), "zero": np.array(0, np.int64)}
    model = check(save(build(nodes, inputs, "y", weights), tmp_path), {"b": 2})
    assert ops(model) == {"apq.Slice": 1}


def test_shapes_that_depend_on_data(tmp_path: Path) -> None:
    """Sizes become symbols; ranks cannot."""
    inputs = {**X, "t": ("int64", [2]), "axis": ("int64", [1])}
    model = import_onnx(save(build([("Reshape", "x t", "y")], inputs, "y"), tmp_path))
    assert model.outputs[0].shape == ("run0", "run1")
    with pytest.raises(UnsupportedModel, match=r"run time.*ReduceSum 'n_y' \(by 'axis'\)"):
        import_onnx(save(build([("ReduceSum", "x axis", "y")], inputs, "y"), tmp_path))
    many = {**X, "t": ("int64", ["b"])}
    with pytest.raises(UnsupportedModel, match="Reshape 'n_y': how many numbers 't'"):
        import_onnx(save(build([("Reshape", "x t", "y")], many, "y"), tmp_path))


def test_functions_of_the_model_are_inlined(tmp_path: Path) -> None:
    model = build([("local.Twice", "x", "h"), ("MatMul", "h w", "y")], X, "y", {"w": rand(8, 6)})
    opset = [helper.make_opsetid("", 17)]
    body = [helper.make_node("Add", ["a", "a"], ["b"], name="double")]
    model.functions.append(helper.make_function("local", "Twice", ["a"], ["b"], body, opset))
    model.opset_import.append(helper.make_opsetid("local", 1))
    assert ops(check(save(model, tmp_path), {"b": 2})) == {"Add": 1, "apq.Linear": 1}


# Versions and types


@pytest.mark.parametrize("opset", [8, 9, 10])
def test_old_opsets_are_converted(tmp_path: Path, opset: int) -> None:
    path = save(layer(opset), tmp_path)
    model = check(path, {"b": 2})
    assert model.opset == 11


def test_upsample_of_opset_9(tmp_path: Path) -> None:
    inputs, scales = {"x": ("float32", ["b", 3, 4, 5])}, np.array([1, 1, 2, 3], np.float32)
    nodes = [("Upsample", "x s", "y", {"mode": "linear"})]
    path = save(build(nodes, inputs, "y", {"s": scales}, opset=9), tmp_path)
    (node,) = import_onnx(path).nodes
    assert node.op == "apq.ResizeAxes" and node.attrs["shape"] == ("b", 3, 8, 15)
    wanted = {"mode": "linear", "coordinates": "asymmetric", "scales": (2.0, 3.0)}
    assert wanted.items() <= node.attrs.items()


@pytest.mark.parametrize("shape", [(2, 3), (2, 3, 3), (2, 3, 4, 5)])
def test_slopes_of_opset_6_are_of_channels(tmp_path: Path, shape: tuple[int, ...]) -> None:
    """One that is as long as the last axis too is read like the others."""
    slope = np.array([0.25, 0.5, 2], np.float32)
    model = build([("PRelu", "x s", "y")], {"x": ("float32", shape)}, "y", {"s": slope}, opset=6)
    (node,) = (n for n in import_onnx(save(model, tmp_path)).nodes if n.op == "PRelu")
    weights = import_onnx(save(model, tmp_path)).weights
    assert weights[node.inputs[1]].shape == (3, *[1] * (len(shape) - 2))


@pytest.mark.parametrize("sizes", [[3, 5], 3])
def test_pieces_of_a_sequence_of_opset_11(tmp_path: Path, sizes: object) -> None:
    """``Split`` has its sizes in an attribute there."""
    nodes = [("SplitToSequence", "x n", "s", {"axis": 1}), ("SequenceAt", "s i", "y")]
    weights = {"n": np.asarray(sizes, np.int64), "i": np.asarray(1, np.int64)}
    model = import_onnx(save(build(nodes, X, "y", weights, opset=11), tmp_path))
    (split,) = (node for node in model.nodes if node.op == "Split")
    assert split.attrs["split"] == ((3, 5) if isinstance(sizes, list) else (3, 3, 2))
    assert len(split.inputs) == 1


def test_an_old_opset_that_cannot_be_converted(tmp_path: Path) -> None:
    nodes = [("BatchNormalization", "x g g g g", "y", {"spatial": 0})]
    model = build(nodes, X, "y", {"g": rand(8)}, opset=7)
    with pytest.raises(UnsupportedModel, match=r"opset 7, older than 11.*spatial"):
        import_onnx(save(model, tmp_path))


def test_an_opset_from_the_future(tmp_path: Path) -> None:
    model = layer()
    model.opset_import[0].version = 999
    with pytest.raises(UnsupportedModel, match=r"opset 999.*upgrade"):
        import_onnx(save(model, tmp_path))


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite(tmp_path: Path, dtype: str, value: float) -> None:
    """They stay float, with a remark, and are refused where the user asks for codes."""
    weight = rand(16, 6).astype(dtype)
    weight[3, 2] = value
    nodes = [("Cast", "w", "f", {"to": 1}), ("MatMul", "x f", "y")]
    inputs = {"x": ("float32", ["b", 16])}
    model = import_onnx(save(build(nodes, inputs, "y", {"w": weight}), tmp_path))
    quantized = quantize(model, "W8A8")
    assert not quantized.layers and "infinities or NaN" in quantized.notes["n_y"]
    with pytest.raises(UnsupportedModel, match=r"NaN|infinit"):
        quantize(model, "W8A8", {"n_y": "W4A8"})


def test_float64_weights_beyond_float32(tmp_path: Path) -> None:
    weight = rand(8, 6).astype(np.float64)
    weight[0, 0] = 1e300
    inputs = {"x": ("float64", ["b", 8])}
    with pytest.raises(UnsupportedModel, match=r"'w' of a linear layer.*infinities"):
        import_onnx(save(build(LAYER, inputs, "y", {"w": weight}), tmp_path))


def test_infinities_in_masks_are_fine(tmp_path: Path) -> None:
    nodes = [("Where", "c x low", "y")]
    inputs = {**X, "c": ("bool", ["b", 8])}
    path = save(build(nodes, inputs, "y", {"low": np.array([-np.inf], np.float32)}), tmp_path)
    assert ops(check(path, {"b": 2})) == {"Where": 1}


def test_strings(tmp_path: Path) -> None:
    model = layer()
    model.graph.initializer.append(helper.make_tensor("s", TensorProto.STRING, [1], [b"a"]))
    with pytest.raises(UnsupportedModel, match="'s' holds strings"):
        import_onnx(save(model, tmp_path))
    model = layer()
    model.graph.input.append(helper.make_tensor_value_info("t", TensorProto.STRING, [1]))
    with pytest.raises(UnsupportedModel, match="input 't' holds strings"):
        import_onnx(save(model, tmp_path))


def test_sequences(tmp_path: Path) -> None:
    model = layer()
    model.graph.input.append(helper.make_tensor_sequence_value_info("q", TensorProto.FLOAT, [None]))
    with pytest.raises(UnsupportedModel, match="input 'q' holds sequence"):
        import_onnx(save(model, tmp_path))


def test_inputs_without_rank(tmp_path: Path) -> None:
    model = layer()
    model.graph.input[0].type.tensor_type.ClearField("shape")
    with pytest.raises(UnsupportedModel, match="input 'x' has no shape"):
        import_onnx(save(model, tmp_path))


def test_sparse_weights(tmp_path: Path) -> None:
    model = layer()
    values = helper.make_tensor("sp", TensorProto.FLOAT, [1], [1.0])
    indices = helper.make_tensor("i", TensorProto.INT64, [1], [0])
    model.graph.sparse_initializer.append(helper.make_sparse_tensor(values, indices, [4]))
    with pytest.raises(UnsupportedModel, match=r"sparse weights.*'sp'"):
        import_onnx(save(model, tmp_path))


def test_a_row_outside_its_table(tmp_path: Path) -> None:
    nodes = [
        ("Shape", "x", "s"),
        ("ConstantOfShape", "s", "ids", {"value": np.array([9])}),
        ("Gather", "t ids", "y"),
    ]
    with pytest.raises(ImportFailed, match="Gather 'n_y' reads row 9"):
        import_onnx(save(build(nodes, X, "y", {"t": rand(4, 8)}), tmp_path))


@pytest.mark.parametrize(
    ("head", "said"),
    [
        (b"version https://git-lfs.github.com/spec/v1", "a pointer of Git LFS.*git lfs pull"),
        (b"\n<!DOCTYPE html><html>", "a web page"),
        (b"\x18\0\0\0ORTM", r"ONNX Runtime's own format \(\.ort\)"),
        (b"\x1c\0\0\0TFL3", "TFLite: convert it"),
        (b"GGUF\3\0\0\0", "GGUF: compile an ONNX export"),
        (b"PK\x03\x04", "a zip archive"),
        (b'\x20\0\0\0\0\0\0\0{"w":', "safetensors, which holds weights alone"),
    ],
)
def test_other_formats_are_named(tmp_path: Path, head: bytes, said: str) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(head + bytes(100))
    with pytest.raises(ImportFailed, match=rf"model\.onnx' is not an ONNX file but {said}"):
        import_onnx(path)


def test_names_that_look_like_other_formats_are_names(tmp_path: Path) -> None:
    model = build([("Relu", "x", "y")], {"x": ("float32", ["n"])}, "y")
    model.producer_name = "TFL3"
    assert import_onnx(save(model, tmp_path)).nodes
