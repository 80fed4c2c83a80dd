"""Products of different sizes in one launch against one after another and on parallel branches; heads apart. f16.

    python -m benchmarks.gpu_grouped [--batch 1,16] [--first K] [--seconds S] [--only TEXT] [--out FILE] [--dry]

Groups: branches of Inception-v3's modules, the four heads of SegFormer's decoder, eight experts with uneven rows, q
with k and v of another length, the heads of three scales of a detector. `row`: the fastest of the first K kernels of
each member (alone), one after another; `parallel`: the same kernels on branches of the graph; `one`: the fastest
grouped kernel. Heads: q, k and v of one operand: `merged`: one product, and attention that reads views of its result;
`split`: its columns stored as three results; `heads`: heads apart, too; and attention of these. Every kernel is
compared with float64 on normal data first. A time is the median over replays of a graph of rounds that read copies of
the weights in turn, after the L2 cache was emptied. `--dry` compiles the kernels without a GPU.
"""

from __future__ import annotations

import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, cast

import torch
from torch.nn import functional as F

from benchmarks.gpu_conv import Bench
from benchmarks.harness.kernel_cases import Shop, measuring, opened, parser
from benchmarks.harness.left import Left, add_option
from weft.device.cuda.nvrtc import CompiledCubin
from weft.fission.sdpa import sdpa
from weft.generate.bind import Addresses, BoundCuda
from weft.generate.cuda import templates
from weft.generate.cuda.gemm.grouped import kernel as grouped
from weft.generate.cuda.gemm.grouped import tma as grouped_tma
from weft.generate.cuda.predict import predicted_us
from weft.ir import attrs as a
from weft.ir.declined import Declined
from weft.ir.graph import GraphBuilder, NodeId
from weft.ir.prims import Prim
from weft.ir.types import DType, TensorType
from weft.kernels.candidate import Problem
from weft.kernels.formats import Format
from weft.kernels.source import CudaSource, Schedule

ROUNDS = 10
ROTATED_BYTES = 160 << 20
TOLERANCE = 4e-3
"""Of the root mean square: f16 rounds to 5e-4."""
PATIENCE_S = 25
"""A case that takes longer has hung: the program begins anew behind it."""
LAST, ROW, F16 = Format.LAST, Format.ROW, DType.F16
Launch = Callable[[], object]


class Linear(NamedTuple):
    """act(x @ w + b): (m, k) by (k, n)."""

    m: int
    n: int
    k: int
    act: str = ""


class Conv(NamedTuple):
    """relu(conv(x) + b) with the size of x, or half of it."""

    n: int
    c: int
    h: int
    oc: int
    kh: int
    kw: int


Layer = Linear | Conv


def groups(batch: int) -> dict[str, list[Layer]]:
    """By name."""
    n = batch
    sizes = ((16384, 32), (4096, 64), (1024, 160), (256, 256))
    rows = (3, 17, 40, 64, 100, 128, 260, 412)
    return {
        "inception 35 1x1": [Conv(n, 192, 35, oc, 1, 1) for oc in (64, 48, 64, 32)],
        "inception 35": [Conv(n, 48, 35, 64, 5, 5), Conv(n, 64, 35, 96, 3, 3)],
        "inception 35 pool": [Conv(n, 48, 35, 64, 5, 5), Conv(n, 64, 35, 96, 3, 3), Conv(n, 192, 35, 32, 1, 1)],
        "inception 17": [Conv(n, 128, 17, 128, 1, 7), Conv(n, 128, 17, 128, 7, 1)],
        "inception 17 pool": [Conv(n, 160, 17, 160, 1, 7), Conv(n, 160, 17, 160, 7, 1), Conv(n, 768, 17, 192, 1, 1)],
        "inception 8": [Conv(n, 384, 8, 384, *k) for k in ((1, 3), (3, 1), (1, 3), (3, 1))],
        "segformer decoder": [Linear(n * m, 256, k) for m, k in sizes],
        "q beside k, v": [Linear(n * 1024, 160, 160), Linear(n * 256, 320, 160)],
        "experts up": [Linear(m * (4 if n > 1 else 1), 2048, 512, "relu") for m in rows],
        "experts down": [Linear(m * (4 if n > 1 else 1), 512, 2048) for m in rows],
        "detector heads": [Conv(n, 128, h, 128, 3, 3) for h in (52, 26, 13)],
    }


class Heads(NamedTuple):
    """Attention over heads of (batch * rows, k) @ (k, 3 * heads * size)."""

    name: str
    batch: int
    rows: int
    heads: int
    size: int

    @property
    def k(self) -> int:
        """Columns of each of the three."""
        return self.heads * self.size


def attentions(batch: int) -> list[Heads]:
    """Of networks."""
    return [
        Heads("bert", batch, 128, 12, 64),
        Heads("vit", batch, 197, 12, 64),
        Heads("bert 512", batch, 512, 12, 64),
        Heads("segformer 4", batch, 256, 8, 32),
    ]


# ---- problems


@dataclass(slots=True)
class _Made:
    b: GraphBuilder = field(default_factory=GraphBuilder)
    formats: list[Format] = field(default_factory=list)

    def input(self, *shape: int, weight: bool = False, form: Format = ROW) -> NodeId:
        self.formats.append(form)
        return self.b.input(TensorType(F16, shape), is_weight=weight)

    def problem(self, outputs: Sequence[NodeId], name: str) -> Problem:
        graph = self.b.build(outputs)
        outs = tuple(LAST if LAST in self.formats and graph.type_of(o).rank == 4 else ROW for o in outputs)
        return Problem(graph, f"{graph} {name}", tuple(self.formats), outs)


def problem_of(layers: Sequence[Layer]) -> Problem:
    """All of them: per layer its input, weight and bias, in that order."""
    made = _Made()
    b, found = made.b, []
    for layer in layers:
        if isinstance(layer, Linear):
            x, w = made.input(layer.m, layer.k), made.input(layer.k, layer.n, weight=True)
            y = b.apply(Prim.ADD, b.add(Prim.MATMUL, x, w), made.input(layer.n, weight=True))
            found.append(b.apply(Prim.MAX, y, 0.0) if layer.act else y)
        else:
            c = layer
            x, w = made.input(c.n, c.c, c.h, c.h, form=LAST), made.input(c.oc, c.c, c.kh, c.kw, weight=True)
            pads = (c.kh // 2, c.kw // 2)
            y = b.add(Prim.CONV, x, w, attrs=a.ConvAttrs((1, 1), pads, pads, (1, 1), 1))
            y = b.apply(Prim.ADD, y, b.reshape(made.input(c.oc, weight=True), (c.oc, 1, 1)))
            found.append(b.apply(Prim.MAX, y, 0.0))
    return made.problem(found, "group")


def heads_problem(h: Heads, way: str) -> Problem:
    """`merged`: the product; `split`: its columns as three results; `heads`: heads of these, apart."""
    made = _Made()
    b, rows = made.b, h.batch * h.rows
    x, w = made.input(rows, h.k), made.input(h.k, 3 * h.k, weight=True)
    y = b.apply(Prim.ADD, b.add(Prim.MATMUL, x, w), made.input(3 * h.k, weight=True))
    if way == "merged":
        return made.problem([y], way)
    parts = [b.slice(y, (0, i * h.k), (rows, h.k), (1, 1)) for i in range(3)]
    if way == "heads":
        parts = [b.transpose(b.reshape(p, (h.batch, h.rows, h.heads, h.size)), (0, 2, 1, 3)) for p in parts]
    return made.problem(parts, way)


def attention_problem(h: Heads, way: str) -> Problem:
    """Attention that reads what `heads_problem` of that way stores."""
    made = _Made()
    b, rows = made.b, h.batch * h.rows
    if way == "heads":
        q, k, v = (made.input(h.batch, h.heads, h.rows, h.size) for _ in range(3))
    else:
        if way == "merged":
            x = made.input(rows, 3 * h.k)
            parts = [b.slice(x, (0, i * h.k), (rows, h.k), (1, 1)) for i in range(3)]
        else:
            parts = [made.input(rows, h.k) for _ in range(3)]
        shape = (h.batch, h.rows, h.heads, h.size)
        q, k, v = (b.transpose(b.reshape(p, shape), (0, 2, 1, 3)) for p in parts)
    y = cast("NodeId", sdpa(b, q, k, v))
    return made.problem([b.transpose(y, (0, 2, 1, 3))], f"attention {way}")


# ---- kernels


@dataclass(frozen=True, slots=True)
class Modelled:
    """A compiled schedule of a problem, and what the models give it."""

    source: CudaSource
    cubin: CompiledCubin
    us: float

    @property
    def name(self) -> str:
        """Its shape in a few words."""
        p = dict(self.source.schedule.params)
        keys = ("bm", "bn", "split", "splits", "cluster", "persistent_ctas", "stages", "wk")
        return f"{p.get('template')} " + " ".join(f"{k}={p[k]}".replace(" ", "") for k in keys if k in p)


def kernels_of(shop: Shop, problem: Problem, *, one: bool = False) -> list[Modelled]:
    """The first kernels; of a group both kinds, also where several kernels are modelled to be faster."""
    both = 2 * shop.first
    found = shop.of_schedules(problem, _of_group(problem, shop), both) if one else shop.kernels(problem)
    modelled = (predicted_us(problem, k.source.schedule, shop.facts) for k in found)
    return [Modelled(k.source, k.cubin, us or math.nan) for k, us in zip(found, modelled, strict=True)]


def _of_group(problem: Problem, shop: Shop) -> list[Schedule] | Declined:
    every = grouped.matched(problem, tf32=False)
    if isinstance(every, Declined):
        return every
    found = [s.schedule() for _, s in grouped.shapes(every, shop.facts)[: shop.first]]
    return found + [s.schedule() for _, s in grouped_tma.shapes(every, shop.facts)[: shop.first]]


@dataclass(slots=True)
class Bound:
    """A kernel on its data, with copies of the repacked weights that are read in turn."""

    kernel: Modelled
    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]
    weights: Sequence[int]
    """Inputs that are constant."""
    ready: list[list[Callable[[int], None]]] = field(default_factory=list)
    """Per copy: launched while its predecessor runs, and launched behind it."""
    kept: list[object] = field(default_factory=list)

    def __post_init__(self) -> None:
        s = self.kernel.source
        bound = BoundCuda(s, self.kernel.cubin.path)
        at = [x.data_ptr() for x in self.inputs]
        stream = torch.cuda.current_stream().cuda_stream
        work = torch.empty(max(s.workspace_bytes, 1), dtype=torch.uint8, device="cuda")
        state = torch.zeros(max(s.state_bytes, 1), dtype=torch.uint8, device="cuda")
        size = sum(s.packed_bytes)
        for _ in range(max(1, min(ROUNDS, ROTATED_BYTES // size)) if size else 1):
            packed = [torch.empty(n, dtype=torch.uint8, device="cuda") for n in s.packed_bytes]
            places = [x.data_ptr() for x in packed]
            if packed:
                bound.pack([x if i in self.weights else 0 for i, x in enumerate(at)], places, stream)
            given = Addresses(at, [x.data_ptr() for x in self.outputs], places, work.data_ptr(), state.data_ptr())
            self.ready.append([bound.prepare(given, dependent=d) for d in (True, False)])
            self.kept.append(packed)
        self.kept += [bound, work, state]

    def launch(self, turn: int, *, dependent: bool = True) -> None:
        """On the current stream."""
        self.ready[turn % len(self.ready)][not dependent](torch.cuda.current_stream().cuda_stream)


def error_of(got: torch.Tensor, exact: torch.Tensor) -> float:
    """Root mean square of the difference over that of the exact result; infinite where something is not finite."""
    found = float((got.double() - exact).square().mean().sqrt() / exact.square().mean().sqrt())
    return found if math.isfinite(found) else math.inf


def best(
    bench: Bench,
    kernels: Sequence[Modelled],
    inputs: list[torch.Tensor],
    weights: Sequence[int],
    exact: list[torch.Tensor],
) -> tuple[float, Bound | None, list[str]]:
    """The fastest right kernel, and what each took."""
    found: tuple[float, Bound | None] = (math.inf, None)
    tried = []
    for k in kernels:
        outs = [torch.full_like(x, math.nan, dtype=torch.half) for x in exact]
        bound = Bound(k, inputs, outs, weights)
        bound.launch(0)
        torch.cuda.synchronize()
        wrong = max(error_of(y, x) for y, x in zip(outs, exact, strict=True))
        if not wrong <= TOLERANCE:
            tried.append(f"WRONG {wrong:.3g} {k.source.schedule}")
            continue
        us = bench.median_us([lambda i=i, k=bound: k.launch(i) for i in range(ROUNDS)])  # type: ignore[misc]
        tried.append(f"{us:.2f} ({k.us:.1f}) {k.name}")
        if us < found[0]:
            found = us, bound
    return *found, tried


def together_us(bench: Bench, every: Sequence[Bound]) -> tuple[float, float]:
    """Microseconds of kernels one after another, and of each on a branch of its own."""
    row = bench.median_us([lambda i=i, k=k: k.launch(i) for i in range(ROUNDS) for k in every])  # type: ignore[misc]
    streams = [torch.cuda.Stream() for _ in every[1:]]

    def branches(i: int) -> None:
        here = torch.cuda.current_stream()
        for s in streams:
            s.wait_stream(here)
        every[0].launch(i, dependent=False)
        for s, k in zip(streams, every[1:], strict=True):
            with torch.cuda.stream(s):
                k.launch(i, dependent=False)
        for s in streams:
            here.wait_stream(s)

    return row * len(every), bench.median_us([lambda i=i: branches(i) for i in range(ROUNDS)])  # type: ignore[misc]


# ---- cases


def normal(generator: torch.Generator, *shape: int, scale: float = 1.0) -> torch.Tensor:
    """Normal numbers in f16."""
    return (torch.randn(shape, generator=generator, device="cuda") * scale).half()


def operands(layers: Sequence[Layer]) -> tuple[list[list[torch.Tensor]], list[torch.Tensor]]:
    """Per layer its operands, and exact results."""
    g = torch.Generator(device="cuda").manual_seed(7)
    given, exact = [], []
    for layer in layers:
        if isinstance(layer, Linear):
            x, w = normal(g, layer.m, layer.k), normal(g, layer.k, layer.n, scale=layer.k**-0.5)
            bias = normal(g, layer.n)
            y = x.double() @ w.double() + bias.double()
            y = y.relu() if layer.act else y
        else:
            c = layer
            x = normal(g, c.n, c.c, c.h, c.h).contiguous(memory_format=torch.channels_last)
            w, bias = normal(g, c.oc, c.c, c.kh, c.kw, scale=(c.c * c.kh * c.kw) ** -0.5), normal(g, c.oc)
            with torch.backends.cudnn.flags(enabled=False):  # it would try each of its slow algorithms of float64
                y = F.conv2d(x.double(), w.double(), bias.double(), padding=(c.kh // 2, c.kw // 2)).relu()
            y = y.contiguous(memory_format=torch.channels_last)
        given.append([x, w, bias])
        exact.append(y)
    return given, exact


@dataclass(slots=True)
class Group:
    """A group's kernels."""

    name: str
    batch: int
    layers: list[Layer]
    offered: bool
    alone: list[list[Modelled]]
    one: list[Modelled]

    @staticmethod
    def of(shop: Shop, name: str, batch: int, layers: list[Layer]) -> Group:
        """Written and compiled."""
        problem = problem_of(layers)
        offered = not isinstance(templates.schedules(problem, shop.facts), Declined)
        kinds = {layer: kernels_of(shop, problem_of([layer])) for layer in dict.fromkeys(layers)}
        return Group(name, batch, layers, offered, [kinds[x] for x in layers], kernels_of(shop, problem, one=True))

    def measured(self, bench: Bench) -> dict[str, object]:
        """Microseconds of each way."""
        given, exact = operands(self.layers)
        members, each = [], []
        for kernels, own, y in zip(self.alone, given, exact, strict=True):
            us, bound, tried = best(bench, kernels, own, (1, 2), [y])
            each.append(us)
            if bound is None:
                return {"wrong": tried}
            members.append(bound)
        row, parallel = together_us(bench, members)
        weights = [i for i in range(3 * len(given)) if i % 3]
        one, bound, tried = best(bench, self.one, [x for own in given for x in own], weights, exact)
        print(
            f"{self.name:18}{self.batch:4}{sum(each):9.2f}{row:9.2f}{parallel:9.2f}{one:9.2f}"
            f"{row / one:7.2f}{parallel / one:7.2f}  {'offered' if self.offered else 'declined':9}"
            f"{bound.kernel.name[:100] if bound else ''}",
            flush=True,
        )
        print("    " + "; ".join(x[:44] for x in tried), flush=True)
        return {
            "each_us": each, "row_us": row, "parallel_us": parallel, "one_us": one, "offered": self.offered,
            "one": str(bound.kernel.source.schedule) if bound else None, "tried": tried,
            "alone": [str(m.kernel.source.schedule) for m in members],
        }  # fmt: skip


WAYS = ("merged", "split", "heads")


@dataclass(slots=True)
class Attention:
    """The kernels of products and attention."""

    heads: Heads
    products: dict[str, list[Modelled]]
    attentions: dict[str, list[Modelled]]

    @staticmethod
    def of(shop: Shop, h: Heads) -> Attention:
        """Written and compiled."""
        products = {w: kernels_of(shop, heads_problem(h, w), one=w != "merged") for w in WAYS}
        return Attention(h, products, {w: kernels_of(shop, attention_problem(h, w)) for w in WAYS})

    def measured(self, bench: Bench) -> dict[str, object]:
        """Microseconds of each way: the product, attention, and both one behind the other."""
        h, g = self.heads, torch.Generator(device="cuda").manual_seed(7)
        x, w = normal(g, h.batch * h.rows, h.k), normal(g, h.k, 3 * h.k, scale=h.k**-0.5)
        bias = normal(g, 3 * h.k)
        exact = x.double() @ w.double() + bias.double()
        parts = list(exact.split(h.k, 1))
        apart = [p.reshape(h.batch, h.rows, h.heads, h.size).transpose(1, 2).contiguous() for p in parts]
        weights = torch.softmax(apart[0] @ apart[1].transpose(-1, -2) * h.size**-0.5, -1)
        result = (weights @ apart[2]).transpose(1, 2).contiguous()
        stored = {"merged": [exact], "split": [p.contiguous() for p in parts], "heads": apart}
        line: dict[str, object] = {}
        numbers = ""
        for way in WAYS:
            first_us, first, tried = best(bench, self.products[way], [x, w, bias], (1, 2), stored[way])
            if first is None:
                line[way] = {"wrong": tried}
                print(f"    {way}: {tried}", flush=True)
                continue
            first.launch(0)
            second_us, second, tried2 = best(bench, self.attentions[way], first.outputs, (), [result])
            if second is None:
                line[way] = {"wrong": tried2}
                print(f"    {way}: {tried2}", flush=True)
                continue
            chain = [lambda i=i, k=k: k.launch(i) for i in range(ROUNDS) for k in (first, second)]  # type: ignore[misc]
            both = 2 * bench.median_us(chain)
            line[way] = {
                "product_us": first_us, "attention_us": second_us, "both_us": both, "tried": [*tried, *tried2],
                "product": str(first.kernel.source.schedule), "attention": str(second.kernel.source.schedule),
            }  # fmt: skip
            numbers += f" | {way} {first_us:.2f} + {second_us:.2f} = {both:.2f} ({first.kernel.name[:24]})"
        print(f"{h.name:12}{h.batch:4}{numbers}", flush=True)
        return line


Case = Callable[[Shop], Group | Attention]


def cases(batches: Sequence[int], shop: Shop) -> list[tuple[str, Case]]:
    """In the order in which they are measured."""
    found: list[tuple[str, Case]] = []
    for n in batches:
        for name, layers in groups(n).items():
            found.append((f"{name} b{n}", lambda shop, name=name, n=n, x=layers: Group.of(shop, name, n, x)))  # type: ignore[misc]
        found += [(f"heads {h.name} b{n}", lambda shop, h=h: Attention.of(shop, h)) for h in attentions(n)]  # type: ignore[misc]
    return [x for x in found if shop.wants(x[0])]


class Watch:
    """Begins the program anew behind a case that does not end."""

    def __init__(self) -> None:
        self.case, self.since = -1, math.inf
        threading.Thread(target=self._look, daemon=True).start()

    def _look(self) -> None:
        while True:
            time.sleep(0.5)
            if time.monotonic() - self.since > PATIENCE_S:
                print(f"HANGS: case {self.case}, left out", flush=True)
                kept = [x for x in sys.argv[1:] if not x.startswith("--begin=")]
                command = [sys.executable, "-m", "benchmarks.gpu_grouped", *kept, f"--begin={self.case + 1}"]
                os.execv(sys.executable, command)


def main() -> int:
    """Run; 0 when every kernel was right."""
    options = parser(__doc__, first=3, seconds=75.0, threads=14)
    options.add_argument("--batch", default="1,16")
    options.add_argument("--begin", type=int, default=0, help="number of the first case (0)")
    add_option(options)
    args = options.parse_args()
    shop = opened(args)
    work = cases([int(x) for x in args.batch.split(",")], shop)[args.begin :]
    if args.dry:
        return dry(shop, work)
    bench, watch, bad = Bench(), Watch(), False
    print(f"{'group':18}{'n':>4}{'alone':>9}{'row':>9}{'parallel':>9}{'one':>9}{'x row':>7}{'x par':>7}  model")
    record = shop.record("grouped", "name")
    left = Left(record, shop.end, only=args.left)
    begun = set[str]()
    with torch.inference_mode():
        numbered = [(i, x) for i, x in enumerate(work, args.begin) if not left.known(name=x[0])]
        for (number, (name, _)), made in shop.in_turn(numbered, lambda x: x[1][1](shop), ahead=2):
            watch.case, watch.since = number, time.monotonic()
            begun.add(name)
            with measuring(record, name=name):
                line = {"record": "case", "suite": "grouped", "name": name, **made.measured(bench)}
                wrong = [x[:200] for x in json.dumps(line).split('"') if "WRONG" in x]
                bad |= bool(wrong)
                if wrong:
                    print(f"    WRONG in {name}: {'; '.join(wrong)}", flush=True)
                if record is not None:
                    record.add(line)
            watch.since = math.inf
    for _, (name, _) in numbered:
        if name not in begun:
            left.put_off(name)
    return left.status(bad or (record is not None and bool(record.failed)))


def dry(shop: Shop, work: Sequence[tuple[str, Case]]) -> int:
    """Compile all."""
    for name, make in work:
        started = time.perf_counter()
        made = make(shop)
        if isinstance(made, Group):
            counts = f"{[len(x) for x in made.alone]} {len(made.one)} {made.offered}"
        else:
            counts = f"{[len(x) for x in made.products.values()]} {[len(x) for x in made.attentions.values()]}"
        print(f"{name:28} {counts} {time.perf_counter() - started:.1f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
