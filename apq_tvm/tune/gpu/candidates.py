"""Candidates of a bundle: kernels of a case that were decided otherwise, to be timed beside it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from typing import Any

from apq_tvm.bench.gpu.bundle import Compile, Searched
from apq_tvm.bench.gpu.layer import GpuLayer
from apq_tvm.bench.linear import LinearCase
from apq_tvm.schedules.decide import Decide, Defaults, Recorded
from apq_tvm.schedules.recorded import bare, default_of_kernel
from apq_tvm.tune.space import Point, space_of
from apq_tvm.tune.tasks import rows_around


def searched(
    layer: GpuLayer, case: LinearCase, rows: Sequence[int], compile_image: Compile, most: int
) -> Searched:
    """What a case of ``bundle.json`` says of its candidates.

    Parameters
    ----------
    layer : GpuLayer
        By default.
    case : LinearCase
    rows : sequence of int
        Of x, of all cases of the layer: each answer holds for those that are nearest.
    compile_image : callable
    most : int
        Candidates, drawn at random.

    Returns
    -------
    Searched
        Of the case: the kernel's ``schedule``, as records have it, and ``rows``. Of each candidate
        its decisions, launches and the hash of its image; and the image.
    """
    choice = layer.choice(case.m, case.bits)
    schedule = default_of_kernel(bare(layer.spec), layer.kernel(choice.kernel), layer.profile)
    span = rows_around(case.m, rows, choice.m_min, choice.m_max)
    made = [
        ({**described, "sha256": sha256(image).hexdigest()}, image)
        for described, image in _candidates(layer, case, most, compile_image)
    ]
    return {"schedule": schedule, "rows": list(span)}, made


def _candidates(
    layer: GpuLayer, case: LinearCase, most: int, compile_image: Compile
) -> Iterator[tuple[dict[str, Any], bytes]]:
    """Those of other code than the default that want x as the default does."""
    kernel = layer.kernel(layer.choice(case.m, case.bits).kernel)
    points = space_of({kernel.name: lambda d: kernel.choose(layer.spec, layer.profile, d)}).points
    drawn = random.Random(case.m).sample(points[1:], min(most, len(points) - 1))
    first = [launch.described() for launch in layer.launches(case.m, case.bits)[0]]
    seen = {layer.code.source}
    for point in drawn:
        other = layer.decided(_decider(point))
        before, product = other.launches(case.m, case.bits)
        if other.code.source in seen or [launch.described() for launch in before] != first:
            continue
        seen.add(other.code.source)
        described = {
            "decisions": [list(answer) for answer in point.decisions],
            "product": [launch.described() for launch in product],
        }
        yield described, compile_image(other.code)


def _decider(point: Point) -> Callable[[str], Decide]:
    decisions = dict(point.decisions)
    return lambda name: Recorded(decisions) if name == point.kernel else Defaults()
