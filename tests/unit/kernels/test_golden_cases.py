"""What `tests.golden` hashes leaves out no kernel that layers get."""

from __future__ import annotations

from apq_tvm.schedules.devices import PROFILES, linear_kernels
from tests.golden.cases import SHAPES, in_full, schemes, spec_of
from tests.golden.kernels import fits


def test_every_kernel_is_hashed() -> None:
    kernels = {kernel.name: kernel for p in PROFILES for kernel in linear_kernels(p)}
    specs = [spec_of(scheme, shape) for scheme in schemes() for shape in SHAPES]
    hashed = {
        kernel.name
        for profile in in_full()
        for kernel in linear_kernels(profile)
        if any(fits(kernel, spec, profile) for spec in specs)
    }
    # Products of planes are declined where they were measured to be slower than other kernels.
    assert {kernels[name].kind for name in kernels.keys() - hashed} <= {"bitserial"}
