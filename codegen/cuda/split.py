"""Scheduled PrimFuncs become CUDA source and, for the host, what launches it.

TVM cuts every function in two (``SplitHostDevice``): kernels, and a half with the calling
convention that functions for processors have, so that the emitted graph calls both alike. That half
computes extents and calls packed functions by the kernels' names
(`codegen/runtime/cuda/launch.c`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tvm
from tvm import tirx
from tvm.ir import Call
from tvm.s_tir.pipeline import finalize_device_passes, finalize_host_passes
from tvm.tirx.build import codegen_build, split_host_device_mods
from tvm_ffi import structural_map

from apq_tvm.codegen.build.unbuilt import unbuilt
from apq_tvm.codegen.cuda.pipeline import to_kernels
from apq_tvm.codegen.graph.c_text import identifier
from apq_tvm.errors import BuildError
from apq_tvm.schedules.graph.exprs import collect
from apq_tvm.schedules.graph.rewrites.lowering import truncate_divisions

_LETTERS = {"int64": "l", "int32": "i", "float32": "f"}
_EXTENTS = (
    *("blockIdx.x", "blockIdx.y", "blockIdx.z"),
    *("threadIdx.x", "threadIdx.y", "threadIdx.z"),
    "tirx.use_dyn_shared_memory",
)
"""Launch parameters, in the order of ``APQ_LAUNCHES``."""


MOST_PARAMS = 512
"""Of a kernel: 4096 bytes (CUDA C++ Programming Guide, "Technical Specifications per Compute
Capability"), as in ``launch.c``."""

SIZE = "size"
"""Begins the names of sizes."""

_CONFIG = {"tirx.disable_assert": True}


@dataclass(frozen=True)
class DeviceKernel:
    """What a launch must know of one kernel.

    Parameters
    ----------
    name : str
    params : str
        A letter each: ``p`` pointer, ``l`` int64, ``i`` int32, ``f`` float32.
    launch : tuple of int
        Which of `_EXTENTS` the call's last arguments are.
    """

    name: str
    params: str
    launch: tuple[int, ...]


@dataclass(frozen=True)
class DeviceCode:
    """The kernels of a module as TVM writes them, and how each is launched."""

    source: str
    kernels: tuple[DeviceKernel, ...]


def split(
    mod: Any, names: Sequence[str], target: Any, folder: Path, prefix: str = ""
) -> tuple[list[Path], DeviceCode]:
    """Compile PrimFuncs for a GPU and its host.

    Parameters
    ----------
    mod : tvm.IRModule
        Holds every function of `names`, scheduled: threads are bound.
    names : sequence of str
        Each becomes ``__tvm_ffi_{prefix}{name}``.
    target : tvm.target.Target
        Of kind cuda, with a host.
    folder : Path
        Receives the host's object file.
    prefix : str
        Tells apart kernels that are built for several targets.

    Returns
    -------
    list of Path, DeviceCode

    Raises
    ------
    BuildError
        TVM could not build the functions (its message inside).
    """
    path = folder / f"{prefix}host.o"
    try:
        with target, tvm.transform.PassContext(config=_CONFIG):
            host, devices = halves(mod, names, target, prefix)
            codegen_build(finalize_host_passes()(host), target.host).write_to_file(str(path), "o")
            if not devices:
                return [path], DeviceCode("", ())
            ((device_target, device),) = devices.items()
            device = finalize_device_passes()(_divide_once(device))
            source = str(codegen_build(device, device_target).inspect_source())
    except BuildError:
        raise
    except Exception as error:
        raise unbuilt(mod, names, error) from error
    return [path], DeviceCode(source, tuple(_kernels(device)))


def halves(mod: Any, names: Sequence[str], target: Any, prefix: str = "") -> tuple[Any, Any]:
    """What runs on the host and, by target, on devices; parameters are those of `split`.

    Launches of the host's half are calls of ``tirx.call_ffi_kernel``: the kernel's name, its
    arguments (``b{i}.data`` is parameter i of the function), the extents of its launch.

    Returns
    -------
    tvm.IRModule, mapping of tvm.target.Target to tvm.IRModule
    """
    functions = {
        tvm.ir.GlobalVar(prefix + identifier(n)): _plain(_whole_arrays(mod[n])).with_attr(
            "global_symbol", prefix + n
        )
        for n in names
    }
    with target, tvm.transform.PassContext(config=_CONFIG):
        bound = tirx.transform.BindTarget(target)(tvm.IRModule(functions))
        host, devices = split_host_device_mods(_meet_whole(to_kernels()(bound)))
    return host, devices


def _whole_arrays(func: Any) -> Any:
    """Arrays keep their size whose address a device function has.

    TVM makes arrays as small as the elements that it sees used, and takes the address of an element
    for a use of that one alone: what the function does with those behind it would be undefined,
    and NVRTC leaves it out.
    """
    given = list(func.params)

    def pointer(call: Any) -> Any:
        if str(getattr(call.op, "name", "")) != "tirx.address_of":
            return call
        array, at = call.args[0].source, tirx.const(0, "int32")
        if any(array.same_as(param) for param in given):
            return call
        for extent, index in zip(array.shape, call.args[0].indices, strict=True):
            at = at * extent + index
        return array.access_ptr(0, offset=at)  # no mask: barriers are the function's own

    return func.with_body(structural_map(func.body, (Call, pointer)))


def _plain(func: Any) -> Any:
    """Parameters and sizes with names of ours, and buffers that begin where their pointers say.

    TVM writes names of variables as they are, and those of sizes are the model's; offsets would be
    arguments of the kernel.
    """
    params = [p for p in func.params if tirx.is_buffer_var(p)]
    sizes: dict[Any, Any] = {}
    for p in func.params:
        for expr in p.shape if tirx.is_buffer_var(p) else (p,):
            for var in collect(expr, tirx.Var):
                name = f"{SIZE if tirx.is_buffer_var(p) else 's'}{len(sizes)}"
                sizes.setdefault(var, tirx.Var(name, str(var.ty)))

    def sized(node: Any) -> Any:
        return structural_map(node, (tirx.Var, lambda var: sizes.get(var, var)))

    fresh = {
        p: tirx.decl_buffer([sized(n) for n in p.shape], p.dtype, f"b{i}")
        for i, p in enumerate(params)
    }
    mine = sizes | fresh
    body = structural_map(func.body, (tirx.Var, lambda var: mine.get(var, var)))
    return tirx.PrimFunc([mine[p] for p in func.params], body, func.ret_type, attrs=func.attrs)


def _meet_whole(mod: Any) -> Any:
    """Warps meet whole: TVM asks which lanes are active, which after a branch may be some only."""

    def name(call: Any) -> Any:
        active = str(getattr(call.op, "name", "")) == "tirx.tvm_warp_activemask"
        return tirx.const(0xFFFFFFFF, "uint32") if active else call

    made = {
        gv: f.with_body(structural_map(f.body, (Call, name))) for gv, f in mod.functions.items()
    }
    return tvm.IRModule(made, attrs=mod.attrs)


def _divide_once(mod: Any) -> Any:
    """Sizes are not negative, which TVM cannot know."""
    made = {}
    for gv, func in mod.functions.items():
        names = [p.name for p in func.params if p.name.startswith(SIZE)]
        made[gv] = truncate_divisions(func, names)
    return tvm.IRModule(made, attrs=mod.attrs)


def _kernels(device: Any) -> list[DeviceKernel]:
    made = []
    for gv, func in device.functions.items():
        attrs = func.attrs
        name = str(attrs["global_symbol"]) if "global_symbol" in attrs else gv.name_hint
        params = "".join(_LETTERS.get(str(p.ty), "p") for p in func.params)
        if len(params) > MOST_PARAMS:
            raise BuildError(
                f"kernel {name} would read {len(params)} tensors and sizes, of which a kernel of "
                f"a GPU takes {MOST_PARAMS}; dimensions of a fixed size (--dim DIM=SIZE) are none"
            )
        tags = [str(tag) for tag in attrs["tirx.kernel_launch_params"]]
        made.append(DeviceKernel(name, params, tuple(map(_EXTENTS.index, tags))))
    return sorted(made, key=lambda kernel: kernel.name)
