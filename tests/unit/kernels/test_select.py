"""Selection covers every M, prefers by order, keeps one layout and every reason."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from apq_tvm import tuning_logs
from apq_tvm.errors import BadLog, NotApplicable, UnsupportedModel
from apq_tvm.formats import parse_scheme
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.schedules import devices
from apq_tvm.schedules.decide import Defaults
from apq_tvm.schedules.linear import rules
from apq_tvm.schedules.linear.kernel import Instruction, LinearKernel
from apq_tvm.schedules.linear.preferences import PREFERENCES, preferring
from apq_tvm.schedules.linear.thresholds import THRESHOLDS
from apq_tvm.select import choose
from apq_tvm.types import DeviceProfile, Scheme

PROFILE = DeviceProfile("toy", {}, frozenset(), 32, 16, 2, 32768, 524288, (), measured_as=("kin",))
SPEC = LinearSpec(n=64, k=128, scheme=Scheme(4, group_size=32))


@dataclass(frozen=True)
class Layout:
    name: str


def kernel(name: str, m_tile: int, layout: str = "W4r8k4", declines: str = "") -> LinearKernel:
    def check(spec: LinearSpec, profile: DeviceProfile) -> None:
        if declines:
            raise NotApplicable(declines)

    def unused(*args: Any) -> Any:
        raise AssertionError("selection must not build kernels")

    layout_of: Any = lambda spec, profile: Layout(layout)  # noqa: E731
    nothing = Instruction("", (), 0)
    return LinearKernel(name, "", 0, nothing, m_tile, check, layout_of, unused, unused)


@pytest.fixture
def logs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Path]:
    """Writes a device's rules; nobody measured others."""
    monkeypatch.setattr(tuning_logs, "FOLDER", tmp_path)

    def write(device: str, *rules: dict[str, Any], log: str = THRESHOLDS.log, **more: Any) -> Path:
        path = tuning_logs.log_path(device, log)
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({"measured": f"the {device}", "rules": rules, **more}))
        return path

    return write


def ranges(*kernels: LinearKernel) -> list[tuple[str, int, int]]:
    chosen = choose(SPEC, kernels, PROFILE, "layer")
    return [(c.kernel, c.m_min, c.m_max) for c in chosen]


def test_first_kernel_wins_where_it_applies(logs: Any) -> None:
    logs("toy", {"kind": "gemv", "most": 1})
    assert ranges(kernel("gemm", 8), kernel("gemv", 1), kernel("any", 1)) == [
        ("gemv", 1, 1),
        ("any", 2, 7),
        ("gemm", 8, -1),
    ]


def test_neighbouring_ranges_of_one_kernel_stay_one(logs: Any) -> None:
    logs("toy", {"kind": "gemv", "most": 4})
    assert ranges(kernel("any", 1), kernel("gemv", 1)) == [("any", 1, -1)]


def test_upper_limit_hands_over_to_the_next(logs: Any) -> None:
    logs("toy", {"kind": "small", "most": 16})
    assert ranges(kernel("small", 1), kernel("large", 4)) == [
        ("small", 1, 16),
        ("large", 17, -1),
    ]


def test_reasons_are_kept() -> None:
    chosen = choose(
        SPEC,
        (
            kernel("vnni", 1, declines="needs avx512vnni"),
            kernel("avx2", 1),
            kernel("wide", 1, layout="W4r16k4"),
        ),
        PROFILE,
        "layer",
    )
    assert [c.kernel for c in chosen] == ["avx2"]
    assert chosen[0].rejected == (
        ("vnni", "needs avx512vnni"),
        ("wide", "wants layout W4r16k4; the weights are stored as W4r8k4"),
    )


@pytest.mark.parametrize("kernels", [(), (kernel("gemm", 8),), (kernel("gemv", 1),)])
def test_a_gap_is_an_error_that_names_layer_and_shape(
    kernels: tuple[LinearKernel, ...], logs: Any
) -> None:
    logs("toy", {"kind": "gemv", "most": 4})
    with pytest.raises(UnsupportedModel, match=r"query.*\[64, 128\].*W4A8g32.*--tensor-type"):
        choose(SPEC, kernels, PROFILE, "query")


def test_kernels_of_other_bits_are_no_alternative() -> None:
    of_2_bits = replace(kernel("two", 1, declines="is for W2"), bits=2)
    (choice,) = choose(SPEC, (of_2_bits, kernel("any", 1)), PROFILE, "layer")
    assert choice.rejected == ()


def test_a_tile_is_a_promise_that_no_log_breaks(logs: Any) -> None:
    logs("toy", {"kind": "gemm", "least": 2})
    assert ranges(kernel("gemm", 4), kernel("any", 1)) == [("any", 1, 3), ("gemm", 4, -1)]


def test_layers_of_one_scale_a_row_may_have_rows_of_their_own(logs: Any) -> None:
    logs("toy", {"kind": "gemm", "least": 33, "least_whole": 13})
    kernels = kernel("gemm", 5), kernel("any", 1)
    assert ranges(*kernels) == [("any", 1, 32), ("gemm", 33, -1)]
    whole = replace(SPEC, scheme=Scheme(4, group_size=-1))
    found = choose(whole, kernels, PROFILE, "layer")
    assert [(c.kernel, c.m_min) for c in found] == [("any", 1), ("gemm", 13)]
    floats = choose(replace(SPEC, scheme=None), kernels, PROFILE, "layer")
    assert [c.m_min for c in floats] == [1, 33]


def test_a_device_borrows_what_its_own_log_leaves_open(logs: Any) -> None:
    kernels = kernel("gemm", 4), kernel("lut", 1), kernel("any", 1)
    logs("kin", {"kind": "gemm", "least": 9}, {"kind": "lut", "most": 2})
    assert ranges(*kernels) == [("lut", 1, 2), ("any", 3, 8), ("gemm", 9, -1)]
    logs("toy", {"kind": "ge?m", "m_tile": [3, 4], "least": 6})
    assert ranges(*kernels) == [("lut", 1, 2), ("any", 3, 5), ("gemm", 6, -1)]


def test_what_is_not_lent_is_not_borrowed(logs: Any) -> None:
    kernels = kernel("gemm", 4), kernel("any", 1)
    logs("kin", {"kind": "gemm", "least": 9, "lent": False})
    assert ranges(*kernels) == [("any", 1, 3), ("gemm", 4, -1)]
    logs("toy", {"kind": "gemm", "least": 6, "lent": False})
    assert ranges(*kernels) == [("any", 1, 5), ("gemm", 6, -1)]


@pytest.mark.parametrize(
    ("device", "source"), [("toy", "measured: the toy"), ("kin", "toy borrows it of kin: the kin")]
)
def test_a_kernel_that_was_measured_to_be_slower_is_declined(
    device: str, source: str, logs: Any
) -> None:
    logs(device, {"kind": "bitserial", "most_act_bits": {"4": 7, "5": 8}, "why": "a table"})
    (choice,) = choose(SPEC, (kernel("bitserial", 1), kernel("any", 1)), PROFILE, "layer")
    ((_, reason),) = choice.rejected
    assert "integer dot is faster from q*p >= 32 on at W4" in reason and source in reason
    few = replace(SPEC, scheme=Scheme(4, act_bits=7, group_size=32))
    (choice,) = choose(few, (kernel("bitserial", 1), kernel("any", 1)), PROFILE, "layer")
    assert choice.kernel == "bitserial"


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"kind": "gemm", "m_min": 5}, r"rules\[1\].m_min: kernels have no such field"),
        ({"kind": 5}, r"rules\[1\].kind: 5 is no str"),
        ({"bits": [1, "2"]}, r"rules\[1\].bits: '2' is no int"),
        ({"kind": "gemm", "least": "5"}, r"rules\[1\].least: '5' is no int"),
        ({"kind": "gemm", "lent": True}, r"rules\[1\].lent: True is not false"),
        ({"most_act_bits": {"x": 1}}, r"rules\[1\].most_act_bits: \['x'\] are no bits"),
        ("gemm", r"rules\[1\]: 'gemm' is no dict"),
        ({"kind": "gem", "bits": [2, 3]}, r"rules\[1\]: no kernel of toy has kind gem, bits 2"),
    ],
)
def test_a_rule_that_says_nothing_is_refused(rule: Any, message: str, logs: Any) -> None:
    path = logs("kin", {"kind": "any"}, rule)
    with pytest.raises(BadLog, match=f"{re.escape(str(path))}: {message}"):
        THRESHOLDS.check((kernel("any", 1), kernel("gemm", 5)), PROFILE)


def test_a_broken_log_is_refused(logs: Any) -> None:
    path = logs("kin", speed=1)
    with pytest.raises(BadLog, match=f"{re.escape(str(path))}: speed: is none of measured, rules"):
        ranges(kernel("any", 1))
    for device, text, message in (
        ("toy", '{"measured": ', "Expecting value"),
        ("half", '{"measured": "here"}', "rules: None is no list"),
        ("old", '{"rules": []}', "measured: None is no str"),
        ("none", "[]", "the whole: .* is no dict"),
    ):
        path = logs(device)
        path.write_text(text)
        profile = replace(PROFILE, name=device)
        with pytest.raises(BadLog, match=f"{re.escape(str(path))}: .*{message}"):
            choose(SPEC, (kernel("any", 1),), profile, "layer")


def test_a_device_prefers_what_it_was_measured_to(logs: Any) -> None:
    """The first rule that names a decision, the device's own before those of its kin."""
    asked = lambda at: preferring(at, PROFILE, Defaults())  # noqa: E731
    assert asked(kernel("gemv", 2))("ahead", (0, 4096)) == 0
    logs("kin", {"kind": "gemv", "first": {"ahead": 512, "unroll": 4}}, log=PREFERENCES.log)
    logs(
        "toy",
        {"kind": "gemv", "m_tile": 2, "first": {"ahead": 4096}, "why": "a table"},
        {"kind": "gemv", "first": {"ahead": 64, "streams": 2, "tile": [4, 2]}},
        log=PREFERENCES.log,
    )
    two, other = asked(kernel("gemv", 2)), asked(kernel("gemm", 2))
    assert two("ahead", (0, 64, 4096)) == 4096 and two("streams", (1, 2)) == 2
    assert two("unroll", (1, 2, 4)) == 4 and two("grain", (1, 2)) == 1
    assert two("ahead", (0, 64)) == 0  # it is no choice here
    assert two("tile", ((5, 2), (4, 2))) == (4, 2)
    assert asked(kernel("gemv", 1))("ahead", (0, 4096, 64)) == 64
    assert other("ahead", (0, 4096)) == 0


@pytest.mark.parametrize("first", [{}, None, 5])
def test_a_preference_for_nothing_is_refused(first: Any, logs: Any) -> None:
    path = logs("toy", {"kind": "gemv", "first": first}, log=PREFERENCES.log)
    with pytest.raises(BadLog, match=rf"{re.escape(str(path))}: rules\[0\].first: "):
        PREFERENCES.check((kernel("gemv", 1),), PROFILE)


def shipped(kind: rules.Kind[Any]) -> list[str]:
    return sorted(path.parent.name for path in tuning_logs.FOLDER.glob(f"*/{kind.log}.json"))


RULES = [(kind, device) for kind in (THRESHOLDS, PREFERENCES) for device in shipped(kind)]


@pytest.mark.parametrize(("kind", "device"), RULES)
def test_every_shipped_rule_decides_for_some_kernel(kind: rules.Kind[Any], device: str) -> None:
    """Of a device that reads the log, and that has the kernel's instruction."""
    log = tuning_logs.read_log(device, kind.log, kind.parse)
    assert log is not None and log.measured
    found = [
        found.rule
        for profile in devices.PROFILES
        if device in (profile.name, *profile.measured_as)
        for kernel in devices.linear_kernels(profile)
        if not kernel.instruction.lacks(profile.features)
        for found in list(kind.rules_of(kernel, profile))[: 1 if kind is THRESHOLDS else None]
    ]
    assert [i for i, rule in enumerate(log.rules) if not any(rule is f for f in found)] == []
    words = json.loads(tuning_logs.log_path(device, kind.log).read_text())
    assert all(rule.get("why") for rule in words["rules"])


@pytest.mark.parametrize("device", shipped(PREFERENCES))
def test_every_shipped_preference_is_a_choice(device: str) -> None:
    profile = devices.find_profile(device)
    log = tuning_logs.read_log(device, PREFERENCES.log, PREFERENCES.parse)
    assert log is not None
    names = "W4A8g32 W2A8g64 W7A8 W8A8 nl4 mixed24 W2*A8 W2sA8 cb3 bcq2g32 anyprec3-8"
    details = {"anyprec3-8": (("channels", 1),), "W8A8": (("pair_sum", 152),)}
    specs = [
        LinearSpec(
            4096, 4096, parse_scheme(name), details=details.get(name, ()),
            asymmetric=name == "W8A8",
        )
        for name in names.split()
    ]  # fmt: skip
    for rule in log.rules:
        taken = [
            kernel.choose(spec, profile, Defaults()).decisions
            for kernel in devices.linear_kernels(profile)
            if rule.fits(kernel)
            for spec in specs
            if kernel.is_for(spec) and kernel.act_bits == 8
        ]
        assert any(rule.first.items() <= decisions.items() for decisions in taken), rule


@pytest.mark.parametrize("target", ("znver4", "znver3", "x86-64", "graviton2"))
def test_layouts_are_chosen_by_instructions(target: str) -> None:
    """Of kernels, not by the width of vectors, which a device of another kind may share."""
    profile = devices.find_profile(target)
    other = replace(profile, vector_bytes=16 if profile.vector_bytes > 16 else 64)
    for name in ("W4A8g32", "nl4", "cb3", "W2sA8", "bcq2", "bcq2A32", "W2*A8", "mixed24"):
        spec = LinearSpec(64, 256, parse_scheme(name))
        for kernel in devices.linear_kernels(profile):
            if kernel.kind == "generic" or kernel.family == spec.scheme.family:
                layouts = {kernel.layout(spec, p).name for p in (profile, other)}
                assert len(layouts) == 1, (kernel.name, name, layouts)


def test_every_device_has_figures_and_borrows_of_devices() -> None:
    names = {profile.name for profile in devices.PROFILES}
    for profile in devices.PROFILES:
        assert profile.gpu or list(THRESHOLDS.logs_of(profile)), profile.name
        assert {*profile.measured_as, profile.modelled_as or profile.name} <= names
        assert {*profile.measured_as} <= {*shipped(THRESHOLDS)} - {profile.name}
        for variant in profile.variants or (profile,):
            for kind in (THRESHOLDS, PREFERENCES):
                kind.check(devices.linear_kernels(profile), variant)
