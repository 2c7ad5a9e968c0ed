// Planes of three digits of five levels out of the seven planes that they share: what the table in
// codegen/layouts/quinary.py says, as logic on 32 codes at once.
#ifndef APQ_QUINARY
#define APQ_QUINARY

// A lane's four words of each: from[4 plane + word], to[4 (3 digit + plane) + word].
__device__ __forceinline__ void apq_unpack_quinary(unsigned *to, const unsigned *from) {
#pragma unroll
  for (int word = 0; word < 4; word++) {
    const unsigned *p = from + word;
    const unsigned flag = p[24], p1 = p[4], p0 = p[0], p3 = p[12], p2 = p[8];
    const unsigned first = flag & p1 & ~p0, second = flag & ~p1 & p0;  // is large, alone
    const unsigned some = flag & p1 & p0;                              // two or three are
    const unsigned but0 = some & ~p3 & ~p2, but1 = some & ~p3 & p2, but2 = some & p3 & ~p2;
    const unsigned large0 = first | (some & ~but0), large1 = second | (some & ~but1);
    const unsigned large2 = (flag & ~p1 & ~p0) | (some & ~but2), high = first | but2;
    unsigned *t = to + word;
    t[8] = large0, t[20] = large1, t[32] = large2;
#pragma unroll
    for (int bit = 0; bit < 2; bit++) {
      const unsigned a = p[16 + 4 * bit], b = p[8 + 4 * bit], c = p[4 * bit];
      t[4 * bit] = a & ~large0;
      t[12 + 4 * bit] = ((but1 & a) | (~but1 & b)) & ~large1;
      const unsigned lower = (second & b) | (~second & c);
      t[24 + 4 * bit] = ((high & a) | (~high & lower)) & ~large2;
    }
  }
}
#endif
