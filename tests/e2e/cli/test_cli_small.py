"""Every command on a small model, through the real pipeline and the entry point."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from typer.testing import CliRunner

from apq_tvm.bench import openvino
from apq_tvm.cli.main import app

ROOT = Path(__file__).resolve().parents[3]
WIDTH = 64


def apq(*words: object, cwd: Path) -> Any:
    """Run ``apq-tvm`` in this process, which has imported TVM."""
    with contextlib.chdir(cwd):
        return CliRunner().invoke(app, [*map(str, words)])


def report(*words: object, cwd: Path) -> Any:
    """The JSON document of a command that must succeed."""
    done = apq(*words, "--json", cwd=cwd)
    assert done.exit_code == 0, done.stderr
    return json.loads(done.stdout)


def write_model(path: Path) -> Path:
    """Two linear layers with bias and Relu: x [batch, 64] to y [batch, 64]."""
    rng = np.random.default_rng(0)
    arrays = {
        "w1": rng.standard_normal((WIDTH, 2 * WIDTH)) / 8,
        "b1": rng.standard_normal(2 * WIDTH),
        "w2": rng.standard_normal((2 * WIDTH, WIDTH)) / 11,
    }
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", "w1"], ["h1"], name="first"),
            helper.make_node("Add", ["h1", "b1"], ["h2"], name="bias"),
            helper.make_node("Relu", ["h2"], ["h3"], name="relu"),
            helper.make_node("MatMul", ["h3", "w2"], ["y"], name="second"),
        ],
        "small",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", WIDTH])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", WIDTH])],
        [numpy_helper.from_array(a.astype(np.float32), n) for n, a in arrays.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, path)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with small.onnx, in.npz and the compiled module small_w8."""
    pytest.importorskip("onnxruntime")
    path = tmp_path_factory.mktemp("small")
    write_model(path / "small.onnx")
    x = np.random.default_rng(1).standard_normal((40, WIDTH)).astype(np.float32)
    np.savez(path / "in.npz", x=x)
    words = ("compile", "small.onnx", "-o", "small_w8", "--scheme", "W8A8g32", "--json")
    command = [sys.executable, "-c", "from apq_tvm.cli.main import main; main()", *words]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}  # in a process of its own, as users run it
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=path, timeout=900)
    assert done.returncode == 0, done.stderr
    assert [layer["scheme"] for layer in json.loads(done.stdout)["layers"]] == ["W8A8g32"] * 2
    return path


def test_eval_agrees_with_onnxruntime(folder: Path) -> None:
    words = ("eval", "small_w8", "--against", "small.onnx", "--inputs", "in.npz")
    y = report(*words, cwd=folder)["outputs"]["y"]
    assert y["rows"] == 40
    assert y["cosine_min"] > 0.9995
    assert 0 < y["max_abs_error"] < 0.2


def test_inspect_and_explain_know_the_layers(folder: Path) -> None:
    for command in ("inspect", "explain"):
        layers = report(command, "small_w8", cwd=folder)["layers"]
        assert [(layer["n"], layer["k"]) for layer in layers] == [(128, 64), (64, 128)]
        for layer in layers:
            assert layer["kernels"][0]["m_min"] == 1
            assert layer["kernels"][-1]["m_max"] == -1
        assert apq(command, "small_w8", cwd=folder).stdout.count("W8A8g32") >= 1


def test_every_command_counts_the_same_bits(folder: Path) -> None:
    """Those of the file itself: biases are floats, and nothing else is stored."""
    module = report("inspect", "small_w8", cwd=folder)
    weights, biases = 2 * WIDTH * 2 * WIDTH, 2 * WIDTH
    bits = round((8.5 * weights + 32 * biases) / (weights + biases), 4)
    assert (module["bits_per_weight"], module["quantized_bits_per_weight"]) == (bits, 8.5)
    assert (
        f"{bits} bits per weight (8.5 in quantized layers)"
        in apq("inspect", "small_w8", cwd=folder).stdout
    )
    assert (
        module["stored"]["bytes"] <= module["weights"]["bytes"] < 1.01 * module["stored"]["bytes"]
    )
    words = ("small.onnx", "--scheme", "W8A8g32")
    plan = report("compile", *words, "--dry-run", cwd=folder)
    assert (plan["bits_per_weight"], plan["quantized_bits_per_weight"]) == (bits, 8.5)
    tried = report("eval", *words, "--inputs", "in.npz", cwd=folder)
    assert round(tried["bits_per_weight"], 4) == bits
    assert (tried["linear_bits_per_weight"], tried["embedding_bits_per_weight"]) == (8.5, 0)
    assert tried["linear_stored_bits_per_weight"] == 8.5


def test_module_runs_without_tvm(folder: Path) -> None:
    code = (
        "import sys, numpy, small_w8\n"
        "y = small_w8.run(x=numpy.ones((3, 64), numpy.float32))['y']\n"
        "assert y.shape == (3, 64)\n"
        "print(sorted({m.split('.')[0] for m in sys.modules} & {'tvm', 'onnx', 'apq_tvm'}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=folder, timeout=900
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_bench_model_reports_rivals(folder: Path) -> None:
    words = ("bench", "model", "small_w8", "--against", "small.onnx", "--seconds", "0.05")
    result = report(*words, "--batch", "3", "--threads", "1", cwd=folder)
    assert result["dims"] == {"batch": 3}
    assert result["threads"] == 1
    assert len(result["rivals"]) == 2 + openvino.installed() and not result["refused"]
    assert result["ratio"] == pytest.approx(min(result["rivals"].values()) / result["us"])
    memory = result["memory"]
    assert 0 < memory["live"] <= memory["arena"]
    assert memory["output_bytes"] == 3 * WIDTH * 4


def test_bench_model_compares_two_modules(folder: Path) -> None:
    shutil.copytree(folder / "small_w8", folder / "other_w8")
    words = ("bench", "model", "small_w8", "--against", "other_w8", "--seconds", "0")
    result = report(*words, "--batch", "3", cwd=folder)
    assert result["dims"] == {"batch": 3} and list(result["rivals"]) == ["other_w8"]
    assert result["ratio"] == pytest.approx(result["rivals"]["other_w8"] / result["us"])
    refused = apq("bench", "model", "small_w8", "--against", ".", cwd=folder)
    assert refused.exit_code == 1 and "is not a compiled module" in refused.stderr


def test_bench_profile_reports_every_kernel(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    page = tmp_path / "profile.html"
    words = ("bench", "profile", "small_w8", "--batch", "3", "--threads", "1", "--seconds", "0")
    result = report(*words, "--cold", "--html", str(page), cwd=folder)
    assert result["dims"] == {"batch": 3} and result["cold"]
    assert [row["name"] for row in result["layers"] if row["macs"]]
    parts = result["kernels_us"] + result["between_us"] + result["rest_us"]
    assert parts == pytest.approx(result["run_us"])
    html = page.read_text()
    assert all(f">{row['name']}<" in html for row in result["kernels"])
    again = apq(*words, "--html", str(page), cwd=folder)
    assert again.exit_code == 1 and "--force" in again.stderr
    table = apq(*words, "--by", "layer", cwd=folder).stdout
    assert all(row["name"] in table for row in result["layers"])
    assert "whole run" in table and "between kernels" in table


KEYS = {"shape", "m", "threads", "scheme", "cold", "us", "rival", "rival_us", "ratio"}


def test_bench_linear_reports_every_case(tmp_path: Path) -> None:
    rows = report(
        "bench", "linear", "--shape", "128x64", "--m", "1,4", "--scheme", "W4A8g32,W8A8",
        "--threads", "2", "--against", "onnxruntime", "--seconds", "0", "--warm", cwd=tmp_path,
    )  # fmt: skip
    assert [(r["m"], r["threads"], r["scheme"]) for r in rows] == [
        (m, 2, scheme) for scheme in ("W4A8g32", "W8A8") for m in (1, 4)
    ]
    for row in rows:
        assert KEYS <= set(row)
        assert row["ratio"] == pytest.approx(row["rival_us"] / row["us"])
        assert row["limit_share"] > 0
        assert row["error"] < 0.02
        bits = row["scheme"][1]
        assert row["rival"] == f"onnxruntime MatMulNBits W{bits} block 128 accuracy_level 4"


def test_output_is_not_overwritten(folder: Path) -> None:
    before = (folder / "small_w8" / "manifest.json").read_bytes()
    again = apq("compile", "small.onnx", "-o", "small_w8", "--scheme", "W4A8g32", cwd=folder)
    assert again.exit_code == 1
    assert again.stdout == ""
    assert "small_w8" in again.stderr and "--force" in again.stderr
    assert (folder / "small_w8" / "manifest.json").read_bytes() == before


def test_force_replaces(folder: Path) -> None:
    shutil.copytree(folder / "small_w8", folder / "other")
    report("compile", "small.onnx", "-o", "other", "--scheme", "W4A8", "--force", cwd=folder)
    assert {layer["scheme"] for layer in report("inspect", "other", cwd=folder)["layers"]} == {
        "W4A8"
    }


def test_dry_run_writes_nothing(folder: Path) -> None:
    before = sorted(folder.iterdir())
    words = ("compile", "small.onnx", "--dry-run", "--tensor-type", "second=float")
    plan = report(*words, cwd=folder)
    assert [layer["scheme"] for layer in plan["layers"]] == ["W4A8g32", "float"]
    assert sorted(folder.iterdir()) == before
    assert "nothing was written" in apq(*words, cwd=folder).stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("compile", "absent.onnx", "-o", "x"), "absent.onnx"),
        (("compile", "in.npz", "-o", "x"), "in.npz"),
        (("compile", "small.onnx", "-o", "x", "--scheme", "W9A8"), "W9A8"),
        (("compile", "small.onnx", "-o", "x", "--target", "znver33"), "znver33"),
        (("compile", "small.onnx", "-o", "x", "--tensor-type", "(=W8A8"), "("),
        (("eval", "small_w8", "--against", "small.onnx", "--inputs", "no.npz"), "no.npz"),
        (("bench", "model", "small_w8", "--against", "no.onnx"), "no.onnx"),
        (("bench", "profile", "small_w8", "--by", "call"), "kernel or layer"),
        (("bench", "profile", "small_w8", "--dims", "size=3"), "no dimension 'size'"),
        (("bench", "profile", "no_module"), "no_module"),
        (("bench", "generate", "small_w8"), "no decoder with a cache"),
        (("bench", "generate", "small_w8", "--gguf", "no.gguf"), "no.gguf"),
        (("bench", "generate", "small_w8", "--contexts", "x"), "--contexts"),
        (("bench", "linear", "--shape", "4096"), "--shape"),
        (("bench", "linear", "--against", "tflite"), "tflite"),
    ],
)
def test_errors_name_the_culprit(words: tuple[str, ...], message: str, folder: Path) -> None:
    done = apq(*words, "--json", cwd=folder)
    assert done.exit_code == 1, done.stderr
    assert done.stdout == ""
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("error: ") and message in last
    assert "Traceback" not in done.stderr
    assert not (folder / "x").exists()


@pytest.mark.parametrize(
    ("number", "step", "exit_code"),
    [
        (signal.SIGTERM, "link_library", 143),
        pytest.param(signal.SIGHUP, "write_package", 129, marks=pytest.mark.all_cases),
    ],
)
def test_a_signal_leaves_nothing_behind(
    folder: Path, tmp_path: Path, number: signal.Signals, step: str, exit_code: int
) -> None:
    """Neither beside the output nor in the folder of temporary files.

    It comes twice, as from ``timeout``; the second one must not stop the cleaning up.
    """
    code = f"""
import os, signal
from apq_tvm.codegen import emit
from apq_tvm.codegen.package import folder as package
signal.signal({number:d}, signal.SIG_DFL)  # a test in the background may hand on that it is ignored
plain, remove = emit.{step}, package.shutil.rmtree
def stop(*given, **options):
    os.kill(os.getpid(), {number:d})
    return plain(*given, **options)
def again(*given, **options):
    os.kill(os.getpid(), {number:d})
    return remove(*given, **options)
emit.{step}, package.shutil.rmtree = stop, again
from apq_tvm.cli.main import main
main()
"""
    temporary, made = tmp_path / "tmp", tmp_path / "made"
    temporary.mkdir()
    words = ("compile", str(folder / "small.onnx"), "-o", str(made / "module"), "--json")
    done = subprocess.run(
        [sys.executable, "-c", code, *words, "--scheme", "float"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(temporary)},
        timeout=900,
    )
    assert done.returncode == exit_code, done.stderr
    assert done.stderr.endswith(f"{number.name}; what was there before is untouched\n")
    assert done.stdout == ""
    assert list(temporary.iterdir()) == [] and list(made.iterdir()) == []


def test_interrupt_leaves_the_old_output(folder: Path) -> None:
    shutil.copytree(folder / "small_w8", folder / "kept")
    before = sorted(folder.rglob("*"))
    manifest = (folder / "kept" / "manifest.json").read_bytes()
    # A test run in the background hands on that interrupts are ignored.
    heeded = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    code = heeded + "from apq_tvm.cli.main import main; main()"
    words = ("compile", "small.onnx", "-o", "kept", "--scheme", "W4A8", "--force")
    with subprocess.Popen(
        [sys.executable, "-c", code, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=folder,
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "import" in line:  # the first stage has ended, the others have not
                process.send_signal(signal.SIGINT)
                break
        rest = process.stderr.read()
    assert process.returncode == 130, rest
    assert rest.strip().endswith("interrupted; what was there before is untouched")
    assert sorted(folder.rglob("*")) == before
    assert (folder / "kept" / "manifest.json").read_bytes() == manifest
