"""A folder that measures kernels where there is a GPU: ``python DIR/run.py``, with numpy alone.

It holds each layer's kernels as images, how they are launched for so many rows of x, a tile of
weights of which `apq_tvm.bench.gpu.on_gpu` makes all of them, x, and the exact answer. Nothing of
apq_tvm, TVM or a compiler is wanted there.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import apq_tvm
from apq_tvm.bench.gpu import on_gpu, rates
from apq_tvm.bench.gpu.layer import TILE_ROWS, GpuLayer
from apq_tvm.bench.gpu.on_gpu.main import FORMAT
from apq_tvm.bench.gpu.static import StaticLayer, find_gpu, ideal_bytes
from apq_tvm.bench.linear import LinearCase
from apq_tvm.errors import BuildError, OutputFailed
from apq_tvm.progress import Progress, Silent
from apq_tvm.types import AnyPath

if TYPE_CHECKING:
    from apq_tvm.codegen.cuda.compilers import ImageCompiler
    from apq_tvm.types import GpuFacts, Scheme

MOST_BYTES = 64 << 20
"""Of a bundle: what machines with a GPU take."""

BOUND = 1e-4
"""Of the largest error, relative to the result's root mean square: what float32 sums explain."""

BOUNDS = {"anyprec": 1e-3}
"""Of families whose tables kernels round: centroids of int8 times a step stand for float16."""

Compile = Callable[[Any], bytes]
"""Device code → its image."""

Searched = tuple[dict[str, Any], list[tuple[dict[str, Any], bytes]]]
"""What a case of ``bundle.json`` says of its candidates; what each says, and its image."""

Search = Callable[[GpuLayer, LinearCase, Sequence[int], Compile], Searched]
"""Of a layer and case, and the rows of all cases of the layer."""

_START = '''"""Checks the kernels of this folder on this machine's GPU and times them (--help)."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

try:
    import numpy  # noqa: F401
except ImportError:
    print("error: numpy is not installed: pip install numpy", file=sys.stderr)
    sys.exit(2)

from on_gpu.main import main  # noqa: E402

sys.exit(main(HERE))
'''


def prepare(
    cases: Sequence[LinearCase],
    output: AnyPath,
    *,
    target: str,
    force: bool = False,
    candidates: Search | None = None,
    images: ImageCompiler | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Write a bundle.

    Parameters
    ----------
    cases : sequence of LinearCase
        Threads and cold do not matter.
    output : str or path
        The folder.
    target : str
        A GPU.
    force : bool
        Replace a bundle that is there.
    candidates : callable, optional
        Gives some of each case, decided otherwise than the default, to be timed beside it
        (`apq_tvm.tune.gpu.candidates`).
    images : ImageCompiler, optional
        By default NVRTC or nvcc. Where it is given nothing is judged: `static_us` is None.
    progress : Progress, optional

    Returns
    -------
    dict
        ``path, bytes, target, cases``; cases are those of ``bundle.json`` with ``shape`` and
        ``scheme``.

    Raises
    ------
    OutputExists, OutputFailed
        Something is there, or it cannot be written, or would be larger than `MOST_BYTES`.
    ApqError
        A scheme or target is unknown, a layer's weights are no blocks of rows, or a compiler is
        missing.
    """
    from apq_tvm.codegen.cuda.compilers import find_compiler
    from apq_tvm.codegen.cuda.tables import DRIVERS
    from apq_tvm.codegen.package.folder import check_output, staged

    profile, output, progress = find_gpu(target), Path(output), progress or Silent()
    gpu = profile.gpu
    assert gpu is not None
    check = partial(check_output, file="bundle.json", form=FORMAT, what="bundle")
    check(output, force)
    compiler = images or find_compiler(gpu)  # before minutes of work
    ordered = sorted(dict.fromkeys(cases), key=lambda case: (case.n * case.k, *case.compiled))
    with staged(output, force, check) as folder:
        writer = _Writer(folder, gpu, compiler, cases, images is None, candidates)
        layers = []
        with progress.stage("bundle", len({case.compiled for case in cases})):
            for (n, k, scheme, _), group in groupby(ordered, key=lambda c: c.compiled):
                mine = list(group)
                progress.advance(f"{n}x{k} {scheme}")
                layers.append(writer.layer(GpuLayer(n, k, scheme, profile), scheme, mine))
        document = {
            **{"format": FORMAT, "version": apq_tvm.__version__, "target": profile.name},
            **{"driver": gpu.driver, "cuda": DRIVERS[gpu.driver], "l2_bytes": profile.l2_bytes},
            **{"rates": writer.rates(), "layers": layers},
        }
        (folder / "bundle.json").write_text(json.dumps(document, indent=1) + "\n")
        (folder / "run.py").write_text(_START)
        shutil.copytree(
            Path(on_gpu.__file__).parent,
            folder / "on_gpu",
            ignore=lambda _, names: [name for name in names if not name.endswith(".py")],
        )
        total = _size(folder)
    shown = [{"shape": layer["shape"], **case} for layer in layers for case in layer["cases"]]
    return {"path": str(output), "bytes": total, "target": profile.name, "cases": shown}


def _size(folder: Path) -> int:
    """Bytes of a bundle; too many are refused."""
    total = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    if total > MOST_BYTES:
        raise OutputFailed(
            f"the bundle would be {total} bytes, more than {MOST_BYTES}; "
            "name fewer shapes or schemes"
        )
    return total


class _Writer:
    """Writes the files of layers, and describes them."""

    def __init__(
        self,
        folder: Path,
        gpu: GpuFacts,
        compiler: ImageCompiler,
        cases: Sequence[LinearCase],
        judged: bool,
        candidates: Search | None,
    ) -> None:
        self._folder, self._gpu, self._compiler, self._judged = folder, gpu, compiler, judged
        self._cases, self._candidates = cases, candidates
        for name in ("images", "weights"):
            (folder / name).mkdir()

    def layer(self, layer: GpuLayer, scheme: str, cases: Sequence[LinearCase]) -> dict[str, Any]:
        """A layer's part of ``bundle.json``; `scheme` is without ``@``."""
        from apq_tvm.codegen.cuda.tables import with_own_kernels

        shape, sm = cases[0].shape, self._gpu.sm

        def compiled(code: Any) -> bytes:
            return self._compiler.image(with_own_kernels(code), sm)

        image = compiled(layer.code)
        judge = self._judge(layer, image)
        buffers = layer.buffers(1)
        return {
            **{"shape": shape, "n": layer.n, "k": layer.k, "scheme": scheme},
            "bytes": sum(_nbytes(buffers[name]) for name in layer.packed),
            "details": [list(detail) for detail in layer.spec.details],
            "images": {str(sm): self._image(f"{shape}_{scheme}", image)},
            **{"weights": self._weights(layer, scheme), "tile_rows": TILE_ROWS},
            "arrays": {
                name: {"axis": axis, "rows": rows, "count": count}
                for name, (axis, rows, count) in layer.blocks().items()
            },
            "cases": [
                {**_case(layer, case, judge), **self._searched(layer, case, cases, compiled)}
                for case in cases
            ],
        }

    def _searched(
        self, layer: GpuLayer, case: LinearCase, cases: Sequence[LinearCase], compiled: Compile
    ) -> dict[str, Any]:
        """What a case has of candidates."""
        if self._candidates is None:
            return {}
        rows = sorted({other.m for other in cases if other.bits == case.bits})
        known, made = self._candidates(layer, case, rows, compiled)
        name = f"{case.shape}_{case.scheme}_m{case.m}"
        described = [
            {**words, "images": {str(self._gpu.sm): self._image(f"{name}_{number}", image)}}
            for number, (words, image) in enumerate(made)
        ]
        return {**known, "candidates": described}

    def rates(self) -> dict[str, Any]:
        """The part about the GPU's own rates."""
        sm = self._gpu.sm
        image = self._compiler.image(rates.rate_code(sm), sm)
        return rates.described({sm: self._image("rates", image)})

    def _judge(self, layer: GpuLayer, image: bytes) -> StaticLayer | None:
        """None where there is no disassembler."""
        if not self._judged:
            return None
        try:
            return StaticLayer(layer, image)
        except BuildError:
            return None

    def _image(self, name: str, image: bytes) -> str:
        file = f"images/{_plain(name)}.sm_{self._gpu.sm}"
        (self._folder / file).write_bytes(image)
        return file

    def _weights(self, layer: GpuLayer, scheme: str) -> str:
        """A tile of weights, x and the answers: the same for all layers of as many columns."""
        file = f"weights/k{layer.k}_{_plain(scheme)}.npz"
        if (self._folder / file).exists():
            return file
        arrays: dict[str, Any] = {f"weight_{name}": a for name, a in layer.packed.items()}
        rows = max(case.m for case in self._cases)
        for bits in sorted({c.bits for c in self._cases if c.compiled[2] == scheme}):
            x, exact = layer.activations(rows)
            weight = layer.weight(bits)
            arrays[f"x{bits}"] = x
            arrays[f"answer{bits}"] = exact @ weight.T  # float64 [M, rows of the tile]
            arrays[f"plain{bits}"] = x.astype(np.float64) @ weight.T
        np.savez_compressed(self._folder / file, **arrays)
        return file


def _case(layer: GpuLayer, case: LinearCase, judge: StaticLayer | None) -> dict[str, Any]:
    before, product = layer.launches(case.m, case.bits)
    buffers = layer.buffers(case.m, case.bits)
    return {
        "m": case.m,
        "scheme": case.scheme,
        "bits": case.bits,
        "kernel": layer.choice(case.m, case.bits).kernel,
        "static_us": judge.row(case)["static_us"] if judge else None,
        "bound": bound_of(layer.spec.scheme),
        "ideal_bytes": ideal_bytes(layer, case),
        "buffers": {n: _nbytes(b) for n, b in buffers.items() if n not in layer.packed},
        "before": [launch.described() for launch in before],
        "product": [launch.described() for launch in product],
    }


def bound_of(scheme: Scheme | None) -> float:
    """Of a layer's largest error."""
    return BOUNDS.get(scheme.family if scheme is not None else "", BOUND)


def _nbytes(buffer: tuple[tuple[int, ...], str]) -> int:
    shape, dtype = buffer
    return int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize


def _plain(name: str) -> str:
    """A name that every file system takes."""
    return re.sub(r"[^\w.-]", "_", name)
