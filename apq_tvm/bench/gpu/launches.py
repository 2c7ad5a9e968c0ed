"""What a scheduled function of a GPU launches for so many rows: kernels, extents, arguments.

Read off the half of it that would run on the host (`apq_tvm.codegen.cuda.split.halves`), whose
sizes become numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from apq_tvm.errors import BuildError

_EXTENTS = (
    *("blockIdx.x", "blockIdx.y", "blockIdx.z", "threadIdx.x", "threadIdx.y", "threadIdx.z"),
    "tirx.use_dyn_shared_memory",
)
_ONES = (1, 1, 1, 1, 1, 1, 0)


@dataclass(frozen=True)
class Launch:
    """One launch.

    Parameters
    ----------
    kernel : str
    extents : tuple of int
        Blocks x, y, z, threads x, y, z, bytes of dynamic shared memory.
    arguments : tuple of (str, str or int)
        What kind each is, and which: ``("pointer", name of an array)``, ``("int64", value)``,
        ``("int32", value)``.
    """

    kernel: str
    extents: tuple[int, ...]
    arguments: tuple[tuple[str, str | int], ...]

    def described(self) -> dict[str, Any]:
        """For JSON."""
        arguments = [list(argument) for argument in self.arguments]
        return {"kernel": self.kernel, "extents": list(self.extents), "arguments": arguments}


def launches(
    funcs: Mapping[str, Any], arrays: Mapping[str, Sequence[str]], target: Any, m: int
) -> dict[str, tuple[Launch, ...]]:
    """The launches of functions whose one size is the rows of x.

    Parameters
    ----------
    funcs : mapping of str to tvm.tirx.PrimFunc
        Scheduled.
    arrays : mapping of str to sequence of str
        By function, what its parameters are called here.
    target : tvm.target.Target
        Of kind cuda, with a host.
    m : int
        Rows.

    Returns
    -------
    dict of str to tuple of Launch
        By function, in the order in which they are launched.

    Raises
    ------
    BuildError
        A kernel wants working memory of its own, or numbers that do not follow from the rows.
    """
    import tvm
    from tvm.ir import Call

    from apq_tvm.codegen.cuda.split import halves
    from apq_tvm.codegen.graph.c_text import identifier
    from apq_tvm.schedules.graph.exprs import call_name, collect

    host, _ = halves(
        tvm.IRModule({tvm.ir.GlobalVar(n): f for n, f in funcs.items()}), list(funcs), target
    )
    bodies = {gv.name_hint: func.body for gv, func in host.functions.items()}
    made = {}
    for name in funcs:
        body = bodies[identifier(name)]
        numbers = _Numbers(body, m)
        calls = [c for c in collect(body, Call) if call_name(c) == "call_ffi_kernel"]
        made[name] = tuple(_launch(call, arrays[name], numbers) for call in calls)
    return made


def shape_at(shape: Sequence[Any], rows: Any, m: int) -> tuple[int, ...]:
    """The shape of a buffer for `m` rows; `rows` is the variable that stands for them."""
    from tvm import sym, tirx

    from apq_tvm.schedules.graph.exprs import substitute

    analyzer, count = sym.Analyzer(), tirx.const(m, "int64")
    return tuple(int(analyzer.simplify(substitute(dim, rows, count))) for dim in shape)


class _Numbers:
    """Expressions of a host's half as numbers."""

    def __init__(self, body: Any, m: int) -> None:
        from tvm import sym, tirx

        from apq_tvm.codegen.cuda.split import SIZE
        from apq_tvm.schedules.graph.exprs import collect

        self._m, self._size = m, SIZE
        self._simplify = sym.Analyzer().simplify
        self._bound = {bind.var: bind.value for bind in collect(body, tirx.Bind)}

    def value(self, expr: Any) -> int:
        """The number that an expression is."""
        from tvm import tirx
        from tvm_ffi import structural_map

        def known(var: Any) -> Any:
            if var.name.startswith(self._size):
                return tirx.const(self._m, str(var.ty))
            return tirx.const(self.value(self._bound[var]), str(var.ty))

        try:
            return int(self._simplify(structural_map(expr, (tirx.Var, known))))
        except (KeyError, TypeError, ValueError) as error:
            raise BuildError(f"a launch wants {expr}, which no count of rows tells") from error


def _launch(call: Any, names: Sequence[str], numbers: _Numbers) -> Launch:
    kernel, *args = call.args
    tags = [str(tag) for tag in call.attrs.launch_params]
    count = len(args) - len(tags)
    extents = list(_ONES)
    for tag, extent in zip(tags, args[count:], strict=True):
        extents[_EXTENTS.index(tag)] = numbers.value(extent)
    given = tuple(_argument(arg, names, numbers) for arg in args[:count])
    return Launch(str(kernel.value), tuple(extents), given)


def _argument(arg: Any, names: Sequence[str], numbers: _Numbers) -> tuple[str, str | int]:
    from apq_tvm.schedules.graph.exprs import call_name

    if str(arg.ty) in ("int32", "int64"):
        return str(arg.ty), numbers.value(arg)
    buffer = str(arg.args[0].name) if call_name(arg) == "buffer_data" else str(arg)
    if not buffer.startswith("b") or not buffer[1:].isdecimal():
        raise BuildError(f"a kernel reads {buffer}, working memory that only a module gives it")
    return "pointer", names[int(buffer[1:])]
