"""A compiled model: ``run`` it on numpy arrays or any other tensors that speak DLPack.

>>> import minilm_w4
>>> minilm_w4.run(input_ids=ids, attention_mask=mask)["last_hidden_state"]

Inputs and outputs go by their ONNX names; a name that is no Python identifier goes through a dict:
``run({"input:0": x})``. `inputs` and `outputs` list them, `manifest` holds all else that is known
of the model. ``run`` may be called from several threads at once; each call has its own memory.

Every error has the name of the offending tensor in it::

    ModuleError
    ├── LoadError          the library cannot be loaded; an ImportError
    │   ├── WrongMachine     it was compiled for another system, CPU or GPU, or there is no driver
    │   └── BadWeights       weights.safetensors is missing, truncated, altered or of another build
    ├── InputError         an input is missing, unknown, or of the wrong type, rank, shape or value
    └── RunError           the run failed: not enough memory, or a kernel refused its arguments

Needs numpy and nothing else.
"""

from __future__ import annotations

import ctypes
import operator
import os
import re
import warnings
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np

from .errors import (
    BadWeights,
    InputError,
    LoadError,
    ModuleError,
    RunError,
    WrongMachine,
)
from .library import Library
from .ports import (
    Array,
    TensorInfo,
    aligned_empty,
    as_array,
    dtype_of,
    read_manifest,
    tensor_infos,
)
from .results import Results
from .tensors import DL_CODES, Tensors

__all__ = [
    "BadWeights",
    "InputError",
    "LoadError",
    "ModuleError",
    "RunError",
    "TensorInfo",
    "WrongMachine",
    "devices",
    "inputs",
    "manifest",
    "memory",
    "num_threads",
    "outputs",
    "precisions",
    "run",
    "session",
    "set_device",
    "set_num_threads",
    "set_precision",
    "target",
    "to_device",
    "verify",
]

_MAX_THREADS = 1024
_FOLDER = Path(__file__).resolve().parent

manifest: dict[str, Any] = read_manifest(_FOLDER)
inputs: tuple[TensorInfo, ...] = tensor_infos(manifest["inputs"])
outputs: tuple[TensorInfo, ...] = tensor_infos(manifest["outputs"])
_INPUT_ORDER = tuple(info.name for info in inputs)
_INPUT_NAMES = set(_INPUT_ORDER)
_library = Library(_FOLDER, manifest, inputs, outputs)
_GPU = bool(manifest["library"].get("gpu"))
if manifest.get("session"):
    from .generate import Drafted, Sampler, tokens
    from .session import Session, SessionLibrary, whole_number

    __all__ += ["Drafted", "Sampler", "Session", "generate"]
if _GPU:
    from .device_array import Borrowed, DeviceArray, in_gpu_memory

    __all__ += ["DeviceArray"]


def _on_device(shape: tuple[int, ...], kind: np.dtype[Any]) -> Any:
    return DeviceArray(_library, shape, kind)


_results = Results(_library, _on_device)


# ---- threads, weights, memory ----


def set_num_threads(threads: int) -> None:
    """Set how many threads a run uses; the default is the physical cores this process may use.

    Runs of a GPU use one, whatever is set.

    Raises
    ------
    InputError
        Not in 1 .. 1024.
    TypeError
        Not an integer.
    """
    if not 1 <= operator.index(threads) <= _MAX_THREADS:
        raise InputError(f"number of threads is {threads}, wanted 1 to {_MAX_THREADS}")
    _library.check(_library.call("set_num_threads", ctypes.c_int32(threads)))


def num_threads() -> int:
    """Tell how many threads runs of this thread use: at a limit of threads, fewer than set."""
    return _library.call("num_threads")


def target() -> str:
    """The device whose code runs here: a library may hold code for several."""
    name: bytes = _library.function("target")(_library.handle)
    return name.decode()


def devices() -> list[str]:
    """Names of this machine's GPUs, in the order `set_device` counts; of a processor's module, it.

    Raises
    ------
    WrongMachine
        No driver.
    """
    count = _library.function("num_devices")()
    if count < 0:
        _library.check(count)
    names = []
    for number in range(count):
        name = ctypes.create_string_buffer(128)
        code = _library.function("device_name")(ctypes.c_int32(number), name, ctypes.c_int32(128))
        _library.check(code)
        names.append(name.value.decode(errors="replace"))
    return names


def set_device(device: int) -> None:
    """Move the module to another of `devices`: its weights are copied there, its bits stay.

    Raises
    ------
    WrongMachine
        There is no such device, or it is none that the module was compiled for.
    RunError
        Not enough memory there, a run is under way, or arrays of runs lie on the present device.
    """
    bits = precisions()
    _library.move(operator.index(device))
    for name, number in bits.items():
        _library.check(_library.call("set_precision", _c_text(name), ctypes.c_int32(number)))


def set_precision(bits: int, layers: str | None = None) -> None:
    """Choose the bits of weights from the next run on; nothing is copied or loaded.

    Parameters
    ----------
    bits : int
        In the range the model was compiled for, such as 3 to 8 for anyprec3-8.
    layers : str, optional
        Regular expression, searched for in the layers' names; by default all of them.

    Raises
    ------
    InputError
        A layer has no such bits, no layer has bits to choose, or the expression is none or matches
        no layer.
    """
    bits = operator.index(bits)
    if layers is None:
        _library.check(_library.call("set_precision", None, ctypes.c_int32(bits)))
        return
    ranges = manifest["precisions"]
    if not ranges:
        raise InputError(
            f"no layer of {_library.name} has bits to choose; a scheme like anyprec3-8 gives them"
        )
    try:
        chosen = [name for name in ranges if re.search(layers, name)]
    except re.error as error:
        raise InputError(f"layers={layers!r} is no regular expression: {error}") from error
    if not chosen:
        raise InputError(
            f"{layers!r} matches no layer whose bits can be chosen; nearest of {len(ranges)} are "
            f"{', '.join(_nearest(layers, ranges))}; precisions() has all"
        )
    for name in chosen:
        if not ranges[name][0] <= bits <= ranges[name][1]:
            least, most = ranges[name]
            raise InputError(f"bits={bits}: layer '{name}' has {least} to {most}")
    for name in chosen:
        _library.check(_library.call("set_precision", _c_text(name), ctypes.c_int32(bits)))


def _nearest(pattern: str, names: Iterable[str]) -> list[str]:
    """Three names that have most of the pattern's text in them, in its order."""
    from difflib import SequenceMatcher

    matcher = SequenceMatcher(None, b=pattern, autojunk=False)

    def shared(name: str) -> int:
        matcher.set_seq1(name)
        return sum(block.size for block in matcher.get_matching_blocks() if block.size > 1)

    return sorted(names, key=shared, reverse=True)[:3]


def precisions() -> dict[str, int]:
    """Bits at present of every layer whose bits can be chosen."""
    return {name: _library.call("precision", _c_text(name)) for name in manifest["precisions"]}


def _c_text(name: str) -> bytes:
    """A name as the library spells it: a NUL would end it."""
    return name.encode().replace(b"\0", b"\xc0\x80")


def verify() -> None:
    """Read all weights and compare their checksum; the first ``run`` does so by itself.

    Raises
    ------
    BadWeights
        The file was altered.
    """
    _library.check(_library.call("verify"))
    _library.verified = True


def memory() -> dict[str, int]:
    """Measure the working memory of the context that the next ``run`` takes.

    Returns
    -------
    dict
        ``"arena"``: bytes it holds; ``"live"``: the most that was alive at once in its last run.
    """
    context = _library.take_context()
    arena, live = ctypes.c_uint64(), ctypes.c_uint64()
    _library.function("memory")(context.c, ctypes.byref(arena), ctypes.byref(live))
    _library.idle.append(context)
    return {"arena": arena.value, "live": live.value}


def to_device(array: Any) -> Any:
    """Copy an array into the memory of the module's GPU, for inputs of many runs.

    Parameters
    ----------
    array : array_like

    Returns
    -------
    DeviceArray
        Of the array's shape and type; for a module of processors the array itself.

    Raises
    ------
    RunError
        Not enough memory.
    """
    source = np.asarray(array)
    if not _GPU:
        return source
    if source.dtype.kind not in DL_CODES or not source.dtype.isnative:
        raise InputError(f"an array of {source.dtype} cannot lie in a GPU's memory")
    copy = DeviceArray(_library, source.shape, source.dtype)
    copy.fill(source)
    return copy


if not _GPU and os.environ.get("APQ_THREADS") == "openmp" and not _library.function("has_openmp")():
    warnings.warn(
        f"{_library.name} runs on threads of its own: no OpenMP runtime (libgomp.so.1) was found; "
        "apt-get install libgomp1",
        RuntimeWarning,
        stacklevel=2,
    )


# ---- running ----


def run(
    feeds: Mapping[str, Any] | None = None,
    /,
    *,
    bits: int = 0,
    on_device: bool | Iterable[str] = False,
    into: Mapping[str, Array] | None = None,
    **named: Any,
) -> dict[str, Any]:
    """Run the model.

    Parameters
    ----------
    feeds : mapping of str to tensor
        Inputs by ONNX name. Tensors are numpy arrays or anything with ``__dlpack__`` in CPU memory,
        of any strides and alignment, or contiguous in the memory of the module's GPU, where they
        are used in place. Types are never cast.
    bits : int
        Bits of the weights in this run, where the model was compiled for a range of them; 0 is what
        `set_precision` said. (An input called "bits" or "into" goes through `feeds`.)
    on_device : bool or iterable of str
        Outputs that stay in the GPU's memory, all or by name: a cache that the next run takes. (A
        processor's outputs lie in its memory anyway.)
    into : mapping of str to ndarray
        Arrays that outputs are written into, by name: of the output's type and shape, contiguous,
        writeable, and none of the inputs. ``into=result`` reuses what an earlier run returned.
    **named : tensor
        More inputs, for names that are identifiers.

    Returns
    -------
    dict of str to ndarray or DeviceArray
        Every ONNX output, in ONNX order; but for those of `into`, new arrays that belong to the
        caller.

    Raises
    ------
    InputError
        Names, types, ranks, shapes, embedding ids, bits or arrays of `into` that do not fit; the
        message says what does.
    RunError
        Not enough memory, or a kernel refused its arguments.
    BadWeights
        The weights file was altered (found by the first run).
    """
    if not _library.verified:
        verify()
    stay = _staying(on_device) if on_device else ()
    context = _library.take_context()
    given, wanted = context.given, context.wanted
    try:
        arrays = _collect(feeds or {}, named)  # what the library reads must live on
        plain = _are_plain(arrays, given.types)
        if not plain:
            arrays = [*map(_as_input, inputs, arrays, given.types, repeat(context.stream))]
        shapes = [array.shape for array in arrays] if plain else []
        if given.point(arrays, shapes) if plain else given.point_any(arrays):
            context.known = False
        if not context.known:
            _results.find_shapes(context)
        results = _results.memory(context, stay, into or {}, arrays)
        if stay:
            wanted.point_any([*results.values()])
        else:
            wanted.point([*results.values()], context.shapes)
        number = ctypes.c_int32(operator.index(bits))
        _library.check(_library.run_c(context.c, given.c, wanted.c, number))
        for index in context.late:
            results[_results.names[index]] = _results.kept(context.c, index)
    finally:
        given.give_back()
        wanted.give_back()
        _library.idle.append(context)
    return results


def _are_plain(values: Sequence[Any], types: Sequence[np.dtype[Any]]) -> bool:
    """Whether they are contiguous numpy arrays of these types, as most are."""
    return all(
        [
            type(value) is np.ndarray and value.dtype == kind and value.flags.c_contiguous
            for value, kind in zip(values, types, strict=True)
        ]
    )


def session(max_tokens: int, *, batch: int = 1, given: Mapping[str, Any] | None = None) -> Session:
    """Make a session of a decoder: it keeps the caches that are inputs and outputs of `run`.

    Parameters
    ----------
    max_tokens : int
        Room for so many tokens of every sequence. Memory is taken up as they come.
    batch : int
        Sequences, all equally long.
    given : mapping of str to array, optional
        Inputs that are the same in all its runs, and that it cannot make by itself, such as what
        an encoder found: those that ``manifest["session"]["feeds"]`` calls "given".

    Returns
    -------
    Session

    Raises
    ------
    InputError
        The model has no sessions, or not so long ones; an input is missing, unknown or of another
        type.
    RunError
        Not enough memory.
    """
    info = manifest.get("session")
    if not info:
        why = manifest.get("stateless") or "it has no caches among its inputs and outputs"
        raise InputError(f"{_library.name} has no sessions: {why}")
    wanted = [name for name, feed in info["feeds"].items() if feed == "given"]
    arrays = dict(given or {})
    if sorted(arrays) != sorted(wanted):
        raise InputError(f"a session of {_library.name} is given {', '.join(wanted) or 'nothing'}")
    tensors = Tensors([dtype_of(port) for port in inputs])
    held = [
        np.ascontiguousarray(as_array(port, arrays[port.name], kind))
        if port.name in arrays
        else np.empty((0,) * len(port.shape), kind)  # a session makes it
        for port, kind in zip(inputs, tensors.types, strict=True)
    ]
    tensors.point_any(held)
    if not _library.verified:
        verify()
    functions = SessionLibrary(_library.function, _library.check, aligned_empty, InputError)
    handle = ctypes.c_void_p()
    batch = whole_number("batch", batch, InputError)
    max_tokens = whole_number("max_tokens", max_tokens, InputError)
    code = functions.session_create(
        _library.handle, batch, max_tokens, ctypes.byref(tensors.c), ctypes.byref(handle)
    )
    _library.check(code)
    logits = dtype_of(next(port for port in outputs if port.name == info["logits"]))
    return Session(functions, logits, handle, batch, max_tokens)


_new_session = session  # `generate` has an argument of that name


def generate(
    ids: Any,
    max_new_tokens: int,
    *,
    session: Session | None = None,
    sampler: Sampler | None = None,
    stop: Collection[int] = (),
    bits: int | Callable[[int], int] = 0,
    draft: tuple[int, int] | None = None,
    drafted: Drafted | None = None,
) -> Iterator[int]:
    """Generate tokens of one sequence, each as soon as it is computed.

    >>> list(smollm2.generate(ids, 40))  # the most probable ones

    Parameters
    ----------
    ids : array_like of int [tokens]
        What comes before: all of it, or what is new to `session`.
    max_new_tokens : int
    session : Session, optional
        To go on with; it holds all tokens then but the last. By default one of the right size.
    sampler : Sampler, optional
        `Sampler(temperature=0.8, top_p=0.95)`; by default the most probable token is taken.
    stop : collection of int
        Tokens behind which nothing comes; the token itself is given out.
    bits : int or callable
        Of the weights, where the model was compiled for a range of them; or what gives them for the
        number of each new token.
    draft : (int, int), optional
        Guess so many tokens (the second) at so few bits (the first), and check them at once.
    drafted : Drafted, optional
        Counts guesses and those that were right.

    Yields
    ------
    int

    Raises
    ------
    InputError
        As of `Session.prefill`; nothing to begin with; a draft of bits that there are not.
    """
    given = np.asarray(ids)
    if given.ndim != 1 or given.size == 0 or operator.index(max_new_tokens) < 1:
        raise InputError(f"ids of shape {given.shape}: wanted one token at least, to make as many")
    # Each module with sessions has a class of its own.
    if session is not None and not (manifest.get("session") and isinstance(session, Session)):
        raise InputError(f"{session!r} is no session of {_library.name}")
    mine = session or _new_session(given.size + max_new_tokens)
    if mine.batch != 1:
        raise InputError(f"the session has {mine.batch} sequences; tokens are generated for one")
    return tokens(mine, given, max_new_tokens, sampler or Sampler(), stop, bits, draft, drafted)


def _staying(on_device: bool | Iterable[str]) -> set[str]:
    """Names of the outputs that stay in a GPU's memory."""
    every = {info.name for info in outputs}
    if on_device is False or on_device is True:
        return every if on_device and _GPU else set()
    chosen = {on_device} if isinstance(on_device, str) else set(on_device)
    if chosen - every:
        unknown = ", ".join(sorted(map(str, chosen - every)))
        raise InputError(f"on_device has unknown outputs: {unknown}; there are {', '.join(every)}")
    return chosen if _GPU else set()


def _collect(feeds: Mapping[str, Any], named: Mapping[str, Any]) -> list[Any]:
    """Inputs in ONNX order, as they were given."""
    every = {**feeds, **named} if named else feeds
    if len(every) < len(feeds) + len(named):
        twice = sorted(set(feeds) & set(named))
        raise InputError(f"inputs given twice: {', '.join(twice)}")
    if every.keys() != _INPUT_NAMES:
        unknown = [str(name) for name in every if name not in _INPUT_NAMES]
        missing = [name for name in _INPUT_ORDER if name not in every]
        parts = [f"unknown inputs: {', '.join(unknown)}"] if unknown else []
        parts += [f"missing inputs: {', '.join(missing)}"] if missing else []
        raise InputError(f"{'; '.join(parts)}. {_library.name} takes {', '.join(_INPUT_ORDER)}")
    return [every[name] for name in _INPUT_ORDER]


def _as_input(info: TensorInfo, value: Any, kind: np.dtype[Any], stream: int) -> Any:
    """An array, or what a GPU's tensor is `Borrowed` as."""
    if _GPU and not isinstance(value, np.ndarray) and in_gpu_memory(value):
        return _borrow(info, value, stream)
    return as_array(info, value, kind)


def _borrow(info: TensorInfo, value: Any, stream: int) -> Any:
    try:
        return Borrowed(value, stream)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise InputError(
            f"input '{info.name}' is a {type(value).__name__} in a GPU's memory that cannot be "
            f"read by DLPack: {error}"
        ) from error
