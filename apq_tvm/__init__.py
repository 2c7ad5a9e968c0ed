"""apq_tvm: an any-precision quantization compiler from ONNX models to small tensorized modules.

``apq_tvm.compile("model.onnx", output="out", target="host", scheme="W4A8g32")`` writes a folder
that is a Python package and an embeddable C library. Importing this package is cheap: nothing of
TVM, ONNX or torch is loaded before it is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from apq_tvm import lone_tvm

if TYPE_CHECKING:
    from apq_tvm.errors import ApqError
    from apq_tvm.formats.scheme import parse_scheme
    from apq_tvm.onnx_import import import_onnx
    from apq_tvm.pipeline import compile
    from apq_tvm.quantizers.guided import Guidance
    from apq_tvm.types import CompiledModule, Scheme

__version__ = "0.1.0"

lone_tvm.install()

_HOME = {
    "ApqError": "apq_tvm.errors",
    "CompiledModule": "apq_tvm.types",
    "Guidance": "apq_tvm.quantizers.guided",
    "Scheme": "apq_tvm.types",
    "compile": "apq_tvm.pipeline",
    "import_onnx": "apq_tvm.onnx_import",
    "parse_scheme": "apq_tvm.formats.scheme",
}

__all__ = [
    "ApqError",
    "CompiledModule",
    "Guidance",
    "Scheme",
    "__version__",
    "compile",
    "import_onnx",
    "parse_scheme",
]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'apq_tvm' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
