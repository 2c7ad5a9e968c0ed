"""The tuner: searches decisions of kernels on a device, and records what is faster.

`tune` is `apq_tvm.tune.api.tune`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from apq_tvm.tune.api import tune as tune

__all__ = ["tune"]


def __getattr__(name: str) -> Any:
    """Load the tuner when it is asked for."""
    if name == "tune":
        from apq_tvm.tune.api import tune

        return tune
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
