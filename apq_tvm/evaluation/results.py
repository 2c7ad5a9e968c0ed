"""Finished results in a JSON file, so that long work goes on where it was interrupted."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from apq_tvm.errors import BadInput, OutputFailed
from apq_tvm.files import replacing


def run_key(model: str, inputs: Path, **options: Any) -> str:
    """Digest of what results depend on besides the scheme.

    Parameters
    ----------
    model : str
        SHA-256 of the ONNX file.
    inputs : Path
        Its content counts, not its name.
    **options
        Anything JSON can hold; a Path stands for the file's content.
    """
    plain = {k: file_digest(v) if isinstance(v, Path) else v for k, v in options.items()}
    text = json.dumps([model, file_digest(inputs), plain], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def file_digest(path: Path) -> str:
    """SHA-256 of a file.

    Raises
    ------
    BadInput
        It cannot be read.
    """
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror}") from error


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all.

    Raises
    ------
    OutputFailed
        It cannot be written.
    """
    try:
        with replacing(path) as part:
            part.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OutputFailed(f"{path} cannot be written: {error.strerror}") from error


class Results:
    """Results by name, of one run key; those of other keys in the same file are kept.

    Parameters
    ----------
    path : Path
        Written after every result; need not exist.
    key : str
        `run_key`.

    Raises
    ------
    BadInput
        The file is damaged.
    """

    def __init__(self, path: Path, key: str) -> None:
        self.path, self._key = path, key
        self._all: dict[str, dict[str, Any]] = {}
        if path.exists():
            try:
                self._all = json.loads(path.read_text(encoding="utf-8"))
                self._mine = dict(self._all.get(key, {}))
            except (OSError, ValueError, AttributeError, TypeError) as error:
                raise BadInput(f"{path} is damaged: {error}; delete it") from error
        else:
            self._mine = {}

    def get(self, name: str) -> Mapping[str, Any] | None:
        """A finished result."""
        return self._mine.get(name)

    def put(self, name: str, result: Mapping[str, Any]) -> None:
        """Add a result and write the file."""
        self._mine[name] = result
        self._all[self._key] = self._mine
        write_text(self.path, json.dumps(self._all, allow_nan=False))
