"""Importing is cheap, imports run one way, and what is public is documented."""

from __future__ import annotations

import ast
import graphlib
import importlib
import inspect
import json
import operator
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import apq_tvm

ROOT = Path(__file__).resolve().parents[2]

# design.md: types, errors <- formats, tensorize <- codegen.layouts <- ops <- schedules <- select
# <- pipeline <- cli. A module may import its own rank and those below; the longest prefix counts.
RANKS = {
    "apq_tvm.errors": 0,
    "apq_tvm.extras": 0,
    "apq_tvm.nearest": 0,
    "apq_tvm.types": 0,
    "apq_tvm.files": 0,
    "apq_tvm.heap": 0,
    "apq_tvm.lone_tvm": 0,
    "apq_tvm.progress": 0,
    "apq_tvm.signals": 0,
    "apq_tvm.formats": 1,
    "apq_tvm.codes": 2,
    "apq_tvm.tensorize": 2,
    "apq_tvm.tensorize.exprs": 1,
    "apq_tvm.tensorize.registry": 1,
    "apq_tvm.tensorize.meaning": 1,
    "apq_tvm.onnx_import": 2,
    "apq_tvm.quantizers": 2,
    "apq_tvm.codegen.layouts": 2,
    "apq_tvm.ops": 3,
    "apq_tvm.schedules": 4,
    "apq_tvm.tuning_logs": 4,
    "apq_tvm.launches": 5,
    "apq_tvm.sessions": 5,
    "apq_tvm.select": 5,
    "apq_tvm.lower": 6,
    "apq_tvm.codegen": 6,
    "apq_tvm.pack": 6,
    "apq_tvm.manifest": 6,
    "apq_tvm.schedule": 6,
    "apq_tvm.pipeline": 7,
    "apq_tvm.evaluate": 8,
    "apq_tvm.evaluation": 8,
    "apq_tvm.report": 8,
    "apq_tvm.calibrate": 8,
    "apq_tvm.learn": 8,
    "apq_tvm.bench": 8,
    "apq_tvm.module": 8,
    "apq_tvm.inspect": 8,
    "apq_tvm.explain": 8,
    "apq_tvm.tune": 9,
    "apq_tvm.cli": 10,
    "apq_tvm": 11,
}

# These two read and choose: they know nothing of kernels, layouts or devices.
SEPARATE = {
    "apq_tvm.onnx_import": {"apq_tvm.errors", "apq_tvm.types", "apq_tvm.formats"},
    "apq_tvm.quantizers": {
        "apq_tvm.errors",
        "apq_tvm.extras",
        "apq_tvm.nearest",
        "apq_tvm.types",
        "apq_tvm.files",
        "apq_tvm.progress",
        "apq_tvm.formats",
        "apq_tvm.onnx_import",
        "apq_tvm.codes",
    },
    "apq_tvm.codes": {
        "apq_tvm.errors",
        "apq_tvm.types",
        "apq_tvm.progress",
        "apq_tvm.formats",
    },
}

COPIED = ("apq_tvm.codegen.templates", "apq_tvm.bench.gpu.on_gpu")
"""Packages that run where apq_tvm is not: in compiled modules, in bundles for GPUs."""

WINGS = ("x86", "arm", "cuda")

TABLES = {"apq_tvm.schedules.devices"}
"""Who may know every wing."""

HEAVY = ("tvm", "tvm_ffi", "onnx", "onnxruntime", "torch", "typer", "rich", "numpy")


def sources() -> list[tuple[str, Path]]:
    """Every module by its dotted name; symlinked folders are visited through their target."""
    found = []
    for top in ("apq_tvm", "tensorize", "schedules", "codegen", "tuning_logs"):
        for path in sorted((ROOT / top).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            if top == "apq_tvm" and (ROOT / "apq_tvm" / parts[1]).is_symlink():
                continue
            name = ".".join(parts if top == "apq_tvm" else ("apq_tvm", *parts))
            found.append((name.removesuffix(".__init__"), path))
    return found


@cache
def tree_of(path: Path) -> ast.Module:
    """A file, which several tests read, parsed."""
    return ast.parse(path.read_text())


def home(module: str) -> str:
    """The entry of RANKS a module belongs to."""
    parts = module.split(".")
    for end in range(len(parts), 0, -1):
        prefix = ".".join(parts[:end])
        if prefix in RANKS:
            return prefix
    raise AssertionError(f"{module} has no rank in the import order")


def runtime_imports(tree: ast.AST, package: str) -> Iterator[str]:
    """Modules imported at run time, also inside functions; not those for type checkers alone."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if package.startswith(COPIED) and node.level == 1:
                continue  # files that go together, whatever their package is called there
            assert node.level == 0, f"{package}: relative import"
            base = node.module or ""
            yield from (f"{base}.{alias.name}" for alias in node.names)
        else:
            yield from runtime_imports(node, package)


@cache
def arrows() -> tuple[tuple[str, str], ...]:
    """(module, what it imports of ours) of every module."""
    return tuple(
        (name, imported)
        for name, path in sources()
        for imported in runtime_imports(tree_of(path), name)
        if imported.startswith("apq_tvm.")
    )


def test_imports_run_one_way() -> None:
    wrong = []
    for name, imported in arrows():
        mine, theirs = home(name), home(imported)
        if name.startswith(COPIED):
            wrong.append(f"{name} is copied elsewhere and must not import {imported}")
        if theirs == "apq_tvm":  # a name of the root package, such as __version__
            continue
        if RANKS[theirs] > RANKS[mine]:
            wrong.append(f"{name} imports {imported}, which comes after it")
        if mine in SEPARATE and theirs not in {mine, *SEPARATE[mine]}:
            wrong.append(f"{name} must not import {imported}")
    assert not wrong, "\n".join(wrong)


def wing(module: str) -> str:
    """The instruction set a schedule or an intrinsic is for, ``""`` for the shared floor."""
    folders = module.split(".")[1:-1]
    if folders[:1] not in (["schedules"], ["tensorize"]):
        return ""
    return next((part for part in folders if part in WINGS), "")


def test_wings_are_apart() -> None:
    """x86 and Arm never import each other, and the floor knows neither; a table names them all."""
    wrong = [
        f"{name} imports {imported}"
        for name, imported in arrows()
        if wing(imported) not in ("", wing(name)) and name not in TABLES
    ]
    assert not wrong, "\n".join(wrong)


def circle_of(arrows: dict[str, set[str]]) -> list[str]:
    """Modules of one circle, the first one again at the end; none if there is no circle."""
    try:
        graphlib.TopologicalSorter(arrows).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def test_no_modules_import_each_other_in_a_circle() -> None:
    # An import inside a function counts: it only hides that neither is to be had without the other.
    found: dict[str, set[str]] = {name: set() for name, _ in sources()}
    for name, imported in arrows():
        while imported and imported not in found:  # a name of a module
            imported = imported.rpartition(".")[0]
        if imported:
            found[name].add(imported)
    assert sum(map(len, found.values())) > len(found)
    assert not (circle := circle_of(found)), " <- ".join(circle)
    assert circle_of({"a": {"b"}, "b": {"c", "d"}, "c": {"a"}})[0] in "abc"


def test_importing_apq_tvm_is_cheap() -> None:
    code = "import sys, json, apq_tvm; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    loaded = {name.split(".")[0] for name in json.loads(done.stdout)}
    assert loaded.isdisjoint(HEAVY), loaded & set(HEAVY)


def test_help_needs_no_compiler() -> None:
    code = "import sys, json, apq_tvm.cli.main; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    loaded = {name.split(".")[0] for name in json.loads(done.stdout)}
    assert loaded.isdisjoint({"tvm", "tvm_ffi", "onnx", "onnxruntime", "torch"})


def test_tvm_comes_without_torch() -> None:
    """Learning has it, behind TVM in the same process."""
    code = "import apq_tvm, tvm, sys; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert done.stdout == "False\n"


def test_public_names_are_listed_before_they_are_loaded() -> None:
    """``dir`` is what completion in a shell and ``help`` go by."""
    code = "import sys, apq_tvm; print(*dir(apq_tvm)); sys.exit('numpy' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert set(apq_tvm.__all__) <= set(done.stdout.split())
    assert set(apq_tvm.__all__) == {*apq_tvm._HOME, "__version__"}


@pytest.mark.parametrize("name", apq_tvm.__all__)
def test_public_name_exists_and_is_documented(name: str) -> None:
    value = getattr(apq_tvm, name)
    if callable(value):
        assert value.__doc__ and value.__doc__.strip(), name


def test_unknown_attribute_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nothing_here"):
        _ = apq_tvm.nothing_here


ENTRIES = (
    "bench.memory.measure_memory", "bench.model.bench_model", "bench.arm.static.bench_static",
    "bench.arm.module.bench_static_module", "calibrate.calibrate", "calibrate.known_statistics",
    "evaluate.evaluate", "evaluate.evaluate_scheme",
    "quantizers.inputs.read.read_inputs", "evaluation.runners.open_session",
    "evaluation.schemes.SchemeEvaluator", "explain.explain", "inspect.inspect", "learn.learn_codes",
    "module.load_module", "module.read_manifest", "onnx_import.import_onnx", "pipeline.build",
    "pipeline.compile", "pipeline.plan", "quantizers.inputs.calibration_file.load",
    "quantizers.inputs.calibration_file.save", "quantizers.codebook_file.load_codebooks",
    "quantizers.codebook_file.save_codebooks", "quantizers.guided.Guidance", "report.make_report",
)  # fmt: skip


def test_files_may_be_named_by_str() -> None:
    """Annotations say it, so that a type checker agrees; test_calibrate.py passes some."""
    refused = []
    for entry in ENTRIES:
        module, _, name = entry.rpartition(".")
        function = getattr(importlib.import_module(f"apq_tvm.{module}"), name)
        for parameter in inspect.signature(function).parameters.values():
            if re.search(r"\bPath\b", str(parameter.annotation)):
                refused.append(f"{entry}({parameter})")
    assert not refused


def public_definitions(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """Public functions, classes and methods; overloads and test doubles have no place here."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    for node in tree.body:
        if isinstance(node, kinds) and not node.name.startswith("_"):
            yield node.name, node
            if isinstance(node, ast.ClassDef):
                for inner in node.body:
                    if isinstance(inner, kinds) and not inner.name.startswith("_"):
                        yield f"{node.name}.{inner.name}", inner


def test_public_definitions_have_docstrings() -> None:
    wrong = []
    for name, path in sources():
        tree = tree_of(path)
        if tree.body and not ast.get_docstring(tree):
            wrong.append(name)
        for label, node in public_definitions(tree):
            if ast.get_docstring(node) is None:  # unless a base class says what the method does
                found = operator.attrgetter(label)(importlib.import_module(name))
                if "." not in label or not inspect.getdoc(found):
                    wrong.append(f"{name}.{label}")
    assert not wrong, "without a docstring: " + ", ".join(wrong)


def test_no_function_is_longer_than_a_page() -> None:
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    wrong = []
    for name, path in sources():
        for node in ast.walk(tree_of(path)):
            if isinstance(node, functions) and (node.end_lineno or 0) - node.lineno >= 80:
                wrong.append(f"{name}.{node.name}")
    assert not wrong, "longer than 80 lines: " + ", ".join(wrong)


@pytest.mark.parametrize("name", ["apq_tvm.errors"])
def test_error_tree_is_drawn_completely(name: str) -> None:
    module = importlib.import_module(name)
    doc = module.__doc__ or ""
    for label, value in vars(module).items():
        if isinstance(value, type) and issubclass(value, Exception):
            assert label in doc, f"{label} is missing from the tree in the docstring"
