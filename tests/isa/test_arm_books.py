"""Kernels with any codebooks in interleaved units on Arm, under qemu and by their assembly."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from arm_lookup_cases import Layer, loop_of, quantized, record, scheme_of
from arm_tools import assembly, count, needs_qemu, scheduled

from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.schedules.devices import find_profile
from apq_tvm.types import QuantizedTensor

# A span and one bunch and a half; one bunch and a half; 1, 2 and 3 groups that are left.
CASES = (
    ("cb4", "graviton2", 1, 352),
    ("cb4", "graviton3", 1, 352),
    ("cb4", "graviton3", 2, 32),
    ("cb4", "cortex-a55", 1, 256),
    ("cb4", "cortex-a53", 1, 352),
    ("cb4g32", "graviton4", 1, 608),
    ("cb4g64", "graviton2", 4, 64),
    ("cb4c8", "graviton2", 1, 352),
    ("cb4c16g32", "graviton2", 1, 224),
    ("cb3g64", "graviton2", 1, 400),
    ("cb3c8", "graviton3", 1, 352),
    ("cb3c16", "graviton2", 2, 288),
    ("cb2c8g32", "cortex-a53", 1, 96),
    ("cb2c16", "graviton2", 1, 352),
)


@pytest.mark.few(5)
@needs_qemu
@pytest.mark.parametrize(("name", "target", "m_tile", "k"), CASES)
def test_kernel_computes_the_decoded_weights(
    name: str, target: str, m_tile: int, k: int, tmp_path: Path
) -> None:
    profile = find_profile(target)
    kernel = record(name, m_tile, "sdot" if "dotprod" in profile.features else "smull")
    layer = Layer(kernel, quantized(name, 10, k), profile, tmp_path)
    for m in (m_tile, m_tile + 1):
        layer.check(np.random.default_rng(m).standard_normal((m, k)).astype(np.float32))


@needs_qemu
@pytest.mark.parametrize(
    ("name", "target"), [("cb4g64", "graviton2"), ("cb4g64", "cortex-a53"), ("cb4", "graviton2")]
)
def test_worst_sums_neither_wrap_nor_round(name: str, target: str, tmp_path: Path) -> None:
    """Every value +-63, every sub-scale 15, every activation +-127."""
    tensor = quantized(name, 4, 256)
    codes = np.full_like(tensor.codes, 15)
    codes[1::2] = 0
    tables = {n: np.full_like(t, 15) if n == "subs" else t for n, t in tensor.tables.items()}
    tables["codebooks"] = np.full((4, 16), 63, np.int8)
    tables["codebooks"][:, 0] = -63
    worst = QuantizedTensor(codes, tensor.scales, None, tensor.scheme, tables)
    profile = find_profile(target)
    kernel = record("cb4", 1, "sdot" if "dotprod" in profile.features else "smull")
    Layer(kernel, worst, profile, tmp_path).check(np.full((1, 256), 3, np.float32))


@pytest.mark.parametrize(
    ("name", "products", "insertions"),
    [("cb4g32", 32, 32), ("cb3g64", 64, 128), ("cb2c8", 16, 16), ("cb4c16", 16, 16)],
)
def test_one_lookup_and_one_insertion_for_a_vector(
    name: str, products: int, insertions: int
) -> None:
    """Beside them there are lookups of books and sub-scales, and neither masks nor conversions."""
    profile = find_profile("graviton2")
    spec = LinearSpec(64, 4096, scheme_of(name))
    loop = loop_of(assembly(scheduled(record(name, 1), spec, profile), profile), "sdot")
    assert (count(loop, "sdot"), count(loop, "sli")) == (products, insertions)
    assert count(loop, "tbl") <= products + 4 + 2
    assert count(loop, r"and\s+v\d+") <= 8
    assert count(loop, "scvtf|fcvtl|addv|addp") == 0
