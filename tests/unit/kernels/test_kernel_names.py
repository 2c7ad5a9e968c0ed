"""A kernel's name is built from its fields by one grammar, so that it can be read back."""

from __future__ import annotations

import re

import pytest

from apq_tvm.schedules.arm.profiles import PROFILES as ARM
from apq_tvm.schedules.devices import linear_kernels
from apq_tvm.schedules.linear.kernel import LinearKernel
from apq_tvm.schedules.x86.profiles import PROFILES as X86
from apq_tvm.types import DeviceProfile

GRAMMAR = re.compile(
    r"(?P<kind>[a-z]+)"
    r"(_(?P<weights>(?!A\d)[A-Za-z][a-z]*\d*(star)?)?(A(?P<act_bits>\d+))?)?"
    r"(_(?P<instruction>(?!r\d)[a-z]\w*?))?"
    r"(_(r(?P<lanes>\d+))?(k(?P<run>\d+))?(m(?P<m_named>\d+))?)?"
)
"""`LinearKernel.name`: only the instruction may have an underscore."""


def fields(kernel: LinearKernel) -> dict[str, str | None]:
    found = {
        "kind": kernel.kind,
        "weights": kernel.weights,
        "act_bits": kernel.act_bits,
        "instruction": kernel.instruction.name,
        "lanes": kernel.instruction.lanes,
        "run": kernel.run,
        "m_named": kernel.m_named,
    }
    return {key: str(value) if value else None for key, value in found.items()}


@pytest.mark.parametrize("profile", [*X86, *ARM], ids=lambda profile: profile.name)
def test_names_say_the_fields(profile: DeviceProfile) -> None:
    wrong, kernels = [], linear_kernels(profile)
    for kernel in kernels:
        read = GRAMMAR.fullmatch(kernel.name)
        if read is None or read.groupdict() != fields(kernel):
            wrong.append((kernel.name, read and read.groupdict()))
    assert not wrong
    assert len({kernel.name for kernel in kernels}) == len(kernels)
