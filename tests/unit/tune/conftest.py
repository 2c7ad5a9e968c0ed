"""A tuner whose candidates are built and timed by fakes."""

from __future__ import annotations

import pytest
from fake_device import FakeLinker
from fake_workshop import FakeWorkshop

from apq_tvm.tune import session as sessions
from apq_tvm.tune.api import plan_of
from apq_tvm.tune.budget import Planned, share_out
from apq_tvm.tune.tasks import extract


@pytest.fixture(scope="module")
def planned() -> list[Planned]:
    """One row of a small layer: a space of 24 points, two batches."""
    (plan,) = plan_of(None, "znver4", "W4A8g32", [(256, 128)])
    tasks = [task for task in extract(plan, [1]) if task.op == "linear"]
    return share_out({task: task.space() for task in tasks})


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "Workshop", FakeWorkshop)
    monkeypatch.setattr(sessions, "Linker", lambda tools, folder: FakeLinker(folder))
