"""The runtime's own threads: tasks done once each, nobody late waited for, forks, limits, worth."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from apq_tvm.codegen.package.folder import COMMON, RUNTIME

SOURCE = Path(__file__).parent / "c" / "pool.c"
PARTS = ("cores", "places", "pool", "team", "worth")
CASES = re.findall(r'\{"(\w+)", \w+\}', SOURCE.read_text())
PLAIN: tuple[str, ...] = ()
THREAD = ("-fsanitize=thread",)
ADDRESS = ("-fsanitize=address,undefined",)


def program(folder: Path, flags: tuple[str, ...]) -> list[str]:
    """The command of the checks, whose helpers start by a function of theirs."""
    path = folder / "pool"
    hook = "-Dpthread_create=start_helper"
    files = [str(SOURCE), *(str(RUNTIME / "cpu" / f"{part}.c") for part in PARTS)]
    folders = [f"-I{COMMON}", f"-I{RUNTIME / 'cpu'}"]
    strict = ["-std=gnu11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-pthread"]
    command = ["cc", *strict, *flags, hook, *folders, *files, "-o", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if flags and done.returncode and "cannot find" in done.stderr:
        pytest.skip(f"cc has no {flags[0]}")
    assert done.returncode == 0, done.stderr
    return [str(path)]


def check(command: list[str], case: str) -> None:
    env = {**os.environ, "OMP_NUM_THREADS": "4", "TSAN_OPTIONS": "halt_on_error=1"}
    done = subprocess.run(
        [*command, case], env=env, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.stdout == "done\n", done.stdout + done.stderr


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return program(tmp_path_factory.mktemp("plain"), PLAIN)


@pytest.mark.parametrize("case", CASES)
def test_pool(case: str, plain: list[str]) -> None:
    check(plain, case)


def test_pool_does_not_race(tmp_path: Path) -> None:
    # TSan needs its shadow memory where randomized addresses may already be.
    fixed = ["setarch", os.uname().machine, "-R"]
    if subprocess.run([*fixed, "true"], capture_output=True, check=False).returncode:
        pytest.skip("addresses cannot be fixed here (setarch -R)")
    command = [*fixed, *program(tmp_path, THREAD)]
    for case in CASES:
        if case != "forks":  # TSan ends a child that starts threads
            check(command, case)


def test_pool_touches_its_own_memory(tmp_path: Path) -> None:
    command = program(tmp_path, ADDRESS)
    for case in CASES:
        if case != "forks":  # a lock of ASan's allocator may be another thread's when it forks
            check(command, case)
