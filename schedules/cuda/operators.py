"""Operators of a device's own that several nodes become (`apq_tvm.launches`)."""

from __future__ import annotations

from functools import partial

from apq_tvm.ops.gpu.attention import attention
from apq_tvm.tensorize.cuda.functions import team_call

OPERATORS = {"apq.Attention": partial(attention, call=team_call)}
"""``(shapes of inputs, **attributes of the node)`` → PrimFunc; `NotApplicable` where declined."""
