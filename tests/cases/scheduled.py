"""Schedule and build one PrimFunc for a device profile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from built import Kernel, built

from apq_tvm.schedules.decide import Decide, Defaults
from apq_tvm.schedules.graph.rules import schedule_function
from apq_tvm.types import DeviceProfile


def _profile(mcpu: str, vector_bytes: int, registers: int, *features: str) -> DeviceProfile:
    target = {"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": mcpu}
    names = frozenset(features)
    return DeviceProfile(mcpu, target, names, vector_bytes, registers, 2, 32768, 524288, ("test",))


AVX2 = _profile("znver3", 32, 16, "avx2", "fma")
AVX512 = _profile("znver4", 64, 32, "avx2", "fma", "avx512f")
PROFILES = [
    pytest.param(AVX2, marks=pytest.mark.isa("avx2"), id="avx2"),
    pytest.param(AVX512, marks=pytest.mark.isa("avx512f"), id="avx512"),
]


def compiled(func: Any, profile: DeviceProfile, decide: Decide | None = None) -> Kernel:
    """A PrimFunc by its rule; callable over numpy arrays, those of results are filled in place."""
    scheduled, name = schedule_function(func, profile, decide or Defaults())
    assert name
    return built(scheduled, profile)


def normal(rng: np.random.Generator, shape: Sequence[int], scale: float = 1.0) -> Any:
    """float32 values around 0."""
    return (rng.standard_normal(shape) * scale).astype(np.float32)
