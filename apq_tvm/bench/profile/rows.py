"""Sums of calls by kernel and by layer, as tables and JSON have them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from apq_tvm.bench.caches import Level
from apq_tvm.bench.profile.costs import Cost, limit
from apq_tvm.bench.roofline import Limits

SLOW = 2.0
"""Times its limit: what takes longer is named."""

NOTICED = 0.01
"""Share of a run that is lost beyond the limit, for a kernel to be named by."""


def call_rows(
    costs: Sequence[Cost], us: Sequence[float], limits: Limits | None, levels: Sequence[Level]
) -> list[dict[str, Any]]:
    """One row a call: ``kernel, layer, us, bytes`` (by level), ``macs, tasks, limit_us, bound``."""
    rows = []
    for cost, took in zip(costs, us, strict=True):
        least, bound = limit(cost, limits, levels) if limits else (None, "")
        rows.append(
            {
                "kernel": cost.kernel,
                "layer": cost.layer,
                "us": float(took),
                "bytes": {
                    level.name: nbytes
                    for level, nbytes in zip(levels, cost.nbytes, strict=True)
                    if nbytes
                },
                "macs": cost.products,
                "tasks": cost.tasks,
                "limit_us": least,
                "bound": bound,
            }
        )
    return rows


def summed(rows: Sequence[dict[str, Any]], key: str, run_us: float) -> list[dict[str, Any]]:
    """Calls of one kernel or layer together, the longest first.

    Parameters
    ----------
    rows : sequence of dict
        Of `call_rows`.
    key : str
        ``"kernel"`` or ``"layer"``; calls whose key is empty are one row, ``"(no layer)"``.
    run_us : float
        What shares are of.

    Returns
    -------
    list of dict
        ``name, calls, us, share, bytes, gbs, macs, gmacs, limit_us, of_limit, bound``; of several
        bounds, the one of the most limited time.
    """
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[row[key] or f"(no {key})"].append(row)
    made = [_sum(name, group, run_us) for name, group in groups.items()]
    return sorted(made, key=lambda row: -row["us"])


def _sum(name: str, group: Sequence[dict[str, Any]], run_us: float) -> dict[str, Any]:
    us = sum(row["us"] for row in group)
    nbytes, macs = sum(sum(row["bytes"].values()) for row in group), sum(r["macs"] for r in group)
    bounds: dict[str, float] = defaultdict(float)
    for row in group:
        bounds[row["bound"]] += row["limit_us"] or 0.0
    least = None if group[0]["limit_us"] is None else sum(bounds.values())
    took = max(us, 1e-6)
    return {
        "name": name,
        "calls": len(group),
        "us": us,
        "share": us / run_us,
        "bytes": nbytes,
        "gbs": nbytes / took / 1e3,
        "macs": macs,
        "gmacs": macs / took / 1e3,
        "limit_us": least,
        "of_limit": None if least is None else least / took,
        "bound": max(bounds, key=lambda bound: bounds[bound]),
    }


def slow(kernels: Sequence[dict[str, Any]], run_us: float) -> list[dict[str, Any]]:
    """Kernels slower than `SLOW` times their limit, by the time that they lose.

    Returns
    -------
    list of dict
        ``name, times`` (of the limit) and ``lost``, a share of the run: at least `NOTICED`.
    """
    found = []
    for row in kernels:
        least = row["limit_us"]
        if least is None or row["us"] <= SLOW * least:
            continue
        lost = (row["us"] - least) / run_us
        if lost >= NOTICED:
            times = row["us"] / least if least else None
            found.append({"name": row["name"], "times": times, "lost": lost})
    return sorted(found, key=lambda row: -row["lost"])
