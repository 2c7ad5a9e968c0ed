"""Tokens for language models from two Debian texts: calibration and evaluation, disjoint.

The texts are of the packages ``jargon-text`` (public domain) and ``debian-reference-en``. The first
half of each is for calibration, the second for evaluation, so no evaluated token was calibrated on.
"""

from __future__ import annotations

import argparse
import gzip
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import smollm2
from numpy.typing import NDArray

TEXTS = (
    Path("/usr/share/doc/jargon-text/jargon.txt.gz"),
    Path("/usr/share/debian-reference/debian-reference.en.txt.gz"),
)
"""Where Debian installs them: apt-get install jargon-text debian-reference-en."""

WINDOW = 512
"""Tokens of one sample. The first has nothing before it, so 511 of them are predicted."""

EVALUATION_WINDOWS = (9, 9)
"""Of each text: 9198 predicted tokens."""

CALIBRATION_WINDOWS = (104, 24)
"""Of each text, about as its prose is long: 128 samples."""

SHORTEST = 200
"""Characters: shorter paragraphs are headings, list entries and commands."""


def read_prose(path: Path) -> str:
    """The paragraphs of a .txt.gz file, unwrapped; tables, headings and short lines are left out.

    Raises
    ------
    FileNotFoundError
        It is not there; the message names the packages.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: apt-get install jargon-text debian-reference-en")
    text = gzip.decompress(path.read_bytes()).decode("utf-8")
    paragraphs = (" ".join(p.split()) for p in re.split(r"\n\s*\n", text) if "|" not in p)
    return "\n\n".join(p for p in paragraphs if len(p) >= SHORTEST)


def slices(
    tokenizer: Any,
    texts: Sequence[Path],
    counts: Sequence[int],
    start: float,
    end: float,
    window: int = WINDOW,
) -> NDArray[np.int64]:
    """Windows of tokens, spread evenly over a part of every text.

    Parameters
    ----------
    tokenizer : tokenizers.Tokenizer
    texts : sequence of Path
    counts : sequence of int
        Windows of each text.
    start, end : float
        Where the part starts and ends, as shares of the text.
    window : int
        Tokens of each.

    Returns
    -------
    int64 [sum(counts), window]

    Raises
    ------
    ValueError
        A part is too short.
    """
    rows = []
    for path, count in zip(texts, counts, strict=True):
        text = read_prose(path)
        piece = text[int(start * len(text)) : int(end * len(text))]
        ids = np.array(tokenizer.encode(piece).ids, np.int64)
        if len(ids) < count * window:
            raise ValueError(
                f"{path}: {len(ids)} tokens, {count} windows of {window} were asked for"
            )
        stride = len(ids) // max(count, 1)
        rows += [ids[i * stride : i * stride + window] for i in range(count)]
    return np.stack(rows)


def evaluation(
    tokenizer: Any,
    texts: Sequence[Path] = TEXTS,
    counts: Sequence[int] = EVALUATION_WINDOWS,
) -> NDArray[np.int64]:
    """Tokens to evaluate on, int64 [windows, WINDOW], from the second half of every text."""
    return slices(tokenizer, texts, counts, 0.5, 1.0)


def calibration(
    tokenizer: Any,
    texts: Sequence[Path] = TEXTS,
    counts: Sequence[int] = CALIBRATION_WINDOWS,
    window: int = WINDOW,
) -> NDArray[np.int64]:
    """Tokens to calibrate on, int64 [windows, window], from the first half of every text."""
    return slices(tokenizer, texts, counts, 0.0, 0.5, window)


def main() -> None:
    """Write both as npz."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="gets evaluation.npz and calibration.npz")
    parser.add_argument("--texts", type=Path, nargs="+", default=TEXTS)
    parser.add_argument("--gguf", type=Path, help="default: of the installed package")
    parser.add_argument(
        "--window", type=int, default=WINDOW, help="tokens of those to calibrate on"
    )
    parser.add_argument("--windows", type=int, nargs="+", default=CALIBRATION_WINDOWS,
                        help="of each text, to calibrate on")  # fmt: skip
    options = parser.parse_args()
    tokenizer = smollm2.read_tokenizer(options.gguf or smollm2.find())
    read = calibration(tokenizer, options.texts, options.windows, options.window)
    for name, ids in (("evaluation", evaluation(tokenizer, options.texts)), ("calibration", read)):
        np.savez(options.folder / f"{name}.npz", input_ids=ids)
        print(f"{options.folder / name}.npz: {ids.shape[0]} windows of {ids.shape[1]} tokens")


if __name__ == "__main__":
    main()
