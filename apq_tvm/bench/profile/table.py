"""A profile as rows of text, for the terminal and for HTML."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

COLUMNS = ("calls", "us", "share", "MB", "GB/s", "MMAC", "GMAC/s", "limit us", "of limit", "bound")
NUMBERS = COLUMNS[:-1]

BETWEEN = "between kernels"
REST = "rest: minima of different runs"
WHOLE = "whole run"


def heading(document: Mapping[str, Any]) -> str:
    """One line on what was run and what it was held against.

    Parameters
    ----------
    document : mapping
        Of `apq_tvm.bench.profile.profile.bench_profile`.
    """
    sizes = ", ".join(f"{name}={size}" for name, size in document["dims"].items())
    width = f"at {document['bits']} bits; " if document["bits"] else ""
    heat = "caches emptied before every run" if document["cold"] else "warm: run after run"
    return (
        f"{sizes or 'fixed shapes'}; {document['threads']} threads; {width}{heat}; minima "
        f"of {document['rounds']} runs, noise {document['noise']:.0%}"
    )


def machine_line(document: Mapping[str, Any]) -> str:
    """What this machine can do, in one sentence."""
    limits = document["limits"]
    if limits is None:
        return f"no limits: {document['why_no_limits']}"
    levels = ", ".join(
        f"{level['name']} {level['gbs']:.0f} GB/s"
        + (f" ({level['bytes'] / 1e6:.0f} MB)" if level["bytes"] else "")
        for level in document["levels"]
    )
    return (
        f"this machine on {limits['threads']} threads: {levels}; int8 "
        f"{limits['int8_gmacs']:.0f} GMAC/s ({limits['int8_instruction']}), float "
        f"{limits['fp32_gmacs']:.0f}. A tensor comes from the nearest cache that holds what was "
        "touched since it was used last"
    )


def table_rows(document: Mapping[str, Any], by: str) -> list[tuple[str, ...]]:
    """Rows that sum to the run: those of `by`, what is between kernels, and what is left.

    Parameters
    ----------
    document : mapping
    by : str
        ``"kernel"`` or ``"layer"``.
    """
    run = document["run_us"]
    rows = [_row(row) for row in document[f"{by}s"]]
    for name, us in ((BETWEEN, document["between_us"]), (REST, document["rest_us"]), (WHOLE, run)):
        rows.append((name, "", f"{us:.1f}", f"{us / run:.1%}", *[""] * (len(COLUMNS) - 3)))
    return rows


def _row(row: Mapping[str, Any]) -> tuple[str, ...]:
    known = row["limit_us"] is not None
    return (
        row["name"],
        str(row["calls"]),
        f"{row['us']:.1f}",
        f"{row['share']:.1%}",
        f"{row['bytes'] / 1e6:.2f}",
        f"{row['gbs']:.1f}",
        f"{row['macs'] / 1e6:.2f}" if row["macs"] else "",
        f"{row['gmacs']:.1f}" if row["macs"] else "",
        f"{row['limit_us']:.1f}" if known else "",
        f"{row['of_limit']:.0%}" if known else "",
        row["bound"],
    )


def slow_lines(slow: Iterable[Mapping[str, Any]]) -> list[str]:
    """What is slower than twice its limit, by name; a sentence where nothing is."""
    lines = [
        f"  {row['name']}: "
        + (f"{row['times']:.1f} times its limit" if row["times"] else "it has no limit")
        + f", {row['lost']:.1%} of the run"
        for row in slow
    ]
    title = "slower than twice their limit, and a hundredth of the run or more beyond it:"
    none = "nothing that takes a hundredth of the run is slower than twice its limit"
    return [title, *lines] if lines else [none]


def shortened(name: str, most: int = 60) -> str:
    """A name that fits beside a plot: its end tells layers and fused functions apart."""
    return name if len(name) <= most else f"{name[: most // 2 - 1]}…{name[-most // 2 :]}"


def longest(rows: Sequence[Mapping[str, Any]], most: int) -> Sequence[Mapping[str, Any]]:
    """The `most` rows that take longest."""
    return sorted(rows, key=lambda row: -row["us"])[:most]
