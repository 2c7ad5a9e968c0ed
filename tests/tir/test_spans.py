"""Kernels of codebooks, non-uniform tables and super-blocks against their decoded weights."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import tvm
from linear_cases import RELATIVE_ERROR, aligned
from scheduled import compiled

from apq_tvm.errors import NotApplicable
from apq_tvm.formats import dequantize, parse_scheme, superblock
from apq_tvm.ops.activations.factors import quantize_factors
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.quantizers.registry import quantize_tensor
from apq_tvm.schedules.decide import Defaults
from apq_tvm.schedules.devices import find_profile
from apq_tvm.schedules.graph.rewrites.lets import spill_lets
from apq_tvm.schedules.linear.kernel import LinearKernel
from apq_tvm.schedules.linear.quantize import quantize_func
from apq_tvm.schedules.x86.codebook import CODEBOOK_KERNELS
from apq_tvm.schedules.x86.decoded import DECODED_KERNELS
from apq_tvm.schedules.x86.super_records import SUPER_KERNELS
from apq_tvm.tensorize.x86.dot import INSTRUCTIONS
from apq_tvm.tensorize.x86.super_records import powers
from apq_tvm.types import DeviceProfile, QuantizedTensor, Scheme

N, K = 40, 336  # ragged for 16 rows and for two streams; a short super-block of five units
HOST = find_profile("host")
TARGETS = {"maddubs": "znver3", "vpdpbusd256": "alderlake", "vpdpbusd512": "host"}

CASES = [
    *(("cb2", kind, i) for kind in ("m1", "m4", "gemm") for i in TARGETS),
    *(("W2sA8", kind, i) for kind in ("m1", "gemm") for i in ("maddubs", "vpdpbusd512")),
    *((name, "m1", i) for name in ("cb3", "nl4") for i in ("maddubs", "vpdpbusd512")),
    ("cb3", "m2", "vpdpbusd256"),
    ("nl4", "gemm", "maddubs"),
    *(("W3sA8", "m1", i) for i in TARGETS),
    ("W2sA8", "m2", "maddubs"),
    ("W2sA8", "m4", "vpdpbusd512"),
    *((name, "m1", "vpdpbusd512") for name in ("cb4", "cb2c8", "cb3g32", "cb3g64", "nl4g128")),
]


def record(family: str, instruction: str, kind: str) -> LinearKernel:
    wanted = ("gemm", 0) if kind == "gemm" else ("gemv", int(kind.removeprefix("m")))
    return next(
        kernel
        for kernel in (*CODEBOOK_KERNELS, *SUPER_KERNELS)
        if (kernel.family, kernel.instruction.name) == (family, instruction)
        and (kernel.kind, kernel.m_named) == wanted
    )


def profile(target: str) -> DeviceProfile:
    wanted = find_profile(target)
    if not wanted.features <= HOST.features:
        pytest.skip(f"{HOST.name} is no {target}")
    return wanted


@cache
def quantized(name: str, n: int = N, k: int = K) -> QuantizedTensor:
    scheme = parse_scheme(name)
    assert isinstance(scheme, Scheme)
    w = np.random.default_rng(0).standard_normal((n, k)).astype(np.float32)
    return quantize_tensor(w, scheme)


def built(kernel: LinearKernel, spec: LinearSpec, target: DeviceProfile) -> Any:
    try:
        kernel.check(spec, target)
    except NotApplicable as reason:
        pytest.skip(str(reason))
    with tvm.target.Target(dict(target.target)):
        func = kernel.scheduled(kernel.choose(spec, target, Defaults()))
        func = spill_lets(func).with_attr("global_symbol", "main")
    return tvm.compile(tvm.IRModule({"main": func}), tvm.target.Target(dict(target.target)))


def activations(xq: Any, spec: LinearSpec) -> tuple[Any, Any, Any]:
    """(float64 meaning, xs, xsum) of int8 codes [M, Kp], scales drawn."""
    scheme = spec.scheme
    assert scheme is not None
    rows, kp = xq.shape
    width = kp if scheme.act_group == -1 else scheme.act_group
    xs = np.random.default_rng(3).uniform(0.01, 0.02, (rows, kp // width)).astype(np.float32)
    xsum = xq.reshape(rows, -1, scheme.group_size).sum(-1, dtype=np.int32)
    return xq.astype(np.float64) * np.repeat(xs, width, axis=1), xs, xsum


def factors(kernel: LinearKernel, bits: int, xs: Any, xsum: Any) -> list[Any]:
    """What kernels on records take besides."""
    if kernel.family != superblock.NAME or kernel.kind != "gemv":
        return []
    instruction = next(i for i in INSTRUCTIONS if i.name == kernel.instruction.name)
    two = np.resize(powers(instruction, bits), xs.shape[1])
    return [np.stack([xs * two, xs * xsum], -1).astype(np.float32)]


def check(
    kernel: LinearKernel, tensor: QuantizedTensor, target: DeviceProfile, rows: Any, **epilogue: Any
) -> None:
    """Compare with the decoded weights; `rows` are counts, or codes of activations."""
    n, k = tensor.codes.shape
    spec = LinearSpec(n, k, tensor.scheme, **epilogue)
    layout = kernel.layout(spec, target)
    mod = built(kernel, spec, target)
    packed = [aligned(a) for a in layout.pack(tensor).arrays.values()]
    rng = np.random.default_rng(1)
    for count in rows:
        if isinstance(count, int):
            xq = np.zeros((count, layout.padded_k(k)), np.int8)
            xq[:, :k] = rng.integers(-127, 128, (count, k))
        else:
            xq = count
        x, xs, xsum = activations(xq, spec)
        wanted = x[:, :k] @ dequantize(tensor).astype(np.float64).T
        more = []
        if spec.bias:
            more.append(rng.standard_normal(n).astype(np.float32))
            wanted = np.maximum(wanted + more[0], 0)
        if spec.residual:
            more.append(rng.standard_normal(wanted.shape).astype(np.float32))
            wanted = wanted + more[-1]
        y = aligned(np.full(wanted.shape, np.nan, np.float32))
        acts = (xq, xs, xsum, *factors(kernel, tensor.scheme.bits, xs, xsum))
        mod["main"](*map(aligned, acts), *packed, *map(aligned, more), y)
        assert np.abs(y.numpy() - wanted).max() <= RELATIVE_ERROR * np.abs(wanted).max()


@pytest.mark.few(4)
@pytest.mark.parametrize(("name", "kind", "instruction"), CASES)
def test_kernel_computes_the_decoded_weights(name: str, kind: str, instruction: str) -> None:
    tensor = quantized(name)
    kernel = record(tensor.scheme.family, instruction, kind)
    rows = [kernel.m_tile, kernel.m_tile + 1, 5 + 2 * kernel.m_tile]
    check(kernel, tensor, profile(TARGETS[instruction]), rows)


@pytest.mark.parametrize(("n", "k"), [(3, 20), (33, 256)])
def test_other_shapes_and_epilogues(n: int, k: int) -> None:
    kernel = record("cb", "maddubs", "m2")
    epilogue = {"bias": True, "activation": "relu", "residual": True}
    check(kernel, quantized("cb3", n, k), profile("znver3"), [2, 3], **epilogue)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("cb2", "m1"),
        ("cb2", "gemm"),
        ("nl4", "m1"),
        ("cb4", "gemm"),
        ("W2sA8", "m1"),
        ("W3sA8", "m1"),
    ],
)
def test_extremes_do_not_saturate(name: str, kind: str) -> None:
    """Every value the largest of its table, every activation +-127, in every pairing of signs."""
    tensor = quantized(name)
    codes = np.full_like(tensor.codes, (1 << tensor.scheme.bits) - 1)
    codes[1::2] = 0
    tables = dict(tensor.tables)
    if name != "nl4":
        tables["subs"] = np.full_like(tables["subs"], 15)
    worst = QuantizedTensor(codes, tensor.scales, None, tensor.scheme, tables)
    signs = np.array([[1, 1, 1, 1], [-1, -1, -1, -1], [1, 1, -1, -1], [1, -1, 1, -1],
                      [-1, 1, 1, -1], [1, 1, 1, -1]])  # fmt: skip
    kp = -(-K // 32) * 32
    xq = np.tile(signs, (1, kp // 4)) * 127
    xq[:, K:] = 0
    kernel = record(tensor.scheme.family, "maddubs", kind)
    check(kernel, worst, profile("znver3"), [xq.astype(np.int8)])


def test_too_many_centroids_are_declined() -> None:
    kernel = record("cb", "maddubs", "m1")
    with pytest.raises(NotApplicable, match="has 256 centroids; registers hold 64"):
        kernel.check(LinearSpec(N, K, parse_scheme("cb4c16")), find_profile("znver3"))
    with pytest.raises(NotApplicable, match="is for integer activations"):
        kernel.check(LinearSpec(N, K, parse_scheme("cb2A32")), find_profile("znver3"))


@pytest.mark.parametrize("name", ["cb2", "W2*A8g128", "bcq3g128", "W3sA8"])
@pytest.mark.parametrize(("lanes", "target"), [(16, "host"), (8, "znver3")])
def test_any_layout_is_decoded_for_many_rows(name: str, lanes: int, target: str) -> None:
    tensor, device = quantized(name), profile(target)
    kernel = next(k for k in DECODED_KERNELS if k.name == f"gemm_decodedA32_fma_r{lanes}")
    spec = LinearSpec(N, K, tensor.scheme)
    mod = built(kernel, spec, device)
    packed = [aligned(a) for a in kernel.layout(spec, device).pack(tensor).arrays.values()]
    x = np.random.default_rng(1).standard_normal((37, K)).astype(np.float32)
    y = aligned(np.full((37, N), np.nan, np.float32))
    mod["main"](aligned(x), *packed, y)
    wanted = x.astype(np.float64) @ dequantize(tensor).astype(np.float64).T
    assert np.abs(y.numpy() - wanted).max() <= RELATIVE_ERROR * np.abs(wanted).max()


@pytest.mark.parametrize("k", [70, 576])
def test_factors_are_scales_and_sums(k: int) -> None:
    """Besides codes, scales and sums as ever: their products, by powers of two in turns."""
    twos, device = (1.0, 0.25, 0.0625, 0.015625), profile("x86-64-v3")
    x = np.random.default_rng(k).standard_normal((3, k)).astype(np.float32)
    kp = -(-k // 32) * 32
    plain = [np.zeros((3, kp), np.int8), *(np.zeros((3, kp // 16), t) for t in ("f4", "i4"))]
    found = [*map(np.copy, plain), np.zeros((3, kp // 16, 2), np.float32)]
    compiled(quantize_func(k, 16, 16, device, Defaults()), device)(x, *plain)
    compiled(quantize_factors(k, 16, twos, 2), device)(x, *found)
    for one, other in zip(plain, found, strict=False):
        np.testing.assert_array_equal(one, other)
    assert np.abs(found[0]).max() == 127
    _, xs, xsum, factors = found
    np.testing.assert_array_equal(factors[..., 0], xs * np.resize(np.float32(twos), xs.shape[1]))
    np.testing.assert_array_equal(factors[..., 1], xs * xsum.astype(np.float32))
