"""Convolution, ReLU and what follows (pool, 1x1 convolution) in one kernel against the two best kernels, in f16.

    python -m benchmarks.gpu_pooled [--batch 1,16] [--first K] [--seconds S] [--only TEXT] [--out FILE] [--dry]

The pairs are pools of VGG-16, ResNet-50 and Inception-v3, and ResNet-50's 3x3 and 1x1 with its residual. Fused: each
of the first K schedules. Two kernels: the fastest of the first K of the convolution (alone), or cuDNN's with bias and
ReLU, then the fastest of the second; timed one behind the other in a CUDA graph, so that the second finds in the L2
cache what the first left there. Also torch's own two. Every kernel is compared with float64 on normal data first. A
time is the median over replays of a graph of launches that read copies of the weights in turn, after the L2 cache was
emptied. `--dry` compiles the kernels without a GPU.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from benchmarks.gpu_conv import Bench, Conv, _layer
from benchmarks.harness.kernel_cases import Kernel, Shop, measuring, opened, parser
from benchmarks.harness.left import Left, add_option
from weft.device.cuda.facts import GpuFacts
from weft.fission.pool import max_pool
from weft.generate.bind import Addresses, BoundCuda
from weft.generate.cuda import templates
from weft.generate.cuda.conv.pooled import choose as pooled_choose
from weft.generate.cuda.conv.pooled import match as pooled_match
from weft.generate.cuda.conv.separable import match as separable_match
from weft.generate.cuda.conv.stacked import kernel as stacked
from weft.ir import attrs as a
from weft.ir.declined import Declined
from weft.ir.graph import GraphBuilder
from weft.ir.prims import Prim
from weft.ir.types import DType, TensorType
from weft.kernels.candidate import Problem
from weft.kernels.formats import Format
from weft.kernels.source import Schedule

LAUNCHES = 10
ROTATED_BYTES = 160 << 20
TOLERANCE = 4e-3
"""Of the root mean square: f16 rounds to 5e-4."""
PATIENCE_S = 20
"""A case that takes longer ends the run: a kernel hangs."""
LAST, ROW, F16 = Format.LAST, Format.ROW, DType.F16


class Case(NamedTuple):
    """A convolution, and behind it a pool (size, stride and padding) or a 1x1 convolution to so many channels."""

    conv: Conv
    pool: tuple[int, int, int] | int

    def __str__(self) -> str:
        c = self.conv
        return f"{c.ic}x{c.h} -> {c.oc} {c.kernel[0]}x{c.kernel[0]}/{c.strides[0]}, {self.pool}"

    @property
    def between(self) -> tuple[int, int, int, int]:
        """Shape of the value between."""
        c = self.conv
        size = [(n + 2 * p - k) // s + 1 for n, p, k, s in zip((c.h, c.w), c.pads, c.kernel, c.strides, strict=True)]
        return c.n, c.oc, size[0], size[1]


def cases(batch: int) -> dict[str, Case]:
    """By network."""

    def conv(ic: int, size: int, oc: int, kernel: int = 3, stride: int = 1, pad: int = 1) -> Conv:
        return Conv(batch, ic, size, size, oc, (kernel,) * 2, (stride,) * 2, (pad,) * 2, (1, 1), 1, True, "relu")  # type: ignore[arg-type]

    vgg = [(64, 224, 64), (128, 112, 128), (256, 56, 256), (512, 28, 512), (512, 14, 512)]
    found = {f"vgg16 {i + 1}": Case(conv(*x), (2, 2, 0)) for i, x in enumerate(vgg)}
    found["resnet50 stem"] = Case(conv(3, 224, 64, 7, 2, 3), (3, 2, 1))
    found["inception_v3 1"] = Case(conv(32, 147, 64), (3, 2, 0))
    found["inception_v3 2"] = Case(conv(80, 73, 192, 3, 1, 0), (3, 2, 0))
    found["resnet50 2"] = Case(conv(64, 56, 64), 256)
    found["resnet50 3"] = Case(conv(128, 28, 128), 512)
    return found


def problem_of(case: Case, *, conv: bool, pool: bool) -> Problem:
    """Both, or one of the two."""
    c = case.conv
    b = GraphBuilder()
    y = b.input(TensorType(F16, (c.n, c.ic, c.h, c.w) if conv else case.between))
    formats = [LAST]
    if conv:
        y = _layer(b, y, c, formats)
    if pool and isinstance(case.pool, int):
        w = b.input(TensorType(F16, (case.pool, c.oc, 1, 1)), is_weight=True)
        y = b.add(Prim.CONV, y, w, attrs=a.ConvAttrs((1, 1), (0, 0), (0, 0), (1, 1), 1))
        bias = b.input(TensorType(F16, (case.pool,)), is_weight=True)
        y = b.apply(Prim.ADD, y, b.reshape(bias, (case.pool, 1, 1)))
        y = b.apply(Prim.MAX, b.apply(Prim.ADD, y, b.input(b.type_of(y))), 0.0)
        formats += [ROW, ROW, LAST]
    elif pool and isinstance(case.pool, tuple):
        k, s, p = case.pool
        found = max_pool(b, y, kernel=(k, k), strides=(s, s), pads_lo=(p, p), pads_hi=(p, p))
        assert not isinstance(found, Declined), found.reason
        y = found
    graph = b.build([y])
    return Problem(graph, f"{graph} {case}", tuple(formats), (LAST,))


def _fused(problem: Problem, facts: GpuFacts) -> Sequence[Schedule] | Declined:
    if templates.has_window(problem):
        pool = pooled_match.pooled(problem)
        found = pool if isinstance(pool, Declined) else pooled_choose.shapes(pool, facts)
        return found if isinstance(found, Declined) else [s.schedule() for _, s in found]
    pair = separable_match.stacked(problem)
    shapes = pair if isinstance(pair, Declined) else stacked.shapes(pair, facts)
    return shapes if isinstance(shapes, Declined) else [s.schedule() for _, s in shapes]


Launches = list[Callable[[], object]]


class Data:
    """Operands of a case on the device, and its result in float64 of the first and the last image."""

    def __init__(self, case: Case) -> None:
        c, self.case = case.conv, case
        generator = torch.Generator(device="cuda").manual_seed(7)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device="cuda")

        self.x = normal(c.n, c.ic, c.h, c.w).half().contiguous(memory_format=torch.channels_last)
        self.w = (normal(c.oc, c.ic, *c.kernel) * (c.ic * math.prod(c.kernel)) ** -0.5).half()
        self.bias = (normal(c.oc) - 1).half()
        self.some = sorted({0, c.n - 1})
        with torch.backends.cudnn.flags(enabled=False):  # it would try each of its slow algorithms of float64
            y = F.conv2d(self.x[self.some].double(), self.w.double(), self.bias.double(), c.strides, c.pads)
        self.between = F.relu(y)
        self.second: list[torch.Tensor] = []
        if isinstance(case.pool, int):
            w = (normal(case.pool, c.oc, 1, 1) * c.oc**-0.5).half()
            residual = normal(c.n, case.pool, *case.between[2:]).half().contiguous(memory_format=torch.channels_last)
            self.second = [w, normal(case.pool).half(), residual]
            with torch.backends.cudnn.flags(enabled=False):
                y = F.conv2d(self.between, w.double(), self.second[1].double())
            self.exact = F.relu(y + residual[self.some].double())
        else:
            self.exact = F.max_pool2d(self.between, *case.pool)
        self.copies = max(1, min(LAUNCHES, ROTATED_BYTES // self.w.nbytes))

    def error(self, y: torch.Tensor, exact: torch.Tensor) -> float:
        """Root mean square of the difference over that of the exact result."""
        return float((y[self.some].double() - exact).square().mean().sqrt() / exact.square().mean().sqrt())

    def empty(self, exact: torch.Tensor) -> torch.Tensor:
        """A result, poisoned."""
        shape = (self.case.conv.n, *exact.shape[1:])
        return torch.full(shape, math.nan, dtype=torch.half, device="cuda").contiguous(
            memory_format=torch.channels_last
        )

    def bound(self, k: Kernel, inputs: list[torch.Tensor], out: torch.Tensor) -> Launches:
        """Launches that read copies of the packed weights in turn."""
        s = k.source
        bound = BoundCuda(s, k.cubin.path)
        at = [x.data_ptr() for x in inputs]
        stream = torch.cuda.current_stream().cuda_stream
        work = torch.empty(max(s.workspace_bytes, 1), dtype=torch.uint8, device="cuda")
        state = torch.zeros(max(s.state_bytes, 1), dtype=torch.uint8, device="cuda")
        ready = []
        for _ in range(self.copies if s.packed_bytes else 1):
            packed = [torch.empty(n, dtype=torch.uint8, device="cuda") for n in s.packed_bytes]
            if packed:
                bound.pack([0, *at[1:]], [x.data_ptr() for x in packed], stream)
            ready.append(
                (
                    bound.prepare(
                        Addresses(
                            at, [out.data_ptr()], [x.data_ptr() for x in packed], work.data_ptr(), state.data_ptr()
                        )
                    ),
                    (packed, inputs, out, work, state),
                )
            )
        return [
            lambda i=i: ready[i % len(ready)][0](torch.cuda.current_stream().cuda_stream)  # type: ignore[misc]
            for i in range(LAUNCHES)
        ]


def best(
    bench: Bench, data: Data, kernels: Iterable[Kernel], inputs: list[torch.Tensor], exact: torch.Tensor
) -> tuple[float, Kernel | None, list[str]]:
    """The fastest right kernel, and what each took."""
    found: tuple[float, Kernel | None] = (math.inf, None)
    tried = []
    for k in kernels:
        out = data.empty(exact)
        launches = data.bound(k, inputs, out)
        launches[0]()
        torch.cuda.synchronize()
        wrong = data.error(out, exact)
        if not wrong <= TOLERANCE:
            tried.append(f"WRONG {wrong:.3g} {k.source.schedule}")
            continue
        us = bench.median_us(launches)
        tried.append(f"{us:.2f} {k.source.schedule}")
        if us < found[0]:
            found = us, k
    return *found, tried


def measured(bench: Bench, case: Case, kernels: dict[str, list[Kernel]]) -> dict[str, object]:
    """One case: microseconds of each way."""
    data = Data(case)
    c = case.conv
    operands = [data.x, data.w, data.bias]
    fused_us, fused, tried = best(bench, data, kernels["fused"], operands + data.second, data.exact)
    conv_us, conv, tried_conv = best(bench, data, kernels["conv"], operands, data.between)
    copies = [data.w.contiguous(memory_format=torch.channels_last).clone() for _ in range(data.copies)]

    def cudnn(i: int) -> torch.Tensor:
        w = copies[i % len(copies)]
        return torch.cudnn_convolution_relu(data.x, w, data.bias, c.strides, c.pads, c.dilations, 1)

    middle = data.empty(data.between)
    middle.copy_(cudnn(0))
    pool_us, pool, tried_pool = best(bench, data, kernels["pool"], [middle, *data.second], data.exact)

    def after(x: torch.Tensor) -> torch.Tensor:
        if isinstance(case.pool, tuple):
            return F.max_pool2d(x, *case.pool)
        w, bias, residual = data.second
        one = ((1, 1), (0, 0), (1, 1))
        return torch.cudnn_convolution_add_relu(x, w, residual, 1.0, bias, *one, 1)

    ways: dict[str, Launches] = {"torch": [lambda i=i: after(cudnn(i)) for i in range(LAUNCHES)]}  # type: ignore[misc]
    if pool is not None:
        out = data.empty(data.exact)
        behind = data.bound(pool, [middle, *data.second], out)

        def mixed(i: int) -> None:
            result = cudnn(i)
            behind[i]()
            del result

        ways["cudnn + pool"] = [lambda i=i: mixed(i) for i in range(LAUNCHES)]  # type: ignore[misc]
        if conv is not None:
            own = data.bound(conv, operands, middle)
            ways["two"] = [x for pair in zip(own, behind, strict=True) for x in pair]
    for launches in ways.values():
        launches[0]()
    times = {k: bench.median_us(v) * (2 if k == "two" else 1) for k, v in ways.items()}
    two = min((v for k, v in times.items() if k != "torch"), default=math.inf)
    return {
        "case": str(case), "batch": c.n, "fused_us": fused_us, "conv_us": conv_us, "pool_us": pool_us,
        **{f"{k}_us": v for k, v in times.items()}, "saved": two / fused_us,
        "fused": str(fused.source.schedule) if fused else None, "conv": str(conv.source.schedule) if conv else None,
        "pool": str(pool.source.schedule) if pool else None,
        "tried": tried, "tried_conv": tried_conv, "tried_pool": tried_pool,
    }  # fmt: skip


PARTS = {"fused": (True, True), "conv": (True, False), "pool": (False, True)}
"""Whether a problem holds the convolution, and what is behind it."""


def prepared(shop: Shop, case: Case) -> dict[str, list[Kernel]]:
    """Kernels of a case; fused ones also where the model would have two."""
    found = {}
    for name, (conv, pool) in PARTS.items():
        problem = problem_of(case, conv=conv, pool=pool)
        first = shop.first if conv or isinstance(case.pool, int) else 3
        if name == "fused":
            found[name] = shop.of_schedules(problem, _fused(problem, shop.facts), first)
        else:
            found[name] = shop.kernels(problem, first)
    return found


def main() -> int:
    """Run; 0 when every kernel was right."""
    options = parser(__doc__, first=6, seconds=50.0, threads=14)
    options.add_argument("--batch", default="1,16")
    add_option(options)
    args = options.parse_args()
    shop = opened(args)
    batches = map(int, args.batch.split(","))
    work = [(name, case) for batch in batches for name, case in cases(batch).items() if shop.wants(name)]
    if args.dry:
        for name, case in work:
            print(name, case.conv.n, {k: len(v) for k, v in prepared(shop, case).items()}, flush=True)
        return 0
    torch.backends.cudnn.benchmark = True
    torch.zeros(1, device="cuda")
    bench, bad = Bench(), False
    head = f"{'':16}{'batch':>6}{'fused':>9}{'two':>9}{'conv':>9}{'pool':>8}{'cudnn+p':>9}{'torch':>9}{'saved':>7}"
    print(head, flush=True)
    record = shop.record("pooled", "name", "batch")
    left = Left(record, shop.end, only=args.left)
    work = [(name, case) for name, case in work if not left.known(name=name, batch=case.conv.n)]
    given: set[tuple[str, int]] = set()
    with torch.inference_mode():
        made = shop.in_turn(work, lambda item: prepared(shop, item[1]), ahead=2, patience_s=PATIENCE_S)
        for (name, case), kernels in made:
            at = {"name": name, "batch": case.conv.n}
            given.add((name, case.conv.n))
            with measuring(record, **at):
                line = measured(bench, case, kernels)
                bad |= shown(name, case.conv.n, line)
                if record is not None:
                    record.add({"record": "case", "suite": "pooled", **line, **at})
    for name, case in work:
        if (name, case.conv.n) not in given:
            left.put_off(f"{name}, batch {case.conv.n}")
    return left.status(bad or (record is not None and bool(record.failed)))


def shown(name: str, batch: int, line: Mapping[str, Any]) -> bool:
    """Print a case; whether a kernel was wrong."""
    wrong = [x for x in (*line["tried"], *line["tried_conv"], *line["tried_pool"]) if x.startswith("WRONG")]
    keys = ("fused_us", "two_us", "conv_us", "pool_us", "cudnn + pool_us", "torch_us")
    numbers = "".join(f"{line.get(k, math.nan):{w}.2f}" for k, w in zip(keys, (9, 9, 9, 8, 9, 9), strict=True))
    print(f"{name:16}{batch:6}{numbers}{line['saved']:7.2f}  {line['fused']}", flush=True)
    print(f"    conv {line['conv']}; fused in order {[x.split()[0] for x in line['tried']]}", flush=True)
    for x in wrong:
        print(f"    {x}", flush=True)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
