"""Windows of images as rows: tasks in parallel; their runs of memory LLVM copies as such."""

from __future__ import annotations

from typing import Any

from tvm import s_tir

from apq_tvm.schedules.decide import Decide
from apq_tvm.types import DeviceProfile


def schedule_windows(func: Any, profile: DeviceProfile, decide: Decide) -> Any:
    """Schedule `apq_tvm.ops.images.windows.windows`.

    Parameters
    ----------
    func : tvm.tirx.PrimFunc
    profile : DeviceProfile
    decide : Decide

    Returns
    -------
    tvm.tirx.PrimFunc
    """
    sch = s_tir.Schedule(func)
    (task,) = sch.get_loops(sch.get_sblock("task"))
    sch.parallel(task)
    return sch.mod["main"]
