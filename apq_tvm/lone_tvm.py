"""TVM without torch: it imports torch where that is installed, and needs nothing of it here.

That is 200 MB and two thirds of the time that ``import tvm`` takes (0.27.0 with ``tvm_ffi`` 0.1.14,
whose remark names a conflict of libraries on Windows). Learning imports torch by itself, later; and
who imported torch before TVM has it. What TVM needs of the process, `apq_tvm.heap` sees to.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

from apq_tvm import heap


class _LoneTvm(MetaPathFinder):
    """Finds what `PathFinder` finds; torch cannot be imported while TVM's packages are."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name == "tvm":
            heap.keep()
        if name not in ("tvm", "tvm_ffi") or "torch" in sys.modules:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def load_alone(module: ModuleType) -> None:
            sys.modules["torch"] = None  # type: ignore[assignment]  # imports of it fail
            try:
                load(module)
            finally:
                del sys.modules["torch"]

        spec.loader.exec_module = load_alone  # type: ignore[method-assign]
        return spec


def install() -> None:
    """Do so from now on."""
    sys.meta_path.insert(0, _LoneTvm())
