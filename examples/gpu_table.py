"""Keeps what a bundle measured on a GPU, for the table in docs/speed-gpu.md.

apq-tvm bench gpu --prepare bundle --target h200
python bundle/run.py                              where there is a GPU: results.json
python examples/gpu_table.py results.json [more results of that machine]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import doc_tables
import measured

KEPT = ("shape", "scheme", "m", "kernel", "us", "product_us", "rival_us", "noise")


def rows_of(result: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """What was right and timed; `share` is of what reads alone would move."""
    rates = result["rates"]
    for row in result["rows"]:
        if row["us"] is None or row["wrong"] or row["failed"]:
            continue
        share = row["bandwidth_share"] * rates[result.get("share_of", "copy_gbs")]
        yield {**{key: row[key] for key in KEPT}, "share": share / rates["read_gbs"]}


def main() -> None:
    for path in map(Path, sys.argv[1:]):
        result = json.loads(path.read_text(encoding="utf-8"))
        if result["small"] or not result["complete"]:
            sys.exit(f"{path}: a whole run is wanted, without --small")
        machine = {
            "processor": result["gpu"],
            "target": result["target"],
            "rival": result["rival"],
            "rates": result["rates"],
        }
        measured.store("gpu", rows_of(result), machine, ("shape", "scheme", "m"))
    doc_tables.render_all()


if __name__ == "__main__":
    main()
