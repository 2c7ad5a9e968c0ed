"""A GPU's part of a module: its kernels' images, their tables, and the host's halves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from apq_tvm.codegen.build.library import compile_sources
from apq_tvm.codegen.build.toolchain import Toolchain
from apq_tvm.codegen.cuda.compilers import ImageCompiler
from apq_tvm.codegen.cuda.split import split
from apq_tvm.codegen.cuda.squeeze import squeeze
from apq_tvm.codegen.cuda.tables import Image, tables_source, with_own_kernels
from apq_tvm.codegen.graph.plain import Graph, Region, Sizes, Tensor
from apq_tvm.codegen.package.folder import RUNTIME
from apq_tvm.errors import UnsupportedModel
from apq_tvm.types import GpuFacts


def fit_gpu(graph: Graph, target: str) -> None:
    """Put constants among the weights, which a GPU has a copy of.

    Raises
    ------
    UnsupportedModel
        The run decides by its data what it computes: a captured graph cannot.
    """
    if any(isinstance(step, Region) and _asks_data(step) for step in graph.steps):
        raise UnsupportedModel(
            f"{target}: the model has a loop or branch that its data decide, and runs of GPUs "
            "are captured; compile it for a processor, or make the condition constant"
        )
    if any(isinstance(step, Sizes) for step in graph.steps) or graph.run_sizes:
        raise UnsupportedModel(
            f"{target}: the model has sizes that its data decide (NonZero, a computed k of TopK), "
            "and runs of GPUs are captured; compile it for a processor"
        )
    graph.weights.update(graph.constants)
    graph.constants.clear()


def _asks_data(step: Region) -> bool:
    """Whether the host would have to read it: the rounds of other loops are captured one by one."""
    return step.condition is not None or isinstance(step.trip, Tensor)


def build_device(
    mod: Any,
    names: Sequence[str],
    target: Any,
    gpu: GpuFacts,
    compiler: ImageCompiler,
    tools: Toolchain,
    work: Path,
    symbol: str,
    prefix: str = "",
) -> list[Path]:
    """Build a model's kernels for one GPU.

    Parameters
    ----------
    mod : tvm.IRModule
        Holds every function of `names`, scheduled.
    names : sequence of str
    target : tvm.target.Target
    gpu : GpuFacts
    compiler : ImageCompiler
    tools : Toolchain
        Of the host.
    work : Path
        Folder for sources and object files.
    symbol : str
        Of the ``apq_device_code`` that is made.
    prefix : str
        Of the functions' names.

    Returns
    -------
    list of Path
        Object files: the host's halves, and the image with its tables.

    Raises
    ------
    BuildError
        A compiler failed; its message is inside.
    """
    objects, code = split(mod, names, target, work, prefix)
    code = with_own_kernels(code)
    made = [(sm, False, compiler.image(code, sm)) for sm in gpu.images or (gpu.sm,)]
    made.append((gpu.sm, True, compiler.ptx(code, gpu.sm)))
    images = [_written(work / f"{symbol}{n}.image", *image) for n, image in enumerate(made)]
    source = work / f"{symbol}.c"
    source.write_text(tables_source(symbol, code, gpu, images))
    includes = [str(RUNTIME / folder) for folder in ("common", "cuda")]
    with compile_sources(tools, [source], work, [*includes, str(work)]) as compiled:
        return [*objects, *compiled()]


def _written(file: Path, sm: int, ptx: bool, image: bytes) -> Image:
    file.write_bytes(squeeze(image))
    return Image(sm, ptx, len(image), file)
