"""README and docs/ say what is so; `tests/e2e/cli/test_docs_commands.py` runs their commands."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
from collections.abc import Iterator
from fnmatch import fnmatch
from itertools import product
from pathlib import Path

import doc_tables
import measured
import pytest
from test_imports import runtime_imports, sources
from typer.testing import CliRunner

from apq_tvm.cli.main import app
from apq_tvm.codegen.build.library import API_FUNCTIONS
from apq_tvm.formats import FAMILIES, FORMATS, GROUP_SIZES, parse_scheme
from apq_tvm.onnx_import import import_onnx
from apq_tvm.schedules.devices import PROFILES, linear_kernels
from apq_tvm.schedules.linear.kernel import LinearKernel
from tests.docs_text import (
    DOCUMENTS,
    ROOT,
    all_commands,
    blocks,
    name_of,
    pending,
    table,
)

each_document = pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
TEXT = {name_of(document): document.read_text(encoding="utf-8") for document in DOCUMENTS}
GUIDE, ARCHITECTURE = TEXT["docs/guide.md"], TEXT["docs/architecture.md"]

README_LINES = 200
TOPS = "apq_tvm|codegen|schedules|tensorize|tuning_logs|examples|docs|tests"
ELSEWHERE = {"DEBIAN_MIRROR", "LD_PRELOAD"}
"""Variables of tools that make runs, not of the product."""


# ---- text ----


def test_readme_is_short_and_names_every_document() -> None:
    assert len(TEXT["README.md"].splitlines()) <= README_LINES
    for document in DOCUMENTS[1:]:
        assert f"]({name_of(document)})" in TEXT["README.md"]


@each_document
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", TEXT[name_of(document)]):
        assert target.startswith("https://") or (document.parent / target).exists(), target


@each_document
def test_paths_exist(document: Path) -> None:
    for path in re.findall(rf"\b((?:{TOPS})/[\w/.*-]*)", TEXT[name_of(document)]):
        path = path.rstrip(".")
        assert bool(list(ROOT.glob(path)) or path.endswith("/x.py")) != bool(pending(path)), path


@each_document
def test_blocks_are_of_languages_that_are_tried(document: Path) -> None:
    languages = {block.language for block in blocks(document)}
    assert languages <= {"sh", "python", "c", "cmake", "mermaid"}
    assert TEXT[name_of(document)].count("\n```") == 2 * len(blocks(document))


@pytest.mark.parametrize("name", [p.name for p in PROFILES])
def test_every_target_is_listed(name: str) -> None:
    assert f"`{name}`" in TEXT["README.md"]


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
def test_bits_per_weight_are_right(fmt) -> None:
    (row,) = [line for line in GUIDE.splitlines() if re.match(rf"\| `W{fmt.bits}` \(", line)]
    cells = row.split("|")[2:-1]
    assert len(cells) == len(GROUP_SIZES)
    for cell, group in zip(cells, GROUP_SIZES, strict=True):
        plain, zeros = re.findall(r"[\d.]+", cell)
        shown = float(zeros if fmt.zero_points else plain)
        assert shown == pytest.approx(fmt.block_bits(group) / group, abs=1e-3)


@pytest.mark.parametrize("name", ["README.md", "docs/guide.md"])
def test_every_family_is_listed_by_schemes_that_exist(name: str) -> None:
    schemes = [
        scheme
        for row in table(TEXT[name], "| family |")
        for scheme in re.findall("`(.*?)`", row[1])
    ]
    assert {getattr(parse_scheme(s), "family", "") for s in schemes} == {f.name for f in FAMILIES}


def test_environment_variables_are_those_that_are_read() -> None:
    listed = {
        name for row in table(GUIDE, "| variable |") for name in re.findall(r"`(\w+)`", row[0])
    }
    read = set()
    for path in [*ROOT.glob("*/**/*.py"), *ROOT.glob("codegen/runtime/**/*.c")]:
        if path.relative_to(ROOT).parts[0] in TOPS.split("|") and "tests" not in path.parts:
            reads = r"""(?:getenv\(|environ\.get\(|environ\[)"(\w+)"|"(APQ_[A-Z0-9_]+)"\s*\)"""
            read |= {a or b for a, b in re.findall(reads, path.read_text(encoding="utf-8"))}
    assert listed == read - ELSEWHERE


def test_c_functions_and_errors_are_listed() -> None:
    text = TEXT["docs/c-api.md"]
    named = {
        name for row in table(text, "| function |") for name in re.findall(r"`_(\w+)`", row[0])
    }
    assert named == set(API_FUNCTIONS)
    header = (ROOT / "codegen" / "templates" / "module.h.in").read_text()
    codes = set(re.findall(r"@UPPER@_(\w+) = -\d", header))
    assert {row[0].strip("`") for row in table(text, "| code |")} == {f"NAME_{c}" for c in codes}


@pytest.mark.model
@each_document
def test_layers_that_are_named_are_the_demo_models(document: Path, demo_onnx: Path) -> None:
    names = [
        n.name for n in import_onnx(demo_onnx).nodes if n.op in ("apq.Linear", "apq.Embedding")
    ]
    text = TEXT[name_of(document)]
    patterns = re.findall(r'layers=r"([^"]+)"', text)
    patterns += re.findall(r"--layer '([^']+)'", text)
    patterns += re.findall(r"--tensor-type '([^'=]+)=", text)
    for pattern in patterns:
        assert any(re.search(pattern, name) for name in names), f"{pattern} matches none of {names}"


# ---- commands ----

COMMANDS = sorted({c for d in DOCUMENTS for c in all_commands(d) if c.startswith("apq-tvm")})


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_and_options_exist(command: str) -> None:
    words = shlex.split(command)[1:]
    names = [w for w in words if not w.startswith("-")]
    names = names[:2] if names[0] in ("bench", "logs") else names[:1]
    result = CliRunner().invoke(app, [*names, "--help"])
    assert result.exit_code == 0
    for option in (w for w in words if w.startswith("-")):
        assert option in result.output


def test_readme_and_guide_name_every_command() -> None:
    help_text = CliRunner().invoke(app, ["--help"]).output
    there = set(re.findall(r"^  ([a-z]+)  ", help_text.split("Commands:")[1], re.MULTILINE))
    for text in (TEXT["README.md"], GUIDE):
        assert there >= set(re.findall(r"apq-tvm ([a-z]+)", text))
    assert there == set(re.findall(r"apq-tvm ([a-z]+)", GUIDE))


def test_every_command_prints_json() -> None:
    for names, what, *_ in table(GUIDE, "| command |"):
        for name in re.findall("`apq-tvm (.*?)`", names):
            parts = re.findall("`(.*?)`", what) if name in ("bench", "logs") else [""]
            for part in parts:
                words = [name, *filter(None, [part]), "--help"]
                assert "--json" in CliRunner().invoke(app, words).output, words


def test_targets_of_make_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for document in DOCUMENTS:
        spelled = all_commands(document) + re.findall(r"`(make .*?)`", TEXT[name_of(document)])
        for command in (c for c in spelled if c.startswith("make ")):
            exists = re.search(rf"^{command.split()[1]}:", makefile, re.MULTILINE) is not None
            assert exists != bool(pending(command)), command


# ---- figures ----


@each_document
def test_tables_are_the_rendering_of_what_was_measured(document: Path) -> None:
    text = TEXT[name_of(document)]
    assert doc_tables.render(text) == text, doc_tables.RENDER


@pytest.mark.parametrize("name", ["docs/speed-x86.md", "docs/speed-arm.md"])
def test_figures_of_speed_stand_in_rendered_tables_alone(name: str) -> None:
    rest = re.sub(r"<!-- table: \w+ -->.*?<!-- /table -->", "", TEXT[name], flags=re.DOTALL)
    assert not [line for line in rest.splitlines() if line.startswith("|")]


def test_every_measured_table_is_shown() -> None:
    shown = re.findall(r"<!-- table: (\w+) -->", "".join(TEXT.values()))
    assert sorted(shown) == sorted(doc_tables.TABLES)


def test_every_row_has_a_date_and_times_have_a_machine() -> None:
    for path in measured.FOLDER.glob("*.json"):
        document = measured.read(path.stem)
        assert all(re.fullmatch(r"\d{4}-\d\d-\d\d", row["date"]) for row in document["rows"])
        times = any({"us", "ms", "least"} & set(row) for row in document["rows"])
        assert ("machine" in document) == times, path


def test_rows_are_merged_on_one_machine_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measured, "FOLDER", tmp_path)
    here, there = ({"processor": "A", "target": t} for t in ("t", "u"))
    measured.store("x", [{"scheme": s, "us": 1, "date": "2026-01-01"} for s in "ab"], here)
    measured.store("x", [{"scheme": s, "us": 2} for s in "bc"], here, ("scheme",))
    assert [(r["scheme"], r["us"]) for r in measured.read("x")["rows"]] == [
        ("a", 1), ("b", 2), ("c", 2),
    ]  # fmt: skip
    with pytest.raises(ValueError, match=r"of A \(t\), this is A \(u\)"):
        measured.store("x", [{"scheme": "a", "us": 3}], there, ("scheme",))
    measured.store("x", [{"scheme": "a", "us": 3}], there)
    assert measured.read("x")["machine"] == there and len(measured.read("x")["rows"]) == 1


# ---- the picture ----


def files() -> Iterator[tuple[str, Path]]:
    """Modules by name, with their paths as the documents write them."""
    for name, path in sources():
        yield name, path.relative_to(ROOT)


def holds(entry: str, path: Path) -> bool:
    """Whether an entry of the picture or of a list, a file, a folder or a pattern, holds a path."""
    if entry.endswith("/"):
        return str(path).startswith(entry)
    return fnmatch(str(path), entry)


BOX = re.compile(r'(\w+)[\[(]+"(.*?)"[\])]+')
ARROW = re.compile(r"([\w &]+?) --> ([\w &]+)")


def boxes_and_arrows() -> tuple[dict[str, str], set[tuple[str, str]]]:
    """Boxes of the picture by name, and its arrows."""
    (picture,) = [b.text for b in blocks(ROOT / "docs/architecture.md") if b.language == "mermaid"]
    boxes: dict[str, str] = {}
    arrows: set[tuple[str, str]] = set()
    for line in filter(None, map(str.strip, picture.splitlines()[1:])):
        box, arrow = BOX.fullmatch(line), ARROW.fullmatch(line)
        assert box or arrow, f"neither a box nor an arrow of imports: {line}"
        if box:
            boxes[box[1]] = box[2]
        else:
            arrows |= set(product(arrow[1].split(" & "), arrow[2].split(" & ")))
    assert {end for one in arrows for end in one} <= set(boxes)
    return boxes, arrows


def listed(word: str) -> list[str]:
    """Entries of one of the lists below the picture."""
    (line,) = re.findall(rf"^- {word}, (.*?)\.$", ARCHITECTURE, re.MULTILINE | re.DOTALL)
    return re.findall("`(.*?)`", line)


def test_the_picture_is_of_imports() -> None:
    boxes, drawn = boxes_and_arrows()
    homes = {**boxes, **{e: e for word in ("Floor", "Around the line") for e in listed(word)}}

    def home(path: Path) -> str:
        fitting = [name for name, entry in homes.items() if holds(entry, path)]
        assert fitting, f"{path} is in no box and in no list of docs/architecture.md"
        return max(fitting, key=lambda name: len(homes[name]))

    modules = dict(files())
    assert {home(path) for path in modules.values()} == set(homes)
    found: dict[tuple[str, str], str] = {}
    for name, path in modules.items():
        for imported in runtime_imports(ast.parse((ROOT / path).read_text()), name):
            target = imported if imported in modules else imported.rpartition(".")[0]
            if target == "apq_tvm":  # its version
                continue
            if target in modules and home(modules[target]) != home(path):
                found.setdefault((home(path), home(modules[target])), f"{name} imports {imported}")
    between = {arrow for arrow in found if set(arrow) <= set(boxes)}
    assert not {arrow: found[arrow] for arrow in between - drawn}, "missing from the picture"
    assert not drawn - between, "arrows that are no import"
    floor, around = listed("Floor"), listed("Around the line")
    assert not [found[t, h] for t, h in found if t in floor and h not in floor]
    assert not [found[t, h] for t, h in found if t in boxes and h in around]


# ---- from a layer to its kernel ----


def kernels_of(path: str) -> set[str]:
    """Names of the kernels in a file's tuples."""
    module = importlib.import_module("apq_tvm." + path.removesuffix(".py").replace("/", "."))
    tuples = [v for v in vars(module).values() if isinstance(v, tuple)]
    return {k.name for found in tuples for k in found if isinstance(k, LinearKernel)}


@pytest.mark.parametrize(("arch", "column"), [("x86_64", 2), ("aarch64", 3), ("cuda", 4)])
def test_a_kernels_name_says_its_file(arch: str, column: int) -> None:
    rows = table(ARCHITECTURE, "| a name like |")
    profile = next(p for p in PROFILES if p.arch == arch)
    used = set()
    for kernel in linear_kernels(profile):
        row = next(
            r for r in rows if any(fnmatch(kernel.name, p.strip("`")) for p in r[0].split(", "))
        )
        paths = re.findall("`(.*?)`", row[column])
        mine = [path for path in paths if kernel.name in kernels_of(path)]
        assert mine, f"{kernel.name} is in none of {paths}"
        used |= {(row[0], path) for path in mine}
    assert used == {(row[0], path) for row in rows for path in re.findall("`(.*?)`", row[column])}
