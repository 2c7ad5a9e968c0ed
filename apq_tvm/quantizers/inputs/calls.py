"""Inputs for calibration, checked and cut into calls of the model."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from apq_tvm.errors import BadInput
from apq_tvm.quantizers.inputs.read import Batch, read_inputs, split
from apq_tvm.types import AnyPath, Array, ImportedModel

NSAMPLES = 128
"""Batch entries used unless told otherwise, as in GPTQ and ABQ-LLM."""


def read_calls(
    model: ImportedModel, inputs: AnyPath, nsamples: int | None, rows: int
) -> tuple[list[Batch], int]:
    """Read calibration inputs, checked, as calls of at most `rows` batch entries.

    Returns
    -------
    list of dict
    int
        Batch entries in them.

    Raises
    ------
    BadInput
        A name, dtype or shape does not fit; a value is not finite; there are fewer entries than
        `nsamples`.
    """
    calls: list[Batch] = []
    count, wanted = 0, NSAMPLES if nsamples is None else nsamples
    for batch in read_inputs(inputs, model.inputs):
        check_finite(batch, inputs)
        for call in split(batch, model.inputs, rows):
            have = leading(call)
            if count + have > wanted:
                kept = wanted - count
                call = next(iter(split(call, model.inputs, kept))) if kept else {}
                have = leading(call) if call else 0
            if have and count < wanted:
                calls.append(call)
                count += have
    if nsamples is not None and count < nsamples:
        raise BadInput(
            f"{inputs} holds {count} samples, --nsamples asks for {nsamples}; give more, or "
            "ask for fewer"
        )
    if not count:
        raise BadInput(f"{inputs} holds no samples")
    return calls, count


def leading(call: Mapping[str, Array]) -> int:
    """Batch entries of one call; 1 where it has no batch."""
    return max((len(a) for a in call.values() if a.ndim), default=1)


def check_finite(batch: Mapping[str, Array], where: AnyPath) -> None:
    """Refuse NaN and infinity.

    Raises
    ------
    BadInput
        Naming the input and the first bad place.
    """
    for name, array in batch.items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            first = int((~np.isfinite(array)).argmax())
            at = [int(i) for i in np.unravel_index(first, array.shape)]
            raise BadInput(f"{where}: input {name!r} is {array.flat[first]} at {at}")
