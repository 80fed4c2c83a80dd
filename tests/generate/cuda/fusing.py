"""Latency-critical and best-effort roles for the tests of fused kernels, and their memory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from tests.generate.cuda.fused_emulator import Memory
from tests.generate.cuda.products import product
from tests.generate.cuda.tensor_emulator import Buffer, from_memory, rounded, small_integers, to_memory

from weft.generate.cuda.gemm.common.product import Product
from weft.generate.cuda.gemm.common.product import product as product_of
from weft.generate.cuda.gemm.tma import kernel as tma
from weft.generate.cuda.gemm.tma.shape import TmaConfig
from weft.generate.cuda.intrinsics.prelude import machine_header, prelude, runtime_header
from weft.generate.cuda.role.assemble import role_header
from weft.generate.cuda.role.role import DeviceRole, Dim3, Parameter, RoleSource
from weft.ir.reference import evaluate
from weft.kernels.candidate import Problem
from weft.kernels.source import CudaSource, Pointer, Schedule

NONE = Schedule("cuda", (("template", "none"),))
POISON = 0x5B
IN_OUT = (
    Parameter("x", Pointer("in", 0), "const float* __restrict__"),
    Parameter("y", Pointer("out", 0), "float* __restrict__"),
)

FMA = """const unsigned i = (role.block_x() + role.blocks_x() * role.block_y()) * {threads}u + role.thread();
float v = x[i];
#pragma unroll 1
for (int k = 0; k < 8; ++k) v = fmaf(v, 0.75f, 1.0f);
y[i] += v;"""
"""Adds to what is there, so that a block that runs twice is seen."""

MEET = """float* const tile = (float*)sm;
const unsigned t = role.thread(), i = (role.block_x() + role.blocks_x() * role.block_y()) * {threads}u + t;
if (t % 7u == 6u || i >= {last}u) return;
tile[t] = x[i];
role.sync();
float v = tile[t] + (t > 0 && (t - 1) % 7u != 6u ? tile[t - 1] : 0.5f);
if (role.any(v > 1500.0f)) v = -v;
if (role.any(v > 5000.0f)) v += 1.0f;
if (t % 3u == 1u) {{ y[i] += v; return; }}
tile[t] = v;
role.sync();
if (t % 3u == 0u && t % 7u != 0u) v += tile[t - (t % 7u > 2u ? 3u : 0u)];
y[i] += v;"""
"""Shared memory, barriers, threads that leave before them, and blocks whose threads all leave."""


def fma(blocks: int, threads: int = 128, grid: Dim3 | None = None) -> RoleSource:
    """A BE kernel of arithmetic."""
    body = FMA.format(threads=threads)
    return RoleSource(NONE, (prelude(),), (DeviceRole(threads, body, IN_OUT, grid or (blocks, 1, 1)),))


def meet(blocks: int, threads: int = 96, grid: Dim3 | None = None) -> RoleSource:
    """A BE kernel whose threads meet and leave."""
    body = MEET.format(threads=threads, last=max(1, blocks * threads - threads - 5))
    role = DeviceRole(
        threads, body, IN_OUT, grid or (blocks, 1, 1), shared_bytes=4 * threads, shared_alignment=16, early_return=True
    )
    return RoleSource(NONE, (prelude(),), (role,))


def of(be: RoleSource) -> Memory:
    """Memory of one of these: numbers in, zeros out."""
    role = be.roles[0]
    count = max(1, int(np.prod(role.grid)) * role.threads)
    memory = Memory()
    memory["in"].append(Buffer(4 * count))
    memory["in"][0].data.view(np.float32)[:] = np.arange(count) % 1999 - 250
    memory["out"].append(Buffer(4 * count, 0))
    return memory


def result(memory: Memory) -> np.ndarray:
    """What one of these wrote, in bits."""
    return memory["out"][0].data.view(np.uint32).copy()


def fma_alone(be: RoleSource, runs: int = 1) -> np.ndarray:
    """The results of `fma` in bits, from its definition."""
    count = int(np.prod(be.roles[0].grid)) * be.roles[0].threads
    v = (np.arange(count) % 1999 - 250).astype(np.float64)
    for _ in range(8):
        v = (v * 0.75 + 1.0).astype(np.float32).astype(np.float64)
    total = np.zeros(count, np.float32)
    for _ in range(runs):
        total += v.astype(np.float32)
    return total.view(np.uint32)


def meet_alone(be: RoleSource) -> np.ndarray:
    """The results of `meet` in bits, from its definition, a block at a time."""
    role = be.roles[0]
    n, blocks = role.threads, int(np.prod(role.grid))
    last = max(1, blocks * n - n - 5)
    y = np.zeros(max(1, blocks * n), np.float32)
    for b in range(blocks):
        tile = np.zeros(n, np.float32)
        live = [t for t in range(n) if t % 7 != 6 and b * n + t < last]
        for t in live:
            tile[t] = (b * n + t) % 1999 - 250
        v = {t: np.float32(tile[t] + (tile[t - 1] if t > 0 and (t - 1) % 7 != 6 else np.float32(0.5))) for t in live}
        if any(x > 1500 for x in v.values()):
            v = {t: -x for t, x in v.items()}
        for t in live:
            if t % 3 != 1:
                tile[t] = v[t]
        for t in live:
            if t % 3 == 0 and t % 7 != 0:
                v[t] = np.float32(v[t] + tile[t - (3 if t % 7 > 2 else 0)])
            y[b * n + t] += v[t]
    return y.view(np.uint32)


TMA_PROBLEM = product((70, 264), (40, 264), weight=False, turn_right=True)
SMALL_TILES = TmaConfig(64, 32, 64, 3, 1, False, 1, (1, 1, 64), 4, 1)


def tma_role(problem: Problem = TMA_PROBLEM, config: TmaConfig = SMALL_TILES, **changes: object) -> RoleSource:
    """A product by TMA and wgmma."""
    found = product_of(problem)
    assert isinstance(found, Product), found
    source = tma.roles(found, replace(config, **changes).schedule())  # type: ignore[arg-type]
    assert isinstance(source, RoleSource), source
    return source


def lc_memory(problem: Problem, source: CudaSource | None = None) -> Memory:
    """Whole numbers in, poison out; and what else a kernel of one role needs."""
    memory = Memory()
    g = problem.graph
    for node, x, format in zip(g.inputs, small_integers(problem), problem.input_formats, strict=True):
        t = g.type_of(node)
        memory["in"].append(Buffer(t.nbytes))
        memory["in"][-1].data[:] = to_memory(x, t.dtype, format)
    for node in g.outputs:
        memory["out"].append(Buffer(g.type_of(node).nbytes, POISON))
    if source is not None:
        memory["packed"].extend(Buffer(n) for n in source.packed_bytes)
        memory["work"].append(Buffer(source.workspace_bytes))
        memory["state"].append(Buffer(source.state_bytes, 0))
    return memory


def lc_is_right(problem: Problem, memory: Memory) -> bool:
    """Whether every bit of LC's result is that of the reference, and nothing else was written."""
    g = problem.graph
    for node, buffer, format, exact in zip(
        g.outputs,
        memory["out"],
        problem.output_formats,
        evaluate(g, small_integers(problem), precise=True),
        strict=True,
    ):
        t = g.type_of(node)
        got = from_memory(buffer.data.copy(), t.dtype, t.shape, format)
        if not np.array_equal(got, rounded(exact, t.dtype)):
            return False
    return all(b.intact() for b in memory.buffers)


def prelude_pieces() -> list[str]:
    """The headers of the prelude one by one, as kernels of loops have them."""
    return [f"{x.rstrip()}\n" for x in (machine_header(), runtime_header(), role_header())]
