"""What was measured for devices: one folder per device.

``layouts.json`` has the MACs per cycle of integer weights in every layout
(``python examples/measure_arm.py layouts DEVICE`` writes it).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent


@cache
def read_layouts(device: str) -> Mapping[str, Any]:
    """What layouts of integer weights come to on a device; empty if nobody measured it.

    Parameters
    ----------
    device : str
        Name of a profile.

    Returns
    -------
    mapping
        ``n``, ``k``: shape of the weights; ``m``: rows of activations; ``macs_per_cycle``: scheme →
        layout → figures of whole calls, one per M.
    """
    path = FOLDER / device / "layouts.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return found
