"""What kernels a source declares, and what its conditions leave."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.generate.cuda.foreign.sources import KERNEL, manifest

from weft.generate.cuda.foreign.condition import Conditions
from weft.generate.cuda.foreign.cut import alone, cut
from weft.generate.cuda.foreign.declared import DeclaredParameter, kernels
from weft.generate.cuda.foreign.unit import Unit, unit
from weft.ir.declined import Declined

SOURCE = """#define DEVICE __device__
struct Node { int a; };
DEVICE float helper(float x) { return x; }
extern "C" __global__ void __launch_bounds__(64) first(const float* __restrict__ x, struct Node *nodes, unsigned n);
__global__ void first(const float* __restrict__ x, struct Node* nodes, unsigned short int n) { }
#if 0
__global__ void dead() { }
#endif
template <int N> static __global__ void second(float x[], float** y, const Node by_value) { }
int main() { }
"""


def text(folder: Path, source: str) -> Unit:
    found = unit(manifest(folder, source))
    assert isinstance(found, Unit)
    return found


def test_kernels_with_their_parameters(tmp_path: Path) -> None:
    first, second = kernels(text(tmp_path, SOURCE))
    assert (first.name, first.line, first.template) == ("first", 5, False)
    assert first.parameters == (
        DeclaredParameter("x", "float", 1), DeclaredParameter("nodes", "Node", 1),
        DeclaredParameter("n", "unsigned short", 0),
    )  # fmt: skip
    assert (second.name, second.line, second.template) == ("second", 9, True)
    assert first.arguments == () and second.arguments == (("int", "N"),)
    assert [(p.name, p.type, p.pointers) for p in second.parameters] == [
        ("x", "float", 1), ("y", "float", 2), ("by_value", "Node", 0),
    ]  # fmt: skip


def test_what_a_template_is_to_be_given(tmp_path: Path) -> None:
    source = "template <typename T, class U, unsigned int N = 3, bool>\n__global__ void k(T x, U y) { }\n"
    (found,) = kernels(text(tmp_path, source))
    assert found.arguments[:3] == (("typename", "T"), ("class", "U"), ("unsigned int", "N"))
    (plain,) = kernels(text(tmp_path, "template <>\n__global__ void k<int>(int x) { }\n"))
    assert plain.template and plain.arguments == ()


def test_kernels_in_namespaces(tmp_path: Path) -> None:
    source = "namespace a { int x; namespace b {\n__global__ void k(int* x) { }\n} }\n" + KERNEL % "x[0] = 1;"
    whole = text(tmp_path, source)
    inner, outer = kernels(whole)
    assert (inner.name, inner.line) == ("a::b::k", 2) and inner.parameters == (DeclaredParameter("x", "int", 1),)
    assert outer.name == "k"
    plain = alone(whole, "a::b::k")
    assert isinstance(plain, str) and "namespace b" in plain and "x[0] = 1" not in plain
    refused = cut(whole, "a::b::k")
    assert isinstance(refused, Declined) and refused.reason.startswith("k.cu:1: a::b::k stands in a namespace")


@pytest.mark.parametrize(
    ("condition", "kept"),
    [
        ("#if 0", "b"), ("#if 1", "a"), ("#ifdef NONE", "b"), ("#ifndef NONE", "a"), ("#ifdef ONE", "a"),
        ("#if defined(ONE) && !defined(NONE)", "a"), ("#if ONE > 1 || TWO == 2", "a"), ("#if NONE", "b"),
        ("#if (TWO - 2) * 5", "b"), ("#if TEXT", "ab"), ("#ifdef __CUDA_ARCH__", "ab"),
        ("#if __CUDA_ARCH__ >= 800", "ab"), ("#if ONE +", "ab"),
    ],
)  # fmt: skip
def test_branches_that_are_dead_in_any_case(condition: str, kept: str, tmp_path: Path) -> None:
    head = '#define ONE 1\n#define TWO 0x2\n#define TEXT "x"\n'
    body = f"{condition}\nint a;\n#else\nint b;\n#endif\n" + KERNEL % "x[0] = 1;"
    lines = text(tmp_path, head + body).text.split("\n")
    assert "".join(x for x in "ab" if f"int {x};" in lines) == kept
    assert ("#else" in lines) == (kept == "ab")
    assert len(lines) - 1 == len((head + body).split("\n"))


def test_a_branch_behind_one_that_is_dead(tmp_path: Path) -> None:
    source = "#if 0\nint a;\n#elif __CUDA_ARCH__ >= 900\nint b;\n#else\nint c;\n#endif\n" + KERNEL % "x[0] = 1;"
    lines = text(tmp_path, source).text.split("\n")
    assert lines[:7] == ["", "", "#if  __CUDA_ARCH__ >= 900", "int b;", "#else", "int c;", "#endif"]


def test_a_macro_under_a_condition_that_is_not_known() -> None:
    conditions = Conditions()
    assert conditions.directive("ifdef", " __CUDA_ARCH__") is None
    conditions.define("A", "1")
    assert conditions.directive("endif", "") is None
    assert conditions.directive("ifdef", " A") is None, "it may be defined or not"
    assert conditions.directive("endif", "") is None
    conditions.define("A", "0")
    assert conditions.directive("if", " A") == "" and conditions.dead
    assert conditions.directive("else", "") == "" and not conditions.dead
