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
import json
import math
import operator
import os
import platform
import re
import sys
import warnings
from collections import deque
from collections.abc import (
    Callable,
    Collection,
    Container,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass
from itertools import accumulate, pairwise, repeat
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .tensors import DL_CODES, DLTensor, Tensors, addresses_of, shape_of

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

Array = NDArray[Any]


class ModuleError(Exception):
    """Base of every error of a compiled module."""


class LoadError(ModuleError, ImportError):
    """The library cannot be loaded: what ``import`` of the package raises."""

    def __init__(self, text: str) -> None:
        super().__init__(text, name=__name__, path=__file__)


class WrongMachine(LoadError):
    """The library was compiled for another system or for CPU features this one lacks."""


class BadWeights(LoadError):
    """The weights file is missing, truncated, altered or belongs to another build."""


class InputError(ModuleError, ValueError):
    """An input is missing, unknown, or of the wrong type, rank, shape or value."""


class RunError(ModuleError, RuntimeError):
    """The run failed: not enough memory, or a kernel refused its arguments."""


@dataclass(frozen=True)
class TensorInfo:
    """One input or output: ONNX name, numpy dtype name, shape (a str is a varying dimension)."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]


# ---- the C library ----

_ALIGNMENT = 64  # what kernels want; other memory is copied by the library
_COPIED = 4096  # bytes of a tensor that are copied in less time than memory is aligned in
_MAX_THREADS = 1024
_ERRORS = {-1: InputError, -2: BadWeights, -3: WrongMachine, -4: RunError, -5: RunError}


class _Context:
    """What one call at a time uses: the library's context, and the tensors that go to it."""

    def __init__(self, c: ctypes.c_void_p) -> None:
        self.c = c
        self.given = Tensors([_dtype_of(info) for info in inputs])
        self.wanted = Tensors([_dtype_of(info) for info in outputs])
        self.known = False  # whether `shapes` are those of the outputs for `given`
        self.shapes: list[tuple[int, ...]] = []
        self.dims = (ctypes.c_int64 * max(_ENDS[-1], 1))()
        self.small: list[bool] = []  # whether the library may copy an output
        self.late: list[int] = []  # outputs whose shapes only a run tells
        self.stream = 0  # of a GPU, what its runs go to


def _system() -> str:
    """Android has a C library of its own, whatever name Python gives the system."""
    return "android" if hasattr(sys, "getandroidapilevel") else sys.platform


def _libc() -> str:
    """This Python's C library, as triples call it."""
    if _system() == "android":
        return "android"
    try:
        return "gnu" if os.confstr("CS_GNU_LIBC_VERSION") else "musl"
    except (OSError, ValueError):
        return "musl"


class _Library:
    """The loaded library, its open handle, and contexts that no call is using."""

    def __init__(self, folder: Path, manifest: Mapping[str, Any]) -> None:
        info = manifest["library"]
        self.name = str(info["name"])
        here = (_system(), platform.machine())
        if here != (info["system"], info["machine"]):
            raise WrongMachine(
                f"{self.name} was compiled for {info['system']} on {info['machine']}, this is "
                f"{here[0]} on {here[1]}; compile the model for this machine: "
                "apq-tvm compile --target, see apq-tvm targets"
            )
        path = folder / f"lib{self.name}.so"
        try:
            self.c = ctypes.CDLL(str(path))
            for function in ("last_error", "target", "version"):
                self._function(function).restype = ctypes.c_char_p
            self._function("stream").restype = ctypes.c_void_p
        except (OSError, AttributeError) as error:  # no library, or another module's
            text = f"{path} cannot be loaded: {error}"
            if info["libc"] != _libc():
                raise WrongMachine(
                    f"{text}; it is linked with the C library {info['libc']}, and this Python with "
                    f"{_libc()}: compile the model with --triple {here[1]}-linux-{_libc()}"
                ) from error
            raise LoadError(text) from error
        self.run_c = self._function("run_bits")
        self.shapes_c = self._function("output_shapes")
        self.result_c = self._function("result")
        self.weights = os.fsencode(folder / "weights.safetensors")
        self.device, self.arrays = 0, 0  # which, and how many outputs lie in its memory
        self.idle: deque[_Context] = deque()
        self.contexts = 0  # idle ones, and those of calls
        self.handle = self.open_on(0)
        self.check_ports(folder, manifest)
        self.verified = False

    def open_on(self, device: int) -> ctypes.c_void_p:
        """A handle for runs on a device."""
        handle = ctypes.c_void_p()
        number = ctypes.c_int32(device)
        self.check(self._function("open_on")(self.weights, number, ctypes.byref(handle)))
        return handle

    def move(self, device: int) -> None:
        """Let all runs from now on be on another device."""
        if len(self.idle) != self.contexts:
            raise RunError(f"{self.name} cannot change its device while it runs")
        if self.arrays:
            forget()
        if self.arrays:
            raise RunError(
                f"{self.name} cannot change its device: {self.arrays} arrays lie in the memory of "
                f"GPU {self.device}; copy them by numpy.asarray, and let go of them"
            )
        fresh = self.open_on(device)
        while self.idle:
            self._function("context_destroy")(self.idle.pop().c)
        self.contexts = 0
        self._function("close")(self.handle)
        self.handle, self.device = fresh, device

    def __del__(self) -> None:
        """Give a GPU's memory back when nobody holds the module; the process's end does anyway."""
        if sys is None or sys.is_finalizing() or not getattr(self, "handle", None):
            return
        while self.idle:
            self._function("context_destroy")(self.idle.pop().c)
        self._function("close")(self.handle)
        self.handle = ctypes.c_void_p()  # arrays may go after it, in one round of the collector

    def check_ports(self, folder: Path, manifest: Mapping[str, Any]) -> None:
        """The library reads and writes as many tensors and dimensions as it was built for."""
        for kind in ("input", "output"):
            rank, ports = self._function(f"{kind}_rank"), manifest[f"{kind}s"]
            found = [rank(self.handle, ctypes.c_int32(i)) for i in range(len(ports) + 1)]
            if found != [*(len(port["shape"]) for port in ports), -1]:
                raise LoadError(
                    f"{folder / 'manifest.json'} does not belong to lib{self.name}.so: other "
                    f"{kind}s; copy or compile the module again"
                )

    def _function(self, name: str) -> Any:
        return getattr(self.c, f"{self.name}_{name}")

    def check(self, code: int) -> None:
        """Raise what a return code stands for."""
        if code != 0:
            text = self._function("last_error")().decode(errors="replace")
            raise _ERRORS.get(code, RunError)(text)

    def call(self, name: str, *args: Any) -> int:
        """Call ``<module>_<name>`` on the handle."""
        return int(self._function(name)(self.handle, *args))

    def take_context(self) -> _Context:
        """An idle context, or a new one; a deque is safe here without a lock, also over a fork."""
        try:
            return self.idle.pop()
        except IndexError:
            context = ctypes.c_void_p()
            self.check(self.call("context_create", ctypes.byref(context)))
            self.contexts += 1
            made = _Context(context)
            made.stream = self._function("stream")(context) or 0
            return made


_FOLDER = Path(__file__).resolve().parent


def _read_manifest() -> dict[str, Any]:
    path = _FOLDER / "manifest.json"
    try:
        loaded: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, RecursionError, ValueError) as error:
        raise LoadError(f"{path} cannot be read: {error}") from error
    if not _is_manifest(loaded):
        raise LoadError(f"{path} is not a compiled module's; copy or compile the module again")
    return loaded


def _is_manifest(loaded: Any) -> bool:
    """Whether all that this file takes from it is there and of the right kind."""
    try:
        ports = [*loaded["inputs"], *loaded["outputs"]]
        words = [loaded["library"][key] for key in ("name", "system", "machine", "libc")]
        words += [port[key] for port in ports for key in ("name", "dtype")]
        dims = [d for port in ports for d in (*port["shape"], len(port["shape"]))]
        bits = [b for least, most in loaded["precisions"].values() for b in (least, most)]
        types = [np.dtype(port["dtype"]).kind for port in ports]
    except (ArithmeticError, AttributeError, LookupError, SyntaxError, TypeError, ValueError):
        return False
    return (
        all(isinstance(word, str) for word in words)
        and all(isinstance(dim, int | str) for dim in dims)
        and all(isinstance(number, int) for number in bits)
        and all(kind in DL_CODES for kind in types)
        and words[0].isidentifier()
    )


def _tensor_infos(entries: list[dict[str, Any]]) -> tuple[TensorInfo, ...]:
    return tuple(TensorInfo(e["name"], e["dtype"], tuple(e["shape"])) for e in entries)


manifest: dict[str, Any] = _read_manifest()
inputs: tuple[TensorInfo, ...] = _tensor_infos(manifest["inputs"])
outputs: tuple[TensorInfo, ...] = _tensor_infos(manifest["outputs"])
_INPUT_ORDER = tuple(info.name for info in inputs)
_INPUT_NAMES = set(_INPUT_ORDER)
_OUTPUT_NAMES = tuple(info.name for info in outputs)
_ENDS = [*accumulate((len(info.shape) for info in outputs), initial=0)]
_OUTPUT_DIMS = tuple(pairwise(_ENDS))  # where, among those of all outputs
_OUTPUT_NUMBERS = {name: number for number, name in enumerate(_OUTPUT_NAMES)}
_library = _Library(_FOLDER, manifest)
_GPU = bool(manifest["library"].get("gpu"))
if manifest.get("session"):
    from .generate import Drafted, Sampler, tokens
    from .session import Session, SessionLibrary, whole_number

    __all__ += ["Drafted", "Sampler", "Session", "generate"]
if _GPU:
    from .device_array import Borrowed, DeviceArray, forget, in_gpu_memory

    __all__ += ["DeviceArray"]


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
    name: bytes = _library._function("target")(_library.handle)
    return name.decode()


def devices() -> list[str]:
    """Names of this machine's GPUs, in the order `set_device` counts; of a processor's module, it.

    Raises
    ------
    WrongMachine
        No driver.
    """
    count = _library._function("num_devices")()
    if count < 0:
        _library.check(count)
    names = []
    for number in range(count):
        name = ctypes.create_string_buffer(128)
        code = _library._function("device_name")(ctypes.c_int32(number), name, ctypes.c_int32(128))
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
    _library._function("memory")(context.c, ctypes.byref(arena), ctypes.byref(live))
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


if (
    not _GPU
    and os.environ.get("APQ_THREADS") == "openmp"
    and not _library._function("has_openmp")()
):
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
            _find_shapes(context)
        results = _results(context, stay, into or {}, arrays)
        if stay:
            wanted.point_any([*results.values()])
        else:
            wanted.point([*results.values()], context.shapes)
        number = ctypes.c_int32(operator.index(bits))
        _library.check(_library.run_c(context.c, given.c, wanted.c, number))
        for index in context.late:
            results[_OUTPUT_NAMES[index]] = _kept_result(context.c, index)
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


def _results(
    context: _Context, stay: Container[str], into: Mapping[str, Array], given: Sequence[Any]
) -> dict[str, Any]:
    """Memory for the outputs, by name; the dict is the caller's."""
    if into and _are_like_results(into, context, stay):
        return dict(into)
    if into:
        _check_into(into, context, stay, given)
    elif not stay:
        return {
            name: np.empty(shape, kind) if small else _aligned_empty(shape, kind)
            for name, shape, kind, small in zip(
                _OUTPUT_NAMES, context.shapes, context.wanted.types, context.small, strict=True
            )
        }
    ports = zip(_OUTPUT_NAMES, context.shapes, context.wanted.types, strict=True)
    return {
        name: into[name]
        if name in into
        else DeviceArray(_library, shape, kind)
        if name in stay
        else _aligned_empty(shape, kind)
        for name, shape, kind in ports
    }


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
    tensors = Tensors([_dtype_of(port) for port in inputs])
    held = [
        np.ascontiguousarray(_as_array(port, arrays[port.name], kind))
        if port.name in arrays
        else np.empty((0,) * len(port.shape), kind)  # a session makes it
        for port, kind in zip(inputs, tensors.types, strict=True)
    ]
    tensors.point_any(held)
    if not _library.verified:
        verify()
    functions = SessionLibrary(_library._function, _library.check, _aligned_empty, InputError)
    handle = ctypes.c_void_p()
    batch = whole_number("batch", batch, InputError)
    max_tokens = whole_number("max_tokens", max_tokens, InputError)
    code = functions.session_create(
        _library.handle, batch, max_tokens, ctypes.byref(tensors.c), ctypes.byref(handle)
    )
    _library.check(code)
    logits = _dtype_of(next(port for port in outputs if port.name == info["logits"]))
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


def _find_shapes(context: _Context) -> None:
    """Ask the library for the shapes of the outputs; those that only a run tells stay empty."""
    _library.check(_library.shapes_c(context.c, context.given.c, context.dims))
    dims = context.dims[:]
    context.shapes = [tuple(dims[start:end]) for start, end in _OUTPUT_DIMS]
    context.late = (
        [i for i, s in enumerate(context.shapes) if s and min(s) < 0] if -1 in dims else []
    )
    for index in context.late:
        context.shapes[index] = (0,)
    every = zip(context.shapes, context.wanted.types, strict=True)
    context.small = [math.prod(shape) * kind.itemsize <= _COPIED for shape, kind in every]
    context.known = True


def _are_like_results(into: Mapping[str, Array], context: _Context, stay: Container[str]) -> bool:
    """Whether they are what a run returned, or arrays just like those: nothing else to check."""
    arrays = [*into.values()]
    if (*into,) != _OUTPUT_NAMES or stay or context.late:
        return False
    plain = all(
        [
            type(array) is np.ndarray and array.dtype == kind and array.flags.carray  # writeable
            for array, kind in zip(arrays, context.wanted.types, strict=True)
        ]
    )
    if not plain or [array.shape for array in arrays] != context.shapes:
        return False
    memory = addresses_of(arrays) + context.given.addresses
    return len(set(memory)) == len(arrays) + len(set(context.given.addresses))


def _check_into(
    into: Mapping[str, Array], context: _Context, stay: Container[str], given: Sequence[Any]
) -> None:
    """Refuse arrays that outputs cannot be written into."""
    here = [array for array in given if isinstance(array, np.ndarray)]
    taken = dict(zip(addresses_of(here), repeat("an input"), strict=False))
    for name, array in into.items():
        if name not in _OUTPUT_NUMBERS:
            known = ", ".join(_OUTPUT_NAMES)
            raise InputError(f"into has an unknown output: {name}; there are {known}")
        why = "is to stay in the GPU's memory" if name in stay else _unfit(array, context, name)
        if why is None and array.size:
            (address,) = addresses_of((array,))
            why = f"is {taken[address]} too" if address in taken else None
            taken[address] = f"output '{name}'"
        if why is not None:
            raise InputError(f"into: the array of output '{name}' {why}")


def _unfit(array: Any, context: _Context, name: str) -> str | None:
    """Why an output cannot be written into an array; None if it can."""
    index = _OUTPUT_NUMBERS[name]
    kind, shape = context.wanted.types[index], context.shapes[index]
    if index in context.late:
        return "cannot be given: its shape depends on data"
    if not isinstance(array, np.ndarray):
        return f"is a {type(array).__name__}, wanted a numpy array"
    if array.dtype != kind:
        return f"has dtype {array.dtype}, wanted {kind}"
    if array.shape != shape:
        return f"has shape {array.shape}, wanted {shape}"
    if not array.flags.c_contiguous:
        return "is not contiguous"
    return None if array.flags.writeable else "is read-only"


def _kept_result(context: ctypes.c_void_p, index: int) -> Array:
    """A copy of an output that the context keeps: its shape depends on the data."""
    tensor, info = DLTensor(), outputs[index]
    _library.check(_library.result_c(context, ctypes.c_int32(index), ctypes.byref(tensor)))
    result = _aligned_empty(shape_of(tensor), _dtype_of(info))
    if result.size:
        ctypes.memmove(result.ctypes.data, tensor.data, result.nbytes)
    return result


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
    return _as_array(info, value, kind)


def _borrow(info: TensorInfo, value: Any, stream: int) -> Any:
    try:
        return Borrowed(value, stream)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise InputError(
            f"input '{info.name}' is a {type(value).__name__} in a GPU's memory that cannot be "
            f"read by DLPack: {error}"
        ) from error


def _as_array(info: TensorInfo, value: Any, kind: np.dtype[Any]) -> Array:
    """The value as an array of the right type, sharing its memory."""
    if isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
    elif hasattr(value, "__dlpack__"):
        try:
            array = np.from_dlpack(value)
        except (BufferError, RuntimeError, TypeError, ValueError) as error:
            raise InputError(
                f"input '{info.name}' is a {type(value).__name__} that numpy cannot read by "
                f"DLPack: {error}"
            ) from error
    else:
        raise InputError(
            f"input '{info.name}' is a {type(value).__name__}; wanted a numpy array or another "
            f"tensor with __dlpack__, of {info.dtype}"
        )
    if array.dtype != kind:  # also another byte order
        swapped = array.dtype.name == info.dtype
        raise InputError(
            f"input '{info.name}' has dtype {array.dtype.str if swapped else array.dtype}, wanted "
            f"{info.dtype}: nothing is cast silently, use .astype('{info.dtype}')"
        )
    if not array.flags.c_contiguous and any(s % array.itemsize for s in array.strides):
        array = array.copy()  # a field of packed records: DLPack strides count whole elements
    return array


def _dtype_of(info: TensorInfo) -> np.dtype[Any]:
    """numpy's dtype of an input or output; bfloat16 is one of ml_dtypes."""
    if info.dtype == "bfloat16":
        try:
            import ml_dtypes
        except ImportError as error:
            raise InputError(
                f"'{info.name}' is of bfloat16, which numpy knows by the package ml_dtypes alone: "
                "install it"
            ) from error
        kind: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        return kind
    return np.dtype(info.dtype)


def _aligned_empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """An uninitialised array, into which kernels may write as it is."""
    size = math.prod(shape) * dtype.itemsize
    try:
        block = np.empty(size + _ALIGNMENT, np.uint8)
    except (MemoryError, ValueError) as error:  # NumPy refuses more than it can count
        raise RunError(f"no memory for an output of {size} bytes") from error
    (start,) = addresses_of((block,))
    return np.ndarray(shape, dtype, block, -start % _ALIGNMENT)
