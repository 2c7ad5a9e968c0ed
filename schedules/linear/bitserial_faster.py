"""Where bit-serial products are faster than the integer dot product of the same layout.

x86: time of the integer dot product over ours, both with the quantization of activations;
4096x4096, one scale per row, out of cache, one thread of a Zen 5, vpopcntd beside vpdpbusd on 512
bits and pshufb beside vpmaddubsw (code for Zen 3):

=====  ========  ====================  ====================
q      M         vpopcntd, p = 1 .. 4  pshufb, p = 1 .. 4
=====  ========  ====================  ====================
1      1         1.3  1.2  1.2  1.2    2.6  2.7  1.3  1.0
1      2         4.5  5.0  4.7  4.0    2.7  2.4  1.0  0.8
1      8         4.8  3.6  2.0  1.5    2.5  2.2  0.8  0.6
1      64        4.6  3.2  1.7  1.3    2.4  2.1  0.8  0.6
2      1         0.8  1.0  0.2  0.3    1.0  0.9  0.5  0.4
2      2         2.1  2.2  1.8  1.5    1.1  1.0  0.5  0.4
2      8         1.6  1.6  0.9  0.6    1.2  1.1  0.4  0.2
2      64        2.0  1.8  0.8  0.3    1.6  0.8  0.3  0.3
=====  ========  ====================  ====================

W3 was measured on a busy machine only: M = 8, p = 1 gave 0.9 to 1.4 and 0.7, p = 2 less than 1.

Arm: cycles per weight of the inner loops by llvm-mca 22, 4096x4096, M = 1, beside the integer dot
products of `apq_tvm.schedules.arm.gemv` (``sdot``: activations of 8 bits alone; ``smull``: of any
bits, about 0.18 on N1 and 0.09 on V1 for every q):

=====  ==================================  ==================================
q      Neoverse N1, p = 1, 2, 4, and sdot  Neoverse V1, p = 1, 2, 4, and sdot
=====  ==================================  ==================================
1      0.022  0.028  0.068  0.096          0.010  0.013  0.034  0.048
2      0.047  0.060  0.152  0.071          0.024  0.030  0.073  0.035
=====  ==================================  ==================================

So for fewer than 8 bits popcounts win where q * p <= 8 (3 * 3 takes 0.175 on N1, 4 * 4 0.45). Four
rows of x and more have the integer GEMM of the same activations, which does 21 products a cycle on
N1 and 64 on V1: popcounts do 51 and 107 for W1A1, 33 and 75 for W1A2, 28 and 56 for W2A1.
"""

from __future__ import annotations

from apq_tvm.errors import NotApplicable
from apq_tvm.ops.linear.spec import LinearSpec

_EIGHT_PAIRS = {1: 7, 2: 4, 3: 2, 4: 2, 5: 1, 6: 1, 7: 1, 8: 1}
_TWO_PAIRS = {1: 2, 2: 1}

FASTER_UP_TO: dict[tuple[str, int], dict[int, int]] = {
    ("vpopcntd", 1): {1: 4},
    ("vpopcntd", 2): {1: 4, 2: 4},
    ("vpopcntd", 4): {1: 4, 2: 2},
    ("pshufb", 1): {1: 3, 2: 1},
    ("pshufb", 2): {1: 2, 2: 1},
    ("pshufb", 4): {1: 2, 2: 1},
    ("cntudot", 1): _EIGHT_PAIRS,
    ("cntudot", 2): _EIGHT_PAIRS,
    ("cntudot", 4): _TWO_PAIRS,
    ("cntuaddlp", 1): _EIGHT_PAIRS,
    ("cntuaddlp", 2): _EIGHT_PAIRS,
    ("cntuaddlp", 4): _TWO_PAIRS,
}
"""(instruction, row tile) -> {q: largest p that is faster}; where q is missing, none is."""


def check_faster(spec: LinearSpec, instruction: str, m_tile: int) -> None:
    """Decline where the integer dot product is faster.

    Raises
    ------
    NotApplicable
    """
    assert spec.scheme is not None
    q, p = spec.scheme.bits, spec.scheme.act_bits
    most = FASTER_UP_TO[instruction, m_tile].get(q, 0)
    if p > most:
        raise NotApplicable(
            f"integer dot is faster from q*p >= {q * (most + 1)} on at W{q}, found with "
            f"{instruction} for {m_tile} rows of x; this is {q}*{p}"
        )
