"""The command line: JSON on standard output, errors in one line, exit codes, help with examples."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import fake_module
import numpy as np
import onnx
import pytest
from typer.testing import CliRunner

from apq_tvm import pipeline
from apq_tvm.cli import console, options
from apq_tvm.cli.bench import parse_counts, parse_dims, parse_shapes
from apq_tvm.cli.main import app
from apq_tvm.cli.options import parse_tensor_types
from apq_tvm.errors import ApqError, BadInput, BadScheme, OutputExists
from apq_tvm.explain import explain, explanation_lines
from apq_tvm.inspect import inspect
from apq_tvm.quantizers.guided import Guidance
from apq_tvm.quantizers.inputs.read import read_inputs
from apq_tvm.types import TensorSpec
from tests import manifests

runner = CliRunner()

COMMANDS = (
    ["compile"],
    ["inspect"],
    ["eval"],
    ["report"],
    ["calibrate"],
    ["codebooks"],
    ["bench", "model"],
    ["bench", "linear"],
    ["bench", "static"],
    ["bench", "static-model"],
    ["bench", "gpu"],
    ["bench", "module"],
    ["bench", "rank"],
    ["bench", "profile"],
    ["bench", "generate"],
    ["targets"],
    ["formats"],
    ["explain"],
    ["tune"],
    ["logs", "import"],
    ["logs", "merge"],
    ["logs", "prune"],
    ["logs", "show"],
    ["logs", "verify"],
)


def run(*words: object) -> Any:
    return runner.invoke(app, [str(word) for word in words])


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_has_an_example_and_json(command: list[str]) -> None:
    result = run(*command, "--help")
    assert result.exit_code == 0
    assert f"Example: apq-tvm {' '.join(command)}" in result.output
    assert "--json" in result.output


def test_every_command_is_tested_above() -> None:
    names = {" ".join(c) for c in COMMANDS}
    listed = {c.name or c.callback.__name__ for c in app.registered_commands}
    nested = {
        f"{group.name} {command.name}"
        for group in app.registered_groups
        for command in group.typer_instance.registered_commands
    }
    assert listed | nested == names


def test_version() -> None:
    assert run("--version").output.startswith("apq-tvm ")


def test_the_package_is_the_command() -> None:
    """Also its exit status and the name that its usage says."""
    words = [sys.executable, "-m", "apq_tvm", "compile"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "Missing argument" in done.stderr + done.stdout


@pytest.fixture
def module(tmp_path: Path) -> Path:
    return fake_module.write(tmp_path / "fake")


def test_inspect_shows_the_manifest(module: Path) -> None:
    report = json.loads(run("inspect", module, "--json").stdout)
    assert [layer["name"] for layer in report["layers"]] == ["query", "key", "classifier"]
    assert report["bits_per_weight"] == pytest.approx((4.5 + 4.5 + 32) / 3, abs=1e-3)
    assert report["package_bytes"] == sum(report["files"].values()) > 0
    text = run("inspect", module).stdout
    for word in ("query", "W4A8g32", "M=1: apq_vnni_gemv", "M=2..15: small", "M=16..: large",
                 "K=32 of key is too short", "gather1", "generic", "manifest.json"):  # fmt: skip
        assert word in text, word


def test_modules_that_count_layers_alone_are_refused(module: Path) -> None:
    path = module / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "stored": None}))
    result = run("inspect", module)
    assert result.exit_code == 1 and "compile it again" in result.stderr


def test_explain_gives_reasons(module: Path) -> None:
    report = json.loads(run("explain", module, "--layer", "^q", "--json").stdout)
    (layer,) = report["layers"]
    assert layer["rejected"] == [{"kernel": "faster", "reason": "K=32 of query is too short"}]
    text = run("explain", module).stdout
    assert "not faster: K=32 of query is too short" in text
    assert "M=2..15: small (streams=2)" in text
    assert "M=16..: large (default)" in text


def test_explain_of_no_layer_is_an_error(module: Path) -> None:
    result = run("explain", module, "--layer", "nothing")
    assert result.exit_code == 1
    assert "matches 'nothing'; nearest are query, key" in result.stderr
    assert "no regular expression" in run("explain", module, "--layer", "(").stderr


@pytest.mark.parametrize("command", ["inspect", "explain"])
def test_errors_are_one_line_on_stderr(command: str, tmp_path: Path) -> None:
    result = run(command, tmp_path / "absent", "--json")
    assert result.exit_code == 1
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ") and "absent: no such folder" in line


def failing(error: BaseException) -> Any:
    def compile_(*_: Any, **__: Any) -> None:
        raise error

    return compile_


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (OutputExists("out exists; use --force"), 1, "error: out exists; use --force\n"),
        (ApqError("anything"), 1, "error: anything\n"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (ValueError("oops"), 2, "error: unexpected ValueError: oops\n"),
    ],
)
def test_exit_codes(
    error: BaseException, code: int, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "compile", failing(error))
    result = run("compile", "m.onnx", "-o", "out", "--json")
    assert result.exit_code == code
    assert result.stdout == ""
    assert text in result.stderr
    assert "Traceback" not in result.stderr


MISSING = (
    ("onnxruntime", "bench", ("bench", "linear")),
    ("onnxruntime", "bench", ("bench", "model", "absent", "--against", "m.onnx")),
    ("onnxruntime", "bench", ("eval", "absent", "--against", "m.onnx", "--inputs", "i.npz")),
    ("torch", "calibrate", ("eval", "m.onnx", "--scheme", "W8A8", "--inputs", "i.npz")),
    ("torch", "calibrate", ("calibrate", "m.onnx", "--inputs", "i.npz", "-o", "c")),
    (
        "torch",
        "calibrate",
        ("calibrate", "m.onnx", "--inputs", "i.npz", "-o", "c", "--statistics", "s", "--learn",
         "abq", "--scheme", "W8A8"),
    ),
    ("torch", "calibrate", ("report", "m.onnx", "--inputs", "i", "--schemes", "W8A8", "-o", "r")),
    ("matplotlib", "report", ("report", "m.onnx", "--inputs", "i", "--schemes", "W8A8", "-o", "r")),
)  # fmt: skip


@pytest.mark.parametrize(("package", "extra", "words"), MISSING, ids=lambda v: str(v)[:40])
def test_missing_extras_are_said_before_the_work(
    package: str, extra: str, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of the files named is there: whatever is read before the check is noticed."""
    monkeypatch.setattr(pipeline, "plan", failing(AssertionError("work was done")))
    monkeypatch.setitem(sys.modules, package, None)
    result = run(*words)
    assert result.exit_code == 1, result.stderr
    (line,) = result.stderr.splitlines()
    assert f"needs {package}: pip install 'apq-tvm[{extra}]'" in line


@pytest.mark.parametrize("change", [
    {"layers": 3}, {"layers": [3]}, {"layers": [{}]}, {"stored": []}, {"stored": {"weights": "x"}},
    {"inputs": 5}, {"functions": [1]}, '{"layers":' + "[" * 10**5, '{"layers": ' + "9" * 5000 + "}",
])  # fmt: skip
def test_damaged_manifests(module: Path, change: Any) -> None:
    file = module / "manifest.json"
    text = json.dumps(json.loads(file.read_text()) | change) if isinstance(change, dict) else change
    file.write_text(text)
    result = run("inspect", module)
    assert result.exit_code == 1 and "is damaged" in result.stderr
    assert run("explain", module).exit_code in (0, 1)


def test_manifests_damaged_anywhere(module: Path) -> None:
    """Only errors of ours, by Python and on the command line."""
    file, rng = module / "manifest.json", np.random.default_rng(0)
    good = json.loads(file.read_text()) | {"batch": {"dimension": "b", "note": ""}}
    good["variants"] = [{key: good[key] for key in ("target", "features", "layers")}]
    for number in range(300):
        file.write_text(json.dumps(manifests.damaged(good, rng)))
        for read in (inspect, lambda path: explanation_lines(explain(path))):
            with suppress(ApqError):
                read(module)
        if number % 30 == 0:
            for command in ("inspect", "explain"):
                assert run(command, module).exit_code in (0, 1), file.read_text()


def test_files_that_are_none(tmp_path: Path) -> None:
    for words in (["compile", "/dev/zero", "--dry-run"], ["compile", "x.onnx", "-o", "q" * 5000]):
        result = run(*words)
        assert result.exit_code == 1, result.output
    with pytest.raises(BadInput, match="NAME=SIZE"):
        options.parse_dims(["b=" + "9" * 5000])
    spec = TensorSpec("x", "float32", ("b", 32))
    header = "{'descr': '<f4', 'fortran_order': False, 'shape': (1099511627776, 32)}"
    huge = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode()
    for name, data in (("x", b"hello"), ("x.npy", huge)):
        with zipfile.ZipFile(tmp_path / "inputs.npz", "w") as file:
            file.writestr(name, data)
        with pytest.raises(BadInput, match="not an npz of plain arrays"):
            read_inputs(tmp_path / "inputs.npz", [spec])
    with pytest.raises(BadInput, match="no regular file"):
        read_inputs("/dev/zero", [spec])


def test_names_do_not_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    console.say("\x1b[2J'a\nb' \u202e" + "q" * 10**6)
    console.show("\x1b]0;title\x07")
    console.print_table("names", ["name"], [["\x1b[31mred"]])
    out, err = capsys.readouterr()
    assert "\x1b" not in out + err and "\u202e" not in err and len(err) < 10**4
    assert r"\x1b[2J'a" in err and r"\x1b[31mred" in out


def test_traceback_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("APQ_TRACEBACK", "1")
    monkeypatch.setattr(pipeline, "compile", failing(ValueError("oops")))
    result = run("compile", "m.onnx", "-o", "out")
    assert "Traceback" in result.stderr and "ValueError: oops" in result.stderr


def test_wrong_usage_exits_with_2() -> None:
    assert run("compile", "m.onnx").exit_code == 2
    assert run("compile", "m.onnx", "-o", "x", "--nothing").exit_code == 2
    assert run("nothing").exit_code == 2


def test_compile_passes_everything_on(
    module: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Any] = {}

    def compile_(model: Path, output: Path, **options: Any) -> Any:
        seen.update(options, model=model, output=output)
        with options["progress"].stage("quantize", 2):
            options["progress"].advance("layer [1]")
            options["progress"].advance("layer [2]")
        with options["progress"].stage("import"):
            pass
        return type("Result", (), {"path": module})

    monkeypatch.setattr(pipeline, "compile", compile_)
    result = run(
        "compile", "m.onnx", "-o", module, "--target", "znver3", "--scheme", "W8A8", "--force",
        "--tensor-type", "att.*=W4A8g32", "--tensor-type", "cls=float", "--no-search", "--json",
        "--calibration", "c.safetensors", "--method", "gptq", "--triple", "x86_64-linux-gnu",
        "--layout", "4x8", "--cc", "gcc", "--sysroot", "/", "--dim", "batch=2", "--kv", "f16",
        "--log", "mine.json", "--no-log",
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["path"] == str(module)
    assert "quantize" in result.stderr and "import" in result.stderr
    del seen["progress"]
    assert seen == {
        "model": Path("m.onnx"),
        "output": module,
        "kv": "f16",
        "log": Path("mine.json"),
        "shipped_logs": False,
        "target": "znver3",
        "scheme": "W8A8",
        "tensor_types": {"att.*": "W4A8g32", "cls": "float"},
        "force": True,
        "search": False,
        "guidance": Guidance(Path("c.safetensors"), "gptq"),
        "triple": "x86_64-linux-gnu",
        "layout": "4x8",
        "cc": "gcc",
        "sysroot": "/",
        "dims": {"batch": 2},
    }
    model = tmp_path / "m.onnx"
    model.write_bytes(onnx.helper.make_model(onnx.GraphProto(name="g")).SerializeToString())
    plain = run("compile", model, "-o", module)
    (line,) = [line for line in plain.stderr.splitlines() if line.startswith(str(module))]
    assert "bits per weight" in line and line.endswith(" s")  # one line, however long the path is


def test_tensor_types() -> None:
    assert parse_tensor_types(["a=b=W8A8"]) == {"a=b": "W8A8"}
    for bad in ("nothing", "=W8A8", "a="):
        with pytest.raises(BadScheme, match="is not REGEX=SCHEME"):
            parse_tensor_types([bad])


def test_comma_lists() -> None:
    assert parse_counts("1, 4,128", "--m") == [1, 4, 128]
    assert parse_shapes("4096x4096,11008X4096") == [(4096, 4096), (11008, 4096)]
    assert parse_dims("a=1, b=20") == {"a": 1, "b": 20}
    assert parse_dims("") == {}


@pytest.mark.parametrize("text", ["", "0", "-1", "1,", "x", "1.5"])
def test_bad_counts_name_the_option(text: str) -> None:
    with pytest.raises(BadInput, match="--threads"):
        parse_counts(text, "--threads")


@pytest.mark.parametrize("text", ["", "4096", "4096x", "0x4", "4x4x4", "axb"])
def test_bad_shapes(text: str) -> None:
    with pytest.raises(BadInput, match="--shape"):
        parse_shapes(text)


@pytest.mark.parametrize("text", ["a", "a=", "a=0", "=3", "a=x"])
def test_bad_dims(text: str) -> None:
    with pytest.raises(BadInput, match="--dims"):
        parse_dims(text)


def test_formats_lists_every_format() -> None:
    from apq_tvm.formats import FORMATS, parse_scheme

    report = json.loads(run("formats", "--json").stdout)
    assert [f["name"] for f in report["formats"]] == [f.name for f in FORMATS]
    for family in report["families"]:
        for example in family["examples"]:
            scheme = parse_scheme(example)
            assert scheme is not None and scheme.family == family["name"]
    text = run("formats").stdout
    assert "W4z" in text and "4.5" in text


def test_targets_lists_the_host() -> None:
    report = json.loads(run("targets", "--json").stdout)
    names = [t["name"] for t in report["targets"]]
    assert report["host"] in names
    for target in report["targets"]:
        assert target["sources"], target["name"]
    assert report["host"] in run("targets").stdout
