"""Commands and programs of the README and docs/ are run as they stand there, on small models.

A document's blocks are run in order, in a folder with the models and inputs of `tests.docs_model`
and, where the document does not make it, the README's ``minilm_w4``. Nothing is timed.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import traceback
from pathlib import Path

import pytest
from typer.testing import CliRunner

import apq_tvm
from apq_tvm.bench.arm.mca import find_analyser
from apq_tvm.bench.emulator import COMPILERS, EMULATORS, INSTALL
from apq_tvm.cli.main import app
from apq_tvm.errors import BadInput
from tests.docs_model import write_folder
from tests.docs_text import DOCUMENTS, Block, blocks, commands, name_of, pending

pytest.importorskip("onnxruntime")
pytest.importorskip("torch")

pytestmark = pytest.mark.slow

NOT_RUN = {
    r"make ": "installs, or runs for minutes; tests/unit/test_docs.py checks that targets exist",
    r"pip install ": "installs",
    r"apq-tvm .*--device (ssh|adb|rpc)": "those devices are not here; tests/unit/tune has fakes",
    r"apq-tvm logs verify ": "fails where a record is no faster today: no test judges times",
    r"apq-tvm \w+ smollm2\.onnx": "learns for half an hour; the guide does so with a small model",
    r"apq-tvm .*--against libggml": "ggml's library is not here; its options are checked",
}
"""Commands that are not run, by their beginning, and why."""

SMALLER = {
    r"apq-tvm bench generate ": "--prompt 4 --contexts 3 --tokens 1 --threads 1 --seconds 0",
    r"apq-tvm bench gpu ": "--shape 64x64 --m 1 --scheme W4A8g32",
    r"apq-tvm bench linear ": "--shape 64x64 --m 1 --threads 1 --seconds 0 --warm",
    r"apq-tvm bench model ": "--seq 8 --seconds 0",
    r"apq-tvm bench module ": "--seq 8 --seconds 0",
    r"apq-tvm bench rank ": "--shape 64x64 --m 1 --scheme W8A8 --candidates 5",
    r"apq-tvm bench profile ": "--seq 8 --threads 1 --seconds 0",
    r"apq-tvm bench static ": "--shape 64x64 --m 1",
    r"apq-tvm bench static-model ": "--seq 8",
    r"apq-tvm tune --rules": "--shapes 64x64 --m 1,8 --log rules/records.json",
    r"apq-tvm tune --shapes": "--shapes 64x64 --trials 1 --threads 1",
    r"apq-tvm tune .*--log": "--m 1 --trials 1 --threads 1",
    # Not the file that all compilations read.
    r"apq-tvm tune ": "--m 1 --trials 1 --threads 1 --log tuned.json",
    r"apq-tvm calibrate .*--learn ": "--epochs 1",
}
"""What is added to commands: the last of repeated options counts."""

ARM = re.compile(r"--target (graviton|arm-|cortex)|bench (static-model|rank)")
"""Commands that want what ``make arm-tools`` installs."""

TOOLS = ("pkg-config", "cmake")

CLANG = """#!/bin/sh
# Stands for the NDK's clang, by a gcc that knows no --target, with headers that say bionic.
case " $* " in
  *" --version "*) echo "Android clang version 18.0.1"; exit;;
  *" -dumpmachine "*) echo aarch64-unknown-linux-android24; exit;;
esac
for word; do shift; case $word in --target=*) ;; *) set -- "$@" "$word";; esac; done
exec {gcc} -D__BIONIC__ "$@"
"""


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with models, inputs, and ``minilm_w4``."""
    folder = tmp_path_factory.mktemp("docs")
    write_folder(folder)
    apq_tvm.compile(folder / "model.onnx", folder / "minilm_w4", search=False)
    clang = folder / "ndk/toolchains/llvm/prebuilt/linux-x86_64/bin/clang"
    clang.parent.mkdir(parents=True)
    clang.write_text(CLANG.format(gcc=COMPILERS["aarch64"]))
    clang.chmod(0o755)
    return folder


@pytest.fixture
def folder(
    prepared: Path,
    tmp_path: Path,
    document: Path,
    monkeypatch: pytest.MonkeyPatch,
    clean_imports: None,
) -> Path:
    """Where a document's blocks run: the current folder, and first where modules are found."""
    code = "".join(b.text for b in blocks(document) if b.language in ("sh", "python"))
    made = re.search(r'(-o |output=")minilm_w4\b', code)
    skip = shutil.ignore_patterns(*(["minilm_w4"] if made else []))
    shutil.copytree(prepared, tmp_path, dirs_exist_ok=True, ignore=skip)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("NDK", str(tmp_path / "ndk"))
    return tmp_path


def added(command: str) -> str:
    """What `SMALLER` adds."""
    return next((words for start, words in SMALLER.items() if re.match(start, command)), "")


def failure_of(command: str) -> str:
    """Run one line; what it printed if it failed, else nothing."""
    if not command.startswith("apq-tvm "):
        done = subprocess.run(
            ["bash", "-euc", command], capture_output=True, text=True, timeout=900, check=False
        )
        return done.stdout + done.stderr + f"exit code {done.returncode}" if done.returncode else ""
    words = shlex.split(os.path.expandvars(f"{command} {added(command)}"))
    result = CliRunner().invoke(app, words[1:])
    return f"{result.output}exit code {result.exit_code}" if result.exit_code else ""


def failures(document: Path, block: Block, arm: bool) -> list[str]:
    """Run one block's lines, those for Arm or the others; what failed."""
    found = []
    for command in commands(block):
        if any(re.match(start, command) for start in NOT_RUN) or bool(ARM.search(command)) != arm:
            continue
        text, why = failure_of(command), pending(command)
        if why and not text:
            found.append(f"{command}\nworks now: take it out of PENDING in tests/docs_text.py")
        elif text and not why:
            found.append(f"{name_of(document)}:{block.line}: {command}\n{text}")
    return found


def run_python(document: Path, block: Block) -> list[str]:
    """Run a block of Python; what failed."""
    source = compile("\n" * (block.line - 1) + block.text, str(document), "exec")
    try:
        exec(source, {"__name__": "__main__"})
    except Exception:
        return [traceback.format_exc()]
    return []


documents = [d for d in DOCUMENTS if any(b.language == "sh" for b in blocks(d))]


@pytest.mark.all_cases
@pytest.mark.parametrize("document", documents, ids=name_of)
def test_documents_are_what_one_can_do(document: Path, folder: Path) -> None:
    text = document.read_text(encoding="utf-8")
    for tool in TOOLS:
        if f"{tool} -" in text and shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    found = []
    for block in blocks(document):
        if block.language == "sh":
            found += failures(document, block, arm=False)
        elif block.language == "python":
            found += run_python(document, block)
        elif block.language in ("c", "cmake"):
            name = {"c": "main.c", "cmake": "CMakeLists.txt"}[block.language]
            (folder / name).write_text(block.text, encoding="utf-8")
    assert not found, "\n\n".join(found)


arm_documents = [d for d in documents for b in blocks(d) if ARM.search(b.text)]


@pytest.mark.all_cases
@pytest.mark.parametrize("document", sorted(set(arm_documents)), ids=name_of)
def test_commands_for_arm(document: Path, folder: Path) -> None:
    for tool in (COMPILERS["aarch64"], EMULATORS["aarch64"]):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not on PATH: {INSTALL}")
    if re.search("bench (static|rank)", document.read_text(encoding="utf-8")):
        try:
            find_analyser("neoverse-v1")
        except BadInput as error:
            pytest.skip(str(error))
    found = [f for b in blocks(document) if b.language == "sh" for f in failures(document, b, True)]
    assert not found, "\n\n".join(found)


def test_lists_of_exceptions_are_needed() -> None:
    lines = [c for d in documents for b in blocks(d) if b.language == "sh" for c in commands(b)]
    for start in (*NOT_RUN, *SMALLER):
        assert any(re.match(start, line) for line in lines), start
