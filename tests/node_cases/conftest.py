"""Every node case, collected once for whoever wants them: processors and GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.node_cases.cases import Case
from tests.node_cases.parts import stored


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where they are stored, and what is compiled of C."""
    return tmp_path_factory.mktemp("cases")


@pytest.fixture(scope="session")
def cases(folder: Path) -> list[Case]:
    """In the order of `check_part`."""
    return stored(folder)
