"""A learning run: what it works on, and what passes from block to block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from apq_tvm.quantizers.learn.blocks import Block
from apq_tvm.quantizers.learn.learned import Learned
from apq_tvm.quantizers.torch.graph import Values
from apq_tvm.quantizers.torch.ops import Tensor
from apq_tvm.types import Array, Calibration, ImportedModel, QuantizedModel, QuantizedTensor

APART = 8
"""One call of so many is not learned from, where there are as many."""

KINDS = ("abq", "finetune", "train", "distill", "qat")

END_TO_END = ("distill", "qat")
"""Of them those that train all layers at once."""


@dataclass
class Run:
    """A learning run: what it works on, and what is done.

    Parameters
    ----------
    model : ImportedModel
        The float model.
    quantized : QuantizedModel
        Where learning starts: codes of every layer, embeddings included.
    calls : sequence of mapping
        Inputs.
    calibration : Calibration
    kind : str
        One of `KINDS`.
    epochs : int
        Passes over `calls` per block.
    learned : Learned
        Blocks that are done.
    done : int
        How many.
    rate : float or None
        Learning rate of ``distill`` and ``qat``, if not their own.
    feeds_back : bool
        Codes of every block are chosen anew first (`block_feedback`), not by those of `END_TO_END`.
    losses : dict of str to (float, float)
        Of ``train`` and ``abq``, by block, and of ``qat`` and ``distill``: on calls that were not
        learned from (`judged_apart`), before and after.
    alphas : dict of str to float
        Of ``abq``, by block: the exponent that its balance vectors started from.
    """

    model: ImportedModel
    quantized: QuantizedModel
    calls: Sequence[Mapping[str, Array]]
    calibration: Calibration
    kind: str
    epochs: int
    learned: Learned
    done: int = 0
    rate: float | None = None
    feeds_back: bool = False
    losses: dict[str, tuple[float, float]] = field(default_factory=dict)
    alphas: dict[str, float] = field(default_factory=dict)

    @property
    def judged_apart(self) -> bool:
        """Whether there are calls enough to keep some apart."""
        return len(self.calls) >= APART


RowWeights = Sequence[Mapping[str, Tensor]]
"""Per call and linear layer: weights of its rows without padding, float32 [rows]."""


@dataclass
class Streams:
    """Values between blocks, one dict per call: of the float model and of the quantized one."""

    full: list[Values]
    quantized: list[Values]
    symbols: list[dict[str, int]]
    masks: list[Tensor | None]
    widths: list[int]  # of any-precision layers; 0 where there are none
    weights: RowWeights = ()  # of rows, where codes are chosen anew


@dataclass(frozen=True)
class Fed:
    """A block's layers with codes chosen anew, by node.

    Parameters
    ----------
    tensors : mapping of str to QuantizedTensor
    biases : mapping of str to float32 [N]
        Corrected for what rounding takes from the mean output; only of layers that have one.
    """

    tensors: Mapping[str, QuantizedTensor] = field(default_factory=dict)
    biases: Mapping[str, Array] = field(default_factory=dict)


def tables_of(block: Block, tables: Values) -> Values:
    """Tables of a block's embeddings; a head that shares one is not a table."""
    names = {node.inputs[0] for node in block.nodes if node.op == "apq.Embedding"}
    return {name: table for name, table in tables.items() if name in names}


def split(count: int) -> tuple[list[int], list[int]]:
    """Calls to learn from and calls to judge by; the same where there are too few."""
    judged = list(range(APART - 1, count, APART))
    learned = [call for call in range(count) if call not in judged]
    return learned, judged or learned
