"""Packing of 32 activation codes into planes of bits, on x86 (AVX2).

Source: Intel 64 and IA-32 Software Developer's Manual, volume 2, PMOVMSKB; LLVM's IntrinsicsX86.td.
"""

from __future__ import annotations

from typing import Any

from apq_tvm.tensorize.bitserial import packed_bit, plane_axes
from apq_tvm.tensorize.registry import register
from apq_tvm.tensorize.unit import UNIT_K

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
        lambda: (_pack(planes, False), _pack(planes, True)),
    )


def _pack(planes: int, instructions: bool) -> Any:
    from tvm import tirx
    from tvm.script.ir_builder import IRBuilder
    from tvm.tirx.script.builder import ir as b

    with IRBuilder() as builder, b.prim_func(s_tir=True):
        b.func_name("pack")
        x = b.match_buffer(b.arg("x", b.handle()), (UNIT_K,), "int32", align=64, offset_factor=1)
        strides = [tirx.Var("plane", "int64"), 1] if instructions else None
        y = b.match_buffer(
            b.arg("y", b.handle()), (planes, 1), "int32", strides=strides, align=4, offset_factor=1
        )
        with b.sblock("root"):
            b.reads(y[0:planes, 0:1], x[0:UNIT_K])
            b.writes(y[0:planes, 0:1])
            if instructions:
                _pack_body(planes, x, y)
            else:
                with b.grid(*([planes] if planes > 1 else []), UNIT_K) as loops, b.sblock("pack"):
                    t, e = plane_axes(planes, loops)
                    b.reads(y[t, 0], x[e])
                    b.writes(y[t, 0])
                    value = y[t, 0] + packed_bit(x[e], t, e)
                    b.buffer_store(y, value, [t, 0])
    return builder.get()


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
