"""The README and docs/ as tests read them: fenced blocks, commands, tables."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
DOCUMENTS = (README, *sorted((ROOT / "docs").glob("*.md")))

PENDING: dict[str, str] = {}
"""Commands, by a part of them, and files that do not work or exist yet, and why. Once one does it
must leave this."""


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, and the number of its first line."""

    language: str
    text: str
    line: int


def name_of(document: Path) -> str:
    """``README.md`` or ``docs/guide.md``."""
    return str(document.relative_to(ROOT))


def blocks(document: Path) -> list[Block]:
    """Fenced blocks in order."""
    text = document.read_text(encoding="utf-8")
    return [
        Block(m[1], m[2], text[: m.start(2)].count("\n") + 1)
        for m in re.finditer(r"^```(.*)\n((?:.*\n)*?)^```$", text, re.MULTILINE)
    ]


def commands(block: Block) -> list[str]:
    """Command lines of a block, continued lines joined, without comments."""
    joined = block.text.replace("\\\n", " ")
    lines = (re.sub(r"(^|\s+)#\s.*$", "", line).strip() for line in joined.splitlines())
    return [line for line in lines if line]


def all_commands(document: Path) -> list[str]:
    """Command lines of a document."""
    return [c for b in blocks(document) if b.language == "sh" for c in commands(b)]


def pending(text: str) -> str:
    """Why a command or a file is not there yet; empty if it should be."""
    return next((why for part, why in PENDING.items() if part in text), "")


def table(text: str, header: str) -> list[list[str]]:
    """Rows of the one Markdown table whose first line begins with `header`, as cells."""
    lines = [line.strip() for line in text.splitlines()]
    (at,) = [i for i, line in enumerate(lines) if line.startswith(header)]
    rows = []
    for line in lines[at + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows
