"""``apq-tvm codebooks``: codebooks learned on one model, for this and other models."""

from __future__ import annotations

from typing import Annotated

import typer

from apq_tvm.cli.console import Bars, print_json, reports_errors, say
from apq_tvm.cli.options import Dim, Force, Json, Model, OutputFile, parse_dims
from apq_tvm.errors import OutputExists


@reports_errors
def codebooks_command(
    model: Model,
    output: OutputFile,
    scheme: Annotated[
        str, typer.Option(help="Comma list of schemes with codebooks.")
    ] = "cb2,cb3,cb4",
    dim: Dim = None,
    force: Force = False,
    json: Json = False,
) -> None:
    """Learn codebooks on a model.

    The file serves compile --codebooks, also for other models.
    """
    from apq_tvm.onnx_import import import_onnx
    from apq_tvm.quantizers.codebook_file import learn_codebooks, save_codebooks

    if output.exists() and not force:
        raise OutputExists(f"{output} exists; --force replaces it")
    schemes = tuple(word.strip() for word in scheme.split(","))
    found = learn_codebooks(import_onnx(model, parse_dims(dim or [])), schemes, Bars())
    save_codebooks(output, found, model.name)
    size = output.stat().st_size
    if json:
        print_json({"output": str(output), "schemes": list(found), "bytes": size})
        return
    say(f"{output}: {', '.join(found)}, {size} bytes")
