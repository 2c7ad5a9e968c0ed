"""``apq-tvm tune`` and ``logs``: what they print, and what they refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from apq_tvm.cli.main import app
from apq_tvm.tuning_logs.records import Record, read_records, write_records

TUNE = ("tune", "--shapes", "64x64", "--m", "1")


def invoke(*words: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(words))
    return result.exit_code, result.stdout, result.stderr


def test_a_dry_run_says_tasks_sizes_and_time() -> None:
    code, out, _ = invoke(*TUNE, "--scheme", "W8A8", "--dry-run", "--json")
    report = json.loads(out)
    assert code == 0 and report["dry_run"] and report["seconds"] > 0
    assert {(t["m"], t["trials"] == t["points"] - 1) for t in report["tasks"]} == {(1, True)}
    code, out, _ = invoke(*TUNE, "--dry-run")
    assert "64x64 W4A8g32" in out and "nothing was timed" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("tune",), "name an ONNX file, or shapes"),
        ((*TUNE, "--target", "h100"), "is a GPU"),
        ((*TUNE, "--target", "arm-auto"), "is several devices"),
        ((*TUNE, "--device", "carrier-pigeon://x"), "--device"),
        ((*TUNE, "--target", "graviton3"), "lacks"),
        ((*TUNE, "--target", "host", "--log", "/proc/none/log.json"), "--log"),
        (("tune", "--shapes", "64"), "NxK"),
        ((*TUNE, "--m", "0"), "--m"),
        (("tune", "none.onnx"), "none.onnx"),
        ((*TUNE, "--scheme", "W9"), "W9"),
        (("logs", "prune", "none.json"), "no such file of records"),
        (("logs", "verify", "none.json"), "no such file of records"),
    ],
)
def test_what_is_wrong_is_told(words: tuple[str, ...], message: str) -> None:
    code, _, err = invoke(*words)
    last = err.strip().splitlines()[-1]
    assert code == 1 and last.startswith("error: ") and message in last, err


def test_xgboost_is_asked_for_before_any_work(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "xgboost", None)
    words = ("tune", "--shapes", "512x512", "--m", "64", "--log", str(tmp_path / "log.json"))
    code, _, err = invoke(*words)
    assert code == 1 and "pip install 'apq-tvm[tune]'" in err


def record(**changes: Any) -> Record:
    given: dict[str, Any] = {
        "op": "linear", "kernel": "gemv_of_old", "decisions": {"a": 1}, "schedule": "0",
        "n": 64, "k": 64, "scheme": "W8A8", "ratio": 1.2, "interval": (1.1, 1.3),
    }  # fmt: skip
    return Record(**(given | changes))


def test_logs_are_shown_merged_and_pruned(tmp_path: Path) -> None:
    one, two, both = (tmp_path / f"{name}.json" for name in ("one", "two", "both"))
    write_records(one, [record()])
    write_records(two, [record(n=128)])
    two.write_text(two.read_text() + "torn")
    code, _, err = invoke("logs", "merge", str(one), str(two), "-o", str(both))
    assert code == 0 and "both.json: 2 records" in err and "two.json:2: not a record" in err
    code, out, _ = invoke("logs", "show", str(both))
    assert code == 0 and "gemv_of_old" in out and "1.20 (1.10 to 1.30)" in out
    code, out, _ = invoke("logs", "show", str(both), "--json")
    assert [entry["n"] for entry in json.loads(out)] == [64, 128]
    code, out, _ = invoke("logs", "prune", str(both), "--target", "znver4", "--json")
    assert code == 0 and len(json.loads(out)["dropped"]) == 2
    assert not read_records(both).records


def test_an_empty_log_is_good(tmp_path: Path) -> None:
    write_records(tmp_path / "log.json", [])
    code, _, err = invoke("logs", "verify", str(tmp_path / "log.json"))
    assert code == 0 and "0 of 0 records are good" in err


def test_a_record_of_a_function_wants_its_model(tmp_path: Path) -> None:
    write_records(tmp_path / "log.json", [record(op="function", kernel="softmax", n=0, k=0)])
    code, out, err = invoke("logs", "verify", str(tmp_path / "log.json"))
    assert code == 0 and "left softmax" in out and "--model" in out
    assert "0 of 0 records are good; 1 were not checked" in err


def test_a_stale_record_is_not(tmp_path: Path) -> None:
    write_records(tmp_path / "log.json", [record()])
    code, out, err = invoke("logs", "verify", str(tmp_path / "log.json"))
    assert code == 1 and "no kernel gemv_of_old" in out and "0 of 1" in err
