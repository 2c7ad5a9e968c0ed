"""Shows that a change leaves what is emitted as it was.

    python -m tests.golden write FILE       # before
    python -m tests.golden compare FILE     # after; exits with 1 where something differs

`--only TEXT` takes the devices, schemes and shapes whose key holds the text, such as ``nl4`` or
``znver4/W4``, and no modules. Kernels that changed their names alone are listed, not counted.
Emission is deterministic: the same hashes come from any process.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from difflib import SequenceMatcher
from pathlib import Path

from .collect import collect


def differences(old: dict[str, str], new: dict[str, str]) -> tuple[list[str], dict[str, str]]:
    """Keys that differ, and kernels whose name alone changed: (old name → new name)."""
    gone = {key for key in old if key not in new}
    came = defaultdict(list)
    for key in new:
        if key not in old:
            came[(_place(key), new[key])].append(key)
    renamed: dict[str, str] = {}
    wrong = [f"changed {key}" for key in old if key in new and old[key] != new[key]]
    # Many kernels share a preparation: what it is made for tells no names apart.
    for key in sorted(gone, key=lambda key: (key.endswith("/prepare"), key)):
        twins = came.get((_place(key), old[key]))
        if twins:
            # Several kernels may come to the same code on one device: the nearest name is meant.
            twin = max(twins, key=lambda k: SequenceMatcher(None, _name(key), _name(k)).ratio())
            twins.remove(twin)
            if not key.endswith("/prepare"):  # which several kernels share
                renamed.setdefault(_name(key), _name(twin))
        else:
            wrong.append(f"gone {key}")
    wrong += [f"new {key}" for keys in came.values() for key in keys]
    return [line for line in wrong if not _only_renamed(line, old, new, renamed)], renamed


def _place(key: str) -> tuple[str, ...]:
    """A key without the kernel's name."""
    parts = key.split("/")
    return (*parts[:3], *parts[4:])


def _name(key: str) -> str:
    return key.split("/")[3]


def _only_renamed(
    line: str, old: dict[str, str], new: dict[str, str], renamed: dict[str, str]
) -> bool:
    """Whether a selection differs by the names of its kernels alone."""
    change, _, key = line.partition(" ")
    if change != "changed" or not key.endswith("/selected"):
        return False
    words = [word.partition(":") for word in old[key].split()]
    return " ".join(f"{renamed.get(n, n)}:{rest}" for n, _, rest in words) == new[key]


def _asked(key: str, only: str) -> bool:
    return not key.startswith("module/") and only in "/".join(key.split("/")[:2])


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.golden", description=__doc__)
    parser.add_argument("action", choices=("write", "compare"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    found = collect(args.only, args.workers)
    if args.action == "write":
        args.file.write_text(json.dumps(found, indent=0) + "\n")
        return 0
    before = json.loads(args.file.read_text())
    if args.only:
        before = {key: value for key, value in before.items() if _asked(key, args.only)}
    wrong, renamed = differences(before, found)
    for name, other in sorted(renamed.items()):
        print(f"renamed {name} -> {other}")
    print(*wrong, sep="\n")
    print(f"{len(found)} hashes, {len(wrong)} differ, {len(renamed)} kernels renamed")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
