"""Tables of spans stay in registers."""

from __future__ import annotations

import re

import pytest
from test_spans import K, N, built, quantized, record

from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.schedules.devices import find_profile


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("name", "target", "wanted"),
    [
        ("cb2", "znver3", ("vpshufb", "vpmaddubsw")),
        ("cb3", "znver3", ("vpshufb", "vpblendvb", "vpmaddubsw")),
        ("cb2", "znver4", ("vpshufb", "vpdpbusd")),
        ("cb4", "znver4", ("vpermb", "vpdpbusd")),
        ("cb3", "cascadelake", ("vpshufb", "vpdpbusd")),
        ("W2sA8", "znver3", ("vpmaddubsw", "vpmaddwd")),
    ],
)
def test_values_are_looked_up_in_registers(name: str, target: str, wanted: tuple[str]) -> None:
    tensor, device = quantized(name), find_profile(target)
    spec = LinearSpec(N, K, tensor.scheme)
    instruction = "maddubs" if target == "znver3" else "vpdpbusd512"
    source = built(record(tensor.scheme.family, instruction, "m1"), spec, device).mod
    assembly = source.inspect_source("s")
    vectors = "%zmm" if instruction == "vpdpbusd512" else "%ymm"
    for mnemonic in wanted:
        assert re.search(rf"\s{mnemonic}\s.*{vectors}", assembly), mnemonic
