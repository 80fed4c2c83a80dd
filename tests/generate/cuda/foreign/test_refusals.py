"""Sources that are refused, by what and where; and those that look like it and are taken."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from tests.generate.cuda.foreign.sources import HEAD, IN_OUT, KERNEL, manifest
from tests.slow import few

import weft.generate.cuda
from weft.device.cuda.confined import ConfinedJob, ConfinedResult, compile_confined
from weft.generate.cuda.foreign import unit as unit_file
from weft.generate.cuda.foreign.read import ForeignRole, read
from weft.generate.cuda.foreign.unit import OWN_MACROS
from weft.ir.declined import Declined

K = KERNEL
SCALAR = '[[parameters]]\nname = "x"\ntype = "P"\nkind = "scalar"\nas = "int"\nvalue = 1\n'
OBJECT = "typedef unsigned long long cudaTextureObject_t;\n"
REFUSED: dict[str, tuple[str, str]] = {
    # found in the tree
    "setmaxnreg": (K % 'asm volatile("setmaxnreg.inc.sync.aligned.u32 64;");', r"k\.cu:2: inline PTX: setmaxnreg"),
    "a barrier by number": (K % 'asm volatile("bar.sync 3, 64;");', r"k\.cu:2: inline PTX: bar\.sync"),
    "exit": (K % 'asm("exit;");', r"k\.cu:2: inline PTX: exit"),
    "trap": (K % 'asm("trap;");', r"k\.cu:2: inline PTX: trap"),
    "tid": (K % 'int t; asm("mov.u32 %0, %%tid.x;" : "=r"(t)); x[t] = 1;', r"k\.cu:2: inline PTX: %%tid: the place"),
    "printf": (K % 'printf("%f", x[0]);', r"k\.cu:2: printf"),
    "printf in a macro": (
        '#define LOG(a) printf("%f", a)\n' + K % "LOG(x[0]);",
        r"k\.cu:3: printf \(through the macro LOG\)",
    ),
    "assert": ("#include <assert.h>\n" + K % "assert(x[0] > 0);", r"k\.cu:3: assert"),
    "malloc": (K % "float* p = (float*)malloc(4); x[0] = *p;", r"k\.cu:2: malloc"),
    "__trap": (K % "if (x[0] > 0) __trap();", r"k\.cu:2: __trap"),
    "__nanosleep": (K % "__nanosleep(100);", r"k\.cu:2: __nanosleep"),
    "a texture": ("texture<float, 1> t;\n" + K % "x[0] = tex1Dfetch(t, 1);", r"k\.cu:1: texture: a texture"),
    "a texture object": (
        OBJECT + K % "x[0] = tex1D<float>((cudaTextureObject_t)1, 1.0f);",
        r"k\.cu:3: tex1D: a texture",
    ),
    "a surface": ("surface<void, 2> s;\n" + K % "surf2Dwrite(1.0f, s, 0, 0);", r"k\.cu:1: surface"),
    "grid groups": (
        "#include <cooperative_groups.h>\n" + K % "cooperative_groups::this_grid().sync();",
        r"k\.cu:3: cooperative_groups: blocks of a role start in any order",
    ),
    "a cluster": (
        'extern "C" __global__ void __cluster_dims__(2, 1, 1) k(float* x) { x[0] = 1; }',
        r"k\.cu:1: __cluster_dims__",
    ),
    "dynamic parallelism": ("__global__ void c() {}\n" + K % "c<<<1, 1>>>();", r"k\.cu:3: dynamic parallelism"),
    "a lock that spins": (K % "while (atomicCAS((int*)x, 0, 1) != 0);", r"k\.cu:2: a loop that waits"),
    "a clock that spins": (
        K % "long long t = clock64(); while (clock64() - t < 1000); x[0] = 1;",
        r"k\.cu:2: a loop that waits",
    ),
    "an endless loop": (K % "for (;;) { x[0] += 1; }", r"k\.cu:2: a loop that never ends"),
    "another endless loop": (K % "while (1) x[0] += 1;", r"k\.cu:2: a loop that never ends"),
    "a counter": (
        "__device__ int counter;\n" + K % "atomicAdd(&counter, 1);",
        r'k\.cu:1: counter: .*state = \["counter"\]',
    ),
    "managed memory": ("__managed__ int m;\n" + K % "x[0] = m;", r"k\.cu:1: __managed__"),
    "a path": ('#include "/etc/passwd"\n' + K % "x[0] = 1;", r'k\.cu:1: #include "/etc/passwd" leaves the folder'),
    "a path upwards": ('#include "../../../../etc/passwd"\n' + K % "x[0] = 1;", r"k\.cu:1: .* leaves the folder"),
    "a path in two lines": ('#inc\\\nlude "/etc/passwd"\n' + K % "x[0] = 1;", r"k\.cu:1: .* leaves the folder"),
    "a path behind a comment": (
        '/* a\n */ #include "/etc/passwd"\n' + K % "x[0] = 1;",
        r"k\.cu:2: .* leaves the folder",
    ),
    "a path in a macro": (
        '#define F "/etc/passwd"\n#include F\n' + K % "x[0] = 1;",
        r"k\.cu:2: an #include without a plain",
    ),
    "a digraph": ('%:include "/etc/passwd"\n' + K % "x[0] = 1;", r"k\.cu:1: a directive in other characters"),
    "a trigraph": ('??=include "/etc/passwd"\n' + K % "x[0] = 1;", r"k\.cu:1: a trigraph"),
    "a raw string": ('const char* s = R"(\n#include "/etc/passwd"\n)";\n' + K % "x[0] = 1;", r"k\.cu:1: a raw string"),
    "a question": ("#if __has_include(NAME)\n#endif\n" + K % "x[0] = 1;", r"k\.cu:1: __has_include is not taken"),
    "a question in a macro": (
        "#define ASK __has_include(</etc/passwd>)\n" + K % "x[0] = 1;",
        r"k\.cu:1: __has_include is not taken",
    ),
    "a macro of the compiler": (
        "#define __CUDA_ARCH__ 100\n" + K % "x[0] = 1;",
        r"k\.cu:1: __CUDA_ARCH__ is a name of the language",
    ),
    "a pragma": ("#pragma nv_abi preserve_n_data(4)\n" + K % "x[0] = 1;", r"k\.cu:1: #pragma nv_abi"),
    "a pragma in a macro": ('_Pragma("once")\n' + K % "x[0] = 1;", r"k\.cu:1: _Pragma is not taken"),
    "a directive": ("#import <a>\n" + K % "x[0] = 1;", r"k\.cu:1: #import is not taken"),
    "a built-in name": (
        "#define threadIdx blockIdx\n" + K % "x[threadIdx.x] = 1;",
        r"k\.cu:1: threadIdx is a name of the language",
    ),
    "our name as a macro": (
        "#define w_role 0\n" + K % "x[0] = 1;",
        r"k\.cu:1: w_role is a name of the language or of Weft",
    ),
    "our name": (
        "__device__ float w_shared(float a) { return a; }\n" + K % "x[0] = w_shared(1.0f);",
        r"k\.cu:1: w_shared is a name of Weft",
    ),
    "a namespace": ("namespace q {\n" + K % "x[0] = 1;" + "}\n", r"k\.cu:1: k stands in a namespace"),
    "no kernel": ("__device__ void k(float*) {}\n__global__ void other() {}\n", r"k\.cu:1: k is no kernel"),
    "another kernel": ("__global__ void other() {}\n", r"k\.cu: no kernel k; its kernels are other"),
    "a method": (
        "struct S { __device__ int t() { return threadIdx.x; } };\n" + K % "S s; x[0] = s.t();",
        r"k\.cu:1: a type whose methods",
    ),
    "text that is no C++": (K % "x[0] = (1 + ;", r"k\.cu:2: not understood"),
    # found by the compiler
    "a barrier in a macro": (
        '#define B(n) asm volatile("bar.sync " #n ", 64;")\n' + K % "B(3);",
        r"k\.cu:3: in the PTX of the kernel: bar\.sync",
    ),
    "exit in a macro": ('#define E asm volatile("exit;")\n' + K % "E;", r"k\.cu:3: exit \(through the macro E\)"),
    "a function that is nowhere": (
        'extern "C" __device__ int vprintf(const char*, void*);\n' + K % 'vprintf("", 0);',
        r"in the PTX of the kernel: .*vprintf",
    ),
    "new": (K % "float* p = new float[4]; x[0] = *p;", r"in the PTX of the kernel: malloc"),
    "shared memory in a macro": (
        "#define S(n) __shared__ float n[4]\n" + K % "S(s); s[threadIdx.x] = 1; __syncthreads(); x[0] = s[1];",
        r"k\.cu",
    ),
    "large shared memory": (
        K % "__shared__ float s[80000]; s[threadIdx.x] = 1; __syncthreads(); x[0] = s[1];",
        r"k\.cu: 320000 bytes of shared memory",
    ),
    "huge shared memory": (
        K % "__shared__ float s[1ull << 40]; s[threadIdx.x] = 1; __syncthreads(); x[0] = s[1];",
        r"k\.cu: 214748364[78] bytes",
    ),
    "another type": (
        "__global__ void k(int* x) { x[0] = 1; }\n",
        r'the compiler refuses it .* "float \*" is incompatible',
    ),
    "another parameter": (
        "__global__ void k(float* x, int n) { x[0] = n; }\n",
        r"the compiler refuses it .* too few arguments",
    ),
    "a structure of another size": (
        "struct P { int a, b; };\n__global__ void k(P x) { }\n",
        r"k\.cu: .*the type of x in kernel\.toml",
    ),
    "text that is no C++ beside a macro": (
        "#define ONE 1\n" + K % "x[0] = (ONE + ;",
        r"k\.cu:3: the compiler refuses it .* expected an expression",
    ),
    "a path in a loop of a macro": (
        "#define FOR(i, n) for (int i = 0; i < n; ++i)\n" + K % 'FOR(i, 3) { asm("exit;"); }',
        r"k\.cu:3: inline PTX: exit",
    ),
    "a barrier in a loop of macros": (
        '#define FOR(i) for (int i = 0; i < 3; ++i)\n#define B asm volatile("bar.sync 3, 64;");\n' + K % "FOR(i) { B }",
        r"k\.cu:4: in the PTX of the kernel: bar\.sync",
    ),
    "shared memory of two instances": (
        "template <int N> __device__ float f(float v) {\n  __shared__ float s[N];\n  s[threadIdx.x] = v;\n"
        "  __syncthreads();\n  return s[N - 1 - threadIdx.x];\n}\n" + K % "x[0] = f<64>(x[1]) + f<65>(x[2]);",
        r"k\.cu:2: shared memory of a function template with 2 instances",
    ),
    "an unknown name": (K % "\n  x[0] = nothing;", r'k\.cu:3: the compiler refuses it .* "nothing" is undefined'),
    "a template without end": (
        "template <int N> struct F { static const int v = F<N - 1>::v + F<N + 1>::v; };\n" + K % "x[0] = F<5>::v;",
        r"the compiler refuses it .* recursion",
    ),
    "a loop at compile time": (
        "constexpr int f() { int s = 0; for (long long i = 0; i < (1ll << 60); ++i) s += i; return s; }\n"
        + K % "constexpr int q = f(); x[0] = q;",
        r"k\.cu:3: the compiler refuses it .* constant",
    ),
}
TAKEN: dict[str, tuple[str, str, int]] = {
    "refused words elsewhere": (
        '#include <stdio.h>\n__global__ void other(float* x) { printf("%f", x[0]); }\n'
        + K % "x[0] = 1;"
        + 'void host() { printf("x"); malloc(3); k<<<1, 1>>>(0); while (true) {} }\n',
        "",
        0,
    ),
    "a loop that ends": (K % "while (true) { if (x[0] > 3) break; x[0] += 1; }", "", 0),
    "a loop of atomics": (
        K % "int* p = (int*)x; int old = *p, seen; do { seen = old; old = atomicCAS(p, seen, seen + 1); }"
        " while (seen != old);",
        "",
        0,
    ),
    "inline PTX": (K % 'int t; asm("mov.u32 %0, %%laneid;" : "=r"(t)); x[t] = 1;', "", 0),
    "a barrier in divergent code": (K % "if (threadIdx.x < 16) __syncthreads(); x[0] = 1;", "", 1),
    "a barrier behind a return": (K % "if (threadIdx.x > 16) return; __syncthreads(); x[0] = 1;", "", 1),
    "a condition of the block": (
        K % "for (int i = 0; i < gridDim.x; ++i) { if (i > 2) break; __syncthreads(); } x[0] = 1;",
        "",
        0,
    ),
    "an array's size that is handed over": (
        "#define N 8\n__device__ int last(const int* a, int n, int i) { return a[(n + i) % n]; }\n"
        + K % "__shared__ int s[N]; s[0] = 1; x[0] = last(s, N, threadIdx.x); if (N > 4) __syncthreads();",
        "",
        0,
    ),
    "an array that is handed over": (
        "#define N 8\n__device__ void put(int* a, int n, int i) { a[n % 2] = i; }\n"
        + K % "int s[N]; s[0] = 1; put(s, N, threadIdx.x); if (s[0] > 4) __syncthreads(); x[0] = s[0];",
        "",
        1,
    ),
    "an array of pointers in an array of a size": (
        "#define N 8\n__device__ void put(int** a, int i) { *a[0] = i; }\n"
        + K % "int n = 0; int* s[N] = {&n}; put(s, threadIdx.x); if (*s[0] > N) __syncthreads(); x[0] = n;",
        "",
        1,
    ),
    "a guard like a name of the compiler": (
        "#ifndef __CUDA_HELPERS__\n#define __CUDA_HELPERS__\n#define __FILEH__\n#endif\n" + K % "x[0] = 1;",
        "",
        0,
    ),
    "a question that is answered": (
        "#if defined(__has_include) && __has_include(</etc/passwd>)\n#error it is there\n#endif\n"
        '#if !__has_include("/etc/passwd") && !defined __has_include\nstruct A { float a; };\n#endif\n'
        + K
        % "A a = {1}; x[0] = a.a;",
        "",
        0,
    ),
    "a loop of a macro": (
        "#define FOR(i, n) for (int i = threadIdx.x; i < n; i += 64)\n"
        + K % "__shared__ int s; FOR(i, 100) { if (i == 3) s = 1; __syncthreads(); } x[0] = s;",
        "",
        1,
    ),
    "statements of a macro in a method": (
        "#define STEP(a, b) a += b; b ^= a;\nstruct S { int a, b; __device__ void go() { STEP(a, b) STEP(b, a) } };\n"
        + K % "S s{1, 2}; s.go(); x[0] = s.a;",
        "",
        0,
    ),
    "forms of functions of the language": (
        "inline __device__ float2 fminf(float2 a, float2 b) { return make_float2(fminf(a.x, b.x), fminf(a.y, b.y)); }\n"
        "inline __device__ float2 make_float2(float a) { return make_float2(a, a); }\n"
        + K
        % "x[0] = fminf(make_float2(x[1]), make_float2(2.0f, x[3])).x;",
        "",
        0,
    ),
    "a declared counter": ("__device__ int counter;\n" + K % "atomicAdd(&counter, 1);", 'state = ["counter"]\n', 0),
    "a texture under a condition": (
        '#ifdef USE_TEXTURE\ntexture<float, 1> t;\n#include "/etc/passwd"\n#endif\n' + K % "x[0] = 1;",
        "",
        0,
    ),
    "a comment": ('// #include "/etc/passwd"\n/* asm("exit;"); */\n' + K % "x[0] = 1; // printf(1)", "", 0),
    "a member of a refused name": (
        "struct S { float texture, free; };\n" + K % "S s; s.free = 1; s.texture = 2; x[0] = s.free + s.texture;",
        "",
        0,
    ),
}


@pytest.mark.parametrize("name", few(REFUSED, 20))
def test_refused_by_name_and_line(name: str, tmp_path: Path) -> None:
    source, reason = REFUSED[name]
    rest = SCALAR if "struct P " in source else IN_OUT
    found = read(manifest(tmp_path, source, rest=rest))
    assert isinstance(found, Declined)
    assert re.search(reason, found.reason), found.reason
    assert str(tmp_path) not in found.reason


@pytest.mark.parametrize("name", few(TAKEN, 5))
def test_what_looks_like_it_is_taken(name: str, tmp_path: Path) -> None:
    source, more, form = TAKEN[name]
    found = read(manifest(tmp_path, source, HEAD + more))
    assert isinstance(found, ForeignRole), found.reason
    assert found.form == form
    assert "passwd" not in found.role.globals and "printf" not in found.role.globals


def test_blocks_over_512_threads_are_no_roles(tmp_path: Path) -> None:
    found = read(manifest(tmp_path, K % "x[0] = 1;", block=[513]))
    assert isinstance(found, Declined) and "513 threads; a role has up to 512" in found.reason


def test_a_variable_of_the_manifest_must_be_there(tmp_path: Path) -> None:
    found = read(manifest(tmp_path, K % "x[0] = 1;", HEAD + 'state = ["other"]\n'))
    assert isinstance(found, Declined) and "kernel.toml: other is no __constant__ or __device__" in found.reason


def test_files_that_are_too_large_or_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    big = manifest(tmp_path, K % "x[0] = 1;")
    with (tmp_path / "k.cu").open("ab") as file:
        file.truncate(100 << 20)  # a sparse file
    began = time.monotonic()
    found = read(big)
    assert isinstance(found, Declined) and "k.cu: over 4194304 bytes" in found.reason
    assert time.monotonic() - began < 30, "and is not read whole"
    (tmp_path / "k.cu").write_bytes(b"a\0b")
    found = read(big)
    assert isinstance(found, Declined) and "zero bytes" in found.reason
    monkeypatch.setattr(unit_file, "MOST_DEPTH", 8)
    (tmp_path / "k.cu").write_text('#include "k.cu"\n' + K % "x[0] = 1;")
    found = read(big)
    assert isinstance(found, Declined) and "include each other" in found.reason


def test_an_include_through_a_link_stays_in_the_folder(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (tmp_path / "secret.h").write_text("#define SECRET 1\n")
    (home / "link.h").symlink_to(tmp_path / "secret.h")
    (home / "good.h").write_text("#pragma once\n#define GOOD 2\n")
    found = read(manifest(home, '#include "link.h"\n' + K % "x[0] = SECRET;"))
    assert isinstance(found, Declined) and 'k.cu:1: #include "link.h" leaves the folder' in found.reason
    taken = read(manifest(home, '#include "good.h"\n#include "good.h"\n' + K % "x[0] = GOOD;"))
    assert isinstance(taken, ForeignRole) and taken.role.globals.count("#define GOOD 2") == 2


@pytest.mark.slow
def test_a_compiler_that_runs_out_of_time_or_memory_is_ended() -> None:
    doubled = "".join(f"#define A{i} A{i - 1} A{i - 1}\n" for i in range(1, 40))
    bomb = f"#define A0 x[0] += 1;\n{doubled}__global__ void k(float* x) {{ A39 }}\n"
    good = "__global__ void k(float* x) { x[0] = 1; }\n"
    began = time.monotonic()
    first, second = compile_confined(
        [ConfinedJob(good, "compute_80"), ConfinedJob(bomb, "compute_80")], memory_bytes=2 << 30, timeout_s=20
    )
    assert isinstance(first, ConfinedResult) and b".entry" in first.code
    assert isinstance(second, Declined)
    assert "was ended" in second.reason or "out of memory" in second.reason
    assert time.monotonic() - began < 60


def test_the_compiler_says_names_and_resources() -> None:
    text = "namespace n { __constant__ float t[4]; template <int I> __global__ void k(float* x) { x[I] = t[I]; } }\n"
    (found,) = compile_confined([ConfinedJob(text, "sm_90a", names=("&n::t", "n::k<2>"))])
    assert isinstance(found, ConfinedResult)
    assert found.names[0] == "_ZN1n1tE" and found.names[1].startswith("_ZN1n1kILi2E")
    assert [name for name, r in found.resources if r.registers] == [found.names[1]]
    (refused,) = compile_confined([ConfinedJob("#error no", "sm_90a")])
    assert isinstance(refused, Declined) and "no" in refused.reason


def test_every_macro_of_our_headers_is_reserved() -> None:
    home = Path(weft.generate.cuda.__file__).parent
    texts = [p.read_text(encoding="utf-8") for p in home.rglob("*.h")]
    names = {n for t in texts for n in re.findall(r"^\s*#\s*define\s+(\w+)", t, re.MULTILINE)}
    assert len(names) > 10
    assert sorted(n for n in names if OWN_MACROS.fullmatch(n) is None) == []


def test_sources_leave_no_macro_behind(tmp_path: Path) -> None:
    found = read(manifest(tmp_path, "#define role 3\n#define sm 4\n" + K % "x[role] = sm;"))
    assert isinstance(found, ForeignRole)
    tail = found.role.globals.rsplit("};", 1)[1]
    assert "#define" not in tail
    for name in ("role", "sm"):
        assert found.role.globals.count(f"#undef {name}\n") == 2


def test_the_manifest_is_part_of_what_is_compiled(tmp_path: Path) -> None:
    found = read(manifest(tmp_path, K % "x[0] = TILE;", HEAD + 'define = { TILE = "16" }\n', IN_OUT))
    assert isinstance(found, ForeignRole) and "#define TILE 16" in found.role.globals
