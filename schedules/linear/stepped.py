"""Families whose codes lie like integers, with other scales (`apq_tvm.codegen.layouts.stepped`)."""

from __future__ import annotations

from apq_tvm.formats import kquant, minimum

KINDS = (
    *((minimum.NAME, f"Wm{bits}", bits) for bits in minimum.BITS),
    *((kquant.NAME, f"Wk{bits}", bits) for bits in kquant.KINDS),
)
"""Family, name of the weights in a kernel's, and bits."""
