"""``compile``: the straight line from an ONNX file to a module, and nothing else."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from apq_tvm.progress import Progress, Silent
from apq_tvm.types import (
    AnyPath,
    CompiledModule,
    DeviceProfile,
    DimSizes,
    KernelPlan,
    QuantizedModel,
    ScheduledModel,
    Scheme,
)

if TYPE_CHECKING:
    from apq_tvm.codegen.build.toolchain import Toolchain
    from apq_tvm.codegen.cuda.compilers import ImageCompiler
    from apq_tvm.quantizers.guided import Guidance
    from apq_tvm.schedules.decide import Decide


class _Stopwatch:
    """Seconds per stage, for the manifest."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, stage: str) -> None:
        now = time.perf_counter()
        self.seconds[stage] = round(self.seconds.get(stage, 0.0) + now - self._last, 3)
        self._last = now


def plan(
    model: AnyPath,
    *,
    target: str = "host",
    scheme: str | Scheme = "W4A8g32",
    tensor_types: Mapping[str, str] | None = None,
    dims: DimSizes | None = None,
    search: bool = True,
    guidance: Guidance | None = None,
    triple: str = "",
    layout: str = "",
    kv: str = "f32",
    log: AnyPath | None = None,
    shipped_logs: bool = True,
    progress: Progress | None = None,
    stopwatch: _Stopwatch | None = None,
) -> KernelPlan:
    """Import, quantize and select: everything that is known before anything is built.

    Parameters are those of `compile`.

    Returns
    -------
    KernelPlan
    """
    from apq_tvm.onnx_import import import_onnx
    from apq_tvm.quantizers.guided import Guidance, quantize_guided
    from apq_tvm.schedules.devices import find_profile, multiplies_pairs

    progress = progress or Silent()
    stopwatch = stopwatch or _Stopwatch()
    profile = find_profile(target, triple, layout)
    with progress.stage("import"):
        imported = import_onnx(model, dims, _all_float(scheme, tensor_types, guidance))
    stopwatch.lap("import")
    quantized = quantize_guided(
        imported, scheme, tensor_types or {}, guidance or Guidance(), search, progress, kv,
        multiplies_pairs(profile),
    )  # fmt: skip
    stopwatch.lap("quantize")
    chosen = plan_quantized(quantized, profile, kv=kv, log=log, shipped_logs=shipped_logs)
    stopwatch.lap("select")
    return chosen


def _all_float(
    scheme: str | Scheme, tensor_types: Mapping[str, str] | None, guidance: Guidance | None
) -> bool:
    """Whether no scheme rounds anything, so that what the file itself rounds stays rounded."""
    from apq_tvm.formats.scheme import parse_scheme
    from apq_tvm.quantizers.guided import Guidance

    whole = isinstance(scheme, str) and parse_scheme(scheme) is None
    return whole and not tensor_types and guidance in (None, Guidance())


def plan_quantized(
    quantized: QuantizedModel,
    profile: DeviceProfile,
    *,
    kv: str = "f32",
    log: AnyPath | None = None,
    shipped_logs: bool = True,
) -> KernelPlan:
    """Join nodes and select kernels: `plan`, with its parameters, of what is quantized already.

    Returns
    -------
    KernelPlan
    """
    from apq_tvm.schedules.devices import linear_kernels
    from apq_tvm.schedules.recorded import Records
    from apq_tvm.select import select

    quantized = _joined(quantized, profile, kv)
    file = Path(log) if log is not None else None
    plans = [
        select(quantized, p, linear_kernels(p), Records.of(p, file, shipped_logs))
        for p in profile.variants or (profile,)
    ]
    chosen = plans[0]
    if profile.variants:
        chosen = KernelPlan(quantized, profile, chosen.choices, tuple(plans))
    return chosen


def _joined(quantized: QuantizedModel, profile: DeviceProfile, kv: str) -> QuantizedModel:
    """Fewer, larger nodes, and caches that grow in place where the model is a decoder.

    On a GPU attention of such reads other layouts than that of other models.
    """
    from apq_tvm.launches import join, settle
    from apq_tvm.schedules.devices import cached_operators, device_operators
    from apq_tvm.sessions import cache_type, keep

    on_gpu = profile.gpu is not None
    kept = keep(join(quantized, cached_operators(profile)), cache_type(kv, on_gpu))
    if kept.model.state is not None or not on_gpu:
        return settle(kept)
    joined = join(quantized, device_operators(profile))
    return replace(joined, model=replace(joined.model, stateless=kept.model.stateless))


def compile(
    model: AnyPath,
    output: AnyPath,
    *,
    target: str = "host",
    scheme: str | Scheme = "W4A8g32",
    tensor_types: Mapping[str, str] | None = None,
    dims: DimSizes | None = None,
    force: bool = False,
    search: bool = True,
    guidance: Guidance | None = None,
    triple: str = "",
    layout: str = "",
    kv: str = "f32",
    cc: str = "",
    sysroot: str = "",
    images: ImageCompiler | None = None,
    log: AnyPath | None = None,
    shipped_logs: bool = True,
    progress: Progress | None = None,
) -> CompiledModule:
    """Compile an ONNX model into a module folder: a Python package and a C library in one.

    Parameters
    ----------
    model, output : str or path
        The ONNX file; the folder to write, whose last part is the package's name: an identifier.
    target : str
        A device of ``apq-tvm targets``.
    scheme : str or Scheme
        For every linear layer and embedding, e.g. ``"W4A8g32"``.
    tensor_types : mapping of str to str
        Regular expression on layer or weight names → scheme, or ``"float"``; the last match wins.
    dims : mapping of str to int or (int, int)
        Sizes of symbolic dimensions, or the least and greatest they may have, by ONNX name.
    force, search : bool
        Replace an existing output, which stays intact until the new one is complete; search scales
        for least error, not round from the maximum.
    guidance : Guidance, optional
        A calibration file, how codes are chosen by it, a budget of bits per weight to meet.
    triple : str
        System to compile for, ``"aarch64-linux-android24"`` or ``"x86_64-linux-musl"``, by default
        GNU/Linux; the C compiler must have its C library.
    layout : str
        Of integer weights on 64-bit Arm, such as ``"4x8"`` (`apq_tvm.schedules.arm.layouts`).
    kv : {"f32", "f16", "i8", "i4"}
        Keys and values that a decoder's attention reads (`apq_tvm.formats.caches`).
    cc, sysroot : str
        C compiler for `target`, where the one found by itself will not do, and the folder of the
        target's headers and libraries (`apq_tvm.codegen.build.toolchain`).
    images : ImageCompiler, optional
        Compiler of a GPU's code, by default NVRTC or nvcc (`apq_tvm.codegen.cuda.compilers`).
    log, shipped_logs : str or path, optional, and bool
        Records of the tuner, which hold before those shipped for the device; whether those do.
    progress : Progress, optional

    Returns
    -------
    CompiledModule

    Raises
    ------
    ApqError
        Of the kind drawn in `apq_tvm.errors`; the message names what is at fault and the remedy.
    """
    from apq_tvm.codegen.package.folder import check_name, check_output

    watch, output = _Stopwatch(), Path(output)
    check_name(output)
    check_output(output, force)
    tools = _tools(target, triple, layout, cc, sysroot)
    images = images or _images(target)
    chosen = plan(
        model, target=target, scheme=scheme, tensor_types=tensor_types, dims=dims, search=search,
        guidance=guidance, triple=triple, layout=layout, kv=kv, log=log, shipped_logs=shipped_logs,
        progress=progress, stopwatch=watch,
    )  # fmt: skip
    return build(
        chosen, output, force=force, tools=tools, images=images, progress=progress, stopwatch=watch
    )  # fmt: skip


def _tools(target: str, triple: str, layout: str, cc: str, sysroot: str) -> Toolchain:
    """The C compiler of `compile`: that there is none is said before the work, not after it."""
    from apq_tvm.codegen.build.toolchain import find_toolchain
    from apq_tvm.schedules.devices import find_profile

    mtriple = find_profile(target, triple, layout).triple
    return find_toolchain(mtriple, cc, sysroot, exact=bool(triple))


def _images(target: str) -> ImageCompiler | None:
    """The compiler of a GPU's code: that there is none is said before the work, too."""
    from apq_tvm.schedules.devices import find_profile

    gpu = find_profile(target).gpu
    if gpu is None:
        return None
    from apq_tvm.codegen.cuda.compilers import find_compiler

    return find_compiler(gpu)


def build(
    chosen: KernelPlan,
    output: AnyPath,
    *,
    force: bool = False,
    tools: Toolchain | None = None,
    images: ImageCompiler | None = None,
    progress: Progress | None = None,
    stopwatch: _Stopwatch | None = None,
) -> CompiledModule:
    """Build what `plan` chose: the second half of `compile`, with its parameters and errors.

    Returns
    -------
    CompiledModule
    """
    from apq_tvm.codegen.emit import emit
    from apq_tvm.manifest import describe

    progress = progress or Silent()
    stopwatch = stopwatch or _Stopwatch()
    plans = chosen.variants or (chosen,)
    first, *others = [scheduled(plan, progress, stopwatch) for plan in plans]
    extra = {**describe(chosen, (first, *others)), "timings": stopwatch.seconds}
    return emit(
        first,
        Path(output),
        extra,
        alternatives=others,
        tools=tools,
        images=images,
        force=force,
        progress=progress,
    )


def scheduled(
    chosen: KernelPlan, progress: Progress | None = None, stopwatch: _Stopwatch | None = None
) -> ScheduledModel:
    """From the plan for one device to its scheduled functions."""
    from apq_tvm.lower import lower
    from apq_tvm.pack import pack
    from apq_tvm.schedule import schedule
    from apq_tvm.schedules.devices import linear_kernels
    from apq_tvm.select import by_name

    progress, stopwatch = progress or Silent(), stopwatch or _Stopwatch()
    packed = pack(chosen, progress)
    stopwatch.lap("pack")
    with progress.stage("lower"):
        decide = chosen.records.decide if chosen.records else default_decisions
        lowered = lower(packed, by_name(linear_kernels(chosen.profile)), decide)
    stopwatch.lap("lower")
    made = schedule(lowered, progress, decide)
    stopwatch.lap("schedule")
    return made


def default_decisions(function: str, default: Callable[[], Any] | None = None) -> Decide:
    """The decisions of a function without a record of the tuner: defaults (`DecideOf`)."""
    from apq_tvm.schedules.decide import Defaults

    return Defaults()
