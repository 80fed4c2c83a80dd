"""A network as best-effort work beside a latency-critical plan on the same multiprocessors (SMs).

    gpu = weft.device.cuda.facts.gpu_facts(None, calibrate=False)
    shares = budgets(gpu)                                           # of an SM: one for each of the two
    lc = weft.compile(model, x, options=weft.Options(device="cuda", sm_budget=shares.latency_critical))
    be = weft.compile(other, y, options=weft.Options(device="cuda", sm_budget=shares.best_effort))
    with co_runner(be, y, beside=lc, ctas_per_sm=1) as network:
        network.start()
        with torch.cuda.stream(torch.cuda.Stream(priority=-1)):
            lc(x)
        network.throttle = Throttle(duty=0.5)
        network.stop()
        print(network.counts.inferences)

The network is recorded as stages, CUDA graphs of a few kernels each, on a stream of the lowest priority. A thread of
the host launches them in order, never more than so many kernels ahead, so a stop waits for these at most. Its results
are those of its plan alone, bit for bit: the same kernels run in the same order on memory of its own.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Generic, Protocol, final

import torch

from weft.colocate.budgets import budget_of, check_together, limited
from weft.colocate.feeder import Counts, Feeder, Given, Mark, Throttle, Value
from weft.device.cuda.facts import gpu_facts
from weft.device.cuda.record import GpuFacts
from weft.errors import DeviceError, OptionError
from weft.runtime.any import AnyExecutable
from weft.runtime.budgeted import Budgeted
from weft.runtime.cuda_executable import CudaExecutable
from weft.runtime.streams import Lease

Tensors = Sequence[torch.Tensor]
Batch = torch.Tensor | Tensors
"""Inputs of one inference; a tensor alone is a model's only one."""
Source = Batch | Callable[[], Batch | None] | Iterator[Batch]
"""What gives the inputs of all inferences."""
STAGE_KERNELS, MOST_QUEUED = 4, 12
LIMIT_S = 10.0


class Made(Protocol):
    """What `weft.compile` and `weft.load` give."""

    @property
    def executable(self) -> AnyExecutable:
        """The plan."""
        ...


@final
class NetworkCoRunner(Generic[Value]):
    """A network whose stages a thread launches between `start` and `stop`, as often as wanted."""

    def __init__(
        self,
        feeder: Feeder[Value],
        *,
        inside: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        """`co_runner` makes one. `inside`: what the thread works in; `close`: gives back what the lane holds."""
        self._feeder, self._inside, self._close = feeder, inside, close
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._wake = threading.Event()
        self._failed: BaseException | None = None
        self._closed = False

    def __enter__(self) -> NetworkCoRunner[Value]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except Exception:
            if error is None:  # else the error of the block is told
                raise

    @property
    def counts(self) -> Counts:
        """Inferences and stages so far, since it was made."""
        return self._feeder.counts

    @property
    def most_queued(self) -> int:
        """Kernels that are queued on the GPU at most, so that a stop waits for."""
        return self._feeder.most_queued

    @property
    def running(self) -> bool:
        """Stages are being launched, or are throttled; not once inputs have ended or something failed."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def throttle(self) -> Throttle:
        """How much it may work; assign another one at any time, which holds from the next stage on."""
        return self._feeder.throttle

    @throttle.setter
    def throttle(self, throttle: Throttle) -> None:
        self._feeder.throttle = throttle
        self._wake.set()

    def start(self) -> None:
        """Go on where it was stopped, or begin. Nothing, if it is running.

        Raises:
            OptionError: it was closed [W001].
            Exception: what ended the run before, if nobody was told: that of the inputs, or of the results' receiver.
            DeviceError: it does not end its last stages: see `stop` [W301].
        """
        if self._closed:
            raise OptionError(option="start", problem="this co-runner was closed: make another one")
        if self.running:
            if self._stopping.is_set():
                raise DeviceError(problem="a co-runner that was told to stop has not ended: it cannot be started")
            return
        self._tell()
        self._stopping.clear()
        self._thread = threading.Thread(target=self._run, name="weft-co-runner", daemon=True)
        self._thread.start()

    def stop(self, limit_s: float = LIMIT_S) -> float:
        """Launch nothing more, and wait for what is queued (at most `most_queued` kernels); seconds that it took.

        An inference that was begun goes on with the next `start`. Nothing, if it is not running.

        Raises:
            Exception: what the inputs or the results' receiver raised in its thread, or the GPU reported.
            DeviceError: what was queued has not ended after `limit_s` seconds [W301].
        """
        began = time.perf_counter()
        self._stopping.set()
        self._wake.set()
        self.wait(limit_s)
        return time.perf_counter() - began

    def wait(self, limit_s: float = math.inf) -> None:
        """Until the inputs have ended and all results were handed on; of a fixed batch that is never.

        Raises:
            Exception: as `stop`.
            DeviceError: not after `limit_s` seconds [W301].
        """
        if self._thread is not None:
            self._thread.join(None if math.isinf(limit_s) else limit_s)
            if self._thread.is_alive():
                queued = self.counts.queued_kernels
                problem = (
                    f"a network beside another plan has not ended after {limit_s:g} s, {queued} kernels are queued"
                )
                raise DeviceError(problem=problem)
            self._thread = None
        self._tell()

    def close(self) -> None:
        """Stop, and give back what it holds of the GPU; it cannot be started again.

        Raises:
            Exception: as `stop`.
        """
        try:
            self.stop()
        finally:
            if self._thread is None and not self._closed:
                self._closed = True
                self._close()

    def _tell(self) -> None:
        failed, self._failed = self._failed, None
        if failed is not None:
            raise failed

    def _run(self) -> None:
        try:
            with self._inside():
                self._launch()
        except BaseException as error:  # told to whoever stops or waits
            self._failed = error

    def _launch(self) -> None:
        feeder = self._feeder
        try:
            while not self._stopping.is_set():
                self._wake.clear()
                wait_s = feeder.step()
                if wait_s == 0:
                    continue
                if feeder.waits_for_room:
                    feeder.wait()
                elif feeder.ended:
                    return
                elif not self._stopping.is_set():
                    self._wake.wait(None if math.isinf(wait_s) else wait_s)
        finally:
            feeder.drain()


@final
class _Event:
    """A place on a stream, given back when it was passed."""

    def __init__(self, ring: list[torch.cuda.Event], stream: torch.cuda.Stream) -> None:
        self._ring = ring
        self._event = ring.pop() if ring else torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self._event.record(stream)
        self._over = False

    def ended(self) -> bool:
        """See `Mark`."""
        if not self._over and self._event.query():  # type: ignore[no-untyped-call]
            self._over = True
            self._ring.append(self._event)
        return self._over

    def wait(self) -> None:
        """See `Mark`."""
        if not self._over:
            self._event.synchronize()


@final
class StageLane:
    """The stages of a plan on a stream."""

    def __init__(
        self,
        executable: CudaExecutable,
        stream: torch.cuda.Stream,
        *,
        results: bool = False,
        fixed: bool = False,
    ) -> None:
        """`executable`: recorded with `stage_kernels`, and used by nobody else. `results`: they are copied.

        `fixed`: the inputs are the same in each inference, and are put in place once.
        """
        self._held: list[CudaExecutable] = [executable]
        self.stream, self._results, self._fixed, self._placed = stream, results, fixed, False
        self.kernels = [stage.kernels for stage in executable.stages]
        """Of each stage."""
        self._ring: list[torch.cuda.Event] = []

    @property
    def _executable(self) -> CudaExecutable:
        return self._held[0]

    def close(self) -> None:
        """Give the plan's memory back; nothing is launched any more."""
        self._held.clear()
        self._ring.clear()

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """What its thread works in: inputs that are made there are made in the order of its stream."""
        with torch.cuda.device(self._executable.device), torch.cuda.stream(self.stream), torch.no_grad():
            yield

    def begin(self, given: Tensors) -> None:
        """See `Lane`.

        Raises:
            InputError: the tensors are none of the plan's [W011].
        """
        if not (self._fixed and self._placed):
            self._executable.place(*given)
            self._placed = True

    def launch(self, stage: int) -> None:
        """See `Lane`."""
        self._executable.stages[stage].launch()

    def results(self) -> Tensors | None:
        """See `Lane`: in tensors of their own."""
        if not self._results:
            return None
        return tuple(x.clone(memory_format=torch.contiguous_format) for x in self._executable.static_outputs)

    def mark(self) -> Mark:
        """See `Lane`."""
        return _Event(self._ring, self.stream)


def digest(outputs: Tensors) -> str:
    """SHA-256 of the bytes of tensors, in hexadecimal: equal where results are equal bit for bit."""
    made = hashlib.sha256()
    for x in outputs:
        made.update(f"{x.dtype}{tuple(x.shape)}".encode())
        made.update(x.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return made.hexdigest()


def feeding(
    executable: CudaExecutable,
    stream: torch.cuda.Stream,
    inputs: Source,
    *,
    deliver: Callable[[int, Tensors], object] | None = None,
    most_queued: int = MOST_QUEUED,
    throttle: Throttle | None = None,
) -> NetworkCoRunner[Tensors]:
    """Launch the stages of an executable on a stream, whatever budget it has or has not; `co_runner` checks that.

    Raises:
        OptionError: no kernel may be queued, or the inputs are none [W001].
    """
    given = given_by(inputs)
    fixed = isinstance(inputs, torch.Tensor | tuple | list)
    lane = StageLane(executable, stream, results=deliver is not None, fixed=fixed)
    feeder: Feeder[Tensors]
    try:
        feeder = Feeder(
            lane, given, most_queued=most_queued, clock=time.perf_counter, throttle=throttle, deliver=deliver
        )
    except ValueError as error:
        raise OptionError(option="most_queued", problem=str(error)) from None
    return NetworkCoRunner(feeder, inside=lane.inside, close=lane.close)


def given_by(inputs: Source) -> Given[Tensors]:
    """What gives the inputs of each inference; of a batch of tensors always these.

    Raises:
        OptionError: neither tensors, nor a callable, nor an iterator [W001].
    """
    if isinstance(inputs, torch.Tensor):
        return lambda: (inputs,)
    if isinstance(inputs, Sequence) and all(isinstance(x, torch.Tensor) for x in inputs):
        return lambda: inputs
    if isinstance(inputs, Iterator):
        return lambda: _several(next(inputs, None))
    if callable(inputs):
        return lambda: _several(inputs())
    problem = f"a {type(inputs).__name__} is neither a batch of tensors, nor a callable, nor an iterator"
    raise OptionError(option="inputs", problem=problem)


def _several(batch: Batch | None) -> Tensors | None:
    return (batch,) if isinstance(batch, torch.Tensor) else batch


def plan_on_gpu(made: Made | AnyExecutable, name: str) -> CudaExecutable:
    """The plan for a GPU in what `weft.compile` or `weft.load` gave.

    Raises:
        DeviceError: there is no GPU [W301].
        OptionError: it is a plan for another kind of device [W001].
    """
    found = getattr(made, "executable", made)
    if isinstance(found, CudaExecutable):
        return found
    if not torch.cuda.is_available():
        raise DeviceError(problem="a network beside another plan needs a CUDA GPU, and there is none here")
    kind = getattr(getattr(found, "linked", None), "kind", type(found).__name__)
    raise OptionError(option=name, problem=f"a plan for a GPU is needed, this is one for {kind!r}")


def check_plans(network: CudaExecutable, beside: Sequence[CudaExecutable], facts: GpuFacts) -> None:
    """Whether a network may run beside each of these plans.

    Raises:
        OptionError: a plan without a budget, of another GPU, or budgets that do not fit an SM together [W001].
    """
    mine = budget_of(network.linked, "network")
    for plan in beside:
        theirs = budget_of(plan.linked, "beside")
        if plan.device != network.device:
            problem = f"its plan is on {plan.device}, the network's on {network.device}: they must be on one GPU"
            raise OptionError(option="beside", problem=problem)
        check_together(mine, theirs, facts)


def co_runner(
    network: Made | AnyExecutable,
    inputs: Source,
    *,
    beside: Made | AnyExecutable | Sequence[Made | AnyExecutable],
    deliver: Callable[[int, Tensors], object] | None = None,
    ctas_per_sm: int = 0,
    stage_kernels: int = STAGE_KERNELS,
    most_queued: int = MOST_QUEUED,
    throttle: Throttle | None = None,
) -> NetworkCoRunner[Tensors]:
    """A network that runs beside latency-critical plans; `start` begins.

    Its plan is recorded anew, with weights and memory of its own: what was given may be dropped.

    Args:
        network: compiled (or loaded) for a GPU under a budget of each SM.
        inputs: a batch that is used again and again, and must not change; or a callable that gives a tuple of tensors
            (or the only one) for each inference, or an iterator over such. Shapes, dtypes and device are those of the
            compiled signature; else `stop` and `wait` raise InputError [W011]. Callable and iterator are called in the
            co-runner's thread and in the order of its stream; None or the iterator's end ends the run.
        beside: the plan or plans that run meanwhile, one at a time, each compiled under a budget that fits an SM
            together with the network's. Run them on a stream of high priority (`torch.cuda.Stream(priority=-1)`).
        deliver: called in the co-runner's thread with the number of an inference, from 0, and its outputs once they
            are there, in tensors of their own (on its stream: see `torch.Tensor.record_stream`); None: results are not
            copied. Until it returns, nothing more is launched.
        ctas_per_sm: CTAs of the network that are resident on an SM at most, all its kernels together, so that a plan
            finds its share of the SM free at any time; 0: as many as find room, which a plan's CTAs then wait for.
            Its kernels ask for more shared memory than they use to that end (`weft.colocate.budgets`).
        stage_kernels: kernels that are launched together.
        most_queued: kernels that are launched and have not ended at most: a stop waits for these.
        throttle: how much it may work at first; None: always.

    Raises:
        OptionError: a plan without a budget, of another kind of device or another GPU, budgets that do not fit an SM
            together, no plan beside, or a number that cannot be [W001].
        DeviceError: there is no GPU, or a kernel does not fit there [W301].
    """
    for name, number in (("stage_kernels", stage_kernels), ("most_queued", most_queued)):
        if number < 1:
            raise OptionError(option=name, problem=f"{number}: at least one kernel is launched")
    if ctas_per_sm < 0:
        raise OptionError(option="ctas_per_sm", problem=f"{ctas_per_sm}: 0 or more")
    plan = plan_on_gpu(network, "network")
    several = beside if isinstance(beside, Sequence) else (beside,)
    if not several:
        raise OptionError(option="beside", problem="no plan is given that the network is to run beside")
    others = [plan_on_gpu(x, "beside") for x in several]
    facts = gpu_facts(None, device=plan.device.index or 0, calibrate=False)
    check_plans(plan, others, facts)
    linked = limited(plan.linked, facts, ctas_per_sm) if ctas_per_sm else plan.linked
    with torch.cuda.device(plan.device):
        lease = Lease(plan.device)  # streams of the framework's usual priority, which is the lowest
        (stream,) = lease.streams(1)
        executable = CudaExecutable(
            linked,
            device=plan.device,
            lease=lease,
            budgeted=Budgeted(facts.within(budget_of(linked, "network"))),
            stage_kernels=stage_kernels,
        )
        stream.wait_stream(torch.cuda.current_stream())  # that fixed inputs are made on
    return feeding(executable, stream, inputs, deliver=deliver, most_queued=most_queued, throttle=throttle)
