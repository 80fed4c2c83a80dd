"""A kernel in the form of a role gives the original's result bit by bit, and compiles for both architectures."""

from __future__ import annotations

from pathlib import Path

import benchmarks.best_effort
import numpy as np
import pytest
from tests.generate.cuda.foreign import on_host
from tests.generate.cuda.foreign.sources import HEAD, IN_OUT, KERNEL, manifest
from tests.slow import few

from weft.device.cuda.nvrtc import find_nvrtc
from weft.generate.cuda.foreign.manifest import Manifest, read
from weft.generate.cuda.foreign.read import ForeignRole
from weft.generate.cuda.foreign.read import read as read_role
from weft.generate.cuda.role.assemble import solo
from weft.ir.declined import Declined

OURS = Path(benchmarks.best_effort.__path__[0])
MORE = """[[parameters]]
name = "y"
type = "float"
kind = "output"
shape = [4096]
[[parameters]]
name = "n"
type = "int"
kind = "scalar"
value = 201
"""
LEAVES = """
#define SIZE 64
__device__ float above(const float* tile, int t) { return t > 0 ? tile[t - 1] : 0.5f; }
__device__ int place();
__device__ int place() { return blockIdx.x * blockDim.x + threadIdx.x; }
extern "C" __global__ void __launch_bounds__(SIZE, 2) k(float* x, float* __restrict__ y, const int n) {
  __shared__ float tile[SIZE], total;
  const int i = place(), t = threadIdx.x;
  if (t % 7 == 6 || i >= n) return;
  tile[t] = x[i];
  if (t == 0) total = 0.0f;
  __syncthreads();
  float v = tile[t] + (t % 7 ? above(tile, t) : 1.0f);
  if (t % 3 == 1) { y[i] = v; return; }
  __syncthreads();
  if (t == 0) total = tile[1] + tile[2];
  __syncthreads();
  y[i] = v + total;
}
"""
COUNTS = """
__global__ void k(float* x, float* y, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (threadIdx.x >= 50) return;
  y[i * 4] = __syncthreads_count(x[i] > 50.0f);
  y[i * 4 + 1] = __syncthreads_and(x[i] >= 0.0f && i < n);
  if (threadIdx.x % 2) return;
  y[i * 4 + 2] = __syncthreads_or(x[i] > 98.0f);
  y[i * 4 + 3] = __syncthreads_and(x[i] >= 0.0f);
}
"""
PREDICATES = """
__global__ void k(float* x, float* y, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  y[i * 4] = __syncthreads_count(x[i] > 50.0f);
  y[i * 4 + 1] = __syncthreads_and(x[i] >= 0.0f);
  y[i * 4 + 2] = __syncthreads_or(x[i] > 98.0f);
  y[i * 4 + 3] = n;
}
"""
DIVERGES = """
__device__ void reduce(float* s, int t) {
  for (int step = 32; step > 0; step /= 2) {
    if (t < step) s[t] += s[t + step];
    __syncthreads();
  }
}
__global__ void k(float* x, float* y, int n) {
  extern __shared__ float s[];
  const int t = threadIdx.x;
  s[t] = x[blockIdx.x * 64 + t];
  for (int j = t; j < 64; j += 64) __syncthreads();
  reduce(s, t);
  if (t == 0) y[blockIdx.x] = s[0] + n;
}
"""
DIMENSIONS = """
#define W 5
struct Cell { float a, b; };
typedef struct { int x, y; } Place;
enum Kind { EVEN, ODD = 3 };
namespace { const int shift = 2; }
__constant__ float weights[8];
__device__ __host__ inline float2 operator+(float2 a, float2 b) { return make_float2(a.x + b.x, a.y + b.y); }
template <int N, class T> __device__ T scaled(T x) { return x * N; }
void host(float* p) { p[0] = 1; }
template <int N, typename T>
__global__ void k(T* x, T* y, int n) {
  __shared__ Cell cells[3][W][4];
  __shared__ __align__(128) T other[N];
  Place p = {(int)(blockIdx.x + gridDim.x * blockIdx.z), (int)(blockIdx.y + gridDim.y * gridDim.z)};
  const int t = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  const int i = ((blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x) * 60 + t;
  Cell& c = cells[threadIdx.z][threadIdx.x][threadIdx.y];
  c.a = x[t];
  c.b = (float)p.x;
  if (t < N) other[t] = scaled<3>(x[t + shift]);
  __syncthreads();
  const Cell& d = cells[2 - threadIdx.z][4 - threadIdx.x][3 - threadIdx.y];
  float2 sum = make_float2(d.a, d.b) + make_float2(weights[t % 8], other[t % N]);
  y[i] = sum.x * 2.0f + sum.y + p.y + (t % 2 ? ODD : EVEN) + n;
}
int main() { return 0; }
"""
FILE_SHARED = """
extern __shared__ float dynamic[];
__shared__ int one;
static __device__ __forceinline__ void set(int t) { if (t == 5) one = (int)dynamic[t] + t; }
__global__ void k(float* x, float* y, int n) {
  int t = threadIdx.x;
  dynamic[t] = x[t] + blockIdx.x;
  set(t);
  __syncthreads();
  y[blockIdx.x * 64 + t] = dynamic[63 - t] + one + n;
}
"""
MACROS = """
#define TID (threadIdx.x)
#define BLOCK(i) (blockIdx.i * blockDim.i)
#define BAR __syncthreads()
#define STEP(a) do { if (TID < 32) a; BAR; } while (0)
#if SCALE > 1
#define FACTOR SCALE
#else
#error wrong
#endif
__global__ void k(float* x, float* y, int n) {
  __shared__ float s[64];
  s[TID] = x[BLOCK(x) + TID] * FACTOR;
  BAR;
  STEP(s[TID] += s[TID + 32]);
#undef FACTOR
#define FACTOR 5
  y[BLOCK(x) + TID] = s[TID] + FACTOR + n;
}
"""
STRUCTURE = """
enum Sign { PLUS = 1, MINUS = -1 };
struct Range { int first, last, step[2]; float by; Sign sign; };
__global__ void k(float* x, float* y, int n, Range range) {
  const int i = blockIdx.x * 64 + threadIdx.x;
  if (i >= range.first && i < range.last) y[i] = x[i] * range.by * range.sign + range.step[1] + n;
}
"""
WORDS = """
#define FACTOR 3

#define DATA float
#define NUMBER int
template <int N, int M> __global__ void k(DATA* x, DATA* y, NUMBER n) {
  const int i = blockIdx.x * 64 + threadIdx.x;
  y[i] = x[i] * N + M + n;
}
"""
INSTANCE = """
template <int N> __device__ float turned(float v) {
  __shared__ float s[N];
  s[threadIdx.x] = v;
  __syncthreads();
  const float found = s[N - 1 - threadIdx.x];
  __syncthreads();
  return found;
}
__global__ void k(float* x, float* y, int n) {
  const int i = blockIdx.x * 64 + threadIdx.x;
  y[i] = turned<64>(x[i]) + turned<64>(x[0]) + n;
}
"""
RANGE = """[[parameters]]
name = "range"
type = "Range"
kind = "scalar"
as = "int"
per = 6
value = [3, 200, 0, 7, 1077936128, -1]
"""
KERNELS: dict[str, tuple[str, dict[str, object]]] = {
    "a structure by value": (STRUCTURE, {}),
    "shared memory of a template": (INSTANCE, {}),
    "words of macros": (
        WORDS,
        {
            "entry": "k<FACTOR, 2>",
            "parameters.n.type": "NUMBER",
            "parameters.n.as": "int",
            "parameters.x.type": "DATA",
            "parameters.x.as": "float",
        },
    ),
    "leaves": (LEAVES, {}),
    "counts": (COUNTS, {}),
    "predicates": (PREDICATES, {}),
    "diverges": (DIVERGES, {"dynamic_shared_bytes": 256}),
    "a block of 100 threads": (LEAVES, {"block": [50], "define.SIZE_": "1"}),
    "dimensions": (DIMENSIONS, {"grid": [2, 3, 2], "block": [5, 4, 3], "entry": "k<7, float>"}),
    "shared memory of the file": (FILE_SHARED, {"dynamic_shared_bytes": 256}),
    "macros": (MACROS, {"define.SCALE": 4}),
}
FORMS = {"shared memory of a template": 0, "a structure by value": 0, "words of macros": 0,
         "leaves": 1, "counts": 2, "predicates": 0, "diverges": 1, "a block of 100 threads": 1, "dimensions": 1,
         "shared memory of the file": 0, "macros": 0}  # fmt: skip
TABLE = '[[constants]]\nname = "weights"\ntype = "float"\nshape = [8]\ninit = "uniform"\n'


def case(folder: Path, name: str) -> tuple[Manifest, ForeignRole]:
    source, changes = KERNELS[name]
    rest = IN_OUT + MORE + (TABLE if "weights" in source else "") + (RANGE if "Range" in source else "")
    m = manifest(folder, source, HEAD, rest, **changes)
    role = read_role(m)
    assert isinstance(role, ForeignRole), role.reason
    return m, role


@pytest.mark.parametrize("name", few(KERNELS, 2))
def test_the_role_does_what_the_kernel_does(name: str, tmp_path: Path) -> None:
    m, role = case(tmp_path, name)
    assert role.form == FORMS[name]
    before = on_host.original(m, KERNELS[name][0])
    after = on_host.wrapped(role)
    assert not (before[1] == 0x5B).all(), "the kernel writes something"
    for a, b in zip(before, after, strict=True):
        assert np.array_equal(a, b)


def test_a_barrier_that_is_lost_is_seen(tmp_path: Path) -> None:
    """That the comparison can fail: threads that leave and meet nobody, and a barrier that is none."""
    _, role = case(tmp_path, "leaves")
    with pytest.raises(AssertionError, match=r"was not at a barrier|wait in vain"):
        on_host.wrapped(role, change=("\nw_foreign_leave<1>(w_role);", ""))
    m, role = case(tmp_path, "shared memory of the file")
    lost = on_host.wrapped(role, change=("#define __syncthreads() (w_role.sync())", "#define __syncthreads()"))
    assert not np.array_equal(lost[1], on_host.original(m, FILE_SHARED)[1])


@pytest.mark.parametrize("name", few(KERNELS, 2))
def test_it_compiles_for_both_architectures(name: str, tmp_path: Path) -> None:
    nvrtc = find_nvrtc()
    if isinstance(nvrtc, Declined):
        pytest.skip(nvrtc.reason)
    _, role = case(tmp_path, name)
    source = solo(role.source, "entry")
    assert source.launches[0].block == (role.role.threads, 1, 1)
    for arch in ("sm_80", "sm_90a"):
        found = nvrtc.compile(source.text, arch=arch).of("entry")
        assert found.registers > 0
        assert found.spill_stores == 0
        assert found.shared_bytes == 0, "all shared memory lies in the role's part of the dynamic one"


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(OURS.glob("*/*.toml")), ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_kernels_of_best_effort_jobs(path: Path) -> None:
    m = read(path, small=True)
    role = read_role(m)
    assert isinstance(role, ForeignRole), role.reason
    assert role.form == 0, "their threads meet at every barrier"
    before = on_host.original(m, m.source.read_text())
    for a, b in zip(before, on_host.wrapped(role), strict=True):
        assert np.array_equal(a, b)


def test_what_the_role_says_of_itself(tmp_path: Path) -> None:
    _, role = case(tmp_path, "dimensions")
    one = role.role
    assert one.threads == 64 and one.grid == (2, 3, 2) and not one.pdl
    assert role.static_shared_bytes == 512 + 28 + 4  # 3 * 5 * 4 cells, then 7 floats at a multiple of 128
    assert one.shared_bytes == role.static_shared_bytes and one.shared_alignment == 1024
    assert role.symbols == ("w_foreign::weights",)
    assert [p.type for p in one.parameters] == ["void*", "void*", "unsigned long long"]
    assert "host(" not in role.original and "main" not in role.original
    assert "threadIdx" not in one.body and '#pragma pop_macro("threadIdx")' in one.globals


def test_the_kernel_alone_is_the_source_without_its_host_code(tmp_path: Path) -> None:
    source = "#include <stdio.h>\nfloat* data;\n" + KERNEL % "x[0] = 1;" + "int main() { k<<<1, 1>>>(data); }\n"
    role = read_role(manifest(tmp_path, source))
    assert isinstance(role, ForeignRole)
    assert role.original.split() == (KERNEL % "x[0] = 1;").split()
    assert role.notes == ("stdio.h: no such header beside the source, taken as empty",)
