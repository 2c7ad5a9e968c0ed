"""One linear layer of a GPU by its shape alone: kernels as the pipeline makes them, few weights.

Kernels know a layer by its shape and format (`apq_tvm.ops.linear.spec.LinearSpec`), so that nobody
has to quantize a matrix of 28672 x 8192 to judge or to time one. `TILE_ROWS` rows are quantized; a
layer's weights are blocks of them, and what it computes is known by them, too.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from apq_tvm.bench.linear import write_model
from apq_tvm.errors import BadInput
from apq_tvm.progress import Silent
from apq_tvm.types import Array, DeviceProfile, KernelChoice

if TYPE_CHECKING:
    from apq_tvm.bench.gpu.launches import Launch
    from apq_tvm.codegen.cuda.split import DeviceCode
    from apq_tvm.schedules.decide import Decide
    from apq_tvm.schedules.linear.kernel import LinearKernel

TILE_ROWS = 192
"""Rows that are quantized: whole blocks of every layout, of 12, 16 or 64 rows."""


class GpuLayer:
    """A layer y[M, N] = x[M, K] W[N, K]ᵀ, compiled for a GPU as far as CUDA source.

    Parameters
    ----------
    n, k : int
    scheme : str
        Without ``@``.
    profile : DeviceProfile
        Of one GPU.
    decide : callable, optional
        Name of a kernel or preparation → who answers for it; defaults if not given.

    Attributes
    ----------
    packed : dict of str to ndarray
        Packed arrays of a matrix [`TILE_ROWS`, K].
    code : DeviceCode
        Kernels of all ranges of M, and what they want done to x.
    """

    def __init__(
        self,
        n: int,
        k: int,
        scheme: str,
        profile: DeviceProfile,
        decide: Callable[[str], Decide] | None = None,
    ) -> None:
        from apq_tvm import pipeline
        from apq_tvm.pack import pack
        from apq_tvm.schedules.devices import linear_kernels
        from apq_tvm.select import by_name, choose, linear_spec

        self.n, self.k, self.profile = n, k, profile
        self._decide = decide or pipeline.default_decisions
        rng = np.random.default_rng(k)
        self._float = rng.standard_normal((TILE_ROWS, k)).astype(np.float32)
        with tempfile.TemporaryDirectory(prefix="apq-layer-") as folder:
            model = Path(folder) / "linear.onnx"
            write_model(model, self._float)
            plan = pipeline.plan(model, target=profile.name, scheme=scheme, search=False)
        (node,) = (node for node in plan.quantized.model.nodes if node.op == "apq.Linear")
        self.tensor = plan.quantized.tensors.get(plan.quantized.layers.get(node.name, ""))
        self.spec = replace(linear_spec(plan.quantized, node), n=n)
        kernels = linear_kernels(profile)
        self.choices = choose(self.spec, kernels, profile, "the layer")
        if self.choices[0].layout != plan.choices[node.name][0].layout:
            raise BadInput(
                f"{n}x{k} {scheme}: fewer rows of weights lie otherwise than all of them"
            )
        self.packed: Mapping[str, Array] = pack(plan, Silent()).tensors[node.name].arrays
        self._kernels = by_name(kernels)
        self._build()

    def _build(self) -> None:
        import tvm

        from apq_tvm.codegen.cuda.split import split
        from apq_tvm.schedules.graph.rules import schedule_preparation

        self._target = tvm.target.Target(dict(self.profile.target))
        self.functions: dict[str, Any] = {}
        self._arrays: dict[str, list[str]] = {}
        self._first: dict[str, str] = {}
        with self._target:
            for name in dict.fromkeys(choice.kernel for choice in self.choices):
                kernel = self._kernels[name]
                decide = self._decide(name)
                choice = kernel.choose(self.spec, self.profile, decide)
                read, preparation = ["x"], kernel.prepare(choice)
                if preparation is not None:
                    decide = self._decide(preparation.key)
                    unscheduled = replace(preparation, decide=decide).func
                    func, _ = schedule_preparation(preparation, unscheduled, self.profile, decide)
                    given = ["x", *preparation.weights]
                    read = [f"x{i}" for i in range(len(func.params) - len(given))]
                    self._add(preparation.key, func, [*given, *read])
                    self._first[name] = preparation.key
                self._add(name, kernel.scheduled(choice), [*read, *self.packed, "y"])
            with tempfile.TemporaryDirectory(prefix="apq-layer-") as folder:
                self.code: DeviceCode = split(
                    self.module, list(self.functions), self._target, Path(folder)
                )[1]

    def decided(self, decide: Callable[[str], Decide]) -> GpuLayer:
        """The same layer, decided by others."""
        other = copy(self)
        other._decide = decide
        other._build()
        return other

    def kernel(self, name: str) -> LinearKernel:
        """One of the device's kernels."""
        return self._kernels[name]

    @property
    def stored_bits(self) -> float:
        """Bits that a code takes in memory, where the first kernel's layout has an array of codes;
        32 for floats."""
        kernel = self._kernels[self.choices[0].kernel]
        columns = kernel.layout(self.spec, self.profile).padded_k(self.k)
        codes = self.packed.get("codes")
        return 32.0 if codes is None else codes.nbytes * 8 / (TILE_ROWS * columns)

    @property
    def module(self) -> Any:
        """The IRModule of `functions`."""
        import tvm

        return tvm.IRModule({tvm.ir.GlobalVar(n): f for n, f in self.functions.items()})

    def _add(self, name: str, func: Any, arrays: list[str]) -> None:
        if len(func.params) != len(arrays):
            raise BadInput(f"{name} has {len(func.params)} operands, not {', '.join(arrays)}")
        self.functions[name], self._arrays[name] = func, arrays

    # ---- what runs for M rows ----

    def choice(self, m: int, bits: int = 0) -> KernelChoice:
        """Which kernel serves `m` rows, with so many bits where they are chosen at run time."""
        width = bits or max(choice.width for choice in self.choices)
        mine = [choice for choice in self.choices if choice.width == width]
        return next(c for c in mine if c.m_min <= m and not 0 <= c.m_max < m)

    def launches(self, m: int, bits: int = 0) -> tuple[tuple[Launch, ...], tuple[Launch, ...]]:
        """What is launched for `m` rows: on x, and then on the weights."""
        from apq_tvm.bench.gpu.launches import launches

        name = self.choice(m, bits).kernel
        first = self._first.get(name, "")
        funcs = {f: self.functions[f] for f in (first, name) if f}
        made = launches(funcs, self._arrays, self._target, m)
        return made.get(first, ()), made[name]

    def buffers(self, m: int, bits: int = 0) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape and dtype of every array of the launches for `m` rows, weights too."""
        from apq_tvm.bench.gpu.launches import shape_at

        name = self.choice(m, bits).kernel
        made = {}
        for function in filter(None, (self._first.get(name, ""), name)):
            params = self.functions[function].params
            rows = params[0].shape[0]
            for array, buffer in zip(self._arrays[function], params, strict=True):
                if array not in made:
                    made[array] = shape_at(buffer.shape, rows, m), str(buffer.dtype)
        return made

    def blocks(self) -> dict[str, tuple[int, int, int]]:
        """How the tile's packed arrays become those of all rows.

        Returns
        -------
        dict of str to (int, int, int)
            By array the axis along which blocks of rows lie, the rows of a block, and how many
            there are; ``(0, 0, 0)`` for what is the same for any number of rows.

        Raises
        ------
        BadInput
            An array is neither: only all weights tell it.
        """
        shapes = self.buffers(1)
        made = {name: (0, 0, 0) for name in self.packed}
        for name, tile in self.packed.items():
            whole = shapes[name][0]
            differ = [
                axis for axis, (a, b) in enumerate(zip(tile.shape, whole, strict=True)) if a != b
            ]
            if not differ:
                continue
            axis, *more = differ
            rows, rest = divmod(TILE_ROWS, tile.shape[axis])
            if more or rest or whole[axis] != -(-self.n // rows):
                raise BadInput(
                    f"{self.n}x{self.k} {self.spec.scheme}: {name} is {whole} for all rows of "
                    f"weights and {tile.shape} for {TILE_ROWS}: not made of blocks of rows"
                )
            made[name] = axis, rows, whole[axis]
        tall = max((rows for _, rows, _ in made.values()), default=0)
        assert all(rows == 0 or tall % rows == 0 for _, rows, _ in made.values())
        return made

    # ---- what is right ----

    def nbytes(self, bits: int = 0) -> float:
        """Bytes of the weights that a run reads."""
        from apq_tvm.formats import nbytes_at

        if self.tensor is None:
            return 4 * self.n * self.k
        return nbytes_at(self.tensor, bits) * self.n / TILE_ROWS

    def weight(self, bits: int = 0) -> NDArray[np.float64]:
        """What the codes mean, float64 [TILE_ROWS, K]."""
        from apq_tvm.formats import dequantize

        decoded = dequantize(self.tensor, bits) if self.tensor else self._float
        return decoded.astype(np.float64)

    def activations(self, rows: int) -> tuple[NDArray[np.float32], NDArray[np.float64]]:
        """Rows of x, and what the kernels multiply: rounded as the layer's scheme says.

        No code of x is near the middle between two: how its last bit is computed does not matter.
        """
        from apq_tvm.bench.gpu.reference import round_rows

        x = np.random.default_rng(rows + self.k).standard_normal((rows, self.k))
        scheme = self.spec.scheme
        if scheme is None or not self._first:
            return x.astype(np.float32), x.astype(np.float32).astype(np.float64)
        return round_rows(x.astype(np.float32), scheme)
