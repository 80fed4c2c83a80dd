"""Compiled kernels of fused networks on one GPU: made on first use, shared by all modules with equal networks."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import torch

from weft.device.cuda.driver import Function, Module
from weft.device.cuda.facts import GpuFacts, gpu_facts
from weft.device.cuda.nvrtc import CompiledCubin, CompileJob, Nvrtc, find_nvrtc
from weft.errors import WeftError
from weft.generate.bind import Addresses, BoundCuda, Prepared
from weft.generate.cuda.templates import mlp
from weft.generate.cuda.training import Gradient, Network, forward_problem, gradient, layered, shapes
from weft.generate.cuda.training.gradient import Entry
from weft.ir.declined import Declined
from weft.ir.types import DType
from weft.kernels.source import CudaSource, Pointer
from weft.nn.layered import ByLayers
from weft.nn.timing import least, near, normal_like, stream
from weft.options import Options

KEPT_FORWARDS = 32
"""Numbers of rows whose kernels are kept per network."""
KEPT_BYTES = 1 << 30
"""What a backward pass may take for values between its kernels; more rows are done in parts."""
_REMEMBERED = 64
_SPILLED = 16
"""Bytes of a thread's registers in memory with which a kernel is still worth measuring."""
_MANY = 1 << 14
"""Rows from which the shapes of gradients are measured anew."""
VERIFIED = 2048
"""Rows whose results are compared with torch's before a kernel is used."""
FAR = 0.3
"""Share of their norm by which results may differ: far more than rounding does, far less than a wrong kernel."""
Reference = Callable[[torch.Tensor], Sequence[torch.Tensor]]
"""First rows of an input, or of the gradient of a result -> what torch's operations give for them."""
DTYPES = {torch.float16: DType.F16, torch.bfloat16: DType.BF16, torch.float32: DType.F32}
SHORT = {DType.F16: torch.float16, DType.BF16: torch.bfloat16}


@dataclass(eq=False)
class Forward:
    """The forward kernel for one number of rows."""

    bound: BoundCuda
    packing: Function
    """The entry that makes the image; `bound` would look at its arguments anew each time."""
    order: tuple[int, ...]
    """The parameters that it reads."""
    _ready: dict[tuple[object, ...], Prepared] = field(default_factory=dict)

    @staticmethod
    def of(source: CudaSource, cubin: Path) -> Forward:
        """Loaded.

        Raises:
            DeviceError: this device has too little for it [W301].
        """
        (launch,) = source.pack
        order = tuple(x.index - 1 for x in launch.arguments if isinstance(x, Pointer) and x.kind == "in")
        return Forward(BoundCuda(source, cubin), Module(cubin).function(launch.entry), order)

    def image(self) -> list[torch.Tensor]:
        """Room for the image of the weights."""
        device = torch.cuda.current_device()
        return [torch.empty(n, dtype=torch.uint8, device=device) for n in self.bound.source.packed_bytes]

    def pack(self, parameters: Sequence[int], image: Sequence[torch.Tensor]) -> None:
        """Make the image from parameters at these addresses, on the current stream."""
        launch = self.bound.source.pack[0]
        places = *[parameters[i] for i in self.order], image[0].data_ptr()
        self.packing.launch(launch.grid, launch.block, places, stream=stream())

    def run(self, x: torch.Tensor, image: Sequence[torch.Tensor], y: torch.Tensor, *, behind: bool = True) -> None:
        """Dense x in, y out, on the current stream; `behind` what made the image, if that is not long ago."""
        key = x.data_ptr(), y.data_ptr(), behind, *(t.data_ptr() for t in image)
        ready = self._ready.get(key)
        if ready is None:
            weights = [0] * len(self.bound.source.replaces_weights)
            # weights are read before the kernel waits for what stands before it on the stream
            places = Addresses([key[0], *weights], [key[1]], [t.data_ptr() for t in image])
            ready = self._kept(key, self.bound.prepare(places, dependent=not behind))
        ready(stream())

    def _kept(self, key: tuple[object, ...], ready: Prepared) -> Prepared:
        while len(self._ready) >= _REMEMBERED:
            self._ready.pop(next(iter(self._ready)))
        self._ready[key] = ready
        return ready


@dataclass(eq=False)
class Backward:
    """The kernels of gradients."""

    plan: Gradient
    functions: dict[str, Function] = field(default_factory=dict)

    def launch(self, entry: Entry, blocks: int, *arguments: int) -> None:
        """On the current stream."""
        grid = (max(1, min(entry.blocks, blocks)), 1, 1)
        threads = (entry.threads, 1, 1)
        # every kernel of the text waits, before it reads anything, until those before it have ended
        self.functions[entry.name].launch(
            grid, threads, arguments, shared_bytes=entry.shared_bytes, dependent=True, stream=stream()
        )

    def image(self) -> torch.Tensor:
        """Room for the image of the weights."""
        return torch.empty(self.plan.image_bytes, dtype=torch.uint8, device=torch.cuda.current_device())

    def pack(self, parameters: Sequence[int], image: torch.Tensor) -> None:
        """Make the image from parameters at these addresses."""
        self.launch(self.plan.pack, self.plan.pack.blocks, *parameters, image.data_ptr())

    def run(
        self,
        x: torch.Tensor,
        dy: torch.Tensor,
        image: torch.Tensor,
        dx: torch.Tensor | None,
        gradients: torch.Tensor | None,
        limit: int = KEPT_BYTES,
    ) -> None:
        """Dense tensors; dx and gradients are written as far as the kernels were made for them."""
        plan = self.plan
        if plan.inside and gradients is not None:
            partial = torch.empty(plan.partial_bytes, dtype=torch.uint8, device=x.device)
            shares = self._share(x, dy, image, partial, dx)
            self.launch(plan.finish, plan.finish.blocks, partial.data_ptr(), gradients.data_ptr(), shares)
            return
        step = 16 * plan.tiles
        rows = len(x)
        chunk = max(step, limit // plan.record * 16 // step * step) if gradients is not None else rows
        kept = torch.empty(plan.kept_bytes(min(chunk, rows)), dtype=torch.uint8, device=x.device)
        partial = torch.empty(plan.partial_bytes, dtype=torch.uint8, device=x.device)
        for at in range(0, rows, chunk):
            part = slice(at, at + min(chunk, rows - at))
            self._share(x[part], dy[part], image, kept, None if dx is None else dx[part])
            if gradients is not None:
                tiles, more = plan.count(part.stop - at), int(at > 0)
                self.launch(plan.sums, plan.sums.blocks, kept.data_ptr(), partial.data_ptr(), tiles, more)
        if gradients is not None:
            places = partial.data_ptr(), gradients.data_ptr()
            self.launch(plan.finish, plan.finish.blocks, *places, plan.shares)

    def _share(
        self, x: torch.Tensor, dy: torch.Tensor, image: torch.Tensor, kept: torch.Tensor, dx: torch.Tensor | None
    ) -> int:
        """`chain` for these rows; returns its blocks."""
        entry = self.plan.chain
        groups = self.plan.count(len(x)) // self.plan.tiles
        blocks = max(1, min(entry.blocks, -(-groups * 32 // entry.threads) if self.plan.inside else groups))
        places = [t.data_ptr() for t in (x, dy, image, kept)]
        self.launch(entry, blocks, *places, 0 if dx is None else dx.data_ptr(), len(x))
        return blocks


class Kernels:
    """All kernels of one network on one device; calls are made with that device current."""

    def __init__(self, net: Network, facts: GpuFacts, nvrtc: Nvrtc) -> None:
        self.net, self.facts, self.nvrtc = net, facts, nvrtc
        self.places, self.elements = net.places(), net.elements
        self.views = [(p.shape, (*p.shape[1:], 1), p.offset) for p in self.places]
        """(shape, strides, offset) of each parameter among all."""
        self._asked = False
        self._backward_refused: Declined | None = None
        self._by_layers: ByLayers | None = None
        self._cache = Options().cache
        self._forwards: OrderedDict[int, Forward | Declined] = OrderedDict()
        self._refusals: dict[int, Declined | None] = {}
        self._backwards: dict[tuple[bool, bool, DType, bool], Backward | Declined] = {}

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
            self._forwards[rows] = found
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
        best: tuple[float, Forward | Declined] = math.inf, Declined("no forward kernel compiles and is right")
        wanted = reference(x[:VERIFIED])
        for source, result in zip(sources, results, strict=True):
            if not isinstance(result, CompiledCubin):
                continue
            try:
                forward = Forward.of(source, result.path)
                seconds = self._time(forward, x, parameters, wanted)
            except WeftError:  # this device has too little for the schedule; the others may do
                continue
            if seconds < best[0]:
                best = seconds, forward
        if isinstance(best[1], Forward) and best[1].bound.source.schedule.param("template") == "mlp_wide":
            columns = max(self.net.widths)
            if least(lambda: reference(x)) < best[0]:
                return Declined(f"layers of {columns} columns, which are faster one by one for {len(x)} rows")
        return best[1]

    def _time(
        self, forward: Forward, x: torch.Tensor, parameters: Sequence[int], wanted: Sequence[torch.Tensor]
    ) -> float:
        """The shortest; infinite for a wrong result."""
        image = forward.image()
        y = torch.empty(len(x), self.net.widths[-1], dtype=SHORT[self.net.dtype], device=x.device)
        forward.pack(parameters, image)
        forward.run(x, image, y)
        return least(lambda: forward.run(x, image, y)) if near(y[:VERIFIED], wanted[0], FAR) else math.inf

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
        if known not in self._backwards:
            if torch.cuda.is_current_stream_capturing():
                return Declined("gradients are met first while a CUDA graph is captured")
            self._backwards[known] = self._built(x, dy, addresses, reference, key)
        return self._backwards[known]

    def backward_refused(self) -> Declined | None:
        """Why gradients are not computed by kernels, as far as is known without compiling one."""
        for x in self._backwards.values():
            if isinstance(x, Declined):
                return x
        self.by_layers()
        return self._backward_refused

    def by_layers(self) -> ByLayers | None:
        """What trains the network a layer at a time; None where one kernel takes all layers, or nothing does."""
        if self._asked:
            return self._by_layers
        self._asked = True
        found = gradient(self.net, self.facts)
        refused = found if isinstance(found, Declined) else None
        if refused is not None and self.facts.capability >= 80:
            refused = layered.refused(self.net)
            if refused is None:
                self._by_layers = ByLayers(self.net, self.facts, self.nvrtc, self._cache)
        self._backward_refused = refused
        return self._by_layers

    def training_refused(self, rows: int) -> Declined | None:
        """Why forward and backward pass of so many rows are no kernels, as far as is known without compiling one."""
        layers = self.by_layers()
        if layers is not None:
            return layers.refused(rows)
        return self.refused(rows) or self.backward_refused()

    def _built(
        self,
        x: torch.Tensor,
        dy: torch.Tensor,
        addresses: Sequence[int],
        reference: Reference,
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
        best: tuple[float, Backward | Declined] = math.inf, Declined("no kernel of gradients compiles and is right")
        trial = normal_like(dy[:VERIFIED])
        wanted = reference(trial)
        compiled = [(p, r) for p, r in zip(plans, results, strict=True) if isinstance(r, CompiledCubin)]
        whole = [(p, r) for p, r in compiled if r.of(p.chain.name).spill_stores <= _SPILLED]
        for plan, result in whole or compiled:
            try:
                module = Module(result.path)
                entries = [plan.pack, plan.chain]
                if parameters:
                    entries += [plan.finish] if plan.inside else [plan.sums, plan.finish]
                made = Backward(plan, {e.name: module.function(e.name) for e in entries})
                for e in entries:
                    made.functions[e.name].prepare(e.shared_bytes)
                seconds = self._tried(made, x, dy, addresses, key, trial, wanted)
            except WeftError:  # this device has too little for the shape; the others may do
                continue
            if seconds < best[0]:
                best = seconds, made
        return best[1]

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
        made.pack(addresses, image)
        dx = torch.zeros_like(x) if inputs else None
        sums = torch.zeros(self.elements, dtype=dtype, device=x.device) if parameters else None
        made.run(x[: len(trial)], trial, image, dx, sums)
        right = dx is None or near(dx[: len(trial)], wanted[0], FAR)
        right = right and (sums is None or near(sums, wanted[1], FAR))
        return least(lambda: made.run(x, dy, image, dx, sums)) if right else math.inf


@cache
def _facts(device: int) -> GpuFacts | Declined:
    try:
        return gpu_facts(None, device=device, calibrate=False)
    except WeftError as error:
        return Declined(str(error).splitlines()[0])


@cache
def _compiler() -> Nvrtc | Declined:
    return find_nvrtc()


@cache
def kernels_of(net: Network, device: int) -> Kernels | Declined:
    """The kernels of a network on a GPU, or why there are none."""
    facts = _facts(device)
    if isinstance(facts, Declined):
        return facts
    nvrtc = _compiler()
    if isinstance(nvrtc, Declined):
        return nvrtc
    return Kernels(net, facts, nvrtc)
