"""Selection covers every M, prefers by order, keeps one layout and every reason."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from apq_tvm.errors import NotApplicable, UnsupportedModel
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.schedules.linear.kernel import Instruction, LinearKernel
from apq_tvm.select import choose
from apq_tvm.types import DeviceProfile, Scheme

PROFILE = DeviceProfile("toy", {}, frozenset(), 32, 16, 2, 32768, 524288, ())
SPEC = LinearSpec(n=64, k=128, scheme=Scheme(4, group_size=32))


@dataclass(frozen=True)
class Layout:
    name: str


def kernel(
    name: str, m_min: int, m_max: int, layout: str = "W4r8k4", declines: str = ""
) -> LinearKernel:
    def check(spec: LinearSpec, profile: DeviceProfile) -> None:
        if declines:
            raise NotApplicable(declines)

    def unused(*args: Any) -> Any:
        raise AssertionError("selection must not build kernels")

    layout_of: Any = lambda spec, profile: Layout(layout)  # noqa: E731
    nothing = Instruction("", (), 0)
    return LinearKernel(name, "", 0, nothing, m_min, check, layout_of, unused, unused, m_max=m_max)


def ranges(*kernels: LinearKernel) -> list[tuple[str, int, int]]:
    chosen = choose(SPEC, kernels, PROFILE, "layer")
    return [(c.kernel, c.m_min, c.m_max) for c in chosen]


def test_first_kernel_wins_where_it_applies() -> None:
    assert ranges(kernel("gemm", 8, -1), kernel("gemv", 1, 1), kernel("any", 1, -1)) == [
        ("gemv", 1, 1),
        ("any", 2, 7),
        ("gemm", 8, -1),
    ]


def test_neighbouring_ranges_of_one_kernel_stay_one() -> None:
    assert ranges(kernel("any", 1, -1), kernel("gemv", 1, 4)) == [("any", 1, -1)]


def test_upper_limit_hands_over_to_the_next() -> None:
    assert ranges(kernel("small", 1, 16), kernel("large", 4, -1)) == [
        ("small", 1, 16),
        ("large", 17, -1),
    ]


def test_reasons_are_kept() -> None:
    chosen = choose(
        SPEC,
        (
            kernel("vnni", 1, -1, declines="needs avx512vnni"),
            kernel("avx2", 1, -1),
            kernel("wide", 1, -1, layout="W4r16k4"),
        ),
        PROFILE,
        "layer",
    )
    assert [c.kernel for c in chosen] == ["avx2"]
    assert chosen[0].rejected == (
        ("vnni", "needs avx512vnni"),
        ("wide", "wants layout W4r16k4; the weights are stored as W4r8k4"),
    )


@pytest.mark.parametrize("kernels", [(), (kernel("gemm", 8, -1),), (kernel("gemv", 1, 4),)])
def test_a_gap_is_an_error_that_names_layer_and_shape(kernels: tuple[LinearKernel, ...]) -> None:
    with pytest.raises(UnsupportedModel, match=r"query.*\[64, 128\].*W4A8g32.*--tensor-type"):
        choose(SPEC, kernels, PROFILE, "query")


def test_kernels_of_other_bits_are_no_alternative() -> None:
    of_2_bits = replace(kernel("two", 1, -1, declines="is for W2"), bits=2)
    (choice,) = choose(SPEC, (of_2_bits, kernel("any", 1, -1)), PROFILE, "layer")
    assert choice.rejected == ()
