"""Rules of ``--tensor-type`` that are for one layer."""

from __future__ import annotations

import re


def exactly(name: str) -> str:
    """The pattern that a layer of this name fits and no other."""
    return f"^{re.escape(name)}$"
