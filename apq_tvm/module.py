"""Opening compiled modules from their folder: the manifest alone, or the Python package in it."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from apq_tvm.errors import BadInput
from apq_tvm.types import AnyPath, TensorSpec


def read_manifest(path: AnyPath) -> dict[str, Any]:
    """Read ``manifest.json`` of the compiled module in folder `path`; no code of it is run.

    Raises
    ------
    BadInput
        The folder is no compiled module, or its manifest is damaged.
    """
    path = Path(path)
    file = path / "manifest.json"
    if not path.is_dir():
        raise BadInput(f"{path}: no such folder; make one with: apq-tvm compile MODEL -o {path}")
    if not file.is_file():
        raise BadInput(f"{path} is not a compiled module: it holds no manifest.json")
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # no UTF-8, no JSON, numbers without end
        raise BadInput(f"{file} is damaged: {error}; compile the model again") from error
    if not isinstance(manifest, dict) or "layers" not in manifest:
        raise BadInput(f"{file} is not the manifest of a compiled module: it lists no layers")
    return manifest


@contextmanager
def damaged(path: AnyPath) -> Iterator[None]:
    """What a manifest lacks is an error of the manifest while the body reads it.

    Raises
    ------
    BadInput
        Instead of the errors of a wrong type, key or number.
    """
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        file = Path(path) / "manifest.json"
        raise BadInput(
            f"{file} is damaged, or of another version of apq-tvm ({type(error).__name__}: "
            f"{error}); compile the model again"
        ) from error


def ports(path: AnyPath, manifest: Mapping[str, Any], kind: str = "inputs") -> list[TensorSpec]:
    """The ``inputs`` or ``outputs`` of a module, in ONNX order.

    Raises
    ------
    BadInput
        The manifest is damaged.
    """
    with damaged(path):
        return [TensorSpec(p["name"], p["dtype"], tuple(p["shape"])) for p in manifest[kind]]


def load_module(path: AnyPath) -> ModuleType:
    """Import the package in folder `path` without touching ``sys.path``.

    Two folders of one name may be loaded side by side, and a folder that was compiled anew beside
    what it held before: each gets a name of its own, made of the resolved path and of which
    manifest lies there.

    Raises
    ------
    BadInput
        The folder is no compiled module, or its library does not load on this machine.
    """
    path = Path(path)
    read_manifest(path)
    resolved = path.resolve()
    file = (resolved / "manifest.json").stat()
    which = f"{resolved}:{file.st_dev}:{file.st_ino}:{file.st_mtime_ns}"
    digest = hashlib.sha256(which.encode()).hexdigest()[:12]
    name = f"_apq_module_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    init = resolved / "__init__.py"
    spec = importlib.util.spec_from_file_location(
        name, init, submodule_search_locations=[str(resolved)]
    )
    if spec is None or spec.loader is None or not init.is_file():
        raise BadInput(f"{path} is not a compiled module: it holds no __init__.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise BadInput(f"{path} does not load: {type(error).__name__}: {error}") from error
    return module
