"""How codes are chosen: rounding to nearest with searched scales, and the plan over layers."""

from __future__ import annotations

from apq_tvm.quantizers.plan import quantize
from apq_tvm.quantizers.registry import quantize_tensor

__all__ = ["quantize", "quantize_tensor"]
