"""Packing of 32 activation codes into planes of bits, on x86 (AVX2).

Source: Intel 64 and IA-32 Software Developer's Manual, volume 2, PMOVMSKB; LLVM's IntrinsicsX86.td.
"""

from __future__ import annotations

from typing import Any

from apq_tvm.tensorize.meaning.bitserial import pack_pair
from apq_tvm.tensorize.meaning.interleaved import UNIT_K
from apq_tvm.tensorize.registry import register

Buffer = Any  # tvm is untyped


def pack_intrinsic(planes: int) -> str:
    """Register (once) and name the packing of 32 codes into planes.

    ``Y[t] += Σ_e (X[e] >> t & 1) << (8 (e % 4) + e // 4)``: X int32 [32], Y int32 [p].

    Parameters
    ----------
    planes : int
        p.
    """
    return register(
        f"apq_vpmovmskb_{planes}x{UNIT_K}_s32b32",
        lambda: pack_pair(planes, _pack_body),
    )


def _pack_body(planes: int, x: Buffer, y: Buffer) -> None:
    from tvm import tirx
    from tvm.tirx.script.builder import ir as b

    codes = x.vload([0], f"int32x{UNIT_K}").astype(f"int8x{UNIT_K}")
    # Byte 8c + v of the shuffled vector is k = 4v + c: its top bits are then in a plane's order.
    order = [tirx.const(4 * v + c, "int32") for c in range(4) for v in range(8)]
    words = tirx.reinterpret("uint16x16", tirx.Shuffle([codes], order))
    for t in range(planes):
        top = tirx.shift_left(words, tirx.Broadcast(tirx.const(7 - t, "uint16"), 16))
        mask = tirx.call_llvm_pure_intrin(
            "int32", "llvm.x86.avx2.pmovmskb", tirx.reinterpret("int8x32", top)
        )
        b.buffer_store(y, y[t, 0] + mask, [t, 0])
