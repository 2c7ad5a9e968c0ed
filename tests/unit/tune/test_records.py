"""Files of records: what they hold, how they are merged, and what a compilation takes from them."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from apq_tvm.errors import BadLog
from apq_tvm.formats import parse_scheme
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.schedules.devices import find_profile, linear_kernels
from apq_tvm.schedules.recorded import Records, default_of_kernel, fingerprint
from apq_tvm.select import by_name, choose
from apq_tvm.tune.logs import merge, prune, stale
from apq_tvm.tuning_logs.records import Record, merged, parse_record, read_records, write_records

PROFILE = find_profile("znver4")
KERNELS = linear_kernels(PROFILE)
GEMV, GEMM = "gemv_W4A8_vpdpbusd512_r16m1", "gemm_W4A8_vpdpbusd512_r16"
SPEC = LinearSpec(1024, 512, parse_scheme("W4A8g32"))


def record(kernel: str = GEMV, rows: tuple[int, int] = (1, 1), **changes: object) -> Record:
    schedule = default_of_kernel(SPEC, by_name(KERNELS)[kernel], PROFILE)
    made = Record(
        "linear", kernel, {"streams": 1}, schedule, n=1024, k=512, scheme="W4A8g32", rows=rows,
        ratio=1.2, interval=(1.1, 1.3), machine="m", date="2026-11-24",
    )  # fmt: skip
    return replace(made, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("decisions", [{"tile": (5, 2), "prefetch": False, "k_block": 512}, {}])
def test_a_line_is_read_as_it_was_written(decisions: dict[str, object]) -> None:
    made = record(decisions=decisions)
    assert parse_record(made.line()) == made


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "Expecting"),
        ("[]", "no JSON object"),
        ('{"op": "linear"}', "kernel is missing"),
        ('{"op": 3}', "op: 3 is of the wrong type"),
        (record().line().replace('"linear"', '"magic"'), "neither linear nor function"),
        (record().line().replace('"timed"', '"guessed"'), "neither timed nor static"),
        (record().line().replace('"rows": [1, 1]', '"rows": [0]'), "no range of rows"),
        (record().line().replace("{", '{"new": 1, ', 1), "no such field"),
        (record().line().replace('"n": 1024', '"n": -1024'), "n: -1024 is less than 0"),
        (record().line().replace('"threads": 1', '"threads": 0'), "threads: 0 is less than 1"),
        (record().line().replace('"ratio": 1.2', '"ratio": NaN'), "not all finite"),
        (record().line().replace('"n": 1024', f'"n": {10**400}'), "n: is more than"),
        (record().line().replace('"threads": 1', f'"threads": {10**400}'), "threads: is more than"),
        (record().line().replace('"ratio": 1.2', f'"ratio": {10**400}'), "too large"),
    ],
)
def test_other_lines_are_remarked_and_passed_over(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "log.json"
    path.write_text(f"{record().line()}\n{line}\n")
    found = read_records(path)
    assert found.records == (record(),)
    assert f"{path}:2: not a record" in found.remarks[0] and message in found.remarks[0]


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "log.json").write_bytes(b"\xff\xfe")
    with pytest.raises(BadLog, match=r"log\.json.*--no-log"):
        read_records(tmp_path / "log.json")


def test_merging_knows_no_order(tmp_path: Path) -> None:
    sure = record(interval=(1.15, 1.2))
    every = [record(), sure, record(how="static", interval=(9.0, 9.0)), record(n=2048)]
    wanted = merged(every)
    assert sure in wanted and len(wanted) == 2
    for seed in range(5):
        random.Random(seed).shuffle(every)
        assert merged(every) == wanted
    write_records(tmp_path / "a.json", every[:2])
    write_records(tmp_path / "b.json", every[2:])
    merge([tmp_path / "a.json", tmp_path / "b.json"], tmp_path / "c.json")
    merge([tmp_path / "b.json", tmp_path / "a.json"], tmp_path / "d.json")
    assert (tmp_path / "c.json").read_bytes() == (tmp_path / "d.json").read_bytes()
    lines = (tmp_path / "c.json").read_text().splitlines()
    assert [parse_record(line) for line in lines] == wanted


def chosen(
    *records: Record, spec: LinearSpec = SPEC
) -> list[tuple[str, int, int, dict[str, object], str]]:
    known = Records(records)
    found = choose(spec, KERNELS, PROFILE, "layer", known)
    return [(c.kernel, c.m_min, c.m_max, dict(c.decisions), c.source) for c in found]


def test_a_record_holds_for_its_rows() -> None:
    plain = chosen()
    made = chosen(record(GEMM, (46, -1), decisions={"m_tiles": 8}))
    few = [(k, low) for k, low, *_ in plain if k != GEMM]
    assert [(k, low) for k, low, *_ in made] == [*few, (GEMM, 46)]
    *_, (_, _, high, decisions, source) = made
    assert high == -1 and decisions["m_tiles"] == 8
    assert source.startswith("record: 1.20 times the default (1.10 to 1.30), m")
    assert all(not c[3] and not c[4] for c in made[:-1])


def test_records_of_other_epilogues_hold() -> None:
    other = replace(SPEC, bias=True, activation="gelu")
    assert chosen(record(), spec=other)[0][3]["streams"] == 1


def test_the_nearest_shape_answers_where_there_is_no_record() -> None:
    far = replace(SPEC, n=2048)
    (first, *_) = chosen(record(), spec=far)
    assert first[3]["streams"] == 1 and "nearest shape 1024x512" in first[4]
    (first, *_) = chosen(record(), spec=replace(SPEC, n=16384))
    assert not first[4]
    (first, *_) = chosen(record(scheme="W4A8g64"))
    assert not first[4]


def test_where_nothing_was_faster_no_other_shape_decides() -> None:
    near = record(n=2048, schedule=default_of_kernel(
        replace(SPEC, n=2048), by_name(KERNELS)[GEMV], PROFILE
    ))  # fmt: skip
    (first, *_) = chosen(near)
    assert first[3]["streams"] == 1
    kept = record(decisions={}, ratio=1.0, interval=(1.0, 1.0))
    (first, *others) = chosen(near, kept)
    assert not first[3] and first[4].startswith("record: nothing faster was found, m")
    plain = chosen()
    assert [c[:3] for c in (first, *others)] == [c[:3] for c in plain]
    # Nor is it more than a default: thresholds that were found since say which kernel that is.
    old = replace(kept, kernel=GEMM, rows=(5, 64), schedule=record(GEMM).schedule)
    assert [c[0] for c in chosen(old) if 5 <= c[1] <= 64] == ["gemv_W4A8_vpdpbusd512_r16m4"]


def test_a_decision_of_a_near_shape_may_be_impossible() -> None:
    (first, *_) = chosen(record(decisions={"streams": 64}), spec=replace(SPEC, n=2048))
    assert not first[3] and "as far as its decisions are possible" in first[4]


def test_a_record_of_another_schedule_says_nothing() -> None:
    old = record(schedule="0123456789abcdef")
    records = Records([old])
    assert choose(SPEC, KERNELS, PROFILE, "layer", records) == choose(
        SPEC, KERNELS, PROFILE, "layer"
    )
    assert "of another schedule (0123456789abcdef" in records.remarks[0]


def test_a_timed_record_wins() -> None:
    static = record(decisions={"streams": 2}, how="static", interval=(3.0, 3.0))
    assert chosen(static, record())[0][3]["streams"] == 1


def test_as_many_threads_as_the_module_starts_with_come_first() -> None:
    alone = record(decisions={"streams": 1}, interval=(1.25, 1.3))
    shared = record(decisions={"streams": 2}, threads=PROFILE.cores)
    for records in ((alone, shared), (shared, alone)):
        assert chosen(*records)[0][3]["streams"] == 2
    assert chosen(alone)[0][3]["streams"] == 1


def test_a_record_may_name_another_kernel() -> None:
    rows = record("gemv_W4A8_vpdpbusd512_r16m2", (4, 4), decisions={})
    made = chosen(rows)
    assert ("gemv_W4A8_vpdpbusd512_r16m2", 4, 4) in [entry[:3] for entry in made]
    one = record("gemv_W4A8_vpdpbusd512_r16m4", (1, 1), decisions={})  # reads four rows at least
    assert chosen(one)[0][0] == GEMV


def test_stale_records_are_pruned(tmp_path: Path) -> None:
    path = tmp_path / "log.json"
    old, gone = record(schedule="0" * 16), record(kernel=GEMV, rows=(2, 2))
    gone = replace(gone, kernel="gemv_of_old")
    write_records(path, [record(), replace(old, rows=(3, 3)), gone])
    reasons = {
        entry.record.kernel: entry.why for entry in stale(read_records(path).records, PROFILE)
    }
    assert "no kernel gemv_of_old" in reasons["gemv_of_old"]
    assert len(prune(path, "znver4")) == 2
    assert read_records(path).records == (record(),)


def test_fingerprints_do_not_know_names() -> None:
    kernel = by_name(KERNELS)[GEMV]
    from apq_tvm.schedules.decide import Defaults

    func = kernel.scheduled(kernel.choose(SPEC, PROFILE, Defaults()))
    named = func.with_attr("global_symbol", "some_layer_of_a_model")
    assert fingerprint(named) == fingerprint(func) == default_of_kernel(SPEC, kernel, PROFILE)
