"""Options that several commands have, each spelled and explained once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from apq_tvm.errors import BadInput, BadScheme
from apq_tvm.types import DimSizes

Model = Annotated[Path, typer.Argument(help="ONNX file.", show_default=False)]
Module = Annotated[Path, typer.Argument(help="Folder of a compiled module.", show_default=False)]
Inputs = Annotated[
    Path, typer.Option(help="npz of arrays by input name, batch first.", show_default=False)
]
OutputFile = Annotated[
    Path, typer.Option("--output", "-o", help="safetensors file to write.", show_default=False)
]
CalibrationFile = Annotated[
    Path | None,
    typer.Option("--calibration", help="File of apq-tvm calibrate.", show_default=False),
]
Codes = Annotated[
    Path | None,
    typer.Option(
        help="GGUF file, or safetensors of AutoGPTQ or AWQ, whose codes are kept.",
        show_default=False,
    ),
]
Sequential = Annotated[
    bool | None,
    typer.Option(
        "--sequential/--no-sequential",
        help="Whether gptq measures each layer behind those quantized before it, on the "
        "calibration's inputs; by default where they are there and time allows.",
        show_default=False,
    ),
]
TargetBpw = Annotated[
    float | None,
    typer.Option(
        min=0.1,
        help="Bits per weight of all that is stored, embeddings and floats too: every layer and "
        "table gets a scheme.",
        show_default=False,
    ),
]
Candidate = Annotated[
    list[str] | None,
    typer.Option(
        metavar="SCHEME", help="Choice for --target-bpw (tables: integers); may be repeated."
    ),
]
TensorType = Annotated[
    list[str] | None,
    typer.Option(metavar="REGEX=SCHEME", help="Scheme of some layers; may be repeated."),
]
Dim = Annotated[
    list[str] | None,
    typer.Option(
        "--dim",
        metavar="NAME=SIZE",
        help="Size of a symbolic dimension, or LEAST:GREATEST; may be repeated.",
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Replace an existing output.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")]


def parse_tensor_types(words: list[str]) -> dict[str, str]:
    """Read repeated ``--tensor-type REGEX=SCHEME``; the scheme stands after the last ``=``.

    Raises
    ------
    BadScheme
        A word has no ``=`` or nothing on one side of it.
    """
    types = {}
    for word in words:
        pattern, equals, scheme = word.rpartition("=")
        if not equals or not pattern or not scheme:
            raise BadScheme(
                f"--tensor-type {word!r} is not REGEX=SCHEME, such as 'attention.*=W8A8' "
                "or 'classifier=float'"
            )
        types[pattern] = scheme
    return types


def parse_dims(words: list[str]) -> DimSizes:
    """Read repeated ``--dim NAME=SIZE`` and ``--dim NAME=LEAST:GREATEST``.

    Raises
    ------
    BadInput
        A word is neither; or two give one name.
    """
    dims: dict[str, int | tuple[int, int]] = {}
    for word in words:
        name, _, size = word.rpartition("=")
        numbers = size.split(":")
        digits = all(n.isascii() and n.isdigit() and len(n) < 20 for n in numbers)
        if not name or len(numbers) > 2 or not digits:
            raise BadInput(
                f"--dim {word!r} is not NAME=SIZE or NAME=LEAST:GREATEST, such as batch=1 or "
                "sequence=1:512"
            )
        if name in dims:
            raise BadInput(f"--dim gives {name!r} twice")
        dims[name] = int(numbers[0]) if len(numbers) == 1 else (int(numbers[0]), int(numbers[1]))
    return dims
