"""The last stage: a scheduled module becomes a folder that is a Python package and a C library."""

from __future__ import annotations

import json
import platform
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tvm

from apq_tvm import __version__
from apq_tvm.codegen.graph import Graph, total_weight_bytes
from apq_tvm.codegen.graph_c import WeightsFile, graph_source
from apq_tvm.codegen.kernels import build_kernels, cpu_flags
from apq_tvm.codegen.library import (
    Toolchain,
    check_kernels,
    compile_sources,
    find_toolchain,
    link_library,
)
from apq_tvm.codegen.package import (
    MANIFEST_FORMAT,
    RUNTIME,
    check_name,
    check_output,
    fill,
    port_entries,
    staged,
    template_values,
    write_package,
)
from apq_tvm.codegen.read_relax import prepare, read_graph
from apq_tvm.codegen.weights import write_weights
from apq_tvm.progress import Progress, Silent
from apq_tvm.types import CompiledModule, DeviceProfile, ScheduledModel

STEPS = ("graph", "weights", "kernels", "library", "package")


def emit(
    scheduled: ScheduledModel,
    output: Path,
    manifest_extra: Mapping[str, Any],
    *,
    force: bool = False,
    progress: Progress | None = None,
) -> CompiledModule:
    """Write a module's folder.

    Parameters
    ----------
    scheduled : ScheduledModel
        ``mod`` holds Relax ``main`` at the level of ``call_tir`` and every kernel. Attributes read:
        ``tir_var_upper_bound`` of ``main`` (symbol name → largest value), and of a PrimFunc
        ``apq.work`` (`apq_tvm.codegen.work`), ``apq.layer``, ``apq.ids_arg``, ``apq.id_rows``
        (`apq_tvm.codegen.read_relax`).
    output : Path
        The folder; its name is the module's name.
    manifest_extra : mapping
        More entries for manifest.json, JSON values.
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
        See `apq_tvm.codegen.package`; the old output is intact.
    """
    progress = progress or Silent()
    started = time.perf_counter()
    name = check_name(output)
    check_output(output, force)
    tools = find_toolchain()
    profile = scheduled.lowered.packed.plan.profile
    target = tvm.target.Target(dict(profile.target))
    lowered = scheduled.lowered
    model = lowered.packed.plan.quantized.model
    with (
        progress.stage("emit", len(STEPS)),
        staged(output, force) as folder,
        tempfile.TemporaryDirectory(prefix="apq.") as scratch,
    ):
        progress.advance("graph")
        mod = prepare(scheduled.mod, lowered.mod)
        graph = read_graph(
            mod, model.inputs, model.outputs, lowered.params, lowered.variants, lowered.mod
        )
        progress.advance("weights")
        weights = write_weights(folder / "weights.safetensors", graph.weights)
        progress.advance("kernels")
        flags, work = cpu_flags(target), Path(scratch)
        compiled = compile_sources(tools, _write_sources(work, name, graph, weights, flags), work)
        kernels = build_kernels(mod, graph.kernels(), target, work)
        check_kernels(tools, kernels)
        progress.advance("library")
        link_library(tools, name, [*compiled(), *kernels], work, folder)
        progress.advance("package")
        write_package(folder, name, __version__, graph)
        manifest = {
            **_manifest(name, graph, weights, profile, flags, tools),
            "schedules": dict(scheduled.schedules),
            **manifest_extra,
        }
        seconds = round(time.perf_counter() - started, 3)
        manifest["timings"] = {**manifest_extra.get("timings", {}), "emit": seconds}
        text = json.dumps(manifest, indent=1, ensure_ascii=False) + "\n"
        (folder / "manifest.json").write_text(text, encoding="utf-8")
    return CompiledModule(path=output, manifest=manifest)


def _write_sources(
    scratch: Path, name: str, graph: Graph, weights: WeightsFile, flags: tuple[str, ...]
) -> list[Path]:
    values = template_values(name, __version__, graph)
    api, emitted = scratch / "api.c", scratch / "graph.c"
    (scratch / f"{name}.h").write_text(fill("module.h.in", values))
    api.write_text(fill("api.c.in", values))
    emitted.write_text(graph_source(name, __version__, graph, weights, flags))
    return [api, emitted, *sorted(RUNTIME.glob("*.c"))]


def _manifest(
    name: str,
    graph: Graph,
    weights: WeightsFile,
    profile: DeviceProfile,
    flags: tuple[str, ...],
    tools: Toolchain,
) -> dict[str, Any]:
    return {
        "format": MANIFEST_FORMAT,
        "name": name,
        "versions": {"apq_tvm": __version__, "tvm": tvm.__version__, "cc": tools.version},
        "inputs": port_entries(graph.inputs),
        "outputs": port_entries(graph.outputs),
        "precisions": {p.layer: [p.least, p.most] for p in graph.precisions},
        "limits": {s.name: s.limit for s in graph.symbols if s.limit is not None},
        "tvm_target": dict(profile.target),
        "library": {
            "name": name,
            "system": sys.platform,
            "machine": platform.machine(),
            "cpu_flags": list(flags),
            "threads": "OpenMP, looked up at run time; one thread without it",
        },
        "weights": {
            "file": "weights.safetensors",
            "bytes": total_weight_bytes(graph.weights),
            "file_bytes": weights.file_bytes,
            "checksum": f"{weights.data_checksum:016x}",
        },
        "graph": {
            "calls": len(graph.calls),
            "buffers": sum(b.first >= 0 and b.output is None for b in graph.buffers),
            "kernels": graph.kernels(),
        },
    }
