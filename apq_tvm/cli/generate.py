"""``apq-tvm bench generate``: prompts and tokens per second of language models, beside rivals."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from apq_tvm.cli.bench import Seconds, parse_counts
from apq_tvm.cli.console import Bars, megabytes, print_json, print_table, reports_errors, show
from apq_tvm.cli.options import Json


def mount(bench: typer.Typer) -> None:
    """Add the command to ``apq-tvm bench``."""
    bench.command(
        "generate",
        epilog="Example: apq-tvm bench generate smollm2_w4 --prompt 256 --contexts 16,1024 "
        "--threads 1,2 --against smollm2.onnx --gguf smollm2-q4_0.gguf",
    )(generate)


@reports_errors
def generate(
    modules: Annotated[
        list[Path],
        typer.Argument(
            help="Compiled modules with a cache of keys and values.", metavar="MODULE..."
        ),
    ],
    prompt: Annotated[str, typer.Option(help="Comma list of tokens taken at once.")] = "16,256",
    contexts: Annotated[
        str, typer.Option(help="Comma list of tokens before those decoded one by one.")
    ] = "16,1024",
    tokens: Annotated[int, typer.Option(min=1, help="Tokens decoded in a sample.")] = 32,
    threads: Annotated[str, typer.Option(help="Comma list of thread counts.")] = "1",
    against: Annotated[
        list[Path] | None, typer.Option(help="ONNX file for ONNX Runtime; may be repeated.")
    ] = None,
    gguf: Annotated[
        list[Path] | None, typer.Option(help="GGUF file for llama.cpp; may be repeated.")
    ] = None,
    busy: Annotated[
        bool, typer.Option("--busy", help="Let another process compute beside all of them.")
    ] = False,
    seconds: Seconds = 4.0,
    json: Json = False,
) -> None:
    """Time prompts and decoding of language models beside ONNX Runtime and llama.cpp.

    Each is a process of its own; they take turns. Minima of many rounds; medians with --busy.
    """
    from apq_tvm.bench.generate.generate import bench_generate

    document = bench_generate(
        modules,
        prompts=parse_counts(prompt, "--prompt"),
        contexts=parse_counts(contexts, "--contexts"),
        tokens=tokens,
        threads=parse_counts(threads, "--threads"),
        against=against or (),
        gguf=gguf or (),
        busy=busy,
        budget_s=seconds,
        progress=Bars(),
    )
    if json:
        print_json(document)
        return
    print_rows(document)


def print_rows(document: dict[str, Any]) -> None:
    """Write the table of `apq_tvm.bench.generate.generate.bench_generate` to standard output."""
    columns = ("what", "threads", "tokens", "name", "ms", "tokens/s", "times ours", "DRAM limit",
               "noise", "peak memory", "working memory")  # fmt: skip
    print_table(
        ("medians beside a busy process" if document["busy"] else "minima")
        + "; a prompt, or one token behind so many; DRAM limit: the share of what memory gives in "
        "that time that weights and cache are; memory over what the process had before",
        columns,
        table_rows(document["rows"]),
        right=tuple(c for c in columns if c not in ("what", "name")),
    )
    if document["failed"]:
        show("\n".join(f"{name}: {reason}" for name, reason in document["failed"].items()))


def table_rows(rows: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Rows by what is compared; the first of each is the first module's, and so is the ratio."""

    def group(row: dict[str, Any]) -> tuple[Any, ...]:
        return row["what"] != "prompt", row["threads"], row["length"]

    first: dict[tuple[Any, ...], float] = {}
    for row in rows:
        first.setdefault(group(row), row["ms"])
    return [
        (
            row["what"],
            str(row["threads"]),
            str(row["length"]),
            row["name"],
            f"{row['ms']:.2f}",
            f"{row['tokens_s']:.1f}",
            f"{row['ms'] / first[group(row)]:.2f}",
            "" if row["dram_share"] is None else f"{row['dram_share']:.0%}",
            f"{row['noise']:.0%}",
            megabytes(row["peak_bytes"]),
            "" if row["arena_bytes"] is None else megabytes(row["arena_bytes"]),
        )
        for row in sorted(rows, key=group)
    ]
