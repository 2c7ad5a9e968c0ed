"""A cache's new tokens, side by side: copies, on several threads where there are many."""

from __future__ import annotations

from typing import Any

from apq_tvm.schedules.decide import Decide
from apq_tvm.schedules.graph.rewrites.lowering import finish, lower_blocks
from apq_tvm.types import DeviceProfile


def schedule_cache(func: Any, profile: DeviceProfile, decide: Decide) -> Any:
    """Schedule `apq_tvm.ops.graph.caches.grown.cache`, which has its loops already."""
    return finish(lower_blocks(func))
