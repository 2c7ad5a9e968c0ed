"""Operators of a device's own that several nodes become (`apq_tvm.launches`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from apq_tvm.ops.gpu.attention import attention
from apq_tvm.ops.gpu.cache import cache, pack_keys
from apq_tvm.ops.gpu.cached_attention import cached_attention
from apq_tvm.tensorize.cuda.functions import team_call
from apq_tvm.types import DeviceProfile

OPERATORS = {"apq.Attention": partial(attention, call=team_call)}
"""``(shapes of inputs, **attributes of the node)`` → PrimFunc; `NotApplicable` where declined."""

BLOCKS = 2
"""Of attention's threads that a multiprocessor should have, or keys are cut into parts."""


def cached_operators(profile: DeviceProfile) -> Mapping[str, Callable[..., Any]]:
    """Operators of decoders whose caches lie as sessions keep them."""
    blocks = max(1, int(BLOCKS * profile.cores))
    return {
        "apq.Attention": partial(cached_attention, blocks=blocks, call=team_call),
        "apq.Cache": cache,
        "apq.PackKeys": pack_keys,
    }
