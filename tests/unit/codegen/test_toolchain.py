"""Finding the C compiler of this machine or of another one, with compilers that only pretend."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from apq_tvm.codegen.build.toolchain import find_toolchain, run
from apq_tvm.errors import BadTarget, BuildError
from apq_tvm.schedules.devices import find_profile

HOST = os.uname().machine
OTHER = "aarch64" if HOST == "x86_64" else "x86_64"
GNU = f"{OTHER}-linux-gnu"
ANDROID = f"{OTHER}-linux-android24"


def fake(
    folder: Path, name: str, version: str = "gcc 12", machine: str = GNU, libc: str | None = None
) -> Path:
    """A compiler that answers questions, and logs how it was called; ``""`` is no C library."""
    path = folder / name
    macros = {"gnu": "__GLIBC__ 2", "android": "__BIONIC__ 1", "musl": "__STDC_HOSTED__ 1"}
    libc = ("android" if "android" in machine else "gnu") if libc is None else libc
    headers = f'echo "#define {macros[libc]}"' if libc else "echo no stdlib.h >&2; exit 1"
    path.parent.mkdir(exist_ok=True)
    path.write_text(
        f"""#!/bin/sh
echo "$@" >> {folder}/log
case " $* " in
  *" --version "*) echo "{version}";;
  *" -dumpmachine "*) echo "{machine}";;
  *" -print-prog-name="*) for last; do :; done; echo "${{last#*=}}";;
  *" -E "*) {headers};;
esac
"""
    )
    path.chmod(0o755)
    return path


@pytest.fixture
def bin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is all of PATH, with binary tools for the other architecture and LLVM's."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("objcopy", "ar", "nm"):
        for prefix in (f"{GNU}-", "llvm-", ""):
            (folder / (prefix + name)).symlink_to(shutil.which("true") or "/bin/true")
    for tool in ("sh",):
        (folder / tool).symlink_to(shutil.which(tool) or f"/bin/{tool}")
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("CC", raising=False)
    return folder


def test_cross_compiler_by_its_usual_name(bin: Path) -> None:
    fake(bin, f"{GNU}-gcc")
    tools = find_toolchain(GNU)
    assert tools.cc == (f"{GNU}-gcc",) and tools.arch == OTHER and tools.system == "linux"
    assert tools.objcopy == str(bin / f"{GNU}-objcopy")
    assert tools.link_libraries == ("-lm", "-ldl", "-lpthread") and tools.link_flags == ()


def test_missing_cross_compiler_says_how_to_install_it(bin: Path) -> None:
    message = f"no C compiler for {GNU}: {GNU}-gcc is not on PATH.*apt-get install gcc-.*--cc"
    with pytest.raises(BuildError, match=message):
        find_toolchain(GNU)


def test_missing_libc_says_how_to_install_it(bin: Path) -> None:
    fake(bin, f"{GNU}-gcc", libc="")
    with pytest.raises(BuildError, match=r"no C library.*apt-get install.*--sysroot"):
        find_toolchain(GNU)


def test_cc_for_this_machine_is_passed_over(bin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CC is often set; it counts for another machine only if it compiles for that."""
    fake(bin, "mycc", machine=f"{HOST}-linux-gnu")
    fake(bin, "theircc", machine=GNU)
    fake(bin, f"{GNU}-gcc")
    monkeypatch.setenv("CC", "mycc -g")
    assert find_toolchain(GNU).cc == (f"{GNU}-gcc",)
    assert find_toolchain().cc == ("mycc", "-g")
    monkeypatch.setenv("CC", "theircc")
    assert find_toolchain(GNU).cc == ("theircc",)
    with pytest.raises(BuildError, match=f"theircc compiles for {GNU}, and the target is {HOST}"):
        find_toolchain()


def test_compiler_of_the_wrong_machine(bin: Path) -> None:
    fake(bin, "wrong", machine=f"{HOST}-linux-gnu")
    with pytest.raises(BuildError, match=f"wrong compiles for {HOST}-linux-gnu, and the target is"):
        find_toolchain(GNU, cc="wrong")
    with pytest.raises(BuildError, match="no C compiler: absent -O2 is not on PATH"):
        find_toolchain(GNU, cc="absent -O2")


def test_clang_is_told_the_triple_and_the_sysroot(bin: Path, tmp_path: Path) -> None:
    clang = fake(bin, "clang", "clang version 18", f"{OTHER}-unknown-linux-android24")
    tools = find_toolchain(ANDROID, cc=str(clang), sysroot=str(tmp_path))
    assert tools.cc == (str(clang), f"--target={ANDROID}", f"--sysroot={tmp_path}")
    assert "-E" in (bin / "log").read_text()
    assert tools.system == "android"
    assert tools.link_libraries == ("-lm", "-ldl")  # bionic holds the threads itself
    assert tools.link_flags == ("-Wl,-z,max-page-size=16384",)


def test_gcc_is_not_told_a_triple(bin: Path) -> None:
    fake(bin, "gcc-aarch64")
    assert find_toolchain(GNU, cc="gcc-aarch64").cc == ("gcc-aarch64",)


def test_android_wrapper_is_found_by_its_name(bin: Path) -> None:
    fake(bin, f"{ANDROID}-clang", "Android clang version 18", ANDROID)
    assert find_toolchain(ANDROID).system == "android"
    (bin / f"{ANDROID}-clang").unlink()
    with pytest.raises(BuildError, match=r"developer\.android\.com/ndk"):
        find_toolchain(ANDROID)


def test_clang_of_the_ndk_brings_its_own_tools(bin: Path, tmp_path: Path) -> None:
    """Asked for objcopy it names this machine's, on PATH, which knows no other architecture."""
    folder = tmp_path / "ndk" / "toolchains" / "llvm" / "prebuilt" / "linux-x86_64" / "bin"
    folder.mkdir(parents=True)
    clang = fake(folder, "clang", "Android clang version 18", f"{OTHER}-unknown-linux-android24")
    text = clang.read_text()
    asked = 'for last; do :; done; echo "${last#*=}"'
    assert asked in text
    answer = f"""for last; do :; done; name=${{last#*=}}
    case $name in llvm-*) echo {folder}/$name;; *) echo {bin}/$name;; esac"""
    clang.write_text(text.replace(asked, answer))
    for name in ("objcopy", "ar", "nm"):
        (folder / f"llvm-{name}").symlink_to(bin / name)
    tools = find_toolchain(ANDROID, cc=str(clang))
    assert tools.objcopy == str(folder / "llvm-objcopy") and tools.nm == str(folder / "llvm-nm")
    with pytest.raises(BuildError, match=f"bin/clang is no program; this NDK's is {clang}"):
        find_toolchain(ANDROID, cc=str(tmp_path / "ndk" / "bin" / "clang"))


def test_llvm_tools_serve_where_no_others_are(bin: Path) -> None:
    fake(bin, "clang", "clang version 18", GNU)
    for name in ("objcopy", "ar", "nm"):
        (bin / f"{GNU}-{name}").unlink()
    assert find_toolchain(GNU, cc="clang").nm == str(bin / "llvm-nm")
    (bin / "llvm-nm").unlink()
    with pytest.raises(BuildError, match=f"nm is missing.*binutils-{OTHER}"):
        find_toolchain(GNU, cc="clang")


MUSL = f"{HOST}-linux-musl"


def test_musl_by_the_first_compiler_that_has_it(bin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is in the headers: musl-gcc says of itself that it compiles for gnu."""
    native = f"{HOST}-linux-gnu"
    fake(bin, "cc", machine=native)
    fake(bin, "theirs", machine=native, libc="musl")
    with pytest.raises(BuildError, match=rf"cc has the headers of gnu, .* {MUSL}.*musl-tools"):
        find_toolchain(MUSL)
    fake(bin, "musl-gcc", machine=native, libc="musl")
    assert find_toolchain(MUSL).cc == ("musl-gcc",) and find_toolchain(MUSL).libc == "musl"
    monkeypatch.setenv("CC", "cc")  # often set for this machine
    assert find_toolchain(MUSL).cc == ("musl-gcc",)
    monkeypatch.setenv("CC", "theirs -g")
    assert find_toolchain(MUSL).cc == ("theirs", "-g")
    fake(bin, f"{OTHER}-linux-musl-gcc", libc="musl")
    assert find_toolchain(f"{OTHER}-linux-musl").cc == (f"{OTHER}-linux-musl-gcc",)


def test_clang_is_told_musl(bin: Path, tmp_path: Path) -> None:
    fake(bin, "clang", "clang version 18", MUSL, libc="musl")
    tools = find_toolchain(MUSL, cc="clang", sysroot=str(tmp_path))
    assert tools.cc == ("clang", f"--target={MUSL}", f"--sysroot={tmp_path}")


@pytest.mark.parametrize(
    ("triple", "libc"),
    (
        (MUSL, "gnu"),
        (f"{HOST}-linux-gnu", "musl"),
        (ANDROID, "gnu"),
        (f"{OTHER}-linux-musl", "gnu"),
    ),
)
def test_another_c_library_is_refused(bin: Path, triple: str, libc: str) -> None:
    fake(bin, "mycc", machine=triple.rpartition("-")[0] + "-gnu", libc=libc)
    message = f"mycc has the headers of {libc}, .*{triple}; .*--sysroot"
    with pytest.raises(BuildError, match=message):
        find_toolchain(triple, cc="mycc")
    assert find_toolchain(triple, cc="mycc", exact=False).libc == libc


def test_sysroot_must_be_a_folder(bin: Path) -> None:
    fake(bin, f"{GNU}-gcc")
    with pytest.raises(BuildError, match="--sysroot /no/such: no such folder"):
        find_toolchain(GNU, sysroot="/no/such")


def test_output_of_a_failing_tool_is_shown(bin: Path) -> None:
    with pytest.raises(BuildError, match="could not be started"):
        run([str(bin / "nothing")])


@pytest.mark.parametrize(
    "triple,message",
    (
        ("x86_64-linux-gnu", "is not of graviton3, which is aarch64"),
        ("aarch64-apple-darwin", "modules are for Linux and Android"),
        ("aarch64", "modules are for Linux and Android"),
        ("aarch64-linux-uclibc", "modules are for Linux and Android"),
        ("aarch64-linux-gnu_ilp32", "modules are for Linux and Android"),
    ),
)
def test_triples_that_no_module_is_for(triple: str, message: str) -> None:
    with pytest.raises(BadTarget, match=message):
        find_profile("graviton3", triple)


def test_triple_reaches_every_variant() -> None:
    profile = find_profile("arm-auto", "aarch64-linux-android24")
    for variant in (profile, *profile.variants):
        assert variant.target["mtriple"] == "aarch64-linux-android24" and variant.arch == "aarch64"
