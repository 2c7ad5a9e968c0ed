"""What a quantized weight is: scheme strings and the families of formats, in numpy."""

from __future__ import annotations

from apq_tvm.formats.families import (
    FAMILIES,
    bits_per_weight,
    check_tensor,
    dequantize,
    details,
    embedding_scheme,
    family_of,
    nbytes,
    nbytes_at,
)
from apq_tvm.formats.family import Family
from apq_tvm.formats.integer import FORMATS, IntegerFormat, format_of
from apq_tvm.formats.scheme import check_scheme, parse_at, parse_scheme, scheme_names
from apq_tvm.formats.spelling import GROUP_SIZES

__all__ = [
    "FAMILIES",
    "FORMATS",
    "GROUP_SIZES",
    "Family",
    "IntegerFormat",
    "bits_per_weight",
    "check_scheme",
    "check_tensor",
    "dequantize",
    "details",
    "embedding_scheme",
    "family_of",
    "format_of",
    "nbytes",
    "nbytes_at",
    "parse_at",
    "parse_scheme",
    "scheme_names",
]
