"""What headers of C and C++ say to device code, in our own words: only a source's own headers are read.

nvcc puts CUDA's headers, and with them these, in front of every file; so names of theirs are there whether a source
includes the header or not, unless it declares them itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterable


def _constants(text: str) -> str:
    """`NAME VALUE; NAME VALUE` as macros."""
    return "".join(f"#define {x.strip()}\n" for x in text.split(";"))


VERSIONS = {"CUDA_VERSION": "13000", "CUDART_VERSION": "13000"}
"""Known in conditions, too."""
SYSTEM = {
    "float.h": _constants(
        "FLT_MAX 3.402823466e+38F; FLT_MIN 1.175494351e-38F; FLT_EPSILON 1.192092896e-07F;"
        "DBL_MAX 1.7976931348623157e+308; DBL_MIN 2.2250738585072014e-308; DBL_EPSILON 2.2204460492503131e-16"
    ),
    "limits.h": _constants(
        "CHAR_BIT 8; SCHAR_MAX 127; UCHAR_MAX 255; SHRT_MAX 32767; SHRT_MIN (-32768); USHRT_MAX 65535;"
        "INT_MAX 2147483647; INT_MIN (-INT_MAX - 1); UINT_MAX 4294967295U; LONG_MAX 9223372036854775807L;"
        "LONG_MIN (-LONG_MAX - 1L); ULONG_MAX 18446744073709551615UL; LLONG_MAX 9223372036854775807LL;"
        "LLONG_MIN (-LLONG_MAX - 1); ULLONG_MAX 18446744073709551615ULL"
    ),
    "stdint.h": "typedef signed char int8_t;\ntypedef unsigned char uint8_t;\ntypedef short int16_t;\n"
    "typedef unsigned short uint16_t;\ntypedef int int32_t;\ntypedef unsigned int uint32_t;\n"
    "typedef long int64_t;\ntypedef unsigned long uint64_t;\ntypedef long intptr_t;\n"
    "typedef unsigned long uintptr_t;\n"
    + _constants(
        "INT8_MAX 127; UINT8_MAX 255; INT16_MAX 32767; UINT16_MAX 65535; INT32_MAX 2147483647;"
        "INT32_MIN (-INT32_MAX - 1); UINT32_MAX 4294967295U; INT64_MAX 9223372036854775807L;"
        "INT64_MIN (-INT64_MAX - 1L); UINT64_MAX 18446744073709551615UL; SIZE_MAX 18446744073709551615UL"
    ),
    "math.h": _constants(
        "M_PI 3.14159265358979323846; M_PI_2 1.57079632679489661923; M_PI_4 0.78539816339744830962;"
        "M_1_PI 0.31830988618379067154; M_2_PI 0.63661977236758134308; M_2_SQRTPI 1.12837916709551257390;"
        "M_E 2.7182818284590452354; M_LOG2E 1.4426950408889634074; M_LOG10E 0.43429448190325182765;"
        "M_SQRT2 1.41421356237309504880; M_SQRT1_2 0.70710678118654752440; M_LN2 0.69314718055994530942;"
        "M_LN10 2.30258509299404568402; INFINITY __int_as_float(0x7f800000); NAN __int_as_float(0x7fffffff);"
        "HUGE_VALF __int_as_float(0x7f800000); HUGE_VAL __longlong_as_double(0x7ff0000000000000ll)"
    ),
    "cuda_runtime.h": "".join(f"#define {name} {value}\n" for name, value in VERSIONS.items()),
    "sys/types.h": "typedef unsigned int uint;\ntypedef unsigned short ushort;\ntypedef unsigned long ulong;\n",
}
"""What headers of C say to device code; other headers are taken as empty."""
_C_ONLY = ("float.h", "limits.h", "stdint.h", "math.h")
SYSTEM |= {f"c{name.removesuffix('.h')}": text for name, text in list(SYSTEM.items()) if name in _C_ONLY}
_LINE = re.compile(r"#define (\w+) .*|typedef .* (\w+);")
_OF_C = {m[1] or m[2]: x for text in SYSTEM.values() for x in text.splitlines() if (m := _LINE.fullmatch(x))}
_MATHS = (
    "abs", "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "ceil", "copysign", "cos", "cosh", "erf",
    "erfc", "exp", "exp2", "expm1", "fabs", "fdim", "floor", "fma", "fmax", "fmin", "fmod", "hypot", "isfinite",
    "isinf", "isnan", "ldexp", "lgamma", "log", "log10", "log1p", "log2", "lrint", "nearbyint", "pow", "remainder",
    "rint", "round", "signbit", "sin", "sinh", "sqrt", "tan", "tanh", "tgamma", "trunc",
)  # fmt: skip
_WITHOUT_F = ("abs", "isfinite", "isinf", "isnan", "signbit")
_TYPES = [n for n, line in _OF_C.items() if line.startswith("typedef") and n.endswith("_t")]
_OF_STD = (
    {n: f"namespace std {{ using ::{n}; }}" for n in [*_MATHS, "size_t", "ptrdiff_t"]}
    | {n: f"namespace std {{ {_OF_C[n]} }}" for n in _TYPES}
    | {
        "min": "namespace std { template <class T> __host__ __device__ constexpr T min(const T& a, const T& b) "
        "{ return b < a ? b : a; } }",
        "max": "namespace std { template <class T> __host__ __device__ constexpr T max(const T& a, const T& b) "
        "{ return a < b ? b : a; } }",
        "is_same": "namespace std { template <class A, class B> struct is_same { static const bool value = false; }; "
        "template <class A> struct is_same<A, A> { static const bool value = true; }; }",
        "is_same_v": "namespace std { template <class A, class B> constexpr bool is_same_v = false; "
        "template <class A> constexpr bool is_same_v<A, A> = true; }",
        "conditional": "namespace std { template <bool X, class A, class B> struct conditional { typedef A type; }; "
        "template <class A, class B> struct conditional<false, A, B> { typedef B type; }; }",
        "enable_if": "namespace std { template <bool X, class A = void> struct enable_if {}; "
        "template <class A> struct enable_if<true, A> { typedef A type; }; }",
    }
)
"""Members of `std` that device code may name."""
_VECTORS = (
    "char",
    "uchar",
    "short",
    "ushort",
    "int",
    "uint",
    "long",
    "ulong",
    "longlong",
    "ulonglong",
    "float",
    "double",
)
OVERLOADED = frozenset(
    {"min", "max", *_MATHS, *(f"{x}f" for x in _MATHS if x not in _WITHOUT_F)}
    | {f"make_{t}{n}" for t in _VECTORS for n in (1, 2, 3, 4)}
    | {f"atomic{x}" for x in ("Add", "Sub", "Exch", "Min", "Max", "Inc", "Dec", "CAS", "And", "Or", "Xor")}
)
"""Functions of the language to which sources add forms of their own: these must not hide the others."""
_WORD = re.compile(r"[A-Za-z_]\w*")
_OWN = re.compile(
    r"#[ \t]*define[ \t]+([A-Za-z_]\w*)|\b(?:using|struct|class|enum|union)\s+([A-Za-z_]\w*)|\b([A-Za-z_]\w*)\s*=(?!=)"
)
_LAST = re.compile(r"([A-Za-z_]\w*)\s*\Z")
_STD = re.compile(r"\bstd\s*::\s*([A-Za-z_]\w*)")


def implied(lines: Iterable[str]) -> list[str]:
    """Lines that stand in front of a source: names of the headers above that it mentions and does not declare."""
    text = "\n".join(lines)
    words = set(_WORD.findall(text))
    members = {n for n in _STD.findall(text) if n in _OF_STD}
    wanted = (words & set(_OF_C)) - _declared(text)
    waiting = list(wanted)
    while waiting:  # a constant may be made of others
        more = {n for n in _WORD.findall(_OF_C[waiting.pop()]) if n in _OF_C} - wanted
        wanted |= more
        waiting += more
    found = [line for name, line in _OF_C.items() if name in wanted]
    if not members or _opens_std(text):  # of what a source puts into std itself, nothing is said
        return found
    # the role's std is not the compiler's, which has a few members of its own
    return [*found, "namespace std { using namespace ::std; }", *(x for n, x in _OF_STD.items() if n in members)]


def _opens_std(text: str) -> bool:
    return re.search(r"\bnamespace\s+std\s*\{", text) is not None


def _declared(text: str) -> set[str]:
    """Names that a text declares itself."""
    found = {next(filter(None, m.groups())) for m in _OWN.finditer(text)}
    for statement in text.split(";"):
        if "typedef" in statement and (last := _LAST.search(statement[-200:])):
            found.add(last[1])
    return found
