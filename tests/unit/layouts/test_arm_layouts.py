"""Which layout integer weights have on Arm: what was measured decides, or the user."""

from __future__ import annotations

from pathlib import Path

import pytest

from apq_tvm import tuning_logs
from apq_tvm.errors import BadLog, BadTarget, NotApplicable
from apq_tvm.formats import parse_scheme
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.schedules.arm.layouts import (
    INTERLEAVINGS,
    LOG,
    LOSS,
    PLAIN,
    ROWS,
    SHARES,
    interleaving,
)
from apq_tvm.schedules.devices import find_profile, linear_kernels
from apq_tvm.select import choose
from apq_tvm.tuning_logs import read_log
from apq_tvm.types import DeviceProfile, KernelChoice


def chosen_kernels(scheme: str, profile: DeviceProfile) -> tuple[KernelChoice, ...]:
    spec = LinearSpec(64, 256, parse_scheme(scheme))
    return choose(spec, linear_kernels(profile), profile, "layer")


DEVICES = ("graviton3", "graviton4", "neoverse-n2", "cortex-x4")
CASES = [(d, scheme) for d in DEVICES for scheme in read_log(d, LOG, dict)["macs_per_cycle"]]


@pytest.mark.parametrize(("device", "scheme"), CASES)
def test_the_best_by_its_figures_is_taken(device: str, scheme: str) -> None:
    log = read_log(device, LOG, dict)
    found = log["macs_per_cycle"][scheme]
    assert log["m"] == list(ROWS)
    assert list(found) == list(INTERLEAVINGS) and abs(sum(SHARES) - 1) < 1e-9
    assert all(len(figures) == len(ROWS) and min(figures) > 0 for figures in found.values())
    profile = find_profile(device)
    chosen = interleaving(parse_scheme(scheme), profile)
    assert all(a >= (1 - LOSS) * b for a, b in zip(found[chosen], found[PLAIN], strict=True))
    for figures in found.values():  # none is better at every M
        assert any(a >= b for a, b in zip(found[chosen], figures, strict=True))
    choices = choose(
        LinearSpec(64, 256, parse_scheme(scheme)), linear_kernels(profile), profile, ""
    )
    rows, run = chosen.split("x")
    assert {choice.layout[:6] for choice in choices} == {f"W{scheme[1]}r{rows}k{run}"}
    reasons = " ".join(reason for _, reason in choices[0].rejected)
    for name in set(found) - {chosen}:
        assert f"MACs per cycle of {name} and {chosen}: M=1 {found[name][0]:g} to" in reasons


@pytest.mark.parametrize("device", ("armv8.6-i8mm", "graviton2", "cortex-a55", "armv8-a"))
def test_others_have_4x4(device: str) -> None:
    assert interleaving(parse_scheme("W4A8g32"), find_profile(device)) == "4x4"


@pytest.mark.parametrize("scheme", ("W4A8g16", "W4A4g32", "W5A8g32", "W4A32g32"))
def test_schemes_of_4x4(scheme: str) -> None:
    profile = find_profile("graviton3", layout="4x8")
    assert interleaving(parse_scheme(scheme), profile) == "4x4"


@pytest.mark.parametrize("layout", INTERLEAVINGS)
@pytest.mark.parametrize("scheme", ("W2zA8tg64", "W3A8g32", "W4A8g32", "W8A8"))
def test_a_layout_that_is_asked_for_serves_every_m(scheme: str, layout: str) -> None:
    profile = find_profile("armv8.6-i8mm", layout=layout)
    choices = choose(
        LinearSpec(64, 256, parse_scheme(scheme)), linear_kernels(profile), profile, ""
    )
    rows, run = layout.split("x")
    assert {choice.layout[:6] for choice in choices} == {f"W{scheme[1]}r{rows}k{run}"}
    assert choices[0].m_min == 1 and choices[-1].m_max == -1
    assert any("was asked for" in reason for _, reason in choices[0].rejected)
    with pytest.raises(NotApplicable, match=f"--layout {layout} was asked for"):
        other = next(k for k in linear_kernels(profile) if k.name == _other_kernel(layout, scheme))
        other.check(LinearSpec(64, 256, parse_scheme(scheme)), profile)


def _other_kernel(layout: str, scheme: str) -> str:
    return f"gemv_W{scheme[1]}A8_" + ("smmla_r4k8m1" if layout == "4x4" else "sdot_r4m1")


@pytest.mark.parametrize(
    ("target", "layout", "message"),
    [
        ("graviton3", "8x4", "4x4, 4x8, 8x8 are possible"),
        ("x86-64-v3", "4x8", "for 64-bit Arm"),
        ("graviton2", "4x8", "smmla"),
        ("arm-auto", "8x8", "armv8.2-dotprod, armv8-a does not have"),
    ],
)
def test_impossible_layouts_are_refused(target: str, layout: str, message: str) -> None:
    with pytest.raises(BadTarget, match=message):
        find_profile(target, layout=layout)


def test_variants_of_a_library_share_4x4() -> None:
    spec = LinearSpec(64, 256, parse_scheme("W4A8g32"))
    auto = find_profile("arm-auto")
    layouts = {choose(spec, linear_kernels(v), v, "")[0].layout for v in auto.variants}
    assert layouts == {"W4r4k4s"}


def test_figures_of_the_core_that_has_the_model() -> None:
    reasons = dict(chosen_kernels("W4A8g32", find_profile("cortex-x2"))[0].rejected).values()
    assert any("(those of graviton4, whose model it has)" in reason for reason in reasons)
    assert chosen_kernels("W4A8g32", find_profile("graviton4"))[0].layout in {
        choice.layout for choice in chosen_kernels("W4A8g32", find_profile("cortex-x2"))
    }


@pytest.mark.parametrize(
    ("log", "message"),
    [
        ("{", "Expecting property name"),
        ('{"m": [1, 4, 8, 16, 128]}', "measured is missing"),
        ('{"measured": "there", "m": [1, 4, 8, 16, 128]}', "macs_per_cycle, for m"),
        (
            '{"measured": "there", "m": [1, 4, 8, 16, 128], "macs_per_cycle": '
            '{"W4A8g32": {"4x4": [1, 1, 1, 1, 1]}}}',
            "macs_per_cycle.W4A8g32: a figure each of .*'4x8', '8x8'",
        ),
    ],
)
def test_a_broken_log_is_refused(
    log: str, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tuning_logs, "FOLDER", tmp_path)
    path = tuning_logs.log_path("graviton3", LOG)
    path.parent.mkdir()
    path.write_text(log)
    with pytest.raises(BadLog, match=f"{path}: {message}"):
        interleaving(parse_scheme("W4A8g32"), find_profile("graviton3"))
