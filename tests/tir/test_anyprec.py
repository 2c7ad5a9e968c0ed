"""Any-precision kernels: every width, ragged shapes, few and many rows, both instruction sets."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from built import aligned, built
from tvm import te
from tvm.s_tir import TensorIntrin

from apq_tvm.codegen.layouts.planes import PlanesLayout
from apq_tvm.errors import NotApplicable
from apq_tvm.formats import dequantize, details, parse_scheme
from apq_tvm.formats.anyprec import channels_of, integer_table, snap, table_name
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.schedules.decide import Defaults
from apq_tvm.schedules.devices import find_profile
from apq_tvm.schedules.linear.kernel import LinearKernel
from apq_tvm.schedules.x86.anyprec import ANYPREC_KERNELS, APART_KERNELS, M_TILES, STRIDED_KERNELS
from apq_tvm.tensorize.pairs.planes import PlanesInstruction
from apq_tvm.tensorize.x86.planes import INSTRUCTIONS
from apq_tvm.types import DeviceProfile, QuantizedTensor

Array = Any

RELATIVE_ERROR = 1e-6
"""Of a few float32 operations on an exact integer sum, against the largest output."""

SHAPES = ((16, 64, 1), (17, 97, 4), (5, 31, 32), (24, 160, 8))
"""N, K, channels: K of whole units, of half ones, less than one; N not of whole row blocks."""


def random_tensor(n: int, k: int, name: str, channels: int, seed: int = 0) -> QuantizedTensor:
    rng, scheme = np.random.default_rng(seed), parse_scheme(name)
    assert scheme is not None
    blocks = -(-n // channels)
    tables = {
        table_name(b): snap(np.sort(rng.normal(size=(blocks, 1 << b)), 1).astype(np.float16))
        for b in scheme.widths
    }
    codes = rng.integers(0, 1 << scheme.bits, (n, k), dtype=np.uint8)
    scales = rng.uniform(0.5, 1.5, (n, 1)).astype(np.float16)
    return QuantizedTensor(codes, scales, None, scheme, tables)


def integer_weights(tensor: QuantizedTensor, bits: int) -> Array:
    """float64 [N, K]: what integer kernels multiply, without float16's rounding of the product."""
    integers, step = integer_table(tensor.tables[table_name(bits)])
    block = np.arange(len(tensor.codes)) // channels_of(tensor)
    codes = tensor.codes >> (tensor.scheme.bits - bits)
    found = integers[block[:, None], codes].astype(np.float64)
    return found * step[block, None].astype(np.float64) * tensor.scales.astype(np.float64)


def quantized(x: Array, width: int) -> tuple[Array, Array, Array]:
    """(xq, xs, xsum) with one scale per row."""
    padded = np.zeros((len(x), width), np.float32)
    padded[:, : x.shape[1]] = x
    scale = np.abs(padded).max(1, keepdims=True) / np.float32(127)
    xq = np.clip(np.rint(padded / scale), -127, 127).astype(np.int8)
    return xq, scale.astype(np.float32), xq.sum(1, keepdims=True, dtype=np.int32)


def profile_for(kernel: LinearKernel) -> DeviceProfile:
    """The smallest profile that has the instructions; skips if this machine has not."""
    host = find_profile("host")
    vbmi = "avx512vbmi" in kernel.instruction.features
    wanted = find_profile("icelake-client" if vbmi else "x86-64-v3")
    if not wanted.features <= host.features:
        pytest.skip(f"{host.name} is no {wanted.name}")
    return wanted


def compiled(kernel: LinearKernel, spec: LinearSpec, profile: DeviceProfile) -> Any:
    kernel.check(spec, profile)
    func = kernel.scheduled(kernel.choose(spec, profile, Defaults()))
    return built(func, profile)


def kernel_of(
    kind: str, width: int, instruction: str, kernels: tuple[LinearKernel, ...] = ANYPREC_KERNELS
) -> LinearKernel:
    wanted = kind, width, instruction
    return next(k for k in kernels if (k.kind, k.width, k.instruction.name) == wanted)


def check(
    kernel: LinearKernel, tensor: QuantizedTensor, rows: tuple[int, ...], epilogue: bool
) -> None:
    (n, k), profile = tensor.codes.shape, profile_for(kernel)
    activation = "relu" if epilogue else ""
    spec = LinearSpec(n, k, tensor.scheme, epilogue, activation, epilogue, details(tensor))
    run = compiled(kernel, spec, profile)
    layout = kernel.layout(spec, profile)
    packed = [aligned(array) for array in layout.pack(tensor).arrays.values()]
    weight, rng = integer_weights(tensor, kernel.width), np.random.default_rng(n + k)
    for m in rows:
        x = rng.normal(size=(m, k)).astype(np.float32)
        xq, xs, xsum = quantized(x, layout.padded_k(k))
        bias = rng.normal(size=n).astype(np.float32)
        residual = rng.normal(size=(m, n)).astype(np.float32)
        want = (xq[:, :k].astype(np.float64) * xs) @ weight.T
        largest = np.abs(want).max() + 1
        want = np.maximum(want + bias, 0) + residual if epilogue else want
        extra = [bias, residual] if epilogue else []
        y = np.full((m, n), np.nan, np.float32)
        run(xq, xs, xsum, *packed, *extra, y)
        np.testing.assert_allclose(y, want, rtol=0, atol=RELATIVE_ERROR * largest)


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "kernel",
    [kernel for kernel in ANYPREC_KERNELS if kernel not in STRIDED_KERNELS.values()],
    ids=lambda k: k.name,
)
def test_every_width_and_ragged_shapes(kernel: LinearKernel) -> None:
    """Kernels share out the shapes; M goes through 1..5 from the kernel's least."""
    n, k, channels = SHAPES[(kernel.width + kernel.m_tile) % len(SHAPES)]
    if kernel in APART_KERNELS.values():  # whole registers; runs and what is left of them
        k = 1152
    tensor = random_tensor(n, k, "anyprec1-8sA8", channels, kernel.width)
    check(kernel, tensor, tuple(range(kernel.m_tile, 6)), epilogue=kernel.width % 2 == 1)


@pytest.mark.parametrize("n,k,channels", SHAPES)
@pytest.mark.parametrize("kind,width", (("gemv", 3), ("gemm", 5)))
@pytest.mark.parametrize("instruction", INSTRUCTIONS, ids=lambda i: i.name)
def test_every_shape(
    instruction: PlanesInstruction, kind: str, width: int, n: int, k: int, channels: int
) -> None:
    kernel = kernel_of(kind, width, instruction.name)
    rows = (kernel.m_tile, kernel.m_tile + 1)
    check(kernel, random_tensor(n, k, "anyprec2-6sA8", channels), rows, epilogue=True)


@pytest.mark.parametrize("instruction", INSTRUCTIONS, ids=lambda i: i.name)
def test_shared_among_threads(instruction: PlanesInstruction) -> None:
    """A layer large enough to run in parallel, with tables shared across row blocks."""
    kernel = kernel_of("gemv", 4, instruction.name)
    check(kernel, random_tensor(280, 256, "anyprec4-5sA8", 32), (1, 2), epilogue=False)


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("instruction", INSTRUCTIONS, ids=lambda i: i.name)
def test_instructions_do_what_they_mean(instruction: PlanesInstruction, bits: int) -> None:
    """At the extremes too: centroids of ±127 and activations of ±127."""
    if not set(instruction.features) <= find_profile("host").features:
        pytest.skip(f"this CPU has not {instruction.features}")
    rng, k, tables = np.random.default_rng(bits), (32, 64)[bits % 2], (1, 2, 4, 8)[bits % 4]
    planes = rng.integers(0, 256, (bits, 1, k)).astype(np.uint8)
    acc = rng.integers(-999, 999, (8, instruction.vector // 4)).astype(np.int32)
    step = instruction.step(bits, tables, k)
    dot, lookup = instruction.dot(step), instruction.lookup(step)
    for extreme in (False, True):
        table = rng.integers(-127, 128, (tables, 1 << bits)).astype(np.int8)
        x = rng.integers(-127, 128, k).astype(np.int8)
        if extreme:
            table, x = np.sign(table) * np.int8(127), np.sign(x) * np.int8(127)
        same_halves(dot, [planes, table, x], acc)
        same_halves(lookup, [planes, table], np.zeros((8, k), np.uint8))


@pytest.mark.parametrize("k", (32, 64))
@pytest.mark.parametrize("instruction", INSTRUCTIONS, ids=lambda i: i.name)
def test_rows_do_what_they_mean(instruction: PlanesInstruction, k: int) -> None:
    if not set(instruction.features) <= find_profile("host").features:
        pytest.skip(f"this CPU has not {instruction.features}")
    rng, m = np.random.default_rng(k), M_TILES[instruction][0]
    name = instruction.rows(instruction.step(1, 1, k), m, 2)
    acc = rng.integers(-999, 999, (m, 2, instruction.vector // 4)).astype(np.int32)
    for most in (0, 1):
        w = rng.integers(-127, 128, (2, k)).astype(np.int8)
        x = rng.integers(-127, 128, (m, k)).astype(np.int8)
        if most:
            w, x = np.full_like(w, -127), np.sign(x) * np.int8(127)
        same_halves(name, [(w.astype(int) + instruction.offset).astype(np.uint8), x], acc)


def same_halves(name: str, operands: list[Array], acc: Array) -> None:
    """The instructions give what the plain loops give."""
    results = []
    for half in ("desc", "impl"):
        results.append(acc.copy())
        built(getattr(TensorIntrin.get(name), half), find_profile("host"))(*operands, results[-1])
    np.testing.assert_array_equal(results[1], results[0])


def test_reasons_to_decline() -> None:
    kernel = kernel_of("gemv", 3, "vpermb")
    host = find_profile("znver4")
    for name, k, reason in (
        ("anyprec3-8sA32", 64, "integer activations"),
        ("anyprec3-8sA8", 1 << 17, "int32"),
    ):
        scheme = parse_scheme(name)
        with pytest.raises(NotApplicable, match=reason):
            kernel.check(LinearSpec(8, k, scheme, details=(("channels", 1),)), host)
    scheme = parse_scheme("anyprec3-8sA8")
    for profile in ("znver3", "skylake-avx512"):
        with pytest.raises(NotApplicable, match="avx512vbmi"):
            spec = LinearSpec(8, 64, scheme, details=(("channels", 1),))
            kernel.check(spec, find_profile(profile))


@pytest.mark.parametrize("name", ("anyprec3-5sA8", "anyprec2-4sA32"))
def test_weight_expression_means_the_format(name: str) -> None:
    """What the generic kernels read, at every width."""
    tensor = random_tensor(11, 40, name, 2)
    layout = PlanesLayout.of(tensor.scheme, details(tensor))
    packed = layout.pack(tensor).arrays
    shapes = layout.shapes(11, 40)
    held = {key: te.placeholder(shape, dtype, key) for key, (shape, dtype) in shapes.items()}
    for bits in tensor.scheme.widths:
        y = np.zeros((11, 40), np.float32)
        built(_decode(layout, held, bits), "llvm")(*(packed[key] for key in held), y)
        np.testing.assert_allclose(y, dequantize(tensor, bits), rtol=1e-3, atol=1e-6)


def _decode(layout: PlanesLayout, held: dict[str, Any], bits: int) -> Any:
    def weight(n: Any, k: Any) -> Any:
        return layout.weight(held, n // 8, n % 8, k, bits)

    return te.create_prim_func([*held.values(), te.compute((11, 40), weight)])
