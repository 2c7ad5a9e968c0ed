"""Where a graph may be cut so that its parts take different numbers of images at once.

Early layers of a net of images make large activations of few weights: one image at a time stays in
the caches. Late ones have large weights and few activations: several images at a time read the
weights once. `runtime/cpu/images.c` chooses per stage, and keeps what goes from one to the next for
all images.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from apq_tvm.codegen.graph.plain import Buffer, Call, Graph, Place, Stage, tensors_of


def find_stages(graph: Graph) -> tuple[Stage, ...]:
    """Find the stages of a graph whose runs may be cut along its batch.

    Parameters
    ----------
    graph : Graph
        With its lifetimes and `Graph.batch`.

    Returns
    -------
    tuple of Stage
        From the first step on; none where the graph is not cut. Between two of them one buffer is
        alive, whose first axis has the images one after the other; no output is written before.
    """
    if graph.batch < 0 or not all(isinstance(step, Call) for step in graph.steps):
        return ()
    starts = [0, *_cuts(graph)]
    return tuple(
        Stage(start, _weight_bytes(graph, start, end))
        for start, end in zip(starts, [*starts[1:], len(graph.steps)], strict=True)
    )


def _cuts(graph: Graph) -> Iterator[int]:
    """Steps that may begin a stage."""
    batch = graph.symbols[graph.batch].c_name
    written = [b.first for b in graph.buffers if b.output is not None]
    for start in range(1, min([*written, len(graph.steps)])):
        alive = [b for b in graph.buffers if 0 <= b.first < start <= b.last]
        if len(alive) == 1 and _led_by(alive[0], batch):
            yield start


def _led_by(buffer: Buffer, batch: str) -> bool:
    """Whether the images of a buffer lie one after the other."""
    first, *others = buffer.dims
    leads = re.fullmatch(rf"\(*{re.escape(batch)}( \* \w+\)?)*", first) is not None
    return leads and not any(batch in re.findall(r"\w+", dim) for dim in others)


def _weight_bytes(graph: Graph, start: int, end: int) -> int:
    tensors = [tensor for step in graph.steps[start:end] for tensor in tensors_of(step)]
    names = {str(tensor.key) for tensor in tensors if tensor.place is Place.WEIGHT}
    return sum(graph.weights[name].nbytes for name in names)


def stage_lines(stages: Sequence[Stage], step: int) -> list[str]:
    """C before a step: where a stage begins, and the one before it ends."""
    number = next((i for i, stage in enumerate(stages) if stage.first == step), -1)
    begin = f"  if (apq_has_stage(frame, {number})) {{"
    return [*["  }"][: max(0, number)], begin] if number >= 0 else []


def stage_table(stages: Sequence[Stage]) -> str:
    """The C table of stages; of one that is everything where there are none."""
    entries = [f"{{{stage.first}, {stage.weight_bytes}u}}" for stage in stages] or ["{0, 0}"]
    return f"static const apq_stage stage_table[] = {{{', '.join(entries)}}};"
