"""Bit-serial kernels: exact against integer products for every (q, p), groups, tails and rows."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import tvm
from bitserial_cases import codes_reference, unpacked
from built import built
from linear_cases import dequantized, profile_for, quantized_weight
from scheduled import PROFILES as TARGETS
from scheduled import compiled
from tvm.s_tir import TensorIntrin

from apq_tvm.errors import NotApplicable
from apq_tvm.ops.activations.planes import quantize_planes
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.schedules.decide import Defaults, Recorded
from apq_tvm.schedules.devices import find_profile
from apq_tvm.schedules.graph.rules import schedule_preparation
from apq_tvm.schedules.linear.bitserial import planes_schedule
from apq_tvm.schedules.linear.kernel import LinearKernel
from apq_tvm.schedules.linear.quantize import quantize_func
from apq_tvm.schedules.linear.streams import M_TILES
from apq_tvm.schedules.linear.thresholds import rule_of
from apq_tvm.schedules.x86.bitserial import BITSERIAL_KERNELS, bitserial_x86
from apq_tvm.schedules.x86.profiles import linear_kernels
from apq_tvm.select import choose
from apq_tvm.tensorize.meaning.bitserial import term
from apq_tvm.tensorize.x86.bitserial import INSTRUCTIONS, PSHUFB, VPOPCNT
from apq_tvm.types import DeviceProfile, Scheme

RELATIVE_ERROR = 2e-6
"""Of float32 sums and products with exact integers inside, against the largest output."""

PAIRS = tuple(itertools.product(range(1, 9), repeat=2))

GROUPS = (-1, 32, 64, 128)


def profile_of(kernel: LinearKernel) -> DeviceProfile:
    if kernel.instruction.name == VPOPCNT.name:
        host = find_profile("host")
        if "avx512vpopcntdq" not in host.features:
            pytest.skip(f"{host.name} has no avx512vpopcntdq")
        return host
    return profile_for(kernel)


class Layer:
    """One kernel and its preparation, compiled."""

    def __init__(self, kernel: LinearKernel, spec: LinearSpec, decisions: Any = None) -> None:
        profile = profile_of(kernel)
        kernel.check(spec, profile)
        choice = kernel.choose(spec, profile, Recorded(decisions or {}))
        self.kernel = built(kernel.scheduled(choice), profile)
        preparation = kernel.prepare(choice)
        assert preparation is not None
        func, _ = schedule_preparation(preparation, preparation.func, profile, Defaults())
        self.prepare = built(func, profile)
        self.outputs = list(preparation.func.params)[1:]
        self.spec, self.layout = spec, kernel.layout(spec, profile)

    def check(self, m: int, seed: int = 0) -> None:
        """Compare with float64 products of the same codes."""
        spec, rng = self.spec, np.random.default_rng(seed)
        scheme, k = spec.scheme, spec.k
        assert scheme is not None
        weight = quantized_weight(spec.n, k, scheme, rng)
        layout: Any = self.layout
        packed = layout.pack(weight).arrays.values()
        x = np.zeros((m, layout.padded_k(k)), np.float32)
        x[:, :k] = rng.standard_normal((m, k))
        width = layout.padded_k(k) if scheme.act_group == -1 else layout.group_width(k)
        codes, scales = codes_reference(x, scheme.act_bits, k, width)
        outs = [np.full((m, *map(int, out.shape[1:])), 99, str(out.dtype)) for out in self.outputs]
        self.prepare(x[:, :k], *outs)
        got = unpacked(outs[0])
        if scheme.act_bits == 1:
            got[:, :k] = 2 * got[:, :k] - 1
        np.testing.assert_array_equal(got, codes)
        np.testing.assert_allclose(outs[1], scales, rtol=1e-6)
        values = (codes.reshape(m, -1, width) * scales[..., None]).reshape(m, -1)[:, :k]
        want = values @ dequantized(weight).T
        y = np.full((m, spec.n), np.nan, np.float32)
        self.kernel(*outs, *packed, y)
        atol = RELATIVE_ERROR * (np.abs(want).max() + 1)
        np.testing.assert_allclose(y, want, rtol=0, atol=atol)


@pytest.mark.few(3)
@pytest.mark.parametrize("instruction", INSTRUCTIONS, ids=lambda i: i.name)
@pytest.mark.parametrize("q", range(1, 9))
def test_every_q_and_p(q: int, instruction: Any) -> None:
    """Zero points, groups, ragged N and K and the row tile change with (q, p)."""
    for p in (1, 2, 3 + (3 * q) % 6):
        group = GROUPS[(q + p) % len(GROUPS)]
        scheme = Scheme(q, bool((q + p) & 1), p, bool(p & 2) and group > 0, group)
        m_tile = (1, 2, 4)[(q + 2 * p) % 3] if q * p <= 8 else 1
        kernel = bitserial_x86(instruction, q, m_tile)
        n, k = instruction.rows * 2 + (q + p) % 3 - 1, (127, 128, 161, 256)[(q * p) % 4]
        layer = Layer(kernel, LinearSpec(n, k, scheme))
        for m in (m_tile, 5):
            layer.check(m, seed=q * p)


@pytest.mark.parametrize("p", range(1, 9))
@pytest.mark.parametrize("q", range(1, 9))
def test_terms_of_every_pair_are_integer_products(q: int, p: int) -> None:
    """What a pair (q, p) adds to the sum, evaluated by TVM's simplifier, against numpy."""
    rng, analyzer = np.random.default_rng(q * p), tvm.sym.Analyzer()
    codes, bits = rng.integers(0, 1 << q, 8), rng.integers(0, 2, (p, 8))

    def i32(value: Any) -> Any:
        return tvm.tirx.const(int(value), "int32")

    terms = [term(i32(c), [i32(v) for v in row], q) for c, row in zip(codes, bits.T, strict=True)]
    got = np.array([int(analyzer.simplify(value)) for value in terms])
    if p <= 2:  # the operator makes products of these
        want = codes ^ (bits[-1] * ((1 << q) - 1))
        want = want if p == 1 else want * bits[0]
    else:
        weights = [*(1 << t for t in range(p - 1)), -(1 << (p - 1))]
        want = codes * (np.array(weights) @ bits)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("instruction", INSTRUCTIONS, ids=lambda i: i.name)
@pytest.mark.parametrize("q,p", [(1, 1), (1, 2), (2, 1), (2, 2), (3, 4), (8, 8)])
def test_intrinsic_equals_its_plain_loops(q: int, p: int, instruction: Any) -> None:
    from apq_tvm.codegen.layouts import InterleavedLayout

    host = find_profile("host")
    if not host.features & set(instruction.features):
        pytest.skip(f"this CPU has none of {instruction.features}")
    unit = InterleavedLayout(q, instruction.rows, 32).unit
    m, units = 1 + (q + p) % 2, instruction.units
    name = instruction.dot(unit, p, units, m)
    rng = np.random.default_rng(q)
    many = (units,) if units > 1 else ()
    rows = (m,) if m > 1 else ()
    info = np.iinfo(np.int32)
    for fill in ("random", "ones"):
        codes = rng.integers(0, 256, (*many, unit.nbytes)).astype(np.uint8)
        x = rng.integers(info.min, info.max, (*rows, p, units)).astype(np.int32)
        if fill == "ones":
            codes[...], x[...] = 255, -1
        acc = rng.integers(-99, 99, (*rows, unit.rows)).astype(np.int32)
        results = []
        for half in ("desc", "impl"):
            results.append(acc.copy())
            built(getattr(TensorIntrin.get(name), half), host)(codes, x, results[-1])
        np.testing.assert_array_equal(results[1], results[0])


@pytest.mark.parametrize("instruction", INSTRUCTIONS, ids=lambda i: i.name)
@pytest.mark.parametrize("decisions", [{"streams": 2, "unroll": 2}, {"streams": 4, "ahead": 0}])
def test_decisions_on_a_parallel_layer(instruction: Any, decisions: Any) -> None:
    kernel = bitserial_x86(instruction, 2, 1)
    spec = LinearSpec(instruction.rows * 9 + 3, 512, Scheme(2, True, 2))
    Layer(kernel, spec, decisions).check(3)


@pytest.mark.parametrize("profile", TARGETS)
@pytest.mark.parametrize("bits", (1, 2, 5))
@pytest.mark.parametrize("act,weight", [(-1, -1), (32, 32), (-1, 64)])
def test_planes_are_the_codes_of_the_integer_kernels(
    profile: DeviceProfile, bits: int, act: int, weight: int
) -> None:
    """One quantization, two forms: what the integer dot product reads and what planes hold."""
    m, k = 3, 150
    step = max(32, weight)
    kp = -(-k // step) * step
    x = np.random.default_rng(bits).standard_normal((m, k)).astype(np.float32)
    x[0, :40] = 0
    groups = m, kp // (kp if act == -1 else act)
    sums = m, kp // (kp if weight == -1 else weight)
    shapes = [((m, kp), np.int8), (groups, np.float32), (sums, np.int32)]
    plain = [np.full(shape, 99, dtype) for shape, dtype in shapes]
    compiled(quantize_func(k, act, weight, profile, Defaults(), bits), profile)(x, *plain)
    planes = [np.full((m, bits, kp // 32), 99, np.int32), *(np.full_like(a, 77) for a in plain[1:])]
    planes += [np.full(sums, 99, np.int32)] if bits == 2 else []
    func = quantize_planes(k, act, weight, 2, bits)
    built(planes_schedule(PSHUFB)(func, profile, Defaults()), profile)(x, *planes)
    codes = unpacked(planes[0])
    if bits == 1:
        codes[:, :k] = 2 * codes[:, :k] - 1
    np.testing.assert_array_equal(codes, plain[0])
    np.testing.assert_array_equal(planes[1], plain[1])
    np.testing.assert_array_equal(planes[2], plain[2])
    np.testing.assert_array_equal(plain[2], plain[0].reshape(*sums, -1).sum(-1))
    if bits == 2:
        np.testing.assert_array_equal(planes[3], (plain[0].reshape(*sums, -1) < 0).sum(-1))


@pytest.mark.parametrize("profile", TARGETS)
def test_signs_of_nan_and_zero(profile: DeviceProfile) -> None:
    x = np.ones((2, 64), np.float32)
    x[0, 3], x[1] = np.nan, 0.0
    results = [np.zeros((2, 64), np.int8), np.ones((2, 1), np.float32), np.zeros((2, 1), np.int32)]
    compiled(quantize_func(64, -1, -1, profile, Defaults(), 1), profile)(x, *results)
    assert np.isnan(results[1][0, 0]) and results[1][1, 0] == 0
    assert set(np.unique(results[0])) <= {-1, 1} and (results[0][1] == 1).all()


def test_the_selector_takes_bitserial_where_it_is_faster_and_says_why_not_elsewhere() -> None:
    for target in ("znver5", "znver3"):
        profile = find_profile(target)
        kinds = {k.name: (k.kind, k.bits) for k in linear_kernels()}
        fast = choose(LinearSpec(64, 256, Scheme(1, act_bits=1)), linear_kernels(), profile, "up")
        assert all(kinds[c.kernel] == ("bitserial", 1) for c in fast)
        slow = choose(LinearSpec(64, 256, Scheme(4, act_bits=8)), linear_kernels(), profile, "up")
        assert not any(kinds[c.kernel][0] == "bitserial" for c in slow)
        reasons = dict(slow[0].rejected)
        mine = [reasons[k.name] for k in BITSERIAL_KERNELS if k.bits == 4]
        assert any("integer dot is faster from q*p >=" in reason for reason in mine)
        source = "measured: Zen 5" if target == "znver5" else "znver3 borrows it of znver5: Zen 5"
        assert any(source in reason for reason in mine)


@pytest.mark.parametrize("target", ("znver5", "znver3"))
@pytest.mark.parametrize("q,p", list(itertools.product(range(1, 5), repeat=2)))
def test_other_kernels_cover_the_rows_it_declines(q: int, p: int, target: str) -> None:
    profile = find_profile(target)
    choices = choose(LinearSpec(64, 256, Scheme(q, act_bits=p)), linear_kernels(), profile, "up")
    assert next(c.m_min for c in choices) == 1 and choices[-1].m_max == -1
    last = next(k.kind for k in linear_kernels() if k.name == choices[-1].kernel)
    instruction = "vpopcntd" if target == "znver5" else "pshufb"
    wanted = (instruction, q, 4)
    mine = next(k for k in BITSERIAL_KERNELS if (k.instruction.name, k.bits, k.m_tile) == wanted)
    found = rule_of(mine, profile)
    assert found is not None and found.rule.most_act_bits is not None
    assert last == ("bitserial" if p <= found.rule.most_act_bits.get(q, 0) else "gemm")


@pytest.mark.parametrize(
    "scheme,target,reason",
    [
        (Scheme(1, act_bits=1, group_size=16), "znver5", "groups of 16"),
        (Scheme(1, act_bits=1), "cascadelake", "vpopcntdq|wants the weights in 16"),
        (Scheme(2, act_bits=16), "znver5", "integer activations"),
    ],
)
def test_what_it_cannot_compute_is_declined(scheme: Scheme, target: str, reason: str) -> None:
    spec, profile = LinearSpec(64, 256, scheme), find_profile(target)
    for instruction, m_tile in itertools.product(INSTRUCTIONS, M_TILES):
        kernel = bitserial_x86(instruction, scheme.bits, m_tile)
        with pytest.raises(NotApplicable, match=f"{reason}|none of it|in 16"):
            kernel.check(spec, profile)


def assembly(kernel: LinearKernel, target: str, scheme: Scheme) -> str:
    profile, spec = find_profile(target), LinearSpec(64, 512, scheme)
    func = kernel.scheduled(kernel.choose(spec, profile, Defaults()))
    return built(func, profile).assembly


@pytest.mark.parametrize("p", (1, 2))
def test_the_instructions_are_there(p: int) -> None:
    scheme = Scheme(2, act_bits=p)
    wide = assembly(bitserial_x86(VPOPCNT, 2, 1), "znver4", scheme)
    match = "vpxor" if p == 1 else "vpternlog"
    assert wide.count("vpopcntd") >= 2 and match in wide and "zmm" in wide
    narrow = assembly(bitserial_x86(PSHUFB, 2, 1), "znver3", scheme)
    assert narrow.count("vpshufb") >= 4 and "vpxor" in narrow and "zmm" not in narrow
