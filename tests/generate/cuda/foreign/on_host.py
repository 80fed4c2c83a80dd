"""Runs a kernel on the host, as it lies and in the form of a role, and compares both bit by bit."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import numpy as np
import tests.benchmarks
from tests import compiled

from weft.generate.cuda.foreign.manifest import Data, Manifest
from weft.generate.cuda.foreign.read import ForeignRole
from weft.generate.cuda.foreign.wrap import foreign_header
from weft.ir.types import Array

_SHIM = Path(tests.benchmarks.__path__[0]) / "host_cuda.h"
GUARD = 64
FRAME = """
#define W_FN inline
struct uint3 { unsigned x, y, z; };
static int w_wrong = 0;
inline void w_meet() {
  for (Thread& f : block->fibers) w_wrong |= f.done;  // every thread of a role is there
  block->pause(1);
}
struct w_host_frame {
  static unsigned thread() { return block->now; }
  static unsigned block_x() { return blockIdx.x; }
  static unsigned block_y() { return blockIdx.y; }
  static unsigned block_z() { return blockIdx.z; }
  static unsigned blocks_x() { return gridDim.x; }
  static void sync() { w_meet(); }
};
inline unsigned w_blocks_y(const w_host_frame&) { return gridDim.y; }
inline unsigned w_blocks_z(const w_host_frame&) { return gridDim.z; }
inline int w_count(const w_host_frame&, bool x) {
  static int sum;
  sum += x;
  w_meet();
  const int r = sum;
  w_meet();
  sum = 0;
  w_meet();
  return r;
}
inline bool w_any(const w_host_frame& role, bool x) { return w_count(role, x) > 0; }
alignas(1024) static unsigned char w_memory[232448];
"""

VOTES = """
static int votes_for, voters;
inline int vote(bool x, int& all) {  // threads that have left do not vote
  votes_for += x;
  ++voters;
  block->pause(1);
  const int yes = votes_for;
  all = voters;
  block->pause(1);
  votes_for = voters = 0;
  block->pause(1);
  return yes;
}
inline int __syncthreads_count(int x) { int all; return vote(x, all); }
inline int __syncthreads_and(int x) { int all; const int yes = vote(x, all); return yes == all; }
inline int __syncthreads_or(int x) { int all; return vote(x, all) > 0; }
"""


def drawn(data: Data, number: int) -> Array:
    """Bytes of a buffer, as the manifest says, but whole numbers for `normal`, which are exact in any type."""
    count = data.count * data.per * data.element.components
    if data.init is None:
        return np.full(data.nbytes, 0x5B, np.uint8)
    if data.init == "file":
        assert data.file is not None
        return np.fromfile(data.file, np.uint8)
    dtype, rng = np.dtype(data.element.scalar.replace("b1", "u1")), np.random.default_rng(number)
    values: Array = np.zeros(count)
    if data.init == "normal":
        values = rng.integers(0, 100, count)
    elif data.init == "arange":
        values = np.arange(count)
    elif data.init == "uniform" and data.element.is_float:
        values = rng.uniform(data.low, data.high, count)
    elif data.init == "uniform":
        values = rng.integers(int(data.low), int(data.high), count, dtype)
    return values.astype(dtype).view(np.uint8)


def original(manifest: Manifest, source: str) -> list[Array]:
    """All buffers after a launch of the kernel as it lies."""
    source = re.sub(r"extern __shared__ (\w+) (\w+)\[\]", r"static \1 \2[16384]", source)
    text = "".join(f"#define {n} {v}\n" for n, v in manifest.define) + VOTES + source
    return _run(manifest, text, manifest.entry, manifest.block, [c.name for c in manifest.constants], [])


def wrapped(role: ForeignRole, *, change: tuple[str, str] = ("", "")) -> list[Array]:
    """All buffers after the role ran every block. `change`: text of the role and what stands in its place."""
    one = role.role
    assert change[0] in one.globals
    body = one.body.replace("role, sm", "role, w_memory")
    parameters = ", ".join(f"{p.type} {p.name}" for p in one.parameters)
    kernel = f"static void w_host({parameters}) {{ const w_host_frame role{{}}; {body} }}\n"
    text = FRAME + foreign_header() + one.globals.replace(*change) + kernel
    extra = ["int wrong() { return w_wrong; }"]
    block = (one.threads, 1, 1)
    return _run(role.manifest, text, "w_host", block, list(role.symbols[: len(role.manifest.constants)]), extra)


def _run(
    m: Manifest, text: str, entry: str, block: tuple[int, int, int], symbols: list[str], extra: list[str]
) -> list[Array]:
    glue = [
        f"""int run(void* const* a, const unsigned* g, const unsigned* b, const unsigned* o) {{
  return launched({entry}, a, g, b, o, g[0] * g[1] * g[2], 1, 0);
}}""",
        *(f"void* symbol_{i}() {{ return (void*)&{name}; }}" for i, name in enumerate(symbols)),
        *extra,
    ]
    parts = [
        _SHIM.read_text(),
        "#define __forceinline__ inline\n#define __align__(n) __attribute__((aligned(n)))\n",
        text,
        *(f'extern "C" {x}\n' for x in glue),
    ]
    library = compiled.library("\n".join(parts), "-std=c++17", "-O1", "-ffp-contract=off")
    for i, data in enumerate(m.constants):
        symbol = getattr(library, f"symbol_{i}")
        symbol.restype = ctypes.c_void_p
        ctypes.memmove(symbol(), drawn(data, 1000 + i).tobytes(), data.nbytes)
    zones: list[Array] = []
    words: list[int] = []
    for i, p in enumerate(m.parameters):
        if p.data is None:
            words += p.bits
            continue
        raw = np.full(p.data.nbytes + 2 * GUARD + 64, 0xA5, np.uint8)
        raw = raw[-raw.ctypes.data % 64 :][: p.data.nbytes + 2 * GUARD]
        raw[GUARD:-GUARD] = drawn(p.data, i)
        zones.append(raw)
        words.append(raw.ctypes.data + GUARD)
    values = (ctypes.c_uint64 * max(1, len(words)))(*words)
    places = (ctypes.c_void_p * len(values))(*(ctypes.addressof(values) + 8 * i for i in range(len(values))))
    order = np.random.default_rng(7).permutation(int(np.prod(m.grid))).tolist()
    dims = [(ctypes.c_uint * 3)(*d) for d in (m.grid, block)]
    assert library.run(places, *dims, (ctypes.c_uint * len(order))(*order)) == 0, "threads wait in vain"
    if extra:
        assert library.wrong() == 0, "a thread of the role was not at a barrier"
    for zone in zones:
        assert (zone[:GUARD] == 0xA5).all() and (zone[-GUARD:] == 0xA5).all(), "written beside a buffer"
    return [z[GUARD:-GUARD].copy() for z in zones]
