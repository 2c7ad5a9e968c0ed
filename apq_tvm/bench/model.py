"""A whole compiled module beside ONNX Runtime (float, its own int8) and OpenVINO, if installed; or
beside another compiled module."""

from __future__ import annotations

import logging
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from apq_tvm.bench import openvino
from apq_tvm.bench.memory import measure_memory
from apq_tvm.bench.timing import Candidate, Timing, interleave, repeated
from apq_tvm.errors import BadInput
from apq_tvm.evaluate import Batch, call_module, open_session, read_inputs, specs_of
from apq_tvm.extras import require
from apq_tvm.module import load_module, ports, read_manifest
from apq_tvm.progress import Progress, Silent
from apq_tvm.types import AnyPath, Array, TensorSpec

BATCH_NAME = re.compile(r"batch|^n$", re.IGNORECASE)
SEQUENCE_NAME = re.compile(r"seq|len|time|^s$|^t$", re.IGNORECASE)

IDS = 1000
"""Made-up token ids are below this: in every vocabulary, and far enough apart to miss the cache."""

FLOAT = "onnxruntime fp32"
INT8 = "onnxruntime int8 dynamic (quantize_dynamic)"


def resolve_dims(
    inputs: Sequence[TensorSpec], batch: int, seq: int, given: Mapping[str, int]
) -> dict[str, int]:
    """Choose a size for every symbolic dimension.

    Parameters
    ----------
    inputs : sequence of TensorSpec
    batch, seq : int
        For dimensions whose name says that they are a batch or a sequence.
    given : mapping of str to int
        For the others, and before the names are looked at.

    Returns
    -------
    dict of str to int

    Raises
    ------
    BadInput
        A dimension's name says nothing and it is not in `given`, or `given` names none.
    """
    names = list(dict.fromkeys(d for s in inputs for d in s.shape if isinstance(d, str)))
    unknown = sorted(set(given) - set(names))
    if unknown:
        have = ", ".join(names) or "none"
        raise BadInput(f"--dims: the model has no dimension {unknown[0]!r}; it has {have}")
    dims = {}
    for name in names:
        if name in given:
            dims[name] = given[name]
        elif BATCH_NAME.search(name):
            dims[name] = batch
        elif SEQUENCE_NAME.search(name):
            dims[name] = seq
        else:
            raise BadInput(f"how large is dimension {name!r}? Say --dims {name}=SIZE")
    return dims


def make_inputs(inputs: Sequence[TensorSpec], dims: Mapping[str, int]) -> Batch:
    """Make up inputs: random numbers, token ids, masks of ones and segment ids of zeros.

    Parameters
    ----------
    inputs : sequence of TensorSpec
    dims : mapping of str to int
        Size of every symbolic dimension.

    Returns
    -------
    dict of str to ndarray
    """
    rng = np.random.default_rng(0)
    batch: Batch = {}
    for spec in inputs:
        shape = tuple(dims[d] if isinstance(d, str) else d for d in spec.shape)
        dtype = np.dtype(spec.dtype)
        name = spec.name.lower()
        value: Array
        if dtype.kind == "f":
            value = rng.standard_normal(shape)
        elif dtype.kind == "b" or "mask" in name:
            value = np.ones(shape)
        elif "type" in name or "segment" in name:
            value = np.zeros(shape)
        else:
            value = rng.integers(1, IDS, shape)
        batch[spec.name] = value.astype(dtype)
    return batch


def one_call(
    specs: Sequence[TensorSpec],
    batch: int,
    seq: int,
    dims: Mapping[str, int] | None = None,
    inputs: AnyPath | None = None,
) -> tuple[dict[str, int], Batch]:
    """The inputs of a run: the first call of an npz, or made-up ones.

    Parameters
    ----------
    specs : sequence of TensorSpec
    batch, seq, dims
        Sizes of symbolic dimensions (`resolve_dims`), where inputs are made up.
    inputs : str or path, optional
        The npz.

    Returns
    -------
    dict of str to int, dict of str to ndarray
        Sizes, none of those of an npz, and arrays by name.

    Raises
    ------
    BadInput
        Anything given does not fit.
    """
    if inputs is not None:
        return {}, read_inputs(inputs, specs)[0]
    sizes = resolve_dims(specs, batch, seq, dims or {})
    return sizes, make_inputs(specs, sizes)


def quantize_with_onnxruntime(model: AnyPath, folder: Path) -> Path:
    """Quantize `model` with ONNX Runtime's own dynamic int8 quantization, default options.

    Parameters
    ----------
    model : str or path
    folder : Path
        Where the result is written.

    Returns
    -------
    Path

    Raises
    ------
    BadInput
        ONNX Runtime refuses the model.
    """
    from onnxruntime.quantization import quantize_dynamic

    output = folder / "int8.onnx"
    level = logging.getLogger().level
    logging.getLogger().setLevel(logging.ERROR)  # it advises on preprocessing through the root
    try:
        quantize_dynamic(str(model), str(output))
    except Exception as error:  # its exception classes have no public common base
        raise BadInput(f"ONNX Runtime cannot quantize {model}: {error}") from error
    finally:
        logging.getLogger().setLevel(level)
    return output


def bench_model(
    module: AnyPath,
    against: AnyPath,
    *,
    batch: int = 1,
    seq: int = 128,
    dims: Mapping[str, int] | None = None,
    inputs: AnyPath | None = None,
    threads: int | None = None,
    bits: Sequence[int] = (),
    budget_s: float = 8.0,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Time a compiled module beside its ONNX model in other runtimes, or beside another module.

    ONNX Runtime runs the float model and its own dynamic int8 quantization of it; OpenVINO runs the
    float model where it is installed. Another module shows what other records or options gained.

    Parameters
    ----------
    module : str or path
        Folder of the compiled module.
    against : str or path
        The float ONNX file, or the folder of a compiled module.
    batch, seq : int
        Sizes of symbolic dimensions by their names (`resolve_dims`).
    dims : mapping of str to int, optional
        Sizes of other symbolic dimensions.
    inputs : str or path, optional
        npz of inputs instead of made-up ones; the first call in it is timed.
    threads : int, optional
        For all candidates; default is what the module starts with: all physical cores.
    bits : sequence of int
        Widths at which to time the module too, where they are chosen at run time.
    budget_s : float
        Seconds for all candidates together.
    progress : Progress, optional

    Returns
    -------
    dict
        ``module, against, dims, threads, us, noise, rivals`` (name → µs), ``rival_noise`` (name →
        share), ``bits`` (width → µs), ``ratio``: the fastest rival's time over ours, ``refused``
        (rival → why it cannot run the model) and ``memory`` (`measure_memory`).

    Raises
    ------
    BadInput
        Anything given does not fit.
    MissingPackage
        onnxruntime, which is to run the ONNX file, is not installed.
    """
    progress = progress or Silent()
    if not Path(against).is_dir():
        require("onnxruntime")
    package = load_module(module)
    with progress.stage("bench", 4), tempfile.TemporaryDirectory(prefix="apq-bench-") as folder:
        progress.advance("inputs")
        sizes, call = one_call(_specs(module, against), batch, seq, dims, inputs)
        count = threads or package.num_threads()
        package.set_num_threads(count)
        progress.advance("rivals")
        rivals, refused = _rivals(against, call, count, Path(folder))
        progress.advance("timing")
        _check_call(package, call, made_up=inputs is None)
        candidates = _candidates(package, call, bits, rivals)
        timings = interleave(candidates, budget_s=budget_s)
        progress.advance("memory")
        memory = measure_memory(module, call, count)
    return {
        "module": str(module),
        "against": str(against),
        "dims": sizes or {name: list(array.shape) for name, array in call.items()},
        "threads": count,
        **_figures(timings, bits),
        "refused": refused,
        "memory": memory,
    }


def _specs(module: AnyPath, against: AnyPath) -> Sequence[TensorSpec]:
    """The inputs: of the ONNX file, which has those that a module has no use for too."""
    if Path(against).is_dir():
        return ports(module, read_manifest(module))
    return specs_of(open_session(against))


def _rivals(
    model: AnyPath, call: Batch, threads: int, folder: Path
) -> tuple[dict[str, Callable[[Batch], Any]], dict[str, str]]:
    """What runs the model beside the module, and why others do not."""
    if Path(model).is_dir():
        other = load_module(model)
        other.set_num_threads(threads)
        call_module(other, call)
        return {str(model): other.run}, {}
    rivals: dict[str, Callable[[Batch], Any]] = {}
    refused: dict[str, str] = {}

    def onnxruntime(path: AnyPath) -> Callable[[Batch], Any]:
        return partial(open_session(path, threads).run, None)

    rivals[FLOAT] = onnxruntime(model)
    others: dict[str, Callable[[], Callable[[Batch], Any]]] = {
        INT8: lambda: onnxruntime(quantize_with_onnxruntime(model, folder))
    }
    if openvino.installed():
        others[openvino.NAME] = partial(openvino.runner, model, threads)
    for name, opened in others.items():
        try:
            rivals[name] = opened()
        except BadInput as error:
            refused[name] = str(error)
    return rivals, refused


def _candidates(
    package: Any, call: Batch, bits: Sequence[int], rivals: Mapping[str, Callable[[Batch], Any]]
) -> dict[str, Candidate]:
    """The module, at every width asked for, and its rivals."""
    work: dict[str, Callable[[], Any]] = {"ours": partial(package.run, call)}
    work |= {at_bits(width): partial(_run_at, package, call, width) for width in bits}
    work |= {name: partial(rival, call) for name, rival in rivals.items()}
    return {name: repeated(run) for name, run in work.items()}


def _figures(timings: dict[str, Timing], bits: Sequence[int]) -> dict[str, Any]:
    ours = timings.pop("ours")
    widths = {width: timings.pop(at_bits(width)).us for width in bits}
    rivals = {name: timing.us for name, timing in timings.items()}
    return {
        "us": ours.us,
        "noise": ours.noise,
        "bits": widths,
        "rivals": rivals,
        "rival_noise": {name: timing.noise for name, timing in timings.items()},
        "ratio": min(rivals.values()) / ours.us,
    }


def at_bits(bits: int) -> str:
    """How the module at a width is called in tables."""
    return f"ours at {bits} bits"


def _run_at(package: Any, call: Batch, bits: int) -> None:
    """Run the module once at a width.

    Raises
    ------
    BadInput
        It has no such bits.
    """
    try:
        package.run(call, bits=bits)
    except package.InputError as error:
        raise BadInput(str(error)) from error


def _check_call(package: Any, call: Batch, made_up: bool) -> None:
    """Run the module once, so that refused inputs are reported before anything is timed."""
    try:
        call_module(package, call)
    except BadInput as error:
        hint = "; made-up inputs do not fit this model, give some with --inputs" if made_up else ""
        raise BadInput(f"{error}{hint}") from error
