"""PrimFuncs built for this machine as modules have them, each once in a session, and called."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import sym, tirx
from tvm.target import codegen
from tvm_ffi import structural_equal, structural_hash, structural_map

from apq_tvm.codegen.build.pipeline import build
from apq_tvm.types import DeviceProfile
from tests.conftest import cpu_features

_BUILT: deque[Kernel] = deque(maxlen=64)  # the latest; all would fill the memory


def built(func: Any, target: DeviceProfile | str) -> Kernel:
    """A PrimFunc for a profile (or a kind of target); the same one again if it was built before."""
    key = key_of(func, target)
    for kernel in _BUILT:
        if kernel.key == key and structural_equal(kernel.func, func, map_free_vars=True):
            return kernel
    _BUILT.append(Kernel(func, target))
    return _BUILT[-1]


def key_of(func: Any, target: DeviceProfile | str) -> Hashable:
    """Equal for equal functions for the same target."""
    wanted = str(dict(target.target)) if isinstance(target, DeviceProfile) else target
    return structural_hash(func, map_free_vars=True), wanted


class Kernel:
    """A compiled PrimFunc, to be called with numpy arrays, tensors of TVM and integers.

    Without checks of its arguments in its code, as modules have it: `check_arguments` looks at them
    instead. Arrays that can be written to get what the kernel wrote.
    """

    def __init__(self, func: Any, target: DeviceProfile | str) -> None:
        self.func, self.key = func, key_of(func, target)
        self._target = tvm.target.Target(
            dict(target.target) if isinstance(target, DeviceProfile) else target
        )
        mod = tvm.IRModule({"main": func.with_attr("global_symbol", "main")})
        self._module = build(mod, self._target, checked=False)
        self._function: Any = None

    def __call__(self, *arrays: Any) -> None:
        check_arguments(self.func, arrays)
        # What this CPU lacks otherwise has a mark at the test, `isa`; vectors of 512 bits are in
        # all code for some processors, whatever a test is about.
        if "avx512f" not in cpu_features() and "avx512f" in _features(self._target):
            pytest.skip("this CPU has no avx512f")
        if self._function is None:  # code generation: not for those who only read the assembly
            self._function = self._module["main"]
        tensors = [aligned(a) if isinstance(a, np.ndarray) else a for a in arrays]
        self._function(*tensors)
        for array, tensor in zip(arrays, tensors, strict=True):
            if isinstance(array, np.ndarray) and array.flags.writeable:
                array[...] = tensor.numpy()

    @property
    def assembly(self) -> str:
        """What LLVM makes of it."""
        return str(self._module.inspect_source("asm"))


def _features(target: Any) -> set[str]:
    """Of an x86 target, by LLVM name."""
    return {str(name) for name in codegen.llvm_get_cpu_features(target)}


def aligned(array: Any) -> Any:
    """A tvm tensor that starts on a cache line, as packed weights do."""
    room = np.empty(array.nbytes + 64, np.uint8)
    start = -room.ctypes.data % 64
    view = room[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    view[...] = array
    return tvm.runtime.tensor(view)


def check_arguments(func: Any, arrays: Sequence[Any]) -> None:
    """Assert types and shapes of a PrimFunc's arguments; a dynamic dimension is the same in all."""
    assert len(arrays) == len(func.params), f"{len(arrays)} arguments, not {len(func.params)}"
    pairs = [pair for pair in zip(arrays, func.params, strict=True) if not isinstance(pair[0], int)]
    sizes: dict[Any, int] = {}
    for array, buffer in pairs:
        shape = f"{buffer.name} is {array.dtype}{list(array.shape)}, not {buffer}{buffer.shape}"
        assert str(array.dtype) == str(buffer.dtype), shape
        assert len(array.shape) == len(buffer.shape), shape
        for size, dim in zip(array.shape, buffer.shape, strict=True):
            if isinstance(dim, tirx.Var):
                assert sizes.setdefault(dim, int(size)) == size, shape
    simplify = sym.Analyzer().simplify

    def known(var: Any) -> Any:
        return tirx.const(sizes[var], str(var.ty.dtype)) if var in sizes else var

    for array, buffer in pairs:
        wanted = [simplify(structural_map(d, (tirx.Var, known))) for d in buffer.shape]
        shape = f"{buffer.name} is {array.dtype}{list(array.shape)}, not {wanted}"
        assert [int(size) for size in array.shape] == [int(dim) for dim in wanted], shape
