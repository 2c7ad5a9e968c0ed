"""Run a module on tensors beside pages that nobody may touch: run_guarded.py FOLDER CASES.

Each input and output starts where a page starts, or ends where one ends; what lies beyond kills
this process. CASES is JSON: a list of [label, {input: shape}]. Prints the label before each run.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import mmap
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np

PAGE = mmap.PAGESIZE
libc = ctypes.CDLL(None, use_errno=True)
libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def guarded(shape: tuple[int, ...], dtype: np.dtype[Any], at_end: bool) -> Any:
    """An uninitialised array at one side of the pages that it alone has."""
    size = int(np.prod(shape)) * dtype.itemsize
    pages = -(-size // PAGE) * PAGE
    block = np.frombuffer(mmap.mmap(-1, pages + 2 * PAGE), np.uint8)
    start = block.ctypes.data
    for edge in (start, start + PAGE + pages):
        if libc.mprotect(edge, PAGE, mmap.PROT_READ & 0):
            raise OSError(ctypes.get_errno(), "mprotect")
    first = PAGE + (pages - size if at_end else 0)
    return block[first : first + size].view(dtype).reshape(shape)


def main(folder: Path, cases: list[tuple[str, dict[str, list[int]]]]) -> None:
    """Every case at both sides, at every width that the weights have."""
    sys.path.insert(0, str(folder.parent))
    module = importlib.import_module(folder.name)
    rng = np.random.default_rng(0)
    keep = []
    for at_end in (True, False):

        def placed(shape: tuple[int, ...], dtype: np.dtype[Any], side: bool = at_end) -> Any:
            return guarded(shape, dtype, side)

        module.results.aligned_empty, module.results.COPIED = placed, -1
        for label, shapes in cases:
            feeds = {}
            for info in module.inputs:
                dtype = np.dtype(info.dtype)
                feeds[info.name] = guarded(tuple(shapes[info.name]), dtype, at_end)
                values = (
                    rng.integers(0, 2, shapes[info.name])
                    if dtype.kind in "iub"
                    else (rng.standard_normal(shapes[info.name]))
                )
                feeds[info.name][...] = values
            ranges = module.manifest["precisions"]
            widths = {width for least, most in ranges.values() for width in range(least, most + 1)}
            for bits in sorted(widths) or [0]:
                print(label, "end" if at_end else "start", f"{bits} bits" * (bits > 0), flush=True)
                for layer, (least, most) in ranges.items():
                    module.set_precision(min(max(bits, least), most), f"^{re.escape(layer)}$")
                keep.append(module.run(feeds))
    print("whole", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
