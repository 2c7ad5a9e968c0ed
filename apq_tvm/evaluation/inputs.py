"""Inputs for models; they are read in `apq_tvm.quantizers.inputs.read`."""

from __future__ import annotations

from apq_tvm.quantizers.inputs.read import (
    CALL_NAME,
    MASK_NAME,
    TOKENS_NAME,
    Batch,
    check_batch,
    read_inputs,
    split,
)

__all__ = ["CALL_NAME", "MASK_NAME", "TOKENS_NAME", "Batch", "check_batch", "read_inputs", "split"]
