"""TensorIR packers write the bytes of the numpy packers, unpackers are their inverses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm

from apq_tvm.codegen.layouts import ROWS, InterleavedLayout
from apq_tvm.codegen.layouts.tir import pack_functions, unpack_functions
from apq_tvm.tensorize.meaning.whole_codes import WIDTHS
from apq_tvm.types import QuantizedTensor, Scheme

SHAPES = ((1, 1), (7, 31), (8, 32), (17, 97))


def build(functions: dict[str, Any]) -> Any:
    mod = tvm.IRModule({str(f.attrs["global_symbol"]): f for f in functions.values()})
    return tvm.tirx.build(mod, target=tvm.target.Target("llvm"))


def call(lib: Any, name: str, inputs: list[np.ndarray], shape: tuple[int, ...], dtype: str) -> Any:
    out = tvm.runtime.tensor(np.full(shape, 77, dtype))
    lib[name](*(tvm.runtime.tensor(a) for a in inputs), out)
    return out.numpy()


@pytest.mark.parametrize("n,k", SHAPES)
@pytest.mark.parametrize("group,zero_points", ((16, True), (32, False), (64, True), (-1, False)))
@pytest.mark.parametrize("bits", range(1, 9))
def test_same_bytes_as_numpy(bits: int, group: int, zero_points: bool, n: int, k: int) -> None:
    rows = ROWS[(bits + n) % len(ROWS)]
    whole = bits in WIDTHS and rows > 1 and zero_points
    run = 8 if rows in (4, 8) and not whole and n % 2 else 4
    layout = InterleavedLayout(bits, rows, group, zero_points, rows == 4 or whole, whole, run)
    rng = np.random.default_rng(bits)
    groups = layout.groups(k)
    zeros = rng.integers(0, 1 << bits, (n, groups), dtype=np.uint8) if zero_points else None
    tensor = QuantizedTensor(
        rng.integers(0, 1 << bits, (n, k), dtype=np.uint8),
        rng.normal(size=(n, groups)).astype(np.float16),
        zeros,
        Scheme(bits, zero_points, group_size=group),
    )
    want = layout.pack(tensor).arrays
    canonical = {"codes": tensor.codes, "scales": tensor.scales, "zeros": zeros}

    packers, unpackers = pack_functions(layout, n, k), unpack_functions(layout, n, k)
    assert list(packers) == list(unpackers) == list(layout.shapes(n, k))
    lib = build(
        {f"p{key}": f for key, f in packers.items()} | {f"u{k}": f for k, f in unpackers.items()}
    )
    for key, (shape, dtype) in layout.shapes(n, k).items():
        source = canonical[key]
        assert source is not None
        inputs = [source] if key != "codes" or zeros is None else [source, zeros]
        packed = call(lib, f"pack_{key}_{layout.name}", inputs, shape, dtype)
        np.testing.assert_array_equal(packed, want[key])
        back = call(lib, f"unpack_{key}_{layout.name}", [packed], source.shape, dtype)
        np.testing.assert_array_equal(back, source)


@pytest.mark.parametrize("rows", ROWS)
def test_functions_are_named_after_the_layout(rows: int) -> None:
    layout = InterleavedLayout(4, rows, 32)
    for prefix, functions in (("pack", pack_functions), ("unpack", unpack_functions)):
        for key, function in functions(layout, 9, 40).items():
            assert function.attrs["global_symbol"] == f"{prefix}_{key}_{layout.name}"
