"""A copy of the product by links, in which some files are others."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]


def own_tree(folder: Path, changed: Mapping[str, str]) -> Path:
    """`folder` with ``apq_tvm/``, whose files of these names have other texts or are new."""
    own = {Path(name).parent for name in changed}
    own |= {parent for part in own for parent in part.parents}
    for part in sorted(own):
        (folder / part).mkdir(parents=True, exist_ok=True)
        if part == Path("."):
            continue
        for path in (ROOT / part).iterdir():
            name = part / path.name
            if name not in own and str(name) not in changed and path.name != "__pycache__":
                (folder / name).symlink_to(path.resolve())
    for name, text in changed.items():
        (folder / name).write_text(text)
    return folder


def replaced(name: str, *changes: tuple[str, str]) -> dict[str, str]:
    """A file whose texts, each there once, have others in their place."""
    text = (ROOT / name).read_text()
    for old, new in changes:
        assert text.count(old) == 1, f"{name}: {old!r}"
        text = text.replace(old, new)
    return {name: text}


def run_steps(tree: Path, steps: str, *words: Any) -> str:
    """The last line that a script of this folder prints, run with the tree's product."""
    homes = (tree, ROOT, ROOT / "examples", ROOT / "tests", ROOT / "tests" / "unit")
    path = os.pathsep.join(map(str, homes))
    done = subprocess.run(
        [sys.executable, HERE / steps, *map(str, words)],
        env={**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"},
        cwd=tree.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]
