"""What tests of Arm kernels share: skips with reasons, programs under qemu, assembly to look at."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from built import built, check_arguments, key_of
from linear_cases import Case
from tvm_ffi import structural_equal

from apq_tvm.bench.emulator import COMPILERS, EMULATORS, INSTALL, Program
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.schedules.decide import Decide, Defaults
from apq_tvm.schedules.devices import find_profile
from apq_tvm.schedules.linear.kernel import LinearKernel
from apq_tvm.tensorize.meaning.spans.fold import Fold
from apq_tvm.types import DeviceProfile, QuantizedTensor

_CC, _QEMU = COMPILERS["aarch64"], EMULATORS["aarch64"]

needs_cross = pytest.mark.skipif(
    shutil.which(_CC) is None, reason=f"{_CC} is not on PATH: {INSTALL}"
)
"""For tests that compile C for aarch64."""

_lacking = [tool for tool in (_CC, _QEMU) if shutil.which(tool) is None]
needs_qemu = pytest.mark.skipif(
    bool(_lacking), reason=f"{', '.join(_lacking)} not on PATH: {INSTALL}"
)
"""For tests that run aarch64 programs (which they compile first)."""


def scheduled(
    kernel: LinearKernel, spec: LinearSpec, profile: DeviceProfile, decide: Decide | None = None
) -> Any:
    """The kernel's PrimFunc for a layer; `NotApplicable` if it declines."""
    decide = decide or Defaults()
    kernel.check(spec, profile)
    return kernel.scheduled(kernel.choose(spec, profile, decide))


_EMULATED: dict[Hashable, list[Emulated]] = {}


def emulated(func: Any, profile: DeviceProfile, folder: Path, cpu: str = "max") -> Emulated:
    """A PrimFunc as a program under qemu; the same one again if it was built before."""
    alike = _EMULATED.setdefault((cpu, key_of(func, profile)), [])
    for program in alike:
        if structural_equal(program.func, func, map_free_vars=True):
            return program
    alike.append(Emulated(func, profile, folder, cpu))
    return alike[-1]


class Emulated:
    """A program that calls a PrimFunc on numpy arrays, without checks in its code."""

    def __init__(self, func: Any, profile: DeviceProfile, folder: Path, cpu: str) -> None:
        self.func = func
        own = Path(tempfile.mkdtemp(dir=folder))
        self._program = Program(func, profile, own, cpu, checked=False)

    def __call__(self, *arrays: Any) -> None:
        check_arguments(self.func, arrays)
        self._program(*arrays)


def assembly(func: Any, profile: DeviceProfile) -> str:
    """What LLVM makes of a scheduled PrimFunc; needs neither compiler nor qemu."""
    return built(func, profile).assembly


def count(source: str, mnemonic: str) -> int:
    """How many instructions a regular expression of mnemonics matches."""
    return len(re.findall(rf"(?m)^\s+(?:{mnemonic})\b", source))


def inner_loop(source: str, mnemonic: str) -> str:
    """The labelled block with the most of an instruction."""
    return max(re.split(r"(?m)^\.LBB", source), key=lambda block: count(block, mnemonic))


def rounding(fold: Fold, weight: QuantizedTensor, scales: Any) -> Any:
    """Bound of what the correction of symmetric folded codes is rounded by: half a step a chunk."""
    if fold.parts == 1 or fold.zeros:
        return 0.0
    per_group = -(-scales.shape[1] // weight.scales.shape[1])
    repeated = np.repeat(np.abs(weight.scales.astype(np.float64)), per_group, axis=1)
    return 0.5 * scales @ repeated[:, : scales.shape[1]].T


class ArmCase(Case):
    """One layer with its weights; `check` runs a kernel under qemu and compares with float64.

    For kernels that take ``(xq, xs, xsum)`` or float x, like `linear_cases.Case`.
    """

    def check_under_qemu(
        self,
        kernel: LinearKernel,
        target: str,
        rows: tuple[int, ...],
        folder: Path,
        cpu: str = "max",
        layout: str = "",
    ) -> None:
        """Compile once, run for every number of rows of x."""
        profile = find_profile(target, layout=layout)
        program = emulated(scheduled(kernel, self.spec, profile), profile, folder, cpu)
        weights = [packed.numpy() for packed in self._packed]

        def run(operands: list[Any], extra: list[Any], y: Any) -> Any:
            program(*operands, *weights, *extra, y)
            return y

        for m in rows:
            self.compare(run, m)
