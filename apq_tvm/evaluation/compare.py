"""Comparing outputs call by call: the float model's once, any number of quantized models' after."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from apq_tvm.errors import BadInput, OutputFailed
from apq_tvm.evaluation.agreement import Agreement, IntegerAgreement, agreement_of
from apq_tvm.evaluation.language import (
    Language,
    LanguageScore,
    find_logits,
    find_tokens,
    predicted,
    windows,
)
from apq_tvm.progress import Progress, Silent
from apq_tvm.quantizers.inputs.read import MASK_NAME, Batch, read_inputs, split
from apq_tvm.types import AnyPath, Array, TensorSpec

Run = Callable[[Batch], Mapping[str, Array]]
"""One call's inputs to outputs by name."""


@dataclass(frozen=True)
class Calls:
    """What is compared: calls, and how their outputs are scored.

    Parameters
    ----------
    batches : tuple of dict
        Inputs of every call, checked.
    language : Language or None
        Given if one output is scored as logits; its `tokens` is an input's name then.
    mask : str
        Name of the attention mask among the inputs, or ``""``.
    """

    batches: tuple[Batch, ...]
    language: Language | None
    mask: str


def read_calls(
    path: AnyPath, inputs: Sequence[TensorSpec], rows: int, language: Language | None
) -> Calls:
    """Read an npz of inputs and cut it into calls.

    Parameters
    ----------
    path : str or path
    inputs : sequence of TensorSpec
        What the model takes.
    rows : int
        Batch entries of a call; language models get windows of tokens instead.
    language : Language or None

    Raises
    ------
    BadInput
        The file does not fit the model, holds NaN or infinity, or too few tokens.
    """
    batches = read_inputs(path, inputs)
    for batch in batches:
        for name, array in batch.items():
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                raise BadInput(f"{path}: input {name!r} holds NaN or infinity")
    mask = next((s.name for s in inputs if MASK_NAME.search(s.name)), "")
    if language is None:
        return Calls(tuple(c for b in batches for c in split(b, inputs, rows)), None, mask)
    tokens = find_tokens(inputs, language.tokens)
    cut = tuple(c for b in batches for c in windows(b, inputs, tokens, language.window))
    count = sum(int(predicted(c[tokens.name], c.get(mask)).sum()) for c in cut)
    if count < language.min_tokens:
        raise BadInput(
            f"{path} has {count} predicted tokens in windows of {language.window}, "
            f"{language.min_tokens} or more are needed"
        )
    found = Language(tokens.name, language.logits, language.window, language.min_tokens)
    return Calls(cut, found, mask)


class Comparison:
    """Running comparison of a quantized model with its float model.

    Parameters
    ----------
    calls : Calls
    """

    def __init__(self, calls: Calls) -> None:
        self.calls = calls
        self.agreements: dict[str, Agreement | IntegerAgreement] = {}
        self.score = LanguageScore() if calls.language else None
        self.logits = ""

    def add(self, batch: Batch, reference: Mapping[str, Array], ours: Mapping[str, Array]) -> None:
        """Compare one call's outputs.

        Raises
        ------
        BadInput
            An output is missing, shapes differ, or values are not finite.
        """
        missing = [name for name in reference if name not in ours]
        if missing:
            raise BadInput(f"there is no output {missing[0]!r}: it is of another model")
        mask = batch.get(self.calls.mask)
        language = self.calls.language
        if language is not None and not self.logits:
            self.logits = find_logits(reference, batch[language.tokens], language.logits)
        for name, value in reference.items():
            if name == self.logits:
                continue
            if name not in self.agreements:
                self.agreements[name] = agreement_of(name, value)
            self.agreements[name].add(ours[name], value, mask)
        if language is not None and self.score is not None:
            ids = batch[language.tokens]
            counted = predicted(ids, mask)
            for row, keep in enumerate(counted):
                here, there = reference[self.logits][row, :-1], ours[self.logits][row, :-1]
                if not keep.all():
                    here, there = here[keep], there[keep]
                self.score.add(here, there, ids[row, 1:][keep])

    def summary(self) -> dict[str, Any]:
        """``outputs``: by name what `Agreement` or `IntegerAgreement` sums up; ``language``: what
        `LanguageScore` does, and ``logits``, the output scored; None if it was not asked for."""
        score = self.score.summary() if self.score else None
        return {
            "outputs": {name: a.summary() for name, a in self.agreements.items()},
            "language": {**score, "logits": self.logits} if score else None,
        }


class Reference:
    """The float model's outputs, computed once and kept in a temporary folder.

    A vocabulary of 49152 times 8192 tokens is 1.6 GB: it is read back call by call. ``TMPDIR`` says
    where that folder is.

    Parameters
    ----------
    calls : Calls
    run : callable
        The float model.
    names : sequence of str
        Its outputs.
    keep : bool
        False computes them anew for every comparison and keeps nothing.
    """

    def __init__(self, calls: Calls, run: Run, names: Sequence[str], keep: bool = True) -> None:
        self.calls, self._run, self._names, self._keep = calls, run, list(names), keep
        self._folder = tempfile.TemporaryDirectory(prefix="apq-eval-")

    def close(self) -> None:
        """Delete what was kept."""
        self._folder.cleanup()

    def __enter__(self) -> Reference:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def outputs(self, index: int) -> Mapping[str, Array]:
        """Outputs of call `index`, computed where they are not there yet.

        Raises
        ------
        OutputFailed
            There is no room for them.
        """
        if not self._keep:
            return self._run(self.calls.batches[index])
        folder = Path(self._folder.name) / str(index)
        if not folder.exists():
            self._save(folder, self._run(self.calls.batches[index]))
        return {
            name: np.load(folder / f"{position}.npy", mmap_mode="r")
            for position, name in enumerate(self._names)
        }

    def _save(self, folder: Path, values: Mapping[str, Array]) -> None:
        part = folder.with_suffix(".part")
        try:
            part.mkdir(exist_ok=True)
            for position, name in enumerate(self._names):
                np.save(part / f"{position}.npy", values[name])
            part.rename(folder)
        except OSError as error:
            size = len(self.calls.batches) * sum(value.nbytes for value in values.values()) / 1e6
            raise OutputFailed(
                f"the float model's outputs, {size:.0f} MB, do not fit {folder.parent}: "
                f"{error.strerror}; TMPDIR names another folder"
            ) from error

    def compare(self, run: Run, progress: Progress | None = None, what: str = "") -> dict[str, Any]:
        """Compare a quantized model on every call; see `Comparison.summary`."""
        progress = progress or Silent()
        comparison = Comparison(self.calls)
        with progress.stage("evaluate", len(self.calls.batches)):
            for index, batch in enumerate(self.calls.batches):
                progress.advance(what)
                reference = self.outputs(index)
                comparison.add(batch, reference, run(batch))
        return comparison.summary()
