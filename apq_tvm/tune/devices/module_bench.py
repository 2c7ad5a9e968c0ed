"""Modules and layers timed on devices: a static program, weights and inputs go there."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from apq_tvm.bench.linear import LinearCase, write_model
from apq_tvm.bench.model import one_call
from apq_tvm.bench.module_program import link_program, read_results, written_calls
from apq_tvm.bench.rivals import relative_error
from apq_tvm.bench.timing import COLD_BYTES
from apq_tvm.errors import BadInput, BadTarget, DeviceFailed
from apq_tvm.formats import dequantize
from apq_tvm.module import ports, read_manifest
from apq_tvm.progress import Progress, Silent
from apq_tvm.tune.devices.address import Address, parse_devices
from apq_tvm.tune.devices.connection import Connection, toolchain
from apq_tvm.tune.devices.errand import Done, Errand
from apq_tvm.tune.devices.tracker import expand
from apq_tvm.types import AnyPath, Array, DeviceProfile

MOST_ROUNDS = 200

SLACK_S = 60.0
"""For opening the weights and the first runs, beside the time that is asked for."""


@dataclass(frozen=True)
class Asked:
    """How a module is timed.

    Parameters
    ----------
    threads : int
        0 for what the module starts with.
    seconds : float
    cold : bool
        Whether caches are emptied before each run.
    bits : int
        Width chosen at run time, 0 for what the module starts with.
    """

    threads: int = 0
    seconds: float = 4.0
    cold: bool = False
    bits: int = 0


def bench_module(
    module: AnyPath,
    devices: str,
    *,
    batch: int = 1,
    seq: int = 128,
    dims: Mapping[str, int] | None = None,
    inputs: AnyPath | None = None,
    asked: Asked | None = None,
    cc: str = "",
    sysroot: str = "",
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Time a compiled module on devices, all at the same time.

    Parameters
    ----------
    module : str or path
        Folder of a module, compiled for a processor that the devices have.
    devices : str
        Comma list of addresses (`apq_tvm.tune.devices.address`).
    batch, seq : int
        Sizes of symbolic dimensions by their names (`apq_tvm.bench.model.resolve_dims`).
    dims : mapping of str to int, optional
        Sizes of other symbolic dimensions.
    inputs : str or path, optional
        npz of inputs instead of made-up ones; the first call in it is run.
    asked : Asked, optional
    cc, sysroot : str
        The C compiler for the devices, and its folder of headers and libraries.
    progress : Progress, optional

    Returns
    -------
    dict
        ``module, target, dims`` and ``devices``: of each ``device, machine, cores, emulated, us,
        noise, rounds, threads, error, outputs``. `us` is the least time of a run and `noise` how
        far the median is above it; both are None where the device is emulated. `error` says why
        there are no figures, ``""`` where there are. `outputs` has name, shape and whether all is
        finite.

    Raises
    ------
    BadTarget
        The module is for a GPU.
    ApqError
        Inputs do not fit, an address is wrong, no compiler is there, or no device could be used.
    """
    progress, asked = progress or Silent(), asked or Asked()
    manifest = read_manifest(module)
    profile = profile_of(manifest)
    addresses = expand(parse_devices(devices))
    sizes, call = one_call(ports(module, manifest), batch, seq, dims, inputs)
    rows = []
    with progress.stage("devices", 1 + len(addresses)), tempfile.TemporaryDirectory() as name:
        progress.advance("link")
        program = Program(Path(module), profile, Path(name), cc, sysroot)
        with ThreadPoolExecutor(len(addresses)) as pool:
            jobs = [pool.submit(program.on, address, call, asked) for address in addresses]
            for address, job in zip(addresses, jobs, strict=True):
                progress.advance(str(address))
                rows.append(job.result())
    if all(row.error is not None for row in rows):
        raise next(row.error for row in rows if row.error is not None)
    return {
        "module": str(module),
        "target": manifest["target"],
        "dims": sizes or {key: list(array.shape) for key, array in call.items()},
        "devices": [row.described() for row in rows],
    }


def bench_layers(
    cases: Sequence[LinearCase],
    devices: str,
    *,
    target: str,
    seconds: float = 4.0,
    cc: str = "",
    sysroot: str = "",
    progress: Progress | None = None,
) -> list[dict[str, Any]]:
    """Time linear layers on devices, each checked against the exact product.

    Parameters
    ----------
    cases : sequence of LinearCase
    devices : str
        As `bench_module` takes them.
    target : str
        What the layers are compiled for.
    seconds : float
        For each case.
    cc, sysroot : str
        As `bench_module` takes them.
    progress : Progress, optional

    Returns
    -------
    list of dict
        One per case and device: ``shape, m, threads, scheme, cold, device, machine, emulated, us,
        noise, rounds, gmacs, error``. `error` is the mean error relative to the root mean square
        of the exact product with the codes' own weights.

    Raises
    ------
    ApqError
        A scheme, target or address is wrong, or a device failed.
    """
    from apq_tvm import pipeline
    from apq_tvm.schedules.devices import find_profile

    progress, rows = progress or Silent(), []
    profile = find_profile(target)
    refuse_gpus(profile)
    addresses = expand(parse_devices(devices))
    with progress.stage("layers", len(cases)), tempfile.TemporaryDirectory() as top:
        programs: dict[Any, tuple[Program, Array]] = {}
        for i, case in enumerate(cases):
            progress.advance(f"{case.shape} {case.scheme} M={case.m}")
            if case.compiled not in programs:
                folder = Path(top) / str(i)
                folder.mkdir()
                weight = np.random.default_rng(case.n + case.k).standard_normal((case.n, case.k))
                model = folder / "linear.onnx"
                write_model(model, weight.astype(np.float32))
                plan = pipeline.plan(model, target=target, scheme=case.compiled[2], search=False)
                tools = toolchain(profile, cc, sysroot)
                built = pipeline.build(plan, folder / "layer", tools=tools)
                tensor = next(iter(plan.quantized.tensors.values()), None)
                meant = dequantize(tensor, case.bits) if tensor else weight.astype(np.float32)
                programs[case.compiled] = Program(built.path, profile, folder, cc, sysroot), meant
            program, meant = programs[case.compiled]
            x = np.random.default_rng(case.m).standard_normal((case.m, case.k)).astype(np.float32)
            asked = Asked(case.threads, seconds, case.cold, case.bits)
            for address in addresses:
                row = program.on(address, {"x": x}, asked)
                if row.error is not None:
                    raise row.error
                error = relative_error(row.outputs["y"], x, meant.astype(np.float64))[0]
                rows.append(_layer_row(case, row, error))
    return rows


def _layer_row(case: LinearCase, row: Row, error: float) -> dict[str, Any]:
    told = row.described()
    kept = {key: told[key] for key in ("device", "machine", "emulated", "us", "noise", "rounds")}
    macs = case.m * case.n * case.k
    return {
        "shape": case.shape,
        "m": case.m,
        "threads": told["threads"],
        "scheme": case.scheme,
        "cold": case.cold,
        **kept,
        "gmacs": None if told["us"] is None else macs / told["us"] / 1e3,
        "error": error,
    }


@dataclass
class Row:
    """What one device made of a module; `error` where it failed, `samples` in microseconds."""

    address: Address
    machine: str = ""
    cores: int = 0
    threads: int = 0
    samples: Sequence[float] = ()
    outputs: Mapping[str, Array] = ()  # type: ignore[assignment]
    error: DeviceFailed | BadInput | None = None

    def described(self) -> dict[str, Any]:
        """For JSON."""
        timed = bool(self.samples) and not self.address.emulated
        least = min(self.samples, default=0.0)
        return {
            "device": str(self.address),
            "machine": self.machine,
            "cores": self.cores,
            "emulated": self.address.emulated,
            "us": least if timed else None,
            "noise": median(self.samples) / max(least, 1e-9) - 1 if timed else None,
            "rounds": len(self.samples),
            "threads": self.threads,
            "error": "" if self.error is None else str(self.error),
            "outputs": [
                {
                    "name": name,
                    "shape": list(array.shape),
                    "finite": array.dtype.kind != "f" or bool(np.isfinite(array).all()),
                }
                for name, array in dict(self.outputs).items()
            ],
        }


class Program:
    """A module as a static program that devices can run.

    Parameters
    ----------
    module : Path
    profile : DeviceProfile
        What it was compiled for.
    folder : Path
        Receives the program.
    cc, sysroot : str
        The C compiler, if not the usual one.
    """

    def __init__(
        self, module: Path, profile: DeviceProfile, folder: Path, cc: str, sysroot: str
    ) -> None:
        self._module, self._profile = module, profile
        self._manifest = read_manifest(module)
        self._tools = toolchain(profile, cc, sysroot)
        self._program = folder / "module_program"
        link_program(module, self._manifest, self._program, self._tools.cc)

    def on(self, address: Address, call: Mapping[str, Array], asked: Asked) -> Row:
        """Run and time the module on one device."""
        row = Row(address)
        try:
            with Connection(address, self._profile, self._tools) as device:
                row.machine, row.cores = device.machine.model, device.machine.cores
                done = device.run(self._errand(call, asked))
            done.check(str(self._module))
            row.outputs = read_results(done.files.get("results", b""), self._manifest["outputs"])
            row.threads, row.samples = read_samples(done)
        except (DeviceFailed, BadInput) as error:
            row.error = error
        return row

    def _errand(self, call: Mapping[str, Array], asked: Asked) -> Errand:
        cold = COLD_BYTES if asked.cold else 0
        numbers = (asked.threads, MOST_ROUNDS, round(asked.seconds * 1000), cold)
        return Errand(
            {
                "program": self._program,
                "weights.safetensors": self._module / "weights.safetensors",
                "calls": written_calls(self._manifest, call, asked.bits),
            },
            ("program", "weights.safetensors", "calls", "results", "time", *map(str, numbers)),
            ("results",),
            asked.seconds + SLACK_S,
        )


def read_samples(done: Done) -> tuple[int, list[float]]:
    """Threads, and microseconds of a run in every sample, of what ``module_program.c`` printed.

    Raises
    ------
    BadInput
        There are none.
    """
    threads, samples = 0, []
    for line in done.stdout.splitlines():
        word, *numbers = line.split() or [""]
        if word == "threads":
            threads = int(numbers[0])
        elif word == "sample":
            samples.append(int(numbers[0]) / max(int(numbers[1]), 1) / 1e3)
    if not samples:
        raise BadInput(f"the program on {done.device} printed no times")
    return threads, samples


def profile_of(manifest: Mapping[str, Any]) -> DeviceProfile:
    """The profile of the device that a module was compiled for.

    Raises
    ------
    BadTarget
        It is a GPU.
    """
    from apq_tvm.schedules.devices import find_profile

    triple = str(manifest["tvm_target"].get("mtriple", ""))
    profile = find_profile(manifest["target"])
    refuse_gpus(profile)
    return profile if triple in ("", profile.triple) else find_profile(profile.name, triple)


def refuse_gpus(profile: DeviceProfile) -> None:
    """A static program loads no driver.

    Raises
    ------
    BadTarget
        The profile is of a GPU; with what measures there.
    """
    if profile.gpu is not None:
        raise BadTarget(
            f"{profile.name} is a GPU, whose driver a static program cannot load; its kernels are "
            "measured by a folder that goes there: apq-tvm bench gpu --prepare FOLDER"
        )
