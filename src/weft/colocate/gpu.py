"""A model and a job on one GPU in every way in which they can share it: plans, streams, parts and persistent kernels.

    session = GpuSession("net", plans, facts, held=held)
    session.add_job(job)
    record, refused = session.record(MODES, commit=..., driver=...)     # samples, for policies and the simulator
    out = session.run(prepared, arrivals)                               # one policy

Further models beside the same job are added before it (`add_model`), and run together (`run_all`).

Plans are recorded once more for each way: on streams of the highest priority, under the budget of an SM beside a
co-runner, on the streams of each part of the GPU, and with the job's roles in the kernels of some steps. Inputs are
those that the plans' buffers hold.
"""

from __future__ import annotations

import contextlib
import gc
import re
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Protocol, final

import torch

from weft.colocate.arrivals import Arrivals
from weft.colocate.device_memory import DeviceMemory
from weft.colocate.fused_plan import FusedPlan
from weft.colocate.fused_search import Counters, FusedSearch
from weft.colocate.gpu_machine import WHOLE, Form, GpuMachine, Lane, ending
from weft.colocate.idle import Drawing, fastest
from weft.colocate.kernel_job import CoRunner, KernelJob
from weft.colocate.live import LiveBackend, Machine, run
from weft.colocate.network_job import NetworkGpuJob
from weft.colocate.operating import Point, Prepared, Whole, setting_of, settle
from weft.colocate.outcome import Outcome
from weft.colocate.policies import make
from weft.colocate.policy import Admission, Policy, PolicyError, Setting
from weft.colocate.process_job import ProcessJob
from weft.colocate.process_machine import ProcessMachine
from weft.colocate.process_words import Confinement
from weft.colocate.recording import QUERIES, Mode, RecordInterruptedError, What, back_to_back, merged, recorded
from weft.colocate.role_lanes import Recorded, RoleLanes
from weft.device.cuda import streams
from weft.device.cuda.budget import first_over_budget
from weft.device.cuda.cubin import usage
from weft.device.cuda.dispatch import SPIN_NS, Queue, dispatcher
from weft.device.cuda.facts import GpuFacts
from weft.device.cuda.partition import Partition, partitioned
from weft.errors import DeviceError, OptionError
from weft.ir.declined import Declined
from weft.kernels.colocation import BYTES, left_beside
from weft.kernels.samples import SampleRecord, StepSamples
from weft.kernels.scheduling import JobKind, Query, Sharing
from weft.kernels.source import CudaSource
from weft.runtime.budgeted import Budgeted
from weft.runtime.cuda_executable import CudaExecutable, Rebind
from weft.runtime.streams import Lease
from weft.sm_budget import SmBudget

MODES = (
    "co-runner 64", "co-runner 128", "co-runner 192", "co-runner 256", "green12", "green20", "green36", "green68",
    "priority", "streams",
)  # fmt: skip
"""That are tried where nobody says which; what cannot be here is left out."""
PROCESS_MODES = (*(m for m in MODES if m.startswith("green")), "priority", "priority-duty64", "priority-duty128")
"""The same with a job in another process."""
MPS_MODES = ("mps",)
"""Where this process and the job's are clients of MPS: each other way would be this one by another name."""
BUDGET = SmBudget(registers=57344, shared_bytes=220 << 10, threads=1792, ctas=31)
"""What a plan leaves a co-runner of 256 threads with 32 registers each."""
LANES = 4
"""Streams of a priority, or of a part of the GPU, that a plan is recorded on."""
PERIODS = 4
"""Of a query, in each of which a throttled co-runner works in the same part."""
LOOK_NS = 200_000_000
"""So often a job's counter is looked at."""
SERVING_SPIN_NS = 2_000_000
"""As `dispatch.SPIN_NS`, of a server: between queries its core is for others, though the job is looked after."""
NOT_WHOLE_US = 1e9
"""Stands for the time of kernels that cannot be launched whole: they never have the time."""
_LAUNCH_WHOLE = ("serial", "timeslice", "orion")
_NO_PASSES = "choose one that launches no kernels of the job whole (weft, tally, green:N)"
_TIMES = 5
_MODE = re.compile(
    r"(?P<kind>co-runner |green|priority|streams|mps)(?P<number>[1-9][0-9]{0,3})?(?:-duty(?P<duty>[1-9][0-9]{0,2}))?"
)


@dataclass(frozen=True, slots=True)
class Plans:
    """A model's plans for this GPU."""

    plain: CudaExecutable
    budgeted: CudaExecutable | None = None
    """Under `BUDGET`; None: it cannot run beside a co-runner."""


@dataclass(frozen=True, slots=True)
class Way:
    """A way of sharing, by its name: `co-runner 128`, `co-runner 256-duty90`, `green36`, `priority`, `streams`.

    Of a job in another process also `green36-duty90`, `priority-duty90`.
    """

    name: str
    sharing: Sharing
    number: int = 0
    """Threads of a co-runner's CTA; multiprocessors of the job."""
    duty: int = WHOLE
    """256ths of each quarter of a query in which a co-runner works, or of the time in which another process does."""


def way_of(name: str) -> Way:
    """By its name.

    Raises:
        OptionError: there is none of this name [W001].
    """
    found = _MODE.fullmatch(name)
    kind = found["kind"].strip() if found else ""
    number, duty = (int(found[k] or 0) for k in ("number", "duty")) if found else (0, 0)
    if found and kind == "co-runner" and number % 32 == 0 and 32 <= number <= 256 and duty < WHOLE:
        return Way(name, "co-runner", number, duty or WHOLE)
    if name == "mps":
        return Way(name, "mps")
    if found and kind == "green" and number and duty < WHOLE:
        return Way(name, "partition", number, duty or WHOLE)
    if found and kind in ("priority", "streams") and not number and duty < WHOLE:
        return Way(name, "priority" if kind == "priority" else "streams", 0, duty or WHOLE)
    raise OptionError(
        option="modes", problem=f"{name[:40]!r} is neither like 'co-runner 128', 'co-runner 256-duty90' nor green36,"
        " priority, streams, mps; -duty90 of a job in another process"
    )  # fmt: skip


class QueryIo(Protocol):
    """Inputs and results of queries that others send: copied by the streams that queries run on."""

    def begin(self, query: Query) -> None:
        """The query that is launched next."""
        ...

    def fill(self, made: CudaExecutable, stream: int) -> None:
        """In front of a query by this plan: its inputs."""
        ...

    def fetch(self, made: CudaExecutable, stream: int) -> None:
        """Behind it: its results."""
        ...


@final
class GpuJob:
    """A job of kernels as a machine knows it (`weft.colocate.gpu_machine.Job`)."""

    def __init__(self, job: KernelJob, kernel_us: float, device: Queue, copies: int) -> None:
        """`kernel_us`: of all its kernels once, alone. `copies`: a stream on which counters are copied."""
        self._job, self._device, self._copies = job, device, copies
        self.name = job.name
        self.kernel_us, self.block_us = kernel_us, kernel_us / job.pass_blocks
        self._before = self._look = 0

    def arm(self, stream: int, *, duty: int, period_ns: int) -> None:
        """See `Job`."""
        self._job.begin(stream, duty=duty, period_ns=period_ns)

    def stop(self, stream: int) -> None:
        """See `Job`."""
        self._job.stop(stream)

    def plain(self, stream: int, us: float) -> float:
        """See `Job`: whole passes.

        Raises:
            PolicyError: its kernels cannot be launched whole now [W206].
        """
        passes = max(1, round(us / self.kernel_us))
        for _ in range(passes):
            if (declined := self._job.run_pass(stream)) is not None:
                raise PolicyError(policy="any", reason=f"{self._job.name}: {declined.reason}", remedy=_NO_PASSES)
        return passes * self.kernel_us

    def blocks(self) -> int:
        """See `Job`."""
        self._job.snapshot(self._copies)
        self._device.finish(self._copies)
        self._job.read()
        return self._job.ended_blocks - self._before

    def is_done(self) -> bool:
        """See `Job`. Now and then the counter is looked at, and its limit raised."""
        now = time.perf_counter_ns()
        if now >= self._look and not (self._look and self._job.is_done):
            if self._look:
                self._job.read()  # what was asked for before
                self._job.extend(self._copies)
            self._job.snapshot(self._copies)
            self._look = now + LOOK_NS
        return self._job.is_done

    def anew(self) -> GpuJob:
        """The same job for another run: what is counted begins here."""
        made = GpuJob(self._job, self.kernel_us, self._device, self._copies)
        made._before = self._before + self.blocks()
        return made


@dataclass(slots=True)
class _Model:
    """A model's plans as they were recorded."""

    plans: Plans
    alone: Lane
    outputs: tuple[torch.Tensor, ...]
    """What a query by the plan without a budget leaves in them."""
    beside: Lane | None
    """Under `BUDGET`."""
    query_us: float = 0.0
    parts: dict[int, Lane] = field(default_factory=dict)
    """On all but so many multiprocessors."""
    roles: RoleLanes | None = None


@dataclass(frozen=True, slots=True)
class _Split:
    """The GPU in two parts."""

    lanes: tuple[torch.cuda.Stream, ...]
    """Of the models'."""
    rest: int
    """The job's stream."""
    sms: int
    """Of the job's."""


@final
class GpuSession:
    """Models, and a job if there is one, on the GPU of the current context. One thread uses it."""

    def __init__(
        self, name: str, plans: Plans, facts: GpuFacts, *, held: ExitStack, mps: bool = False, io: QueryIo | None = None
    ) -> None:
        """Record the plans of the first model on streams of the highest priority.

        Args:
            name: of the model.
            plans: whose input buffers hold what queries run on.
            facts: the GPU.
            held: gives back all that is taken.
            mps: this process is a client of MPS (`weft.device.cuda.mps`).
            io: of each query; None: all run on what the plans' buffers hold.

        Raises:
            DeviceError: a kernel does not fit under the budget, or the GPU refuses something [W301, W302].
        """
        self.name, self._facts, self._held, self._mps, self._io = name, facts, held, mps, io
        self._models: dict[str, _Model] = {}
        least, self._greatest = streams.priorities()
        self._least = least
        uuid = str(torch.cuda.get_device_properties(0).uuid)
        self._device = dispatcher(held, uuid=uuid, spin_ns=SPIN_NS if io is None else SERVING_SPIN_NS)
        self._high = [self._stream(self._greatest) for _ in range(LANES)]
        self._same = self._stream(self._greatest)
        self._low, self._copies = self._stream(least), self._stream(self._greatest)
        self._job: GpuJob | NetworkGpuJob | ProcessJob | None = None
        self._kernel_job: KernelJob | None = None
        self._whole = True
        """Whether the job's kernels may be launched whole at any time: no pass reads what the one before wrote."""
        self._kept: list[CudaExecutable] = []
        self._splits: dict[int, _Split | Declined] = {}
        self._partitions = ExitStack()
        self._forms: dict[str, Form] = {}
        """Of the job beside queries of any model, by way."""
        held.callback(self._close)
        self._idle: Form | None = None
        self._drawing = self._drawing_beside = Drawing(1)
        """How the job draws where it has an SM for itself; and by one CTA of an SM, of the most threads."""
        self.add_model(name, plans)

    def add_model(self, name: str, plans: Plans) -> None:
        """A further model, before there is a job: its queries and those of the others run one at a time.

        Raises:
            ValueError: there is one of this name, or a job already.
            DeviceError: as for the first one [W301, W302].
        """
        if name in self._models or self._job is not None:
            raise ValueError(f"{name}: models have names of their own, and come before the job")
        alone = self._lane(plans.plain, self._high, None)
        outputs = self._kept[-1].static_outputs
        beside = None if plans.budgeted is None else self._lane(plans.budgeted, self._high, BUDGET)
        self._models[name] = _Model(plans, alone, outputs, beside)
        self._models[name].query_us = self._measured_us(name)

    @property
    def models(self) -> tuple[str, ...]:
        """Their names."""
        return tuple(self._models)

    @property
    def query_us(self) -> float:
        """Of the first model's queries by the plan without a budget, alone, back to back."""
        return self._models[self.name].query_us

    def copies_us(self) -> float:
        """What queries of the first model take longer than `query_us` now, as their inputs and results are copied."""
        return max(0.0, self._measured_us(self.name) - self.query_us)

    @property
    def plain(self) -> CudaExecutable:
        """The first model's plan without a budget, as it was given."""
        return self._models[self.name].plans.plain

    @property
    def device(self) -> Queue:
        """Of its machines."""
        return self._device

    @property
    def low(self) -> torch.cuda.Stream:
        """Of the lowest priority, with the whole GPU."""
        return self._low

    @property
    def modes(self) -> tuple[str, ...]:
        """Ways of sharing that are tried where nobody says which."""
        if self._mps:
            return MPS_MODES
        return PROCESS_MODES if isinstance(self._job, ProcessJob) else MODES

    def add_job(self, job: KernelJob | NetworkGpuJob | ProcessJob) -> None:
        """The best-effort job: its time alone is measured, and how it runs fastest on the whole GPU.

        Cost: two texts to compile, and 20 ms for each of at most 20 ways; or some units of a process.

        Raises:
            DeviceError: the GPU refuses a kernel [W301, W302], or a process does not get on.
            JobError: a process raises, or its segments are longer than they may be [W018].
        """
        self._forms.clear()
        for model in self._models.values():
            model.roles = None
        if isinstance(job, ProcessJob):
            self._job, self._kernel_job, self._whole, self._idle = job, None, True, None
            job.measure()
            return
        if isinstance(job, NetworkGpuJob):
            self._job, self._kernel_job, self._whole = job, None, True
            self._idle = job.form(self._low.cuda_stream, apart=True)
            return
        self._kernel_job = job
        job.through(self._device)
        self._whole = job.mixes and not job.passes
        self._job = GpuJob(job, self._pass_us(job), self._device, self._copies.cuda_stream)
        forms: dict[Drawing, Form] = {}

        @cache
        def rate(drawing: Drawing) -> float | None:
            made = self._drawn(job, drawing, self._facts.sms)
            if isinstance(made, Declined):
                return None
            forms[drawing] = self._form(job, made, self._low.cuda_stream)
            return self._rate(forms[drawing])

        best = fastest(rate, self._facts.sms)
        if best is None:
            raise PolicyError(policy="any", reason=f"{job.name} has no persistent kernel", remedy="give another job")
        self._drawing, self._idle = best, forms[best]
        self._drawing_beside = fastest(rate, self._facts.sms, ctas=(1,)) or Drawing(1)
        for model in self._models.values():
            plan = model.plans.plain
            fused = FusedPlan(plan.graph, plan.plan, job, self._facts, lanes=plan.order.width)
            alone = Recorded(model.alone, model.outputs)
            model.roles = RoleLanes(fused, alone, partial(self._with_roles, plan), synchronise=self._finish)

    def lane_of(self, way: Way, name: str = "") -> Lane | Declined:
        """How queries of a model, by default the first, run in a way; or why they cannot here."""
        model = self._models[name or self.name]
        if self._mps != (way.sharing == "mps"):
            is_client = "is a client of MPS" if self._mps else "is no client of MPS"
            return Declined(f"this process {is_client}")
        if isinstance(self._job, ProcessJob):
            return self._process_lane(model, way, self._job)
        if way.sharing == "mps":
            return Declined("the job does not run in another process")
        if way.duty != WHOLE and way.sharing != "co-runner":
            return Declined("only a co-runner or a job in another process rests part of the time")
        if isinstance(self._job, NetworkGpuJob):
            return self._network_lane(model, way, self._job)
        job = self._kernel_job
        if job is None:
            return Declined("there is no job")
        if way.sharing in ("priority", "streams"):
            if not self._whole:
                return Declined(f"kernels of {job.name} cannot be launched whole at any time")
            stream = self._low if way.sharing == "priority" else self._same
            job.recorded(job.put_pass, stream.cuda_stream)
            return replace(model.alone, form=self._shared(way, lambda: Form(stream.cuda_stream, None)))
        if way.sharing == "partition":
            found = self._part(model, way.number)
            if isinstance(found, Declined):
                return found
            lane, split = found
            drawn = self._drawn(job, self._drawing, split.sms)
            if isinstance(drawn, Declined):
                return drawn
            return replace(lane, form=self._shared(way, lambda: self._form(job, drawn, split.rest)))
        if model.beside is None:
            return Declined("the model has no plan under a budget of an SM")
        made = self._drawn_beside(job, way.number)
        if isinstance(made, Declined):
            return made
        left = left_beside(whole_sm(self._facts), BUDGET)
        fit = left if isinstance(left, Declined) else left_beside(left, made.takes)
        if isinstance(fit, Declined):
            return fit
        period = 0 if way.duty == WHOLE else round(model.query_us * 1e3 / PERIODS)
        form = self._shared(way, lambda: self._form(job, made, self._low.cuda_stream))
        if way.duty != WHOLE:
            form = replace(form, duty=way.duty, period_ns=period)  # of this model's queries
        return replace(model.beside, form=form)

    def _shared(self, way: Way, make: Callable[[], Form]) -> Form:
        """The job's form in a way: one for all models, so that it runs on from one's query to the other's."""
        if way.name not in self._forms:
            self._forms[way.name] = make()
        return self._forms[way.name]

    def _network_lane(self, model: _Model, way: Way, job: NetworkGpuJob) -> Lane | Declined:
        if way.sharing == "co-runner":
            return Declined(f"{job.name} is a network: it has no persistent kernel")
        if way.sharing != "partition":
            stream = self._low if way.sharing == "priority" else self._same
            return replace(model.alone, form=self._shared(way, lambda: job.form(stream.cuda_stream)))
        found = self._part(model, way.number)
        if isinstance(found, Declined):
            return found
        lane, split = found
        if (why := job.network.fits(self._facts, split.sms)) is not None:
            return why
        return replace(lane, form=self._shared(way, lambda: job.form(split.rest, apart=True)))

    def _process_lane(self, model: _Model, way: Way, job: ProcessJob) -> Lane | Declined:
        """Its own process makes streams, and the same split of the GPU."""
        if way.sharing in ("co-runner", "streams"):
            return Declined(f"{job.name} is a process: it runs by itself at the lowest priority, or in a part")
        if way.sharing in ("priority", "mps"):
            return replace(model.alone, process=Confinement(duty=way.duty))
        found = self._part(model, way.number)
        if isinstance(found, Declined):
            return found
        return replace(found[0], process=Confinement(self._facts.sms - way.number, way.duty))

    def machine(self, names: Sequence[str], model: str = "") -> Machine:
        """What a policy runs on with one model, by default the first, whose variants behind variant 0 are these ways.

        Raises:
            PolicyError: one of them cannot be here [W206].
            OptionError: there is none of this name [W001].
        """
        own = model or self.name
        return self._machine({own: [self._there(name, self.lane_of(way_of(name), own)) for name in names]})

    def _machine(self, lanes: Mapping[str, Sequence[Lane]]) -> Machine:
        """Variants of each model behind its first."""
        job = None if self._job is None else self._job.anew()
        every = {name: [self._models[name].alone, *own] for name, own in lanes.items()}
        begins = None if self._io is None else self._io.begin
        if isinstance(job, ProcessJob):
            alone = GpuMachine(self._device, every, copies=self._copies.cuda_stream, begins=begins)
            return ProcessMachine(alone, job, {name: [x.process for x in own] for name, own in every.items()})
        return GpuMachine(
            self._device, every, copies=self._copies.cuda_stream, job=job, idle=self._idle, begins=begins
        )  # fmt: skip

    @staticmethod
    def _there(name: str, lane: Lane | Declined) -> Lane:
        if isinstance(lane, Declined):
            raise PolicyError(policy="any", reason=f"{name}: {lane.reason}", remedy="leave this way out")
        return lane

    def record(
        self, modes: Iterable[str] = (), *, commit: str, driver: str, queries: int = QUERIES, seed: int = 0,
        fuse_s: float = 0.0,
    ) -> tuple[SampleRecord, dict[str, str]]:  # fmt: skip
        """Samples of each model alone, of the job alone and of both in these ways; and why others cannot be.

        `fuse_s`: seconds in which fused steps are looked for, in equal parts for all models; 0: none are.

        Raises:
            DeviceError: something does not end, or a kernel fails [W301, W302].
            OptionError: no way of this name [W001].
            RecordInterruptedError: Ctrl-C: `record` has what was measured.
        """
        names, found, refused = tuple(modes), list[SampleRecord](), dict[str, str]()
        for name in self._models:
            try:
                made, why = self._recorded(
                    name, names, commit=commit, driver=driver, queries=queries, seed=seed,
                    fuse_s=fuse_s / len(self._models),
                )  # fmt: skip
            except RecordInterruptedError as ended:
                raise RecordInterruptedError(merged([*found, ended.record])) from None
            found.append(made)
            of = f"{name}, " if len(self._models) > 1 else ""
            refused |= {f"{of}{way}": reason for way, reason in why.items()}
        return merged(found), refused

    def _recorded(
        self, name: str, modes: Sequence[str], *, commit: str, driver: str, queries: int, seed: int, fuse_s: float
    ) -> tuple[SampleRecord, dict[str, str]]:
        """Of one model."""
        model = self._models[name]
        ways, refused = [], {}
        for way in map(way_of, modes if self._job is not None else ()):
            lane = self.lane_of(way, name)
            if isinstance(lane, Declined):
                refused[way.name] = lane.reason
            else:
                ways.append(way)
        job = self._job
        what = What(
            self._facts.name, driver, commit, name, model.plans.plain.kernels, "" if job is None else job.name,
            0.0 if job is None else job.kernel_us, 0.0 if job is None else job.block_us, _kind(job),
        )  # fmt: skip
        rehearsal = job.rehearsal() if isinstance(job, NetworkGpuJob) else contextlib.nullcontext()
        with rehearsal:
            machine = self.machine([w.name for w in ways], name)
            with ending(machine):
                made = recorded(machine, what, [Mode(w.name, w.sharing) for w in ways], queries=queries, seed=seed)
        try:
            steps, unfused = self._fused_steps(name, fuse_s) if fuse_s and model.roles is not None else ((), {})
        except KeyboardInterrupt:
            raise RecordInterruptedError(made) from None
        return replace(made, steps=steps), refused | unfused

    def settled(self, prepared: Prepared) -> Prepared:
        """What is run of prepared variants: those with fused steps are recorded, compared and measured whole first.

        Raises:
            PolicyError: none is left of a policy that needs one [W206].
            DeviceError: something does not end, or a kernel fails [W301, W302].
        """
        name = prepared.model.name
        roles = self._models[name].roles

        def measure(point: Point) -> Whole | Declined:
            if roles is None:
                return Declined("there is no job")
            return roles.measured(
                point.variant, prepared.steps, lambda lane: self._machine({name: [lane]}), name,
                whole=_is_whole(prepared),
            )  # fmt: skip

        return settle(prepared, measure)

    def run(self, prepared: Prepared, arrivals: Arrivals, *, admit: bool = False) -> Outcome:
        """One policy on given arrivals, with the variants that it has; see `settled`.

        `admit`: queries that would miss the target are refused as they come.

        Raises:
            PolicyError: it needs a way, or fused steps, that cannot be here [W206].
            DeviceError: the machine stands still, or a kernel fails [W301, W302].
        """
        return self.run_all([prepared], [arrivals], admit=admit)

    def run_all(self, prepared: Sequence[Prepared], arrivals: Sequence[Arrivals], *, admit: bool = False) -> Outcome:
        """The same with several models, each with its own arrivals, and one decision for all.

        Raises:
            PolicyError, DeviceError: as `run` [W206, W301, W302].
        """
        policy, setting = self.policy_of(prepared)
        machine = self.machine_of(prepared)
        with ending(machine):
            admission = Admission(setting) if admit else None
            given = list(zip(prepared, arrivals, strict=True))
            return run(policy, LiveBackend(machine, given, policy=policy, admission=admission))

    def policy_of(self, prepared: Sequence[Prepared]) -> tuple[Policy, Setting]:
        """The policy that these were prepared for, and what it is told.

        Raises:
            PolicyError: it launches kernels of the job whole, and these cannot be at any time [W206].
        """
        first, setting = prepared[0], setting_of(prepared)
        if setting.job is not None:
            if not self._whole and first.policy in _LAUNCH_WHOLE:
                reason = f"it launches kernels of {setting.job.name} whole, which cannot be at any time"
                raise PolicyError(policy=first.policy, reason=reason, remedy=_NO_PASSES)
            kernel_us = setting.job.kernel_us if self._whole else NOT_WHOLE_US
            # a machine has whole ones alone
            setting = replace(setting, job=replace(setting.job, kernel_us=kernel_us, cuts=False))
        return make(first.policy, setting), setting

    def machine_of(self, prepared: Sequence[Prepared]) -> Machine:
        """What a policy with these variants runs on, once.

        Raises:
            PolicyError: a way, or a fused step, that cannot be here [W206].
        """
        return self._machine({
            p.model.name: [self._there(x.variant.name, self._lane_of_point(p, x)) for x in p.points[1:]]
            for p in prepared
        })  # fmt: skip

    def results(self, name: str = "") -> tuple[torch.Tensor, ...]:
        """What a query of a model, by default the first, gives now, alone, by the plan without a budget."""
        model = self._models[name or self.name]
        model.alone.launch()
        self._finish()
        found = tuple(x.clone() for x in model.outputs)
        torch.cuda.synchronize()  # before the next graph writes there
        return found

    # -- parts

    def _close(self) -> None:
        """Plans first: the framework has noted the streams of their memory, those of parts among them."""
        with contextlib.suppress(DeviceError):  # it was raised where it was met
            self._device.drain()
        torch.cuda.synchronize()
        self._splits.clear()
        self._kept.clear()
        self._models.clear()
        self._forms.clear()
        gc.collect()
        torch.cuda.empty_cache()
        self._partitions.close()

    def _finish(self) -> None:
        """Until all that was asked for has ended."""
        self._device.drain()
        torch.cuda.synchronize()

    def _stream(self, priority: int) -> torch.cuda.Stream:
        own = streams.Stream(priority=priority)
        self._held.callback(own.close)
        return torch.cuda.ExternalStream(own.handle)  # type: ignore[no-untyped-call]

    def _lane_of_point(self, prepared: Prepared, point: Point) -> Lane | Declined:
        variant, name = point.variant, prepared.model.name
        if variant.sharing != "role":
            return self.lane_of(way_of(variant.name), name)
        if (roles := self._models[name].roles) is None:
            return Declined("there is no job")
        return roles.of(variant, prepared.steps, whole=_is_whole(prepared))

    def _with_roles(self, plan: CudaExecutable, rebound: Mapping[int, Rebind]) -> Recorded:
        """A plan without a budget, some of its steps launched in another way."""
        made = self._made(plan, self._high, None, rebound)
        return Recorded(self._launching(made, self._high[0]), made.static_outputs, made)

    def _fused_steps(self, name: str, seconds: float) -> tuple[tuple[StepSamples, ...], dict[str, str]]:
        """Samples of a model's fused steps; and why others are not fused, by name."""
        model = self._models[name]
        assert model.roles is not None
        assert self._job is not None
        with ExitStack() as held:
            counters = Counters(*(held.enter_context(streams.device_memory(BYTES)) for _ in range(2)))
            machine = DeviceMemory(held)
            search = FusedSearch(model.roles.fused, machine, counters, self._facts, block_us=self._job.block_us)
            steps = search.run(name, lambda x: self._made(model.plans.plain, self._high, None, x), seconds)
        gc.collect()
        torch.cuda.empty_cache()
        return steps, search.refused

    def _lane(self, found: CudaExecutable, lanes: Sequence[torch.cuda.Stream], budget: SmBudget | None) -> Lane:
        """The plan recorded anew on these streams, with the same inputs."""
        made = self._made(found, lanes, budget)
        self._kept.append(made)
        return self._launching(made, lanes[0])

    def _made(
        self, found: CudaExecutable, lanes: Sequence[torch.cuda.Stream], budget: SmBudget | None,
        rebound: Mapping[int, Rebind] | None = None,
    ) -> CudaExecutable:  # fmt: skip
        self._device.drain()  # streams are captured
        budgeted = None if budget is None else Budgeted(self._facts.within(budget))
        made = CudaExecutable(
            found.linked, device=found.device, lease=Lease(found.device, lanes), budgeted=budgeted, rebound=rebound
        )
        for static, given in zip(made.static_inputs, found.static_inputs, strict=True):
            static.copy_(given)
        torch.cuda.synchronize()
        return made

    def _launching(self, made: CudaExecutable, stream: torch.cuda.Stream) -> Lane:
        """A plan's graphs on the first of its streams."""
        device, graphs, handle = self._device, made.recorded_graphs, stream.cuda_stream

        def launch_graphs() -> None:
            for graph in graphs:
                device.launch(graph, handle)

        def launch_by_steps() -> None:
            device.drain()
            with torch.cuda.stream(stream):
                made.replay()

        launch_by_steps()
        torch.cuda.synchronize()
        launch, io = launch_graphs if graphs else launch_by_steps, self._io
        if io is None:
            return Lane(handle, launch)

        def launch_between_copies() -> None:
            io.fill(made, handle)
            launch()
            io.fetch(made, handle)

        return Lane(handle, launch_between_copies)

    def _drawn(self, job: KernelJob, how: Drawing, sms: int) -> CoRunner | Declined:
        """The persistent kernel for so many multiprocessors, which it has for itself."""
        return job.co_runner(how.ctas_per_sm * sms, chunk=how.chunk, ahead=how.ahead)

    def _drawn_beside(self, job: KernelJob, threads: int) -> CoRunner | Declined:
        """The persistent kernel with one CTA of so many threads on each SM."""
        widest = self._drawn(job, self._drawing_beside, self._facts.sms)
        most = threads if isinstance(widest, Declined) else widest.threads
        how = self._drawing_beside.of_threads(threads, most)
        return job.co_runner(self._facts.sms, threads=threads, chunk=how.chunk, ahead=how.ahead)

    def _form(self, job: KernelJob, made: CoRunner, stream: int) -> Form:
        """A persistent kernel on a stream, as a graph."""
        return Form(stream, partial(self._device.launch, job.recorded(made.launch, stream)))

    def _part(self, model: _Model, sms: int) -> tuple[Lane, _Split] | Declined:
        """A model's plan on all but so many multiprocessors, and how the GPU is split."""
        ways = [(model.plans.plain, None)] + ([(model.plans.budgeted, BUDGET)] if model.plans.budgeted else [])
        why = [fits(plan, self._facts, self._facts.sms - sms) for plan, _ in ways]
        if None not in why:
            assert why[0] is not None
            return why[0]
        if sms not in self._splits:
            self._splits[sms] = self._split(self._facts.sms - sms)
        split = self._splits[sms]
        if isinstance(split, Declined):
            return split
        if sms not in model.parts:
            plan, budget = ways[why.index(None)]
            model.parts[sms] = self._lane(plan, split.lanes, budget)
        return model.parts[sms], split

    def _split(self, sms: int) -> _Split | Declined:
        """So many multiprocessors for the models, the others for the job."""
        parts = self._partitions.enter_context(partitioned(sms))
        if not isinstance(parts, Partition):
            return parts
        handles = [parts.first.stream(priority=self._greatest) for _ in range(LANES)]
        lanes = tuple(torch.cuda.ExternalStream(x) for x in handles)  # type: ignore[no-untyped-call]
        return _Split(lanes, parts.rest.stream(priority=self._least), parts.rest.sms)

    def _measured_us(self, name: str) -> float:
        machine = GpuMachine(self._device, {name: [self._models[name].alone]}, copies=self._copies.cuda_stream)
        with ending(machine):
            return statistics.median(back_to_back(machine, name, 0, 50)[0])

    def _pass_us(self, job: KernelJob) -> float:
        """All kernels of a job once, alone."""
        found = []
        device, stream = self._device, self._low.cuda_stream
        for handle in (stream, self._high[0].cuda_stream):  # where policies launch passes
            job.recorded(job.put_pass, handle)
        first, last = device.event(), device.event()
        for _ in range(_TIMES + 1):
            device.record(first, stream)
            device.launch(job.recorded(job.put_pass, stream), stream)
            device.mark(last, stream, since=first)
            device.finish(stream)
            while not device.happened(last):
                device.sleep(10_000)
            found.append(device.apart_ns(last) / 1e3)
        device.give_back([first, last])
        return statistics.median(found[1:])

    def _rate(self, form: Form) -> float:
        """Blocks in a second of the job alone in a form."""
        assert isinstance(self._job, GpuJob)
        machine = GpuMachine(
            self._device, {self.name: [self._models[self.name].alone]}, copies=self._copies.cuda_stream,
            job=self._job.anew(), idle=form,
        )  # fmt: skip
        with ending(machine):
            begun = machine.now_ns()
            machine.set_form(0)
            time.sleep(0.02)
            span = machine.now_ns() - begun
            return machine.close_job().blocks * 1e9 / span


def _kind(job: GpuJob | NetworkGpuJob | ProcessJob | None) -> JobKind:
    if isinstance(job, ProcessJob):
        return "process"
    return "network" if isinstance(job, NetworkGpuJob) else "kernels"


def _is_whole(prepared: Prepared) -> bool:
    """Whether each fused step runs all kernels of the job once."""
    return prepared.policy == "tacker"


def whole_sm(facts: GpuFacts) -> SmBudget:
    """All of an SM."""
    return SmBudget(facts.registers_per_sm, facts.shared_per_sm, facts.threads_per_sm, facts.blocks_per_sm)


def fits(found: CudaExecutable, facts: GpuFacts, sms: int) -> Declined | None:
    """Why a plan cannot run on so many multiprocessors: CTAs that spin on each other may find no room; None: it can."""
    part = replace(facts.whole.within(SmBudget(registers=facts.whole.registers_per_sm)), sms=sms)
    for step in found.plan.steps:
        source = step.kernel
        if not isinstance(source, CudaSource):
            return Declined(f"{step.kernel.schedule} is a call, and nobody knows how many multiprocessors it needs")
        taken = usage(Path(found.linked.objects[source.sha256]).read_bytes())
        if (why := first_over_budget(source.launches, taken, part)) is not None:
            return why
    return None
