"""What was measured for devices: one folder per device.

``layouts.json`` has the MACs per cycle of integer weights in every layout
(``python examples/measure_arm.py layouts DEVICE`` writes it; `apq_tvm.schedules.arm.layouts` reads
it), ``thresholds.json`` for how many rows of activations kernels are the fastest
(`apq_tvm.schedules.linear.thresholds`), ``preferences.json`` what its kernels decide by default
(`apq_tvm.schedules.linear.preferences`), ``records.json`` what the tuner found for single shapes
(`apq_tvm.tuning_logs.records`).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from apq_tvm.errors import BadLog

T = TypeVar("T")

FOLDER = Path(__file__).parent


def log_path(device: str, name: str) -> Path:
    """Where the log `name` of a device lies, if there is one."""
    return FOLDER / device / f"{name}.json"


def read_log(device: str, name: str, parse: Callable[[Any], T]) -> T | None:
    """A log of one device; None if nobody measured it.

    Parameters
    ----------
    device : str
        Name of a profile.
    name : str
        Of the file, without ``.json``.
    parse : callable
        Makes something of what the file holds, once; raises ValueError that names the wrong key.

    Raises
    ------
    BadLog
        The file is no JSON, or `parse` refuses it; names the file.
    """
    path = log_path(device, name)
    return _read(path, parse) if path.is_file() else None


@cache
def _read(path: Path, parse: Callable[[Any], T]) -> T:
    try:
        return parse(json.loads(path.read_text()))
    except ValueError as error:
        raise BadLog(f"{path}: {error}; mend it or take the file away") from error
