"""Keys and values behind what exporters write to give every head of queries its own copy.

torch and optimum repeat heads of keys, ``[B, Nkv, T, H]`` → Unsqueeze → Expand → Reshape to
``[B, N, T, H]``; our own operators put an axis of 1 beside the heads. The kernel reads them where
they were before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from apq_tvm.errors import NotApplicable
from apq_tvm.launches.chains import EXPANDS, Shape, makers_of, shape_of
from apq_tvm.types import ImportedModel, Node

RESHAPES = ("Reshape", "apq.Reshape", "Squeeze", "Unsqueeze")


@dataclass(frozen=True)
class Stored:
    """A value and where its axes lie.

    Parameters
    ----------
    name : str
    order : tuple of int
        As ONNX Transpose, to ``[T, B, Nkv, H]``, or ``[T, B, H]`` where there are no heads.
    """

    name: str
    order: tuple[int, ...]


class SharedKeys:
    """Finds what keys and values of a model were before they were repeated."""

    def __init__(self, model: ImportedModel) -> None:
        self._model, self._makers = model, makers_of(model)

    def shape(self, name: str) -> Shape:
        """Of a value.

        Raises
        ------
        NotApplicable
            It is not known.
        """
        shape = shape_of(self._model, name)
        if shape is None:
            raise NotApplicable(f"the shape of {name!r} is not known")
        sums = self._model.lengths
        return tuple(sums.get(dim, dim) if isinstance(dim, str) else dim for dim in shape)

    def factor(self, node: Node) -> float:
        """The number that a Mul or Div multiplies its other input by.

        Raises
        ------
        NotApplicable
            It is no number.
        """
        numbers = [self._model.weights.get(name) for name in node.inputs]
        found = [x for x in numbers if x is not None and x.size == 1]
        if len(found) != 1 or (node.op == "Div" and numbers[1] is None):
            raise NotApplicable(f"{node.op} {node.name!r} is by no number")
        by = float(found[0].reshape(()))
        return by if node.op == "Mul" else 1.0 / by

    def find(self, name: str, perm: Sequence[int], token: int, column: int) -> Stored:
        """Keys or values of a product.

        Parameters
        ----------
        name : str
        perm : sequence of int
            From what is stored to the product's operand ``[*batch, .., ..]``.
        token, column : int
            Which of the operand's last two axes, as -1 or -2, are tokens and columns.

        Raises
        ------
        NotApplicable
            More axes of a batch than sequences and heads.
        """
        batch = tuple(perm[:-2])
        if len(batch) == 3:
            name, batch, ends = self._without_group(name, batch, (perm[token], perm[column]))
        elif len(batch) == 2:
            name, batch, ends = self._before_repeats(name, batch, (perm[token], perm[column]))
        elif len(batch) == 1:
            ends = (perm[token], perm[column])
        else:
            raise NotApplicable(f"{name!r} has {len(batch)} axes of a batch")
        return self._before_transpose(Stored(name, (ends[0], *batch, ends[1])))

    def _without_group(
        self, name: str, batch: tuple[int, ...], ends: tuple[int, int]
    ) -> tuple[str, tuple[int, ...], tuple[int, int]]:
        """Without the axis of heads in a group, which is of 1 or was expanded from it."""
        axis = batch[2]
        expand = self._made_by(name, EXPANDS)
        if self.shape(name)[axis] != 1 and expand is not None:
            name = expand.inputs[0]
        shape = self.shape(name)
        reshape = self._made_by(name, RESHAPES)
        if reshape is None or len(shape) != 5 or shape[axis] != 1:
            raise NotApplicable(f"{name!r} has an axis of heads in a group that is not made here")
        source = reshape.inputs[0]
        if self.shape(source) != (*shape[:axis], *shape[axis + 1 :]):
            raise NotApplicable(f"{source!r} becomes {shape}: not by an axis of 1 alone")

        def moved(at: int) -> int:
            return at - (at > axis)

        return source, (moved(batch[0]), moved(batch[1])), (moved(ends[0]), moved(ends[1]))

    def _before_repeats(
        self, name: str, batch: tuple[int, ...], ends: tuple[int, int]
    ) -> tuple[str, tuple[int, ...], tuple[int, int]]:
        """Before each head was copied for a group; as it is where no head was."""
        same, axis = (name, batch, ends), batch[1]
        value, shape, swapped = self._joined(name)
        expand = self._made_by(value, EXPANDS)
        split = self._made_by(expand.inputs[0], RESHAPES) if expand is not None else None
        if expand is None or split is None:
            return same
        wide, narrow = self.shape(value), self.shape(expand.inputs[0])
        source = split.inputs[0]
        before = self.shape(source)
        repeated = (
            len(wide) == len(narrow) == len(shape) + 1
            and narrow == (*wide[: axis + 1], 1, *wide[axis + 2 :])
            and _without(wide, axis) == _without(shape, axis, 1)
            and before == (*narrow[: axis + 1], *narrow[axis + 2 :])
        )
        if not repeated:
            return same
        return source, batch, ends[::-1] if swapped else ends

    def _joined(self, name: str) -> tuple[str, Shape, bool]:
        """What was reshaped so that heads and their copies are one axis, and to what.

        torch.export writes keys as heads joined with the batch, transposed, and split again: the
        shape is then that before the last two axes were swapped.
        """
        shape = self.shape(name)
        join = self._made_by(name, RESHAPES)
        if join is None:
            return name, shape, False
        swap = self._made_by(join.inputs[0], ("Transpose",))
        merge = self._made_by(swap.inputs[0], RESHAPES) if swap is not None else None
        if swap is None or merge is None or tuple(swap.attrs.get("perm", ())) != (0, 2, 1):
            return join.inputs[0], shape, False
        ends = self.shape(merge.inputs[0])[-2:]
        if self.shape(merge.outputs[0])[-2:] != ends or shape[-2:] != ends[::-1]:
            return name, shape, False
        return merge.inputs[0], (*shape[:-2], *ends), True

    def _before_transpose(self, stored: Stored) -> Stored:
        maker = self._made_by(stored.name, ("Transpose",))
        if maker is None:
            return stored
        rank = len(stored.order)
        perm = tuple(maker.attrs.get("perm", tuple(range(rank))[::-1]))
        return Stored(maker.inputs[0], tuple(perm[axis] for axis in stored.order))

    def _made_by(self, name: str, ops: Sequence[str]) -> Node | None:
        maker = self._makers.get(name)
        return maker if maker is not None and maker.op in ops else None


def _without(shape: Shape, axis: int, count: int = 2) -> Shape:
    """A shape without `count` axes from `axis` on."""
    return (*shape[:axis], *shape[axis + count :])


def attributes(node: Node) -> Mapping[str, tuple[int, ...]]:
    """Permutations of an ``apq.MatMul``."""
    return {key: tuple(node.attrs[key]) for key in ("perm_a", "perm_b", "perm_out")}
