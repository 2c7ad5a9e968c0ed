"""``tune``: from a model to records of what is faster than the defaults on a device."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from apq_tvm.errors import BadInput, DeviceFailed
from apq_tvm.quantizers.stored import storage
from apq_tvm.schedules.recorded import LOG
from apq_tvm.tune.budget import Planned, share_out
from apq_tvm.tune.device import Device
from apq_tvm.tune.functions.graph import AnyTask, extract_functions
from apq_tvm.tune.local import Local
from apq_tvm.tune.scratch import scratch_folder
from apq_tvm.tune.session import Finding, Observer, Quiet, Settings, check_ready, tune_tasks
from apq_tvm.tune.space import unshared
from apq_tvm.tune.tasks import DEFAULT_ROWS, extract
from apq_tvm.tuning_logs import log_path
from apq_tvm.types import AnyPath, DeviceProfile, DimSizes, KernelPlan, Scheme


def tune(
    model: AnyPath | None = None,
    *,
    target: str = "host",
    scheme: str | Scheme = "W4A8g32",
    shapes: Sequence[tuple[int, int]] = (),
    rows: Sequence[int] = DEFAULT_ROWS,
    trials: int | None = None,
    minutes: float | None = None,
    tensor_types: Mapping[str, str] | None = None,
    dims: DimSizes | None = None,
    log: AnyPath | None = None,
    threads: int | None = None,
    devices: Sequence[Device] = (),
    seed: int = 0,
    functions: bool = True,
    observer: Observer | None = None,
) -> list[Finding]:
    """Search the decisions of a model's linear layers, and record what is faster for sure.

    Parameters
    ----------
    model : str or path, optional
        The ONNX file; without one, random layers of `shapes`.
    target, scheme, tensor_types, dims
        As in `apq_tvm.compile`.
    shapes : sequence of (int, int)
        N and K; with a model, only its layers of these.
    rows : sequence of int
        Rows of activations to tune for.
    trials : int, optional
        Of all tasks together; by default up to 64 of each.
    minutes : float, optional
        After which to stop.
    log : str or path, optional
        File of records to add to; by default the device's own in `apq_tvm.tuning_logs`.
    threads : int, optional
        By default the device's cores.
    devices : sequence of Device
        Where candidates run, several side by side; by default here.
    seed : int
        Of what is drawn at random.
    functions : bool
        Tune a model's softmax, norms and other functions of floats too.
    observer : Observer, optional

    Returns
    -------
    list of Finding
        One for each task, in their order.

    Raises
    ------
    ApqError
        The model cannot be read, the log cannot be written, the device cannot be reached.
    """
    request = Request(
        model, target, scheme, shapes, rows, trials, minutes, tensor_types or {}, dims, log,
        threads, seed, functions,
    )  # fmt: skip
    return prepare(request).run(observer or Quiet(), devices or (Local(),))


@dataclass(frozen=True)
class Request:
    """Parameters of `tune`."""

    model: AnyPath | None
    target: str
    scheme: str | Scheme
    shapes: Sequence[tuple[int, int]]
    rows: Sequence[int]
    trials: int | None
    minutes: float | None
    tensor_types: Mapping[str, str]
    dims: DimSizes | None
    log: AnyPath | None
    threads: int | None
    seed: int
    functions: bool = True


@dataclass(frozen=True)
class Session:
    """Tasks and how they are tuned."""

    planned: list[Planned]
    profile: DeviceProfile
    settings: Settings

    def check(self, devices: Sequence[Device]) -> None:
        """See that nothing is missing, as `apq_tvm.tune.session.check_ready` does."""
        check_ready(self.planned, self.profile, self.settings, devices)

    def run(self, observer: Observer, devices: Sequence[Device]) -> list[Finding]:
        """Tune."""
        return tune_tasks(self.planned, self.profile, self.settings, devices, observer)


def prepare(request: Request) -> Session:
    """Read the model and plan the trials.

    Raises
    ------
    ApqError
        The model cannot be read, or there is nothing to tune.
    """
    plans = plan_of(
        request.model, request.target, request.scheme, request.shapes, request.tensor_types,
        request.dims,
    )  # fmt: skip
    profile = plans[0].profile
    if profile.gpu is not None:
        raise BadInput(
            f"{profile.name} is a GPU, whose candidates are timed by a bundle: apq-tvm bench gpu"
        )
    if profile.variants:
        raise BadInput(f"{profile.name} is several devices; tune one of its variants by name")
    linear = [task for plan in plans for task in extract(plan, request.rows)]
    tasks: list[AnyTask] = list(linear)
    if request.model is not None and request.shapes:
        shapes = set(request.shapes)
        tasks = [task for task in linear if (task.spec.n, task.spec.k) in shapes]
    elif request.model is not None and request.functions:
        sizes = {n: size for n, size in (request.dims or {}).items() if isinstance(size, int)}
        tasks += extract_functions(plans[0], sizes)
    threads = request.threads or profile.cores
    spaces = {task: unshared(task.space()) for task in tasks}
    planned = share_out(spaces, request.trials, request.minutes)
    if not planned:
        raise BadInput("there is nothing to tune: no linear layer has a choice on this device")
    deadline = time.monotonic() + 60 * request.minutes if request.minutes is not None else None
    settings = Settings(
        Path(request.log) if request.log is not None else log_path(profile.name, LOG),
        threads, 0 if request.model is None else weights_read(plans[0]), request.seed, deadline,
    )  # fmt: skip
    return Session(planned, profile, settings)


def weights_read(plan: KernelPlan) -> int:
    """Bytes of weights that a run of the model reads: of tables of embeddings it takes few rows."""
    stored = storage(plan.quantized)
    return max(stored.linear.nbytes, stored.all.nbytes - stored.embedding.nbytes)


def plan_of(
    model: AnyPath | None,
    target: str,
    scheme: str | Scheme,
    shapes: Sequence[tuple[int, int]] = (),
    tensor_types: Mapping[str, str] | None = None,
    dims: DimSizes | None = None,
) -> list[KernelPlan]:
    """The model's plan by defaults, or one for each of the shapes."""
    from apq_tvm import pipeline

    given: dict[str, Any] = {"target": target, "scheme": scheme, "shipped_logs": False}
    given |= {"search": False, "tensor_types": tensor_types}
    if model is not None:
        return [pipeline.plan(model, dims=dims, **given)]
    if not shapes:
        raise BadInput("name an ONNX file, or shapes of layers with --shapes 4096x4096")
    with scratch_folder() as folder:
        return [_plan_of_shape(folder, n, k, given) for n, k in dict.fromkeys(shapes)]


def _plan_of_shape(folder: Path, n: int, k: int, given: Mapping[str, Any]) -> KernelPlan:
    import numpy as np

    from apq_tvm import pipeline
    from apq_tvm.bench.linear import write_model

    path = folder / "linear.onnx"
    write_model(path, np.random.default_rng(n + k).standard_normal((n, k)).astype(np.float32))
    return pipeline.plan(path, **given)


def devices_of(text: str, profile: DeviceProfile) -> list[Device]:
    """The devices at an address.

    Raises
    ------
    DeviceFailed
        There is none, or nobody knows such addresses.
    """
    if text in ("", "local"):
        return [Local()]
    try:
        devices = import_module("apq_tvm.tune.devices")
    except ImportError as error:
        raise DeviceFailed(
            f"--device {text}: devices far away are not in this installation; use local"
        ) from error
    found: list[Device] = devices.open_devices(text, profile)
    return found
