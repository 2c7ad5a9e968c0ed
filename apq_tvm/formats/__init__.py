"""What a quantized weight is: scheme strings and integer formats, in numpy."""

from __future__ import annotations

from apq_tvm.formats.integer import (
    FORMATS,
    IntegerFormat,
    bits_per_weight,
    dequantize,
    format_of,
)
from apq_tvm.formats.scheme import GROUP_SIZES, check_scheme, parse_scheme, scheme_names

__all__ = [
    "FORMATS",
    "GROUP_SIZES",
    "IntegerFormat",
    "bits_per_weight",
    "check_scheme",
    "dequantize",
    "format_of",
    "parse_scheme",
    "scheme_names",
]
