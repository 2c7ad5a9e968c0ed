"""Kernels for 64-bit Arm without hardware: instructions under qemu, cycles by llvm-mca.

A kernel is compiled as the pipeline would, and called once on real weights and activations under
qemu-user, which counts every instruction of the call. What the kernel executed is then split into
straight pieces of code (`apq_tvm.bench.arm.loops`): the body of each innermost loop, what is
left of the loop around it, and so on. llvm-mca gives the cycles of one execution of each piece when
it is repeated without end; times its executions, they add up to the cycles of the call. So loads
hit the level-1 cache, branches are predicted, and pieces do not overlap each other.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from apq_tvm.bench.arm.cost import Cost, judge
from apq_tvm.bench.arm.ggml import Product, call, find_products
from apq_tvm.bench.arm.layer import StaticLayer, emulated_cpu
from apq_tvm.bench.arm.mca import Analyser, assembly, find_analyser
from apq_tvm.bench.linear import LinearCase
from apq_tvm.bench.trace import check_tools
from apq_tvm.errors import BadTarget
from apq_tvm.formats import parse_at
from apq_tvm.progress import Progress, Silent
from apq_tvm.types import AnyPath, DeviceProfile


def bench_static(
    cases: Sequence[LinearCase],
    *,
    target: str,
    layout: str = "",
    against: Sequence[str] = (),
    keep: AnyPath | None = None,
    mca: str = "",
    progress: Progress | None = None,
) -> list[dict[str, Any]]:
    """Judge the kernels of layers for a core that is not here.

    Parameters
    ----------
    cases : sequence of LinearCase
        Threads and cold do not matter.
    target : str
        A 64-bit Arm device.
    layout : str
        Of integer weights, if not the device's own (`apq_tvm.schedules.arm.layouts`).
    against : sequence of str
        ``FILE[:symbol]``: libraries of ggml whose products are judged beside ours.
    keep : str or path, optional
        Folder for the assembly that was judged, one file per kernel and M: it is input of llvm-mca.
    mca : str
        llvm-mca, if not the usual one.
    progress : Progress, optional

    Returns
    -------
    list of dict
        One per case, each followed by its rivals: ``shape, m, scheme, kernel, object, instructions,
        cycles, macs_per_cycle, peak_share, peak_instruction, loop_cycles, loop_count,
        loop_instructions, loop_share, loop_peak_share, judged_share, prepare_instructions,
        prepare_cycles, error, target, model``.

        `cycles` are of the whole call, ``loop_*`` of the piece of code that takes most of them (per
        execution), ``prepare_*`` of the activations' preparation before it. `judged_share` is the
        share of instructions that cycles are known of, `model` whose scheduling model LLVM has for
        the core. `peak_share` compares with int8 multiply-adds by the best instruction for them
        that the kernel uses (the core's best, if none), and a single row with sdot where that is
        smmla, which multiplies two; `loop_peak_share` does so for the loop alone, by its share of
        these instructions. A rival's `object` is its file,
        ``instructions_ratio`` and ``cycles_ratio`` are ours over its.

    Raises
    ------
    ApqError
        A scheme or target is unknown, or qemu, the cross compiler or llvm-mca is missing.
    """
    progress = progress or Silent()
    profile = judged_profile(target, layout)
    check_tools()
    analyser = find_analyser(str(profile.target["mcpu"]), mca)
    rivals = {c: _rivals(against, c.scheme) for c in cases}  # errors before minutes of work
    shared = {"target": profile.name, "model": analyser.model()}
    keep = Path(keep) if keep is not None else None
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    with progress.stage("static", len(cases)):
        for (n, k, scheme, _), group in groupby(cases, key=lambda c: c.compiled):
            with tempfile.TemporaryDirectory(prefix="apq-static-") as name:
                folder = Path(name)
                layer = StaticLayer(n, k, scheme, profile, analyser, folder)
                for case in group:
                    progress.advance(f"{case.shape} {case.scheme} M={case.m}")
                    ours = _our_row(case, layer, profile, keep)
                    theirs = [
                        _rival_row(case, product, analyser, profile, folder, keep)
                        for product in rivals[case]
                    ]
                    best = [row for row in theirs if not row.pop("fallback")] or theirs
                    for row in best:
                        for key in ("instructions", "cycles"):
                            row[f"{key}_ratio"] = ours[key] / row[key]
                    rows += [row | shared for row in (ours, *best)]
    return rows


def judged_profile(target: str, layout: str = "") -> DeviceProfile:
    """The device called `target`, if code for it can be judged here, with a layout of weights.

    Raises
    ------
    BadTarget
        It is unknown, not 64-bit Arm, or no single core, or has no such layout.
    """
    from apq_tvm.schedules.devices import PROFILES, find_profile

    profile = find_profile(target, layout=layout)
    if profile.arch != "aarch64":
        raise BadTarget(f"bench static judges 64-bit Arm; on {profile.name} use bench linear")
    if not profile.macs_per_cycle:
        cores = ", ".join(p.name for p in PROFILES if p.arch == "aarch64" and p.macs_per_cycle)
        raise BadTarget(f"{target} is for many cores; judge its kernels on one of {cores}")
    return profile


def _rivals(against: Sequence[str], scheme: str) -> list[Product]:
    return [p for text in against for p in find_products(text, parse_at(scheme)[0])]


def _our_row(
    case: LinearCase, layer: StaticLayer, profile: DeviceProfile, keep: Path | None
) -> dict[str, Any]:
    name = layer.kernel(case.m, case.bits).kernel
    cost, prepared, error = layer.run(name, case.m, case.bits)
    return {
        **_figures(case, name, cost, prepared, error, profile, keep),
        "object": "",
    }


def _rival_row(
    case: LinearCase,
    product: Product,
    analyser: Analyser,
    profile: DeviceProfile,
    folder: Path,
    keep: Path | None,
) -> dict[str, Any]:
    name = product.symbol("gemv" if case.m < 4 else "gemm")
    cpu = emulated_cpu(profile)
    ran, prepared, error = call(product, case.n, case.k, case.m, folder, cpu)
    cost, before = (judge(r.counted.instructions, r.code, analyser) for r in (ran, prepared))
    return {
        **_figures(case, name, cost, before, error, profile, keep),
        "object": product.library.name,
        "fallback": ran.fallback,
    }


def _figures(
    case: LinearCase,
    name: str,
    cost: Cost,
    prepared: Cost | None,
    error: float,
    profile: DeviceProfile,
    keep: Path | None,
) -> dict[str, Any]:
    """What rows of ours and of rivals have in common; keeps the assembly."""
    if keep is not None:
        file = keep / f"{name}_{case.shape}_{case.scheme}_m{case.m}.s".replace("*", "s")
        file.write_text(assembly(cost.judged, cost.each))
    return {
        "shape": case.shape,
        "m": case.m,
        "scheme": case.scheme,
        "kernel": name,
        **cost.figures(case.m, case.n * case.k, profile),
        "prepare_instructions": prepared.instructions if prepared else 0,
        "prepare_cycles": prepared.cycles if prepared else 0.0,
        "error": error,
    }
