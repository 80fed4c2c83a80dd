"""Kernels and library calls for one product against each other: CUDA graphs of equal launches, in interleaved rounds.

* Operands are random and normal; the right one is scaled so that results have unit variance.
* Every launch of a graph works on another set of operands and results. Sets repeat only after three times the L2
  cache, so that nothing is found there; a graph lasts at least `SAMPLE_US`, and goes through all sets.
* Every contender is verified on the first set against float64 before it is timed, and again afterwards: bit by bit.
* All are timed in `SCREENING` rounds of random order, the best `KEEP` of each side in `ROUNDS` more; medians count.

Source: the protocol of `weft.tune.cuda_timing`, with everything rotating. It runs in the benchmark's own process, which
may die of it: what users get is measured in workers.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

import torch

from weft.device.cuda.cublaslt import WORKSPACE_BYTES, CublasLt, LtAddresses, LtProduct
from weft.errors import WeftError
from weft.gemm.epilogue import Epilogue
from weft.gemm.library import IN_PLACE, torch_value
from weft.gemm.spec import Gemm
from weft.generate.bind import Addresses, BoundCuda
from weft.generate.library.execute import TORCH_DTYPE
from weft.ir.types import DType
from weft.kernels.source import CudaSource

Launch = Callable[[int], None]
DEVICE = "cuda"
"""Where tensors are made: the current GPU."""
SAMPLE_US = 200.0
SCREENING, ROUNDS, KEEP = 3, 7, 3
MOST_SETS = 128
L2_SHARE = 3
"""Times the L2 cache that all sets are together, at least."""
LIMITS = {DType.F16: 1e-3, DType.BF16: 6e-3, DType.F32: 2e-5}
"""Error of a result, root of the mean square over that of the exact result."""
TF32_LIMIT = 2e-3


@dataclass(slots=True)
class Contender:
    """One way to compute the product."""

    side: str
    """`weft` or `library`."""
    name: str
    launches: Sequence[Launch]
    """One per set; each puts the product of that set on a stream."""
    kept: object = None
    """What must live as long as it is launched."""
    samples_us: list[float] = field(default_factory=list)
    error: float = math.nan
    """Root of the mean square over that of the exact result."""
    refused: str = ""
    """Why it was not timed, or does not count."""

    @property
    def median_us(self) -> float:
        """Of the samples; infinite without any."""
        return statistics.median(self.samples_us) if self.samples_us and not self.refused else math.inf


def _rounded(x: torch.Tensor, kind: DType) -> torch.Tensor:
    """Normal numbers as a type has them; bytes are 32 times as large, and clipped."""
    return ((x * 32).round().clamp(-128, 127) if kind.is_integer else x).to(TORCH_DTYPE[kind])


@final
class Race:
    """Operands of one product on the current GPU, and those who compute it."""

    def __init__(self, g: Gemm, l2_bytes: int, *, seed: int = 0, tf32: bool = False) -> None:
        self.gemm, self._seed = g, seed
        self.contenders: list[Contender] = []
        self._limit = TF32_LIMIT if tf32 and g.dtype is DType.F32 else LIMITS[g.out]
        chance = torch.Generator(DEVICE).manual_seed(seed)
        bytes_ = g.m * g.n * g.out.itemsize
        bytes_ += sum(math.prod(s) * t.itemsize for s, t in zip(g.shapes, g.dtypes, strict=True))
        count = max(1, min(MOST_SETS, -(-L2_SHARE * l2_bytes // bytes_)))
        scales = [1.0, 1.0 if g.bytes else g.k**-0.5, *(1.0 for _ in g.epilogue.operands)]
        of_bytes = (2.0**-10, g.k**-0.5) if g.dtype.is_integer else (0.5, 2.0 * g.k**-0.5)
        self.inputs = [
            [
                _rounded(torch.randn(shape, generator=chance, device=DEVICE) * by, kind)
                for shape, kind, by in zip(g.shapes, g.dtypes, scales, strict=False)
            ]
            + [torch.tensor(x, device=DEVICE) for x in (of_bytes if g.bytes else ())]
            for _ in range(count)
        ]
        self.outputs = [torch.empty(g.m, g.n, dtype=TORCH_DTYPE[g.out], device=DEVICE) for _ in range(count)]
        self.exact = self._exact()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def _exact(self) -> torch.Tensor:
        """The result of the first set in float64."""
        g = self.gemm
        a, b, *others = (x.double() for x in self.inputs[0])
        product = (a.mT if g.layout[0] == "t" else a) @ (b.mT if g.layout[1] == "t" else b)
        if g.bytes:
            *others, scale_a, scale_b = others
            product *= scale_a * scale_b
        return torch_value(g.epilogue, product, self._named(others))

    def _named(self, operands: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: x for (name, _), x in zip(self.gemm.epilogue.operands, operands, strict=False)}

    def add_kernel(self, name: str, source: CudaSource, cubin: str) -> Contender:
        """A kernel of ours; constant operands are packed once for each set."""
        bound = BoundCuda(source, cubin)
        work, state = (
            torch.zeros(max(1, size), dtype=torch.uint8, device=DEVICE)
            for size in (source.workspace_bytes, source.state_bytes)
        )
        packed, launches = [], []
        now = torch.cuda.current_stream().cuda_stream
        for inputs, out in zip(self.inputs, self.outputs, strict=True):
            places = [torch.empty(size, dtype=torch.uint8, device=DEVICE) for size in source.packed_bytes]
            at = [x.data_ptr() for x in inputs]
            to = [x.data_ptr() for x in places]
            bound.pack(at, to, now)
            launches.append(bound.prepare(Addresses(at, [out.data_ptr()], to, work.data_ptr(), state.data_ptr())))
            packed.append(places)
        torch.cuda.synchronize()
        return self._add(Contender("weft", name, launches, (bound, packed, work, state)))

    def add_library(self, lt: CublasLt, most: int = 16, *, tf32: bool = False) -> list[Contender]:
        """The best algorithms of the library's heuristic, each with what it cannot fuse as torch's operators.

        Of integers it leaves sums in i32; scales and whatever follows are torch's operators, too.
        """
        g = self.gemm
        if g.dtype.is_integer:
            return self._add_integers(lt, most)
        fused, rest = g.epilogue.divided
        dtype = "tf32" if tf32 and g.dtype is DType.F32 else g.dtype.value
        asked = LtProduct(
            g.m, g.n, g.k, dtype, g.layout, bool(fused.bias), bool(fused.residual), fused.activation,
            (g.right or g.dtype).value if g.dtype.is_float8 else "", g.out.value if g.dtype.is_float8 else "", g.fast,
        )  # fmt: skip
        room = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=DEVICE)
        found = []
        for algorithm in lt.algorithms(asked, most):
            launches: list[Launch] = []
            for (a, b, *others), out in zip(self.inputs, self.outputs, strict=True):
                named = self._named(others)
                bias, c = (named[x].data_ptr() if x else 0 for x in (fused.bias, fused.residual))
                scales = (others[-2].data_ptr(), others[-1].data_ptr()) if g.dtype.is_float8 else (0, 0)
                at = LtAddresses(a.data_ptr(), b.data_ptr(), out.data_ptr(), bias, c, scales, room.data_ptr())
                run = algorithm.bind(at)
                launches.append(run if rest is None else _followed(run, rest, out, named))
            found.append(self._add(Contender("library", f"algorithm {algorithm.number}", launches, room)))
        return found

    def _add_integers(self, lt: CublasLt, most: int) -> list[Contender]:
        """The library's products of bytes; None where it does not take the layout."""
        g = self.gemm
        room = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=DEVICE)
        sums = torch.empty(g.m, g.n, dtype=torch.int32, device=DEVICE)
        found = []
        for algorithm in lt.algorithms(LtProduct(g.m, g.n, g.k, "i8", g.layout, out="i32"), most):
            launches: list[Launch] = []
            for (a, b, *others), out in zip(self.inputs, self.outputs, strict=True):
                at = LtAddresses(a.data_ptr(), b.data_ptr(), sums.data_ptr(), workspace=room.data_ptr())
                scale = others[-2] * others[-1]
                launches.append(_scaled(algorithm.bind(at), g.epilogue, sums, scale, out, self._named(others[:-2])))
            found.append(self._add(Contender("library", f"algorithm {algorithm.number}", launches, (room, sums))))
        return found

    def _add(self, contender: Contender) -> Contender:
        self.contenders.append(contender)
        return contender

    def run(self, before: Callable[[str], None] = lambda name: None) -> list[Contender]:
        """Verify and time all contenders; `before` hears of each before it runs.

        Raises:
            WeftError: a kernel ended the context.
        """
        graphs: dict[int, tuple[torch.cuda.CUDAGraph, int]] = {}
        firsts: dict[int, torch.Tensor] = {}
        for number, x in enumerate(self.contenders):
            before(f"{x.side} {x.name}")
            firsts[number] = self._verify(x)
            if not x.refused:
                graphs[number] = self._record(x)
        rng = random.Random(self._seed)
        self._rounds(rng, list(graphs), graphs, SCREENING, before)
        finalists = []
        for side in ("weft", "library"):
            own = [k for k in graphs if self.contenders[k].side == side]
            finalists += sorted(own, key=lambda k: min(self.contenders[k].samples_us))[:KEEP]
        for k in finalists:
            self.contenders[k].samples_us.clear()
        self._rounds(rng, finalists, graphs, ROUNDS, before)
        for k in finalists:
            self._again(self.contenders[k], firsts[k])
        return self.contenders

    def _rounds(
        self,
        rng: random.Random,
        numbers: Sequence[int],
        graphs: Mapping[int, tuple[torch.cuda.CUDAGraph, int]],
        count: int,
        before: Callable[[str], None],
    ) -> None:
        for _ in range(count):
            for k in rng.sample(list(numbers), len(numbers)):
                x = self.contenders[k]
                before(f"{x.side} {x.name}")
                graph, launches = graphs[k]
                x.samples_us.append(self._sample(graph) / launches)

    def _launch(self, x: Contender, number: int) -> None:
        with torch.cuda.stream(self._stream):
            x.launches[number](self._stream.cuda_stream)
        self._stream.synchronize()

    def _verify(self, x: Contender) -> torch.Tensor:
        """Run the first set into memory full of NaN; refuse what is wrong."""
        out = self.outputs[0]
        out.fill_(math.nan)
        torch.cuda.synchronize()
        try:
            self._launch(x, 0)
        except WeftError as error:
            x.refused = str(error).splitlines()[0]
            return out.clone()
        wrong = out.double() - self.exact
        x.error = float((wrong.square().mean() / self.exact.square().mean()).sqrt())
        if not x.error <= self._limit:
            x.refused = f"wrong: error {x.error:.2e} of the root mean square, limit {self._limit:.0e}"
        return out.clone()

    def _again(self, x: Contender, first: torch.Tensor) -> None:
        """Its result must be the same bits after all rounds."""
        self.outputs[0].fill_(math.nan)
        torch.cuda.synchronize()
        self._launch(x, 0)
        if x.side == "weft" and not torch.equal(self.outputs[0], first):
            x.refused = "its result changes from launch to launch"

    def _record(self, x: Contender) -> tuple[torch.cuda.CUDAGraph, int]:
        """A graph that goes through all sets and lasts long enough, and its number of launches."""
        sets = len(x.launches)
        graph = self._capture(x, sets)
        self._sample(graph)
        us = self._sample(graph) / sets
        launches = sets * max(1, math.ceil(SAMPLE_US / max(us * sets, 1.0)))
        return (graph, sets) if launches == sets else (self._capture(x, launches), launches)

    def _capture(self, x: Contender, launches: int) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(capture_error_mode="thread_local")
            for i in range(launches):
                x.launches[i % len(x.launches)](self._stream.cuda_stream)
            graph.capture_end()
        return graph

    def _sample(self, graph: torch.cuda.CUDAGraph) -> float:
        """Microseconds of one replay."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            start.record(self._stream)
            graph.replay()
            end.record(self._stream)
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e3


def _followed(run: Launch, rest: Epilogue, out: torch.Tensor, named: Mapping[str, torch.Tensor]) -> Launch:
    """A library call and the operators behind it; the last one writes the result."""

    def launch(stream: int) -> None:
        run(stream)
        out.copy_(torch_value(rest, out, named)) if _several(rest) else _last(rest, out, named)

    return launch


def _scaled(
    run: Launch, e: Epilogue, sums: torch.Tensor, scale: torch.Tensor, out: torch.Tensor, named: dict[str, torch.Tensor]
) -> Launch:
    """A product of integers, its sums times a number, and what follows."""

    def launch(stream: int) -> None:
        run(stream)
        if e.name == "none":
            torch.mul(sums, scale, out=out)
        else:
            out.copy_(torch_value(e, sums * scale, {name: x.float() for name, x in named.items()}))

    return launch


def _several(e: Epilogue) -> bool:
    """Whether an expression is more than one operator with an in-place form."""
    return e.text not in IN_PLACE


def _last(e: Epilogue, out: torch.Tensor, named: Mapping[str, torch.Tensor]) -> None:
    IN_PLACE[e.text](out, named)
