"""Four columns of int8 keys and of a query by vpdpbusd or vpmaddubsw.

Both multiply unsigned by signed bytes. vpdpbusd takes keys + 128, and the sum of the query's codes
takes that back; vpmaddubsw takes ``|key|`` and the query with the key's sign: two products of at
most 127 * 127 fit its int16. Keys that are never negative need neither. Source: Intel 64 and IA-32
Architectures Software Developer's Manual, volume 2, VPDPBUSD, PMADDUBSW, PSIGNB.
"""

from __future__ import annotations

from tvm import tirx

from apq_tvm.tensorize.exprs import Expr, splat, x86
from apq_tvm.tensorize.meaning.four_dot import FourDot
from apq_tvm.tensorize.x86.vectors import lanes_of, maddubs, vpdpbusd, widened


def _four(four: Expr, lanes: int) -> Expr:
    return tirx.reinterpret(f"int8x{4 * lanes}", tirx.Broadcast(four, lanes))


def _raised(keys: Expr) -> tuple[Expr, ...]:
    size = lanes_of(keys)
    codes = tirx.reinterpret(f"uint8x{size}", keys)
    return (tirx.bitwise_xor(codes, splat(0x80, "uint8", size)),)


def _unsigned(keys: Expr) -> tuple[Expr, ...]:
    return (tirx.reinterpret(f"uint8x{lanes_of(keys)}", keys),)


def _dpbusd(total: Expr, ready: tuple[Expr, ...], four: Expr) -> Expr:
    return vpdpbusd(total, ready[0], _four(four, lanes_of(total)))


def _signed(keys: Expr) -> tuple[Expr, ...]:
    size = lanes_of(keys)
    magnitude = x86(f"int8x{size}", "avx2.psign.b", keys, keys)
    return keys, tirx.reinterpret(f"uint8x{size}", magnitude)


def _maddubs(total: Expr, ready: tuple[Expr, ...], four: Expr) -> Expr:
    keys, magnitude = ready
    signed = x86("int8x32", "avx2.psign.b", _four(four, 8), keys)
    return total + widened(maddubs(magnitude, signed))


def _plain_maddubs(total: Expr, ready: tuple[Expr, ...], four: Expr) -> Expr:
    return total + widened(maddubs(ready[0], _four(four, 8)))


def _by_dpbusd(lanes: int) -> FourDot:
    name = f"vpdpbusd{32 * lanes}"
    plain = FourDot(name, lanes, _unsigned, _dpbusd)
    return FourDot(name, lanes, _raised, _dpbusd, 128, plain)


VPDPBUSD512, VPDPBUSD256 = map(_by_dpbusd, (16, 8))
MADDUBS = FourDot(
    "maddubs", 8, _signed, _maddubs, plain=FourDot("maddubs", 8, _unsigned, _plain_maddubs)
)
