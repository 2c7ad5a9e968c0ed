"""What each entry of a tensor's float arrays adds to its weights.

The families name the entries (`apq_tvm.formats.places`); what they are multiplied by comes from the
family's own ``dequantize``, with that array 1 and the others 0.
"""

from __future__ import annotations

import numpy as np

from apq_tvm.errors import BadScheme
from apq_tvm.formats.families import dequantize, family_of
from apq_tvm.formats.places import Place, array_of, filled
from apq_tvm.types import F32, QuantizedTensor


def places_of(tensor: QuantizedTensor) -> list[Place]:
    """Scales, offsets or centroids of a tensor, as its family names them.

    Codebooks of ``cb`` belong to the whole model and are int8: they are not among them.

    Raises
    ------
    BadScheme
        If the family names entries that its arrays do not have.
    """
    places = family_of(tensor.scheme).places(tensor)
    for place in places:
        shape = array_of(tensor, place.name).shape
        ends = (int(place.rows.max()), int(place.columns.max()), place.plane)
        if any(end is not None and end >= size for end, size in zip(ends, shape, strict=False)):
            raise BadScheme(
                f"scheme {tensor.scheme}: the places of its family do not fit {place.name!r}, "
                f"which is {list(shape)}"
            )
    return places


def factors(tensor: QuantizedTensor, places: list[Place]) -> tuple[F32, list[F32]]:
    """What a tensor decodes to with all placed arrays 0, and what 1 in each place adds.

    Returns
    -------
    float32 [N, K], list of float32 [N, K]
    """
    blank = {p.name: np.zeros(array_of(tensor, p.name).shape, np.float32) for p in places}
    fixed, found = dequantize(filled(tensor, blank)), []
    for place in places:
        ones = {key: value.copy() for key, value in blank.items()}
        at = (...,) if place.plane is None else (..., place.plane)
        ones[place.name][at] = 1
        found.append(dequantize(filled(tensor, ones)) - fixed)
    return fixed, found
