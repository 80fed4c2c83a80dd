"""A plan on an NVIDIA GPU: memory laid out once, weights packed once, all launches in CUDA graphs.

A call copies the inputs into static buffers (so that the recorded addresses stay valid), replays the graph, and
gives back copies of the outputs, all on the caller's current stream without waiting for the device. `replay` runs on
the static buffers alone: one launch and nothing else. Calls from several threads or streams are ordered, because
they share the buffers.
Inside a caller's own stream capture the launches are issued one by one, so that they become part of that graph. It
uses the same buffers: the caller must not replay it while another call of the executable runs on another stream.

A plan with several branches is recorded with as many streams, so that kernels which do not need each other may run
side by side; memory is laid out for that (see `lanes`). Outside of graphs its steps run one after another.

What a library call makes is kept as the tensor that it made, where that lies as the plan says: it is not copied into
the plan's own memory, and is given back after its last reader (see `_kept_values`). A generated kernel that reads it is
told where it lies when it is launched, which in a graph is once, when it is recorded.

Library calls run by the numeric policy that the plan was tuned with (`facts["allow_tf32"]`), whatever the process has
set. Steps that need the host (ONNX Runtime's operators) cannot be recorded: they stand between graphs.

Beside another plan it may be recorded as stages, graphs of a few kernels each, so that whoever launches them decides
between them (`weft.colocate.network`).
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, final

import torch

from weft.errors import InvalidGraphError
from weft.generate.bind import Addresses, BoundCuda, Prepared
from weft.generate.library.algorithm import with_room, workspace_bytes
from weft.generate.library.execute import TORCH_DTYPE, BoundCall, Held, is_capturable, plain_math
from weft.ir import attrs as a
from weft.ir.graph import Graph, NodeId
from weft.ir.prims import Prim
from weft.kernels.formats import Format
from weft.kernels.plan import Plan, Step
from weft.kernels.source import CudaSource, KernelSource, LibraryCall
from weft.runtime.budgeted import SM_BUDGET, Budgeted
from weft.runtime.executable import InputError, Linked, check_count, to_torch, typed, without_autocast
from weft.runtime.in_place import NOTHING_BOUND, InPlace, copies, held_by_caller, places_of, written_last
from weft.runtime.indices import checked
from weft.runtime.lanes import NOTHING_MORE, Use, order_of
from weft.runtime.memory import Lifetime, MemoryPlan, largest_live_set, plan_memory
from weft.runtime.streams import Lease
from weft.runtime.values import Key, Values, survey

ALIGNMENT = 256
"""Bytes: what the kernels' contract promises, and what tensor maps and wide loads need."""
LARGE = 16
"""A value is large of which so many are as large as all that is alive at once: lanes wait so that two share a place."""
Run = Callable[[], None]
Rebind = Callable[[BoundCuda, Addresses, bool], Prepared]
"""Another way to launch a step, from its kernel, its addresses and whether it may begin before its predecessor ends."""
_POLICY = threading.RLock()
"""The numeric policy belongs to the process: two threads that set and restore it in turn would leave it changed."""


@final
class StreamOrder:
    """Keeps calls in order that share buffers and come from several streams. Under the caller's lock."""

    def __init__(self, buffers: Sequence[torch.Tensor] = ()) -> None:
        self.buffers = list(buffers)
        """Their memory is not given to others while a stream that used them still runs."""
        self._last: torch.cuda.Stream | None = None
        self._known: set[int] = set()

    def enter(self) -> None:
        """The current stream waits for the last call on another one. Not in a capture: see the module."""
        if torch.cuda.is_current_stream_capturing():
            return
        stream = torch.cuda.current_stream()
        if self._last == stream:
            return
        if self._last is not None:
            stream.wait_stream(self._last)
        if stream.cuda_stream not in self._known:
            self._known.add(stream.cuda_stream)
            for buffer in self.buffers:
                buffer.record_stream(stream)
        self._last = stream


def _kept_values(plan: Plan, values: Values, rebound: Collection[int]) -> frozenset[Key]:
    """What one library call makes and other steps read, none of the `rebound` ones, and is no result of the plan.

    A call that writes its output itself has no tensor to keep. Between lanes or graphs no order of memory is known.
    """
    calls = ((i, s.kernel) for i, s in enumerate(plan.steps) if isinstance(s.kernel, LibraryCall))
    makers = {i for i, call in calls if not call.out_variant}
    finals = {(node, Format.ROW) for node in values.finals}
    return frozenset(
        key
        for key, writers in values.writers.items()
        if len(writers) == 1
        and writers[0] in makers
        and key not in finals
        and key in values.readers
        and not any(i in rebound for i in values.readers[key])
    )


@dataclass(frozen=True, slots=True)
class Stage:
    """Some steps of a plan that follow each other, launched together."""

    kernels: int
    """Launches of ours, library calls and copies, one each."""
    launch: Run
    """On the current stream."""


def _kernels_of(step: Step) -> int:
    return len(step.kernel.launches) if isinstance(step.kernel, CudaSource) else 1


def _launched_where_they_lie(
    prepare: Callable[[Addresses], Prepared], at: Addresses, held: Mapping[int, Callable[[], int]]
) -> Run:
    """What launches a kernel whose inputs at some positions lie elsewhere in every run, where these functions say.

    It is prepared anew only where they do not lie where they did.
    """
    told: list[int] = []
    prepared: Prepared | None = None

    def launch() -> None:
        nonlocal told, prepared
        now = [held[k]() if k in held else address for k, address in enumerate(at.inputs)]
        if prepared is None or now != told:
            prepared, told = prepare(replace(at, inputs=now)), now
        prepared(torch.cuda.current_stream().cuda_stream)

    return launch


def _launch_and_drop(launch: Run, ends: Sequence[Held]) -> None:
    launch()
    for held in ends:
        held.drop()


def _graph_of(run: Sequence[Run], stream: torch.cuda.Stream, pool: Any) -> torch.cuda.CUDAGraph:
    """What launches them on a stream, recorded."""
    graph = torch.cuda.CUDAGraph()
    # only this thread is kept from what cannot be recorded
    with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
        for launch in run:
            launch()
    return graph


@final
class CudaExecutable:
    """Callable on CUDA tensors of the compiled signature; returns a tuple of fresh tensors.

    Raises (on call):
        InputError: wrong number, shape, type or device of the tensors [W011].
        IndexOutsideError: the plan has checks, and an index is outside of its bounds; not in a capture [W013].
    """

    def __init__(
        self,
        linked: Linked,
        *,
        device: torch.device | None = None,
        lease: Lease | None = None,
        budgeted: Budgeted | None = None,
        stage_kernels: int = 0,
        rebound: Mapping[int, Rebind] | None = None,
        bound: Mapping[int, torch.Tensor] = NOTHING_BOUND,
        written: Sequence[tuple[int, torch.Tensor]] = (),
    ) -> None:
        """Allocate, pack weights, run once, and record the graphs.

        `lease`: streams to record on, shared with plans that never run at the same time (None: of its own).
        `budgeted`: loads the kernels of a plan that was made under a budget of an SM; its graphs are then brought to
        the GPU here, not by the first run.
        `stage_kernels`: kernels of a graph, more only where one step has more, and all steps one after another; 0: as
        many as there are, in as many streams as the plan has branches.
        `rebound`: by position steps of generated kernels that are launched in another way, with the same results.
        `bound`: inputs by position that every call is given in these tensors: they are read where they lie, if dense,
        aligned, and no output is a view of them.
        `written`: tensors that get an output each, behind the last step and in the same graph; not by the run here.
        Where that is safe, the step that computes an output writes it there itself (see `in_place`).

        Raises:
            InvalidGraphError: the plan reads a value before a step wrote it: our bug.
            DeviceError: a cubin cannot be loaded, a launch fails, or a step is over the budget.
        """
        if (SM_BUDGET in linked.facts) != (budgeted is not None):
            raise InvalidGraphError(problem="a plan under sm_budget is loaded as one without, or the other way round")
        self._budgeted = budgeted
        self.linked, self.graph, self.plan = linked, linked.graph, linked.plan
        self.device = device or torch.device("cuda", torch.cuda.current_device())
        """Where inputs must be."""
        self._lock = threading.Lock()
        self._input_types = [self.graph.type_of(n) for n in self.graph.inputs]
        self.check_indices = True
        """False where the plan's `checks` are passed over: values that were drawn may lie anywhere."""
        self._lease = lease or Lease(self.device)
        self._stage_kernels = stage_kernels
        self._rebound = rebound or {}
        self._values: Values = survey(self.graph, self.plan)
        self._bound: dict[int, torch.Tensor] = {}
        self._bound.update((k, x.detach()) for k, x in bound.items() if self._may_lie(k, x))
        self._copied = [k for k in range(len(self._input_types)) if k not in self._bound]
        """Inputs that a call copies in."""
        self._given = [(k, bound[k], bound[k].data_ptr(), bound[k].shape) for k in self._bound]
        """Tensors that are read where they lie, as they were checked: a training step has hundreds."""
        if written:
            self.plan = written_last(self.graph, self.plan, self._values, written, self._bound)
            self._values = survey(self.graph, self.plan)
        hosted = any(isinstance(s.kernel, LibraryCall) and not is_capturable(s.kernel) for s in self.plan.steps)
        # what is launched in another way, or beside others, may be run again
        self._shares = budgeted is None and not stage_kernels and not self._rebound
        lanes = 1 if hosted or stage_kernels else self.plan.branches
        more = self._waits_for_a_place() if lanes > 1 and self._shares else NOTHING_MORE
        self.order = order_of(self.plan, self._values, lanes, more)
        several = hosted or stage_kernels > 0 or self.order.width > 1
        args = (self.graph, self.plan, self._values, self.order, written, self._bound, ALIGNMENT)
        direct = held_by_caller(*args) if written else {}
        self._direct = {key: target.detach() for key, (_, target) in direct.items()}
        self._apart = frozenset(self._values.first_write[key] for key in direct)
        """Steps that write what is the caller's."""
        copied = frozenset(range(len(written))) - {at for at, _ in direct.values()}
        kept = frozenset() if several else _kept_values(self.plan, self._values, self._rebound)
        self._held: dict[Key, Held] = {key: self._room_of(key) for key in kept}
        self._constants: dict[NodeId, torch.Tensor] = {}
        self._state: list[torch.Tensor] = []
        self._loaded: dict[str, BoundCuda] = {}
        """By identity of the source: equal kernels are loaded once, however many steps they are."""
        self.allow_tf32 = linked.facts.get("allow_tf32") == "True"
        # what is made in inference mode cannot be written outside of it
        with torch.cuda.device(self.device), self._policy(), torch.inference_mode(mode=False), torch.no_grad():
            self.memory = self._allocate()
            self._packed, self._places = self._packed_weights()
            self.static_inputs = tuple(self._static[n, Format.ROW] for n in self.graph.inputs)
            self._launches = [self._bind(i, s) for i, s in enumerate(self.plan.steps)]
            self.static_outputs = tuple(self._shaped(n) for n in self.graph.outputs)
            self._ends = self._copied_outputs()
            self._written = frozenset(k for k, _ in written)
            self._writes = self._copies_into([x for at, x in enumerate(written) if at in copied])
            self.stages: tuple[Stage, ...] = tuple(self._record())
            """One after another they are a run."""
            self._segments = [stage.launch for stage in self.stages]
            self._bring()
        owned = [self._arena, *self.static_inputs, self._packed, *self._state, *self._constants.values()]
        owned += self.static_outputs if self._ends else ()
        self._order = StreamOrder(owned)

    @property
    def in_place(self) -> InPlace | None:
        """What makes the same plan for tensors that stay where they are, as `bound` and `written` say.

        It knows nothing of this executable, which may be gone by then. None: a call looks at indices before it is done
        with, or the plan is under a budget of an SM.
        """
        if self.plan.checks or self._budgeted is not None:
            return None
        linked, device = self.linked, self.device

        def placed(bound: Mapping[int, torch.Tensor], written: Sequence[tuple[int, torch.Tensor]]) -> CudaExecutable:
            torch.cuda.empty_cache()  # a larger arena that is gone would stay as a whole, for a part of it
            return CudaExecutable(linked, device=device, bound=bound, written=written)

        return placed

    def with_graph(self, graph: Graph) -> CudaExecutable:
        """The same plan with the constants of another graph, which has the same nodes: its weights are packed anew."""
        return CudaExecutable(
            replace(self.linked, graph=graph),
            device=self.device,
            budgeted=self._budgeted,
            stage_kernels=self._stage_kernels,
            rebound=self._rebound,
        )

    @contextlib.contextmanager
    def _policy(self) -> Iterator[None]:
        """How library calls compute while they are recorded; entered before the lock of the buffers."""
        with _POLICY, plain_math(allow_tf32=self.allow_tf32), without_autocast("cuda"):
            yield

    def _for_capture(self, captured: bool) -> AbstractContextManager[None]:
        """Steps that are launched one by one compute as they were recorded."""
        return self._policy() if captured else contextlib.nullcontext()

    # -- memory

    def _allocate(self) -> MemoryPlan:
        kept = {(n, Format.ROW) for n in self._values.finals}
        own = [key for key in self._values.first_write if key not in self._direct and key not in self._held]
        layout = self._laid_out(own, kept, {})
        if self._shares:
            chosen = frozenset(own) - kept
            places = places_of(self.graph, self.plan, self._values, self.order, chosen)
            other = self._laid_out(own, kept, places) if places else layout
            if other[0].arena_bytes < layout[0].arena_bytes:
                layout = other
        memory, lifetimes, slots, self._workspaces = layout
        self._offsets = memory.offsets
        self._arena = torch.empty(max(memory.arena_bytes, 1), dtype=torch.uint8, device=self.device)
        self._static: dict[Key, torch.Tensor] = {
            key: typed(self._arena, self.graph.type_of(key[0]), key[1], memory.offsets[slot])
            for key, slot in slots.items()
        }
        for key, target in self._direct.items():
            self._static[key] = target.view(self.graph.type_of(key[0]).shape)
        for position, node in enumerate(self.graph.inputs):
            t = self.graph.type_of(node)
            if position in self._bound:
                self._static[node, Format.ROW] = self._bound[position]
                continue
            raw = torch.zeros(max(t.nbytes, 1), dtype=torch.uint8, device=self.device)
            self._static[node, Format.ROW] = typed(raw, t, Format.ROW, 0)
        # what is kept takes memory of the framework's, as much as it would of the arena
        apart = [self._lifetime(key, kept) for key in self._held]
        return plan_memory([*lifetimes, *apart], alignment=ALIGNMENT) if apart else memory

    def _waits_for_a_place(self) -> dict[int, frozenset[int]]:
        """By step the others that read an operand of it in whose place its result is to lie: they must have ended.

        Of large values alone, as those would else run beside it.
        """
        kept = {(n, Format.ROW) for n in self._values.finals}
        own = [key for key in self._values.first_write if key not in kept]
        lifetimes = [self._lifetime(key, kept) for key in self._values.first_write]
        least = largest_live_set(lifetimes, [x.size for x in lifetimes]) / LARGE
        alone = order_of(self.plan, self._values, 1)
        found: dict[int, frozenset[int]] = {}
        for result, operand in places_of(self.graph, self.plan, self._values, alone, frozenset(own)).items():
            if self.graph.type_of(operand[0]).nbytes >= least:
                (writer,) = self._values.writers[result]
                others = frozenset(self._values.users(operand)) - {writer}
                found[writer] = found.get(writer, frozenset()) | others
        return found

    def _lifetime(self, key: Key, kept: Collection[Key]) -> Lifetime:
        last = len(self.plan.steps) if key in kept else self._values.last_use(key)
        return Lifetime(self.graph.type_of(key[0]).nbytes, self._values.first_write[key], last)

    def _laid_out(
        self, own: Sequence[Key], kept: Collection[Key], places: Mapping[Key, Key]
    ) -> tuple[MemoryPlan, list[Lifetime], dict[Key, int], dict[int, int]]:
        """The arena, what lies in it, where each value is among that, and each step's workspace.

        `places`: values that lie where others do, which come before them in `own`.
        """
        lifetimes: list[Lifetime] = []
        uses: list[Use] = []
        slots: dict[Key, int] = {}
        for key in own:
            life = self._lifetime(key, kept)
            use = Use(life.first, self._values.users(key), key in kept)
            if key in places:
                at = slots[key] = slots[places[key]]
                before, first = lifetimes[at], uses[at]
                lifetimes[at] = replace(before, last=max(before.last, life.last))
                uses[at] = replace(first, steps=(*first.steps, *use.steps))
                continue
            slots[key] = len(lifetimes)
            lifetimes.append(life)
            uses.append(use)
        workspaces: dict[int, int] = {}
        for i, step in enumerate(self.plan.steps):
            kernel = step.kernel
            size = kernel.workspace_bytes if isinstance(kernel, CudaSource) else workspace_bytes(kernel)
            if size:
                workspaces[i] = len(lifetimes)
                lifetimes.append(Lifetime(size, i, i))
                uses.append(Use(i, (i,)))
        conflicts = self.order.conflicts(uses) if self.order.width > 1 else None
        return plan_memory(lifetimes, alignment=ALIGNMENT, conflicts=conflicts), lifetimes, slots, workspaces

    def _room_of(self, key: Key) -> Held:
        t = self.graph.type_of(key[0])
        return Held(t.shape, key[1].strides(t.shape), TORCH_DTYPE[t.dtype], ALIGNMENT)

    def _packed_weights(self) -> tuple[torch.Tensor, list[list[int]]]:
        """Room for the packed weights of all steps in one piece, and the addresses there by step.

        Pieces of their own would share the framework's segments with the weights that packing leaves behind, and keep
        those from being given back.
        """
        places: list[list[int]] = []
        end = 0
        for step in self.plan.steps:
            sizes = step.kernel.packed_bytes if isinstance(step.kernel, CudaSource) else ()
            places.append([])
            for size in sizes:
                places[-1].append(end)
                end += -(-max(size, 1) // ALIGNMENT) * ALIGNMENT
        room = torch.empty(max(end, 1), dtype=torch.uint8, device=self.device)
        return room, [[room.data_ptr() + at for at in step] for step in places]

    def _constant(self, node: NodeId) -> torch.Tensor:
        if node not in self._constants:
            host = to_torch(self.graph.constant(node), self.graph.type_of(node).dtype, aligned=False)
            self._constants[node] = host.to(self.device)
        return self._constants[node]

    # -- launches

    def _bind(self, i: int, step: Step) -> Run:
        if isinstance(step.kernel, KernelSource):
            raise InvalidGraphError(problem=f"step {i} is a kernel for the CPU in a plan for a GPU")
        if isinstance(step.kernel, CudaSource):
            launch = self._bind_source(i, step, step.kernel)
        else:
            launch = self._bind_call(i, step, step.kernel)
        ends = [x for key, x in self._held.items() if self._values.last_use(key) == i]
        return partial(_launch_and_drop, launch, ends) if ends else launch

    def _bind_source(self, i: int, step: Step, source: CudaSource) -> Run:
        bound = self._load(source)
        held = {k: partial(self._address_held, self._held[x]) for k, x in enumerate(step.inputs) if x in self._held}
        inputs = [0 if k in held else self._address(key) for k, key in enumerate(step.inputs)]
        outputs = [self._address(key) for key in step.outputs]
        addresses = self._places[i]
        bound.pack(inputs, addresses, torch.cuda.current_stream().cuda_stream)
        torch.cuda.current_stream().synchronize()
        self._release(i, step, source.replaces_weights)
        state = 0
        if source.state_bytes:
            self._state.append(torch.zeros(source.state_bytes, dtype=torch.uint8, device=self.device))
            state = self._state[-1].data_ptr()
        work = self._arena.data_ptr() + self._offsets[self._workspaces[i]] if i in self._workspaces else 0
        # a kernel that waits for other lanes may not start before its predecessor in its own has ended
        dependent = not self.order.waits[i]
        at = Addresses(inputs, outputs, addresses, work, state)
        other = self._rebound.get(i)
        if held:
            return _launched_where_they_lie(partial(bound.prepare, dependent=dependent), at, held)
        prepared = bound.prepare(at, dependent=dependent) if other is None else other(bound, at, dependent)
        return lambda: prepared(torch.cuda.current_stream().cuda_stream)

    def _load(self, source: CudaSource) -> BoundCuda:
        identity = source.sha256
        if identity not in self._loaded:
            load = BoundCuda if self._budgeted is None else self._budgeted.load
            self._loaded[identity] = load(source, self.linked.objects[identity])
        return self._loaded[identity]

    def _address(self, key: Key) -> int:
        if self.graph.nodes[key[0]].prim is Prim.CONSTANT:
            return self._constant(key[0]).data_ptr()
        return self._static[key].data_ptr() or self._arena.data_ptr()  # what has no bytes has no address of its own

    def _address_held(self, held: Held) -> int:
        return held.read().data_ptr() or self._arena.data_ptr()

    def _release(self, i: int, step: Step, unread: Collection[int]) -> None:
        """Drop the weights at these positions that nothing else reads, now that they were packed or prepared."""
        for slot in unread:
            node = step.inputs[slot][0]
            everywhere = {r for (n, _), readers in self._values.readers.items() if n == node for r in readers}
            here = {k for k, (n, _) in enumerate(step.inputs) if n == node}
            if everywhere == {i} and here <= set(unread) and node not in self._values.finals:
                self._constants.pop(node, None)

    def _bind_call(self, i: int, step: Step, call: LibraryCall) -> Run:
        if self._budgeted is not None:
            self._budgeted.refuse(call)
        weights = {
            slot: self._constant(node)
            for slot, (node, _) in enumerate(step.inputs)
            if self.graph.nodes[node].prim is Prim.CONSTANT
        }
        if i in self._workspaces:
            call = with_room(call, len(step.inputs))
        bound = BoundCall(call, weights, device=self.device)
        unread = set(weights) - bound.reads
        weights.update(dict.fromkeys(unread, self._arena[:0]))
        self._release(i, step, unread)
        inputs = [weights[k] if k in weights else self._place(key) for k, key in enumerate(step.inputs)]
        outputs = [self._place(key) for key in step.outputs]
        if i in self._workspaces:
            start = self._offsets[self._workspaces[i]]
            inputs.append(self._arena[start : start + workspace_bytes(call)])
        return bound.launcher(inputs, outputs)

    def _place(self, key: Key) -> torch.Tensor | Held:
        return self._held[key] if key in self._held else self._static[key]

    # -- graphs

    def _record(self) -> list[Stage]:
        """Run once (libraries choose algorithms and allocate), then record runs of steps that may be recorded."""
        (stream,) = self._lease.streams(1)
        self._run_once(stream)
        stages: list[Stage] = []
        run: list[Run] = []
        held = 0
        self._graphs: list[torch.cuda.CUDAGraph] = []
        pool = torch.cuda.graph_pool_handle()
        if self.order.width > 1:
            graph = torch.cuda.CUDAGraph()
            lanes = self._lease.streams(max(self.order.lanes) + 1)  # here: one taken over is waited for
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                self._in_lanes(lanes)
            self._graphs.append(graph)
            return [Stage(self.kernels + len(self._ends) + len(self._writes), graph.replay)]

        def flush() -> None:
            nonlocal held
            if run:
                graph = _graph_of(run, stream, pool)
                self._graphs.append(graph)
                stages.append(Stage(held, graph.replay))
                run.clear()
                held = 0

        def add(launch: Run, kernels: int) -> None:
            nonlocal held
            if 0 < self._stage_kernels < held + kernels:
                flush()
            run.append(launch)
            held += kernels

        for step, launch in zip(self.plan.steps, self._launches, strict=True):
            if isinstance(step.kernel, LibraryCall) and not is_capturable(step.kernel):
                flush()
                stages.append(Stage(1, launch))
            else:
                add(launch, _kernels_of(step))
        for copy in (*self._ends, *self._writes):
            add(copy, 1)
        flush()
        return stages

    def _run_once(self, stream: torch.cuda.Stream) -> None:
        """On a stream, and wait; what writes to the caller's tensors is left out."""
        if stream != torch.cuda.current_stream():
            stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for i, launch in enumerate((*self._launches, *self._ends)):
                if i not in self._apart:
                    launch()
        stream.synchronize()

    def stages_on(self, stream: torch.cuda.Stream, lengths: Sequence[int]) -> tuple[torch.cuda.CUDAGraph, ...]:
        """Recorded once more on another stream, in the same memory, which is overwritten: all run once first.

        Graphs that are launched one after another are a run on what `static_inputs` hold. Whoever launches them keeps
        this, and runs it in no other way.

        Args:
            stream: of another priority or another part of the GPU.
            lengths: how many of this executable's own stages (`stage_kernels=1`: its steps) go into each graph.

        Raises:
            InvalidGraphError: other lengths than there are stages, or a stage that cannot be recorded.
            DeviceError: a launch fails.
        """
        runs = [*self._launches, *self._ends]
        if self._stage_kernels != 1 or len(self._graphs) != len(runs) or sum(lengths) != len(runs):
            raise InvalidGraphError(problem=f"{len(runs)} steps, recorded one by one, are no stages of {list(lengths)}")
        rest = iter(runs)
        pool = torch.cuda.graph_pool_handle()
        with self._policy(), self._lock, torch.cuda.device(self.device), torch.no_grad():
            self._run_once(stream)
            return tuple(_graph_of(list(itertools.islice(rest, n)), stream, pool) for n in lengths)

    def _bring(self) -> None:
        """Beside a co-runner the first run shall wait for nothing: what it would load, is loaded now."""
        if self._budgeted is not None:
            (stream,) = self._lease.streams(1)
            for graph in self._graphs:
                self._budgeted.residence.upload(graph.raw_cuda_graph_exec(), stream.cuda_stream)
            stream.synchronize()

    def _in_lanes(self, lanes: Sequence[torch.cuda.Stream]) -> None:
        """Put all steps on the streams of their lanes, beginning and ending on the first."""
        main = lanes[0]
        awaited = {p for waits in self.order.waits for p in waits}
        ended: dict[int, torch.cuda.Event] = {}
        for lane in lanes[1:]:
            lane.wait_stream(main)
        for i, (number, launch) in enumerate(zip(self.order.lanes, self._launches, strict=True)):
            with torch.cuda.stream(lanes[number]):
                for p in self.order.waits[i]:
                    lanes[number].wait_event(ended[p])
                launch()
                if i in awaited:
                    ended[i] = lanes[number].record_event()
        for lane in lanes[1:]:
            main.wait_stream(lane)
        with torch.cuda.stream(main):
            for copy in (*self._ends, *self._writes):
                copy()

    # -- calling

    def place(self, *tensors: torch.Tensor) -> None:
        """Put inputs into `static_inputs`, in the order of the current stream; `replay` or the stages then run on them.

        Raises:
            InputError: wrong number, shape, type or device of the tensors [W011].
        """
        self._check_all(tensors)
        with self._lock, torch.cuda.device(self.device), torch.no_grad():
            self._order.enter()
            self._put(tensors)

    def _put(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy inputs in, but for those that are read where they lie; none where none are given."""
        if tensors:
            for position in self._copied:
                self.static_inputs[position].copy_(tensors[position])

    @property
    def recorded_graphs(self) -> tuple[int, ...]:
        """Handles of its `CUgraphExec`, a run on what `static_inputs` hold if launched one after another on a stream.

        Empty where a step is launched by itself. Whoever launches them keeps this, and runs it in no other way.
        """
        if len(self._graphs) != len(self.stages):
            return ()
        return tuple(graph.raw_cuda_graph_exec() for graph in self._graphs)

    def replay(self) -> tuple[torch.Tensor, ...]:
        """Run on whatever `static_inputs` hold; the results stand in `static_outputs` until the next run.

        The way without copies: write the inputs into `static_inputs`, or have a kernel of your own write them there.
        """
        captured = torch.cuda.is_current_stream_capturing()
        with self._for_capture(captured), self._lock, torch.cuda.device(self.device), torch.no_grad():
            self._order.enter()
            for segment in (*self._launches, *self._ends, *self._writes) if captured else self._segments:
                segment()
        return checked(self.static_outputs, self.plan.checks, look=False)

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run once."""
        self._check_all(tensors)
        captured = torch.cuda.is_current_stream_capturing()
        with self._for_capture(captured), self._lock, torch.cuda.device(self.device), torch.no_grad():
            self._order.enter()
            self._put(tensors)
            for segment in (*self._launches, *self._ends, *self._writes) if captured else self._segments:
                segment()
            found = tuple(
                x if k in self._written else x.clone(memory_format=torch.contiguous_format)
                for k, x in enumerate(self.static_outputs)
            )
        if not self.plan.checks:
            return found
        # what is recorded has no values to look at yet
        return checked(found, self.plan.checks, look=self.check_indices and not captured)

    def poison(self, byte: int) -> None:
        """Fill all memory that steps write, outputs too, with this byte: 0xFF is NaN in every float.

        A step that leaves its result as it was reads right as long as an earlier run wrote it.
        """
        with self._lock, torch.cuda.device(self.device), torch.no_grad():
            self._order.enter()
            self._arena.fill_(byte)

    def stored(self, key: Key) -> torch.Tensor:
        """What a value holds now, inside of `before` of `run_steps`: memory that later steps may write."""
        if self.graph.nodes[key[0]].prim is Prim.CONSTANT and key not in self._static:
            node = key[0]
            return to_torch(self.graph.constant(node), self.graph.type_of(node).dtype, aligned=False).to(self.device)
        held = self._held.get(key)
        return self._static[key] if held is None else held.read()

    def run_steps(self, before: Callable[[int], None], *tensors: torch.Tensor) -> None:
        """Launch the steps one by one on what `static_inputs` hold, for looking at them.

        Args:
            before: called with a step's number before it is launched, and with the number of steps at the end.
            tensors: put into `static_inputs` first, if given.
        """
        with self._policy(), self._lock, torch.cuda.device(self.device), torch.no_grad():
            self._order.enter()
            self._put(tensors)
            for number, launch in enumerate(self._launches):
                before(number)
                launch()
            before(len(self._launches))
            for copy in self._ends:
                copy()

    def _check_all(self, tensors: Sequence[torch.Tensor]) -> None:
        check_count(tensors, self._input_types)
        for position in self._copied:
            self._check(position, tensors[position])
        for position, given, address, shape in self._given:
            tensor = tensors[position]
            if tensor is not given or tensor.data_ptr() != address or tensor.shape != shape:
                self._check(position, tensor)

    def _check(self, position: int, tensor: torch.Tensor) -> None:
        expected = self._input_types[position]
        if not isinstance(tensor, torch.Tensor):
            raise InputError(position=position, problem=f"a {type(tensor).__name__} is no tensor")
        if tuple(tensor.shape) != expected.shape or tensor.dtype is not TORCH_DTYPE[expected.dtype]:
            got = f"{tuple(tensor.shape)} {tensor.dtype}"
            raise InputError(position=position, problem=f"expected {expected}, got {got}")
        if tensor.device != self.device:
            raise InputError(position=position, problem=f"expected a tensor on {self.device}, got {tensor.device}")
        if position in self._bound and tensor.data_ptr() != self._bound[position].data_ptr():
            raise InputError(
                position=position, problem="it lies elsewhere than the tensor that the plan reads in place"
            )

    def _shaped(self, node: NodeId) -> torch.Tensor:
        n = self.graph.nodes[node]
        if n.prim is Prim.RESHAPE:
            return self._shaped(n.inputs[0]).reshape(n.type.shape)
        if n.prim is Prim.BROADCAST:
            return self._shaped(n.inputs[0]).expand(n.type.shape)
        if n.prim is Prim.CONSTANT:
            return self._constant(node)
        if isinstance(n.attrs, a.IotaAttrs):
            size = n.type.shape[n.attrs.axis]
            line = torch.arange(size, dtype=TORCH_DTYPE[n.type.dtype], device=self.device)
            return line.reshape([size if k == n.attrs.axis else 1 for k in range(n.type.rank)]).expand(n.type.shape)
        return self._static[node, Format.ROW]

    def _may_lie(self, position: int, tensor: torch.Tensor) -> bool:
        """Whether an input may be read where it lies."""
        self._check(position, tensor)
        viewed = self.graph.inputs[position] in self._values.finals
        return tensor.is_contiguous() and tensor.data_ptr() % ALIGNMENT == 0 and not viewed

    def _copies_into(self, written: Sequence[tuple[int, torch.Tensor]]) -> list[Run]:
        """What copies outputs into what is not the plan's own."""
        return [*copies((x.detach(), self.static_outputs[k]) for k, x in written)]

    def _copied_outputs(self) -> list[Run]:
        """What makes the outputs anew that are no views of what steps write: a repeated value is a copy."""

        def copy(output: torch.Tensor, node: NodeId) -> None:
            output.copy_(self._shaped(node))

        found: list[Run] = []
        for output, node, end in zip(self.static_outputs, self.graph.outputs, self._values.finals, strict=True):
            stored = self._static.get((end, Format.ROW))
            if stored is not None and output.untyped_storage().data_ptr() != stored.untyped_storage().data_ptr():
                found.append(partial(copy, output, node))
        return found

    @property
    def sm_shares(self) -> Sequence[str]:
        """Of a plan under a budget of an SM what each step takes of one, for people; else none."""
        if self._budgeted is None:
            return ()
        return [self._budgeted.share(s.kernel) if isinstance(s.kernel, CudaSource) else "" for s in self.plan.steps]

    @property
    def kernels(self) -> int:
        """Number of launches per replay that are ours, plus one per library call."""
        return sum(map(_kernels_of, self.plan.steps))
