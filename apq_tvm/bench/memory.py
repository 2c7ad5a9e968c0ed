"""Memory of one run of a compiled module, in a fresh process that has imported it."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from apq_tvm.errors import BadInput
from apq_tvm.types import AnyPath, Array

# Runs with numpy alone. Writing 5 to clear_refs sets the peak back to what is resident now.
PROBE = """
import importlib.util, json, sys
import numpy as np

def status(key):
    with open("/proc/self/status") as lines:
        for line in lines:
            if line.startswith(key):
                return int(line.split()[1]) * 1024

def weights_resident():
    with open("/proc/self/smaps") as lines:
        mine, total = False, 0
        for line in lines:
            if "-" in line.split()[0]:  # the range of another mapping
                mine = line.rstrip().endswith(".safetensors")
            elif mine and line.startswith("Rss:"):
                total += int(line.split()[1]) * 1024
    return total

folder, npz, threads, names = sys.argv[1:]
spec = importlib.util.spec_from_file_location(
    "probed", folder + "/__init__.py", submodule_search_locations=[folder]
)
module = importlib.util.module_from_spec(spec)
sys.modules["probed"] = module
spec.loader.exec_module(module)
module.set_num_threads(int(threads))
with np.load(npz) as file:
    arrays = {name: file[f"arr_{i}"] for i, name in enumerate(json.loads(names))}
with open("/proc/self/clear_refs", "w") as control:
    control.write("5")
before, mapped = status("VmRSS:"), weights_resident()
outputs = module.run(arrays)
peak, mapped = status("VmHWM:") - before, weights_resident() - mapped
outputs_bytes = sum(array.nbytes for array in outputs.values())
found = {"peak_rss_bytes": peak, "weights_read": mapped, "output_bytes": outputs_bytes}
print(json.dumps({**found, **module.memory()}))
"""


def measure_memory(module: AnyPath, call: Mapping[str, Array], threads: int) -> dict[str, Any]:
    """Measure the peak resident memory that one run adds to a process that imported the module.

    Parameters
    ----------
    module : str or path
        Folder of the compiled module.
    call : mapping of str to ndarray
        Inputs.
    threads : int

    Returns
    -------
    dict
        ``peak_rss_bytes`` of the first run over import, weights that are paged in included;
        ``weight_bytes`` of the weights file and ``weights_read``: those of its pages that the run
        brought in; ``arena`` and ``live``: working memory held and most alive at once;
        ``output_bytes`` returned; ``overhead``: what is neither weights nor outputs, over ``live``.

    Raises
    ------
    BadInput
        The module refuses the inputs.
    """
    module = Path(module)
    with tempfile.TemporaryDirectory(prefix="apq-memory-") as folder:
        npz = Path(folder) / "inputs.npz"
        np.savez(npz, *call.values())
        names = json.dumps(list(call))
        done = subprocess.run(
            [
                sys.executable,
                "-c",
                PROBE,
                str(module.resolve()),
                str(npz),
                str(threads),
                names,
            ],
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise BadInput(f"{module} cannot be run in a process of its own: {reason}")
    found: dict[str, Any] = json.loads(done.stdout)
    weights = sum(file.stat().st_size for file in module.glob("*.safetensors"))
    working = found["peak_rss_bytes"] - found["weights_read"] - found["output_bytes"]
    live = found["live"]
    return {**found, "weight_bytes": weights, "overhead": working / live if live else 0.0}
