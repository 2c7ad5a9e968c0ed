"""Time of compiled modules at every width they can run at, in turns in one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from apq_tvm.errors import BadInput
from apq_tvm.evaluation.runners import call_module
from apq_tvm.formats import parse_scheme
from apq_tvm.inspect import stored_bits
from apq_tvm.module import load_module, read_manifest
from apq_tvm.progress import Progress
from apq_tvm.types import AnyPath, Array


def module_widths(manifest: Mapping[str, Any]) -> tuple[int, ...]:
    """Widths a module can run at; ``(0,)`` if it has no choice."""
    schemes = {parse_scheme(layer["scheme"]) for layer in manifest["layers"]}
    widths = {bits for scheme in schemes if scheme is not None for bits in scheme.widths if bits}
    return tuple(sorted(widths)) or (0,)


def time_modules(
    modules: Sequence[AnyPath],
    sha256: str,
    call: Mapping[str, Array],
    threads: int | None,
    seconds: float,
    progress: Progress,
) -> dict[str, Any] | None:
    """Time modules on one call.

    Parameters
    ----------
    modules : sequence of str or path
        Folders of compiled modules; none gives None.
    sha256 : str
        Of the ONNX file they must be of.
    call : mapping of str to ndarray
    threads : int or None
        What a module starts with if None.
    seconds : float
        For all of them.
    progress : Progress

    Returns
    -------
    dict or None
        ``shapes`` of the call, ``threads``, and ``rows``: ``module``, ``scheme``, ``width``,
        ``bits``, ``us``, ``noise`` of each. Times are minima of calls that follow one another in
        one process: warm, weights lie in whatever cache holds them.

    Raises
    ------
    BadInput
        A module is of another model, or refuses the inputs.
    """
    if not modules:
        return None
    from apq_tvm.bench.timing import interleave, repeated

    candidates, about = {}, {}
    count = threads
    for path in map(Path, modules):
        manifest = read_manifest(path)
        if manifest.get("onnx_sha256", sha256) != sha256:
            raise BadInput(f"{path} is compiled from another ONNX file than the report's")
        package = load_module(path)
        count = count or package.num_threads()
        package.set_num_threads(count)
        schemes = sorted({layer["scheme"] for layer in manifest["layers"]})
        for width in module_widths(manifest):
            name = f"{path.name}@{width}" if width else path.name
            call_module(package, call, width)  # refused inputs are said before anything is timed
            candidates[name] = repeated(partial(call_module, package, call, width))
            bits = float(width) or stored_bits(manifest)["bits_per_weight"]
            about[name] = {"module": str(path), "scheme": " ".join(schemes), "width": width,
                           "bits": bits}  # fmt: skip
    with progress.stage("time"):
        timings = interleave(candidates, budget_s=seconds)
    return {
        "shapes": {name: list(array.shape) for name, array in call.items()},
        "threads": count,
        "rows": [
            {"name": name, **about[name], "us": timing.us, "noise": timing.noise}
            for name, timing in timings.items()
        ],
    }
