"""ONNX Runtime as on a processor with AVX2 alone, on one that has AVX-512: beside code for AVX2.

Its kernels are chosen by ``cpuid``, and nothing else tells it. ``python examples/avx2_only.py
FOLDER`` copies the installed package into a folder, with a trap in place of every ``cpuid``, and
compiles a library whose handler of the trap answers without AVX-512, VNNI and AMX. Then::

    LD_PRELOAD=FOLDER/avx2_only.so PYTHONPATH=FOLDER python examples/measure_conv.py --target znver3

keeps its rows in ``docs/measured/conv_TARGET_avx2.json``. Needs objdump and a C compiler.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
from pathlib import Path

NAME = "avx2_only"
CPUID, TRAP = b"\x0f\xa2", b"\xcc\x90"
HANDLER = r"""
#define _GNU_SOURCE
#include <cpuid.h>
#include <signal.h>
#include <ucontext.h>

/* Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2, CPUID, leaf 7. */
static void answer(int number, siginfo_t *info, void *context) {
  greg_t *r = ((ucontext_t *)context)->uc_mcontext.gregs;
  unsigned leaf = r[REG_RAX], part = r[REG_RCX], a, b, c, d;
  __cpuid_count(leaf, part, a, b, c, d);
  if (leaf == 7 && part == 0) {
    b &= ~0xdc230000u;                     /* avx512f, dq, ifma, pf, er, cd, bw, vl */
    c &= ~(1u << 1 | 1u << 6 | 1u << 11 | 1u << 12 | 1u << 14); /* vbmi, vbmi2, vnni, bitalg */
    d &= ~(1u << 2 | 1u << 3 | 1u << 8 | 7u << 22 | 1u << 25); /* fp16, amx */
  } else if (leaf == 7 && part == 1) {
    a &= ~(1u << 4 | 1u << 5 | 1u << 21 | 1u << 23); /* avx-vnni, bf16, amx-fp16, avx-ifma */
    d &= ~(1u << 4 | 1u << 5 | 1u << 10 | 1u << 19); /* avx-vnni-int8 and -int16, avx10 */
  }
  r[REG_RAX] = a, r[REG_RBX] = b, r[REG_RCX] = c, r[REG_RDX] = d;
  r[REG_RIP] += 1; /* past the nop behind int3 */
}

__attribute__((constructor)) static void start(void) {
  struct sigaction action = {.sa_sigaction = answer, .sa_flags = SA_SIGINFO};
  sigaction(SIGTRAP, &action, 0);
}
"""


def told() -> bool:
    """Whether this process has the handler."""
    return f"{NAME}.so" in os.environ.get("LD_PRELOAD", "")


def trap(library: Path) -> int:
    """Put a trap in place of every ``cpuid`` of a library; how many there were."""
    shown = subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", library], capture_output=True, text=True, check=True
    ).stdout
    places = [int(at, 16) for at in re.findall(r"^\s*([0-9a-f]+):\s+cpuid\b", shown, re.MULTILINE)]
    sections = subprocess.run(
        ["readelf", "-SW", library], capture_output=True, text=True, check=True
    ).stdout
    text = re.search(r"\.text\s+PROGBITS\s+(\w+)\s+(\w+)", sections)
    assert text is not None
    moved = int(text[2], 16) - int(text[1], 16)
    code = bytearray(library.read_bytes())
    for place in places:
        at = slice(place + moved, place + moved + 2)
        assert code[at] == CPUID
        code[at] = TRAP
    library.write_bytes(code)
    return len(places)


def main() -> None:
    """Write the folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder.resolve()
    import onnxruntime

    package = Path(onnxruntime.__file__).parent
    folder.mkdir(parents=True)
    shutil.copytree(package, folder / package.name)
    count = sum(map(trap, (folder / package.name / "capi").glob("*onnxruntime*.so*")))
    library = folder / f"{NAME}.so"
    command = ["cc", "-O1", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library)]
    subprocess.run(command, input=HANDLER, text=True, check=True)
    print(f"{count} traps; LD_PRELOAD={library} PYTHONPATH={folder}")


if __name__ == "__main__":
    main()
