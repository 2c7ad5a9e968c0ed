"""Small headers in the place of libcu++'s, which TVM's CUDA source includes under NVRTC.

It takes nothing of them but integer types and some type traits; the real ones are 3 MB, and take
NVRTC 3 s.
"""

from __future__ import annotations

_CSTDINT = """#pragma once
namespace cuda { namespace std {
typedef signed char int8_t; typedef short int16_t; typedef int int32_t; typedef long long int64_t;
typedef unsigned char uint8_t; typedef unsigned short uint16_t; typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;
} }
"""

_TYPE_TRAITS = """#pragma once
namespace cuda { namespace std {
template <bool v> struct bool_constant { static constexpr bool value = v; };
template <class A, class B> struct is_same : bool_constant<false> {};
template <class A> struct is_same<A, A> : bool_constant<true> {};
template <class A, class B> inline constexpr bool is_same_v = is_same<A, B>::value;
template <class A> struct is_floating_point : bool_constant<A(0.5) != A(0)> {};
template <class A> struct is_integral : bool_constant<A(0.5) == A(0)> {};
template <class A> struct is_signed : bool_constant<A(-1) < A(0)> {};
template <class A> struct is_unsigned : bool_constant<A(-1) >= A(0)> {};
template <bool c, class T = void> struct enable_if {};
template <class T> struct enable_if<true, T> { using type = T; };
template <bool c, class A, class B> struct conditional { using type = A; };
template <class A, class B> struct conditional<false, A, B> { using type = B; };
} }
"""

HEADERS = {"cuda/std/cstdint": _CSTDINT, "cuda/std/type_traits": _TYPE_TRAITS}
"""By the name they are included by."""
