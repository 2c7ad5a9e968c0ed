"""What the terminal shows: progress on standard error, results on standard output."""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, ParamSpec, TypeVar

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress
from rich.table import Table

from apq_tvm.errors import ApqError
from apq_tvm.signals import stopped_by

EXIT_ERROR = 1
EXIT_UNEXPECTED = 2
EXIT_BROKEN_PIPE = 141
EXIT_SIGNAL = 128
"""And the signal's number, as shells count."""

LONGEST = 8000
"""Characters of a line, most of which is then one name."""

UNTOUCHED = "what was there before is untouched"

P = ParamSpec("P")
R = TypeVar("R")


def stderr() -> Console:
    """A console on the standard error of this moment (tests replace it)."""
    return Console(stderr=True, highlight=False)


def plain(text: str) -> str:
    """`text` without what steers a terminal, and cut if it is very long: names come from files."""
    if len(text) > LONGEST:
        text = f"{text[: LONGEST // 2]} ... {text[-LONGEST // 2 :]}"
    return "".join(c if c in "\n\t" or c.isprintable() else ascii(c)[1:-1] for c in text)


def say(text: str) -> None:
    """One line on standard error: logs are searched by line."""
    print(plain(text), file=sys.stderr, flush=True)


def show(text: str) -> None:
    """Lines on standard output."""
    print("\n".join(map(plain, text.split("\n"))))


def print_json(document: Any) -> None:
    """Write the one JSON document of a command to standard output.

    Raises
    ------
    ValueError
        A value is NaN or infinite, which JSON cannot hold.
    """
    sys.stdout.write(json.dumps(document, indent=2, allow_nan=False) + "\n")
    sys.stdout.flush()


def print_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]], right: Iterable[str] = ()
) -> None:
    """Write a table to standard output; columns named in `right` are aligned right.

    Where standard output is no terminal the table is as wide as its text, so that nothing is cut.
    """
    table = Table(box=box.SIMPLE_HEAD)
    numbers = set(right)
    for column in columns:
        table.add_column(column, justify="right" if column in numbers else "left", overflow="fold")
    for row in rows:
        table.add_row(*(plain(str(cell)) for cell in row))
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = max(console.width, 200)
    with console.capture() as captured:
        console.print(table)
    lines = (line.rstrip() for line in captured.get().splitlines())
    print("\n".join([title, *lines]))


def megabytes(count: int) -> str:
    """`count` bytes as text, e.g. ``"9.4 MB"``."""
    return f"{count / 1e6:.1f} MB" if count >= 1e5 else f"{count / 1e3:.1f} kB"


class Bars:
    """`apq_tvm.progress.Progress` as one bar per stage on standard error.

    Without a terminal every stage is one plain line when it ends, so that logs stay readable.
    """

    def __init__(self) -> None:
        self._console = stderr()
        self._bars: RichProgress | None = None
        self._task: TaskID | None = None

    @contextmanager
    def stage(self, name: str, total: int | None = None) -> Iterator[None]:
        """Show a bar for stage `name` while the body runs."""
        columns = (
            TextColumn("{task.description:<12}"),
            BarColumn(bar_width=28),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[text]}", style="dim", markup=False),
        )
        with RichProgress(*columns, console=self._console) as bars:
            self._bars, self._task = bars, bars.add_task(name, total=total, text="")
            try:
                yield
                done = bars.tasks[0].completed if total is None else total
                bars.update(self._task, completed=done, total=done or 1, text="")
                if not done:
                    bars.update(self._task, completed=1)
            finally:
                self._bars = self._task = None

    def advance(self, text: str = "") -> None:
        """Count one step and show `text` behind the bar."""
        if self._bars is not None and self._task is not None:
            self._bars.update(self._task, advance=1, text=text)


def reports_errors(command: Callable[P, R]) -> Callable[P, R]:
    """Turn exceptions of a command into one readable line and an exit code.

    `ApqError` exits with 1, a signal as in a shell (Ctrl-C with 130, SIGTERM with 143), anything
    else with 2: that is a bug of apq_tvm, and the line says how to see where (``APQ_TRACEBACK=1``).
    Wrong usage is typer's and exits with 2.
    """

    @functools.wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except (typer.BadParameter, typer.Exit):
            raise
        except ApqError as error:
            code, text = EXIT_ERROR, f"error: {error}"
        except BrokenPipeError:
            # The reader left (apq-tvm inspect m | head): stop quietly, also at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise SystemExit(EXIT_BROKEN_PIPE) from None
        except KeyboardInterrupt:
            code, text = EXIT_SIGNAL + signal.SIGINT, f"interrupted; {UNTOUCHED}"
        except Exception as error:
            code = EXIT_UNEXPECTED
            text = (
                f"error: unexpected {type(error).__name__}: {error}\n"
                "this is a bug in apq-tvm; run again with APQ_TRACEBACK=1 to see where"
            )
            if os.environ.get("APQ_TRACEBACK"):
                traceback.print_exc()
        number = stopped_by()
        if number:
            name = "interrupted" if number == signal.SIGINT else signal.Signals(number).name
            code, text = EXIT_SIGNAL + number, f"{name}; {UNTOUCHED}"
        with suppress(OSError):  # the terminal may be gone
            say(text)
        raise SystemExit(code)

    return wrapped


def describe_shape(names_shapes: Iterable[Mapping[str, Any]]) -> str:
    """A manifest's inputs or outputs as text, e.g. ``"ids int64 [batch, 128]"``."""
    return ", ".join(
        f"{t['name']} {t['dtype']} [{', '.join(str(d) for d in t['shape'])}]" for t in names_shapes
    )
