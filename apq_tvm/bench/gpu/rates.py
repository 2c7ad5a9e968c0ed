"""Kernels that measure a GPU's memory and its kinds of ``mma`` (``on_gpu/rates.cu``), as a bundle
holds them.

Which kinds a GPU has in its machine code, not emulated by others, was read off that
(`apq_tvm.bench.gpu.sass`, NVRTC 12.9 and 13.0): compute capability 9.0 has ``and`` of bits, ``xor``
is a function there, and from 10.0 on both are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).resolve().parent / "on_gpu" / "rates.cu"

CHAINS = 8
"""``APQ_CHAINS`` of it."""

_AMPERE = (80, 86, 87, 89)
_FROM_80 = (*_AMPERE, 90, 110, 120)


@dataclass(frozen=True)
class Rate:
    """A kind of ``mma``.

    Parameters
    ----------
    kernel : str
        Behind ``apq_rate_``.
    shape : tuple of int
        M, N and K of one.
    sms : tuple of int
        Compute capabilities that have it.
    """

    kernel: str
    shape: tuple[int, int, int]
    sms: tuple[int, ...]

    def described(self) -> dict[str, Any]:
        """For JSON."""
        m, n, k = self.shape
        return {
            "name": f"{self.kernel} m{m}n{n}k{k}",
            "kernel": f"apq_rate_{self.kernel}",
            "macs": m * n * k,
            "chains": CHAINS,
            "sms": list(self.sms),
        }


RATES = (
    Rate("s8", (16, 8, 32), _FROM_80),
    Rate("s8", (8, 8, 16), (75,)),
    Rate("f16", (16, 8, 16), _FROM_80),
    Rate("f16", (16, 8, 8), (75,)),
    Rate("b1_and", (16, 8, 256), (*_AMPERE, 90)),
    Rate("b1_xor", (16, 8, 256), _AMPERE),
    Rate("b1_xor", (8, 8, 128), (75,)),
    Rate("s4", (16, 8, 64), _AMPERE),
    Rate("s4", (8, 8, 32), (75,)),
    Rate("e4m3", (16, 8, 32), (89, 120)),
)


def rate_code(sm: int) -> Any:
    """The `DeviceCode` for a compute capability."""
    from apq_tvm.codegen.cuda.split import DeviceCode, DeviceKernel
    from apq_tvm.codegen.cuda.tables import with_own_kernels

    names = ["read", *(rate.kernel for rate in RATES if sm in rate.sms)]
    kernels = tuple(DeviceKernel(f"apq_rate_{name}", "", ()) for name in names)
    return with_own_kernels(DeviceCode(SOURCE.read_text(encoding="utf-8"), kernels))


def described(images: Mapping[int, str]) -> dict[str, Any]:
    """Their part of ``bundle.json``, by the images' files."""
    wanted: Sequence[Rate] = [rate for rate in RATES if set(rate.sms) & set(images)]
    return {
        "images": {str(sm): file for sm, file in images.items()},
        "mma": [rate.described() for rate in wanted],
    }
