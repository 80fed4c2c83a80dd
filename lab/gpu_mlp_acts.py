"""What activations cost in fully fused networks, and what hides them: variants of one kernel side by side, on a GPU.

    python -m lab.gpu_mlp_acts [--set SET] [--only TEXT] [--seconds S] [--in-turns] [--dry]

Every line is one network and one shape of the mlp template: w8 has 8 warps in a block; `pingpong` lets one warpgroup
issue its products at a time; `flow k` begins a product when k fragments of its left operand are there. Ablations are
marked: `no products` leaves the products out and keeps all else (all rows are then equal, and the compiler computes the
activations of two rows once: they take about twice what is shown), act `none` leaves the activations out. `two blocks`
share a tile of few rows. The first lines count operations per clock of one multiprocessor. `--set ways` and `--set
memory` compare other ways of a few shapes, in brackets (`lab.mlp_texts`); `clocks` prints where those of a layer of a
tile went. `--in-turns` replays all of a size one after the other, so that they have the same clock. Errors are norms of
the error over the norm of the result, against float64 on the first 4096 rows; `ratio` is the time over that of the
fastest ReLU network of that size so far. A kernel that does not end within 12 seconds ends the program."""

from __future__ import annotations

import argparse
import math
import os
import re
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from benchmarks.cases.mlp import TORCH, Case, network, problem_of
from benchmarks.gpu_mlp import CHECKED, ROUNDS, error_of, launches_for
from benchmarks.harness.gpu_time import Kernel

from lab import mlp_texts
from weft.device.cuda.driver import Module
from weft.device.cuda.facts import GpuFacts, gpu_facts
from weft.device.cuda.nvrtc import CompiledCubin, CompileJob, Nvrtc, find_nvrtc
from weft.errors import WeftError
from weft.generate.bind import Addresses, BoundCuda
from weft.generate.cuda import templates
from weft.generate.cuda.intrinsics.prelude import prelude
from weft.generate.cuda.mlp import pair as mlp_pair
from weft.generate.cuda.mlp.prescale import CUBIC, prescale_header
from weft.generate.cuda.mlp.shapes import MlpConfig
from weft.generate.cuda.mlp.text import mlp_header
from weft.ir.declined import Declined
from weft.ir.types import DType
from weft.kernels.source import CudaSource

STRETCH = CUBIC ** (1 / 3) * 0.70710677
IN_TURNS, RECORDED = 25, 12
"""Rounds, and launches of a graph."""
RATES = {
    "tanh": "tanh.approx.f32 f, f;",
    "ex2": "ex2.approx.ftz.f32 f, f;",
    "rcp": "rcp.approx.ftz.f32 f, f;",
    "fma": "fma.rn.f32 f, f, f, f;",
    "fma with numbers": "fma.rn.f32 f, f, 0f3F800001, 0f3F800000;",
    "product": "mul.rn.f32 f, f, f;",
    "copy of a sum": "add.s32 u, u, 1; mov.b32 f, u;",
    "narrow one": "cvt.rn.bf16.f32 h, f; mov.b32 f, {h, h};",
    "narrow two": "cvt.rn.bf16x2.f32 u, f, f; mov.b32 f, u;",
    "fma of pairs": "mov.b32 u, f; fma.rn.bf16x2 u, u, u, u; mov.b32 f, u;",
    "product of pairs": "mov.b32 u, f; mul.rn.bf16x2 u, u, u; mov.b32 f, u;",
    "tanh of pairs": "mov.b32 u, f; tanh.approx.bf16x2 u, u; mov.b32 f, u;",
}


@dataclass(frozen=True, slots=True)
class Variant:
    """One line."""

    case: Case
    shape: MlpConfig | mlp_pair.MlpPairConfig
    without: str = ""
    """An ablation: its results are wrong."""
    words: frozenset[str] = frozenset()
    """Other ways to the same result, or more ablations: `lab.mlp_texts`."""

    @property
    def name(self) -> str:
        """For people."""
        s = self.shape
        if isinstance(s, mlp_pair.MlpPairConfig):
            return f"two blocks s{s.stages}"
        words = [f"{'group' if s.group else 'warp'} t{s.tiles} w{s.warps} x{s.min_ctas} s{s.stages}/{s.fixed}"]
        words += ["near"] * s.near + ["keep"] * s.keep + ["pingpong"] * s.pingpong + ["early"] * s.early
        words += [f"flow {s.flow}/{s.pace}"] * bool(s.flow)
        words += [f"({', '.join(sorted(self.words))})"] * bool(self.words)
        return " ".join([*words, f"[{self.without}]" if self.without else ""]).strip()

    @property
    def wrong(self) -> bool:
        """Whether its results are not those of the network."""
        return bool(self.without or self.words & (mlp_texts.WRONG | {"clocks"}))


def variants(facts: GpuFacts) -> Iterator[Variant]:
    """What the template offers, and some beside."""
    group = MlpConfig(True, 1, 16, 0, 0, 1, facts.sms)
    acts = ("relu", "silu", "gelu", "tanh")
    cases = [
        *(Case(18, 128, 4, act) for act in acts),
        *(Case(18, width, 4, act) for width in (256, 192) for act in acts),
        *(Case(18, 128, 8, act) for act in acts),
        *(Case(18, 64, 8), Case(20, 32, 8), Case(20, 16, 8), Case(18, 64, 4, "silu")),
        *(Case(12, w, d) for d in (4, 8) for w in (256, 128)),
    ]
    for case in cases:
        pairs, narrow = offered(case, facts)
        yield from (Variant(case, s) for s in pairs)
        shapes = [s for s in narrow if s.group]
        if case.width == 128 and case.act != "relu":
            plain = replace(shapes[0], flow=0, pace=0, pingpong=False)
            shapes += [replace(plain, warps=16), replace(plain, warps=12, pingpong=True)]
        if case.width <= 64:
            shapes += [group, replace(group, flow=1, pace=1), replace(group, warps=12, flow=1, pace=1)]
        for shape in dict.fromkeys(shapes):
            yield Variant(case, shape)
        if case.act == "silu" and case.width >= 128 and case.depth == 4:
            yield Variant(case, shapes[0], "no products")
            yield Variant(replace(case, act="none"), shapes[0])


def ways(facts: GpuFacts) -> Iterator[Variant]:
    """What is offered for activations, and the same in other ways."""
    for width in (192, 256, 128):
        for act in ("gelu", "silu", "tanh", "relu"):
            case = Case(18, width, 4, act)
            shapes = [s for s in offered(case, facts)[1] if s.group]
            yield from (Variant(case, s) for s in shapes)
            pingpong = next((s for s in shapes if s.pingpong), replace(shapes[0], warps=12, pingpong=True))
            words = ["clocks", "whole", *(["first asks", "near memory"] if pingpong.stages else ["near memory"])]
            words += ["old"] if act == "gelu" else []
            yield from (Variant(case, pingpong, words=frozenset({w})) for w in words)


def memory(facts: GpuFacts) -> Iterator[Variant]:
    """Loads and stores of two and four narrow layers."""
    for case in (Case(18, 64, 2), Case(18, 64, 4), Case(18, 32, 4), Case(17, 128, 2), Case(18, 64, 4, "silu")):
        shapes = [s for s in offered(case, facts)[1] if s.group]
        yield from (Variant(case, s) for s in shapes)
        best = next((s for s in shapes if s.flow and not s.keep), shapes[0])
        if case.width == 64:
            one = replace(best, warps=16, min_ctas=1, persistent_ctas=facts.sms)
            yield from (Variant(case, s) for s in (one, replace(one, keep=True), replace(best, near=True)))
        words = ("near memory", "hints .cs -", "hints .cs unchanged", "hints first first", "hints - last")
        yield from (Variant(case, best, words=frozenset({w})) for w in words)


def offered_acts(facts: GpuFacts) -> Iterator[Variant]:
    """What the template offers for four activations, for `--in-turns`."""
    for width in (128, 192, 256):
        for act in ("relu", "tanh", "silu", "gelu"):
            case = Case(18, width, 4, act)
            yield from (Variant(case, s) for s in offered(case, facts)[1] if s.group)


def fences(facts: GpuFacts) -> Iterator[Variant]:
    """Steps between products that are kept in front of the next turn, for `--in-turns`."""
    for width in (128, 192, 256):
        for act in ("relu", "gelu", "silu", "tanh"):
            case = Case(18, width, 4, act)
            shapes = [s for s in offered(case, facts)[1] if s.group]
            plain = MlpConfig(True, 1, 12, 0, 0, 1, facts.sms)
            taking = replace(plain, pingpong=True)
            for shape in [plain, taking] if width == 128 else [s for s in shapes if s.pingpong]:
                words = ["", "fence", *(["whole", "whole,fence"] if shape.pingpong else [])]
                yield from (Variant(case, shape, words=frozenset(w.split(",")) - {""}) for w in words)
            if act == "gelu":
                yield Variant(case, plain if width == 128 else shapes[-1], words=frozenset({"old"}))


SETS = {"fences": fences, "offered": variants, "ways": ways, "memory": memory, "acts": offered_acts}


def offered(case: Case, facts: GpuFacts) -> tuple[list[mlp_pair.MlpPairConfig], list[MlpConfig]]:
    """What the templates rank first."""
    found = templates.schedules(problem_of(case, DType.BF16), facts)
    if isinstance(found, Declined):
        return [], []
    pairs = [mlp_pair.MlpPairConfig.of(s) for s in found if s.param("template") == "mlp_pair"]
    return pairs, [MlpConfig.of(s) for s in found if s.param("template") == "mlp"]


def made(v: Variant) -> CudaSource | None:
    """Its kernel."""
    with mlp_texts.emitting(v.words):
        source = templates.emit(problem_of(v.case, DType.BF16), v.shape.schedule())
    if not isinstance(source, CudaSource):
        return None
    text = mlp_texts.changed(source.text, v.words) if v.words else source.text
    if v.without == "no products":
        sink = 'asm volatile("" :: "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "f"(d[0]));\n'
        text = re.sub(
            r"asm volatile\(\"\{ \.reg \.pred p; setp[^;]*;[^;]*;.*?\);\n#endif", sink + "#endif", text, flags=re.S
        )
    return replace(source, text=text)


def counted(v: Variant, out: torch.Tensor) -> str:
    """Clocks of a layer of a tile, by what they were spent on."""
    assert isinstance(v.shape, MlpConfig)
    blocks, owners = v.shape.persistent_ctas, v.shape.owners
    words = out.view(torch.int32).flatten()[: blocks * 16].view(blocks, 4, 4)[:, :owners].double()
    tiles = v.case.rows / 64 / (blocks * owners)
    mean = words.mean((0, 1)) / tiles
    layers = (v.case.depth, v.case.depth, v.case.depth - 1, 1)
    return ", ".join(f"{name} {float(x) / n:.0f}" for name, x, n in zip(mlp_texts.COUNTED, mean, layers, strict=True))


def rates(nvrtc: Nvrtc, arch: str) -> None:
    """Prints lanes per clock of one multiprocessor with 16 warps."""
    loops = "".join(
        f'extern "C" __global__ void r{i}(unsigned long long* out) {{ unsigned x[8];\n'
        "for (int i = 0; i < 8; ++i) x[i] = 0x3f000000u + threadIdx.x + i;\n"
        "__syncthreads(); const long long from = clock64();\n#pragma unroll 1\n"
        "for (int n = 0; n < 256; ++n) {\n#pragma unroll\n"
        f'for (int i = 0; i < 8; ++i) asm volatile("{{ .reg .f32 f; .reg .b16 h; .reg .b32 u;"\n'
        f'"mov.b32 f, %0; {text} mov.b32 %0, f; }}"\n'
        ' : "+r"(x[i]));\n}\n'
        "__syncthreads(); const long long to = clock64(); unsigned s = 0;\n"
        "for (int i = 0; i < 8; ++i) s += x[i];\n"
        "if (s == 12345u) out[1] = 1; if (threadIdx.x == 0) out[0] = to - from; }\n"
        for i, text in enumerate(RATES.values())
    )
    result = nvrtc.compile_many([CompileJob(loops, arch)])[0]
    if not isinstance(result, CompiledCubin):
        print(f"rates: {result}")
        return
    if not torch.cuda.is_available():
        return
    module = Module(result.path)
    out = torch.zeros(2, dtype=torch.int64, device="cuda")
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    found = []
    for i, name in enumerate(RATES):
        function = module.function(f"r{i}")
        for _ in range(2):
            function.launch((1, 1, 1), (512, 1, 1), (out.data_ptr(),), dependent=True, stream=stream.cuda_stream)
            torch.cuda.synchronize()
        found.append(f"{name} {512 * 8 * 256 / int(out[0]):.1f}")
    print("lanes per clock:", ", ".join(found), flush=True)


def exactness(nvrtc: Nvrtc, arch: str) -> None:
    """Prints the worst relative errors of activations of negative sums, beside those of eager in bf16."""
    forms: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor]]] = {
        "silu": ("w_mlp_silu_of_half(0.5f * x)", torch.nn.functional.silu),
        "gelu": ("w_mlp_gelu_of_half(0.5f * x, 0.70710677f)", torch.nn.functional.gelu),
        "gelu, stretched": (
            f"{0.5 / STRETCH}f * w_mlp_gelu_stretched({STRETCH}f * x)",
            torch.nn.functional.gelu,
        ),
        "tanh": ("w_mlp_tanh_bf16(x)", torch.tanh),
    }
    text = prelude() + mlp_header() + prescale_header()
    for i, (form, _) in enumerate(forms.values()):
        text += (
            f'extern "C" __global__ void f{i}(const float* in, float* out) {{'
            f" const int i = blockIdx.x * 256 + threadIdx.x; const float x = in[i]; out[i] = {form}; }}\n"
        )
    result = nvrtc.compile_many([CompileJob(text, arch)])[0]
    if not isinstance(result, CompiledCubin) or not torch.cuda.is_available():
        print(f"exactness: {'compiled' if isinstance(result, CompiledCubin) else result}")
        return
    module = Module(result.path)
    stream = torch.cuda.current_stream().cuda_stream
    for i, (name, (_, function)) in enumerate(forms.items()):
        found = []
        for low in (-8.0, -6.0, -4.0, -3.0, -2.0, -1.0):
            high = {-8.0: -6.0, -6.0: -4.0}.get(low, low + 1.0)
            x = torch.linspace(low, high, 65537, device="cuda")[:65536].contiguous()
            out = torch.empty_like(x)
            module.function(f"f{i}").launch((256, 1, 1), (256, 1, 1), (x.data_ptr(), out.data_ptr()), stream=stream)
            exact = function(x.double())
            own = function(x.bfloat16())
            worst = [float(((y.double() - exact) / exact).abs().max()) for y in (out.bfloat16(), own)]
            found.append(f"{low:.0f}..{high:.0f} {worst[0]:.4f} ({worst[1]:.4f})")
        print(f"worst relative error of {name}, in brackets eager's:", ", ".join(found), flush=True)


def main() -> int:
    """Compile all, then measure; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument("--set", default="offered", choices=SETS, help="which variants")
    parser.add_argument("--seconds", type=float, default=55.0, help="no case is begun after so many")
    parser.add_argument("--in-turns", action="store_true", help="all of a size in turns: clocks and heat are shared")
    parser.add_argument(
        "--behind", action="store_true", help="in turns: each launch is followed by copies of its result"
    )
    parser.add_argument("--dry", action="store_true", help="no GPU: write and compile")
    given = parser.parse_args()
    started = time.perf_counter()
    nvrtc = find_nvrtc()
    if isinstance(nvrtc, Declined):
        print(nvrtc.reason, file=sys.stderr)
        return 2
    facts = GpuFacts()
    if not given.dry:
        torch.zeros(1, device="cuda")
        facts = gpu_facts(None, calibrate=False)
    try:
        rates(nvrtc, facts.arch)
        exactness(nvrtc, facts.arch)
    except WeftError as problem:
        print(f"rates: {problem}")
    if given.in_turns:
        found = [v for v in SETS[given.set](facts) if given.only in v.case.name]
        return in_turns(found, nvrtc, facts, behind=given.behind)
    wanted = [(v, s) for v in SETS[given.set](facts) if given.only in v.case.name and (s := made(v)) is not None]
    results = nvrtc.compile_many([CompileJob(s.text, facts.arch, s.flags) for _, s in wanted])
    print(f"{len(wanted)} kernels compiled after {time.perf_counter() - started:.1f} s", file=sys.stderr)
    relu: dict[tuple[int, int, int], float] = {}
    nets: dict[Case, tuple[list[torch.Tensor], torch.Tensor, float]] = {}
    for (v, source), result in zip(wanted, results, strict=True):
        if not isinstance(result, CompiledCubin):
            print(f"{v.case.name} {v.name}: {str(result).splitlines()[0]}")
            continue
        used = result.of(source.launches[0].entry)
        note = f"{used.registers} registers" + (f" spills {used.spill_stores}" if used.spill_stores else "")
        note += " C75xx" if result.warnings else ""
        if given.dry:
            print(f"{v.case.name:26} {v.name:40} {note}")
            continue
        if time.perf_counter() - started > given.seconds:
            print(f"no time left for {v.case.name} {v.name} and what follows")
            break
        watch = threading.Timer(12.0, lambda what=v: (print("HANGS:", what, flush=True), os._exit(3)))
        watch.daemon = True
        watch.start()
        try:
            inputs, exact, own = nets.get(v.case) or prepared(v.case)
            if v.case not in nets:
                nets.clear()
                nets[v.case] = inputs, exact, own
            out = torch.full_like(inputs[0], math.nan)
            us = Kernel(source, str(result.path)).time(
                inputs, out, launches=launches_for(2 * v.case.floor_us), rounds=ROUNDS
            )
        except (WeftError, RuntimeError) as problem:
            print(f"{v.case.name} {v.name}: {str(problem).splitlines()[0]}")
            continue
        finally:
            watch.cancel()
        error = error_of(out, exact)
        key = (v.case.log_rows, v.case.width, v.case.depth)
        if v.case.act == "relu" and not v.wrong and error < 2 * own:
            relu[key] = min(us, relu.get(key, math.inf))
        verdict = counted(v, out) if "clocks" in v.words else ""
        verdict = verdict if v.wrong else f"error {error:.4f} eager {own:.4f}{'' if error < 1.2 * own else ' WRONG'}"
        share = v.case.floor_us / us
        print(
            f"{v.case.name:26} {v.name:40} {us:8.2f} us share {share:.2f} ratio {us / relu.get(key, math.nan):.2f}"
            f" {note} {verdict}",
            flush=True,
        )
    return 0


def in_turns(wanted: list[Variant], nvrtc: Nvrtc, facts: GpuFacts, *, behind: bool = False) -> int:
    """Replays of the graphs of all variants of a size, one after the other, again and again; returns the exit status.

    A kernel that makes the GPU hot, or has it lower its clock, does so for all. `behind`: copies of the result, and of
    32 MB that nobody else reads, are part of a launch: what a kernel leaves in the L2 cache helps or hinders them.
    """
    made_ = [(v, s) for v in wanted if (s := made(v)) is not None]
    results = nvrtc.compile_many([CompileJob(s.text, facts.arch, s.flags) for _, s in made_])
    ready = [(v, s, r) for (v, s), r in zip(made_, results, strict=True) if isinstance(r, CompiledCubin)]
    for size in dict.fromkeys((v.case.log_rows, v.case.width, v.case.depth) for v, _, _ in ready):
        group = [x for x in ready if (x[0].case.log_rows, x[0].case.width, x[0].case.depth) == size]
        nets = {case: prepared(case) for case in dict.fromkeys(v.case for v, _, _ in group)}
        runs = [Recorded(source, str(result.path), nets[v.case][0], behind=behind) for v, source, result in group]
        spent = [[run.replay() for run in runs] for _ in range(IN_TURNS + 2)][2:]
        times = [statistics.median(of_round[i] for of_round in spent) for i in range(len(runs))]
        base = [i for i, (v, _, _) in enumerate(group) if v.case.act == "relu"]
        best = min(base, key=times.__getitem__) if base else 0
        for i, (v, _, _) in enumerate(group):
            ratio = statistics.median(of_round[i] / of_round[best] for of_round in spent)
            error, own = error_of(runs[i].out, nets[v.case][1]), nets[v.case][2]
            print(
                f"{v.case.name:26} {v.name:40} {times[i]:8.2f} us in turns ratio {ratio:.3f}"
                f" error {error:.4f} eager {own:.4f}{'' if error < 1.2 * own else ' WRONG'}",
                flush=True,
            )
    return 0


class Recorded:
    """A graph of launches of one kernel."""

    def __init__(self, source: CudaSource, path: str, inputs: list[torch.Tensor], *, behind: bool = False) -> None:
        """Record some two milliseconds."""
        self.inputs, self.out = inputs, torch.full_like(inputs[0], math.nan)
        self._packed = [torch.empty(n, dtype=torch.uint8, device="cuda") for n in source.packed_bytes]
        self._bound = BoundCuda(source, path)
        given, places = ([x.data_ptr() for x in tensors] for tensors in (inputs, self._packed))
        self._bound.pack(given, places, torch.cuda.current_stream().cuda_stream)
        torch.cuda.synchronize()
        launch = self._bound.prepare(Addresses(given, [self.out.data_ptr()], places, 0, 0))
        copy = torch.empty_like(self.out)
        other = torch.zeros(2, 4 << 20, dtype=torch.float32, device="cuda")
        self._held = copy, other
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            for _ in range(RECORDED):
                launch(torch.cuda.current_stream().cuda_stream)
                if behind:
                    copy.copy_(self.out)
                    other[0].copy_(other[1])

    def replay(self) -> float:
        """Microseconds of a launch."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        self._graph.replay()
        end.record()
        torch.cuda.synchronize()
        return float(start.elapsed_time(end)) * 1e3 / RECORDED


def prepared(case: Case) -> tuple[list[torch.Tensor], torch.Tensor, float]:
    """Inputs, the exact result of the first rows, and the error of eager."""
    net = network(case, DType.BF16)
    x = torch.randn(case.rows, case.width, device="cuda", dtype=TORCH[DType.BF16])
    layers = [m for m in net if isinstance(m, torch.nn.Linear)]
    inputs = [x, *(t for m in layers for t in (m.weight.detach().t().contiguous(), m.bias.detach()))]
    with torch.no_grad():
        own = net(x[:CHECKED])
        exact = net.double()(x[:CHECKED].double())
    return inputs, exact, error_of(own, exact)


if __name__ == "__main__":
    sys.exit(main())
