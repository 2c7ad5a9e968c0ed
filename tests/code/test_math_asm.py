"""Elementary functions stay in vector registers."""

from __future__ import annotations

import pytest
from test_math import REFERENCE, _build

tvm = pytest.importorskip("tvm")


@pytest.mark.parametrize("name", REFERENCE)
def test_stays_in_vector_registers(name: str) -> None:
    assembly = _build(name).mod.inspect_source("asm")
    assert "ymm" in assembly
    for call in ("expf", "erff", "tanhf", "floorf"):
        assert f"call\t{call}" not in assembly and f"callq\t{call}" not in assembly
