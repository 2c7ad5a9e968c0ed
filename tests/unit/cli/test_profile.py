"""Profiles: what is made of recorded calls. Nothing is timed here."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from apq_tvm.bench.caches import Level, cache_sizes, level_of
from apq_tvm.bench.profile.costs import Cost, costs, limit
from apq_tvm.bench.profile.layers import LayerOf, Layers, weight_names
from apq_tvm.bench.profile.recorded import CallRecord, TensorUse
from apq_tvm.bench.profile.rows import call_rows, slow, summed
from apq_tvm.bench.profile.table import WHOLE, machine_line, slow_lines, table_rows
from apq_tvm.bench.roofline import Limits

LEVELS = (Level("L2", 1e5, 100.0), Level("DRAM", math.inf, 10.0))
LIMITS = Limits(1, read_gbs=10.0, int8_gmacs=100.0, fp32_gmacs=10.0, int8_instruction="none")


def weights_file(folder: Path) -> Path:
    """A safetensors file of two weights, no data behind the header."""
    header = {
        "head.codes": {"dtype": "U8", "shape": [50000], "data_offsets": [0, 50000]},
        "_pad.0": {"dtype": "U8", "shape": [0], "data_offsets": [50000, 50000]},
        "fc.codes": {"dtype": "U8", "shape": [20000], "data_offsets": [50000, 70000]},
    }
    text = json.dumps(header).encode()
    path = folder / "weights.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    return path


def layer(name: str, op: str, n: int, k: int, kernel: str, activations: str) -> dict[str, object]:
    return {
        "name": name,
        "op": op,
        "n": n,
        "k": k,
        "activations": activations,
        "kernels": [{"kernel": kernel}],
    }


@pytest.fixture
def layers(tmp_path: Path) -> Layers:
    manifest = {
        "layers": [
            layer("head", "apq.Embedding", 500, 100, "embedding", ""),
            layer("tied", "apq.Linear", 500, 100, "gemv", "symmetric int8 per token"),
            layer("fc", "apq.Linear", 100, 200, "gemm_F", "float"),
        ]
    }
    return Layers(manifest, weights_file(tmp_path))


def call(kernel: str, *tensors: TensorUse, products: float = 0.0) -> CallRecord:
    return CallRecord(kernel, 0, 0, products, 1, tensors)


def start(layers: Layers, name: str) -> int:
    found = dict(zip(layers._names, layers._starts, strict=True))
    return found[name]


def test_weights_are_found_by_where_they_start(tmp_path: Path) -> None:
    names = weight_names(weights_file(tmp_path))
    first, second = names
    assert list(names.values()) == ["head.codes", "fc.codes"]
    assert second - first == 50000


def test_layers_share_weights_and_tables_are_read_by_rows(layers: Layers) -> None:
    table = TensorUse(1 << 20, 50000, 50000, 500, start(layers, "head.codes"))
    small = TensorUse(1 << 22, 200, 800, 2, -1)
    made = costs([call("embedding", table, small), call("gemv_x", table, small)], layers, LEVELS,
                 cold=True)  # fmt: skip
    assert [cost.layer for cost in made] == ["head", "tied"]
    assert sum(made[0].nbytes) == 50000 * 2 // 500 + 800
    assert (made[0].products, made[1].products) == (0, 200 * 100)
    assert made[1].integer
    assert sum(made[1].nbytes) == 50000 + 800


def test_planes_of_other_bits_are_not_read() -> None:
    read = {"gemv_anyprec3A8_x": 3, "gemv_anyprec8A8_x": 8}
    layer = LayerOf("fc", False, 100, 100, True, tuple(read), read)
    assert layer.share_of_planes("gemv_anyprec3A8_x_100x100") == 3 / 8
    assert layer.share_of_planes("gemv_anyprec8A8_x_100x100") == 1
    assert layer.share_of_planes("layernorm") == 1


def test_bytes_come_from_the_nearest_cache_that_holds_them(layers: Layers) -> None:
    small = TensorUse(1 << 22, 100, 400, 1, -1)
    large = TensorUse(1 << 24, 300_000, 300_000, 1, -1)
    calls = [call("a", small), call("b", small, large), call("c", small)]
    made = costs(calls, layers, LEVELS, cold=False)
    # Between two uses of it the large one fills every cache, and the small one is gone behind it.
    assert [cost.nbytes for cost in made] == [(400, 0), (400, 300_000), (0, 400)]
    fits = costs([call("a", small), call("b", small)], layers, LEVELS, cold=False)
    assert [cost.nbytes for cost in fits] == [(400, 0), (400, 0)]
    cold = costs([call("a", small), call("b", small)], layers, LEVELS, cold=True)
    assert [cost.nbytes for cost in cold] == [(0, 400), (400, 0)]


def test_the_limit_names_what_binds() -> None:
    def bound(nbytes: tuple[int, int], products: int, integer: bool) -> tuple[float, str]:
        return limit(Cost("k", "", nbytes, products, integer, 1), LIMITS, LEVELS)

    assert bound((0, 10_000), 10, False) == (pytest.approx(1.0), "DRAM")
    assert bound((10_000, 0), 10, False) == (pytest.approx(0.1), "L2")
    assert bound((0, 10), 100_000, True) == (pytest.approx(1.0), "int8")
    assert bound((0, 10), 100_000, False) == (pytest.approx(10.0), "fp32")


def document(limits: Limits | None) -> dict[str, object]:
    made = [
        Cost("gemm", "fc", (1000, 0), 1000, True, 1),
        Cost("gemm", "out", (0, 1000), 1000, True, 1),
        Cost("softmax", "", (100, 0), 0, False, 1),
    ]
    rows = call_rows(made, [1.0, 2.0, 4.0], limits, LEVELS)
    kernels = summed(rows, "kernel", 10.0)
    return {
        "module": "m",
        "target": "host",
        "dims": {"seq": 8},
        "threads": 1,
        "bits": None,
        "cold": False,
        "rounds": 3,
        "noise": 0.1,
        "run_us": 10.0,
        "between_us": 1.0,
        "rest_us": 2.0,
        "calls": rows,
        "kernels": kernels,
        "layers": summed(rows, "layer", 10.0),
        "limits": vars(limits) if limits else None,
        "why_no_limits": "" if limits else "no C compiler",
        "levels": [{"name": "L2", "bytes": 1e5, "gbs": 100.0}] if limits else [],
        "slow": slow(kernels, 10.0),
    }


@pytest.mark.parametrize("by", ["kernel", "layer"])
@pytest.mark.parametrize("limits", [LIMITS, None], ids=["measured", "unknown machine"])
def test_rows_sum_to_the_run(by: str, limits: Limits | None) -> None:
    rows = table_rows(document(limits), by)
    assert rows[-1][0] == WHOLE
    assert sum(float(row[2]) for row in rows[:-1]) == pytest.approx(float(rows[-1][2]))
    assert len({len(row) for row in rows}) == 1


def test_a_machine_that_is_not_measured_says_why() -> None:
    assert machine_line(document(None)) == "no limits: no C compiler"
    assert "DRAM" in machine_line(
        document(LIMITS) | {"levels": [vars(LEVELS[1]) | {"bytes": None}]}
    )


def test_what_is_slow_is_named() -> None:
    text = "\n".join(slow_lines(document(LIMITS)["slow"]))
    assert "softmax: " in text
    assert "gemm" in text
    assert "nothing" in "\n".join(slow_lines(document(None)["slow"]))


def test_a_page_names_every_kernel_and_layer() -> None:
    pytest.importorskip("matplotlib")
    from apq_tvm.bench.profile.page import profile_page

    html = profile_page(document(LIMITS))
    for name in ("gemm", "softmax", "fc", "out", WHOLE):
        assert f">{name}<" in html
    assert html.count("<picture>") == 2


def test_caches_are_read_from_linux(tmp_path: Path) -> None:
    for index, facts in enumerate((("1", "Data", "48K", "0"), ("1", "Instruction", "32K", "0"),
                                   ("2", "Unified", "1024K", "0"),
                                   ("3", "Unified", "32768K", "0-3,8-11"))):  # fmt: skip
        folder = tmp_path / f"index{index}"
        folder.mkdir()
        for name, value in zip(("level", "type", "size", "shared_cpu_list"), facts, strict=True):
            (folder / name).write_text(f"{value}\n")
    assert cache_sizes(1, tmp_path) == {"L2": 1 << 20, "L3": 32 << 20}
    assert cache_sizes(16, tmp_path) == {"L2": 16 << 20, "L3": 64 << 20}
    assert cache_sizes(1, tmp_path / "nothing") == {}
    assert [level_of(d, LEVELS) for d in (0, 1e5, 2e5, math.inf)] == [0, 0, 1, 1]
