"""Compiled kernels of networks that are trained a layer at a time, on one GPU: chosen for each number of rows."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import RLock
from weakref import WeakKeyDictionary

import torch

from weft.costmodel.profile import costs_of
from weft.device.cuda.driver import Function, Module
from weft.device.cuda.facts import GpuFacts
from weft.device.cuda.nvrtc import CompiledCubin, CompileJob, Nvrtc
from weft.errors import WeftError
from weft.generate.bind import Addresses, BoundCuda, Prepared
from weft.generate.cuda import templates
from weft.generate.cuda.training import Network
from weft.generate.cuda.training import layered as text
from weft.generate.cuda.training.beside import (
    biases_posed,
    ctas_of,
    ending_posed,
    grid_of,
    join_posed,
    pack_posed,
    shares_of,
)
from weft.generate.cuda.training.entry import Entry
from weft.generate.cuda.training.layered import Layered, Product, Ref, padded
from weft.ir.declined import Declined
from weft.ir.types import DType
from weft.kernels.source import CudaSource, Schedule
from weft.nn.judge import Judge, anywhere, fallen_back, trial_of
from weft.nn.synchronized import synchronized
from weft.nn.timing import stream
from weft.tune.tuner import ProblemTrial

TRIED = 6
"""Schedules of a product that are measured."""
_SPILLED = 16
"""Bytes of a thread's registers in memory with which a kernel is still worth measuring."""
_KEPT_PRODUCTS = 256
_REMEMBERED = 64
_CAPTURED = "products are met first while a CUDA graph is captured"
TORCH = {
    DType.F16: torch.float16,
    DType.BF16: torch.bfloat16,
    DType.F32: torch.float32,
}


class Memory:
    """What the kernels of one module keep between calls: the image of its weights, and states that are zero between."""

    def __init__(self) -> None:
        self.image: torch.Tensor | None = None
        self.stamp = -1
        """Of the parameters in the image."""
        self.addresses: list[int] = []
        """Where those lay: gradients of a call may be asked for after another one has read other parameters."""
        self._states: WeakKeyDictionary[Chosen, torch.Tensor] = WeakKeyDictionary()
        """They go with the kernel, when it is forgotten."""
        self._recorded: set[Chosen] = set()
        """Kernels that a captured graph may run whenever it is replayed."""

    def tensors(self) -> list[torch.Tensor]:
        """All of it."""
        return [*([] if self.image is None else [self.image]), *self._states.values()]

    def lacks(self, plan: Sequence[tuple[Product, Chosen]]) -> bool:
        """Whether a state is to be made; while a graph is captured it would be zero from the first replay on only."""
        return any(kernel.bound.source.state_bytes and kernel not in self._states for _, kernel in plan)

    def state(self, chosen: Chosen) -> int:
        """Address of the state of a kernel; 0 for one that has none."""
        size = chosen.bound.source.state_bytes
        if not size:
            return 0
        if torch.cuda.is_current_stream_capturing():
            self._recorded.add(chosen)
        found = self._states.get(chosen)
        if found is None:
            device = torch.cuda.current_device()
            with torch.inference_mode(mode=False):
                found = self._states[chosen] = torch.zeros(size, dtype=torch.uint8, device=device)
        return found.data_ptr()


@dataclass(eq=False)
class Chosen:
    """The kernel of a product."""

    bound: BoundCuda
    us: float
    """Of a run, as measured alone, with that of sums of columns to come."""
    sum_rows: int = 0
    """Rows of sums over rows, in float32, that are its last output."""
    _ready: dict[tuple[int, ...], Prepared] = field(default_factory=dict)

    def run(self, inputs: Sequence[int], outputs: Sequence[int], state: int) -> None:
        """On the current stream; all are addresses."""
        size = self.bound.source.workspace_bytes
        device = torch.cuda.current_device()
        memory = torch.empty(size, dtype=torch.uint8, device=device) if size else None  # held until it is launched
        work = 0 if memory is None else memory.data_ptr()
        key = (*inputs, *outputs, work, state)
        ready = self._ready.get(key)
        if ready is None:
            while len(self._ready) >= _REMEMBERED:
                self._ready.pop(next(iter(self._ready)))
            ready = self._ready[key] = self.bound.prepare(Addresses(inputs, outputs, (), work, state))
        ready(stream())


class Beside:
    """The kernels beside the products."""

    def __init__(self, plan: Layered, module: Module) -> None:
        self.plan = plan
        entries = plan.pack, *plan.joins.values(), plan.ending, plan.columns, plan.total
        self._functions: dict[str, Function] = {e.name: module.function(e.name) for e in entries}

    def launch(self, entry: Entry, ctas: int, *arguments: int) -> None:
        """On the current stream; every kernel waits, before it reads anything, until those before it have ended."""
        grid = grid_of(entry, ctas), 1, 1
        self._functions[entry.name].launch(grid, (entry.threads, 1, 1), arguments, dependent=True, stream=stream())


class ByLayers:
    """All of one network on one device; calls are made with that device current, and threads take turns."""

    def __init__(self, net: Network, facts: GpuFacts, nvrtc: Nvrtc, cache: Path | None, judge: Judge) -> None:
        self.net, self.facts, self.nvrtc, self._cache, self.judge = net, facts, nvrtc, cache, judge
        self._chosen: OrderedDict[str, Chosen | Declined] = OrderedDict()
        self._plans: OrderedDict[object, list[tuple[Product, Chosen]]] = OrderedDict()
        self._beside: dict[DType, Beside | Declined] = {}
        self._cubins: dict[DType, CompiledCubin | Declined] = {}
        self._right: OrderedDict[object, Declined | None] = OrderedDict()
        """What beside the products was verified for some rows, or why it is not to be used."""
        self.lock = RLock()
        self._refusals: dict[int, Declined | None] = {}
        self.changes = 0
        """How often something was refused."""
        self._known: set[tuple[int, bool, bool, DType]] = set()
        self._kept = text.kept(net)

    @synchronized
    def unknown(self, rows: int, *, inputs: bool, parameters: bool, dtype: DType) -> bool:
        """Whether gradients like these are met first; afterwards they are not."""
        key = rows, inputs, parameters, dtype
        if key in self._known or torch.cuda.is_current_stream_capturing():
            return False
        while len(self._known) >= 4 * _KEPT_PRODUCTS:
            self._known.pop()
        self._known.add(key)
        return True

    @synchronized
    def refused(self, rows: int) -> Declined | None:
        """Why so many rows are not trained by kernels, as far as can be said without compiling one."""
        if rows not in self._refusals:
            found = text.refused(self.net, rows)
            if found is None:
                tried = (templates.schedules(p.problem, self.facts) for p in text.forward(self.net, rows))
                found = next((x for x in tried if isinstance(x, Declined)), None)
            while len(self._refusals) >= _KEPT_PRODUCTS:
                self._forget(next(iter(self._refusals)))
            self._refusals[rows] = found
        found = self._refusals[rows]
        if found is None and torch.cuda.is_current_stream_capturing():
            known = text.forward(self.net, rows)[0].problem.key in self._chosen
            return None if known else Declined(f"{rows} rows are met first while a CUDA graph is captured")
        return found

    @synchronized
    def refuse(self, rows: int, reason: Declined) -> None:
        """So many rows are not trained by kernels from now on."""
        self._refusals[rows] = reason
        self.changes += 1

    def _forget(self, rows: int) -> None:
        """So many rows are judged again when they come again, if they were refused for what was seen of them."""
        if self._refusals.pop(rows) is not None:
            self._known = {key for key in self._known if key[0] != rows}

    def beside(self, dtype: DType) -> Beside | Declined:
        """The kernels beside the products, for gradients of the parameters in that type; see `unfit`."""
        if dtype not in self._beside:
            cubin = self._cubin(dtype)
            found: Beside | Declined
            try:
                plan = text.layered(self.net, self.facts.sms, dtype)
                found = cubin if isinstance(cubin, Declined) else Beside(plan, Module(cubin.path))
            except WeftError as error:
                found = Declined(str(error).splitlines()[0])
            self._beside[dtype] = found
        return self._beside[dtype]

    def _cubin(self, dtype: DType) -> CompiledCubin | Declined:
        if dtype not in self._cubins:
            plan = text.layered(self.net, self.facts.sms, dtype)
            (made,) = self.nvrtc.compile_many([CompileJob(plan.text, self.facts.arch)], cache_dir=self._cache)
            self._cubins[dtype] = made if isinstance(made, CompiledCubin) else Declined("a kernel does not compile")
        return self._cubins[dtype]

    def unfit(self, rows: int, dtype: DType, plan: Sequence[tuple[Product, Chosen]]) -> Declined | None:
        """Why the kernels beside those products must not run for so many rows; None: all were right in a worker.

        `plan` is that of a forward pass, or of a backward pass.
        """
        onward = plan[0][0].role == "forward"
        summed = {p.value - 1: k.sum_rows for p, k in plan if p.role == "below" and k.sum_rows}
        wanted = any(p.role == "weights" for p, _ in plan) and any(self.net.biases)
        key = rows, dtype, onward, wanted, tuple(sorted(summed.items()))
        if key not in self._right:
            if torch.cuda.is_current_stream_capturing():
                return Declined(_CAPTURED)
            while len(self._right) >= _REMEMBERED:
                self._right.popitem(last=False)
            self._right[key] = self._verified(rows, dtype, onward=onward, wanted=wanted, summed=summed)
        self._right.move_to_end(key)
        return self._right[key]

    def _verified(
        self, rows: int, dtype: DType, *, onward: bool, wanted: bool, summed: Mapping[int, int]
    ) -> Declined | None:
        cubin = self._cubin(dtype)
        if isinstance(cubin, Declined):
            return cubin
        net, plan = self.net, text.layered(self.net, self.facts.sms, dtype)
        asked = [pack_posed(net, plan)]
        if onward:
            asked += [join_posed(net, plan, reads, rows) for reads in plan.joins]
        else:
            asked.append(ending_posed(net, plan, rows))
        if wanted:
            asked.append(biases_posed(net, plan, rows, summed, dtype))
        for won in self.judge.judged([trial_of(problem, [(source, cubin)]) for problem, source in asked]):
            if isinstance(won, Declined):
                return fallen_back(f"what stands beside the products of {rows} rows", won)
        return None

    def chosen(self, products: Sequence[Product]) -> list[Chosen] | Declined:
        """The fastest right kernel of each product; all that are new are compiled at once."""
        new = {p.problem.key: p for p in products if p.problem.key not in self._chosen}
        if new:
            if torch.cuda.is_current_stream_capturing():
                return Declined(_CAPTURED)
            for key, kernel in self._made(new).items():
                self._chosen[key] = kernel
        found = []
        for p in products:
            kernel = self._chosen[p.problem.key]
            if isinstance(kernel, Declined):
                return kernel
            self._chosen.move_to_end(p.problem.key)
            found.append(kernel)
        while len(self._chosen) > _KEPT_PRODUCTS:
            self._chosen.popitem(last=False)
        return found

    def _planned(self, key: object, products: Callable[[], list[Product]]) -> list[tuple[Product, Chosen]] | Declined:
        """Products and their kernels, the same list as before for the same key."""
        if key not in self._plans:
            made = products()
            found = self.chosen(made)
            if isinstance(found, Declined):
                return found
            while len(self._plans) >= _REMEMBERED:
                self._plans.popitem(last=False)
            self._plans[key] = list(zip(made, found, strict=True))
        self._plans.move_to_end(key)
        return self._plans[key]

    def _made(self, new: dict[str, Product]) -> dict[str, Chosen | Declined]:
        sources: list[tuple[str, CudaSource, int]] = []
        found: dict[str, Chosen | Declined] = {}
        for key, p in new.items():
            schedules = templates.schedules(p.problem, self.facts)
            if isinstance(schedules, Declined):
                found[key] = schedules
                continue
            found[key] = Declined(f"no product of layer {p.layer} compiles")
            sources += [(key, *x) for x in candidates(p, schedules)]
        compiled = compiled_kernels([x[1:] for x in sources], self.facts, self.nvrtc, self._cache)
        asked: list[tuple[str, list[Compiled], ProblemTrial]] = []
        for key, p in new.items():
            emitted = {s.sha256 for k, s, _ in sources if k == key}
            own = [x for x in compiled if x.source.sha256 in emitted]
            whole = [x for x in own if max(r.spill_stores for _, r in x.cubin.resources) <= _SPILLED]
            asked += [(key, kernels, trial) for kernels, trial in trials_of(self.net, p, whole or own)]
        best: dict[str, tuple[float, Compiled]] = {}
        for (key, kernels, _), won in zip(asked, self.judge.judged([t for *_, t in asked]), strict=True):
            if isinstance(won, Declined):
                found[key] = won
                continue
            kernel = kernels[won.number]
            us = won.us + _later(new[key], kernel, self.facts)
            if us < best.get(key, (math.inf,))[0]:
                best[key] = us, kernel
        for key, p in new.items():
            if key in best:
                found[key] = _loaded(*best[key])
            elif any(k == key for k, *_ in asked):
                why = found[key]
                assert isinstance(why, Declined)
                found[key] = fallen_back(f"a product of layer {p.layer}", why)
        return found

    def pack(self, beside: Beside, addresses: Sequence[int], memory: Memory, stamp: int) -> int:
        """The image of parameters at these addresses; its address."""
        plan = beside.plan
        if memory.image is None:
            with torch.inference_mode(mode=False):
                size, device = plan.image.bytes, torch.cuda.current_device()
                memory.image = torch.empty(size, dtype=torch.uint8, device=device)
        if memory.stamp != stamp or memory.addresses != list(addresses):
            beside.launch(plan.pack, plan.pack.max_ctas, *addresses, memory.image.data_ptr())
            memory.stamp, memory.addresses = stamp, list(addresses)
        return memory.image.data_ptr()

    @synchronized
    def forward(
        self, x: torch.Tensor, addresses: Sequence[int], memory: Memory, stamp: int
    ) -> tuple[torch.Tensor, list[torch.Tensor]] | Declined:
        """(result, what `backward` wants); x is dense."""
        net, rows = self.net, len(x)
        beside = self.beside(DType.F32)
        plan = self._planned(rows, lambda: text.forward(net, rows))
        if isinstance(beside, Declined):
            return beside
        if isinstance(plan, Declined):
            return plan
        if memory.lacks(plan) and torch.cuda.is_current_stream_capturing():
            return Declined(_CAPTURED)
        unfit = self.unfit(rows, DType.F32, plan)
        if unfit is not None:
            return unfit
        image = self.pack(beside, addresses, memory, stamp)
        held = {Ref("input"): x}
        for layer, (product, kernel) in enumerate(plan):
            stored, added = beside.plan.image, net.adds(layer)
            ins = [self._joined(beside, held, net.reads(layer)), image + stored.weights[layer]]
            ins += [image + stored.biases[layer]] if net.biases[layer] else []
            ins += [] if added is None else [self._joined(beside, held, (added.value,))]
            columns = net.widths[-1] if layer == net.depth - 1 else padded(net.widths[layer + 1])
            made = {r: self._empty(rows, columns) for r in text.results(net, layer)}
            kernel.run(ins, [t.data_ptr() for t in made.values()], memory.state(kernel))
            held |= made
            for ref in product.spent:
                del held[ref]
        return held[Ref("value", (net.depth,))], [held[r] for r in self._kept]

    def _joined(self, beside: Beside, held: dict[Ref, torch.Tensor], reads: tuple[int, ...]) -> int:
        """Address of values side by side."""
        ref = text.operand(self.net, reads)
        if ref not in held:
            rows, columns = len(held[Ref("input")]), sum(padded(self.net.of(v)) for v in reads)
            made = held[ref] = self._empty(rows, columns)
            ins = [held[Ref("value", (v,)) if v > 0 else Ref("input")] for v in text.addressed(reads)]
            entry = beside.plan.joins[reads]
            beside.launch(entry, ctas_of(entry, rows, columns), *(t.data_ptr() for t in ins), made.data_ptr(), rows)
        return held[ref].data_ptr()

    def _empty(self, rows: int, columns: int) -> torch.Tensor:
        return torch.empty(rows, columns, dtype=TORCH[self.net.dtype], device=torch.cuda.current_device())

    @synchronized
    def backward(
        self,
        dy: torch.Tensor,
        x: torch.Tensor,
        kept: Sequence[torch.Tensor],
        addresses: Sequence[int],
        memory: Memory,
        stamp: int,
        dx: torch.Tensor | None,
        grads: torch.Tensor | None,
        dtype: DType,
    ) -> Declined | None:
        """Dense dy and x; dx and the parameters' gradients `grads`, in `dtype`, are written where they are given."""
        net, rows = self.net, len(x)
        beside = self.beside(dtype)
        inner, outer = dx is not None, grads is not None
        products = self._planned(
            (rows, inner, outer, dtype),
            lambda: text.backward(net, rows, inputs=inner, parameters=outer, dtype=dtype),
        )
        if isinstance(beside, Declined):
            return beside
        if isinstance(products, Declined):
            return products
        if memory.lacks(products) and torch.cuda.is_current_stream_capturing():
            return Declined(_CAPTURED)
        unfit = self.unfit(rows, dtype, products)
        if unfit is not None:
            return unfit
        plan = beside.plan
        image = self.pack(beside, addresses, memory, stamp)
        held = {Ref("input"): x, **dict(zip(self._kept, kept, strict=True)), Ref("gradient", (net.depth,)): dy}
        last = text.mark(net, net.depth - 1)
        held[Ref("dz", (net.depth - 1,))] = self._last(beside, dy, None if last is None else held[last])
        shares = shares_of(plan, rows)
        partial = torch.empty(plan.partial_floats * shares, dtype=torch.float32, device=x.device)
        totals: dict[int, torch.Tensor] = {}
        for product, kernel in products:
            layer, state = product.layer, memory.state(kernel)
            if product.role == "weights":
                assert grads is not None
                dz = held[Ref("dz", (layer,))]
                if net.biases[layer]:
                    place = partial.data_ptr() + 4 * shares * plan.partial[layer]
                    summed = totals.pop(layer, None)
                    given, kind = (dz, 0) if summed is None else (summed, 1)
                    beside.launch(plan.columns, shares, given.data_ptr(), place, len(given), dz.shape[1], kind)
                self._weights(kernel, state, layer, dz, held[text.operand(net, net.reads(layer))], grads)
            else:
                transposed = image + plan.image.transposed[layer] + 2 * product.row * padded(net.widths[layer + 1])
                held |= self._values(product, kernel, state, held, transposed, totals, dx)
            for ref in product.spent:
                held.pop(ref, None)
        if grads is not None and any(net.biases):
            beside.launch(plan.total, plan.total.max_ctas, partial.data_ptr(), grads.data_ptr(), shares)
        return None

    def _values(
        self,
        product: Product,
        kernel: Chosen,
        state: int,
        held: dict[Ref, torch.Tensor],
        transposed: int,
        totals: dict[int, torch.Tensor],
        dx: torch.Tensor | None,
    ) -> dict[Ref, torch.Tensor]:
        """A product for the gradient of a value; `totals`: sums over rows, by layer, are put there."""
        net, value, dz = self.net, product.value, held[Ref("dz", (product.layer,))]
        mark = text.mark(net, value - 1) if product.role == "below" else None
        read = [held[r] for r in (*product.addends, *([] if mark is None else [mark]))]
        made = self._outputs_of(product, len(dz), dx)
        outs = list(made.values())
        if kernel.sum_rows:
            shape = kernel.sum_rows, padded(net.of(value))
            totals[value - 1] = torch.empty(shape, dtype=torch.float32, device=dz.device)
            outs.append(totals[value - 1])
        kernel.run([dz.data_ptr(), transposed, *(t.data_ptr() for t in read)], [t.data_ptr() for t in outs], state)
        if product.role == "input" and net.parts and dx is not None:
            at, width = net.parts[-value]
            dx[:, at : at + width].copy_(outs[0])
        return made

    def _outputs_of(self, product: Product, rows: int, dx: torch.Tensor | None) -> dict[Ref, torch.Tensor]:
        """Where a product of the backward pass leaves its results, in their order."""
        net, value = self.net, product.value
        columns = padded(net.of(value)) if value > 0 else net.of(value)
        if product.role == "input" and not net.parts:
            assert dx is not None
            return {Ref("share", (value,)): dx}
        if product.role != "below":
            return {Ref("share", (value,)): self._empty(rows, columns)}
        found = [Ref("dz", (value - 1,)), Ref("gradient", (value,))]
        return {r: self._empty(rows, columns) for r in found[: len(product.problem.graph.outputs)]}

    def _last(self, beside: Beside, dy: torch.Tensor, mark: torch.Tensor | None) -> torch.Tensor:
        """The gradient of the last layer's pre-activation, from that of the result."""
        rows, columns = len(dy), padded(self.net.widths[-1])
        if mark is None and columns == dy.shape[1]:
            return dy
        dz = self._empty(rows, columns)
        kept = 0 if mark is None else mark.data_ptr()
        entry = beside.plan.ending
        beside.launch(entry, ctas_of(entry, rows, columns), dy.data_ptr(), kept, dz.data_ptr(), rows)
        return dz

    def _weights(
        self, kernel: Chosen, state: int, layer: int, dz: torch.Tensor, h: torch.Tensor, grads: torch.Tensor
    ) -> None:
        """The gradient of a layer's weights at its place, directly where nothing is padded."""
        place, _ = self.net.slices_of(layer)
        n, k = place.shape
        ins = [dz.data_ptr(), h.data_ptr()]
        if (n, k) == (dz.shape[1], h.shape[1]):
            kernel.run(ins, [grads.data_ptr() + place.offset * grads.element_size()], state)
            return
        found = torch.empty(dz.shape[1], h.shape[1], dtype=grads.dtype, device=grads.device)
        kernel.run(ins, [found.data_ptr()], state)
        to = grads[place.offset : place.offset + place.size].view(n, k)
        for value, at, column in text.segments(self.net, layer):
            width = self.net.of(value)
            to[:, column : column + width].copy_(found[:n, at : at + width])


def candidates(p: Product, schedules: Sequence[Schedule]) -> list[tuple[CudaSource, int]]:
    """(kernel, rows of sums over rows that it leaves besides) of what is worth measuring."""
    found: list[tuple[CudaSource, int]] = []
    for s in schedules[:TRIED]:
        source = templates.emit(p.problem, s)
        if isinstance(source, CudaSource):
            found.append((source, 0))
        summed = text.with_column_sums(p, s) if p.role == "below" else None
        if isinstance(summed, tuple):
            found.append(summed)
    return found


@dataclass(frozen=True, slots=True)
class Compiled:
    """A kernel that was compiled."""

    source: CudaSource
    cubin: CompiledCubin
    sum_rows: int


def compiled_kernels(
    sources: Sequence[tuple[CudaSource, int]], facts: GpuFacts, nvrtc: Nvrtc, cache: Path | None
) -> list[Compiled]:
    """What of `candidates` compiles."""
    jobs = [CompileJob(s.text, facts.arch, s.flags) for s, _ in sources]
    results = nvrtc.compile_many(jobs, cache_dir=cache)
    return [Compiled(s, r, n) for (s, n), r in zip(sources, results, strict=True) if isinstance(r, CompiledCubin)]


def trials_of(net: Network, p: Product, kernels: Sequence[Compiled]) -> list[tuple[list[Compiled], ProblemTrial]]:
    """Kernels of a product that leave the same, and what is asked about them."""
    found: list[tuple[list[Compiled], ProblemTrial]] = []
    plain = [x for x in kernels if not x.sum_rows]
    if plain:
        found.append((plain, trial_of(anywhere(p.problem), [(x.source, x.cubin) for x in plain])))
    more = [x for x in kernels if x.sum_rows]
    if more:
        posed = [text.summed(net, p, x.source, x.sum_rows) for x in more]
        some = [(source, x.cubin) for (_, source), x in zip(posed, more, strict=True)]
        found.append((more, trial_of(anywhere(posed[0][0]), some)))
    return found


def _later(p: Product, kernel: Compiled, facts: GpuFacts) -> float:
    """Microseconds that sums of the columns of its result take behind it; what it leaves of them the trial added."""
    if p.role != "below" or kernel.sum_rows:
        return 0.0
    first = p.problem.graph.type_of(p.problem.graph.outputs[0])
    return first.nbytes / costs_of(facts).training.summed


def _loaded(us: float, kernel: Compiled) -> Chosen | Declined:
    try:
        return Chosen(BoundCuda(kernel.source, kernel.cubin.path), us, kernel.sum_rows)
    except WeftError as error:  # other than in the worker, too little is left
        return Declined(str(error).splitlines()[0])
