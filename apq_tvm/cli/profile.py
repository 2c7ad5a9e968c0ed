"""``apq-tvm bench profile``: where the time of a module's run goes, kernel by kernel."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from apq_tvm.cli.bench import Batch, Dims, Inputs, Seconds, Seq, parse_dims
from apq_tvm.cli.console import Bars, print_json, print_table, reports_errors, show
from apq_tvm.cli.options import Force, Json, Module
from apq_tvm.errors import BadInput

KINDS = ("kernel", "layer")


def mount(bench: typer.Typer) -> None:
    """Add the command to ``apq-tvm bench``."""
    bench.command(
        "profile",
        epilog="Example: apq-tvm bench profile minilm_w4 --seq 128 --threads 1 --html profile.html",
    )(profile)


@reports_errors
def profile(
    module: Module,
    batch: Batch = 1,
    seq: Seq = 128,
    dims: Dims = "",
    inputs: Inputs = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Default: all physical cores.", show_default=False)
    ] = None,
    bits: Annotated[
        int | None,
        typer.Option(
            min=1, help="Of weights whose bits are chosen at run time.", show_default=False
        ),
    ] = None,
    cold: Annotated[
        bool, typer.Option("--cold/--warm", help="Empty the caches before every run.")
    ] = False,
    by: Annotated[str, typer.Option(help="Rows of the table: kernel or layer.")] = "kernel",
    html: Annotated[
        Path | None, typer.Option(help="HTML file to write, with plots.", show_default=False)
    ] = None,
    force: Force = False,
    seconds: Seconds = 4.0,
    json: Json = False,
) -> None:
    """Time every kernel of a module's run beside what this machine can do.

    Rows sum to the run. A limit is the least time that a kernel's bytes and multiply-adds take;
    what is slower than twice its limit is named.
    """
    from apq_tvm.bench.profile.profile import bench_profile
    from apq_tvm.bench.profile.table import (
        COLUMNS,
        NUMBERS,
        heading,
        machine_line,
        slow_lines,
        table_rows,
    )

    if by not in KINDS:
        raise BadInput(f"--by {by!r}: kernel or layer")
    if html is not None:
        from apq_tvm.extras import require
        from apq_tvm.report import check_outputs

        check_outputs([html], force)
        require("matplotlib")
    document = bench_profile(
        module, batch=batch, seq=seq, dims=parse_dims(dims), inputs=inputs, threads=threads,
        bits=bits, cold=cold, budget_s=seconds, progress=Bars(),
    )  # fmt: skip
    if html is not None:
        from apq_tvm.bench.profile.page import profile_page
        from apq_tvm.evaluation.results import write_text

        write_text(html, profile_page(document))
    if json:
        print_json(document)
        return
    print_table(heading(document), (by, *COLUMNS), table_rows(document, by), right=NUMBERS)
    show("\n".join([machine_line(document), *slow_lines(document["slow"])]))
