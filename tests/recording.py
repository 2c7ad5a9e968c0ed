"""What each test costs and which branches of the product it takes, for `tests.choosing`.

A plugin of every run that does nothing without ``--record FOLDER``, which needs the package
``coverage``. Fixtures of a file are made by the first test that wants them, and told apart from it:
whoever else stays would have to make them. Processes count as the test that starts them.
"""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from covering import OF_VALUES

CONTEXT = "APQ_RECORDED_TEST"
"""Variable of the environment: the test or fixture that runs, for processes that it starts."""

SETTINGS = """[run]
branch = True
parallel = True
patch = subprocess
context = ${{{context}-}}
data_file = {folder}/coverage
source =
    {sources}
"""


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--record``: also in every worker."""
    parser.addoption("--record", type=Path, help="a folder for what tests cost and execute")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Record in the processes that run tests."""
    config = session.config
    folder: Path | None = config.getoption("--record")
    runs = hasattr(config, "workerinput") or not config.getoption("numprocesses", None)
    if folder is not None and runs:
        config.pluginmanager.register(Recorder(folder.resolve(), config.rootpath), "recorder")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write what was covered."""
    recorder = session.config.pluginmanager.unregister(name="recorder")
    if recorder is not None:
        recorder.finish()


class Recorder:
    """Of one process.

    Parameters
    ----------
    folder : Path
        Gets ``tests-PID.jsonl``, a test a line, and coverage's own files.
    root : Path
        Of the repository.
    """

    def __init__(self, folder: Path, root: Path) -> None:
        import coverage  # of this alone

        folder.mkdir(parents=True, exist_ok=True)
        product = ("apq_tvm", "codegen", "schedules", "tensorize", "tuning_logs")
        sources = "\n    ".join(str(root / name) for name in product)
        settings = folder / f"settings-{os.getpid()}"
        settings.write_text(SETTINGS.format(context=CONTEXT, folder=folder, sources=sources))
        self._rows = folder / f"tests-{os.getpid()}.jsonl"
        self._made: dict[str, float] = {}
        os.environ[CONTEXT] = ""
        self._coverage: Any = coverage.Coverage(config_file=str(settings))
        self._coverage.start()

    def finish(self) -> None:
        self._coverage.stop()
        self._coverage.save()

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any, request: Any) -> Iterator[Any]:
        """What a fixture that others may share costs, without those that it needs itself."""
        if fixturedef.scope == "function":
            return (yield)
        name, before, began = _name(fixturedef, request.param_index), self._shared(), _cpu()
        outer = os.environ[CONTEXT]
        self._call_it(name)
        try:
            return (yield)
        finally:
            self._call_it(outer)
            self._made[name] = _cpu() - began - (self._shared() - before)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[Any]:
        """What a test costs without such fixtures."""
        self._made, began = {}, _cpu()
        self._call_it(item.nodeid)
        result = yield
        own = _cpu() - began - self._shared()
        row = {
            "name": item.nodeid,
            "of_values": item.stash[OF_VALUES],
            "cpu": own,
            "needs": _needs(item),
            "made": self._made,
        }
        with self._rows.open("a") as file:
            file.write(json.dumps(row) + "\n")
        return result

    def _shared(self) -> float:
        return sum(self._made.values())

    def _call_it(self, name: str) -> None:
        """What runs from here on."""
        os.environ[CONTEXT] = name
        self._coverage.switch_context(name)


def _cpu() -> float:
    """Seconds of this process and of those that it waited for."""
    used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def _name(fixture: Any, index: int) -> str:
    return f"{fixture.baseid}::{fixture.argname}[{index}]"


def _needs(item: Any) -> list[str]:
    """Its fixtures that others may share."""
    call = getattr(item, "callspec", None)
    indices = call.indices if call is not None else {}
    found = (
        (definitions[-1], indices.get(name, 0))
        for name, definitions in item._fixtureinfo.name2fixturedefs.items()
    )
    return [_name(fixture, index) for fixture, index in found if fixture.scope != "function"]
