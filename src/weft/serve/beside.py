"""A model and a best-effort job on one GPU, in the worker of a server, as a co-location bundle says.

One thread has the GPU, the policy and the socket. A batch is a query: its inputs are copied from the ring that front
end and worker share by the stream that it runs on, its results back by the same, and nothing waits for either.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import hashlib
import os
import sys
import time
import zipfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from weft.colocate.bundle import Bundle, read_bundle, read_plan
from weft.colocate.live import Ended, Machine, quietly
from weft.colocate.operating import longer, prepare
from weft.colocate.policy import Policy, drive
from weft.colocate.serving import Come, Served, ServingBackend
from weft.errors import ArtifactError, DeviceError, WeftError
from weft.kernels.scheduling import Query
from weft.options import Options
from weft.serve.channel import DONE, RUN, Channel, Kind
from weft.serve.errors import LostDeviceError
from weft.serve.plans import Plans, loaded
from weft.serve.ring import Ring
from weft.serve.signature import signature_of

if TYPE_CHECKING:
    from weft.colocate.job_on_gpu import PlacedJob
    from weft.device.cuda.dispatch import Queue
    from weft.runtime.cuda_executable import CudaExecutable

POLICY = "weft"
COLLECT_S = 60.0
"""So often garbage is collected, where no query waits for it."""
SAVE_S = 30.0
"""So often the job's progress is saved."""


@final
class RingIo:
    """What copies a query's inputs and results between a slot of a ring and a plan's buffers (`QueryIo`)."""

    def __init__(self, ring: Ring) -> None:
        """Of its only plan."""
        self.queue: Queue | None = None
        """Copies; None: nothing is copied, as while variants are measured."""
        self._number = 0
        self._slots = ring.slots
        self._inputs = [[int(x.ctypes.data) for x in ring.inputs(slot, 0)] for slot in range(ring.slots)]
        self._outputs = [[int(x.ctypes.data) for x in ring.outputs(slot, 0)] for slot in range(ring.slots)]

    def begin(self, query: Query) -> None:
        """See `QueryIo`."""
        self._number = query.number

    def fill(self, made: CudaExecutable, stream: int) -> None:
        """See `QueryIo`."""
        if self.queue is not None:
            for static, place in zip(made.static_inputs, self._inputs[self._number % self._slots], strict=True):
                if static.nbytes:
                    self.queue.fill(static.data_ptr(), place, static.nbytes, stream)

    def fetch(self, made: CudaExecutable, stream: int) -> None:
        """See `QueryIo`."""
        if self.queue is not None:
            for static, place in zip(made.static_outputs, self._outputs[self._number % self._slots], strict=True):
                if static.nbytes:
                    self.queue.copy(place, static.data_ptr(), static.nbytes, stream)


@final
class ChannelInbox:
    """Batches of a front end as queries, and its answers (`Inbox`)."""

    def __init__(
        self,
        channel: Channel,
        ring: Ring,
        *,
        tell: Callable[[Served, int], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`tell`: called about once a second, with what became of queries and the highest variant that is allowed."""
        self._channel, self._ring, self._tell, self._clock = channel, ring, tell, clock
        self._began: dict[int, float] = {}
        self.is_open = True
        """See `Inbox`: False once the front end is gone."""

    def take(self) -> Sequence[Come]:
        """See `Inbox`."""
        found: list[Come] = []
        while self.is_open and self._channel.has_more(0.0):
            message = self._channel.receive()
            if message is None or message.kind is not Kind.RUN:
                self.is_open = False
                break
            number, _, waited_s = RUN.unpack(message.body)
            self._began[number] = self._clock()
            found.append(Come(number, round(waited_s * 1e9)))
        return found

    def wait(self, ns: int) -> None:
        """See `Inbox`."""
        if self.is_open:
            self._channel.has_more(ns / 1e9)

    def done(self, number: int, ended: Ended) -> None:  # noqa: ARG002 - as it is called
        """See `Inbox`."""
        self._ring.mark(number)
        took = self._clock() - self._began.pop(number)
        try:
            self._channel.send(Kind.DONE, DONE.pack(number, took))
        except OSError:
            self.is_open = False  # nobody is told anything more

    def tick(self, served: Served, cap: int) -> None:
        """See `Inbox`."""
        self._tell(served, cap)


def opened(fd: int, name: str, trust: Sequence[str], options: Options, *, alone: bool) -> tuple[Plans | Beside, str]:
    """What runs the bundle in this open folder, and its digest: the model beside the job, or alone.

    Raises:
        ArtifactError, JobError, DeviceError: see `read_bundle` and `Beside` [W401, W018, W301].
    """
    folder = Path(f"/dev/fd/{fd}").resolve()
    lock = None if alone else taken(folder, name)
    if lock is None:
        plan, digest = read_plan(folder, trust=trust, cache_dir=options.cache)
        return Plans([loaded(plan, [_own_digest(plan)], options)]), digest
    bundle = read_bundle(folder, trust=trust, cache_dir=options.cache)
    return Beside(bundle, options, lock), bundle.digest


def taken(folder: Path, name: str) -> int | None:
    """A descriptor that keeps the bundle's job to this process while it is open; None, and said: another has it."""
    lock = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        _say(f"{name}: its job is beside the model in another process: here the model is alone")
        return None
    return lock


@final
class Beside:
    """What a worker runs of a bundle (`Answering`)."""

    def __init__(self, bundle: Bundle, options: Options, lock: int) -> None:
        """Load the plans. `lock`: see `taken`; it is closed behind the job.

        Raises:
            ArtifactError: a plan cannot be loaded, or is not one that batches run by as they lie in memory [W401].
            DeviceError: there is no GPU [W301].
        """
        self._bundle, self._options, self._held = bundle, options, ExitStack()
        self._held.callback(os.close, lock)
        self._placed: PlacedJob | None = None
        paths = [bundle.plan] if bundle.budgeted is None else [bundle.plan, bundle.budgeted]
        self._plans = [self._plan(path) for path in paths]
        for path, plan in zip(paths, self._plans, strict=True):
            if plan.plan.checks or not all(x.is_contiguous() for x in plan.static_outputs):
                problem = "its plan looks at indices, or gives a value repeated, which no query beside a job does"
                raise ArtifactError(where=path.name, problem=problem, remedy="prepare the bundle without check_indices")
        found = [signature_of([plan.graph])[0] for plan in self._plans]
        if len(set(found)) > 1:
            problem = "the plan under a budget takes or gives other tensors"
            raise ArtifactError(where=bundle.folder.name, problem=problem, remedy="prepare the bundle again")
        self.signature = found[0]

    def _plan(self, path: Path) -> CudaExecutable:
        from weft.colocate.network import plan_on_gpu

        return plan_on_gpu(loaded(path, [_own_digest(path)], self._options), path.name)

    def warm_up(self) -> None:
        """Run the plan once, on what its buffers hold."""
        self._plans[0].replay()

    def open(self, ring: Ring, channel: Channel) -> Callable[[], None]:
        """Place plan and job on the GPU, and measure what has to be; what answers queries until the front end is gone.

        Raises:
            WeftError: the job cannot be made, or the GPU refuses something.
        """
        from weft.colocate.gpu import GpuSession, Plans
        from weft.colocate.job_on_gpu import job_on
        from weft.device.cuda import streams
        from weft.device.cuda.driver import primary_context
        from weft.device.cuda.facts import gpu_facts

        bundle, held = self._bundle, self._held
        held.enter_context(primary_context())
        streams.pinned(held, *ring.place)
        io = RingIo(ring)
        facts = gpu_facts(None, calibrate=False)
        if facts.name != bundle.samples.gpu:
            problem = f"it was measured on {bundle.samples.gpu}, and this is {facts.name}"
            raise ArtifactError(where=bundle.folder.name, problem=problem, remedy="prepare it again on this machine")
        session = GpuSession(bundle.model, Plans(*self._plans), facts, held=held, io=io)

        def network(path: Path, given: object) -> CudaExecutable:  # noqa: ARG001 - it was compiled for such
            return self._plan(bundle.job_plan)

        placed = held.enter_context(
            job_on(session, bundle.job, bundle.job_folder, facts=facts, compiled=network, tell=_say)
        )
        self._placed = placed
        made = session.settled(prepare(bundle.samples, POLICY, bundle.model, bundle.job.name, bundle.target_ns))
        io.queue = session.device  # from here on inputs and results are copied
        prepared = longer(made, session.copies_us())
        policy, _ = session.policy_of([prepared])
        machine = session.machine_of([prepared])
        tell = _Telling(channel, placed, [p.variant.name for p in prepared.points])
        inbox = ChannelInbox(channel, ring, tell=tell)
        backend = ServingBackend(machine, prepared, inbox, policy=policy)
        return partial(self._run, policy, backend, machine)

    def close(self) -> None:
        """End the job; its results are written, and its progress is saved."""
        self._held.close()

    def _run(self, policy: Policy, backend: ServingBackend, machine: Machine) -> None:
        """Until the front end is gone.

        Raises:
            LostDeviceError: the GPU does no more what it is asked: this process ends [W304].
        """
        from weft.colocate.gpu_machine import ending

        try:
            with ending(machine), quietly():
                drive(policy, backend)
        except DeviceError as error:
            with contextlib.suppress(WeftError):  # the next process goes on from there
                if self._placed is not None:
                    self._placed.save()
            raise LostDeviceError(problem=str(error.details["problem"])) from error


@final
class _Telling:
    """Tells a front end once a second how the job stands; saves its progress, and collects garbage, now and then."""

    def __init__(
        self, channel: Channel, placed: PlacedJob, variants: Sequence[str], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._channel, self._placed, self._variants, self._clock = channel, placed, variants, clock
        self._saved = self._collected = clock()
        self._failed = False

    def __call__(self, served: Served, cap: int) -> None:
        now = self._clock()
        progress = self._placed.job.progress()
        told: dict[str, Any] = {
            "job": self._placed.spec.name, "done": self._placed.is_done, "passes": progress.passes,
            "queries": served.queries, "late": served.late, "cap": cap,
            "variants": dict(zip(self._variants, served.variants, strict=True)),
        }  # fmt: skip
        with contextlib.suppress(OSError):  # the front end is gone: the inbox sees it
            self._channel.send_json(Kind.JOB, told)
        if now - self._saved > SAVE_S and self._placed.spec.kind != "process":  # which saves its own, with its state
            self._saved = now
            try:
                self._placed.save()
            except WeftError as error:  # a full disk costs no query; at the end it is tried once more
                if not self._failed:
                    _say(str(error))
                self._failed = True
        if now - self._collected > COLLECT_S:
            self._collected = now
            gc.collect()


def _own_digest(plan: Path) -> str:
    """Of a plan of a bundle, whose digests say that it is the one that was written.

    Raises:
        ArtifactError: it is no plan [W401].
    """
    try:
        with zipfile.ZipFile(plan) as archive:
            return hashlib.sha256(archive.read("manifest.json")).hexdigest()
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        problem = f"is no saved plan: {str(error)[:100]}"
        raise ArtifactError(where=plan.name, problem=problem, remedy="prepare the bundle again") from None


def _say(text: str) -> None:
    """On standard error, which is the server's; nothing of a job.toml moves a terminal's cursor."""
    for line in text.splitlines():
        sys.stderr.write("weft: " + "".join(c if c.isprintable() else "?" for c in line[:400]) + "\n")
    sys.stderr.flush()
