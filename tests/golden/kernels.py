"""Hashes of scheduled kernels and preparations, and what is selected where."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import cache
from typing import Any

import tvm
import tvm_ffi

from apq_tvm.errors import NotApplicable, UnsupportedModel
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.schedules.decide import Decide, Defaults
from apq_tvm.schedules.devices import linear_kernels
from apq_tvm.schedules.graph.rewrites.lets import spill_lets
from apq_tvm.schedules.graph.rules import schedule_preparation
from apq_tvm.schedules.linear.kernel import LinearKernel
from apq_tvm.schedules.linear.thresholds import rows_of
from apq_tvm.select import choose
from apq_tvm.types import DeviceProfile, KernelChoice, Scheme

from .cases import SHAPES, Hashed, in_full, profiles, schemes, spec_of

_PREPARED: dict[str, dict[str, str]] = {}
"""By device and key: many kernels share one preparation."""


def func_hash(func: Any) -> str:
    """Of a PrimFunc, without its name."""
    text = tvm_ffi.structural_hash(func.with_attr("global_symbol", "f"), map_free_vars=True)
    return f"{text & (1 << 64) - 1:016x}"


def text_hash(data: bytes | str) -> str:
    """Of text or bytes."""
    return hashlib.sha256(data if isinstance(data, bytes) else data.encode()).hexdigest()[:16]


def entries(number: int, only: str) -> Iterator[tuple[str, str]]:
    """``(key, hash)`` of everything on one device, whose number in `profiles` this is.

    Keys are ``device/scheme/NxK/kernel/decisions``; a kernel stands under every full device that
    selects it by its defaults, and under the first that can run it by other decisions too.
    """
    profile = profiles()[number]
    for scheme in schemes():
        head = f"{profile.name}/{scheme or 'float'}"
        if only and only not in head:
            continue
        names = set()
        for shape in SHAPES:
            spec = spec_of(scheme, shape)
            chosen = selected(spec, profile)
            names |= {c.kernel for c in chosen}
            yield (
                f"{head}/{spec.n}x{spec.k}/selected",
                " ".join(f"{c.kernel}:{c.layout}:{c.m_min}..{c.m_max}@{c.width}" for c in chosen),
            )
        if number < len(in_full()):
            for kernel in linear_kernels(profile):
                first = first_of(kernel.name, scheme) == profile.name
                if first or kernel.name in names:
                    yield from kernel_entries(kernel, scheme, profile, head, first)


def selected(spec: LinearSpec, profile: DeviceProfile) -> tuple[KernelChoice, ...]:
    """What `select` chooses; nothing where it cannot."""
    try:
        return choose(spec, linear_kernels(profile), profile, "layer")
    except UnsupportedModel:
        return ()


@cache
def first_of(name: str, scheme: Scheme | None) -> str:
    """The first full device on which a kernel fits the larger shape."""
    for profile in in_full():
        for kernel in linear_kernels(profile):
            if kernel.name == name and fits(kernel, spec_of(scheme, SHAPES[1]), profile):
                return profile.name
    return ""


def fits(kernel: LinearKernel, spec: LinearSpec, profile: DeviceProfile) -> bool:
    """Whether the kernel is for such layers on such a device."""
    if not kernel.is_for(spec):
        return False
    try:
        kernel.check(spec, profile)
        rows_of(kernel, spec, profile)
    except NotApplicable:
        return False
    return True


def kernel_entries(
    kernel: LinearKernel, scheme: Scheme | None, profile: DeviceProfile, head: str, first: bool
) -> Iterator[tuple[str, str]]:
    """A kernel by its defaults, and by decisions of its own."""
    cases: list[tuple[tuple[int, int, str], str, Decide]] = [(SHAPES[0], "defaults", Defaults())]
    if first:
        cases += [(SHAPES[1], "other", Hashed(1)), (SHAPES[1], "another", Hashed(2))]
    with tvm.target.Target(dict(profile.target)):
        for shape, label, decide in cases:
            spec = spec_of(scheme, shape)
            if fits(kernel, spec, profile):
                key = f"{head}/{spec.n}x{spec.k}/{kernel.name}/{label}"
                yield from emitted(kernel, spec, profile, decide, key)


def emitted(
    kernel: LinearKernel, spec: LinearSpec, profile: DeviceProfile, decide: Decide, key: str
) -> Iterator[tuple[str, str]]:
    """The scheduled kernel and what it wants done to x, as a module would hold them."""
    choice = kernel.choose(spec, profile, decide)
    yield key, func_hash(spill_lets(kernel.scheduled(choice)))
    prepared = _PREPARED.setdefault(profile.name, {})
    preparation = kernel.prepare(choice)
    if preparation is not None:
        if preparation.key not in prepared:
            func = preparation.func
            scheduled, _ = schedule_preparation(preparation, func, profile, Defaults())
            prepared[preparation.key] = func_hash(spill_lets(scheduled))
        yield f"{key}/prepare", prepared[preparation.key]
