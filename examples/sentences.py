"""The demo's sentences as model inputs: paraphrase pairs, padded, with an attention mask.

``python examples/sentences.py sentences.npz`` writes what ``apq-tvm eval --inputs`` takes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

SENTENCES = Path(__file__).with_name("sentences.json")


def load() -> tuple[list[str], dict[str, NDArray[np.int64]]]:
    """Read the pairs.

    Returns
    -------
    texts : list of str
        2P sentences; 2i and 2i + 1 are a pair.
    inputs : dict of str to int64 [2P, longest]
        ``input_ids`` padded with 0, and ``attention_mask``.
    """
    pairs = json.loads(SENTENCES.read_text(encoding="utf-8"))["pairs"]
    texts = [text for pair in pairs for text in pair["texts"]]
    rows = [ids for pair in pairs for ids in pair["ids"]]
    shape = (len(rows), max(map(len, rows)))
    inputs = {name: np.zeros(shape, np.int64) for name in ("input_ids", "attention_mask")}
    for row, ids in enumerate(rows):
        inputs["input_ids"][row, : len(ids)] = ids
        inputs["attention_mask"][row, : len(ids)] = 1
    return texts, inputs


def ranked_first(embeddings: NDArray[np.floating]) -> NDArray[np.bool_]:
    """Tell for each sentence whether its paraphrase is nearer than every other sentence.

    Parameters
    ----------
    embeddings : float [2P, width]
        Of the sentences in the order of `load`.

    Returns
    -------
    bool [2P]
    """
    unit = embeddings / np.linalg.norm(embeddings, axis=1, keepdims=True)
    cosine = unit @ unit.T
    np.fill_diagonal(cosine, -np.inf)
    rows = np.arange(len(cosine))
    partner = rows ^ 1
    own = cosine[rows, partner]
    cosine[rows, partner] = -np.inf
    return np.asarray(own > cosine.max(axis=1))


def main() -> None:
    """Write the inputs to the npz named on the command line."""
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/sentences.py OUTPUT.npz")
    texts, inputs = load()
    np.savez(sys.argv[1], **inputs)
    print(f"{sys.argv[1]}: {len(texts)} sentences of up to {inputs['input_ids'].shape[1]} tokens")


if __name__ == "__main__":
    main()
