"""Float models in ONNX Runtime and compiled modules, called with one call's arrays."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from apq_tvm.errors import BadInput
from apq_tvm.extras import require
from apq_tvm.types import AnyPath, Array, TensorSpec


def open_session(model: AnyPath | bytes, threads: int | None = None) -> Any:
    """Open a model in ONNX Runtime on the CPU, without spinning threads.

    Parameters
    ----------
    model : str, path or bytes
        ONNX file, or its content.
    threads : int or None
        Threads inside one operator; None leaves ONNX Runtime's own choice.

    Raises
    ------
    BadInput
        ONNX Runtime cannot read the file.
    MissingPackage
        onnxruntime is not installed.
    """
    require("onnxruntime")
    import onnxruntime

    if not isinstance(model, bytes) and not Path(model).is_file():
        raise BadInput(f"{model}: no such file")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    # Its idle threads spin otherwise, and slow down whatever is measured after it.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if threads is not None:
        options.intra_op_num_threads = threads
    source, label = (model, "the model") if isinstance(model, bytes) else (str(model), str(model))
    try:
        return onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # its exception classes have no public common base
        raise BadInput(f"ONNX Runtime cannot open {label}: {error}") from error


def specs_of(session: Any) -> tuple[TensorSpec, ...]:
    """The inputs of an ONNX Runtime session as `TensorSpec`."""
    names = {"float": "float32", "double": "float64"}
    specs = []
    for value in session.get_inputs():
        text = value.type.removeprefix("tensor(").removesuffix(")")
        # a dimension without a name equals no other
        shape = tuple(
            d if isinstance(d, int) or d else f"?{value.name}.{axis}"
            for axis, d in enumerate(value.shape)
        )
        specs.append(TensorSpec(value.name, names.get(text, text), shape))
    return tuple(specs)


def call_session(session: Any, batch: Mapping[str, Array]) -> dict[str, Array]:
    """Run a float model in ONNX Runtime on one call's arrays.

    Raises
    ------
    BadInput
        It refuses the inputs, e.g. for an id outside an embedding; its own message is kept.
    """
    names = [value.name for value in session.get_outputs()]
    try:
        return dict(zip(names, session.run(names, dict(batch)), strict=True))
    except Exception as error:  # its exception classes have no public common base
        raise BadInput(f"ONNX Runtime refuses the inputs: {error}") from error


def call_module(module: Any, batch: Mapping[str, Array], bits: int = 0) -> dict[str, Array]:
    """Run a compiled module on one call's arrays, at `bits` where it has a choice of widths.

    Raises
    ------
    BadInput
        The module refuses the inputs; its own message is kept.
    """
    try:
        width = {"bits": bits} if bits else {}
        outputs: dict[str, Array] = module.run(dict(batch), **width)
    except module.ModuleError as error:
        raise BadInput(f"the compiled module refuses the inputs: {error}") from error
    return outputs
