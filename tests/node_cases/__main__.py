"""``python -m tests.node_cases [TEXT ...] [--write]``: judge the cases whose name has a text."""

from __future__ import annotations

import argparse
import pickle
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.node_cases.cases import Case, every, load, store
from tests.node_cases.judge import Judge
from tests.node_cases.lists import write
from tests.node_cases.worker import Outcome


def main() -> None:
    """Judge, print, and write the list if asked to."""
    parser = argparse.ArgumentParser(prog="python -m tests.node_cases", description=__doc__)
    parser.add_argument("text", nargs="*")
    parser.add_argument("--exact", action="store_true", help="texts are whole names")
    parser.add_argument("--import", dest="only_import", action="store_true")
    parser.add_argument("--write", action="store_true", help="write the list of what passes")
    parser.add_argument("--types", action="store_true", help="the cases at every type")
    parser.add_argument("--target", default="host", help="GPUs are simulated")
    parser.add_argument("--cache", default="", help="folder to keep the collected cases in")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(options.cache or scratch) / ("types" if options.types else "")
        cases = [c for c in _cases(folder, options.types) if _asked(c.name, options)]
        began, outcomes = time.time(), dict[str, Outcome]()
        judge = Judge(folder, options.target)
        stage = "import" if options.only_import else "graph"
        outcomes = judge.alone([c.name for c in cases], stage)
        print(Counter(k for k, _ in outcomes.values()), f"{stage} {time.time() - began:.0f} s")
        for name, outcome in outcomes.items():
            if outcome[0] not in ("passes", "refused"):
                print(name, *outcome, flush=True)
        if not options.only_import:
            taken = [c for c in cases if outcomes[c.name][0] == "passes"]
            done = 0
            for name, outcome in judge.compiled(taken):
                outcomes[name] = outcome
                done += 1
                if outcome[0] not in ("passes", "refused"):
                    print(f"{done}/{len(taken)}", name, *outcome, flush=True)
        for name, (kind, why) in sorted(outcomes.items()):
            if kind != "passes":
                print(f"{kind:8} {name}: {why}")
        print(Counter(k for k, _ in outcomes.values()), f"{time.time() - began:.0f} s")
        (folder / "outcomes.pickle").write_bytes(pickle.dumps(outcomes))
        if options.write:
            write(outcomes, options.target, options.types)
        sys.exit(any(k not in ("passes", "refused") for k, _ in outcomes.values()))


def _cases(folder: Path, types: bool) -> list[Case]:
    known = sorted(folder.glob("*.pkl"))
    if known:
        return [load(folder, path.stem) for path in known]
    cases = every()
    if types:
        sys.path.insert(0, str(Path(__file__).parents[1]))  # as tests have it
        from tests.node_cases.typed import typed

        cases = list(typed(cases))
    store(cases, folder)
    return cases


def _asked(name: str, options: argparse.Namespace) -> bool:
    if not options.text:
        return True
    return any(t == name if options.exact else t in name for t in options.text)


if __name__ == "__main__":
    main()
