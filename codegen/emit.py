"""The last stage: a scheduled module becomes a folder that is a Python package and a C library."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import tvm

from apq_tvm import __version__
from apq_tvm.codegen.build.kernels import build_kernels, cpu_flags
from apq_tvm.codegen.build.library import check_kernels, compile_sources, link_library
from apq_tvm.codegen.build.toolchain import Toolchain, find_toolchain
from apq_tvm.codegen.cuda.build import build_device, fit_gpu
from apq_tvm.codegen.cuda.compilers import ImageCompiler, find_compiler
from apq_tvm.codegen.graph.alike import share_kernels
from apq_tvm.codegen.graph.c_source import Device, WeightsFile, graph_source, tables_source
from apq_tvm.codegen.graph.plain import Graph, cut_along, total_weight_bytes
from apq_tvm.codegen.graph.read_relax import prepare, read_graph
from apq_tvm.codegen.graph.session import add_session
from apq_tvm.codegen.graph.stages import find_stages
from apq_tvm.codegen.package.folder import (
    MANIFEST_FORMAT,
    check_name,
    check_output,
    fill,
    port_entries,
    runtime_sources,
    staged,
    template_values,
    write_package,
)
from apq_tvm.codegen.package.weights import write_weights
from apq_tvm.progress import Progress, Silent
from apq_tvm.types import Array, CompiledModule, DeviceProfile, ScheduledModel

NEAR_CACHES, NEAR_BYTES = 4, 2 << 20
"""Working memory of a thread that counts as near: so many second caches, but more than one of them
only up to so many bytes. On a Sapphire Rapids, whose second cache has 2 MB, encoders at batch 32
are 7 to 13 % faster with parts of 2 MB than of 8, ResNet-50 10 %, MobileNetV3 and EfficientNet
0 to 5 %; parts of 1 MB read the weights too often."""

STEPS = ("graph", "weights", "kernels", "library", "package")


def emit(
    scheduled: ScheduledModel,
    output: Path,
    manifest_extra: Mapping[str, Any],
    *,
    alternatives: Sequence[ScheduledModel] = (),
    tools: Toolchain | None = None,
    images: ImageCompiler | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> CompiledModule:
    """Write a module's folder.

    Parameters
    ----------
    scheduled : ScheduledModel
        ``mod`` holds Relax ``main`` at the level of ``call_tir`` and every kernel. Attributes read:
        ``tir_var_upper_bound`` of ``main`` (symbol name → largest value), and of a PrimFunc
        ``apq.work`` (`apq_tvm.codegen.graph.work`), ``apq.layer``, ``apq.ids_arg``, ``apq.id_rows``
        (`apq_tvm.codegen.graph.read_relax`).
    output : Path
        The folder; its name is the module's name.
    manifest_extra : mapping
        More entries for manifest.json, JSON values.
    alternatives : sequence of ScheduledModel
        The same model for devices of the same architecture with fewer features, the most preferred
        first: when it is loaded, the library chooses the first that the machine has the features
        for. Weights that lie in the same layout are stored once.
    tools : Toolchain, optional
        The C compiler; found by the profile's triple if it is not given.
    images : ImageCompiler, optional
        The compiler of a GPU's images; found by the profile if it is not given.
    force : bool
        Replace a module that is there.
    progress : Progress, optional

    Returns
    -------
    CompiledModule

    Raises
    ------
    UnsupportedModel
        The graph holds what cannot be emitted.
    BuildError
        TVM or the C compiler failed, or there is none.
    OutputExists, OutputFailed
        See `apq_tvm.codegen.package.folder`; the old output is intact.
    """
    watch = _Steps(progress or Silent())
    name = check_name(output)
    check_output(output, force)
    models, profile = (scheduled, *alternatives), _profile(scheduled)
    tools = tools or find_toolchain(profile.triple, exact=False)
    with (
        watch.progress.stage("emit", len(STEPS)),
        staged(output, force) as folder,
        tempfile.TemporaryDirectory(prefix="apq.") as scratch,
    ):
        watch.begin("graph")
        parts = [read(model, i, len(models)) for i, model in enumerate(models)]
        watch.begin("weights")
        merged, renamed = _merge_weights([part.graph for part in parts])
        weights = write_weights(folder / "weights.safetensors", merged)
        watch.begin("kernels")
        work, first = Path(scratch), parts[0].graph
        values = template_values(name, __version__, first, tools.link_libraries)
        sources = _write_sources(work, name, values, parts, weights, renamed)
        with compile_sources(tools, sources, work) as compiled:
            builders = [_builder(part, tools, images) for part in parts]
            kernels = [path for build in builders for path in build(work)]
            check_kernels(tools, kernels)
            watch.begin("library")
            link_library(tools, name, [*compiled(), *kernels], work, folder)
        watch.begin("package")
        write_package(folder, name, values, profile.gpu is not None, first.kept is not None)
        manifest = _manifest(name, parts, weights, merged, profile, tools) | dict(manifest_extra)
        manifest["timings"] = {**manifest_extra.get("timings", {}), **watch.seconds()}
        _write_manifest(folder, manifest)
    return CompiledModule(path=output, manifest=manifest)


def _write_manifest(folder: Path, manifest: Mapping[str, Any]) -> None:
    text = json.dumps(manifest, indent=1, ensure_ascii=False) + "\n"
    (folder / "manifest.json").write_text(text, encoding="utf-8")


class _Steps:
    """What `emit` is at, and how long each step and all of them took."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self._times = [time.perf_counter()]
        self._names: list[str] = []

    def begin(self, name: str) -> None:
        """The next of `STEPS`."""
        self.progress.advance(name)
        self._names.append(name)
        if len(self._names) > 1:
            self._times.append(time.perf_counter())

    def seconds(self) -> dict[str, float]:
        """``emit``, and ``emit.kernels`` and so on."""
        times = [*self._times, time.perf_counter()]
        spans = zip(self._names, times, times[1:], strict=False)
        steps = {f"emit.{name}": round(end - begin, 3) for name, begin, end in spans}
        return {"emit": round(times[-1] - times[0], 3), **steps}


def _profile(scheduled: ScheduledModel) -> DeviceProfile:
    return scheduled.lowered.packed.plan.profile


@dataclass(frozen=True)
class _Part:
    """A model on one device: its graph and its kernels, not built yet."""

    device: Device
    graph: Graph
    mod: Any
    target: Any
    profile: DeviceProfile


def _builder(
    part: _Part, tools: Toolchain, images: ImageCompiler | None
) -> Callable[[Path], list[Path]]:
    """What builds a part's kernels in a folder and gives their object files.

    What they are called with was checked with the graph.
    """
    names, device = part.graph.kernels(), part.device
    if part.profile.gpu is None:
        return lambda work: build_kernels(
            part.mod, names, part.target, work, device.prefix, checked=False, in_module=True
        )
    gpu, compiler = part.profile.gpu, images or find_compiler(part.profile.gpu)
    return lambda work: build_device(
        part.mod, names, part.target, gpu, compiler, tools, work, device.code, device.prefix
    )


def read(scheduled: ScheduledModel, number: int = 0, count: int = 1) -> _Part:
    """What `emit` does first: the graph as C knows it. Nothing is built yet.

    Parameters
    ----------
    scheduled : ScheduledModel
    number, count : int
        Which of how many devices it is for.

    Raises
    ------
    UnsupportedModel
        The graph holds what cannot be emitted.
    """
    lowered, profile = scheduled.lowered, _profile(scheduled)
    model = lowered.packed.plan.quantized.model
    mod = prepare(scheduled.mod, lowered.mod)
    graph = read_graph(
        mod, model.inputs, model.outputs, lowered.params, lowered.variants, lowered.mod
    )
    share_kernels(graph, mod)
    target = tvm.target.Target(dict(profile.target))
    prefix = f"d{number}_" if count > 1 else ""
    if model.state is not None:
        add_session(graph, model.state)
    if profile.gpu is not None:
        fit_gpu(graph, profile.name)
        device = Device(profile.name, (), number, prefix, runtime="cuda")
        return _Part(device, graph, mod, target, profile)
    cut_along(graph, model.batch)
    graph.stages = find_stages(graph)
    flags, l2 = cpu_flags(target), profile.l2_bytes
    near = min(NEAR_CACHES * l2, max(l2, NEAR_BYTES))
    return _Part(Device(profile.name, flags, number, prefix, near), graph, mod, target, profile)


def _write_sources(
    folder: Path,
    name: str,
    values: Mapping[str, str],
    parts: Sequence[_Part],
    weights: WeightsFile,
    renamed: Sequence[Mapping[str, str]],
) -> list[Path]:
    """The module's own C sources, and the runtime's, which are compiled where they lie."""
    (folder / f"{name}.h").write_text(fill("module.h.in", values))
    tables = {"TABLES": tables_source([part.device for part in parts])}
    sources = [folder / "api.c"]
    sources[0].write_text(fill("api.c.in", {**values, **tables}))
    for part, names in zip(parts, renamed, strict=True):
        mine = replace(weights, offsets={n: weights.offsets[u] for n, u in names.items()})
        sources.append(folder / f"graph_{part.device.number}.c")
        source = graph_source(name, __version__, part.graph, mine, part.device)
        sources[-1].write_text(source)
    return [*sources, *runtime_sources(parts[0].device.runtime)]


def _merge_weights(graphs: Sequence[Graph]) -> tuple[dict[str, Array], list[dict[str, str]]]:
    """All weights, each content once, and how each graph's names are spelled among them."""
    merged: dict[str, Array] = {}
    renamed = []
    for number, graph in enumerate(graphs):
        names = {}
        for name, array in graph.weights.items():
            there = merged.get(name)
            same = there is None or (
                there.dtype == array.dtype
                and there.shape == array.shape
                and there.tobytes() == array.tobytes()
            )
            names[name] = name if same else f"{name}@{number}"
            merged.setdefault(names[name], array)
        renamed.append(names)
    return merged, renamed


def _manifest(
    name: str,
    parts: Sequence[_Part],
    weights: WeightsFile,
    arrays: Mapping[str, Array],
    profile: DeviceProfile,
    tools: Toolchain,
) -> dict[str, Any]:
    graph = parts[0].graph
    return {
        "format": MANIFEST_FORMAT,
        "name": name,
        "versions": {"apq_tvm": __version__, "tvm": tvm.__version__, "cc": tools.version},
        "inputs": port_entries(graph.inputs),
        "outputs": port_entries(graph.outputs),
        "precisions": {p.layer: [p.least, p.most] for p in graph.precisions},
        "limits": {s.name: s.limit for s in graph.symbols if s.limit is not None},
        "least": {s.name: s.least for s in graph.symbols if s.least is not None},
        "tvm_target": dict(profile.target),
        "library": {
            "name": name,
            "system": tools.system,
            "machine": tools.arch,
            "triple": tools.machine,
            "libc": tools.libc,
            "cpu_flags": list(parts[-1].device.cpu_flags),
            "devices": {p.device.target: list(p.device.cpu_flags) for p in parts},
            "threads": "the library's own; OpenMP's by APQ_THREADS=openmp",
            "gpu": asdict(profile.gpu) if profile.gpu else None,
        },
        "weights": {
            "file": "weights.safetensors",
            "bytes": total_weight_bytes(arrays),
            "file_bytes": weights.file_bytes,
            "checksum": f"{weights.data_checksum:016x}",
        },
        "graph": {
            "calls": len(graph.calls),
            "buffers": sum(b.first >= 0 and b.output is None for b in graph.buffers),
            "kernels": graph.kernels(),
            "stages": len(graph.stages),
        },
    }
