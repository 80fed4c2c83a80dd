"""Attention: Weft's kernel against every backend of torch's scaled_dot_product_attention, on an NVIDIA GPU.

    python -m benchmarks.gpu_attention [--only TEXT] [--first K] [--seconds S] [--dtype T] [--long] [--dry]

Both read q, k and v as strided views of what the products before attention write, and write what the product after it
reads. Weft: the fastest of the schedules that the tuner is offered, its rank, and the fastest of K more by the models
(`any`); `bias`: with the biases of q, k and v added inside. A time is the median over replays of a CUDA graph of
launches on data that lies in the L2 cache, as in a network. Errors are RMS over RMS, against float64. `--dry` writes
and compiles the kernels without a GPU. The record keeps the cases that were not asked for.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import math
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.harness.gpu_time import Kernel, median_us
from benchmarks.harness.left import Left, add_option
from benchmarks.harness.record import Record, folder_of_gpu
from weft.device.cuda.facts import GpuFacts, gpu_facts
from weft.device.cuda.nvrtc import CompiledCubin, CompileJob, find_nvrtc
from weft.fission.sdpa import sdpa
from weft.generate.cuda import templates
from weft.generate.cuda.attention import tma as attention_tma
from weft.generate.cuda.attention.match import attention
from weft.generate.cuda.attention.shapes import shapes
from weft.ir.declined import Declined
from weft.ir.graph import GraphBuilder, NodeId
from weft.ir.prims import Prim
from weft.ir.types import DType, TensorType
from weft.kernels.candidate import Problem
from weft.kernels.formats import Format
from weft.kernels.source import CudaSource

LAUNCHES = 20
ROUNDS = 9
_MANY = 1 << 27
"""Scores of a long attention: fewer launches are timed."""
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.float32: 4e-6}
TF32_TOLERANCE = 1e-3
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
TORCH = {DType.F16: torch.float16, DType.BF16: torch.bfloat16, DType.F32: torch.float32}


@dataclass(frozen=True, slots=True)
class Case:
    """One attention; sizes are counts."""

    name: str
    batch: int
    heads: int
    rows: int
    keys: int
    size: int
    merged: bool = False
    """q, k and v are columns of one matrix."""
    causal: bool = False
    mask: str = ""
    """`keys`: a bool per key of a sequence; `all`: an added number per head, row and key."""
    key_heads: int = 0
    """Heads of k and v where these are fewer."""

    @property
    def shared(self) -> int:
        """Heads of k and v."""
        return self.key_heads or self.heads

    @property
    def mask_shape(self) -> tuple[int, ...]:
        """Empty without a mask."""
        if not self.mask:
            return ()
        return (self.batch, 1, 1, self.keys) if self.mask == "keys" else (1, self.heads, self.rows, self.keys)


CASES = (
    *(Case(f"bert_base b{n}", n, 12, 128, 128, 64, merged=True) for n in (1, 16)),
    *(Case(f"vit_b16 b{n}", n, 12, 197, 197, 64, merged=True) for n in (1, 16)),
    *(Case(f"segformer_b0 1 b{n}", n, 1, 16384, 256, 32) for n in (1, 16)),
    *(Case(f"segformer_b0 2 b{n}", n, 2, 4096, 256, 32) for n in (1, 16)),
    *(Case(f"segformer_b0 3 b{n}", n, 5, 1024, 256, 32) for n in (1, 16)),
    *(Case(f"segformer_b0 4 b{n}", n, 8, 256, 256, 32, merged=True) for n in (1, 16)),
    Case("bert_base b1 512 masked", 1, 12, 512, 512, 64, merged=True, mask="keys"),
    Case("relative positions", 4, 8, 196, 196, 32, merged=True, mask="all"),
    Case("swin windows", 64, 3, 49, 49, 32, merged=True, mask="all"),
    Case("heads of 80", 1, 16, 577, 577, 80, merged=True),
    Case("heads of 16", 8, 8, 256, 256, 16, merged=True),
    Case("causal 1024, 64", 1, 12, 1024, 1024, 64, merged=True, causal=True),
    Case("causal 2048, 128", 1, 16, 2048, 2048, 128, merged=True, causal=True),
    Case("2048, 64", 2, 16, 2048, 2048, 64, merged=True),
    Case("grouped, 1 row of 1024 keys", 8, 32, 1, 1024, 128, key_heads=8),
    Case("cross, 77 keys", 2, 8, 4096, 77, 40),
)
LONG = (
    Case("4096, 64", 1, 16, 4096, 4096, 64, merged=True),
    Case("4096, 128", 1, 16, 4096, 4096, 128, merged=True),
    Case("causal 4096, 64", 2, 16, 4096, 4096, 64, merged=True, causal=True),
    Case("causal 4096, 128", 1, 32, 4096, 4096, 128, merged=True, causal=True),
    Case("causal 8192, 128", 1, 16, 8192, 8192, 128, merged=True, causal=True),
    Case("8192, 64", 1, 8, 8192, 8192, 64, merged=True),
    Case("grouped causal 4096, 128", 1, 32, 4096, 4096, 128, key_heads=8, causal=True),
)
"""Of language models; measured with --long."""


def problem_of(c: Case, dtype: DType, *, bias: bool) -> Problem:
    """The attention as a problem of the generator: (tokens, columns) in, (batch, rows, heads, size) out."""
    b = GraphBuilder()
    wide, narrow = c.heads * c.size, c.shared * c.size
    if c.merged:
        x = b.input(TensorType(dtype, (c.batch * c.rows, wide + 2 * narrow)))
        starts, widths = (0, wide, wide + narrow), (wide, narrow, narrow)
        parts = [b.slice(x, (0, s), (c.batch * c.rows, w), (1, 1)) for s, w in zip(starts, widths, strict=True)]
    else:
        shapes = ((c.rows, wide), (c.keys, narrow), (c.keys, narrow))
        parts = [b.input(TensorType(dtype, (c.batch * n, w))) for n, w in shapes]
    found: list[NodeId] = []
    for part, n, heads in zip(parts, (c.rows, c.keys, c.keys), (c.heads, c.shared, c.shared), strict=True):
        y = part
        if bias:
            y = b.apply(Prim.ADD, y, b.input(TensorType(dtype, (heads * c.size,)), is_weight=True))
        found.append(b.transpose(b.reshape(y, (c.batch, n, heads, c.size)), (0, 2, 1, 3)))
    q, k, v = found
    gqa = c.shared != c.heads
    if c.mask:
        mask = b.input(TensorType(DType.BOOL if c.mask == "keys" else dtype, c.mask_shape))
        y = cast("NodeId", sdpa(b, q, k, v, mask, causal=c.causal, enable_gqa=gqa))
    else:
        y = cast("NodeId", sdpa(b, q, k, v, causal=c.causal, enable_gqa=gqa))
    graph = b.build([b.transpose(y, (0, 2, 1, 3))])
    return Problem(graph, f"{graph} {c} {bias}", (Format.ROW,) * len(graph.inputs), (Format.ROW,))


@dataclass(slots=True)
class Data:
    """Operands on the device, and the exact result."""

    inputs: list[torch.Tensor]
    """Of the problem without biases."""
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    """Views (batch, heads, n, size)."""
    mask: torch.Tensor | None
    exact: torch.Tensor
    """float64, (batch, rows, heads, size)"""

    @staticmethod
    def of(c: Case, dtype: DType) -> Data:
        """Normal numbers."""
        generator = torch.Generator("cuda").manual_seed(1)
        kind = TORCH[dtype]

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device="cuda").to(kind)

        wide, narrow = c.heads * c.size, c.shared * c.size
        if c.merged:
            inputs = [normal(c.batch * c.rows, wide + 2 * narrow)]
            parts = list(torch.split(inputs[0], [wide, narrow, narrow], 1))
        else:
            inputs = [normal(c.batch * c.rows, wide), *(normal(c.batch * c.keys, narrow) for _ in range(2))]
            parts = inputs
        counts = ((c.rows, c.heads), (c.keys, c.shared), (c.keys, c.shared))
        q, k, v = (
            x.view(c.batch, n, heads, c.size).transpose(1, 2) for x, (n, heads) in zip(parts, counts, strict=True)
        )
        mask = None
        if c.mask == "keys":
            mask = torch.rand(c.mask_shape, generator=generator, device="cuda") < 0.8
            mask[..., 0] = True
        elif c.mask:
            mask = normal(*c.mask_shape)
        if mask is not None:
            inputs = [*inputs, mask]
        exact = Data._exact(c, q, k, v, mask)
        return Data(inputs, q, k, v, mask, exact)

    @staticmethod
    def _exact(c: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        parts = []
        for i in range(c.batch):
            one = slice(i, i + 1)
            k64, v64 = (x[one].double().repeat_interleave(c.heads // c.shared, 1) for x in (k, v))
            s = q[one].double() @ k64.transpose(-1, -2) * c.size**-0.5
            if mask is not None and mask.dtype == torch.bool:
                s = s.masked_fill(~mask[one], -math.inf)
            elif mask is not None:
                s = s + mask.double()
            if c.causal:
                keep = torch.ones(c.rows, c.keys, dtype=torch.bool, device=s.device).tril()
                s = s.masked_fill(~keep, -math.inf)
            parts.append((s.softmax(-1) @ v64).transpose(1, 2))
        return torch.cat(parts)


def launches_of(c: Case) -> int:
    """Launches of one graph."""
    return 4 if c.batch * c.heads * c.rows * c.keys > _MANY else LAUNCHES


def error_of(got: torch.Tensor, exact: torch.Tensor) -> float:
    """RMS of the error over the RMS of the result; infinite where something is not finite."""
    found = float((got.double() - exact).square().mean().sqrt() / exact.square().mean().sqrt())
    return found if math.isfinite(found) else math.inf


def written(problem: Problem, facts: GpuFacts, first: int) -> list[CudaSource] | str:
    """The kernels that the tuner is offered, the most promising first, and `first` more; or why there is none."""
    offered = templates.schedules(problem, facts)
    found = attention(problem)
    if isinstance(offered, Declined) or isinstance(found, Declined):
        return offered.reason if isinstance(offered, Declined) else "no attention"
    more = [s.schedule(tf32=True) for s in shapes(replace(found, tf32=True), facts, keep=first)] if facts.tf32 else []
    more += [s for _, s in attention_tma.ranked(found, facts, keep=first)]
    more += [s.schedule() for s in shapes(found, facts, keep=first)]
    unlike = [*offered, *dict.fromkeys(s for s in more if s not in offered)]
    sources = [templates.emit(problem, s) for s in unlike[: len(offered) + first]]
    return [s for s in sources if isinstance(s, CudaSource)] or "no kernel"


def peers(c: Case, d: Data) -> tuple[dict[str, float], dict[str, float], dict[str, str]]:
    """(microseconds, errors, failures) of torch's backends."""
    times: dict[str, float] = {}
    errors: dict[str, float] = {}
    failures: dict[str, str] = {}
    for name, backend in BACKENDS.items():
        if name == "math" and c.batch * c.heads * c.rows * c.keys > _MANY:
            continue  # it stores the scores, and never wins

        def call() -> torch.Tensor:
            return scaled_dot_product_attention(
                d.q, d.k, d.v, d.mask, is_causal=c.causal, enable_gqa=c.shared != c.heads
            )

        try:
            with sdpa_kernel(backend), torch.no_grad():
                errors[name] = error_of(call().transpose(1, 2), d.exact)
                times[name] = median_us(call, launches=launches_of(c), rounds=ROUNDS)
        except Exception as error:  # a backend that does not take the case is said, and the rest is measured
            failures[name] = (str(error).splitlines() or [type(error).__name__])[0][:90]
            with contextlib.suppress(Exception):
                torch.cuda.synchronize()
    return times, errors, failures


@dataclass(slots=True)
class Ours:
    """The kernels of one problem on the device, in the order of the model; wrong ones are infinitely slow."""

    times: list[float]
    errors: list[float]
    shapes: list[str]

    @staticmethod
    def of(kernels: Sequence[Kernel], inputs: Sequence[torch.Tensor], d: Data, launches: int) -> Ours:
        """Run and time all."""
        found = Ours([], [], [])
        tolerance = TF32_TOLERANCE if torch.backends.cuda.matmul.allow_tf32 else TOLERANCE[d.q.dtype]
        for kernel in kernels:
            out = torch.full(d.exact.shape, math.nan, dtype=d.q.dtype, device="cuda")
            faulthandler.dump_traceback_later(20, exit=True)  # a kernel that does not end ends the program
            us = kernel.time(inputs, out, launches=launches, rounds=ROUNDS)
            faulthandler.cancel_dump_traceback_later()
            error = error_of(out, d.exact)
            found.shapes.append(str(kernel.source.schedule))
            found.errors.append(error)
            found.times.append(round(us, 3) if error <= tolerance else math.inf)
            if error > tolerance:
                print(f"WRONG: {kernel.source.schedule} error {error:.2g}", file=sys.stderr)
        return found

    def best(self, most: int) -> int:
        """Number of the fastest of the first `most`; -1 where none is right."""
        times = self.times[:most]
        return times.index(min(times)) if times and min(times) < math.inf else -1

    def us(self, most: int) -> float:
        """Its time."""
        return self.times[self.best(most)] if self.best(most) >= 0 else math.inf


def offered(c: Case, dtype: DType, facts: GpuFacts, *, bias: bool) -> int:
    """Kernels that the tuner is offered."""
    found = templates.schedules(problem_of(c, dtype, bias=bias), facts)
    return 0 if isinstance(found, Declined) else len(found)


def record(
    c: Case, dtype: DType, plain: Sequence[Kernel], biased: Sequence[Kernel], facts: GpuFacts
) -> dict[str, object]:
    """One case on the GPU."""
    d = Data.of(c, dtype)
    mine = Ours.of(plain, d.inputs, d, launches_of(c))
    end = len(d.inputs) - bool(c.mask)
    widths = (c.heads * c.size, c.shared * c.size, c.shared * c.size)
    zeros = [torch.zeros(w, dtype=d.q.dtype, device="cuda") for w in widths]
    # inputs stand in the order of the builder: parts and biases in turn, then the mask
    with_bias = Ours.of(biased, [*d.inputs[:end], *zeros, *d.inputs[end:]], d, launches_of(c))
    found, errors, failures = peers(c, d)
    best = min(found, key=lambda k: found[k]) if found else ""
    most = offered(c, dtype, facts, bias=False)
    us, rank = mine.us(most), mine.best(most)
    us_bias = with_bias.us(offered(c, dtype, facts, bias=True))
    return {
        "case": c.name, "weft_us": us, "weft_bias_us": us_bias,
        "peers_us": {k: round(v, 3) for k, v in found.items()}, "best_peer": best,
        "ratio": round(found[best] / us, 3) if best else None,
        "error": float(f"{mine.errors[rank]:.3g}") if rank >= 0 else None,
        "peer_errors": {k: float(f"{v:.3g}") for k, v in errors.items()}, "rank": rank, "any_us": mine.us(1000),
        "times": [f"{t} {s}" for t, s in zip(mine.times, mine.shapes, strict=True)],
        "bias_times": [f"{t} {s}" for t, s in zip(with_bias.times, with_bias.shapes, strict=True)],
        "failures": failures,
    }  # fmt: skip


def table(rows: Sequence[dict[str, object]]) -> str:
    """What was measured, and the geometric mean over the best backend."""
    names = list(BACKENDS)
    head = f"{'case':30} {'weft':>8} {'rank':>4} {'any':>8} {'+bias':>8}"
    lines = [f"{head} {' '.join(f'{n:>9}' for n in names)}   ratio of best"]
    ratios = []
    for row in rows:
        found = cast("dict[str, float]", row["peers_us"])
        cells = " ".join(f"{found[n]:9.2f}" if n in found else f"{'-':>9}" for n in names)
        ratio = cast("float | None", row["ratio"])
        ratios += [ratio] if ratio else []
        end = f"{ratio:7.2f} of {row['best_peer']}" if ratio else "      -"
        own = f"{row['weft_us']:8.2f} {row['rank']:4} {row['any_us']:8.2f} {row['weft_bias_us']:8.2f}"
        lines.append(f"{row['case']:30} {own} {cells} {end}")
    if ratios:
        mean = math.exp(statistics.fmean(map(math.log, ratios)))
        lines.append(f"geometric mean {mean:.3f} over {len(ratios)} cases, least {min(ratios):.2f}")
    return "\n".join(lines)


def main() -> int:
    """Compile all, then measure; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument("--first", type=int, default=8, help="schedules of each problem beyond those of the tuner (8)")
    parser.add_argument("--seconds", type=float, default=55.0, help="no case is begun after so many")
    parser.add_argument("--dtype", default="f16", choices=[*(d.value for d in TORCH), "tf32"])
    parser.add_argument("--long", action="store_true", help="attention of long sequences instead")
    parser.add_argument("--dry", action="store_true", help="no GPU: write and compile")
    add_option(parser)
    given = parser.parse_args()
    started = time.perf_counter()
    tf32 = given.dtype == "tf32"
    dtype = DType.F32 if tf32 else DType(given.dtype)
    torch.backends.cuda.matmul.allow_tf32 = tf32
    nvrtc = find_nvrtc()
    if isinstance(nvrtc, Declined):
        print(nvrtc.reason, file=sys.stderr)
        return 2
    facts = GpuFacts()
    if not given.dry:
        torch.zeros(1, device="cuda")
        facts = gpu_facts(None, calibrate=False)
    facts = replace(facts, tf32=tf32)
    cases = [c for c in (LONG if given.long else CASES) if given.only in c.name]
    kept = None if given.dry else Record(folder_of_gpu(), "attention")
    left = Left(kept, started + given.seconds, only=given.left)
    cases = [c for c in cases if not left.known(case=f"{c.name} {given.dtype}")]
    jobs: list[tuple[int, bool, CudaSource]] = []
    for i, c in enumerate(cases):
        for bias in (False, True):
            sources = written(problem_of(c, dtype, bias=bias), facts, given.first if not bias else min(4, given.first))
            if isinstance(sources, str):
                print(f"{c.name}: {sources}", file=sys.stderr)
                continue
            jobs += [(i, bias, s) for s in sources]
    results = nvrtc.compile_many([CompileJob(s.text, facts.arch, s.flags) for _, _, s in jobs])
    kernels: dict[tuple[int, bool], list[Kernel]] = {}
    for (i, bias, source), result in zip(jobs, results, strict=True):
        if not isinstance(result, CompiledCubin):
            print(f"{cases[i].name}: {source.schedule}: {result}", file=sys.stderr)
            continue
        used = result.of(source.launches[0].entry)
        if used.spill_stores:
            print(f"{cases[i].name}: {source.schedule} spills {used.spill_stores} B", file=sys.stderr)
        kernels.setdefault((i, bias), []).append(Kernel(source, str(result.path)))
    print(f"{len(jobs)} kernels compiled after {time.perf_counter() - started:.1f} s", file=sys.stderr)
    if kept is None:
        for i, c in enumerate(cases):
            print(f"{c.name:30} {[str(k.source.schedule) for k in kernels.get((i, False), [])][:1]}")
        return 0
    rows = []
    for i, c in enumerate(cases):
        name = f"{c.name} {given.dtype}"
        if not left.begins(case=name):
            continue
        with kept.measuring(case=name):
            rows.append(record(c, dtype, kernels.get((i, False), []), kernels.get((i, True), []), facts))
            kept.add(
                {**rows[-1], "record": "case", "suite": "attention", "case": name, "dtype": given.dtype,
                 "long": given.long}
            )  # fmt: skip
    print(table(rows))
    return left.status(kept.failed)


if __name__ == "__main__":
    sys.exit(main())
