"""A plan made runnable: memory laid out, weights repacked, launches bound; callable on tensors.

Inputs are read by address where they are dense, aligned and read by native kernels only, else they are copied
into a static buffer. Outputs are fresh tensors per call. Calls from several threads are serialised by a lock:
the arena exists once.
"""

from __future__ import annotations

import ctypes
import statistics
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, cast, final

import numpy as np
import torch

from weft.device.launch import NativeKernel, Pointers, pointer_array
from weft.device.pages import HUGE, ask_for_huge_pages
from weft.device.toolchain import HostCompiler
from weft.errors import DeviceError, InvalidGraphError
from weft.errors import InputError as InputError  # noqa: PLC0414 - found here, too
from weft.generate.library.execute import TORCH_DTYPE, BoundCall
from weft.ir import attrs as a
from weft.ir.graph import Graph, NodeId
from weft.ir.prims import Prim
from weft.ir.types import Array, DType, TensorType
from weft.kernels.formats import Format
from weft.kernels.plan import Plan, Step
from weft.kernels.source import KernelSource, LibraryCall
from weft.runtime.in_place import NOTHING_BOUND, Ending, InPlace, aliasing, ending, is_stored
from weft.runtime.indices import checked
from weft.runtime.memory import ALIGNMENT, Lifetime, MemoryPlan, plan_memory
from weft.runtime.runner import NativeRun, NativeStep, Runner
from weft.runtime.values import Key, survey


def without_autocast(kind: str) -> AbstractContextManager[None]:
    """Library calls compute in the types of a plan, whatever the caller's autocast is set to for `cpu` or `cuda`."""
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


@contextmanager
def _limited(threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def threads_of(count: int) -> AbstractContextManager[None]:
    """The framework's operators use that many threads inside; 0, or the number that is set: as they would."""
    return _limited(count) if count and torch.get_num_threads() != count else nullcontext()


def check_count(tensors: Sequence[torch.Tensor], types: Sequence[TensorType]) -> None:
    """InputError where a call has more or fewer tensors than the model takes [W011]."""
    if len(tensors) != len(types):
        problem = f"the model takes {len(types)} tensors, {len(tensors)} were given"
        raise InputError(position=len(tensors), problem=problem)


@dataclass(frozen=True)
class Linked:
    """What a plan needs besides itself: compiled objects by the SHA-256 of their source."""

    graph: Graph
    plan: Plan
    objects: Mapping[str, Path]
    compiler: HostCompiler | None
    cache_dir: Path | None = None
    threads: int = 0
    facts: Mapping[str, str] = field(default_factory=dict)
    made_for: str = ""
    """The kind of device (`weft.device.kinds`); empty: as `facts` say."""

    @property
    def kind(self) -> str:
        """The kind of device that the objects are for."""
        return self.made_for or ("cuda" if "gpu" in self.facts else "cpu")

    @property
    def target(self) -> str:
        """What objects for a GPU were compiled for, as their compiler calls it."""
        return f"sm_{self.facts['capability']}" if self.kind == "cuda" else self.facts.get("target", self.kind)


def to_torch(data: Array, dtype: DType, *, aligned: bool = True) -> torch.Tensor:
    """A constant as a tensor that shares memory where it can. It must not be written.

    `aligned`: to 64 bytes, which NumPy's memory mostly is not, so that it is copied.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that the array is read-only: no kernel writes a constant
        tensor = torch.from_numpy(np.ascontiguousarray(data).reshape(data.shape))
    if dtype.is_emulated:
        return tensor.to(TORCH_DTYPE[dtype])
    return tensor.clone() if aligned and tensor.data_ptr() % ALIGNMENT else tensor


@dataclass(frozen=True, slots=True)
class _Patch:
    """A pointer that changes with every call."""

    array: Pointers
    slot: int
    external: int
    """Index into inputs, or into outputs when `is_output`."""
    is_output: bool


@final
class Executable:
    """Callable on tensors of the compiled signature; returns a tuple of fresh tensors.

    Raises (on call):
        InputError: wrong number, shape, type or device of the tensors [W011].
        IndexOutsideError: the plan has checks, and an index is outside of its bounds [W013].
    """

    device: ClassVar[torch.device] = torch.device("cpu")
    """Where inputs must be."""

    def __init__(
        self,
        linked: Linked,
        *,
        bound: Mapping[int, torch.Tensor] = NOTHING_BOUND,
        written: Sequence[tuple[int, torch.Tensor]] = (),
    ) -> None:
        """Lay out memory, repack weights and bind all launches.

        `bound`: inputs by position that every call is given in these tensors: they are read where they lie, if dense
        and aligned.
        `written`: tensors that get an output each, by its position, at the end of a call: nothing of Python runs
        between the first byte that is written there and the last. Where that is safe, the step that computes an output
        writes it there itself (see `in_place`). Needs a compiler.

        Raises:
            InvalidGraphError: the plan reads a value before a step wrote it: our bug.
            DeviceError: a compiled object cannot be loaded.
        """
        self.linked = linked
        self.graph = linked.graph
        self.plan = linked.plan
        self._values = survey(self.graph, self.plan)
        self._bound = {k: x.detach() for k, x in bound.items() if self._may_lie(k, x)}
        self._written = [(k, x.detach()) for k, x in written]
        self._ending: Ending | None = None
        if written:
            self._ending = ending(self.graph, self.plan, self._values, self._written, self._bound, ALIGNMENT)
            self.plan, self._values = self._ending.plan, self._ending.values
        self._lock = threading.Lock()
        self._poison: int | None = None
        self._shown: tuple[Sequence[torch.Tensor], list[torch.Tensor]] | None = None
        """What `run_steps` was given and makes, while it runs."""
        self.check_indices = True
        """False where the plan's `checks` are passed over: values that were drawn may lie anywhere."""
        self._threads = linked.plan.threads or linked.threads or torch.get_num_threads()
        self._constants: dict[NodeId, torch.Tensor] = {}
        self._native = {i for i, s in enumerate(self.plan.steps) if isinstance(s.kernel, KernelSource)}
        self._direct_inputs = [
            k not in self._bound and self._all_native((n, Format.ROW)) for k, n in enumerate(self.graph.inputs)
        ]
        self._direct_outputs = self._choose_direct_outputs()
        self._targets = dict(self._written)
        self._overwritten = {x.untyped_storage().data_ptr() for _, x in self._written}
        self._rest: list[tuple[int, torch.Tensor]] = []
        """Outputs by position, and tensors, that the framework copies them to behind the last step."""
        self._patches: list[_Patch] = []
        self._packs: list[Callable[[], None]] = []
        # what is made in inference mode cannot be written outside of it
        with torch.inference_mode(mode=False), without_autocast("cpu"):
            self.memory = self._allocate()
            self._fixed = self._fixed_outputs()
            self._weights = _Pool([n for i in sorted(self._native) for n in self._source(i).packed_bytes])
            self._launches = self._bind()
            self._pack_weights()
        self._input_types = [self.graph.type_of(n) for n in self.graph.inputs]
        self._expected = [(torch.Size(t.shape), TORCH_DTYPE[t.dtype]) for t in self._input_types]
        outputs = map(self.graph.type_of, self.graph.outputs)
        self._like = [torch.empty(t.shape, dtype=TORCH_DTYPE[t.dtype], device="cpu") for t in outputs]
        """What outputs are like; nobody writes them, so that they take no memory."""
        self._all_direct = (
            all(self._direct_inputs)
            and all(self._direct_outputs.get(n) == k for k, n in enumerate(self._values.finals))
            and all(isinstance(launch, NativeRun) for launch in self._launches)
            and not self.plan.checks
            and not self._written
        )
        """Nothing but kernels on the caller's own tensors: a call needs no context of the framework."""

    # -- what is stored where

    def _source(self, i: int) -> KernelSource:
        """The kernel of a native step."""
        return cast("KernelSource", self.plan.steps[i].kernel)

    def _all_native(self, key: Key) -> bool:
        return all(i in self._native for i in self._values.readers.get(key, []))

    def _may_lie(self, position: int, tensor: torch.Tensor) -> bool:
        """Whether an input may be read where it lies, by kernels and library calls alike."""
        viewed = self.graph.inputs[position] in self._values.finals
        plain = tensor.is_cpu and tensor.is_contiguous() and not tensor.is_neg()
        return plain and tensor.data_ptr() % ALIGNMENT == 0 and not viewed

    def _fixed_outputs(self) -> dict[int, torch.Tensor]:
        """Outputs by position that every call writes into the same memory: the caller's, or what is copied there."""
        if self._ending is None:
            return {}
        found = dict(self._ending.held)
        for k, _ in self._written:
            if k not in found and self._direct_outputs.get(self._values.finals[k]) == k:
                t = self.graph.type_of(self.graph.outputs[k])
                found[k] = typed(_aligned(t.nbytes), t, Format.ROW, 0)
        return found

    def _choose_direct_outputs(self) -> dict[NodeId, int]:
        """Stored values that native kernels write straight into the tensor that is returned."""
        direct: dict[NodeId, int] = {}
        for position, node in enumerate(self._values.finals):
            key = (node, Format.ROW)
            shares = self.graph.type_of(node).size == self.graph.type_of(self.graph.outputs[position]).size
            writers = [i for i, s in enumerate(self.plan.steps) if key in s.outputs]
            native = bool(writers) and all(i in self._native for i in writers)
            if native and shares and node not in direct and self._all_native(key):
                direct[node] = position
        return direct

    def _allocate(self) -> MemoryPlan:
        end = len(self.plan.steps)
        kept = {(n, Format.ROW) for n in self._values.finals}
        lifetimes: list[Lifetime] = []
        self._slots: dict[Key, int] = {}
        for key, first in self._values.first_write.items():
            if key[1] is Format.ROW and key[0] in self._direct_outputs:
                continue
            last = end if key in kept else self._values.last_use(key)
            self._slots[key] = len(lifetimes)
            lifetimes.append(Lifetime(self.graph.type_of(key[0]).nbytes, first, last))
        self._workspaces: dict[int, int] = {}
        for i in self._native:
            size = self._source(i).workspace_bytes
            if size:
                self._workspaces[i] = len(lifetimes)
                lifetimes.append(Lifetime(size, i, i))
        memory = plan_memory(lifetimes)
        self._arena = _aligned(memory.arena_bytes)
        self._static: dict[Key, torch.Tensor] = {}
        for key, slot in self._slots.items():
            self._static[key] = self._view(key, memory.offsets[slot])
        for node in self.graph.inputs:
            t = self.graph.type_of(node)
            self._static[node, Format.ROW] = typed(_aligned(t.nbytes), t, Format.ROW, 0)
        self._static.update(((self.graph.inputs[k], Format.ROW), x) for k, x in self._bound.items())
        return memory

    def _view(self, key: Key, offset: int) -> torch.Tensor:
        return typed(self._arena, self.graph.type_of(key[0]), key[1], offset)

    def _constant(self, node: NodeId) -> torch.Tensor:
        if node not in self._constants:
            self._constants[node] = to_torch(self.graph.constant(node), self.graph.type_of(node).dtype)
        return self._constants[node]

    # -- launches

    def _bind(self) -> list[Callable[[], None]]:
        launches: list[Callable[[], None]] = []
        run: list[NativeStep] = []
        keep: list[NativeKernel | Pointers] = []
        runner: Runner | None = None

        def flush() -> None:
            nonlocal run, keep
            if run and runner is not None:
                launches.append(runner.bind(run, keep, self._threads))
            run, keep = [], []

        end = self._ending
        others = self._aliasing_kernels(end.over) if end is not None else {}
        for i, step in enumerate(self.plan.steps):
            if end is not None and i == end.first:
                flush()
            if i in self._native:
                if runner is None:
                    runner = self._runner()
                native, used = self._bind_native(i, step, others.get(i))
                run.append(native)
                keep += used
            else:
                flush()
                launches.append(self._bind_call(step))
        if end is not None:
            runner = runner or self._runner()
            copies, self._rest = self._copies()
            copy, arrays = runner.copying(copies)
            run.append(copy)
            keep += arrays
        flush()
        return launches

    def _aliasing_kernels(self, steps: Iterable[int]) -> dict[int, NativeKernel]:
        """Kernels of steps that write over what they read."""
        compiler = self._compiler()

        def made(i: int) -> NativeKernel:
            source = aliasing(self._source(i))
            path = compiler.compile(source.text, source.flags, cache_dir=self.linked.cache_dir).path
            return NativeKernel(path, source.entry)

        with ThreadPoolExecutor(self._threads) as pool:
            return dict(zip(steps, pool.map(made, steps), strict=True))

    def _copies(self) -> tuple[list[tuple[int, int, int]], list[tuple[int, torch.Tensor]]]:
        """What is copied to the caller's tensors in memory (from, to, bytes), and what the framework has to copy."""
        assert self._ending is not None
        copies, rest = [], []
        for k, target in self._written:
            node, held = self._values.finals[k], self._ending.held.get(k)
            if held is not None and held.data_ptr() == target.data_ptr():
                continue
            t = self.graph.type_of(node)
            plain = target.is_contiguous() and target.dtype is TORCH_DTYPE[t.dtype] and target.nbytes == t.nbytes
            if not plain or not is_stored(self.graph, self._values, k):
                rest.append((k, target))
                continue
            direct = self._direct_outputs.get(node)
            source = self._fixed.get(k if direct is None else direct, self._static.get((node, Format.ROW)))
            if source is None:  # it lies in a result that a call makes
                rest.append((k, target))
            elif target.nbytes:
                copies.append((source.data_ptr(), target.data_ptr(), target.nbytes))
        return copies, rest

    def _runner(self) -> Runner:
        return Runner(self._compiler(), self.linked.cache_dir)

    def _compiler(self) -> HostCompiler:
        if self.linked.compiler is None:
            raise InvalidGraphError(problem="a plan with generated kernels but no compiled runner")
        return self.linked.compiler

    def _loaded(self, source: KernelSource) -> NativeKernel:
        """A kernel of its object, which lies in the cache; whoever keeps that may have taken it away since."""
        try:
            return NativeKernel(self.linked.objects[source.sha256], source.entry)
        except DeviceError:
            if self.linked.compiler is None:
                raise
        return NativeKernel(self.linked.compiler.compile(source.text, source.flags).path, source.entry)

    def _bind_native(
        self, i: int, step: Step, kernel: NativeKernel | None
    ) -> tuple[NativeStep, list[NativeKernel | Pointers]]:
        """`kernel`: in place of the step's own."""
        source = self._source(i)
        kernel = kernel or self._loaded(source)
        skipped = set(source.replaces_weights)
        inputs = pointer_array([0] * len(step.inputs))
        for slot, key in enumerate(step.inputs):
            if self.graph.nodes[key[0]].prim is Prim.CONSTANT:
                inputs[slot] = self._constant(key[0]).data_ptr()
            else:
                self._point(inputs, slot, key)
        outputs = pointer_array([0] * len(step.outputs))
        for slot, key in enumerate(step.outputs):
            self._point(outputs, slot, key)
        packed = pointer_array([self._weights.take(size) for size in source.packed_bytes])

        def pack() -> None:
            kernel.pack(inputs, packed)
            for slot in skipped:
                inputs[slot] = 0

        self._packs.append(pack)
        workspace = self._arena.data_ptr() + self.memory.offsets[self._workspaces[i]] if i in self._workspaces else 0
        arrays = [inputs, outputs, packed]
        addresses = [ctypes.addressof(x) for x in arrays]
        return NativeStep(kernel.address, addresses[0], addresses[1], workspace, addresses[2]), [kernel, *arrays]

    def _pack_weights(self) -> None:
        """Repack all weights, several at a time, and let go of those that nothing reads as they were."""
        if self._packs:
            with ThreadPoolExecutor(self._threads) as pool:
                list(pool.map(lambda pack: pack(), self._packs))
        self._packs = []
        read = {
            key[0]
            for i, step in enumerate(self.plan.steps)
            for slot, key in enumerate(step.inputs)
            if not (isinstance(step.kernel, KernelSource) and slot in step.kernel.replaces_weights)
        }
        self._constants = {n: t for n, t in self._constants.items() if n in read}

    def _point(self, array: Pointers, slot: int, key: Key) -> None:
        node, format = key
        if format is Format.ROW and node in self._direct_outputs:
            self._patches.append(_Patch(array, slot, self._direct_outputs[node], is_output=True))
        elif self.graph.nodes[node].prim is Prim.INPUT:
            position = self.graph.inputs.index(node)
            if self._direct_inputs[position]:
                self._patches.append(_Patch(array, slot, position, is_output=False))
            else:
                array[slot] = self._static[key].data_ptr()
        else:
            array[slot] = self._static[key].data_ptr()

    def _bind_call(self, step: Step) -> Callable[[], None]:
        weights = {
            slot: self._constant(node)
            for slot, (node, _) in enumerate(step.inputs)
            if self.graph.nodes[node].prim is Prim.CONSTANT
        }
        assert isinstance(step.kernel, LibraryCall)
        inputs = [weights[i] if i in weights else self._static[key] for i, key in enumerate(step.inputs)]
        outputs = [self._static[key] for key in step.outputs]
        return BoundCall(step.kernel, weights).launcher(inputs, outputs)

    # -- calling

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run once."""
        if self._all_direct and self._poison is None and (places := self._addresses(tensors)) is not None:
            fresh = [torch.empty_like(t) for t in self._like]
            with self._lock:
                self._patch(places, fresh)
                for launch in self._launches:
                    launch()
            return tuple(fresh)
        with self._lock, torch.no_grad(), without_autocast("cpu"):
            fresh = self._point_at(tensors)
            with threads_of(self.plan.threads):
                for launch in self._launches[: -1 if self._written else None]:
                    launch()
            if self._written:
                self._write(tensors, fresh)
            found = tuple(self._finish(i, tensors, fresh) for i in range(len(fresh)))
        return checked(found, self.plan.checks, look=self.check_indices) if self.plan.checks else found

    def _write(self, tensors: Sequence[torch.Tensor], fresh: list[torch.Tensor]) -> None:
        """The last steps, and the copies behind them: all or nothing, should an interrupt come."""
        last = self._launches[-1]
        assert isinstance(last, NativeRun)
        run, address, count, threads = last.call
        copy, targets = torch._foreach_copy_, [x for _, x in self._rest]
        sources = [self._shaped(self.graph.outputs[k], tensors, fresh) for k, _ in self._rest]
        try:
            run(address, count, threads)
        finally:
            if targets:
                copy(targets, sources)

    @property
    def in_place(self) -> InPlace | None:
        """What makes the same plan for tensors that stay where they are, as `bound` and `written` say.

        It knows nothing of this executable, which may be gone by then. None: a call looks at indices before it is done
        with, or there is no compiler.
        """
        linked = self.linked
        if self.plan.checks or linked.compiler is None:
            return None
        return lambda bound, written: Executable(linked, bound=bound, written=written)

    def time_steps(self, *tensors: torch.Tensor, rounds: int) -> tuple[float, ...]:
        """Median microseconds of each step in its place, between its neighbours, launched one by one from Python."""
        calls = [c for x in self._launches for c in (x.singly() if isinstance(x, NativeRun) else [x])]
        samples: list[list[float]] = [[] for _ in calls]
        with self._lock, torch.no_grad(), without_autocast("cpu"):
            fresh = self._point_at(tensors)  # outputs live until the walk ends
            for _ in range(rounds):
                for call, found in zip(calls, samples, strict=True):
                    start = time.perf_counter_ns()
                    call()
                    found.append((time.perf_counter_ns() - start) / 1e3)
            del fresh
        return tuple(statistics.median(x) for x in samples)

    def run_steps(self, before: Callable[[int], None], *tensors: torch.Tensor) -> None:
        """Run the steps one by one, for looking at the values between them (`stored`).

        Args:
            before: called with a step's number before it is launched, and with the number of steps at the end.
            tensors: what the model is called with.
        """
        calls = [c for x in self._launches for c in (x.singly() if isinstance(x, NativeRun) else [x])]
        with self._lock, torch.no_grad(), without_autocast("cpu"):
            self._shown = (tensors, self._point_at(tensors))
            for number, call in enumerate(calls):
                before(number)
                call()
            before(len(calls))
            self._shown = None

    def stored(self, key: Key) -> torch.Tensor:
        """What a value holds now, inside of `before`: memory that later steps may write."""
        node, format = key
        assert self._shown is not None
        tensors, fresh = self._shown
        if self.graph.nodes[node].prim is Prim.CONSTANT and key not in self._static:
            return to_torch(self.graph.constant(node), self.graph.type_of(node).dtype)
        if self.graph.nodes[node].prim is Prim.INPUT and format is Format.ROW:  # in another one a step has written it
            return tensors[self.graph.inputs.index(node)]
        if format is Format.ROW and node in self._direct_outputs:
            return fresh[self._direct_outputs[node]].reshape(self.graph.type_of(node).shape)
        return self._static[key]

    def with_graph(self, graph: Graph) -> Executable:
        """The same plan with the constants of another graph, which has the same nodes: its weights are packed anew."""
        return Executable(replace(self.linked, graph=graph))

    def poison(self, byte: int) -> None:
        """Have the next call find this byte in all memory that its steps write, outputs too: 0xFF is NaN in floats.

        A step that leaves its result as it was reads right as long as an earlier call wrote it.
        """
        self._poison = byte

    def _point_at(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Check the inputs, make the outputs, and point the launches at both."""
        check_count(tensors, self._input_types)
        addresses = [self._take(i, t) for i, t in enumerate(tensors)]
        fresh = [self._fixed[k] if k in self._fixed else torch.empty_like(t) for k, t in enumerate(self._like)]
        if self._poison is not None:
            for memory in (self._arena, *(x for k, x in enumerate(fresh) if k not in self._fixed)):
                ctypes.memset(memory.data_ptr(), self._poison, memory.nbytes)
            self._poison = None
        self._patch(addresses, fresh)
        return fresh

    def _patch(self, addresses: Sequence[int], fresh: Sequence[torch.Tensor]) -> None:
        for p in self._patches:
            p.array[p.slot] = fresh[p.external].data_ptr() if p.is_output else addresses[p.external]

    def _addresses(self, tensors: Sequence[object]) -> list[int] | None:
        """Where the inputs lie, if kernels can read each of them there; None: `_take` copies, or says what is wrong."""
        if len(tensors) != len(self._expected):
            return None
        found = []
        for tensor, (size, dtype) in zip(tensors, self._expected, strict=True):
            if not isinstance(tensor, torch.Tensor) or tensor.shape != size or tensor.dtype is not dtype:
                return None
            if not tensor.is_cpu or not tensor.is_contiguous() or tensor.is_neg():
                return None
            address = tensor.data_ptr()
            if address % ALIGNMENT:
                return None
            found.append(address)
        return found

    def _take(self, position: int, tensor: torch.Tensor) -> int:
        expected = self._input_types[position]
        if not isinstance(tensor, torch.Tensor):
            raise InputError(position=position, problem=f"a {type(tensor).__name__} is no tensor")
        if tuple(tensor.shape) != expected.shape or tensor.dtype is not TORCH_DTYPE[expected.dtype]:
            got = f"{tuple(tensor.shape)} {tensor.dtype}"
            raise InputError(position=position, problem=f"expected {expected}, got {got}")
        if tensor.device.type != "cpu":
            raise InputError(position=position, problem=f"expected a CPU tensor, got {tensor.device}")
        if position in self._bound:
            if tensor.data_ptr() != self._bound[position].data_ptr():
                raise InputError(position=position, problem="it lies elsewhere than the tensor that is read in place")
            return tensor.data_ptr()
        plain = tensor.is_contiguous() and not tensor.is_neg()  # a negated view has the bits of what it negates
        if self._overwritten:
            plain = plain and tensor.untyped_storage().data_ptr() not in self._overwritten
        if self._direct_inputs[position] and plain and tensor.data_ptr() % ALIGNMENT == 0:
            return tensor.data_ptr()
        static = self._static[self.graph.inputs[position], Format.ROW]
        static.copy_(tensor)
        return static.data_ptr()

    def _finish(self, position: int, tensors: Sequence[torch.Tensor], fresh: list[torch.Tensor]) -> torch.Tensor:
        node = self._values.finals[position]
        out = fresh[position]
        if position in self._targets:
            return self._targets[position]
        if self._direct_outputs.get(node) == position:
            return out
        out.copy_(self._shaped(self.graph.outputs[position], tensors, fresh))
        return out

    def _shaped(self, node: NodeId, tensors: Sequence[torch.Tensor], fresh: list[torch.Tensor]) -> torch.Tensor:
        n = self.graph.nodes[node]
        if n.prim is Prim.RESHAPE:
            return self._shaped(n.inputs[0], tensors, fresh).reshape(n.type.shape)
        if n.prim is Prim.BROADCAST:
            return self._shaped(n.inputs[0], tensors, fresh).expand(n.type.shape)
        if n.prim is Prim.INPUT:
            return tensors[self.graph.inputs.index(node)]
        if n.prim is Prim.CONSTANT:
            return self._constant(node)
        if isinstance(n.attrs, a.IotaAttrs):
            size = n.type.shape[n.attrs.axis]
            line = torch.arange(size, dtype=TORCH_DTYPE[n.type.dtype], device="cpu")
            return line.reshape([size if k == n.attrs.axis else 1 for k in range(n.type.rank)]).expand(n.type.shape)
        if node in self._direct_outputs:
            return fresh[self._direct_outputs[node]].reshape(n.type.shape)
        return self._static[node, Format.ROW]

    @property
    def sm_shares(self) -> Sequence[str]:
        """None: a CPU has no SMs."""
        return ()

    @property
    def kernels(self) -> int:
        """Number of launches per call."""
        return len(self.plan.steps)


@final
class _Pool:
    """Repacked weights, side by side in one piece of memory."""

    def __init__(self, sizes: Sequence[int]) -> None:
        """For pieces of these sizes in bytes."""
        self._memory = _aligned(sum(_rounded(n) for n in sizes))
        self._used = 0

    def take(self, size: int) -> int:
        """Address of the next piece, at a 64-byte boundary."""
        address = self._memory.data_ptr() + self._used
        self._used += _rounded(size)
        return address


def _rounded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _aligned(size: int) -> torch.Tensor:
    """Uninitialised bytes at a 64-byte boundary, large ones at that of a huge page and in such pages."""
    unit = HUGE if size >= HUGE else ALIGNMENT
    raw = torch.empty(size + unit, dtype=torch.uint8, device="cpu")
    skip = -raw.data_ptr() % unit
    if unit == HUGE:
        ask_for_huge_pages(raw.data_ptr() + skip, size)
    return raw[skip : skip + size]


def typed(memory: torch.Tensor, type: TensorType, format: Format, offset: int) -> torch.Tensor:
    """A tensor of a type and format at a byte offset of some memory."""
    raw = memory[offset : offset + type.nbytes].view(TORCH_DTYPE[type.dtype])
    return raw.as_strided(type.shape, format.strides(type.shape))
