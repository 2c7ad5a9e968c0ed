"""Calibration files: safetensors with the statistics of every linear layer, and of which model.

``x.<node>.square`` and its like hold statistics, once for layers that share them, ``fisher.<node>``
Fisher information, ``learned.*`` what `apq_tvm.quantizers.learn.learned` keeps, ``caches.*`` what
`apq_tvm.quantizers.inputs.cache_balance` multiplies by. The metadata name
the model by its sha256, the layers and whose statistics they have, and what their sensitivity is.
Nothing in it is executable.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from apq_tvm.errors import BadInput, OutputFailed
from apq_tvm.files import replacing
from apq_tvm.types import AnyPath, Array, Calibration, ImportedModel, LayerStats

VERSION = "1"

KEPT = ("learned.", "caches.", "centres.")
"""Of what others keep in a file: `CalibrationFile.extra`."""


@dataclass(frozen=True)
class CalibrationFile:
    """All that a file holds.

    Parameters
    ----------
    calibration : Calibration
    extra : mapping of str to ndarray
        Arrays whose names start with one of `KEPT`.
    notes : mapping of str to str
        Metadata of `extra` and of how the file was made.
    """

    calibration: Calibration
    extra: Mapping[str, Array] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)


def write_arrays(path: AnyPath, arrays: Mapping[str, Array], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file whole or not at all.

    Raises
    ------
    OutputFailed
        It could not be written.
    """
    from safetensors.numpy import save_file

    path = Path(path)
    try:
        stored = {name: np.asarray(array, order="C") for name, array in arrays.items()}
        with replacing(path) as part:
            save_file(stored, part, dict(metadata))
    except Exception as error:  # safetensors raises its own kind for a full disk
        raise OutputFailed(f"{path} could not be written: {error}") from error


def read_arrays(path: AnyPath) -> tuple[dict[str, Array], dict[str, str]]:
    """Read a safetensors file.

    Raises
    ------
    BadInput
        It is missing, truncated or no safetensors file.
    """
    from safetensors import SafetensorError, safe_open

    path = Path(path)
    if not path.is_file():
        raise BadInput(f"{path}: no such calibration file; make one with apq-tvm calibrate")
    try:
        with safe_open(path, "numpy") as file:
            metadata = file.metadata() or {}
            return {name: file.get_tensor(name) for name in file.keys()}, metadata
    except (SafetensorError, OSError, ValueError) as error:
        raise BadInput(f"{path} is no readable safetensors file: {error}") from error


def save(path: AnyPath, file: CalibrationFile) -> None:
    """Write a calibration file.

    Parameters
    ----------
    path : str or path
    file : CalibrationFile

    Raises
    ------
    OutputFailed
        It could not be written.
    """
    arrays: dict[str, Array] = dict(file.extra)
    samples = {}
    owners: dict[int, str] = {}  # layers that share statistics store them once
    values = {
        node: owners.setdefault(id(stats.mean_square), node)
        for node, stats in file.calibration.layers.items()
    }
    for node, stats in file.calibration.layers.items():
        value = values[node]
        samples[value] = stats.samples
        arrays[f"x.{value}.square"] = stats.mean_square
        arrays[f"x.{value}.mean"] = stats.mean
        arrays[f"x.{value}.absmax"] = stats.absmax
        if stats.hessian is not None:
            arrays[f"x.{value}.hessian"] = stats.hessian
        if stats.fisher is not None:
            arrays[f"fisher.{node}"] = stats.fisher
    metadata = {
        **file.notes,
        "apq_calibration": VERSION,
        "sha256": file.calibration.sha256,
        "sensitivity": file.calibration.sensitivity,
        "layers": json.dumps(values),
        "samples": json.dumps(samples),
        "importance": json.dumps(
            {node: stats.importance for node, stats in file.calibration.layers.items()}
        ),
        "tables": json.dumps(dict(file.calibration.tables)),
    }
    write_arrays(path, arrays, metadata)


def read(path: AnyPath) -> CalibrationFile:
    """Read a calibration file.

    Raises
    ------
    BadInput
        It is missing, broken, of another version, or no calibration file.
    """
    arrays, metadata = read_arrays(path)
    if metadata.get("apq_calibration") != VERSION:
        found = metadata.get("apq_calibration")
        what = "is no calibration file" if found is None else f"is of version {found}"
        raise BadInput(f"{path} {what}; make one with apq-tvm calibrate")
    try:
        layers = json.loads(metadata["layers"])
        samples = json.loads(metadata["samples"])
        importance = json.loads(metadata.get("importance", "{}"))
        stats = {
            node: LayerStats(
                arrays[f"x.{value}.square"],
                arrays[f"x.{value}.mean"],
                arrays[f"x.{value}.absmax"],
                int(samples[value]),
                arrays.get(f"x.{value}.hessian"),
                arrays.get(f"fisher.{node}"),
                float(importance.get(node, 0.0)),
            )
            for node, value in layers.items()
        }
        tables = {n: float(v) for n, v in json.loads(metadata.get("tables", "{}")).items()}
        calibration = Calibration(stats, metadata["sha256"], metadata["sensitivity"], tables)
    except (KeyError, ValueError, TypeError) as error:
        raise BadInput(f"{path} is damaged: {error!r} is missing or wrong; make it anew") from error
    extra = {name: array for name, array in arrays.items() if name.startswith(KEPT)}
    return CalibrationFile(calibration, extra, metadata)


def check_model(calibration: Calibration, model: ImportedModel, where: str) -> None:
    """Refuse a calibration of another model.

    Raises
    ------
    BadInput
        The sha256 differ, or a layer's statistics do not fit its weight.
    """
    if calibration.sha256 != model.sha256:
        raise BadInput(
            f"{where} was made from another model (sha256 {calibration.sha256[:12]}, this one is "
            f"{model.sha256[:12]}); run apq-tvm calibrate on this one"
        )
    for node in model.nodes:
        stats: Any = calibration.layers.get(node.name)
        if node.op != "apq.Linear" or stats is None:
            continue
        k = model.weights[node.inputs[1]].shape[1]
        for name in ("mean_square", "mean", "absmax"):
            array = getattr(stats, name)
            if array.shape != (k,) or not np.isfinite(array).all():
                raise BadInput(
                    f"{where}: {name} of layer {node.name!r} has shape {array.shape} or is not "
                    f"finite; {k} finite values are needed: make it anew"
                )
        if stats.hessian is not None and stats.hessian.shape != (k, k):
            raise BadInput(
                f"{where}: H of layer {node.name!r} has shape {stats.hessian.shape}, not "
                f"{(k, k)}; make it anew"
            )


def load(path: AnyPath, model: ImportedModel) -> CalibrationFile:
    """Read a calibration file and check that it belongs to a model.

    Raises
    ------
    BadInput
        See `read` and `check_model`.
    """
    file = read(path)
    check_model(file.calibration, model, str(path))
    return file
