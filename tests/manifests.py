"""Manifests that something damaged: one entry is gone, or is something else."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np

JUNK: tuple[Any, ...] = (
    *(None, True, 0, -1, 1 << 70, 10**400, 0.5, float("nan"), "", "x", "\ud800", "\x1b[2J"),
    *("f4,f4", ">f4", "float64", "O", [], {}, [[]], [None], ["x"], {"x": 1}, [{"name": "x"}]),
)


def damaged(manifest: Any, rng: np.random.Generator) -> Any:
    """A copy of `manifest` of which one entry, anywhere, was dropped, repeated or replaced."""
    changed = copy.deepcopy(manifest)
    places = list(_places(changed))
    holder, key = places[int(rng.integers(len(places)))]
    kind = rng.random()
    if kind < 0.2:
        del holder[key]
    elif kind < 0.3 and isinstance(holder, list):
        holder.append(holder[key])
    else:
        holder[key] = JUNK[int(rng.integers(len(JUNK)))]
    return changed


def _places(value: Any) -> Any:
    keys = value if isinstance(value, dict) else range(len(value))
    for key in keys:
        yield value, key
        if isinstance(value[key], dict | list):
            yield from _places(value[key])
