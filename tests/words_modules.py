"""Modules of `arm_module.words_model`, compiled once in a session for whoever wants them.

They import nothing until a test asks: this file is a plugin of every run.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def words_onnx(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model's ONNX file."""
    from tests.e2e.arm.arm_module import words_model

    return words_model(tmp_path_factory.mktemp("words"))


@pytest.fixture(scope="session")
def words(words_onnx: Path) -> Callable[[str], Path]:
    """The module for a target, in a folder of its own; nobody may change it."""

    @cache
    def compiled(target: str) -> Path:
        import apq_tvm

        output = words_onnx.parent / target / target.replace("-", "_")
        apq_tvm.compile(words_onnx, output, target=target)
        return output

    return compiled
