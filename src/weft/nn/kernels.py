"""Compiled kernels of fused networks on one GPU: made on first use, shared by all modules with equal networks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from threading import RLock

import torch

from weft.costmodel.profile import costs_of
from weft.device.cuda.direct import Direct
from weft.device.cuda.driver import Function, Module
from weft.device.cuda.facts import GpuFacts, gpu_facts
from weft.device.cuda.nvrtc import CompiledCubin, CompileJob, Nvrtc, find_nvrtc
from weft.errors import WeftError
from weft.generate.cuda.mlp import template as mlp
from weft.generate.cuda.training import Gradient, Network, Step, gradient, gradient_problem, layered, shapes, step
from weft.generate.cuda.training.network import forward_problem
from weft.ir.declined import Declined
from weft.ir.types import DType
from weft.kernels.source import CudaSource, Launch, Number, Pointer
from weft.nn.judge import Judge, anywhere, fallen_back, trial_of
from weft.nn.layered import ByLayers
from weft.nn.synchronized import synchronized
from weft.nn.timing import contest, stream
from weft.options import Options

KEPT_FORWARDS = 32
"""Numbers of rows whose kernels are kept per network."""
KEPT_NETWORKS = 256
"""Whose kernels are kept though no module may be left that has such a network."""
KEPT_BACKWARDS = 128
"""Numbers of rows, with what gradients are wanted of them, whose launches are kept per network."""
KEPT_BYTES = 1 << 30
"""What a backward pass may take for values between its kernels; more rows are done in parts."""
CONTESTED = 128
"""Columns from which training in one kernel for all layers is measured against a kernel for each product."""
_SPILLED = 64
"""Bytes of a thread's registers in memory with which a kernel is still worth measuring."""
_MANY = 1 << 14
"""Rows from which the shapes of gradients are measured anew."""
Reference = Callable[[torch.Tensor], object]
"""An input -> what torch's operations make of it."""
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
        self._addresses: list[int] = []
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
        if parameters != self._addresses:
            self._addresses = list(parameters)
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
    """The kernels of gradients, loaded, and their launches for one number of rows."""

    step: Step
    functions: dict[str, Function] = field(default_factory=dict)

    @staticmethod
    def of(step: Step, cubin: Path) -> Backward:
        """Loaded.

        Raises:
            DeviceError: this device has too little for it [W301].
        """
        module = Module(cubin)
        made = Backward(step)
        for launch in (*step.source.pack, *step.source.launches):
            if launch.entry not in made.functions:
                made.functions[launch.entry] = module.function(launch.entry)
                made.functions[launch.entry].prepare(launch.shared_bytes)
        return made

    def direct(self, launch: Launch) -> Direct:
        """A launch whose addresses are written later."""
        words = [x.value if isinstance(x, Number) else 0 for x in launch.arguments]
        return Direct(
            self.functions[launch.entry],
            launch.grid,
            launch.block,
            words,
            shared_bytes=launch.shared_bytes,
            dependent=launch.dependent,
        )

    def image(self) -> torch.Tensor:
        """Room for the image of the weights."""
        with torch.inference_mode(mode=False):
            size = self.step.source.packed_bytes[0]
            return torch.empty(size, dtype=torch.uint8, device=torch.cuda.current_device())

    def call(self, image: torch.Tensor) -> BackwardCall:
        """With that image of the weights."""
        return BackwardCall(self, image)


class BackwardCall:
    """The kernels of gradients for so many rows and one image of the weights. Not for two threads at once."""

    def __init__(self, backward: Backward, image: torch.Tensor) -> None:
        """Launches are prepared.

        Raises:
            DeviceError: this device has too little for it [W301].
        """
        self.backward, self._image = backward, image
        source = backward.step.source
        self.scratch_bytes = backward.step.scratch_bytes
        self._addresses: list[int] = []
        (pack,) = source.pack
        self._pack = backward.direct(pack)
        self._pack.words[len(pack.arguments) - 1] = image.data_ptr()
        self._launches = [backward.direct(launch) for launch in source.launches]
        self._moves = [
            (direct.words, word, *at)
            for direct, launch in zip(self._launches, source.launches, strict=True)
            for word, x in enumerate(launch.arguments)
            if (at := backward.step.located(x)) is not None
        ]
        """(arguments, which of them, base, bytes behind it)"""

    def pack(self, parameters: Sequence[int], stream: int) -> None:
        """Make the image from parameters at these addresses."""
        if parameters != self._addresses:
            self._addresses = list(parameters)
            for word, place in enumerate(parameters):
                self._pack.words[word] = place
        self._pack.launch(stream)

    def run(self, x: int, dy: int, dx: int, gradients: int, scratch: int, stream: int) -> None:
        """Dense tensors by address; dx and gradients are written as far as the kernels were made for them.

        `scratch` has `scratch_bytes` bytes.
        """
        bases = x, dy, self._image.data_ptr(), scratch, gradients, dx
        for words, word, base, behind in self._moves:
            words[word] = bases[base] + behind
        for direct in self._launches:
            direct.launch(stream)


class Kernels:
    """All kernels of one network on one device; calls are made with that device current, and threads take turns."""

    def __init__(self, net: Network, facts: GpuFacts, nvrtc: Nvrtc, judge: Judge) -> None:
        self.net, self.facts, self.nvrtc, self.judge = net, facts, nvrtc, judge
        self.slices, self.elements = net.slices(), net.elements
        self.views = [(p.shape, (*p.shape[1:], 1), p.offset) for p in self.slices]
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
        self._backwards: OrderedDict[tuple[int, bool, bool, DType], Backward | Declined] = OrderedDict()
        self._shapes: dict[tuple[bool, bool, DType, bool], str] = {}
        """The name of what was fastest for fewer rows, or for many."""

    @property
    def changes(self) -> int:
        """How often something was refused or forgotten: what was found before is to be asked for again."""
        return self._changes + (0 if self._by_layers is None else self._by_layers.changes)

    @synchronized
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

    @synchronized
    def forward(self, x: torch.Tensor, parameters: Sequence[int], reference: Reference) -> Forward | Declined:
        """For the rows of x: the fastest schedule that was found right in a worker.

        `parameters`: their addresses. `reference` is what stands against layers that are wide.
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
        compiled = [(s, r) for s, r in zip(sources, results, strict=True) if isinstance(r, CompiledCubin)]
        if not compiled:
            return Declined("no forward kernel compiles")
        posed = forward_problem(self.net, len(x), self.net.masters)
        (won,) = self.judge.judged([trial_of(anywhere(posed), compiled)])
        if isinstance(won, Declined):
            return fallen_back(f"a forward pass of {len(x)} rows", won)
        source, made = compiled[won.number]
        try:
            forward = Forward.of(source, made.path)
        except WeftError as error:  # other than in the worker, too little is left
            return Declined(str(error).splitlines()[0])
        wide = source.schedule.param("template") == "mlp_wide"
        return self._or_torch(forward, x, parameters, reference) if wide else forward

    def _or_torch(
        self, forward: Forward, x: torch.Tensor, parameters: Sequence[int], reference: Reference
    ) -> Forward | Declined:
        """The kernel of wide layers, unless torch takes them faster one by one."""
        call = forward.call()
        y = torch.empty(len(x), self.net.widths[-1], dtype=SHORT[self.net.dtype], device=x.device)
        call.pack(parameters, stream())
        ours, theirs = contest([lambda: call.run(x.data_ptr(), y.data_ptr(), stream()), lambda: reference(x)])
        if theirs < ours:
            return Declined(f"layers of {max(self.net.widths)} columns, which are faster one by one for {len(x)} rows")
        return forward

    @synchronized
    def backward(self, rows: int, *, inputs: bool, parameters: bool, dtype: DType) -> Backward | Declined:
        """For gradients of these, those of parameters in `dtype`: the fastest that was found right in a worker."""
        key = rows, inputs, parameters, dtype
        found = self._backwards.get(key)
        if found is None:
            if torch.cuda.is_current_stream_capturing():
                return Declined("gradients are met first while a CUDA graph is captured")
            found = self._built(*key)
            while len(self._backwards) >= KEPT_BACKWARDS:
                self._backwards.popitem(last=False)
                self._changes += 1
            self._backwards[key] = found
            self._changes += isinstance(found, Declined)
        self._backwards.move_to_end(key)
        return found

    @synchronized
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

        It multiplies five times where layers do three times, at a part of the tensor cores' rate; layers wait for
        memory.
        """
        facts, net = self.facts, self.net
        c = costs_of(facts).training
        if not facts.peak_bandwidth:
            return False
        products = 2.0 * rows * sum(p.size for p in self.slices if len(p.shape) == 2)
        chain = 5 * products / (c.chained * facts.peak_flops(net.dtype.value)) * 1e6
        layers = layered.traffic(net, rows) / (c.layered * facts.peak_bandwidth * 1e3) + c.product_us * 3 * net.depth
        return chain > c.surely * layers

    @synchronized
    def refuse(self, rows: int, reason: Declined) -> None:
        """So many rows are not trained by kernels from now on."""
        self._slow[rows] = reason
        self._changes += 1

    @synchronized
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
                self._by_layers = ByLayers(self.net, self.facts, self.nvrtc, self._cache, self.judge)
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

    def _built(self, rows: int, inputs: bool, parameters: bool, dtype: DType) -> Backward | Declined:
        plans: list[Gradient] = []
        names: list[str] = []
        found = shapes(self.net, self.facts, parameters=parameters)
        for shape in found or (None,):
            plan = gradient(self.net, self.facts, shape, inputs=inputs, parameters=parameters, dtype=dtype)
            if isinstance(plan, Declined):
                return plan
            plans.append(plan)
            names.append(str(shape))
        results = self.nvrtc.compile_many([CompileJob(p.text, self.facts.arch) for p in plans], cache_dir=self._cache)
        compiled = [(p, n, r) for p, n, r in zip(plans, names, results, strict=True) if isinstance(r, CompiledCubin)]
        if not compiled:
            return Declined("no kernel of gradients compiles")
        whole = [x for x in compiled if x[2].of(x[0].chain.name).spill_stores <= _SPILLED] or compiled
        asked = {"inputs": inputs, "parameters": parameters, "dtype": dtype}
        problem = gradient_problem(self.net, rows, **asked)  # type: ignore[arg-type]
        steps = [
            (step(p, self.net, rows, KEPT_BYTES, name=n, **asked), r)  # type: ignore[arg-type]
            for p, n, r in whole
        ]
        known = inputs, parameters, dtype, rows >= _MANY
        first = [x for x in steps if x[0].source.schedule.param("name") == self._shapes.get(known)]
        why = Declined("nothing was tried")
        for some in (first, steps):
            if not some:
                continue
            (won,) = self.judge.judged([trial_of(problem, [(s.source, r) for s, r in some])])
            if isinstance(won, Declined):
                why = won
                continue
            best, made = some[won.number]
            self._shapes[known] = str(best.source.schedule.param("name"))
            try:
                return Backward.of(best, made.path)
            except WeftError as error:  # other than in the worker, too little is left
                return Declined(str(error).splitlines()[0])
        return fallen_back(f"gradients of {rows} rows", why)


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
    return Kernels(net, facts, nvrtc, _judge(device))


@lru_cache
def _judge(device: int) -> Judge:
    """The one of a GPU in this process."""
    facts, nvrtc = _facts(device), _compiler()
    assert not isinstance(facts, Declined)
    assert not isinstance(nvrtc, Declined)
    return Judge(facts, nvrtc, Options(device=f"cuda:{device}"))
