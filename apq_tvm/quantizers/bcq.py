"""Binary codes: searched uniform rounding, converted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from apq_tvm.formats.bcq import from_uniform
from apq_tvm.quantizers import rtn
from apq_tvm.types import QuantizedTensor, Scheme

if TYPE_CHECKING:
    from apq_tvm.quantizers.registry import QuantContext

F32 = NDArray[np.float32]


def quantize_tensor(w: F32, scheme: Scheme, name: str, context: QuantContext) -> QuantizedTensor:
    """Quantize one matrix."""
    uniform = Scheme(scheme.bits, True, group_size=scheme.group_size)
    rounded = rtn.quantize_tensor(w, uniform, name, context.search)
    return from_uniform(rounded, scheme.act_bits)
