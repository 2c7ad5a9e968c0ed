"""What the C source says of sessions: which buffers outlive a run, and what inputs are fed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from apq_tvm.codegen.graph.plain import Buffer, Call, Graph, Kept, Place, Step, tensors_of
from apq_tvm.types import State


def add_session(graph: Graph, state: State) -> None:
    """Note in a graph what its sessions need.

    Parameters
    ----------
    graph : Graph
        As read; changed in place.
    state : State
        Of the model.
    """
    names = [port.name for port in graph.inputs]
    feeds = [state.feeds.get(name, "past") for name in names]
    ids = feeds.index("ids")
    outputs = [port.name for port in graph.outputs]
    axis = graph.inputs[names.index(state.pasts[0])].shown.index(state.past)
    graph.kept = Kept(
        feeds=tuple(feeds),
        ids=ids,
        past_axis=axis,
        logits=outputs.index(state.logits),
        presents=frozenset(map(outputs.index, state.presents)),
    )
    for step in graph.calls:
        if step.grows:
            for tensor in tensors_of(step)[-step.outputs :]:
                graph.buffers[int(tensor.key)].grows = True


def left_out(graph: Graph) -> Mapping[int, int]:
    """Steps that only serve an output that sessions do not want: number → that output."""
    if graph.kept is None:
        return {}
    users: dict[int, list[int]] = {}
    for number, step in enumerate(graph.steps):
        for tensor in tensors_of(step):
            if tensor.place is Place.BUFFER:
                users.setdefault(int(tensor.key), []).append(number)
    results = {int(tensor.key) for tensor in graph.results if tensor.place is Place.BUFFER}
    found: dict[int, int] = {}
    for number in reversed(range(len(graph.steps))):
        made = _written(graph, graph.steps[number])
        if len(made) != 1:
            continue
        output, readers = graph.buffers[made[0]].output, set(users[made[0]]) - {number}
        if not readers and output in graph.kept.presents:
            found[number] = output
        elif readers and made[0] not in results and readers <= found.keys():
            served = {found[reader] for reader in readers}
            if len(served) == 1:
                found[number] = served.pop()
    return found


def _written(graph: Graph, step: Step) -> list[int]:
    if not isinstance(step, Call):
        return []
    tensors = tensors_of(step)
    return [int(t.key) for t in tensors[len(tensors) - step.outputs :] if t.place is Place.BUFFER]


def session_table(graph: Graph, buffers: Sequence[Buffer]) -> str:
    """The C table that ``apq_module.kept`` points to; empty without sessions."""
    kept = graph.kept
    if kept is None:
        return ""
    numbers = [str(i) for i, buffer in enumerate(buffers) if buffer.grows]
    feeds = ", ".join(f"APQ_FEED_{feed.upper()}" for feed in kept.feeds)
    fields = f"{kept.ids}, {kept.past_axis}, {kept.logits}, {len(numbers)}"
    return "\n".join(
        [
            f"static const int32_t kept_buffers[] = {{{', '.join(numbers)}}};",
            f"static const apq_feed kept_feeds[] = {{{feeds}}};",
            f"static const apq_kept kept_table = {{{fields}, kept_buffers, kept_feeds}};",
        ]
    )
