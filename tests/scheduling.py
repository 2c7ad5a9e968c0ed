"""How pytest-xdist shares out tests: files whole, and as one those that share modules."""

from __future__ import annotations

from typing import Any

import pytest

TOGETHER = ("test_arm_modules.py", "test_arm_python.py", "test_arm_static_model.py")
"""They share the session's `words`; two workers would each compile them."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """As ``--dist loadfile``, but for `TOGETHER`."""
    from xdist.scheduler import LoadFileScheduling

    class Files(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            return "together" if file.endswith(TOGETHER) else file

    return Files(config, log) if config.getvalue("dist") == "loadfile" else None
