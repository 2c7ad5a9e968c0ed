"""Packages that only some commands need: each comes with an extra of apq-tvm."""

from __future__ import annotations

from importlib import import_module

from apq_tvm.errors import MissingPackage

EXTRAS = {
    "onnxruntime": ("bench", "comparing with ONNX Runtime"),
    "torch": ("calibrate", "running a model in torch"),
    "matplotlib": ("report", "drawing plots"),
    "xgboost": ("tune", "searching spaces that are too large to try whole"),
}
"""Package → the extra that installs it, and what it is for."""


def require(*packages: str) -> None:
    """Say before any work that a package is not there.

    They are imported, not only looked for: one that is broken would otherwise be noticed late.

    Parameters
    ----------
    *packages : str
        Of `EXTRAS`.

    Raises
    ------
    MissingPackage
        One is not installed, or does not load; with the line that installs it.
    """
    for package in packages:
        extra, what = EXTRAS[package]
        try:
            import_module(package)
        except ImportError as error:
            raise MissingPackage(
                f"{what} needs {package}: pip install 'apq-tvm[{extra}]' ({error})"
            ) from error
