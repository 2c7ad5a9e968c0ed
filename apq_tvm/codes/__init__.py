"""Codes that people already have: matrices of GGUF, AutoGPTQ and AWQ files, kept bit for bit.

`matrices` reads what a file has, `keep_codes` finds which of them are the weights of a model.
"""

from __future__ import annotations

from apq_tvm.codes.match import keep_codes

__all__ = ["keep_codes"]
