"""What a session gives to each input of a decoder that is no cache."""

from __future__ import annotations

import re
from collections.abc import Sequence

from apq_tvm.errors import NotApplicable
from apq_tvm.sessions.caches import Pair
from apq_tvm.types import ASKED, KEPT, ImportedModel, TensorSpec

INTEGERS = ("int64", "int32")


def find_feeds(model: ImportedModel, pairs: Sequence[Pair]) -> tuple[dict[str, str], str, str]:
    """What goes to the inputs, and the dimensions that count earlier and new tokens.

    Names say what integers mean, as in models of optimum, torch.onnx and ONNX Runtime's tools;
    shapes must agree.

    Returns
    -------
    dict of str to str
        As in `apq_tvm.types.State`.
    str, str
        Dimensions.

    Raises
    ------
    NotApplicable
        There are no token ids, or caches are not all equally long.
    """
    specs = {spec.name: spec for spec in model.inputs}
    dims = {dim for spec in model.inputs for dim in spec.shape}
    if dims & {KEPT, ASKED}:
        raise NotApplicable(f"an input has a dimension {KEPT} or {ASKED}, which are ours")
    lengths = {specs[pair.past].shape[pair.axis] for pair in pairs}
    if len(lengths) != 1:
        raise NotApplicable(f"caches have several lengths: {', '.join(sorted(map(str, lengths)))}")
    (past,) = lengths
    others = [spec for spec in model.inputs if spec.name not in {pair.past for pair in pairs}]
    ids = [spec for spec in others if _is_ids(model, spec)]
    if len(ids) != 1 or not isinstance(ids[0].shape[1], str):
        raise NotApplicable("no input is known to hold token ids, int64 [batch, sequence]")
    length = ids[0].shape[1]
    for pair in pairs:
        free = [d for d in specs[pair.past].shape if isinstance(d, str)]
        if not set(free) <= {past, ids[0].shape[0]}:
            raise NotApplicable(f"the cache '{pair.past}' has other free sizes than its tokens")
    for spec in others:
        if past in spec.shape and len(spec.shape) > 2:
            raise NotApplicable(f"'{spec.name}' is as long as the caches, but no cache as they are")
    feeds = {spec.name: "ids" if spec in ids else _feed(spec, length) for spec in others}
    return feeds, str(past), str(length)


def _is_ids(model: ImportedModel, spec: TensorSpec) -> bool:
    if spec.dtype not in INTEGERS or len(spec.shape) != 2:
        return False
    readers = [node for node in model.nodes if spec.name in node.inputs]
    looked_up = any(node.op == "apq.Embedding" for node in readers)
    return looked_up and not re.search("position|type|mask", spec.name)


def _feed(spec: TensorSpec, length: str) -> str:
    """``"given"`` for what is not known."""
    if re.search("encoder", spec.name):  # of another sequence than the decoder's own
        return "given"
    integers, rank = spec.dtype in INTEGERS, len(spec.shape)
    last = spec.shape[-1] if spec.shape else 1
    if re.search("mask", spec.name) and rank == 2 and last != length:
        return "mask"
    if integers and re.search("position", spec.name) and rank in (1, 2) and last == length:
        return "positions"
    if integers and re.search("seqlens|lengths", spec.name) and rank in (1, 2):
        return "lengths"
    if integers and re.search("total_seq", spec.name) and rank < 2:
        return "total"
    return "given"
