"""One quantized layer, compiled as the pipeline would, whose kernels can be called under qemu."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from apq_tvm.bench.arm.cost import Cost, judge
from apq_tvm.bench.arm.mca import Analyser
from apq_tvm.bench.linear import write_model
from apq_tvm.bench.trace import executed
from apq_tvm.formats import dequantize
from apq_tvm.progress import Silent
from apq_tvm.types import Array, DeviceProfile, KernelChoice

if TYPE_CHECKING:
    from apq_tvm.bench.emulator import Program
    from apq_tvm.schedules.linear.kernel import Preparation

SVE_VECTORS = {"neoverse-v1": 2}
"""Length of an SVE vector of a core in 16 bytes, where it is not 1."""


def emulated_cpu(profile: DeviceProfile) -> str:
    """What qemu is to be: everything it has, with SVE vectors as long as the core's, if any.

    The C library chooses its functions by what it finds.
    """
    if "sve" not in profile.features:
        return "max,sve=off"
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
        plan = pipeline.plan(
            model,
            target=profile.name,
            scheme=scheme,
            search=False,
            layout=profile.interleaving,
        )
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
        from apq_tvm.schedules.graph.rewrites.lets import spill_lets
        from apq_tvm.select import by_name

        spec, profile = self._spec, self._profile
        kernel = by_name(linear_kernels(profile))[name]
        x = np.random.default_rng(m).standard_normal((m, spec.k)).astype(np.float32)
        operands: list[Array] = [x]
        prepared = None
        choice = kernel.choose(spec, profile, Defaults())
        preparation = kernel.prepare(choice)
        if preparation is not None:
            weights = [self._packed[array] for array in preparation.weights]
            operands = outputs(preparation.func, 1 + len(weights), m)
            program = self._program(preparation.key, lambda: self._prepare(preparation))
            prepared = self._cost(program, [x, *weights], operands)
        program = self._program(name, lambda: spill_lets(kernel.scheduled(choice)))
        y = np.zeros((m, spec.n), np.float32)
        cost = self._cost(program, [*operands, *self._packed.values()], [y])
        return cost, prepared, relative_error(y, x, self._dense(bits))[0]

    def _prepare(self, preparation: Preparation) -> Any:
        from apq_tvm.schedules.decide import Defaults
        from apq_tvm.schedules.graph.rewrites.lets import spill_lets
        from apq_tvm.schedules.graph.rules import schedule_preparation

        func = preparation.func
        return spill_lets(schedule_preparation(preparation, func, self._profile, Defaults())[0])

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

    Their first axes depend on M alone, as `apq_tvm.lower.operators.linear` has it.
    """
    from tvm import sym, tirx

    from apq_tvm.schedules.graph.exprs import substitute

    rows, simplify = func.params[0].shape[0], sym.Analyzer().simplify
    made = []
    for buffer in func.params[inputs:]:
        first = simplify(substitute(buffer.shape[0], rows, tirx.const(m, "int64")))
        made.append(np.zeros((int(first), *map(int, buffer.shape[1:])), str(buffer.dtype)))
    return made


def _frozen(array: Array) -> Array:
    """A view that is not written back after a call."""
    view = np.ascontiguousarray(array).view()
    view.flags.writeable = False
    return view
