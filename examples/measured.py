"""Figures that were measured, as JSON in ``docs/measured/``; `doc_tables` shows them.

Every row has the date it was measured on, and files of times have the machine.
"""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "measured"

Row = Mapping[str, Any]


def read(name: str) -> dict[str, Any]:
    """The document ``docs/measured/NAME.json``: ``rows`` and, where it matters, ``machine``."""
    found: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return found


def store(
    name: str, rows: Iterable[Row], machine: Row | None = None, merge_by: Sequence[str] = ()
) -> None:
    """Keep the rows of a table.

    Parameters
    ----------
    name : str
        Of the file in ``docs/measured/``.
    rows : iterable of mapping
        Without a date; they get today's.
    machine : mapping, optional
        What they were measured on, with ``processor`` and ``target``.
    merge_by : sequence of str
        Fields that name a row: earlier rows of other names stay. By default none stays.

    Raises
    ------
    ValueError
        Rows of another machine would stay beside these.
    """
    path = FOLDER / f"{name}.json"
    fresh = [{"date": date.today().isoformat(), **row} for row in rows]
    if merge_by and path.exists():
        check_machine(name, machine)
        before = read(name)["rows"]
        named = {tuple(row[k] for k in merge_by): row for row in [*before, *fresh]}
        fresh = list(named.values())
    write(path, {**({"machine": machine} if machine else {}), "rows": fresh})


def check_machine(name: str, machine: Row | None) -> None:
    """Refuse to put rows of one machine beside those of another.

    Raises
    ------
    ValueError
        The file's processor or target is another.
    """
    was = read(name).get("machine")
    if was and machine and any(was[key] != machine[key] for key in ("processor", "target")):
        raise ValueError(
            f"docs/measured/{name}.json is of {was['processor']} ({was['target']}), this is "
            f"{machine['processor']} ({machine['target']}): measure the whole table anew"
        )


def write(path: Path, document: Mapping[str, Any]) -> None:
    """Write a document with one row a line."""
    rows = ",\n".join(f"  {json.dumps(row, ensure_ascii=False)}" for row in document["rows"])
    head = "".join(
        f' "{key}": {json.dumps(value, ensure_ascii=False)},\n'
        for key, value in document.items()
        if key != "rows"
    )
    path.write_text(f'{{\n{head} "rows": [\n{rows}\n ]\n}}\n', encoding="utf-8")


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def dates(rows: Sequence[Row]) -> str:
    """When rows were measured: ``"2026-11-21"`` or ``"2026-11-21 to 2026-11-22"``."""
    days = sorted({row["date"] for row in rows})
    return days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"


def machine_name(document: Row) -> str:
    """The machine of a document in a few words."""
    m = document["machine"]
    rival = f"; ONNX Runtime {m['onnxruntime']}" if "onnxruntime" in m else ""
    return f"{m['processor']} ({m['target']}), {m['cores']} cores{rival}"


def machine_line(document: Row) -> str:
    """The machine of a document, its limits, and when its rows were measured."""
    m = document["machine"]
    read_from = ", ".join(f"{gbs} GB/s on {n}" for n, gbs in m["read_gbs"].items())
    macs = ", ".join(f"{gmacs} GMAC/s on {n}" for n, gmacs in m["int8_gmacs"].items())
    return (
        f"{machine_name(document)}. Reads from DRAM {read_from} thread(s); int8 arithmetic "
        f"({m['int8_instruction']}) {macs}. Measured {dates(document['rows'])}."
    )


def torchvision_models() -> Any:
    """torchvision's ``models``, also of a torchvision without compiled operators.

    PyPI's has those of CUDA's torch; installed by ``--no-deps`` beside another torch its fake
    kernels fail to register, and the models need none of them.
    """
    sys.modules.setdefault("torchvision._meta_registrations", types.ModuleType("none"))
    from torchvision import models

    return models
