"""What a source may name of headers that are not there."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.generate.cuda.foreign.sources import KERNEL, manifest

from weft.device.cuda.confined import ConfinedJob, ConfinedResult, compile_confined
from weft.generate.cuda.foreign.implied import OVERLOADED, SYSTEM, implied
from weft.generate.cuda.foreign.read import ForeignRole, read
from weft.generate.cuda.foreign.unit import Unit, unit


@pytest.mark.parametrize(
    ("body", "front"),
    [
        ("x[0] = INT_MIN;", ["#define INT_MAX 2147483647", "#define INT_MIN (-INT_MAX - 1)"]),
        ("uint32_t i = 3; x[i] = 1;", ["typedef unsigned int uint32_t;"]),
        ("x[0] = i;", []),
        ("x[0] = s.M_PI_;", []),
        (
            "x[0] = std::sqrt(x[1]);",
            ["namespace std { using namespace ::std; }", "namespace std { using ::sqrt; }"],
        ),
        ("x[0] = sqrt(x[1]); std::sort(x);", []),
    ],
)
def test_only_what_is_mentioned_stands_in_front(body: str, front: list[str]) -> None:
    assert implied((KERNEL % body).split("\n")) == front


@pytest.mark.parametrize(
    "own",
    ["#define M_PI 3", "const float M_PI = 3;", "typedef float M_PI;", "using M_PI = float;", "struct M_PI {};"],
)
def test_what_a_source_declares_itself_is_its_own(own: str) -> None:
    assert implied([own, "float x = M_PI + M_E;"]) == ["#define M_E 2.7182818284590452354"]
    assert implied(["#define M_PIX 3", "float x = M_PI == 3;"]) == ["#define M_PI 3.14159265358979323846"]


def test_lines_stay_where_they_were(tmp_path: Path) -> None:
    found = unit(manifest(tmp_path, "\n" + KERNEL % "x[0] = UINT_MAX;"))
    assert isinstance(found, Unit)
    lines = found.text.split("\n")
    assert lines[0] == "#define UINT_MAX 4294967295U" and found.where(1) == "<headers>:1"
    assert found.where(lines.index("  x[0] = UINT_MAX;") + 1) == "k.cu:3" and found.source == "k.cu"


EVERY = """
#include <cmath>
enum Kind { A, B };
template <class T> __device__ typename std::enable_if<std::is_same<T, float>::value, T>::type one(T x) { return x; }
__global__ void k(float* x) {
  std::uint64_t n = UINT64_MAX; intptr_t p = (intptr_t)x; uint q = CHAR_BIT; ulong u = ULONG_MAX; std::size_t z = 3;
  typename std::conditional<std::is_same_v<int, int>, float, int>::type y = (float)M_PI * FLT_MAX + INFINITY;
  x[0] = one(std::min(x[1], x[2])) + std::max(3, 4) + std::fabs(x[3]) + std::min<float>(n, p) + q + u + z + y;
  float&& moved = std::move(x[5]);
  x[1] = std::pow(x[4], 2.0f) + LLONG_MIN + NAN + (std::isnan(x[3]) ? moved : HUGE_VAL) + CUDART_VERSION;
}
"""


def test_the_compiler_takes_them_all(tmp_path: Path) -> None:
    role = read(manifest(tmp_path, EVERY))
    assert isinstance(role, ForeignRole), role.reason
    text = "".join(SYSTEM.values()) + "".join(f"namespace n {{ using ::{x}; }}\n" for x in sorted(OVERLOADED))
    (found,) = compile_confined([ConfinedJob(text, "compute_80")])
    assert isinstance(found, ConfinedResult), found.reason


def test_versions_are_known_in_conditions(tmp_path: Path) -> None:
    found = unit(manifest(tmp_path, "#if CUDART_VERSION < 9000\n#error old\n#endif\n" + KERNEL % "x[0] = 1;"))
    assert isinstance(found, Unit) and "#error" not in found.text
