"""A compiled network as stages of a bounded time on a GPU, and the best-effort job that they are.

    job = network_job(spec, folder, plan, device=session.device, stream=session.low, held=held)
    session.add_job(job)

The plan is recorded step by step and each step is timed; steps that follow each other become stages of no more than
`STAGE_US`, unless one step takes longer. All recordings, of other priorities and parts of the GPU too, share one
memory, so an inference goes on wherever its next stage is launched.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import final

import torch

from weft.colocate.gpu import fits
from weft.colocate.inference_feed import InferenceFeed
from weft.colocate.inference_files import TensorSpec, named
from weft.colocate.job import JobError
from weft.colocate.network_job import NetworkGpuJob, first_inference
from weft.device.cuda import streams
from weft.device.cuda.api import call, driver_api
from weft.device.cuda.dispatch import Queue
from weft.device.cuda.facts import GpuFacts
from weft.errors import DeviceError, KernelDeclinedError
from weft.ir.declined import Declined
from weft.ir.graph import Graph, NodeId
from weft.kernels.scheduling import JobProgress, JobSpec
from weft.kernels.source import CudaSource
from weft.runtime.cuda_executable import CudaExecutable
from weft.runtime.streams import Lease

STAGE_US = 60.0
"""Of a stage alone, at most, unless a single step takes longer."""
_ROUNDS = 5
_INFERENCES = 3
"""Back to back, by which the times of stages are scaled."""
_LAUNCH_US = 25.0
"""Of the host for a launch and an event, at most."""


@final
class StagedPlan:
    """See `weft.colocate.network_job.StagedNetwork`."""

    def __init__(
        self, found: CudaExecutable, stream: torch.cuda.Stream, queue: Queue, *, stage_us: float = STAGE_US
    ) -> None:
        """Record a plan, made without a budget of an SM, and time its stages on an idle GPU.

        Args:
            found: the plan, whose inputs' buffers hold something to run on. It is recorded anew, and may be dropped.
            queue: puts stages and copies on streams.
            stream: of the lowest priority, with the whole GPU.
            stage_us: of a stage, at most.

        Raises:
            KernelDeclinedError: a step runs on the host, or a result is a value repeated [W205].
            DeviceError: the GPU refuses something [W301, W302].
        """
        self.base = stream.cuda_stream
        own = CudaExecutable(
            found.linked, device=found.device, lease=Lease(found.device, [stream]), stage_kernels=1
        )  # fmt: skip
        # values of indices stand behind the results; the kernels clamp them
        results = own.graph.outputs[: min((c.output for c in own.plan.checks), default=len(own.graph.outputs))]
        if not own.recorded_graphs:
            raise KernelDeclinedError(reason="a step of the network runs on the host: it cannot be recorded")
        if not all(x.is_contiguous() for x in own.static_outputs[: len(results)]):
            raise KernelDeclinedError(reason="a result of the network is a value repeated")
        for static, given in zip(own.static_inputs, found.static_inputs, strict=True):
            static.copy_(given)
        torch.cuda.synchronize()
        self._held: list[CudaExecutable] = [own]
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._queue = queue
        self._recorded: dict[int, list[int]] = {}
        """Of each stream the stages recorded there."""
        self._recorded[self.base] = list(own.recorded_graphs)
        busy = _Busy(found, stream)
        self.lengths = stages_of(self._times(len(own.recorded_graphs), busy), stage_us)
        """Steps of each stage."""
        del self._recorded[self.base]
        self._record(stream)
        self.stage_us = self._times(len(self.lengths), busy)
        self.inputs = _tensors(own.graph, own.graph.inputs, own.graph.input_names)
        self.outputs = _tensors(own.graph, results, own.graph.output_names[: len(results)])

    @property
    def executable(self) -> CudaExecutable:
        """The plan, whose memory this works in."""
        return self._held[0]

    def add(self, stream: int) -> bool:
        """See `StagedNetwork`."""
        if stream in self._recorded:
            return False
        self._queue.drain()
        self._record(torch.cuda.ExternalStream(stream))  # type: ignore[no-untyped-call]
        return True

    def launch(self, stage: int, stream: int) -> None:
        """See `StagedNetwork`."""
        stages = self._recorded.get(stream) or self._recorded[self.base]
        self._queue.launch(stages[stage], stream)

    def fill(self, places: Sequence[int], stream: int) -> None:
        """See `StagedNetwork`."""
        for place, static in zip(places, self.executable.static_inputs, strict=True):
            if static.nbytes:
                self._queue.fill(static.data_ptr(), place, static.nbytes, stream)

    def fetch(self, places: Sequence[int], stream: int) -> None:
        """See `StagedNetwork`."""
        for place, static in zip(places, self.executable.static_outputs, strict=False):
            if static.nbytes:
                self._queue.copy(place, static.data_ptr(), static.nbytes, stream)

    def wait(self) -> None:
        """See `StagedNetwork`."""
        self._queue.drain()
        torch.cuda.synchronize()

    def fits(self, facts: GpuFacts, sms: int) -> Declined | None:
        """See `StagedNetwork`. On the rest of a split, clusters may find no room (`device.cuda.partition`)."""
        if (why := fits(self.executable, facts, sms)) is not None:
            return why
        kernels = [s.kernel for s in self.executable.plan.steps]
        clusters = any(math.prod(x.cluster) > 1 for k in kernels if isinstance(k, CudaSource) for x in k.launches)
        return Declined("kernels in clusters may find no room on that part") if clusters else None

    def close(self) -> None:
        """Give the plan's memory back; nothing of it is launched any more."""
        with contextlib.suppress(DeviceError):  # it was raised where it was met
            self._queue.drain()
        torch.cuda.synchronize()
        self._recorded.clear()
        self._graphs.clear()
        self._held.clear()

    def _record(self, stream: torch.cuda.Stream) -> None:
        graphs = self.executable.stages_on(stream, self.lengths)
        self._graphs += graphs
        self._recorded[stream.cuda_stream] = [g.raw_cuda_graph_exec() for g in graphs]

    def _times(self, stages: int, busy: Callable[[int], None]) -> list[float]:
        """Microseconds of each stage on `base`: medians, so scaled that they are an inference of many back to back."""
        stream = torch.cuda.ExternalStream(self.base)  # type: ignore[no-untyped-call]
        launch = partial(_launched, self._recorded[self.base], self.base)
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(stages + 1)]  # type: ignore[no-untyped-call]
        rounds: list[list[float]] = []
        for _ in range(_ROUNDS + 1):
            busy(stages)
            for k in range(stages):
                marks[k].record(stream)
                launch(k)
            marks[stages].record(stream)
            stream.synchronize()
            rounds.append([float(marks[k].elapsed_time(marks[k + 1])) * 1e3 for k in range(stages)])
        busy(_INFERENCES * stages)
        marks[0].record(stream)
        for _ in range(_INFERENCES):
            for k in range(stages):
                launch(k)
        marks[1].record(stream)
        stream.synchronize()
        whole = float(marks[0].elapsed_time(marks[1])) * 1e3 / _INFERENCES
        each = [statistics.median(r[k] for r in rounds[1:]) for k in range(stages)]
        return [x * whole / sum(each) for x in each]


def _launched(graphs: Sequence[int], stream: int, number: int) -> None:
    """Launch a graph at once, by the caller: between events of the framework."""
    api = driver_api()
    call(api.cuGraphLaunch, api.CUgraphExec(graphs[number]), api.CUstream(stream))


class _Busy:
    """A plan's own graph on a stream, while the host launches ahead behind it: else the host is what is timed."""

    def __init__(self, plan: CudaExecutable, stream: torch.cuda.Stream) -> None:
        # not `plan.replay`: the framework would note the stream of the plan's memory, which may outlive the stream
        self._plan, self._stream = plan, stream
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        self._run()
        first.record(stream)
        self._run()
        last.record(stream)
        stream.synchronize()
        self._us = max(1.0, float(first.elapsed_time(last)) * 1e3)

    def __call__(self, launches: int) -> None:
        """For as long as so many launches take."""
        for _ in range(math.ceil(launches * _LAUNCH_US / self._us)):
            self._run()

    def _run(self) -> None:
        graphs = self._plan.recorded_graphs
        for k in range(len(graphs)):
            _launched(graphs, self._stream.cuda_stream, k)


def stages_of(step_us: Sequence[float], most_us: float) -> list[int]:
    """How many steps each stage has: as many as follow each other within a time, at least one."""
    found: list[int] = []
    held = 0.0
    for us in step_us:
        if found and held + us <= most_us:
            found[-1] += 1
            held += us
        else:
            found.append(1)
            held = us
    return found


def network_job(
    spec: JobSpec, folder: Path, plan: CudaExecutable, *, device: Queue, stream: torch.cuda.Stream, held: ExitStack,
    progress: JobProgress | None = None, stage_us: float = STAGE_US,
) -> NetworkGpuJob:  # fmt: skip
    """A job of kind `network` on the GPU of the current context.

    Args:
        spec: what `weft.colocate.job.read_job` gave.
        folder: where its job.toml lies.
        plan: of its model, made without a budget of an SM.
        device: of the session that runs it.
        stream: of the lowest priority, with the whole GPU.
        held: gives back all that is taken.
        progress: where it goes on (`weft.colocate.job.resume`); None: at its begin.
        stage_us: of a stage, at most.

    Raises:
        JobError: inputs that are none of the model's, more memory than it may have, or the progress of another job
            [W018].
        ArtifactError: the folder of results cannot be made [W401].
        KernelDeclinedError: the plan cannot be recorded as stages [W205].
        DeviceError: the GPU refuses something, or the process of its files cannot be started [W301, W302].
    """
    before = torch.cuda.memory_allocated()
    network = StagedPlan(plan, stream, device, stage_us=stage_us)
    with ExitStack() as failed:
        failed.callback(network.close)
        taken = torch.cuda.memory_allocated() - before
        if spec.memory_bytes and taken > spec.memory_bytes:
            problem = f"its plan takes {taken} bytes, it may have {spec.memory_bytes}"
            raise JobError(where=spec.name, key="memory", problem=problem, remedy="raise it")
        feed = _feed(spec, folder, network, progress, failed)
        failed.callback(_ended, network)  # before memory that copies use is given back
        job = NetworkGpuJob(spec, network, feed, device, files=len(feed.files), progress=progress)
        held.push(failed.pop_all())
    return job


def _ended(network: StagedPlan) -> None:
    with contextlib.suppress(DeviceError):  # it was raised where it was met
        network.wait()


def _feed(
    spec: JobSpec, folder: Path, network: StagedPlan, progress: JobProgress | None, held: ExitStack
) -> InferenceFeed:
    def first(files: int) -> tuple[int, int]:
        return first_inference(spec, files, progress), spec.passes * files

    return InferenceFeed(
        spec, folder, network.inputs, network.outputs, span=first, held=held, pin=partial(streams.pinned, held)
    )  # fmt: skip


def _tensors(graph: Graph, nodes: Sequence[NodeId], names: Sequence[str]) -> tuple[TensorSpec, ...]:
    found = []
    for name, node in zip(named(names, len(nodes)), nodes, strict=True):
        t = graph.type_of(node)
        if t.dtype.is_emulated:
            raise KernelDeclinedError(reason=f"{name} is {t.dtype.value}, which no .npz file holds")
        found.append(TensorSpec(name, t.shape, t.dtype.numpy.name))
    return tuple(found)
