"""The report: one self-contained page, resumed where it was interrupted."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import fake_module
import numpy as np
import onnx
import pytest
from onnx_models import build
from typer.testing import CliRunner

from apq_tvm.cli.main import app
from apq_tvm.errors import ApqError, BadInput, BadScheme, OutputExists, OutputFailed
from apq_tvm.evaluation.language import Language
from apq_tvm.evaluation.schemes import SchemeEvaluator
from apq_tvm.report import make_report
from apq_tvm.report.page import table
from apq_tvm.report.plots import _distance
from apq_tvm.report.timing import module_widths

pytest.importorskip("torch")
pytest.importorskip("matplotlib")

NAME = "w<&>"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model whose output can be logits; a layer's name needs escaping."""
    rng = np.random.default_rng(0)
    weights = {
        "table": rng.standard_normal((20, 32)).astype(np.float32),
        "w": rng.standard_normal((32, 20)).astype(np.float32),
    }
    nodes = [("Gather", "table input_ids", "x"), ("MatMul", "x w", "y")]
    proto = build(nodes, {"input_ids": ("int64", ["batch", "seq"])}, "y", weights)
    proto.graph.node[1].name = NAME
    path = tmp_path / "model.onnx"
    onnx.save(proto, path)
    return path


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    np.savez(tmp_path / "t.npz", input_ids=np.random.default_rng(1).integers(0, 20, (3, 8)))
    return tmp_path / "t.npz"


class Page(HTMLParser):
    """What a page loads, and its tables as lists of rows of cells."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.tables: list[list[list[str]]] = []
        self.open: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))
        assert not self.open, f"left open: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loads += [v or "" for k, v in attrs if k in ("src", "srcset", "href")]
        if tag not in ("meta", "img", "source", "link", "br"):
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("td", "th"):
            self.tables[-1][-1][-1] += data


def test_page_has_every_figure_and_loads_nothing(model: Path, tokens: Path, tmp_path: Path) -> None:
    html, figures = tmp_path / "r.html", tmp_path / "r.json"
    document = make_report(
        model, tokens, ["W8A8", "W2A8g32", "W8A8"], html, json_output=figures, language=Language()
    )
    assert json.loads(figures.read_text()) == document
    page = Page(html)
    assert len(page.loads) == 4  # two plots, for light and for dark pages
    assert all(re.match(r"data:image/png;base64,[\w+/=]+$", url) for url in page.loads)
    overview, outputs, errors, bits = page.tables
    assert [row[0] for row in overview[1:]] == ["W8A8", "W2A8g32"]
    for row, result in zip(overview[1:], document["schemes"], strict=True):
        cells = dict(zip(overview[0], row, strict=True))
        assert float(cells["perplexity"]) == pytest.approx(
            result["language"]["perplexity"], abs=1e-3
        )
        assert float(cells["KL mean"]) == pytest.approx(result["language"]["kl_mean"], abs=1e-5)
        assert float(cells["bits per weight"]) == pytest.approx(result["bits_per_weight"], abs=1e-3)
    assert outputs[0] == ["layer", "number", "N x K", "W8A8", "W2A8g32"]
    assert [row[:3] for row in errors[1:]] == [["n_x", "1", "20x32"], [NAME, "2", "20x32"]]
    assert outputs[1][3:] == ["", ""]  # embeddings have no output error
    assert float(errors[2][4]) == pytest.approx(
        document["schemes"][1]["layers"][1]["weight_error"], abs=1e-5
    )
    assert bits[2][4] == "2.50000"
    text = html.read_text()
    assert "prefers-color-scheme: dark" in text and "@media print" in text
    assert NAME not in text
    cells = {cell for rows in page.tables for row in rows for cell in row}
    assert cells.isdisjoint({"nan", "inf", "None"})
    assert not list(tmp_path.glob("*.part*"))


def test_without_language_cosines_are_shown(model: Path, tokens: Path, tmp_path: Path) -> None:
    document = make_report(model, tokens, ["W8A8"], tmp_path / "r.html")
    (overview, *_) = Page(tmp_path / "r.html").tables
    cells = dict(zip(*overview, strict=True))
    cosine = document["schemes"][0]["outputs"]["y"]["cosine_mean"]
    assert float(cells["cosine of y"]) == pytest.approx(cosine, abs=1e-6)
    assert "perplexity" not in cells


def test_integer_outputs_are_no_part_of_the_error(tmp_path: Path) -> None:
    """Ids that are passed through once halved the error that the plot shows."""
    weight = np.random.default_rng(0).standard_normal((32, 20)).astype(np.float32)
    nodes = [("MatMul", "x w", "y"), ("Identity", "ids", "same"), ("Cast", "y", "label", {"to": 7})]
    inputs = {"x": ("float32", ["batch", 32]), "ids": ("int64", ["batch", "seq"])}
    onnx.save(build(nodes, inputs, "y same label", {"w": weight}), tmp_path / "model.onnx")
    x = np.random.default_rng(1).standard_normal((8, 32)).astype(np.float32)
    np.savez(tmp_path / "i.npz", x=x, ids=np.arange(24).reshape(8, 3))
    document = make_report(
        tmp_path / "model.onnx", tmp_path / "i.npz", ["W2A8"], tmp_path / "r.html"
    )
    (scheme,) = document["schemes"]
    cells = dict(zip(*Page(tmp_path / "r.html").tables[0], strict=True))
    assert float(cells["equal in same"]) == 1 and "cosine of label" not in cells
    distance, title = _distance(scheme)
    assert distance == pytest.approx(1 - scheme["outputs"]["y"]["cosine_mean"])
    assert "float outputs" in title
    text = run("eval", tmp_path / "model.onnx", "--inputs", tmp_path / "i.npz", "--scheme", "W2A8")
    assert "100.0000%" in text.stdout and "integer outputs" in text.stdout
    scheme["outputs"] = {"label": {"equal": 0.75}}
    assert _distance(scheme) == (0.25, "share that differs, mean over outputs")


def test_float_products_say_why(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    weights = {"w": rng.standard_normal((32, 8)), "stack": rng.standard_normal((3, 8, 4))}
    nodes = [("MatMul", "x w", "h"), ("MatMul", "h stack", "y")]
    floats = {name: weight.astype(np.float32) for name, weight in weights.items()}
    onnx.save(build(nodes, {"x": ("float32", ["n", 32])}, "y", floats), tmp_path / "m.onnx")
    np.savez(tmp_path / "i.npz", x=rng.standard_normal((2, 32)).astype(np.float32))
    document = make_report(tmp_path / "m.onnx", tmp_path / "i.npz", ["W8A8"], tmp_path / "r.html")
    why = "K=8 is below 16, the smallest group"
    assert document["products"] == {"n_y": why}
    assert ["n_y", why] in Page(tmp_path / "r.html").tables[-1]


def counting(monkeypatch: pytest.MonkeyPatch, stop: int) -> list[str]:
    """Record evaluated schemes; the one after `stop` is interrupted."""
    seen: list[str] = []
    original: Callable[..., dict[str, Any]] = SchemeEvaluator.evaluate

    def evaluate(self: SchemeEvaluator, scheme: str, method: str = "rtn") -> dict[str, Any]:
        if len(seen) == stop:
            raise KeyboardInterrupt
        seen.append(scheme)
        return original(self, scheme, method)

    monkeypatch.setattr(SchemeEvaluator, "evaluate", evaluate)
    return seen


def test_interrupted_work_goes_on(
    model: Path, tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    html, schemes = tmp_path / "r.html", ["W8A8", "W4A8", "W3A8"]
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        counting(patch, 2)
        make_report(model, tokens, schemes, html)
    assert not html.exists()
    assert (tmp_path / "r.html.partial.json").exists()
    seen = counting(monkeypatch, 99)
    document = make_report(model, tokens, schemes, html)
    assert seen == ["W3A8"]
    assert [s["scheme"] for s in document["schemes"]] == schemes
    assert not (tmp_path / "r.html.partial.json").exists()
    seen.clear()
    np.savez(tokens, input_ids=np.zeros((1, 4), np.int64))
    make_report(model, tokens, ["W8A8"], html, force=True)
    assert seen == ["W8A8"]


def test_existing_outputs_are_kept(model: Path, tokens: Path, tmp_path: Path) -> None:
    html, figures = tmp_path / "r.html", tmp_path / "r.json"
    html.write_text("mine")
    with pytest.raises(OutputExists, match=r"r\.html exists; use --force"):
        make_report(model, tokens, ["W8A8"], html)
    with pytest.raises(OutputExists, match=r"r\.json exists"):
        figures.write_text("mine")
        make_report(model, tokens, ["W8A8"], tmp_path / "new.html", json_output=figures)
    assert html.read_text() == figures.read_text() == "mine"
    with pytest.raises(OutputFailed, match="no folder"):
        make_report(model, tokens, ["W8A8"], tmp_path / "absent" / "r.html")


@pytest.mark.parametrize(
    ("schemes", "message"),
    [
        ([], "name one scheme"),
        (["W9A8"], "weights of 9 bits"),
        (["float"], "'float' quantizes nothing"),
        (["W4A8@3"], "of the bits after @"),
        (["W4A8:magic"], "method 'magic'; one of rtn, gptq"),
    ],
)
def test_bad_schemes_are_said_before_the_work(
    schemes: list[str], message: str, model: Path, tokens: Path, tmp_path: Path
) -> None:
    with pytest.raises(ApqError, match=message):
        make_report(model, tokens, schemes, tmp_path / "r.html")
    assert not list(tmp_path.glob("r.html*"))


def test_a_scheme_that_fails_is_left_out(model: Path, tokens: Path, tmp_path: Path) -> None:
    document = make_report(model, tokens, ["W4A8:gptq", "W8A8"], tmp_path / "r.html")
    assert [s["scheme"] for s in document["schemes"]] == ["W8A8"]
    assert "needs calibration data" in document["failed"]["W4A8:gptq"]
    assert Page(tmp_path / "r.html").tables[-1][1][0] == "W4A8:gptq"
    with pytest.raises(BadInput, match=r"no scheme could be measured; W4A8:gptq: method gptq"):
        make_report(model, tokens, ["W4A8:gptq"], tmp_path / "s.html")


def test_modules_are_timed(tmp_path: Path) -> None:
    model = fake_module.write_onnx(tmp_path / "model.onnx")
    from apq_tvm.progress import Silent
    from apq_tvm.report.timing import time_modules

    modules = [fake_module.write(tmp_path / name) for name in ("one", "two")]
    x = np.ones((2, 3, 4), np.float32)
    call = {"x": x, "attention_mask": np.ones((2, 3), np.int64)}
    timings = time_modules(modules, "digest", call, 1, 0.05, Silent())
    assert timings is not None
    assert [row["name"] for row in timings["rows"]] == ["one", "two"]
    assert all(row["us"] > 0 and row["noise"] >= 0 for row in timings["rows"])
    assert timings["shapes"]["x"] == [2, 3, 4]
    manifest = json.loads((modules[0] / "manifest.json").read_text())
    (modules[0] / "manifest.json").write_text(json.dumps({**manifest, "onnx_sha256": "other"}))
    with pytest.raises(BadInput, match="one is compiled from another ONNX file"):
        time_modules(modules, "digest", call, 1, 0.05, Silent())
    assert time_modules([], "digest", call, 1, 0.05, Silent()) is None
    assert model.exists()


def test_widths_of_modules() -> None:
    assert module_widths({"layers": [{"scheme": "W4A8g32"}, {"scheme": "float"}]}) == (0,)
    layers = [{"scheme": "anyprec3-5"}, {"scheme": "W8A8"}]
    assert module_widths({"layers": layers}) == (3, 4, 5)


def test_cells_are_escaped_and_numbers_aligned() -> None:
    text = table(("a", "b"), [("<x>", "1")])
    assert "<td>&lt;x&gt;</td>" in text and '<td class="n">1</td>' in text


runner = CliRunner()


def run(*words: object) -> Any:
    return runner.invoke(app, [str(word) for word in words])


def test_report_command(model: Path, tokens: Path, tmp_path: Path) -> None:
    words = ("report", model, "--inputs", tokens, "--schemes", "W8A8, W4A8g32")
    html = tmp_path / "r.html"
    result = run(*words, "-o", html, "--json", tmp_path / "r.json", "--perplexity")
    assert result.exit_code == 0, result.output
    assert len(json.loads((tmp_path / "r.json").read_text())["schemes"]) == 2
    assert "2 schemes" in result.stderr
    assert run(*words, "-o", html).exit_code == 1


def test_eval_command_tries_a_scheme(model: Path, tokens: Path) -> None:
    words = ("eval", model, "--inputs", tokens, "--scheme", "W4A8g32", "--perplexity")
    document = json.loads(run(*words, "--json").stdout)
    assert document["language"]["tokens"] == 21
    assert [layer["name"] for layer in document["layers"]] == ["n_x", NAME]
    text = run(*words).stdout
    for word in ("4.5 bits per weight", NAME, "float perplexity", "KL mean"):
        assert word in text, word


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--scheme", "W4A8", "--against", "m.onnx"), "--against does not go with it"),
        ((), "--against MODEL.onnx for a compiled module, or --scheme"),
        (("--against", "m.onnx", "--method", "gptq"), "go with --scheme only"),
        (("--scheme", "W4A8", "--bits", "3"), "there is no choice"),
        (("--scheme", "W4A8", "--perplexity", "--logits", "z"), "no output 'z'"),
        (("--scheme", "W4A8", "--perplexity", "--tokens", "z"), "'z' is no input of token ids"),
        (("--scheme", "W4A8", "--perplexity", "--min-tokens", "99"), "99 or more are needed"),
    ],
)
def test_eval_command_refuses(
    words: tuple[str, ...], message: str, model: Path, tokens: Path
) -> None:
    result = run("eval", model, "--inputs", tokens, *words)
    assert result.exit_code == 1
    assert message in result.stderr


def test_bad_scheme_is_named() -> None:
    with pytest.raises(BadScheme, match="nearest"):
        make_report(Path("m"), Path("i"), ["W4Q8"], Path("r.html"))
