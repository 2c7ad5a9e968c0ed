"""Kernels for 64-bit Arm without hardware: instructions under qemu, cycles by llvm-mca.

A kernel is compiled as the pipeline would, and called once on real weights and activations under
qemu-user, which counts every instruction of the call. What the kernel executed is then split into
straight pieces of code (`apq_tvm.bench.static_loops`): the body of each innermost loop, what is
left of the loop around it, and so on. llvm-mca gives the cycles of one execution of each piece when
it is repeated without end; times its executions, they add up to the cycles of the call. So loads
hit the level-1 cache, branches are predicted, and pieces do not overlap each other.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from apq_tvm.bench.linear import LinearCase, write_model
from apq_tvm.bench.static_ggml import Product, call, find_products
from apq_tvm.bench.static_loops import DOT, Body, bodies
from apq_tvm.bench.static_mca import Analyser, assembly, find_analyser
from apq_tvm.bench.trace import Instruction, check_tools, executed
from apq_tvm.errors import BadTarget
from apq_tvm.formats import dequantize, parse_at
from apq_tvm.progress import Progress, Silent
from apq_tvm.types import Array, DeviceProfile, KernelChoice

if TYPE_CHECKING:
    from apq_tvm.bench.emulator import Program
    from apq_tvm.schedules.linear_kernel import LinearKernel

SVE_VECTORS = {"neoverse-v1": 2}
"""Length of an SVE vector of a core in 16 bytes, where it is not 1."""


@dataclass(frozen=True)
class Cost:
    """What one call of a function costs.

    Parameters
    ----------
    instructions : int
        Executed by the whole call, with the library functions it calls.
    judged : tuple of Body
        The function's own code.
    each : tuple of float
        Cycles of one execution of every body.
    """

    instructions: int
    judged: tuple[Body, ...]
    each: tuple[float, ...]

    @property
    def cycles(self) -> float:
        """Of all bodies."""
        return sum(b.count * c for b, c in zip(self.judged, self.each, strict=True))

    @property
    def hottest(self) -> int:
        """Index of the body that takes most cycles."""
        spent = [b.count * c for b, c in zip(self.judged, self.each, strict=True)]
        return spent.index(max(spent))

    def uses(self, names: Sequence[str]) -> int:
        """Executed instructions with one of these mnemonics."""
        return sum(b.count * b.uses(names) for b in self.judged)

    def figures(self, macs: int, profile: DeviceProfile) -> dict[str, Any]:
        """Entries of a row of `bench_static`, for a call that is `macs` multiply-adds."""
        used = [name for name, family in DOT.items() if self.uses(family)]
        peaks = {n: p for n, p in profile.macs_per_cycle.items() if n in used}
        peaks = peaks or dict(profile.macs_per_cycle)
        best = max(peaks, key=lambda name: peaks[name])
        rate = macs / self.cycles
        hot = self.judged[self.hottest]
        return {
            "instructions": self.instructions,
            "cycles": self.cycles,
            "macs_per_cycle": rate,
            "peak_share": rate / peaks[best],
            "peak_instruction": best,
            "loop_cycles": self.each[self.hottest],
            "loop_count": hot.count,
            "loop_instructions": len(hot.instructions),
            "loop_share": hot.count * self.each[self.hottest] / self.cycles,
            "judged_share": sum(b.count * len(b.instructions) for b in self.judged)
            / self.instructions,
        }


def judge(instructions: int, code: Sequence[Instruction], analyser: Analyser) -> Cost:
    """Cost of a call that executed `instructions` in all, `code` of them its own."""
    judged = tuple(bodies(code))
    return Cost(instructions, judged, tuple(analyser.cycles(judged)))


def emulated_cpu(profile: DeviceProfile) -> str:
    """What qemu is to be: everything it has, with SVE vectors as long as the core's."""
    return f"max,sve-max-vq={SVE_VECTORS.get(str(profile.target['mcpu']), 1)}"


class StaticLayer:
    """One quantized layer whose kernels can be called under qemu.

    Parameters
    ----------
    n, k : int
    scheme : str
    profile : DeviceProfile
    analyser : Analyser
    folder : Path
        For the model and the programs.
    """

    def __init__(
        self, n: int, k: int, scheme: str, profile: DeviceProfile, analyser: Analyser, folder: Path
    ) -> None:
        from apq_tvm import pipeline
        from apq_tvm.pack import pack
        from apq_tvm.select import linear_spec

        self._profile, self._analyser, self._folder = profile, analyser, folder
        weight = np.random.default_rng(n + k).standard_normal((n, k)).astype(np.float32)
        model = folder / "linear.onnx"
        write_model(model, weight)
        plan = pipeline.plan(model, target=profile.name, scheme=scheme, search=False)
        (node,) = (node for node in plan.quantized.model.nodes if node.op == "apq.Linear")
        self._spec = linear_spec(plan.quantized, node)
        self._weight = weight
        self._tensor = plan.quantized.tensors.get(plan.quantized.layers.get(node.name, ""))
        self._packed = pack(plan, Silent()).tensors[node.name].arrays
        self._choices = plan.choices[node.name]
        self._programs: dict[str, Program] = {}

    def kernel(self, m: int, bits: int) -> KernelChoice:
        """Which kernel serves `m` rows with so many bits; 0 is the widest."""
        width = bits if bits else max(choice.width for choice in self._choices)
        return next(
            choice
            for choice in self._choices
            if choice.width == width
            and choice.m_min <= m
            and (choice.m_max < 0 or m <= choice.m_max)
        )

    def run(self, name: str, m: int, bits: int) -> tuple[Cost, Cost | None, float]:
        """Call a kernel on `m` rows.

        Returns
        -------
        Cost, Cost or None, float
            Of the kernel and of the preparation of its activations, and the mean error of the
            result against the exact product with the codes' own weights, relative to its root mean
            square.
        """
        from apq_tvm.bench.rivals import relative_error
        from apq_tvm.schedules.decide import Defaults
        from apq_tvm.schedules.devices import linear_kernels
        from apq_tvm.select import by_name

        spec, profile = self._spec, self._profile
        kernel = by_name(linear_kernels(profile))[name]
        x = np.random.default_rng(m).standard_normal((m, spec.k)).astype(np.float32)
        operands: list[Array] = [x]
        prepared = None
        preparation = kernel.prepare(spec, profile, Defaults())
        if preparation is not None:
            weights = [self._packed[array] for array in preparation.weights]
            operands = outputs(preparation.func, 1 + len(weights), m)
            program = self._program(preparation.key, lambda: self._prepare(preparation.func))
            prepared = self._cost(program, [x, *weights], operands)
        program = self._program(name, lambda: self._schedule(kernel))
        y = np.zeros((m, spec.n), np.float32)
        cost = self._cost(program, [*operands, *self._packed.values()], [y])
        return cost, prepared, relative_error(y, x, self._dense(bits))[0]

    def _prepare(self, func: Any) -> Any:
        from apq_tvm.schedules.decide import Defaults
        from apq_tvm.schedules.lets import spill_lets
        from apq_tvm.schedules.rules import schedule_function

        return spill_lets(schedule_function(func, self._profile, Defaults())[0])

    def _schedule(self, kernel: LinearKernel) -> Any:
        import tvm

        from apq_tvm.schedules.decide import Defaults
        from apq_tvm.schedules.lets import spill_lets

        sch = tvm.s_tir.Schedule(kernel.func(self._spec, self._profile, Defaults()))
        kernel.schedule(sch, self._spec, self._profile, Defaults())
        return spill_lets(sch.mod["main"])

    def _dense(self, bits: int) -> NDArray[np.float64]:
        """What the codes mean."""
        dense = dequantize(self._tensor, bits) if self._tensor else self._weight
        return dense.astype(np.float64)

    def _program(self, key: str, func: Callable[[], Any]) -> Program:
        """The program of a kernel or preparation, built once for all M."""
        import tvm

        from apq_tvm.bench.emulator import Program

        if key not in self._programs:
            folder = self._folder / f"program{len(self._programs)}"
            folder.mkdir()
            with tvm.target.Target(dict(self._profile.target)):
                scheduled = func()
            cpu = emulated_cpu(self._profile)
            self._programs[key] = Program(scheduled, self._profile, folder, cpu)
        return self._programs[key]

    def _cost(self, program: Program, reads: Sequence[Array], writes: Sequence[Array]) -> Cost:
        counted = program.trace(*map(_frozen, reads), *writes)
        code = executed(program.path, program.functions(), counted)
        return judge(counted.instructions, code, self._analyser)


def outputs(func: Any, inputs: int, m: int) -> list[Array]:
    """Zeroed arrays for what a preparation writes for `m` rows: its parameters after `inputs`.

    All of them have M rows, as `apq_tvm.lower.linear` has it.
    """
    return [
        np.zeros((m, *map(int, buffer.shape[1:])), str(buffer.dtype))
        for buffer in func.params[inputs:]
    ]


def _frozen(array: Array) -> Array:
    """A view that is not written back after a call."""
    view = np.ascontiguousarray(array).view()
    view.flags.writeable = False
    return view


def bench_static(
    cases: Sequence[LinearCase],
    *,
    target: str,
    against: Sequence[str] = (),
    keep: Path | None = None,
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
    against : sequence of str
        ``FILE[:symbol]``: libraries of ggml whose products are judged beside ours.
    keep : Path, optional
        Folder for the assembly that was judged, one file per kernel and M: it is input of llvm-mca.
    mca : str
        llvm-mca, if not the usual one.
    progress : Progress, optional

    Returns
    -------
    list of dict
        One per case, each followed by its rivals: ``shape, m, scheme, kernel, object, instructions,
        cycles, macs_per_cycle, peak_share, peak_instruction, loop_cycles, loop_count,
        loop_instructions, loop_share, judged_share, prepare_instructions, prepare_cycles, error,
        target, model``. `cycles` are of the whole call, ``loop_*`` of the piece of code that takes
        most of them (per execution), ``prepare_*`` of the activations' preparation before it;
        `judged_share` is the share of instructions that cycles are known of; `model` is whose
        scheduling model LLVM has for the core; `peak_share` compares with int8 multiply-adds by the
        best instruction for them that the kernel uses. A rival's `object` is its file, and
        ``instructions_ratio`` and ``cycles_ratio`` are ours over its.

    Raises
    ------
    ApqError
        A scheme or target is unknown, or qemu, the cross compiler or llvm-mca is missing.
    """
    from apq_tvm.schedules.devices import PROFILES, find_profile

    progress = progress or Silent()
    profile = find_profile(target)
    if profile.arch != "aarch64":
        raise BadTarget(f"bench static judges 64-bit Arm; on {profile.name} use bench linear")
    if not profile.macs_per_cycle:
        cores = ", ".join(p.name for p in PROFILES if p.arch == "aarch64" and p.macs_per_cycle)
        raise BadTarget(f"{target} is for many cores; judge its kernels on one of {cores}")
    check_tools()
    analyser = find_analyser(str(profile.target["mcpu"]), mca)
    rivals = {c: _rivals(against, c.scheme) for c in cases}  # errors before minutes of work
    shared = {"target": profile.name, "model": analyser.model()}
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
        **cost.figures(case.m * case.n * case.k, profile),
        "prepare_instructions": prepared.instructions if prepared else 0,
        "prepare_cycles": prepared.cycles if prepared else 0.0,
        "error": error,
    }
