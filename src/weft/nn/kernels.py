"""Compiled kernels of fused networks on one GPU: made on first use, shared by all modules with equal networks."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache, partial
from pathlib import Path
from threading import RLock
from typing import NamedTuple, TypeVar

import torch

from weft.device.cuda.direct import Direct
from weft.device.cuda.driver import Function, Module
from weft.device.cuda.facts import GpuFacts, gpu_facts
from weft.device.cuda.nvrtc import CompiledCubin, CompileJob, Nvrtc, find_nvrtc
from weft.errors import WeftError
from weft.generate.cuda.templates import mlp
from weft.generate.cuda.training import Gradient, Network, forward_problem, gradient, layered, shapes
from weft.generate.cuda.training.gradient import Entry
from weft.ir.declined import Declined
from weft.ir.types import DType
from weft.kernels.source import CudaSource, Pointer
from weft.nn.layered import ByLayers
from weft.nn.timing import least, near, normal_like, stream
from weft.nn.turns import in_turn
from weft.options import Options

KEPT_FORWARDS = 32
"""Numbers of rows whose kernels are kept per network."""
KEPT_NETWORKS = 256
"""Whose kernels are kept though no module may be left that has such a network."""
KEPT_BYTES = 1 << 30
"""What a backward pass may take for values between its kernels; more rows are done in parts."""
_ALIGNED = 256
"""Of what stands in one buffer."""
CONTESTED = 128
"""Columns from which training in one kernel for all layers is measured against a kernel for each product."""
_CHAINED_RATE, _LAYERED_RATE, _PRODUCT_US, _SURELY = 0.4, 0.65, 5.0, 1.2
"""Shares of the tensor cores' and of memory's peak as measured on an NVIDIA H200; microseconds of a launch."""
_SPILLED = 64
"""Bytes of a thread's registers in memory with which a kernel is still worth measuring."""
_MANY = 1 << 14
"""Rows from which the shapes of gradients are measured anew."""
VERIFIED = 2048
"""Rows whose results are compared with torch's before a kernel is used."""
FAR = 0.3
"""Share of their norm by which results may differ: far more than rounding does, far less than a wrong kernel."""
_T = TypeVar("_T")
Reference = Callable[[torch.Tensor], Sequence[torch.Tensor]]
"""First rows of an input, or of the gradient of a result -> what torch's operations give for them."""
DTYPES = {torch.float16: DType.F16, torch.bfloat16: DType.BF16, torch.float32: DType.F32}
SHORT = {DType.F16: torch.float16, DType.BF16: torch.bfloat16}


@dataclass(eq=False)
class Forward:
    """The forward kernel for one number of rows."""

    source: CudaSource
    packing: Function
    """The entry that makes the image of the weights."""
    running: Function

    @staticmethod
    def of(source: CudaSource, cubin: Path) -> Forward:
        """Loaded.

        Raises:
            DeviceError: this device has too little for it [W301].
        """
        module = Module(cubin)
        (pack,), (run,) = source.pack, source.launches
        return Forward(source, module.function(pack.entry), module.function(run.entry))

    def call(self) -> ForwardCall:
        """With an image of its own, on the current device."""
        return ForwardCall(self)


class ForwardCall:
    """A forward kernel with an image of the weights. Not for two threads at once."""

    def __init__(self, forward: Forward) -> None:
        """Launches are prepared; nothing is in the image yet.

        Raises:
            DeviceError: this device has too little for it [W301].
        """
        source = forward.source
        (pack,), (run,) = source.pack, source.launches
        self.forward = forward
        with torch.inference_mode(mode=False):  # it is written again in any mode
            self.image = torch.empty(source.packed_bytes[0], dtype=torch.uint8, device=torch.cuda.current_device())
        self.stamp = -1
        """Of the parameters in the image."""
        image = self.image.data_ptr()
        self._order = tuple(x.index - 1 for x in pack.arguments if isinstance(x, Pointer) and x.kind == "in")
        self._places: list[int] = []
        self._pack = Direct(forward.packing, pack.grid, pack.block, [*(0 for _ in self._order), image])
        words = [image if isinstance(x, Pointer) and x.kind == "packed" else 0 for x in run.arguments]
        kinds = [x.kind if isinstance(x, Pointer) else "" for x in run.arguments]
        self._x, self._y = kinds.index("in"), kinds.index("out")
        # weights are read before the kernel waits for what stands before it on the stream
        self._behind, self._later = (
            Direct(
                forward.running,
                run.grid,
                run.block,
                words,
                shared_bytes=run.shared_bytes,
                cluster=run.cluster,
                dependent=run.dependent and later,
            )
            for later in (False, True)
        )

    def pack(self, parameters: Sequence[int], stream: int) -> None:
        """Make the image from parameters at these addresses."""
        if parameters != self._places:
            self._places = list(parameters)
            for word, i in enumerate(self._order):
                self._pack.words[word] = parameters[i]
        self._pack.launch(stream)

    def run(self, x: int, y: int, stream: int, *, behind: bool = True) -> None:
        """Dense x in, y out, both by address; `behind` what made the image, if that is not long ago."""
        direct = self._behind if behind else self._later
        direct.words[self._x] = x
        direct.words[self._y] = y
        direct.launch(stream)


@dataclass(eq=False)
class Backward:
    """The kernels of gradients."""

    plan: Gradient
    functions: dict[str, Function] = field(default_factory=dict)

    @staticmethod
    def of(plan: Gradient, cubin: Path) -> Backward:
        """Loaded.

        Raises:
            DeviceError: this device has too little for it [W301].
        """
        module = Module(cubin)
        entries = [plan.pack, plan.chain]
        if plan.partial_bytes:
            entries += [plan.finish] if plan.inside else [plan.sums, plan.finish]
        made = Backward(plan, {e.name: module.function(e.name) for e in entries})
        for e in entries:
            made.functions[e.name].prepare(e.shared_bytes)
        return made

    def direct(self, entry: Entry, blocks: int, *words: int) -> Direct:
        """A launch with these arguments; some are written later."""
        grid = (max(1, min(entry.blocks, blocks)), 1, 1)
        function, threads = self.functions[entry.name], (entry.threads, 1, 1)
        # every kernel of the text waits, before it reads anything, until those before it have ended
        return Direct(function, grid, threads, words, shared_bytes=entry.shared_bytes, dependent=True)

    def image(self) -> torch.Tensor:
        """Room for the image of the weights."""
        with torch.inference_mode(mode=False):
            return torch.empty(self.plan.image_bytes, dtype=torch.uint8, device=torch.cuda.current_device())

    def call(self, net: Network, rows: int, image: torch.Tensor, limit: int = KEPT_BYTES) -> BackwardCall:
        """For so many rows, with that image of the weights."""
        return BackwardCall(self, net, rows, image, limit)


class _Part(NamedTuple):
    """Some rows of a backward pass."""

    x: int
    """Bytes before them, in the input and its gradient."""
    dy: int
    """The same in the gradient of the result."""
    chain: Direct
    sums: Direct | None


class BackwardCall:
    """The kernels of gradients for so many rows and one image of the weights. Not for two threads at once."""

    def __init__(self, backward: Backward, net: Network, rows: int, image: torch.Tensor, limit: int) -> None:
        """Launches are prepared; `limit`: bytes of values between kernels.

        Raises:
            DeviceError: this device has too little for it [W301].
        """
        plan = self.plan = backward.plan
        self.backward, self._image, at = backward, image, image.data_ptr()
        self._places: list[int] = []
        self._pack = backward.direct(plan.pack, plan.pack.blocks, *(0 for _ in net.places()), at)
        wanted = plan.partial_bytes > 0
        step = 16 * plan.tiles
        parts = wanted and not plan.inside
        chunk = max(step, limit // plan.record * 16 // step * step) if parts else rows
        kept = 0 if plan.inside and wanted else plan.kept_bytes(min(chunk, rows))
        self._partial = -(-kept // _ALIGNED) * _ALIGNED
        """Bytes before the shares of sums in the scratch."""
        self.scratch_bytes = self._partial + plan.partial_bytes
        row_bytes = (4 if net.given is DType.F32 else 2) * net.columns, 2 * net.widths[-1]
        self._parts: list[_Part] = []
        shares = plan.shares
        for start in range(0, rows, chunk):
            count = min(chunk, rows - start)
            groups = plan.count(count) // plan.tiles
            blocks = max(1, min(plan.chain.blocks, -(-groups * 32 // plan.chain.threads) if plan.inside else groups))
            shares = blocks if plan.inside else shares
            chain = backward.direct(plan.chain, blocks, 0, 0, at, 0, 0, count)
            tiles = plan.count(count)
            sums = backward.direct(plan.sums, plan.sums.blocks, 0, 0, tiles, int(start > 0)) if parts else None
            self._parts.append(_Part(start * row_bytes[0], start * row_bytes[1], chain, sums))
        self._finish = backward.direct(plan.finish, plan.finish.blocks, 0, 0, shares) if wanted else None

    def pack(self, parameters: Sequence[int], stream: int) -> None:
        """Make the image from parameters at these addresses."""
        if parameters != self._places:
            self._places = list(parameters)
            for word, place in enumerate(parameters):
                self._pack.words[word] = place
        self._pack.launch(stream)

    def run(self, x: int, dy: int, dx: int, gradients: int, scratch: int, stream: int) -> None:
        """Dense tensors by address; dx and gradients are written as far as the kernels were made for them.

        `scratch` has `scratch_bytes` bytes.
        """
        partial = scratch + self._partial
        for part in self._parts:
            words = part.chain.words
            words[0], words[1], words[3] = x + part.x, dy + part.dy, scratch
            words[4] = dx + part.x if dx else 0
            part.chain.launch(stream)
            if part.sums is not None:
                part.sums.words[0], part.sums.words[1] = scratch, partial
                part.sums.launch(stream)
        if self._finish is not None:
            self._finish.words[0], self._finish.words[1] = partial, gradients
            self._finish.launch(stream)


class Kernels:
    """All kernels of one network on one device; calls are made with that device current, and threads take turns."""

    def __init__(self, net: Network, facts: GpuFacts, nvrtc: Nvrtc) -> None:
        self.net, self.facts, self.nvrtc = net, facts, nvrtc
        self.places, self.elements = net.places(), net.elements
        self.views = [(p.shape, (*p.shape[1:], 1), p.offset) for p in self.places]
        """(shape, strides, offset) of each parameter among all."""
        self.lock = RLock()
        self._changes = 0
        self._asked = False
        self._backward_refused: Declined | None = None
        self._by_layers: ByLayers | None = None
        self._chains = True
        self.ways: dict[tuple[int, bool, bool], bool] = {}
        """(rows, with the gradient of x, with those of parameters) -> whether training them is fastest by layers."""
        self.times: dict[tuple[int, bool, bool], tuple[float, float, float]] = {}
        """As measured for that: by layers, by one kernel (infinite where that was not worth compiling), by torch."""
        self._slow: dict[int, Declined] = {}
        self._cache = Options().cache
        self._forwards: OrderedDict[int, Forward | Declined] = OrderedDict()
        self._refusals: dict[int, Declined | None] = {}
        self._backwards: dict[tuple[bool, bool, DType, bool], Backward | Declined] = {}

    @property
    def changes(self) -> int:
        """How often something was refused or forgotten: what was found before is to be asked for again."""
        return self._changes + (0 if self._by_layers is None else self._by_layers.changes)

    @in_turn
    def refused(self, rows: int) -> Declined | None:
        """Why the forward pass of so many rows is no kernel, as far as can be said without compiling one."""
        if rows in self._forwards:
            found = self._forwards[rows]
            return found if isinstance(found, Declined) else None
        if torch.cuda.is_current_stream_capturing():
            return Declined(f"{rows} rows are met first while a CUDA graph is captured: run the module once before")
        if rows not in self._refusals:
            if len(self._refusals) >= 16 * KEPT_FORWARDS:
                self._refusals.clear()
            schedules = mlp.schedules(forward_problem(self.net, rows), self.facts)
            self._refusals[rows] = schedules if isinstance(schedules, Declined) else None
        return self._refusals[rows]

    @in_turn
    def forward(self, x: torch.Tensor, parameters: Sequence[int], reference: Reference) -> Forward | Declined:
        """For the rows of x: the fastest schedule whose first rows are those of `reference`.

        `parameters`: their addresses.
        """
        rows = len(x)
        found = self._forwards.get(rows)
        if found is None:
            found = self._measured(x, parameters, reference)
            while len(self._forwards) >= KEPT_FORWARDS:
                self._forwards.popitem(last=False)
                self._changes += 1
            self._forwards[rows] = found
            self._changes += isinstance(found, Declined)
        self._forwards.move_to_end(rows)
        return found

    def _measured(self, x: torch.Tensor, parameters: Sequence[int], reference: Reference) -> Forward | Declined:
        problem = forward_problem(self.net, len(x))
        schedules = mlp.schedules(problem, self.facts)
        if isinstance(schedules, Declined):
            return schedules
        sources = [s for x in schedules if isinstance(s := mlp.emit(problem, x, self.net.masters), CudaSource)]
        jobs = [CompileJob(s.text, self.facts.arch, s.flags) for s in sources]
        results = self.nvrtc.compile_many(jobs, cache_dir=self._cache)
        wanted = reference(x[:VERIFIED])

        def tried(source: CudaSource, cubin: Path) -> tuple[float, Forward]:
            forward = Forward.of(source, cubin)
            return self._time(forward, x, parameters, wanted), forward

        compiled = [(s, r.path) for s, r in zip(sources, results, strict=True) if isinstance(r, CompiledCubin)]
        best = _fastest((partial(tried, *c) for c in compiled), "no forward kernel compiles and is right")
        if isinstance(best[1], Forward) and best[1].source.schedule.param("template") == "mlp_wide":
            columns = max(self.net.widths)
            if least(lambda: reference(x)) < best[0]:
                return Declined(f"layers of {columns} columns, which are faster one by one for {len(x)} rows")
        return best[1]

    def _time(
        self, forward: Forward, x: torch.Tensor, parameters: Sequence[int], wanted: Sequence[torch.Tensor]
    ) -> float:
        """The shortest; infinite for a wrong result."""
        call = forward.call()
        y = torch.empty(len(x), self.net.widths[-1], dtype=SHORT[self.net.dtype], device=x.device)
        ends = x.data_ptr(), y.data_ptr()
        call.pack(parameters, stream())
        call.run(*ends, stream())
        return least(lambda: call.run(*ends, stream())) if near(y[:VERIFIED], wanted[0], FAR) else math.inf

    def backward(
        self,
        x: torch.Tensor,
        dy: torch.Tensor,
        addresses: Sequence[int],
        reference: Reference,
        *,
        inputs: bool,
        parameters: bool,
        dtype: DType,
    ) -> Backward | Declined:
        """For gradients of these, those of parameters, which lie at `addresses`, in `dtype`.

        The fastest shape for these tensors whose gradients, for the first rows of x and another dy, are those of
        `reference`: that of x, and those of the parameters at their places.
        """
        key = inputs, parameters, dtype
        known = *key, len(x) >= _MANY
        found = self._backwards.get(known)
        if found is not None:
            return found
        if torch.cuda.is_current_stream_capturing():
            return Declined("gradients are met first while a CUDA graph is captured")
        trial = normal_like(dy[:VERIFIED])
        wanted = reference(trial)  # before it is our turn: this thread may run other backward passes meanwhile
        with self.lock:
            if known not in self._backwards:
                made = self._backwards[known] = self._built(x, dy, addresses, trial, wanted, key)
                self._changes += isinstance(made, Declined)
            return self._backwards[known]

    @in_turn
    def backward_refused(self) -> Declined | None:
        """Why gradients are not computed by kernels, as far as is known without compiling one."""
        for x in self._backwards.values():
            if isinstance(x, Declined):
                return x
        self.by_layers()
        return self._backward_refused

    def by_layers(self) -> ByLayers | None:
        """What trains the network a layer at a time; None where one kernel surely takes all layers, or nothing does."""
        if not self._asked:
            self._ask()
        return self._by_layers

    @property
    def in_contest(self) -> bool:
        """Whether one kernel could train all layers as well as one for each product of a layer."""
        return self.by_layers() is not None and self._chains

    def surely_by_layers(self, rows: int) -> bool:
        """Whether one kernel for all layers would lose even at its best, so that it need not be compiled.

        It multiplies five times where layers do three times, at no more than two fifths of the tensor cores' rate;
        layers wait for memory.
        """
        facts, net = self.facts, self.net
        if not facts.peak_bandwidth:
            return False
        products = 2.0 * rows * sum(p.size for p in self.places if len(p.shape) == 2)
        chain = 5 * products / (_CHAINED_RATE * facts.peak_flops(net.dtype.value)) * 1e6
        layers = layered.traffic(net, rows) / (_LAYERED_RATE * facts.peak_bandwidth * 1e3) + _PRODUCT_US * 3 * net.depth
        return chain > _SURELY * layers

    @in_turn
    def refuse(self, rows: int, reason: Declined) -> None:
        """So many rows are not trained by kernels from now on."""
        self._slow[rows] = reason
        self._changes += 1

    @in_turn
    def _ask(self) -> None:
        if self._asked:
            return
        found = gradient(self.net, self.facts)
        refused = found if isinstance(found, Declined) else None
        self._chains = refused is None
        widest = max(self.net.of(v) for v in range(1 - max(1, len(self.net.parts)), self.net.depth + 1))
        if self.facts.capability >= 80 and (refused is not None or widest >= CONTESTED):
            none = layered.refused(self.net)
            if none is None:
                self._by_layers = ByLayers(self.net, self.facts, self.nvrtc, self._cache)
            refused = none if refused is not None else None
        self._backward_refused = refused
        self._asked = True

    def training_refused(self, rows: int) -> Declined | None:
        """Why forward and backward pass of so many rows are no kernels, as far as is known without compiling one."""
        layers = self.by_layers()
        if layers is not None and not self._chains:
            return layers.refused(rows)
        slow = self._slow.get(rows)
        chain = self.chain_refused(rows) if slow is None else slow
        return None if slow is None and layers is not None and layers.refused(rows) is None else chain

    def chain_refused(self, rows: int) -> Declined | None:
        """Why one kernel does not train all layers."""
        return self.refused(rows) or self.backward_refused()

    def _built(
        self,
        x: torch.Tensor,
        dy: torch.Tensor,
        addresses: Sequence[int],
        trial: torch.Tensor,
        wanted: Sequence[torch.Tensor],
        key: tuple[bool, bool, DType],
    ) -> Backward | Declined:
        inputs, parameters, dtype = key
        plans: list[Gradient] = []
        found = shapes(self.net, self.facts, parameters=parameters)
        for shape in found or (None,):
            plan = gradient(self.net, self.facts, shape, inputs=inputs, parameters=parameters, dtype=dtype)
            if isinstance(plan, Declined):
                return plan
            plans.append(plan)
        results = self.nvrtc.compile_many([CompileJob(p.text, self.facts.arch) for p in plans], cache_dir=self._cache)
        compiled = [(p, r) for p, r in zip(plans, results, strict=True) if isinstance(r, CompiledCubin)]
        whole = [(p, r) for p, r in compiled if r.of(p.chain.name).spill_stores <= _SPILLED]

        def tried(plan: Gradient, cubin: CompiledCubin) -> tuple[float, Backward]:
            made = Backward.of(plan, cubin.path)
            return self._tried(made, x, dy, addresses, key, trial, wanted), made

        some = (partial(tried, *c) for c in whole or compiled)
        return _fastest(some, "no kernel of gradients compiles and is right")[1]

    def _tried(
        self,
        made: Backward,
        x: torch.Tensor,
        dy: torch.Tensor,
        addresses: Sequence[int],
        key: tuple[bool, bool, DType],
        trial: torch.Tensor,
        wanted: Sequence[torch.Tensor],
    ) -> float:
        """The shortest time; infinite if the gradients for `trial` are not those that are wanted."""
        inputs, parameters, kind = key
        dtype = torch.float32 if kind is DType.F32 else SHORT[kind]
        image = made.image()
        few, call = made.call(self.net, len(trial), image), made.call(self.net, len(x), image)
        size = max(few.scratch_bytes, call.scratch_bytes)
        scratch = torch.empty(size, dtype=torch.uint8, device=x.device)
        call.pack(addresses, stream())
        dx = torch.zeros_like(x) if inputs else None
        sums = torch.zeros(self.elements, dtype=dtype, device=x.device) if parameters else None
        ends = *(0 if t is None else t.data_ptr() for t in (dx, sums)), scratch.data_ptr(), stream()
        few.run(x.data_ptr(), trial.data_ptr(), *ends)
        right = dx is None or near(dx[: len(trial)], wanted[0], FAR)
        right = right and (sums is None or near(sums, wanted[1], FAR))
        return least(lambda: call.run(x.data_ptr(), dy.data_ptr(), *ends)) if right else math.inf


def _fastest(tries: Iterable[Callable[[], tuple[float, _T]]], otherwise: str) -> tuple[float, _T | Declined]:
    """The shortest time and what takes it; infinite for what is wrong."""
    best: tuple[float, _T | Declined] = math.inf, Declined(otherwise)
    for attempt in tries:
        try:
            seconds, found = attempt()
        except WeftError:  # this device has too little for it; the others may do
            continue
        if seconds < best[0]:
            best = seconds, found
    return best


@cache
def _facts(device: int) -> GpuFacts | Declined:
    try:
        return gpu_facts(None, device=device, calibrate=False)
    except WeftError as error:
        return Declined(str(error).splitlines()[0])


@cache
def _compiler() -> Nvrtc | Declined:
    return find_nvrtc()


@lru_cache(maxsize=KEPT_NETWORKS)
def kernels_of(net: Network, device: int) -> Kernels | Declined:
    """The kernels of a network on a GPU, or why there are none."""
    facts = _facts(device)
    if isinstance(facts, Declined):
        return facts
    nvrtc = _compiler()
    if isinstance(nvrtc, Declined):
        return nvrtc
    return Kernels(net, facts, nvrtc)
