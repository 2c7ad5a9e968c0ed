"""What a compiled module raises; its ``__init__.py`` draws the tree."""

from __future__ import annotations

from pathlib import Path


class ModuleError(Exception):
    """Base of every error of a compiled module."""


class LoadError(ModuleError, ImportError):
    """The library cannot be loaded: what ``import`` of the package raises."""

    def __init__(self, text: str) -> None:
        super().__init__(text, name=__package__, path=str(Path(__file__).with_name("__init__.py")))


class WrongMachine(LoadError):
    """The library was compiled for another system or for CPU features this one lacks."""


class BadWeights(LoadError):
    """The weights file is missing, truncated, altered or belongs to another build."""


class InputError(ModuleError, ValueError):
    """An input is missing, unknown, or of the wrong type, rank, shape or value."""


class RunError(ModuleError, RuntimeError):
    """The run failed: not enough memory, or a kernel refused its arguments."""
