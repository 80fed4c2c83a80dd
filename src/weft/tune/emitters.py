"""Processes that write the texts of CUDA kernels side by side, while other kernels are measured.

Writing is Python, so threads would take turns. A kernel's text depends on its problem alone: which process wrote it
and when makes no difference, and what a process fails to answer is written here instead.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Self, cast, final

from weft.device.any import DeviceFacts
from weft.device.cuda.facts import GpuFacts
from weft.errors import ArtifactError
from weft.generate.cuda import CudaGenerator
from weft.generate.offer import Offer, kernels_of
from weft.generate.protocol import Generator
from weft.kernels.candidate import Problem
from weft.kernels.codec import Json, kernel_from_json, schedule_from_json
from weft.kernels.dataclass_json import to_json
from weft.tune.emission_worker import graph_digest
from weft.tune.messages import Message
from weft.tune.thread_pool import DaemonThreadPool
from weft.tune.transport import Fault, ProcessTransport, Transport, WorkerFault
from weft.tune.wire import problem_to_json

MOST = 12
"""Processes, at most."""
SPARE = 4
"""Cores that are left to the compiler, to measuring and to the caller."""
PATIENCE_S = 60.0
"""For one problem; then it is written here."""


def processes() -> int:
    """How many processes pay for themselves on this machine; 0 on a small one."""
    cores = len(os.sched_getaffinity(0))
    return min(MOST, cores - SPARE) if cores > SPARE + 1 else 0


def writes(generator: Generator) -> bool:
    """Whether a generator is one whose kernels other processes may write."""
    return isinstance(generator, CudaGenerator)


def emitters_for(generators: Sequence[Generator], facts: DeviceFacts, count: int | None = None) -> Emitters | None:
    """So many processes, not started, that may write some generator's kernels; None: all are written here.

    `count`: None: as many as the machine has cores for.
    """
    count = processes() if count is None else count
    if not count or not isinstance(facts, GpuFacts) or not any(writes(g) for g in generators):
        return None
    return Emitters(facts, count)


@final
class Emitters:
    """A pool; nothing is started before the first problem comes or `start` is called."""

    def __init__(self, facts: GpuFacts, count: int, *, transports: Sequence[Transport] = ()) -> None:
        """`transports`: stand-ins for the processes."""
        self._facts = facts
        self._own = transports or tuple(
            ProcessTransport(1, environ=os.environ, module="weft.tune.emission_worker") for _ in range(count)
        )
        self._idle: SimpleQueue[Transport | None] = SimpleQueue()
        self._threads: DaemonThreadPool | None = None
        self._closed = False
        self.lost: list[str] = []
        """Why processes were given up."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Start all processes, once; they load while the caller goes on."""
        if self._threads is not None:
            return
        self._threads = DaemonThreadPool(max(1, len(self._own)))
        for transport in self._own:
            try:
                transport.start()
                transport.send({"op": "hello", "facts": to_json(self._facts)}, 10.0)
                self._idle.put(transport)
            except WorkerFault as fault:
                self._give_up(transport, fault)
        if not self._own:
            self._idle.put(None)

    def close(self) -> None:
        """End all processes, whatever they are at; nobody is waited for, and what was not written stays unwritten."""
        self._closed = True
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
            for transport in self._own:
                transport.kill()

    def submit(self, generator: Generator, problem: Problem, most: int) -> Future[Offer]:
        """What `generator`, which is the CUDA generator, makes of a problem: as `kernels_of` would."""
        self.start()
        return cast("DaemonThreadPool", self._threads).submit(self._make, generator, problem, most)

    def _make(self, generator: Generator, problem: Problem, most: int) -> Offer:
        transport = self._idle.get()
        try:
            found = self._ask(transport, problem, most) if transport is not None else None
            if found is not None:
                return found
        except (WorkerFault, ArtifactError) as fault:
            self._give_up(cast("Transport", transport), fault, put=False)
            transport = None
        finally:
            self._idle.put(transport)
        if self._closed:
            return Offer((), (), True)  # nobody reads it
        return kernels_of(generator, problem, self._facts, most)

    def _give_up(self, transport: Transport, fault: Exception, *, put: bool = True) -> None:
        transport.kill()
        self.lost.append(str(fault))
        if put:
            self._idle.put(None)

    def _ask(self, transport: Transport, problem: Problem, most: int) -> Offer | None:
        """The answer of a process; None where its graph came out with other numbers of nodes: the text has them."""
        transport.send({"op": "make", "problem": problem_to_json(problem), "most": most}, PATIENCE_S)
        found = transport.receive(PATIENCE_S)
        if found.get("event") != "made":
            raise WorkerFault(Fault.GARBAGE, f"an answer to something else: {str(found)[:200]}")
        return offer_from_json(found) if found.get("graph") == graph_digest(problem.graph) else None


def offer_from_json(data: Message) -> Offer:
    """Inverse of `emission_worker.offer_to_json`.

    Raises:
        ArtifactError: not such a value [W401].
    """
    try:
        pairs = cast("Sequence[tuple[Json, Mapping[str, Json]]]", data["kernels"])
        kernels = tuple((schedule_from_json(s), kernel_from_json(k)) for s, k in pairs)
        declined = tuple(str(x) for x in cast("Sequence[str]", data["declined"]))
        return Offer(kernels, declined, bool(data["more"]))
    except (KeyError, TypeError, ValueError) as error:
        raise ArtifactError(problem=f"malformed offer: {error}", remedy="send one of this version") from None
