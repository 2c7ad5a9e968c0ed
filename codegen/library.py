"""From C sources and the kernels' object file to ``lib<name>.so`` and ``lib<name>.a``.

Everything is first linked into one relocatable object whose internal names are made local, so that
any number of modules can be linked into one program or loaded into one process.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from apq_tvm.errors import BuildError

# What the module's own runtime provides of TVM's; any other symbol of TVM's runtime that kernels
# call means an operation that needs TVM.
_PROVIDED = frozenset(
    {
        "TVMFFIErrorSetRaisedFromCStrParts",
        "__TVMBackendAllocWorkspace",
        "__TVMBackendFreeWorkspace",
        "__TVMBackendParallelLaunch",
    }
)
_C_FLAGS = ("-std=c11", "-O2", "-fPIC", "-fwrapv", "-pthread", "-ffunction-sections")
_LINK_FLAGS = ("-Wl,--no-undefined", "-Wl,-z,relro", "-Wl,-z,noexecstack", "-Wl,-s")
LINK_LIBRARIES = ("-lm", "-ldl", "-lpthread")
# What templates/module.h.in declares.
API_FUNCTIONS = (
    "close",
    "context_create",
    "context_destroy",
    "has_openmp",
    "last_error",
    "memory",
    "num_threads",
    "open",
    "output_shape",
    "run",
    "set_num_threads",
    "precision",
    "set_precision",
    "run_bits",
    "verify",
    "version",
)


@dataclass(frozen=True)
class Toolchain:
    """The C compiler's command and the binary tools that go with it."""

    cc: tuple[str, ...]
    version: str
    objcopy: str
    ar: str
    nm: str


def find_toolchain() -> Toolchain:
    """Find the C compiler: ``CC`` if it is set, else cc, gcc or clang.

    Returns
    -------
    Toolchain

    Raises
    ------
    BuildError
        No compiler, or one of its tools is missing; with the line that installs it.
    """
    wanted = shlex.split(os.environ.get("CC", ""))
    candidates = [wanted] if wanted else [["cc"], ["gcc"], ["clang"]]
    for command in candidates:
        if shutil.which(command[0]):
            version = _run([*command, "--version"]).splitlines()[0]
            tools = [_tool(command, t) for t in ("objcopy", "ar", "nm")]
            return Toolchain(tuple(command), version, *tools)
    named = " ".join(wanted) if wanted else "cc, gcc or clang"
    raise BuildError(
        f"no C compiler: {named} is not on PATH. Install one (apt-get install gcc libc6-dev; "
        "dnf install gcc; apk add gcc musl-dev binutils) or set CC"
    )


def _tool(cc: Sequence[str], name: str) -> str:
    path = _run([*cc, f"-print-prog-name={name}"]).strip()
    found = shutil.which(path) or shutil.which(name) or shutil.which(f"llvm-{name}")
    if found is None:
        raise BuildError(f"{name} is missing beside {' '.join(cc)}; apt-get install binutils")
    return found


def _run(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise BuildError(f"{command[0]} could not be started: {error}") from error
    if done.returncode != 0:
        text = (done.stderr or done.stdout).strip()
        if "No space left on device" in text or "File too large" in text:
            raise OSError(28, "No space left on device")
        raise BuildError(f"{shlex.join(command)} failed:\n{text[-4000:]}")
    return done.stdout


def check_kernels(tools: Toolchain, kernels: Sequence[Path]) -> None:
    """Refuse kernels that call into TVM's runtime beyond what the module's own runtime provides.

    Raises
    ------
    BuildError
        Naming the functions.
    """
    foreign = set()
    for line in _run([tools.nm, *map(str, kernels)]).splitlines():
        kind, symbol = ["", "", *line.split()][-2:]  # with several files there are title lines
        own = symbol in _PROVIDED or (kind in "TtW" and symbol.startswith("__tvm_ffi_"))
        if ("TVM" in symbol or "tvm" in symbol) and kind in "UVWvw" and not own:
            foreign.add(symbol)
    if foreign:
        raise BuildError(f"kernels call TVM runtime functions: {', '.join(sorted(foreign))}")


def compile_sources(
    tools: Toolchain, sources: Sequence[Path], work: Path
) -> Callable[[], list[Path]]:
    """Start compiling C files.

    Parameters
    ----------
    tools : Toolchain
    sources : sequence of Path
        Their folders are searched for headers.
    work : Path
        Folder of the object files.

    Returns
    -------
    callable
        Waits for the compiler and returns the object files, or raises BuildError with its output.
    """
    includes = [f"-I{folder}" for folder in sorted({str(s.parent) for s in sources})]
    objects = [work / f"{source.stem}.o" for source in sources]
    pool = ThreadPoolExecutor(os.cpu_count() or 1)
    jobs = [
        pool.submit(_run, [*tools.cc, *_C_FLAGS, *includes, "-c", str(source), "-o", str(path)])
        for source, path in zip(sources, objects, strict=True)
    ]

    def wait() -> list[Path]:
        with pool:
            for job in jobs:
                job.result()
        return objects

    return wait


def link_library(
    tools: Toolchain, name: str, objects: Sequence[Path], work: Path, output: Path
) -> None:
    """Link object files into the shared and the static library.

    Parameters
    ----------
    tools : Toolchain
    name : str
        Exported are ``{name}_{function}`` for `API_FUNCTIONS` and nothing else.
    objects : sequence of Path
    work : Path
        Folder for intermediate files.
    output : Path
        Folder that receives ``lib{name}.so`` and ``lib{name}.a``.

    Raises
    ------
    BuildError
        The linker failed; its output is in the message.
    """
    whole, local = work / f"{name}_all.o", work / f"{name}.o"
    _run([*tools.cc, "-nostdlib", "-r", *map(str, objects), "-o", str(whole)])
    keep = [f"--keep-global-symbol={name}_{function}" for function in API_FUNCTIONS]
    _run([tools.objcopy, "--strip-debug", *keep, str(whole), str(local)])
    flags = ["-shared", f"-Wl,-soname,lib{name}.so", *_LINK_FLAGS]
    shared = output / f"lib{name}.so"
    _run([*tools.cc, *flags, str(local), *LINK_LIBRARIES, "-o", str(shared)])
    _run([tools.ar, "rcsD", str(output / f"lib{name}.a"), str(local)])
