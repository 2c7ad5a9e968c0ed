"""A model's names may hold anything: they are data in the module's C and Python, never code."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from apq_tvm import pipeline
from apq_tvm.codegen.cuda.simulator import Simulator
from apq_tvm.types import CompiledModule
from tests.e2e.module.helpers import import_from, run_python

WIDTH = 64
SPLICED = "*\\\n/"  # the end of a comment once the compiler has joined the lines
TRIGRAPH = "*??/\n/"  # the same in C11 proper
ODD = ("*/", '"', "'''", '"""', "\\", "\n", "\r", "\0", "\u2028", "??/", "%n", "@NAME@", "${x}")


def hostile(role: str, ran: Path) -> str:
    """A name that ends a comment or a literal in every way and then holds code."""
    code = f'}}__attribute__((constructor)) static void _{role}(void){{system("touch {ran}");}}'
    python = f"\nopen({str(ran)!r}, 'w')\n"
    ends = [end + code for end in (SPLICED, TRIGRAPH, "*/", '"', "\n")]
    return "\n".join([role, *ODD, *ends, python, "日本", "x" * 5000])


def model(names: dict[str, str]) -> onnx.ModelProto:
    """softmax(relu(x @ w)) + b, every name of which is taken from `names`."""
    n = names
    rng = np.random.default_rng(0)
    weights = {
        n["weight"]: rng.standard_normal((WIDTH, WIDTH)).astype(np.float32),
        n["bias"]: rng.standard_normal(WIDTH).astype(np.float32),
    }
    shape = [n["dim"], WIDTH]
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", [n["input"], n["weight"]], [n["made"]], name=n["layer"]),
            helper.make_node("Relu", [n["made"]], [n["output"]], name=n["relu"]),
            helper.make_node("Softmax", [n["output"]], [n["soft"]], name=n["softmax"]),
            helper.make_node("Add", [n["soft"], n["bias"]], [n["second"]], name=n["add"]),
        ],
        n["graph"],
        [helper.make_tensor_value_info(n["input"], TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info(n[k], TensorProto.FLOAT, shape) for k in OUTPUTS],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


OUTPUTS = ("output", "second")
ROLES = (
    "weight", "bias", "dim", "input", "made", "layer", "relu", "softmax", "soft", "second", "add",
    "graph", "output",
)  # fmt: skip


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Is there once a name's code ran."""
    return tmp_path_factory.mktemp("hostile") / "ran"


@pytest.fixture(scope="module")
def names(ran: Path) -> dict[str, str]:
    return {role: hostile(role, ran) for role in ROLES}


@pytest.fixture(scope="module")
def compiled(names: dict[str, str], ran: Path) -> CompiledModule:
    path = ran.with_name("model.onnx")
    onnx.save(model(names), path)
    built = pipeline.compile(path, ran.with_name("hostile_module"), scheme="anyprec3-4")
    assert not ran.exists()
    return built


def test_names_are_data(compiled: CompiledModule, names: dict[str, str], ran: Path) -> None:
    code = "import hostile_module; print(len(hostile_module.outputs))"
    done = run_python(code, compiled.path.parent)
    assert done.stdout.strip() == "2", done.stderr
    module = import_from(compiled)
    assert [port.name for port in module.inputs] == [names["input"]]
    x = np.linspace(-1, 1, 3 * WIDTH, dtype=np.float32).reshape(3, WIDTH)
    results = module.run({names["input"]: x})
    assert list(results) == [names[key] for key in OUTPUTS]
    assert [y.shape for y in results.values()] == [x.shape] * 2
    assert not ran.exists()


def test_names_are_data_on_a_gpu(gpu: None, names: dict[str, str], ran: Path) -> None:
    """Kernels are CUDA source on their way."""
    path, output = ran.with_name("gpu.onnx"), ran.with_name("hostile_gpu")
    onnx.save(model(names), path)
    options = {"target": "rtx-3090", "images": Simulator()}
    module = import_from(pipeline.compile(path, output, scheme="anyprec3-4", **options))
    x = np.linspace(-1, 1, 3 * WIDTH, dtype=np.float32).reshape(3, WIDTH)
    assert [y.shape for y in module.run({names["input"]: x}).values()] == [x.shape] * 2
    assert not ran.exists()


def test_messages_hold_the_names(compiled: CompiledModule, names: dict[str, str]) -> None:
    module = import_from(compiled)
    with pytest.raises(module.InputError) as caught:
        module.run({names["input"]: np.ones((3, WIDTH - 1), np.float32)})
    # A NUL does not cut the message short.
    assert "input 'input\n*/\n\"" in str(caught.value)
    assert "${x}" in str(caught.value)


def test_layers_are_found_by_their_names(compiled: CompiledModule, names: dict[str, str]) -> None:
    module = import_from(compiled)
    assert module.precisions() == {names["layer"]: 4}
    module.set_precision(3, "^layer")
    assert module.precisions() == {names["layer"]: 3}


def test_header_is_sound(compiled: CompiledModule, ran: Path, tmp_path: Path) -> None:
    source = tmp_path / "user.c"
    source.write_text('#include "hostile_module.h"\nint main(void) { return 0; }\n')
    for standard in ("-std=c99", "-std=gnu17"):  # with trigraphs and without
        command = ["cc", standard, "-Wall", "-Wextra", "-Werror", "-pedantic", "-fsyntax-only"]
        subprocess.run([*command, f"-I{compiled.path}", str(source)], check=True)
    for name in ("hostile_module.h", "hostile_moduleConfig.cmake", "hostile_module.pc"):
        assert (compiled.path / name).read_bytes().isascii()
    assert not ran.exists()
