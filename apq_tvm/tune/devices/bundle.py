"""A bundle of ``bench gpu`` run on a machine with a GPU, and its results brought back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from apq_tvm.errors import BadInput, OutputFailed
from apq_tvm.schedules.devices import find_profile
from apq_tvm.tune.devices.address import Address, parse_device
from apq_tvm.tune.devices.connection import Connection
from apq_tvm.tune.devices.errand import Errand
from apq_tvm.tune.devices.transport import OnLine
from apq_tvm.types import AnyPath

PYTHON, RESULTS = "python3", "results.json"

TIMEOUT_S = 3600.0


def gpu_device(text: str) -> Address:
    """Read the address of a machine that a bundle can run on, before minutes of work.

    Raises
    ------
    BadDevice
        It is spelled wrongly.
    BadInput
        It is one of TVM's servers, which take no folders, or an emulator, which has no GPU.
    """
    address = parse_device(text)
    if address.kind in ("rpc", "qemu", "adb"):
        raise BadInput(
            f"--device {text}: a bundle runs by python3 on a machine with a GPU: local, or ssh"
        )
    return address


def run_bundle(
    folder: AnyPath, device: str, *, seconds: float | None = None, on_line: OnLine | None = None
) -> dict[str, Any]:
    """Run a bundle on a device; ``results.json`` in its folder is what it measured.

    Parameters
    ----------
    folder : str or path
        What ``bench gpu --prepare`` wrote.
    device : str
        ``local`` or ``ssh://...``; it has python3 and numpy, and a driver.
    seconds : float, optional
        For each case; the bundle's own by default.
    on_line : callable, optional
        Told lines as they come.

    Returns
    -------
    dict
        The results.

    Raises
    ------
    DeviceFailed
        The device cannot be used, or was lost.
    BadInput
        The folder is no bundle, or the program there failed: no GPU, no numpy, wrong results.
    """
    folder, address = Path(folder), gpu_device(device)
    try:
        target = json.loads((folder / "bundle.json").read_text())["target"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInput(f"{folder} is no bundle of bench gpu: {error}") from error
    files = {
        path.relative_to(folder).as_posix(): path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts and path.name != RESULTS
    }
    options = () if seconds is None else ("--seconds", f"{seconds:g}")
    errand = Errand(files, (PYTHON, "run.py", *options, "--out", RESULTS), (RESULTS,), TIMEOUT_S)
    with Connection(address, find_profile(target)) as opened:
        done = opened.run(errand, on_line)
    if RESULTS not in done.files:
        done.check("the bundle's run.py")
        raise BadInput(f"the bundle's run.py on {address} wrote no {RESULTS}")
    data = done.files[RESULTS]
    try:
        results: dict[str, Any] = json.loads(data)
        (folder / RESULTS).write_bytes(data)
    except ValueError as error:
        raise BadInput(f"{RESULTS} of {address} is damaged: {error}") from error
    except OSError as error:
        raise OutputFailed(f"{folder / RESULTS}: {error.strerror}") from error
    done.check("the bundle's run.py")
    return results
