"""OpenVINO as a rival of whole models, where it is installed (``pip install openvino``).

It runs at its default precision, which is bfloat16 on processors that have it, and is told to
answer one request at a time as fast as it can: what the module beside it does
(OpenVINO documentation, "High-level Performance Hints").
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from apq_tvm.errors import BadInput
from apq_tvm.evaluate import Batch
from apq_tvm.types import AnyPath

NAME = "openvino (default precision)"


def installed() -> bool:
    """Whether it can be imported; asking imports nothing."""
    return find_spec("openvino") is not None


def runner(model: AnyPath, threads: int) -> Callable[[Batch], Any]:
    """Compile an ONNX model for the processor.

    Parameters
    ----------
    model : str or path
    threads : int

    Returns
    -------
    callable
        Runs the model on inputs by name.

    Raises
    ------
    BadInput
        OpenVINO refuses the model.
    """
    import openvino

    options = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": threads}
    try:
        compiled = openvino.Core().compile_model(str(model), "CPU", options)
    except Exception as error:  # its exceptions have no public common base
        raise BadInput(f"OpenVINO cannot run {model}: {error}") from error
    request = compiled.create_infer_request()
    return lambda inputs: request.infer(inputs)
