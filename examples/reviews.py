"""Sentences of tweets, reviews and editorials, from the source of the PyPI package vaderSentiment.

``pip download --no-deps --no-binary :all: vaderSentiment==3.3.2`` fetches it (MIT). It holds the
data of Hutto and Gilbert, "VADER" (ICWSM 2014): 23 thousand snippets of everyday English.
"""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import numpy as np

INNER = "hutto_ICWSM_2014.tar.gz"
SHORTEST = 20
"""Characters."""


def read(source: Path) -> list[str]:
    """The sentences, in an order that mixes where they are from.

    Raises
    ------
    FileNotFoundError
        The file is not there, or no such source.
    """
    if not source.is_file():
        raise FileNotFoundError(
            f"{source}: pip download --no-deps --no-binary :all: vaderSentiment==3.3.2"
        )
    found: list[str] = []
    with tarfile.open(source) as outer:
        name = next((n for n in outer.getnames() if n.endswith(INNER)), None)
        inner = outer.extractfile(name) if name is not None else None
        if inner is None:
            raise FileNotFoundError(f"{source} holds no {INNER}")
        with tarfile.open(fileobj=io.BytesIO(inner.read())) as data:
            for name in sorted(n for n in data.getnames() if n.endswith("_GroundTruth.txt")):
                lines = data.extractfile(name)
                assert lines is not None
                rows = (
                    line.split("\t") for line in lines.read().decode(errors="replace").split("\n")
                )
                found += [row[2].strip() for row in rows if len(row) > 2]
    found = [sentence for sentence in found if len(sentence) >= SHORTEST]
    return [found[i] for i in np.random.default_rng(0).permutation(len(found))]
