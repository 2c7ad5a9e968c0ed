"""How long work tells its user where it stands, without knowing how that is shown.

Stages get a `Progress` and call it; the command line shows bars (`apq_tvm.cli.console`), the Python
API is `Silent` unless given another.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol


class Progress(Protocol):
    """One bar at a time: a stage is entered, advanced, left. Stages do not nest."""

    def stage(self, name: str, total: int | None = None) -> AbstractContextManager[None]:
        """Enter stage `name` of `total` steps; None if their number is not known beforehand."""

    def advance(self, text: str = "") -> None:
        """Count one step of the current stage; `text` names what was just begun, e.g. a layer."""


class Silent:
    """Shows nothing."""

    def stage(self, name: str, total: int | None = None) -> AbstractContextManager[None]:
        """Do nothing while the stage runs."""
        return nullcontext()

    def advance(self, text: str = "") -> None:
        """Do nothing."""
