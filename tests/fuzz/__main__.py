"""``python -m tests.fuzz run|sizes|load|import SECONDS [FOLDER]``: one fuzzer, for so long.

FOLDER keeps the corpus and what was found. libFuzzer and atheris are used where they are installed
(Debian's clang and libclang-rt-dev, PyPI's atheris), and a driver of random mutations elsewhere.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.fuzz.build_c import CHECKS, OPTIONS, build, emit_sources, has_libfuzzer, sized_model


def fuzz_c(target: str, seconds: int, folder: Path) -> int:
    """One of the C targets, ``sizes`` being ``run`` of another model; the program's exit status."""
    from tests.e2e.module.helpers import mixed_model

    scheduled = sized_model(folder) if target == "sizes" else mixed_model()
    module, work = emit_sources(scheduled, folder)
    source = "load" if target == "load" else "run"
    program, corpus = folder / target, folder / "corpus"
    corpus.mkdir(exist_ok=True)
    fuzzer = has_libfuzzer()
    if fuzzer:
        build(f"{source}_target", work, program, [f"{CHECKS},fuzzer"], "clang")
        words = [str(corpus), f"-max_total_time={seconds}", f"-artifact_prefix={folder}/"]
        words += ["-max_len=4096", "-len_control=0", "-rss_limit_mb=4096", "-timeout=30"]
        words += ["-print_final_stats=1", "-verbosity=1"]
    else:
        build(f"{source}_target", work, program, [CHECKS])
        words = [str(folder / "last_input"), str(seconds)]
    env = {**os.environ, **OPTIONS, "FUZZ_WEIGHTS": str(module / "weights.safetensors")}
    return subprocess.run([str(program), *words], env=env, check=False).returncode


def main(words: list[str]) -> int:
    """Status 0 if nothing was found."""
    target, seconds = words[0], int(words[1])
    sys.path.insert(0, str(Path(__file__).parents[1]))
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(words[2]) if len(words) > 2 else Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        if target == "import":
            from tests.fuzz.importer import fuzz

            return fuzz(seconds, folder)
        return fuzz_c(target, seconds, folder)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
