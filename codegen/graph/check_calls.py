"""A kernel call must give the kernel what it was made for; checked once here, not in every call.

TVM would put a check of every argument's type, rank and dimensions in front of each kernel: 3 to 6
KB of code each, more than most kernels are themselves. What a module's kernels are called with is
known when it is compiled, and what the user gives is checked before the graph runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import tirx

from apq_tvm.codegen.graph.plain import Tensor
from apq_tvm.errors import BuildError


def check_call(kernel: str, func: Any, args: Sequence[Tensor | str]) -> None:
    """Compare arguments with a PrimFunc's parameters, as far as they are constants.

    Parameters
    ----------
    kernel : str
        For the message.
    func : tvm.tirx.PrimFunc
    args : sequence of Tensor or str
        As in `apq_tvm.codegen.graph.plain.Call`.

    Raises
    ------
    BuildError
        A number, type, rank or dimension that differs.
    """
    if len(func.params) != len(args):
        raise BuildError(f"kernel {kernel} takes {len(func.params)} arguments, not {len(args)}")
    for number, (param, arg) in enumerate(zip(func.params, args, strict=True)):
        is_tensor = isinstance(arg, Tensor)
        if tirx.is_buffer_var(param) != is_tensor:
            raise BuildError(f"kernel {kernel}, argument {number}: a tensor and an integer differ")
        if not isinstance(arg, Tensor):
            continue
        wanted = [str(int(d)) if isinstance(d, tirx.IntImm) else "" for d in param.shape]
        fits = len(wanted) == len(arg.dims) and all(
            not want or not have.isdecimal() or want == have
            for want, have in zip(wanted, arg.dims, strict=True)
        )
        if str(param.dtype) != arg.dtype or not fits:
            raise BuildError(
                f"kernel {kernel}, argument {number}: wants {param.dtype} "
                f"[{', '.join(want or 'any' for want in wanted)}], gets {arg.dtype} "
                f"[{', '.join(arg.dims)}]"
            )
