"""From C sources and the kernels' object file to ``lib<name>.so`` and ``lib<name>.a``.

Everything is first linked into one relocatable object whose internal names are made local, so that any
number of modules can be linked into one program or loaded into one process.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from apq_tvm.errors import BuildError

# Functions kernels may call that the runtime or libm and libc provide; any other symbol of TVM's runtime
# means an operation that needs TVM.
_PROVIDED = frozenset(
    {
        "TVMFFIErrorSetRaisedFromCStrParts",
        "__TVMBackendAllocWorkspace",
        "__TVMBackendFreeWorkspace",
        "__TVMBackendParallelLaunch",
    }
)
_C_FLAGS = ("-std=c11", "-O2", "-fPIC", "-fwrapv", "-pthread", "-ffunction-sections")
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


def check_kernels(tools: Toolchain, kernels: Path) -> None:
    """Refuse kernels that call into TVM's runtime beyond what the module's own runtime provides.

    Raises
    ------
    BuildError
        Naming the functions.
    """
    foreign = set()
    for line in _run([tools.nm, str(kernels)]).splitlines():
        kind, symbol = line.split()[-2:]
        own = symbol in _PROVIDED or (kind in "Tt" and symbol.startswith("__tvm_ffi_"))
        if ("TVM" in symbol or "tvm" in symbol) and kind in "UVWvw" and not own:
            foreign.add(symbol)
    if foreign:
        raise BuildError(f"kernels call TVM runtime functions: {', '.join(sorted(foreign))}")


def build_library(
    tools: Toolchain, name: str, sources: Sequence[Path], kernels: Path, work: Path, output: Path
) -> None:
    """Compile and link.

    Parameters
    ----------
    tools : Toolchain
    name : str
        Exported are ``{name}_{function}`` for `API_FUNCTIONS` and nothing else.
    sources : sequence of Path
        C files; their folders are searched for headers.
    kernels : Path
        The kernels' object file.
    work : Path
        Folder for intermediate files.
    output : Path
        Folder that receives ``lib{name}.so`` and ``lib{name}.a``.

    Raises
    ------
    BuildError
        The compiler or linker failed; its output is in the message.
    """
    check_kernels(tools, kernels)
    folders = sorted({str(s.parent) for s in sources})
    includes = [f"-I{folder}" for folder in folders]
    objects = []
    for source in sources:
        objects.append(work / f"{source.stem}.o")
        command = [*tools.cc, *_C_FLAGS, *includes, "-c", str(source), "-o", str(objects[-1])]
        _run(command)
    whole, local = work / f"{name}_all.o", work / f"{name}.o"
    parts = [str(o) for o in [*objects, kernels]]
    _run([*tools.cc, "-nostdlib", "-r", *parts, "-o", str(whole)])
    keep = [f"--keep-global-symbol={name}_{function}" for function in API_FUNCTIONS]
    _run([tools.objcopy, *keep, str(whole), str(local)])
    shared = output / f"lib{name}.so"
    flags = ["-shared", f"-Wl,-soname,lib{name}.so", "-Wl,--no-undefined", "-Wl,-z,relro,-z,noexecstack"]
    _run([*tools.cc, *flags, str(local), *LINK_LIBRARIES, "-s", "-o", str(shared)])
    static = output / f"lib{name}.a"
    static.unlink(missing_ok=True)
    _run([tools.ar, "rcsD", str(static), str(local)])
