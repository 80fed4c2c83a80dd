"""Products of 8-bit integers on an NVIDIA GPU: Weft's kernels against cuBLASLt's best of 16 and `torch._int_mm`.

    python -m lab.gpu_int8 [--seconds 60] [--only TEXT] [--out FILE] [--dry]

Per product two races on operands that rotate through three times the L2 cache, in CUDA graphs and interleaved rounds:
`i32`, whose results are the sums themselves and are compared with the exact ones bit by bit; and `bf16`, whose sums are
scaled and rounded, in one kernel of ours and in two of the library's side. Kernels are the model's first and some that
it does not offer: pairs, and tiles that warpgroups take in turn. Told are the best of each kind; FILE has all.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.harness.left import Left, add_option
from benchmarks.harness.record import RESULTS, environment, exchange, folder_of_gpu, lines_of

from weft.device.cuda.facts import GpuFacts, gpu_facts, profile
from weft.device.cuda.nvrtc import CompiledCubin, Nvrtc, find_nvrtc, gate
from weft.errors import WeftError
from weft.gemm.spec import Gemm, typed
from weft.generate.cuda import templates
from weft.generate.cuda.gemm.common.product import Product, product
from weft.generate.cuda.gemm.tma import kernel as tma
from weft.generate.cuda.gemm.tma.choose import every
from weft.ir.declined import Declined
from weft.ir.graph import GraphBuilder
from weft.ir.prims import Prim
from weft.ir.types import DType, TensorType
from weft.kernels.candidate import Problem
from weft.kernels.formats import Format
from weft.kernels.source import CudaSource

CASES = (
    (4096, 4096, 4096), (8192, 8192, 8192), (2048, 2048, 2048), (1024, 1024, 1024),
    (2048, 3072, 768), (512, 512, 8192), (128, 11008, 4096), (968, 1376, 2624),
)  # fmt: skip
FORCED: tuple[dict[str, Any], ...] = (
    {"bm": 128, "bn": 256, "pingpong": False, "multicast": 1},
    {"bm": 256, "bn": 128, "pingpong": False, "multicast": 0},
    {"bm": 256, "bn": 128, "pingpong": False, "multicast": 2},
    {"bm": 128, "bn": 192, "pingpong": False, "multicast": 0},
    {"bm": 128, "bn": 128, "pingpong": True, "multicast": 1},
)
"""Of large products, beside the model's."""
MOST, ROUNDS = 6, 5


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel and its cubin, or why there is none."""

    name: str
    source: CudaSource
    cubin: CompiledCubin | str


def sums(m: int, n: int, k: int) -> Problem:
    """The product of bytes, without anything behind it."""
    b = GraphBuilder()
    x, w = b.input(TensorType(DType.I8, (m, k))), b.input(TensorType(DType.I8, (n, k)))
    wide = [b.cast(v, DType.I32) for v in (x, w)]
    graph = b.build([b.add(Prim.MATMUL, wide[0], b.transpose(wide[1], (1, 0)))])
    return Problem(graph, str(graph), (Format.ROW, Format.ROW), (Format.ROW,))


def kernels(problem: Problem, facts: GpuFacts) -> Iterator[tuple[str, CudaSource]]:
    """(name, kernel) of a product: the model's first, then those of `FORCED`."""
    found = templates.schedules(problem, facts)
    assert not isinstance(found, Declined), found.reason
    tried = {}
    own = [s for s in found if s.param("template") == "tma"][:MOST] + [
        s for s in found if s.param("template") == "mma"
    ][:1]
    for s in own:
        source = templates.emit(problem, s)
        if isinstance(source, CudaSource):
            tried[str(s)] = source
    p = product(problem)
    assert isinstance(p, Product), p
    plain = (
        [x for x in every(p, facts) if x[1].split == 1 and not x[1].stream_k and x[1].min_ctas == 1]
        if p.m > 1024
        else []
    )
    for wanted in FORCED:
        near = [x for x in plain if all(getattr(x[1], k) == v for k, v in wanted.items() if k != "multicast")]
        for _, shape in sorted(near, key=lambda x: (x[0], -x[1].stages))[:1]:
            forced = replace(shape, multicast=wanted["multicast"], persistent_ctas=facts.sms).schedule()
            source = tma.emit(p, forced, f"k{len(tried)}_{p.m}_{p.n}_{p.k}")
            if isinstance(source, CudaSource):
                tried.setdefault(str(forced), source)
    for name, source in tried.items():
        yield name.removeprefix("cuda(").removesuffix(")"), source


def compiled(nvrtc: Nvrtc, facts: GpuFacts, found: Sequence[tuple[str, CudaSource]], threads: int) -> list[Kernel]:
    """Each with its cubin."""

    def one(x: tuple[str, CudaSource]) -> Kernel:
        name, source = x
        try:
            made = nvrtc.compile(source.text, arch=facts.arch, flags=source.flags)
        except WeftError as error:
            return Kernel(name, source, str(error).splitlines()[0])
        refused = gate(made, source.launches[0], facts)
        return Kernel(name, source, refused.reason if isinstance(refused, Declined) else made)

    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(one, found))


def told(given: argparse.Namespace, g: Gemm, race: str, found: Sequence[Any]) -> None:
    """A JSON line of the best contender of each kind; all of them into the file."""
    best = min((x.median_us for x in found if x.side == "library"), default=float("nan"))
    seen: set[str] = set()
    for x in sorted(found, key=lambda x: x.median_us):
        us = x.median_us
        line = {"case": g.name, "race": race, "side": x.side, "us": round(us, 2), "ratio": round(best / us, 3)}
        line |= {"tops": round(g.flops / us / 1e6), "name": x.name} | ({"refused": x.refused[:90]} if x.refused else {})
        kind = next(
            (k for k in ("mma", "multicast", "stream_k=True", "pingpong=True", "split=1") if k in x.name), x.side
        )
        if x.refused or kind not in seen:
            print(json.dumps(line), flush=True)
        seen.add(kind)
        given.lines.append(line)
        if given.out:
            with Path(given.out).open("a") as out:
                out.write(json.dumps(line) + "\n")


def scaled(g: Gemm, made: Sequence[Kernel], l2: int, given: argparse.Namespace) -> None:
    """The race with scales: one kernel against the library's two."""
    from benchmarks.harness.race import Race

    from weft.device.cuda.cublaslt import find_cublaslt

    lt = find_cublaslt()
    assert not isinstance(lt, Declined), lt.reason
    race = Race(g, l2)
    for x in made:
        if isinstance(x.cubin, CompiledCubin):
            race.add_kernel(x.name, x.source, str(x.cubin.path))
    race.add_library(lt)
    told(given, g, "bf16", race.run())


def plain(g: Gemm, made: Sequence[Kernel], l2: int, given: argparse.Namespace) -> None:
    """The race of sums in i32: kernels, the library's algorithms, and torch's operator; all must be exact."""
    import torch
    from benchmarks.harness.race import Contender, Race

    from weft.device.cuda.cublaslt import WORKSPACE_BYTES, LtAddresses, LtProduct, find_cublaslt

    lt = find_cublaslt()
    assert not isinstance(lt, Declined), lt.reason
    race = Race(g, l2)
    pairs = [(x[0], x[1]) for x in race.inputs]
    race.outputs = [torch.empty(g.m, g.n, dtype=torch.int32, device="cuda") for _ in pairs]
    for x in made:
        if isinstance(x.cubin, CompiledCubin):
            race.add_kernel(x.name, x.source, str(x.cubin.path))
    room = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
    for algorithm in lt.algorithms(LtProduct(g.m, g.n, g.k, "i8", "nt", out="i32")):
        launches: list[Any] = [
            algorithm.bind(LtAddresses(a.data_ptr(), b.data_ptr(), out.data_ptr(), workspace=room.data_ptr()))
            for (a, b), out in zip(pairs, race.outputs, strict=True)
        ]
        race._add(Contender("library", f"algorithm {algorithm.number}", launches, room))

    def by_torch(a: Any, b: Any, out: Any) -> Any:
        return lambda stream: torch._int_mm(a, b.mT, out=out)

    launches = [by_torch(a, b, out) for (a, b), out in zip(pairs, race.outputs, strict=True)]
    race._add(Contender("torch", "_int_mm", launches))
    exact = (pairs[0][0].double() @ pairs[0][1].double().mT).to(torch.int32)
    graphs: dict[int, Any] = {}
    for i, contender in enumerate(race.contenders):
        race.outputs[0].fill_(-1)
        torch.cuda.synchronize()
        try:
            race._launch(contender, 0)
        except (WeftError, RuntimeError) as error:
            contender.refused = str(error).splitlines()[0]
            continue
        if torch.equal(race.outputs[0], exact):
            graphs[i] = race._record(contender)
        else:
            contender.refused = f"wrong: {int((race.outputs[0] != exact).sum())} of {exact.numel()} sums differ"
    rng = random.Random(0)
    for _ in range(ROUNDS):
        for i in rng.sample(list(graphs), len(graphs)):
            graph, launches_ = graphs[i]
            race.contenders[i].samples_us.append(race._sample(graph) / launches_)
    told(given, g, "i32", race.contenders)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="lab.gpu_int8", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="when no further product is begun (60)")
    parser.add_argument("--only", default="", help="products whose name has this text")
    parser.add_argument("--out", default="", help="file of results, JSON lines")
    parser.add_argument("--record", action="store_true", help="put what was measured into the record")
    add_option(parser)
    parser.add_argument("--dry", action="store_true", help="no GPU: write and compile")
    given = parser.parse_args(arguments)
    end = time.monotonic() + given.seconds
    nvrtc = find_nvrtc()
    if isinstance(nvrtc, Declined):
        raise SystemExit(nvrtc.reason)
    cases = [typed(Gemm(*size, layout="nt"), "i8") for size in CASES]
    cases = [g for g in cases if given.only in g.name]
    if given.dry:
        facts = profile("h200")
        for g in cases:
            for problem in (sums(g.m, g.n, g.k), g.problem()):
                for x in compiled(nvrtc, facts, list(kernels(problem, facts)), 1):
                    good = x.cubin.of(x.source.entry) if isinstance(x.cubin, CompiledCubin) else x.cubin
                    print(g.name, x.name, good, flush=True)
        return
    import torch

    torch.zeros(1, device="cuda")
    facts = gpu_facts(None, calibrate=False)
    head = environment("python -m lab.gpu_int8 " + " ".join(sys.argv[1:])) if given.record else {}
    path = RESULTS / folder_of_gpu() / "int8.jsonl" if given.record else Path()
    known = {x.get("case") for x in lines_of(path) if x.get("src") == head["src"]} if given.record else set()
    late = Left(None, time.perf_counter() + end - time.monotonic(), only=given.left)
    for g in cases:
        if (given.left and g.name in known) or late.over(g.name):
            continue
        given.lines = []
        plain(g, compiled(nvrtc, facts, list(kernels(sums(g.m, g.n, g.k), facts)), 12), facts.l2_bytes, given)
        scaled(g, compiled(nvrtc, facts, list(kernels(g.problem(), facts)), 12), facts.l2_bytes, given)
        if given.record:
            exchange(path, head, given.lines, ("case",))
        torch.cuda.empty_cache()
    if given.left:
        sys.exit(late.status())


if __name__ == "__main__":
    try:
        main()
    except WeftError as error:
        raise SystemExit(str(error)) from None
