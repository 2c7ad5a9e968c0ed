"""A case's candidates on the GPU: each checked as the default is, then all timed in turns."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .driver import CudaError, Gpu, Memory
from .layer import Case, Layer, image_for
from .timing import MOST_TURNS, samples


def searched(
    gpu: Gpu, folder: Path, layer: Layer, case: Mapping[str, Any], budget_s: float, small: bool
) -> dict[str, Any]:
    """Check and time the candidates of a case whose default is right.

    Parameters
    ----------
    gpu : Gpu
    folder : Path
        The bundle.
    layer : Layer
    case : mapping
        Its part of ``bundle.json``.
    budget_s : float
    small : bool
        Only whether everything works.

    Returns
    -------
    dict
        ``default_us``: microseconds of the default's product in each turn; ``candidates``: in the
        bundle's order ``sha256`` of the image that ran, ``error``, ``wrong``, ``failed`` and
        ``us`` in the same turns, empty where it is wrong or failed.

    Raises
    ------
    CudaError
        Nothing works after it.
    """
    with Memory(gpu) as memory:
        default = Case(layer, case, memory)
        default.compute()
        timed: dict[int, Case] = {-1: default}
        rows: list[dict[str, Any]] = []
        for number, candidate in enumerate(case["candidates"]):
            row: dict[str, Any] = {
                "sha256": "",
                "error": None,
                "wrong": False,
                "failed": "",
                "us": [],
            }
            rows.append(row)
            try:
                image = (folder / image_for(candidate["images"], gpu.sm)).read_bytes()
                row["sha256"] = hashlib.sha256(image).hexdigest()
                described = {**case, "product": candidate["product"]}
                other = Case(layer, described, memory, gpu.load(image))
                other.compute()
            except (CudaError, OSError) as error:
                if isinstance(error, CudaError) and error.fatal:
                    raise
                row["failed"] = f"{type(error).__name__}: {error}"
                continue
            if is_right(row, other, case["bound"]):
                timed[number] = other
        products = {number: mine.product(small) for number, mine in timed.items()}
        found = samples(products, budget_s, 1 if small else MOST_TURNS)
        for number, mine in timed.items():
            if number >= 0 and is_right(rows[number], mine, case["bound"]):  # by what was timed
                rows[number]["us"] = found[number]
            mine.close()
        return {"default_us": found[-1], "candidates": rows}


def is_right(row: dict[str, Any], case: Case, bound: float) -> bool:
    """Note how wrong a result is; False if that is too much."""
    error, _ = case.error()
    row["wrong"], row["error"] = not error <= bound, error if math.isfinite(error) else None
    return not row["wrong"]
