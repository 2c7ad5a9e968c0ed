"""The C file that gives a module's runtime its images and the table of their kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from apq_tvm.codegen.cuda.split import DeviceCode
from apq_tvm.codegen.graph.c_text import literal
from apq_tvm.types import GpuFacts

CHECK_IDS = Path(__file__).resolve().parents[1] / "runtime" / "cuda" / "device" / "check_ids.cuh"
"""A kernel of our own in every module."""

DRIVERS = {525: 12000, 570: 12080, 580: 13000}
"""Release of a driver → the CUDA version that it says: CUDA release notes, "Driver Version"."""


def with_own_kernels(code: DeviceCode) -> DeviceCode:
    """The source with what the runtime launches by itself."""
    return DeviceCode(f"{code.source}\n{CHECK_IDS.read_text()}", code.kernels)


@dataclass(frozen=True)
class Image:
    """Code for one compute capability.

    Parameters
    ----------
    sm : int
    ptx : bool
        True if it is text that the drivers of later GPUs compile.
    bytes : int
    file : Path
        Of the image made small (`apq_tvm.codegen.cuda.squeeze`).
    """

    sm: int
    ptx: bool
    bytes: int
    file: Path


def tables_source(symbol: str, code: DeviceCode, gpu: GpuFacts, images: Sequence[Image]) -> str:
    """Write the C source of a device's ``apq_device_code``.

    Parameters
    ----------
    symbol : str
        Its name.
    code : DeviceCode
    gpu : GpuFacts
    images : sequence of Image
        The assembler reads their files.

    Returns
    -------
    str
        C11, to be compiled with ``runtime/cuda`` on the include path. The last kernel is the one
        that checks ids.
    """
    rows = [
        f"    {{{literal(k.name)}, {literal(k.params)}, {len(k.launch)}, "
        f"{{{', '.join(map(str, k.launch)) or 0}}}}},"
        for k in code.kernels
    ]
    sections, table = list[str](), list[str]()
    for number, image in enumerate(images):
        name = f"{symbol}_image{number}"
        sections += [
            f'__asm__(".section .rodata\\n{name}:\\n"',
            f'        ".incbin \\"{image.file.name}\\"\\n.balign 8\\n.previous\\n");',
            f"extern const unsigned char {name}[];",
        ]
        packed = image.file.stat().st_size
        table.append(f"    {{{image.sm}, {int(image.ptx)}, {packed}, {image.bytes}, {name}}},")
    return "\n".join(
        [
            '#include "apq_cuda.h"',
            "",
            *sections,
            "static const apq_gpu_kernel kernels[] = {",
            *rows,
            '    {"apq_check_ids", "plllllllp", 0, {0}},',
            "};",
            "static const apq_gpu_image images[] = {",
            *table,
            "};",
            f"extern const struct apq_device_code {symbol};",
            f"const struct apq_device_code {symbol} = {{{DRIVERS[gpu.driver]}, "
            f'"{gpu.driver}", {len(rows) + 1}, {len(images)}, kernels, images}};',
            "",
        ]
    )
