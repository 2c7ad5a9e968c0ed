"""The folder of a compiled module: written aside, then moved into place whole."""

from __future__ import annotations

import ctypes
import errno
import json
import keyword
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from apq_tvm.codegen.graph.c_text import comment
from apq_tvm.codegen.graph.plain import Graph, Port
from apq_tvm.errors import OutputExists, OutputFailed

HERE = Path(__file__).resolve().parents[1]
TEMPLATES = HERE / "templates"
PYTHON = ("errors.py", "library.py", "ports.py", "results.py", "tensors.py")
"""What every module's ``__init__.py`` imports."""
RUNTIME = HERE / "runtime"
COMMON = RUNTIME / "common"


def runtime_sources(kind: str = "cpu") -> list[Path]:
    """C files of the runtime for a processor (``"cpu"``) or a GPU (``"cuda"``)."""
    return [path for name in ("common", kind) for path in sorted((RUNTIME / name).glob("*.c"))]


# Identifies the layout of manifest.json and of the folder.
MANIFEST_FORMAT = "apq_tvm-module-1"


def check_name(output: Path) -> str:
    """Return the module name that a folder gives: it must import in Python and compile in C.

    Raises
    ------
    OutputFailed
        Not an ASCII identifier, a Python keyword, or a name the runtime uses itself.
    """
    name = output.name
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) or keyword.iskeyword(name):
        suggestion = re.sub(r"\W", "_", name, flags=re.ASCII).lstrip("0123456789") or "model"
        raise OutputFailed(
            f"'{name}' cannot be imported in Python: a module's folder must be named like a "
            "variable, e.g. "
            f"{suggestion if not keyword.iskeyword(suggestion) else suggestion + '_'}"
        )
    if name == "apq":
        raise OutputFailed("'apq' is the prefix of the C runtime; name the folder differently")
    return name


def check_output(
    output: Path,
    force: bool,
    file: str = "manifest.json",
    form: str = MANIFEST_FORMAT,
    what: str = "compiled module",
) -> None:
    """Refuse to overwrite, or to replace by force what is no compiled module.

    Parameters
    ----------
    output : Path
    force : bool
    file, form, what : str
        Of other folders than modules: the JSON document by whose ``format`` they are known, that
        format, and what they are called.

    Raises
    ------
    OutputExists
        Something is there and `force` is not given, or it is not a module.
    OutputFailed
        No path can be like this: a name is too long.
    """
    try:
        if not output.exists() and not output.is_symlink():
            return
    except OSError as error:
        raise OutputFailed(f"cannot write {output}: {error.strerror}") from error
    if not force:
        raise OutputExists(f"{output} exists already; choose another name or pass --force")
    try:
        ours = json.loads((output / file).read_text()).get("format") == form
    except (OSError, ValueError, AttributeError):
        ours = False
    if not ours and not (output.is_dir() and not any(output.iterdir())):
        raise OutputExists(
            f"{output} is not a {what}, so it is not replaced even with --force; remove it first"
        )


Check = Callable[[Path, bool], None]
"""`check_output`, or one like it."""


@contextmanager
def staged(output: Path, force: bool, check: Check = check_output) -> Iterator[Path]:
    """Give a folder beside `output` to write into; it becomes `output` if nothing fails.

    Yields
    ------
    Path
        An empty folder on the same file system.

    Raises
    ------
    OutputExists
        See `check_output`.
    OutputFailed
        Writing failed (disk full, no permission); `output` is as it was.
    """
    check(output, force)
    temporary: Path | None = None
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))
        temporary.chmod(0o755)
        fresh = temporary / "new"
        fresh.mkdir()
        yield fresh
        _swap(fresh, output, temporary / "old", force, check)
    except OSError as error:
        raise OutputFailed(
            f"{output} could not be written: {error.strerror or error}; what was there before is "
            "intact"
        ) from error
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)


def _swap(fresh: Path, output: Path, old: Path, force: bool, check: Check) -> None:
    """Put `fresh` at `output`, in one step: at every moment there is the old module or the new one.

    What came to be there while the module was compiled is looked at as it was before: only `force`
    replaces a module or an empty folder.
    """
    if not force and _rename(fresh, output, _NOREPLACE):
        return
    check(output, force)
    if not _rename(fresh, output, _EXCHANGE):
        _swap_in_two(fresh, output, old)


def _swap_in_two(fresh: Path, output: Path, old: Path) -> None:
    """Two renames; if the second fails, or a signal comes between them, the first is undone.

    For file systems that cannot exchange two folders (NFS, 9p, FUSE): a kill between the renames
    leaves the old module in the hidden folder beside `output`.
    """
    try:
        if output.exists() or output.is_symlink():
            output.rename(old)
        fresh.rename(output)
    except BaseException:
        if (old.exists() or old.is_symlink()) and not output.exists():
            old.rename(output)
        raise


# Flags of renameat2(2) in linux/fs.h.
_NOREPLACE, _EXCHANGE = 1, 2
_AT_FDCWD = -100
# The file system or the system does not know the flag.
_UNKNOWN = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)


def _rename(source: Path, target: Path, flag: int) -> bool:
    """renameat2; False where the flag forbids it (a target that is there, or not) or is unknown.

    Raises
    ------
    OSError
        Anything else, e.g. no permission.
    """
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:  # glibc before 2.28
        return False
    paths = (_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target))
    if rename(*paths, ctypes.c_uint(flag)) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EEXIST, errno.ENOENT, *_UNKNOWN):
        return False
    raise OSError(code, os.strerror(code))


def fill(template: str, values: Mapping[str, str]) -> str:
    """Replace every ``@KEY@`` of a template file by its value.

    Parameters
    ----------
    template : str
        File name in ``templates/``.
    values : mapping of str to str
    """
    text = (TEMPLATES / template).read_text()
    return re.sub(r"@([A-Z_]+)@", lambda m: values[m.group(1)], text)


def template_values(
    name: str, version: str, graph: Graph, libraries: Sequence[str] = ()
) -> dict[str, str]:
    """Build the values of every ``@KEY@`` that the header, CMake and pkg-config templates use.

    Parameters
    ----------
    name, version : str
    graph : Graph
    libraries : sequence of str
        What the library is linked with, as linker options.
    """
    ranks = [len(p.dims) for p in (*graph.inputs, *graph.outputs)]
    return {
        "NAME": name,
        "UPPER": name.upper(),
        "VERSION": version,
        "LIBS": " ".join(libraries),
        "SIGNATURE": "\n".join(
            [*_signature("input", graph.inputs), *_signature("output", graph.outputs)]
        ),
        "NUM_INPUTS": str(len(graph.inputs)),
        "NUM_OUTPUTS": str(len(graph.outputs)),
        "MAX_RANK": str(max([*ranks, 1])),
        "DLPACK": (COMMON / "apq_dlpack.h").read_text(),
    }


def _signature(kind: str, ports: Sequence[Port]) -> list[str]:
    lines = []
    for number, port in enumerate(ports):
        text = f"{kind} {number}: {port.name} {port.dtype} [{', '.join(port.shown)}]"
        lines.append(f" *   {comment(text)}")
    return lines


def write_package(
    folder: Path, name: str, values: Mapping[str, str], gpu: bool, sessions: bool
) -> None:
    """Write the files that need no build: Python, header, CMake and pkg-config.

    Parameters
    ----------
    folder : Path
    name : str
    values : mapping of str to str
        Of `template_values`.
    gpu : bool
        Whether it is a GPU's, whose arrays may stay in its memory.
    sessions : bool
        Whether it is a decoder that keeps its caches.
    """
    files = [*PYTHON]
    files += ["session.py", "generate.py"] if sessions else []
    files += ["device_array.py"] if gpu else []
    for file in files:
        shutil.copyfile(TEMPLATES / file, folder / file)
    shutil.copyfile(TEMPLATES / "package.py", folder / "__init__.py")
    for template, target in (
        ("module.h.in", f"{name}.h"),
        ("config.cmake.in", f"{name}Config.cmake"),
        ("module.pc.in", f"{name}.pc"),
    ):
        (folder / target).write_text(fill(template, values))


def port_entries(ports: Sequence[Port]) -> list[dict[str, Any]]:
    """Describe inputs or outputs for manifest.json: name, dtype, shape (a str is a symbol)."""
    return [
        {
            "name": p.name,
            "dtype": p.dtype,
            "shape": [int(d) if d.lstrip("-").isdigit() else d for d in p.shown],
        }
        for p in ports
    ]
