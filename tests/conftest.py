"""Fixtures and markers that every test folder shares."""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import hypothesis
import pytest

import apq_tvm  # noqa: F401  # before TVM, that comes without torch then

ROOT = Path(__file__).resolve().parents[1]
BEGAN = time.monotonic()
HELPERS = (
    "examples",
    "tests",
    *(f"tests/{name}" for name in ("cases", "tir", "tir/graph", "isa", "unit")),
)
sys.path[:0] = [str(ROOT / name) for name in HELPERS]

import demo_model  # noqa: E402

pytest_plugins = (
    "covering",
    "compiled_once",
    "recording",
    "scheduling",
    "simulated_gpu",
    "words_modules",
)


def pytest_configure(config: pytest.Config) -> None:
    """Examples of properties: the same in every run, which judges a change; `make fuzz` wants new.

    Tests never time anything, and a machine that is shared is slow at times.
    """
    hypothesis.settings.register_profile(
        "untimed",
        deadline=None,
        derandomize=not config.getoption("--new-examples"),
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
    hypothesis.settings.load_profile("untimed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """ONNX's node cases first: at the end they would keep one worker while the other has none."""
    items.sort(key=lambda item: item.path.parent.name != "node_cases")


def pytest_collection(session: pytest.Session) -> None:
    """Nothing of what is collected becomes garbage: the collector would walk it ever anew."""
    gc.disable()


def pytest_collection_finish(session: pytest.Session) -> None:
    """What was collected stays to the end, and no test's garbage is looked for there."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--new-examples`` for properties, ``--minutes`` for machines that are slow at times."""
    parser.addoption("--new-examples", action="store_true", help="of properties")
    parser.addoption("--minutes", type=float, help="what would begin later than that is skipped")


@cache
def cpu_features() -> frozenset[str]:
    """Instruction-set extensions of this machine by LLVM name, e.g. ``avx512vnni``."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        label, _, flags = line.partition(":")
        if label.strip() in {"flags", "Features"}:
            # Linux writes avx512_vnni, LLVM avx512vnni
            return frozenset(flag.replace("_", "") for flag in flags.split())
    return frozenset()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip, and say so, what has no time left and what needs an instruction set that is missing."""
    minutes = item.config.getoption("--minutes")
    if minutes is not None and time.monotonic() - BEGAN > 60 * minutes:
        pytest.skip(f"no time left: --minutes {minutes:g} have passed")
    for marker in item.iter_markers("isa"):
        for name in marker.args:
            if name.replace("_", "") not in cpu_features():
                pytest.skip(f"this CPU has no {name}")


@pytest.fixture(scope="session")
def demo_onnx() -> Path:
    """The demo model's ONNX file; its absence is a failure in CI and a skip elsewhere."""
    try:
        return demo_model.find()
    except FileNotFoundError as error:
        if os.environ.get("CI"):
            pytest.fail(str(error))
        pytest.skip(str(error))


@pytest.fixture
def clean_imports() -> Iterator[None]:
    """Forget modules that a test imports from folders of its own; torch loads only once."""
    before, path = set(sys.modules), list(sys.path)
    stays = (sys.prefix, sys.base_prefix, str(ROOT))
    yield
    sys.path[:] = path
    for name in set(sys.modules) - before:
        if not str(getattr(sys.modules[name], "__file__", "")).startswith(stays):
            del sys.modules[name]
