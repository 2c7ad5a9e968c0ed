"""The C compiler of a module and the binary tools beside it, for this machine or another one."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from apq_tvm.errors import BuildError

INSTALL_CROSS = {
    "aarch64": "apt-get install gcc-aarch64-linux-gnu libc6-dev-arm64-cross",
    "x86_64": "apt-get install gcc-x86-64-linux-gnu libc6-dev-amd64-cross",
}
"""Lines that install a compiler for another architecture, by its name."""

_INSTALL_NATIVE = "apt-get install gcc libc6-dev; dnf install gcc; apk add gcc musl-dev binutils"
_INSTALL_MUSL = "apt-get install musl-tools, which has musl-gcc; apk add gcc musl-dev binutils"
_INSTALL_NDK = (
    "https://developer.android.com/ndk; then name its compiler: "
    "--cc NDK/toolchains/llvm/prebuilt/linux-x86_64/bin/clang"
)
_SPELLINGS = {"arm64": "aarch64", "amd64": "x86_64"}
_LIBC_MACROS = {"__BIONIC__": "android", "__UCLIBC__": "uclibc", "__GLIBC__": "gnu"}
"""What a C library's headers define; musl's tell nothing on purpose. uClibc claims to be glibc."""


@dataclass(frozen=True)
class Toolchain:
    """The C compiler's command and the binary tools that go with it.

    Parameters
    ----------
    cc : tuple of str
        With the options that choose the machine, such as ``--sysroot``.
    version : str
        First line of ``cc --version``.
    objcopy, ar, nm : str
    machine : str
        What the compiler compiles for, as ``-dumpmachine`` says: ``"aarch64-linux-gnu"``.
    libc : str
        C library of its headers, as a triple calls it: ``"gnu"``, ``"musl"`` or ``"android"``.
        ``musl-gcc`` says of itself that it compiles for gnu.
    """

    cc: tuple[str, ...]
    version: str
    objcopy: str
    ar: str
    nm: str
    machine: str
    libc: str

    @property
    def arch(self) -> str:
        """Architecture as `os.uname` spells it."""
        return _arch(self.machine)

    @property
    def system(self) -> str:
        """``"android"`` or ``"linux"``."""
        return "android" if self.libc == "android" else "linux"

    @property
    def link_libraries(self) -> tuple[str, ...]:
        """What a module's library is linked with; Android's libc holds the threads itself."""
        return ("-lm", "-ldl") if self.system == "android" else ("-lm", "-ldl", "-lpthread")

    @property
    def link_flags(self) -> tuple[str, ...]:
        """Android 15 loads libraries on pages of 16 KB, and older linkers align to 4 KB."""
        return ("-Wl,-z,max-page-size=16384",) if self.system == "android" else ()


def find_toolchain(
    triple: str = "", cc: str = "", sysroot: str = "", exact: bool = True
) -> Toolchain:
    """Find the C compiler.

    For this machine ``CC`` if it is set, else cc, gcc or clang. For another one, or for musl,
    ``CC`` if it compiles for that, else ``aarch64-linux-gnu-gcc``, ``musl-gcc`` and so on.

    Parameters
    ----------
    triple : str
        What to compile for, ``"aarch64-linux-gnu"`` or ``"aarch64-linux-android24"``; this machine
        by default. Told to clang by ``--target``; a gcc has one of its own.
    cc : str
        The compiler to use, with options if need be.
    sysroot : str
        Folder of the other machine's headers and libraries.
    exact : bool
        Whether the compiler must have the C library that the triple names. Those of profiles all
        say gnu, and a machine of musl compiles for itself too.

    Returns
    -------
    Toolchain

    Raises
    ------
    BuildError
        No compiler, or one of its tools is missing; with the line that installs it. A compiler that
        compiles for another machine or C library, or that has no C library.
    """
    arch = triple.split("-")[0] or os.uname().machine
    cross = arch != os.uname().machine or "android" in triple
    if sysroot and not Path(sysroot).is_dir():
        raise BuildError(f"--sysroot {sysroot}: no such folder")
    named, misfits = shlex.split(cc), []
    for command in [named] if named else _candidates(arch, triple, cross):
        if not shutil.which(command[0]):
            continue
        version = _first_line([*command, "--version"])
        told = "clang" in version and (cross or "musl" in triple)
        clang = [f"--target={triple}"] if told else []
        full = [*command, *clang, *([f"--sysroot={sysroot}"] if sysroot else [])]
        machine = _first_line([*full, "-dumpmachine"])
        if _arch(machine) != arch:
            misfits.append(f"{shlex.join(command)} compiles for {machine}")
            continue
        libc = _libc(full, arch, triple, cross)
        if exact and triple and libc != (libc_of(triple) or libc):
            misfits.append(f"{shlex.join(full)} has the headers of {libc}")
            continue
        objcopy, ar, nm = (_tool(full, name, arch, cross) for name in ("objcopy", "ar", "nm"))
        return Toolchain(tuple(full), version, objcopy, ar, nm, machine, libc)
    if misfits:
        raise BuildError(
            f"{'; '.join(misfits)}, and the target is {triple or arch}; name another one with "
            f"--cc ({_install(arch, triple, cross)}), or a folder of its headers and libraries "
            "with --sysroot"
        )
    native = [] if cross else shlex.split(os.environ.get("CC", ""))
    raise _no_compiler(named or native, arch, triple, cross)


def libc_of(triple: str) -> str:
    """The C library that a triple names: ``"gnu"``, ``"musl"``, ``"android"``; else ``""``."""
    last = triple.rpartition("-")[2].rstrip("0123456789")
    return last if last in ("gnu", "musl", "android") else ""


def _arch(machine: str) -> str:
    first = machine.split("-")[0]
    return _SPELLINGS.get(first, first)


def _candidates(arch: str, triple: str, cross: bool) -> Iterator[list[str]]:
    """Commands in order of preference, whether they are there or not."""
    wanted = shlex.split(os.environ.get("CC", ""))
    native = [["cc"], ["gcc"], ["clang"]]
    if libc_of(triple) == "musl":
        yield from [wanted] if wanted else []
        yield [f"{arch}-linux-musl-gcc"]
        yield from [] if cross else [["musl-gcc"], *native]
        return
    if not cross:
        yield from [wanted] if wanted else native
        return
    # CC is often set for this machine; a compiler for another one must say so itself.
    if wanted and shutil.which(wanted[0]):
        machine = _first_line([*wanted, "-dumpmachine"])
        if _arch(machine) == arch and ("android" in machine) == ("android" in triple):
            yield wanted
    yield from [[f"{triple}-clang"]] if "android" in triple else [[f"{arch}-linux-gnu-gcc"]]


def _no_compiler(wanted: Sequence[str], arch: str, triple: str, cross: bool) -> BuildError:
    if cross and not wanted:
        libc = "musl" if libc_of(triple) == "musl" else "gnu"
        named = f"{triple}-clang" if "android" in triple else f"{arch}-linux-{libc}-gcc"
        return BuildError(
            f"no C compiler for {triple or arch}: {named} is not on PATH. Install it "
            f"({_install(arch, triple, cross)}) or name one with --cc"
        )
    named = " ".join(wanted) or "cc, gcc or clang"
    if wanted and "/" in wanted[0]:
        found = _ndk_clang(Path(wanted[0]))
        remedy = f"this NDK's is {found}" if found else f"({_install(arch, triple, cross)})"
        return BuildError(f"no C compiler: {wanted[0]} is no program; {remedy}")
    return BuildError(
        f"no C compiler: {named} is not on PATH. Install one ({_install(arch, triple, cross)}), or "
        "name one with --cc or CC"
    )


def _ndk_clang(path: Path) -> Path | None:
    """The compiler of the NDK that a wrong path points into, such as ``$NDK/bin/clang``."""
    inside = (f for up in path.parents for f in up.glob("toolchains/llvm/prebuilt/*/bin/clang"))
    return next(inside, None)


def _install(arch: str, triple: str, cross: bool) -> str:
    if "android" in triple:
        return _INSTALL_NDK
    if libc_of(triple) == "musl":
        return f"a toolchain of musl-cross-make for {arch}" if cross else _INSTALL_MUSL
    return INSTALL_CROSS.get(arch, f"a gcc for {arch}") if cross else _INSTALL_NATIVE


def _libc(cc: Sequence[str], arch: str, triple: str, cross: bool) -> str:
    """The C library whose headers `cc` finds; a compiler may come without: say so before the work.

    Headers tell, and not the compiler's name: ``--sysroot`` or a specs file may choose others.
    """
    try:
        text = run([*cc, "-E", "-dM", "-include", "stdlib.h", "-x", "c", os.devnull])
    except BuildError as error:
        raise BuildError(
            f"{shlex.join(cc)} finds no C library for {triple or arch}: install it "
            f"({_install(arch, triple, cross)}) or name its folder with --sysroot"
        ) from error
    defined = {line.split()[1] for line in text.splitlines() if line.startswith("#define ")}
    return next((libc for macro, libc in _LIBC_MACROS.items() if macro in defined), "musl")


def _tool(cc: Sequence[str], name: str, arch: str, cross: bool) -> str:
    own = _first_line([*cc, f"-print-prog-name={name}"])
    if cross:
        # This machine's own tools know no other architecture, LLVM's know all. A clang of the NDK
        # has those beside it, but gives what it finds on PATH for the others' names.
        llvm = _first_line([*cc, f"-print-prog-name=llvm-{name}"])
        names = [
            llvm if "/" in llvm else "",
            own if "/" in own and own != shutil.which(name) else "",
            f"{arch}-linux-gnu-{name}",
            f"llvm-{name}",
        ]
    else:
        names = [own, name, f"llvm-{name}"]
    for found in map(shutil.which, filter(None, names)):
        if found is not None:
            return found
    package = f"binutils-{arch}-linux-gnu" if cross else "binutils"
    raise BuildError(f"{name} is missing beside {' '.join(cc)}; apt-get install {package}")


def _first_line(command: Sequence[str]) -> str:
    lines = run(command).splitlines()
    return lines[0].strip() if lines else ""


def run(command: Sequence[str]) -> str:
    """Run a tool and return what it printed.

    Raises
    ------
    BuildError
        It could not be started or failed; its output is in the message.
    OSError
        It failed for want of disk space.
    """
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
