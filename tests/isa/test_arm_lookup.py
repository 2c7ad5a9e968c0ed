"""Kernels with codebooks and non-uniform tables on Arm, under qemu and by their assembly."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from arm_lookup_cases import Layer, quantized, record, scheme_of
from arm_tools import needs_qemu

from apq_tvm.codegen.layouts import default_layout, weight_layout
from apq_tvm.errors import NotApplicable, PackError
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.schedules.devices import find_profile
from apq_tvm.types import QuantizedTensor

LANES = 4


CASES = (
    ("cb2", "graviton2", 1, "sdot"),
    ("cb2", "graviton3", 2, "sdot"),
    ("cb2", "graviton2", 2, "sdot"),
    ("cb2", "graviton4", 1, "sdot"),
    ("cb2", "cortex-a55", 1, "sdot"),
    ("cb2", "cortex-a53", 1, "smull"),
    ("cb3", "graviton2", 1, "sdot"),
    ("cb3", "graviton2", 4, "sdot"),
    ("cb3", "graviton3", 2, "sdot"),
    ("cb3", "cortex-a53", 1, "smull"),
    ("cb3", "graviton4", 1, "sdot"),
    ("cb3", "cortex-a55", 1, "sdot"),
    ("nl4", "graviton3", 1, "sdot"),
    ("nl4", "cortex-a72", 1, "smull"),
    ("nl4g128", "graviton2", 2, "sdot"),
    ("nl4g64", "cortex-a55", 1, "sdot"),
    ("W2sA8", "graviton3", 1, "sdot"),
    ("W2sA8", "cortex-a53", 1, "smull"),
    ("W3sA8", "graviton2", 2, "sdot"),
)


@pytest.mark.few(4)
@needs_qemu
@pytest.mark.parametrize(("name", "target", "m_tile", "instruction"), CASES)
def test_kernel_computes_the_decoded_weights(
    name: str, target: str, m_tile: int, instruction: str, tmp_path: Path
) -> None:
    # Ragged for row blocks of 4 and two streams; a whole span and a short one of a quad and a half.
    tensor = quantized(name, 22, 352)
    kernel = record(name, m_tile, instruction)
    layer = Layer(kernel, tensor, find_profile(target), tmp_path)
    for m in (m_tile, m_tile + 1):
        layer.check(np.random.default_rng(m).standard_normal((m, 352)).astype(np.float32))


@needs_qemu
@pytest.mark.parametrize("vectors", [1, 2, 4])
def test_vectors_of_any_length(vectors: int, tmp_path: Path) -> None:
    """Vectors of 32 bytes hold a table of 3-bit codebooks; shorter ones take another way."""
    cpu = f"max,sve-max-vq={vectors},sve-default-vector-length={16 * vectors}"
    tensor, profile = quantized("cb3", 22, 352), find_profile("graviton3")
    layer = Layer(record("cb3", 1), tensor, profile, tmp_path, cpu)
    layer.check(np.random.default_rng(0).standard_normal((1, 352)).astype(np.float32))


@needs_qemu
@pytest.mark.parametrize(("name", "k"), [("cb2", 20), ("cb3", 512), ("nl4", 96)])
def test_epilogue_and_extreme_activations(name: str, k: int, tmp_path: Path) -> None:
    epilogue = {"bias": True, "activation": "relu", "residual": True}
    profile = find_profile("graviton2")
    layer = Layer(record(name, 1), quantized(name, 8, k), profile, tmp_path, **epilogue)
    x = np.random.default_rng(0).standard_normal((5, k)).astype(np.float32)
    x[1] = np.where(np.arange(k) % 3, 127, -127)
    x[2] *= 1e-12
    x[3] *= 1e12
    x[4, ::2] = 0
    for row in x:
        layer.check(row[None])


@needs_qemu
@pytest.mark.parametrize(
    ("name", "target", "instruction"),
    [
        ("cb2", "cortex-a53", "smull"),
        ("cb2", "graviton2", "sdot"),
        ("cb2", "graviton3", "sdot"),
        ("cb3", "graviton3", "sdot"),
        ("cb3", "cortex-a55", "sdot"),
        ("nl4", "cortex-a53", "smull"),
        ("nl4", "cortex-a55", "sdot"),
    ],
)
def test_worst_sums_neither_wrap_nor_round(
    name: str, target: str, instruction: str, tmp_path: Path
) -> None:
    """Every value the largest or smallest of its table, every activation +-127."""
    tensor = quantized(name, 8, 256)
    codes = np.full_like(tensor.codes, (1 << tensor.scheme.bits) - 1)
    codes[1::2] = 0
    tables = {n: np.full_like(t, 15) if n == "subs" else t for n, t in tensor.tables.items()}
    if "codebooks" in tables:
        tables["codebooks"] = np.full((4, 1 << tensor.scheme.bits), 32, np.int8)
        tables["codebooks"][:, 0] = -32
    worst = QuantizedTensor(codes, tensor.scales, None, tensor.scheme, tables)
    x = np.full((1, 256), 3, np.float32)
    Layer(record(name, 1, instruction), worst, find_profile(target), tmp_path).check(x)


@pytest.mark.parametrize("name", ["cb2", "cb3"])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (5, 63), (4, 64), (6, 65), (9, 600)])
def test_quads_pack_and_unpack(name: str, n: int, k: int) -> None:
    tensor = quantized(name, n, k)
    layout = default_layout(tensor.scheme, (), LANES)
    assert weight_layout(layout.name, tensor.scheme) == layout
    packed = layout.pack(tensor)
    back = layout.unpack(packed, n, k, tensor.scheme)
    assert (back.codes == tensor.codes).all() and (back.scales == tensor.scales).all()
    assert all((back.tables[t] == tensor.tables[t]).all() for t in tensor.tables)


def test_quads_are_for_four_codebooks_in_groups_of_16() -> None:
    for name in ("cb4", "cb2c8", "cb3g32", "nl4"):
        assert not default_layout(scheme_of(name), (), LANES).name.endswith("q64")
    assert not default_layout(scheme_of("cb2"), (), 8).name.endswith("q64")
    with pytest.raises(PackError, match="cb2c4g16r4q64 cannot hold"):
        weight_layout("cb2c4g16r4q64", scheme_of("cb3"))


@pytest.mark.parametrize(
    ("name", "target", "message"),
    [
        ("cb2A32", "graviton2", "is for integer activations"),
        ("cb2", "cortex-a53", "needs dotprod"),
    ],
)
def test_what_is_declined(name: str, target: str, message: str) -> None:
    with pytest.raises(NotApplicable, match=message):
        record(name, 1).check(LinearSpec(8, 64, scheme_of(name)), find_profile(target))
