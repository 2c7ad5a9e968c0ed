"""The grain of parallel loops: what the runtime, a kernel and the tuner make of it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import tvm
from tvm.script import tirx as T

from apq_tvm.codegen.build.extents import FUNCTION, GRAIN, tell_iterations
from apq_tvm.codegen.graph.work import nanoseconds, work_of
from apq_tvm.codegen.package.folder import COMMON, RUNTIME
from apq_tvm.formats import parse_scheme
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.schedules.decide import Recorded
from apq_tvm.schedules.devices import find_profile, linear_kernels
from apq_tvm.schedules.graph.rewrites.loops import elements, grain_of, parallel_when, with_grain
from apq_tvm.schedules.recorded import fingerprint
from apq_tvm.tune.api import plan_of
from apq_tvm.tune.space import unshared
from apq_tvm.tune.tasks import extract

SOURCE = Path(__file__).parent / "c" / "grain.c"


@T.prim_func
def doubled(x: T.handle, y: T.handle) -> None:
    n = T.int64()
    a = T.match_buffer(x, (n, 64), "float32")
    b = T.match_buffer(y, (n, 64), "float32")
    for i in T.parallel(n):
        for j in T.vectorized(64):
            b[i, j] = a[i, j] * T.float32(2)


def test_threads_and_tasks_need_so_many_times_the_work(tmp_path: Path) -> None:
    """20 microseconds: a thread for 4, a task for 1; the next loop knows nothing of it."""
    folders = [f"-I{COMMON}", f"-I{RUNTIME / 'cpu'}"]
    files = [str(SOURCE), str(RUNTIME / "cpu" / "launch.c")]
    command = ["cc", "-std=gnu11", *folders, *files, "-pthread", "-o", str(tmp_path / "grain")]
    subprocess.run(command, check=True)
    done = subprocess.run([str(tmp_path / "grain")], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["4 20", "1 1", "2 10", "4 50", "4 20"]


def test_a_kernel_tells_its_grain() -> None:
    assert with_grain(doubled, 1).same_as(doubled) and grain_of(doubled) == 1
    coarse = with_grain(doubled, 4)
    assert fingerprint(coarse) != fingerprint(doubled)
    plain, told = (tell_iterations(func).script() for func in (doubled, coarse))
    assert FUNCTION in plain and GRAIN not in plain
    assert FUNCTION in told and GRAIN in told


@pytest.mark.parametrize(("least", "grain"), [(8192, 1), (2048, 0.25), (32768, 4)])
def test_what_only_a_run_knows_is_a_grain(least: int, grain: float) -> None:
    work, decide = elements(doubled.params[0]), Recorded({"parallel_least": least})
    assert grain_of(parallel_when(doubled, work, 8192, decide)) == grain


def test_a_linear_layer_asks_for_it() -> None:
    """On processors, where it has work for several threads; a default kernel is as it was."""
    scheme = parse_scheme("W8A8")
    for target, n, asked in (("znver4", 512, True), ("znver4", 64, False), ("h200", 512, False)):
        profile = find_profile(target)
        spec = LinearSpec(n, 512, scheme, asymmetric=scheme.asymmetric_acts)
        kernel = next(k for k in linear_kernels(profile) if k.is_for(spec))
        with tvm.target.Target(dict(profile.target)):
            choice = kernel.choose(spec, profile, Recorded({"grain": 4} if asked else {}))
            assert ("grain" in choice.alternatives) == asked
            assert grain_of(kernel.scheduled(choice)) == (4 if asked else 1)


def test_the_tuner_does_not_search_it() -> None:
    for n, decided in ((512, 2), (64, 1)):
        (plan,) = plan_of(None, "znver4", "W8A8", [(n, 512)])
        space = next(task for task in extract(plan, [1]) if task.op == "linear").space()
        kept = unshared(space).points
        assert len(space.points) == decided * len(kept) and kept[0] == space.points[0]
        assert all(dict(point.decisions).get("grain", 1) == 1 for point in kept)


def test_the_tuner_estimates_what_a_module_does() -> None:
    (n,) = (dim for dim in doubled.params[0].shape if not isinstance(dim, tvm.tirx.IntImm))
    text = work_of(doubled, {n: "24"}, "24 * 64", "2 * 4 * 24 * 64")
    found = nanoseconds(doubled, [(24, 64), (24, 64)])
    assert found == pytest.approx(eval(text.replace("(double)", ""))) and found > 24 * 64 * 0.3
