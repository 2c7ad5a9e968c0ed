"""All hashes, by processes that share the devices and modules."""

from __future__ import annotations

import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from . import kernels, modules
from .cases import profiles


def job(kind: str, number: int, only: str) -> dict[str, str]:
    """One device's or module's hashes."""
    made = modules.entries(number) if kind == "module" else kernels.entries(number, only)
    return dict(made)


def collect(only: str, workers: int) -> dict[str, str]:
    """Every hash by its key."""
    jobs = [("profile", n) for n in range(len(profiles()))]
    if not only:
        jobs = [("module", n) for n in range(len(modules.MODULES))] + jobs
    found: dict[str, str] = {}
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        for part in pool.map(job, *zip(*jobs, strict=True), [only] * len(jobs)):
            found.update(part)
            print(f"\r{len(found)} hashes", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return found
