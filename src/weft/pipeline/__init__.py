"""The pipeline: one flat function, one line per stage. Read `compile_imported` first."""

from __future__ import annotations

import contextlib
import gc
import importlib
import math
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import torch

from weft.device.any import DeviceFacts
from weft.device.cuda.facts import GpuFacts
from weft.device.facts import cpu_facts
from weft.device.room import free_bytes
from weft.device.toolchain import HostCompiler, find_compiler
from weft.errors import (
    ArtifactError,
    BudgetWarning,
    DeviceError,
    InvalidGraphError,
    NoPlanError,
    NoWorkerError,
    OptionError,
    ToolchainError,
)
from weft.frontends.imported import Imported
from weft.generate.library.covered import is_covered
from weft.generate.offer import kernels_of
from weft.generate.protocol import Generator
from weft.generate.registry import generators
from weft.ir.declined import Declined
from weft.ir.graph import Graph
from weft.ir.passes import clean_up
from weft.ir.types import DType
from weft.kernels.dataclass_json import from_json, to_json
from weft.kernels.measurement import Measurement, Verdict
from weft.kernels.plan import Plan, Step
from weft.kernels.record import CompileRecord, PlanRecord
from weft.kernels.source import KernelSource, LibraryCall, Schedule
from weft.options import Options
from weft.orchestrate.alternatives import Alternatives, find_alternatives
from weft.orchestrate.enumerate import Enumeration, enumerate_candidates
from weft.orchestrate.legality import EnumerationLimits
from weft.pipeline import choose, collector, finish, preflight, qualify, reference, summary, warm
from weft.pipeline.deadline import FOREVER, Deadline, OutOfTime, call_with_timeout
from weft.pipeline.indices import with_checks
from weft.pipeline.problems import Entry, Problems, collect, make_kernels
from weft.pipeline.search.emission import Emission
from weft.pipeline.search.loop import ON_CPU, ON_GPU, Inline, Learning, search
from weft.pipeline.search.prices import Known
from weft.pipeline.stages import Say, Stages, silent
from weft.pipeline.verdict import Judged, judged
from weft.runtime.any import AnyExecutable
from weft.runtime.executable import Executable, Linked
from weft.runtime.lanes import order_of
from weft.runtime.streams import Lease
from weft.runtime.values import survey as survey_values
from weft.tune.keys import GPU_WORDS, PACKAGE, PLAN_PARTS, source_hash
from weft.tune.store import Database
from weft.tune.tuner import GRACE_S, ProblemTrial, Progress, Tuner

if TYPE_CHECKING:
    from weft.device.cuda.nvrtc import Nvrtc

P = ParamSpec("P")
R = TypeVar("R")
Tensors = Sequence[torch.Tensor]
USES_AT_ONCE = 4000
"""On a GPU, places of kernels in formats of which all are cut out before the first plan is made (0.2 ms each); where
there are more, that plan is made with channels-last images alone. With a limit on memory it might not exist."""
Start = Callable[[float], Callable[..., Tensors] | None]
"""Makes the framework's own execution within so many seconds; None where there is none."""
STARTS_S, START_SHARE = 5.0, 0.2
"""A framework that must be started is, with a budget of so many seconds, in this share of it."""
BLAME_S = 1.5
"""At least so long the steps of a plan that was refused are looked at, if that ends before all is given up."""
CALIBRATE_FROM_S = 20.0
"""The device is measured, which takes seconds, where the budget is at least so many; else what is known of it does."""
CALIBRATE_SHARE = 0.1
"""Of the budget: what measuring a CPU may take, at least as long as it does where nothing else runs."""
ENUMERATE_SHARE, EXTRACT_SHARE, SELECT_SHARE, REFERENCE_SHARE, LINK_SHARE = 0.15, 0.2, 0.35, 0.35, 0.5
"""Of the time that is left when a stage begins: what it may take before it ends with what it has."""
UNTUNED_SHARE = 0.35
"""Without a budget, of the time that is left: what cutting the model's operators out may take before it is given up."""
FEW_CANDIDATES = 500
"""So many are always cut out (0.1 s), so that there is a plan which can be saved."""
SAVED_S = 0.1
"""Without a budget a plan that cannot be judged in time is made all the same, to be saved, if its weights are packed in
so many seconds."""
SOLVES = 6
"""Programs that are solved at the end, at most: the time is shared among them, and some is for writing them down."""
VERIFIED_SHARE = 0.3
"""Of the time that is left, for the solver of the plan of what was verified alone."""
UNVERIFIED_BY = 0.9
"""The share of the budget after which no plan that was not verified is begun to be judged."""
QUALIFY_GRACE_S = 0.3
"""How long an answer is waited for when the time of verifying what was not measured is up."""
GRACE_SHARE = 0.3
"""Of what is reserved for whole plans: how long an answer of the worker is waited for when measuring ends."""
ALONE_US = 2000.0
"""On a CPU, plans that are predicted to take at most so long are also timed on one thread."""
CLEAN_UP_RATIO = 4.0
"""Cleaning a graph up takes at most about so many times as long as its import did: both look at all weights."""
TOO_LATE = "the time was up before anything was looked for"
NOTHING_FOUND = Enumeration((), 0, 0, Counter(), True, 0.0)
"""What is found where there was no time to look."""
UNTUNED_LATE = "without a budget there was no time to make and judge one; a larger `budget_s` has it"
BRANCHES = (2, 4)
"""Chains of kernels that may run side by side on a GPU; which is best is measured."""


@dataclass(frozen=True)
class Compilation:
    """What answers calls and how it came about."""

    graph: Graph
    """What is computed."""
    plan: AnyExecutable | None
    """The best plan; None: none is left."""
    record: CompileRecord
    eager: Callable[..., Tensors] | None = None
    """The framework's own execution, where that is the answer; on a GPU recorded into a CUDA graph where possible."""

    @property
    def run(self) -> Callable[..., Tensors]:
        """What a call should run."""
        return self.eager or self.executable

    @property
    def executable(self) -> AnyExecutable:
        """The best plan, whether or not the framework's own execution beats it.

        Raises:
            ArtifactError: there is none [W401].
        """
        if self.plan is None:
            problem = "no plan of this model is left: the framework's own execution answers its calls"
            remedy = "compile it again with a larger budget, without other load on the machine"
            raise ArtifactError(problem=problem, remedy=remedy)
        return self.plan


@dataclass(frozen=True)
class Setting:
    """The machine and the choices that one compilation works with."""

    options: Options
    facts: DeviceFacts
    compiler: HostCompiler | Nvrtc | None
    environment: Mapping[str, str]
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    lease: Lease | None = None
    """On a GPU: the streams that all plans of the compilation are recorded and run on."""

    @property
    def on_gpu(self) -> bool:
        """Whether kernels run on an NVIDIA GPU."""
        return self.device.type == "cuda"

    @property
    def sample(self) -> finish.Sample:
        """How whole plans are timed."""
        if not self.on_gpu:
            return finish.host_sample
        from weft.pipeline import gpu

        return gpu.sample_us

    def is_sound(self) -> bool:
        """Whether the device still computes in this process."""
        if not self.on_gpu:
            return True
        from weft.pipeline import gpu

        return gpu.is_sound(self.device)

    def bounded(self, run: Callable[..., Tensors], clock: Deadline) -> Callable[..., Tensors]:
        """On a CPU, a run that is left to itself when the time is up: OutOfTime is raised then.

        On a GPU a run is only enqueued, on the stream of the thread that asks; what runs there was run by a worker.
        """
        if self.on_gpu or math.isinf(clock.last):
            return run

        def watched(*inputs: torch.Tensor) -> Tensors:
            return call_with_timeout(clock.seconds_to(clock.last), run, *inputs)

        return watched

    def there(self, call: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """A call in a thread of its own: libraries are asked for the current GPU, there the first."""
        if self.on_gpu:
            torch.cuda.set_device(self.device)
        return call(*args, **kwargs)

    def aside(self) -> contextlib.AbstractContextManager[None]:
        """What is done inside runs on a stream of the compilation, so that the caller's takes no workspaces."""
        if self.lease is None:
            return contextlib.nullcontext()
        from weft.pipeline import gpu

        return gpu.aside(self.lease)


def compile_imported(
    imported: Imported,
    options: Options,
    *,
    example_inputs: Tensors | None = None,
    eager: Callable[..., Tensors] | None = None,
    settle: Callable[[], None] | None = None,
    start: Start | None = None,
    framework: str = "eager",
    model: str = "model",
    say: Say = silent,
    stages: Stages | None = None,
    clock: Deadline | None = None,
) -> Compilation:
    """Primitives -> the fastest verified executable: one line per stage.

    `clock` began to run before the model was taken in; None: it does now. Every stage keeps to it. `stages` has those
    that were before, and says what comes; None: `say` does.

    `eager` runs the framework's own model on the example inputs; it is timed as a baseline. `settle` is called when it
    has won: from then on it must not depend on what others hold.

    `start` makes `eager` where that takes time, and is asked only where no plan is remembered, or where it had won.
    `framework` names it in the record.
    """
    stages = stages or Stages(options, say)
    clock = clock or Deadline.of(options.budget_s)
    tunes = options.budget_s > 0
    stages.run("preflight", preflight.check, imported.graph, options, room_bytes(options))
    setting = stages.run("survey", survey, options)
    if setting.on_gpu:
        setting = replace(setting, lease=Lease(setting.device))
    given, checks = with_checks(imported) if options.check_indices else (imported, ())
    if checks:
        eager = settle = start = None  # the framework gives no indices out, and on a GPU dies of one outside
    ready = clock.clock() + CLEAN_UP_RATIO * stages.seconds("import")
    if eager is not None and tunes and ready >= clock.end and not options.memory_limit_bytes:
        taken = imported.graph
        return by_framework(
            imported, taken, taken, eager, settle, setting, stages, framework, model, [TOO_LATE], inputs=None
        )
    with collector.put_off():
        cleaned = stages.run("clean up", clean_up, given.graph, strict=options.strict)
        alternatives = stages.run(
            "alternatives", find_alternatives, cleaned.graph, strict=options.strict, on_gpu=setting.on_gpu
        )
        graph = alternatives.graph
        key = warm.plan_key(graph, options, setting.environment)
        stored = stages.run("recall", warm.recall, options.cache, key, options.budget_s)
    executable = stages.run("link", _link_stored, graph, stored[0], setting) if stored is not None else None
    if stored is not None and executable is not None:
        stages.note("a plan that was chosen before: nothing is measured")
        old = stored[1]
        if setting.on_gpu:
            torch.cuda.empty_cache()  # weights that were packed
        record = summary.renamed(from_json(CompileRecord, old), model, imported, executable, tuple(stages.records))
        if record.chosen == framework and start is not None:
            eager = stages.run("framework", start, START_SHARE * max(options.budget_s, STARTS_S))
        won = eager if record.chosen == framework else None
        if won is not None:
            with stages.timed("settle"):
                if settle is not None:
                    settle()
                if example_inputs is not None:
                    won = record_eager(won, [x.to(setting.device) for x in example_inputs], setting, alone=True)
        return Compilation(executable.graph, executable, stages.close(record), won)
    if start is not None and options.budget_s >= STARTS_S:
        eager = stages.run("framework", start, START_SHARE * options.budget_s)
    stand_in = None
    if eager is not None and not options.memory_limit_bytes:  # nothing is known of the memory that it takes
        stand_in = partial(
            by_framework, imported, cleaned.graph, graph, eager, settle, setting, stages, framework, model
        )
    if stand_in is not None and tunes and clock.passed():
        return stand_in([TOO_LATE], inputs=None)
    inputs = (
        list(example_inputs)
        if example_inputs is not None
        else reference.example_inputs(cleaned.graph, options.seed, imported.integers)
    )
    inputs = [x.to(setting.device) for x in inputs]
    with opened(setting, clock, stages) as bench:
        if bench is not None and setting.on_gpu and eager is not None:
            # what its first run loads, for seconds, is loaded while the worker is
            stages.run("first run", first_run, eager, inputs, setting)
        enough = clock.until(clock.within(ENUMERATE_SHARE))
        found = stages.run(
            "enumerate", enumerate_candidates, graph, limits_of(options, setting.facts), alternatives, stop=enough
        )
        stages.note(f"{found.raw} sets, {found.unique} distinct, {len(found.candidates)} candidates")
        most = USES_AT_ONCE if setting.on_gpu and not options.memory_limit_bytes else math.inf
        cut = clock.until(clock.within(EXTRACT_SHARE))
        hurried = stand_in is not None and not tunes and len(found.candidates) > FEW_CANDIDATES
        given_up = clock.until(clock.at_last(UNTUNED_SHARE) if hurried else math.inf)
        problems = stages.run(
            "extract", collect, graph, found.candidates, alternatives, setting.facts,
            most_at_once=most, stop=cut, give_up=given_up,
        )  # fmt: skip
        if stand_in is not None and given_up.fired:
            return stand_in([UNTUNED_LATE], inputs=inputs)
        if stand_in is not None and tunes and clock.passed():
            return stand_in([TOO_LATE], inputs=None)
        left_out = " before the first plan" if problems.rest is not None else ""
        stages.note(f"{len(problems.entries)} distinct problems{left_out}")
        known = stages.run("measure", measure, bench, alternatives, problems, setting, clock, stages.say)
        known.complete = known.complete and not (enough.fired or cut.fired)
        clocks = bench.tuner.sm_clocks_mhz if bench is not None else []
        waits = waited(known, bench.tuner) if bench is not None else ""
        stages.note(
            f"{len(known.measurements)} kernels of {len(known.best_us)} problems measured{at_clocks(clocks)}{waits}"
        )
        lost = [known.failed] if known.failed else []
        again = partial(select_in_time, alternatives, problems, known, setting, lost, clock)
        plans = stages.run("select", again)
        verdict = judged(known, plans, options)
        if bench is not None:
            has_baseline = eager is not None
            of_verified = partial(plans_of_verified, alternatives, problems, known, setting, clock)
            plans = stages.run(
                "qualify", qualified, bench, plans, problems, known, again, of_verified, clock, has_baseline, lost
            )
            stages.note(f"{len(known.right)} calls verified without being timed, {len(known.refused)} refused")
    plans = [replace(plan, checks=checks) for plan in plans]
    if verdict.warning:
        warnings.warn(verdict.warning, BudgetWarning, stacklevel=2)
    if not plans and stand_in is not None:
        return stand_in(lost, found, problems, known, verdict, inputs=None if clock.passed() else inputs)
    if not plans and eager is None and start is not None:  # with a budget it was asked
        eager = stages.run("framework", start, START_SHARE * STARTS_S) if options.budget_s < STARTS_S else None
    if stand_in is not None and not tunes and not judged_in_time(graph, clock):
        return stand_in([UNTUNED_LATE], found, problems, known, verdict, inputs=inputs)
    with setting.aside():
        own = None if eager is None else setting.bounded(eager, clock)
        expected = stages.run(
            "reference",
            reference.outputs_in_time,
            imported.graph,
            inputs,
            own,
            allow_tf32=options.allow_tf32,
            stop=clock.until(clock.at_last(REFERENCE_SHARE)),
            precise=tunes,
        )
        if stand_in is not None and not tunes and not judged_in_time(graph, clock, stages.seconds("reference")):
            return stand_in([UNTUNED_LATE], found, problems, known, verdict, inputs=inputs)
        baseline = stages.run("baseline", record_eager, eager, inputs, setting)
        contenders = stages.run("link", link_all, graph, plans, setting, inputs, baseline, lost, framework, clock)
        if not tunes:  # nothing was run: what its primitives took, a plan does about
            contenders = [replace(c, first_s=stages.seconds("reference")) for c in contenders]
        if not any(c.eligible for c in contenders):  # with a limit on memory, the framework's own is only compared with
            raise NoPlanError(reason=_reason(lost))
        chosen, timed = stages.run(
            "time",
            finish.decide,
            contenders,
            expected,
            working_dtype(graph),
            seed=options.seed,
            budget_s=min(20.0, max(1.0, clock.left_s)) if tunes else 0.0,
            sample=setting.sample,
            lives=setting.is_sound,
            left_s=lambda: clock.seconds_to(clock.last),
        )
        drawn = example_inputs is None and not imported.integers
        if not clock.passed(clock.last):
            timed = stages.run(
                "blame", _blamed, timed, contenders, imported.graph, alternatives, inputs, setting, clock, drawn=drawn
            )
    # without a budget the calls of the library's plan may stand as they are, where the framework answers for it
    executable = chosen.executable or finish.fastest(contenders, timed, unjudged=not tunes)
    in_place: Sequence[float] = ()
    if executable is None:
        lost += [f"the plan {p.name} {p.note}" for p in timed if p.name != framework and not p.verified]
        text = "Weft has no plan for this model, so the framework's own execution runs it"
        warnings.warn(f"{text}: {_reason(lost)}", stacklevel=2)
    else:
        executable.check_indices = True
        plan_us = next((p.median_us for p in timed if p.name == executable.plan.name), 0.0)
        if tunes and not clock.passed():
            in_place = stages.run("walk", finish.walk, executable, inputs, plan_us)
    parts = summary.Parts(
        imported, cleaned.graph, found, problems, known, plans, timed, chosen.name, graph, executable, in_place, verdict
    )
    record = stages.run("record", summary.record, parts, model, setting.environment, tuple(stages.records))
    if executable is not None:
        spent_s = 0.0 if verdict.again else options.budget_s
        with stages.timed("remember"):
            kept = to_json(record)
            warm.remember(options.cache, key, executable.plan, kept, complete=known.complete, budget_s=spent_s)
    won = eager if chosen.executable is None else None
    with stages.timed("settle"):
        if won is not None and settle is not None:
            settle()
        if setting.on_gpu:
            if won is not None:
                won = record_eager(won, inputs, setting, alone=True)
            del contenders, chosen  # all plans but one, which hold themselves by their launches
            gc.collect()
            torch.cuda.empty_cache()
    return Compilation(graph, executable, stages.close(record), won)


def by_framework(
    imported: Imported,
    cleaned: Graph,
    graph: Graph,
    eager: Callable[..., Tensors],
    settle: Callable[[], None] | None,
    setting: Setting,
    stages: Stages,
    framework: str,
    model: str,
    lost: Sequence[str],
    found: Enumeration = NOTHING_FOUND,
    problems: Problems | None = None,
    known: Known | None = None,
    verdict: Judged | None = None,
    *,
    inputs: Tensors | None,
) -> Compilation:
    """The framework's own execution, where no plan is left: there is nothing to compare it with, nor to judge it by.

    `inputs`: on a GPU it is recorded with them; None: there is no time for that.
    """
    problems, known = problems or Problems({}), known or Known()
    if verdict is None:
        verdict = judged(known, (), setting.options)
        if verdict.warning:
            warnings.warn(verdict.warning, BudgetWarning, stacklevel=3)
    text = "Weft has no plan for this model, so the framework's own execution runs it"
    warnings.warn(f"{text}: {_reason(lost)}", stacklevel=3)
    own = PlanRecord(framework, 0, 0.0, (), math.inf, verified=False, worst_error=math.inf, note=finish.ALONE)
    parts = summary.Parts(
        imported, cleaned, found, problems, known, (), (own,), framework, graph, None, verdict=verdict
    )  # fmt: skip
    record = stages.run("record", summary.record, parts, model, setting.environment, tuple(stages.records))
    with stages.timed("settle"):
        if settle is not None:
            settle()
        answer = eager if inputs is None else record_eager(eager, inputs, setting, alone=True)
    return Compilation(graph, None, stages.close(record), answer)


def _blamed(
    timed: Sequence[PlanRecord],
    contenders: Sequence[finish.Contender],
    model: Graph,
    alternatives: Alternatives,
    inputs: Tensors,
    setting: Setting,
    clock: Deadline,
    *,
    drawn: bool,
) -> tuple[PlanRecord, ...]:
    """The records of plans, the first that was refused with what is wrong with it, if it can still run."""
    from weft.pipeline.repro import Case, blame

    found = list(timed)
    for k, (about, contender) in enumerate(zip(timed, contenders, strict=True)):
        executable = contender.executable
        if about.verified or not finish.is_judged(about.note) or executable is None or not setting.is_sound():
            continue
        case = Case(model, executable.graph, executable.plan, alternatives.classes, inputs, drawn)
        seconds = min(max(clock.left_s, BLAME_S), clock.seconds_to(clock.last))
        warn = partial(warnings.warn, stacklevel=2)
        try:
            note = blame(executable, case, about.note, setting.options, setting.environment, warn, seconds=seconds)
        except (RuntimeError, IndexError) as error:  # what was refused may also fail
            note = f"{about.note}; {type(error).__name__} while it was looked at"
        found[k] = replace(about, note=note)
        break
    return tuple(found)


def weight_bytes(graph: Graph) -> int:
    """Of all constants, as each plan packs them."""
    return sum(x.nbytes for x in graph.constants.values())


def judged_in_time(graph: Graph, clock: Deadline, run_s: float = 0.0) -> bool:
    """Without a budget: is there time to link a plan and to judge it, or does linking it take next to none?

    A run takes about `run_s` seconds; a plan is judged where there is time for two.
    """
    packed_s = weight_bytes(graph) / finish.PACKED_BYTES
    return packed_s <= SAVED_S or clock.clock() + packed_s + 2 * run_s < clock.last


def _reason(lost: Sequence[str]) -> str:
    """Why no plan is left, in one line."""
    return "; ".join(dict.fromkeys(lost))[:1000] or "nothing that all plans need was found right in time"


def room_bytes(options: Options) -> int:
    """Memory that compiling may take on the device: what is free of the host's, all of a GPU's.

    Raises:
        DeviceError: there is no such GPU here [W301].
    """
    if options.device == "cpu":
        return free_bytes()
    if not torch.cuda.is_available():
        return 1 << 62  # the survey says what is missing
    from weft.pipeline import gpu

    return torch.cuda.get_device_properties(gpu.device_of(options)).total_memory


def _link_stored(graph: Graph, plan: Plan, setting: Setting) -> AnyExecutable | None:
    """A plan that was chosen before, made runnable; None where what it names is refused here: it is tuned anew.

    Raises:
        DeviceError: it took the GPU's context with it [W301].
    """
    try:
        return link(graph, plan, setting)
    except finish.FAULTS as error:
        said = (str(error).splitlines() or [type(error).__name__])[0][:200]
        if not setting.is_sound():
            problem = f"the plan that was chosen before ended this process's use of the GPU: {said}"
            raise DeviceError(problem=problem) from error
        text = f"Weft tunes anew, the plan it remembers does not run: {said}"
        warnings.warn(text, stacklevel=2)
        return None


def at_clocks(clocks_mhz: Sequence[int]) -> str:
    """At which clocks of the multiprocessors kernels were timed, where the driver says so."""
    if not clocks_mhz:
        return ""
    middle = sorted(clocks_mhz)[len(clocks_mhz) // 2]
    return f" at {min(clocks_mhz)} to {max(clocks_mhz)} MHz, half of the times above {middle}"


def waited(known: Known, tuner: Tuner) -> str:
    """Where the seconds of measuring went."""
    s = tuner.seconds
    return (
        f"; asked after {known.asked_s:.1f} s, measured after {known.measured_s:.1f} s;"
        f" waited {s['build']:.1f} s for kernels, {s['worker']:.1f} s for the worker, {s['run']:.1f} s for answers"
    )


def survey(options: Options) -> Setting:
    """What this machine has."""
    if options.device != "cpu":
        from weft.pipeline import gpu

        found, nvrtc, around = gpu.survey(options, calibrate=options.budget_s >= CALIBRATE_FROM_S)
        around["weft"] = source_hash(PACKAGE, (*PLAN_PARTS, "device/cuda"))
        device = gpu.device_of(options)
        if device.index:  # who measures is another process, whose current GPU is the first
            options = replace(options, device=str(device))
        return Setting(options, found, nvrtc, around, device)
    most_s = CALIBRATE_SHARE * options.budget_s
    facts = cpu_facts(options.cache, calibrate=options.budget_s >= CALIBRATE_FROM_S, most_s=most_s)
    if options.threads or torch.get_num_threads() != facts.threads:
        facts = replace(facts, threads=options.threads or torch.get_num_threads())
    compiler = find_compiler()
    usable = None if isinstance(compiler, Declined) else compiler
    if isinstance(compiler, Declined) and options.allow_generated:
        text = f"Weft found no C++ compiler ({compiler.reason}): library kernels only, nothing is generated or fused"
        warnings.warn(text, stacklevel=2)
    environment = {
        "cpu": facts.name,
        "threads": str(facts.threads),
        "torch": torch.__version__,
        "compiler": usable.version if usable else "none",
        "weft": source_hash(PACKAGE, PLAN_PARTS, without=GPU_WORDS),
    }
    return Setting(options, facts, usable, environment)


def limits_of(options: Options, facts: DeviceFacts | None = None) -> EnumerationLimits:
    """Bounds of the enumeration; what only kernels of one device take is looked for there alone."""
    return EnumerationLimits(
        max_members=options.max_members,
        max_inputs=options.max_inputs,
        max_reductions=options.max_reductions,
        max_candidates=options.max_candidates,
        attention=options.device != "cpu",
        multiprocessors=facts.sms if isinstance(facts, GpuFacts) else 0,
        library_calls=options.device != "cpu",
    )


@dataclass(frozen=True)
class Bench:
    """What writes, builds and measures kernels."""

    tuner: Tuner
    emission: Emission
    ready_by: float = math.inf
    """When the tuner's worker, which was started, is not waited for any longer."""


@contextlib.contextmanager
def opened(setting: Setting, clock: Deadline, stages: Stages) -> Iterator[Bench | None]:
    """A bench with its processes loading while the caller goes on; None where nothing is to be measured.

    Nobody waits for what is still at work when the block is left.
    """
    options = setting.options
    if options.budget_s <= 0:
        yield None
        return
    makers = generators(
        library=options.allow_library,
        generated=options.allow_generated and setting.compiler is not None,
        device=setting.device.type,
    )
    with contextlib.ExitStack() as open_:
        with stages.timed("open"):
            database = open_.enter_context(Database.open(options.cache))
            tuner = open_.enter_context(
                Tuner(options, setting.facts, database, compiler=setting.compiler, keep=options.keep_worker)
            )
            tuner.start_early()
            emission = open_.enter_context(contextlib.closing(Emission(makers, setting.facts, options)))
        if setting.on_gpu:
            # read from the disk meanwhile, where the caller has not: the first plan needs it
            threading.Thread(target=importlib.import_module, args=("scipy.optimize",), daemon=True).start()
        yield Bench(tuner, emission, clock.ready_by)
        with stages.timed("close"):
            open_.close()


def measure(
    bench: Bench | None, alternatives: Alternatives, problems: Problems, setting: Setting, clock: Deadline, say: Say
) -> Known:
    """Build, verify and time what an optimal plan may need (see `search`), as long as the budget allows."""
    options = setting.options
    if bench is None:
        return _unmeasured(problems, setting)
    lookups = 0
    asked_s = measured_s = 0.0
    done: set[tuple[str, Schedule]] = set()
    began = clock.clock()
    reserved_s = finish.reserve_s(options.budget_s, problems.run_us, weight_bytes(alternatives.graph))
    deadline = max(began, clock.end - reserved_s)
    grace_s = min(GRACE_S, GRACE_SHARE * reserved_s)
    learned = Learning()
    ahead = qualify.CallsAhead(
        alternatives, problems, learned, setting.facts, options, lambda: bench.tuner.seconds["run"]
    )

    failed: list[str] = []

    def out_of_time() -> bool:
        return bool(failed) or clock.passed(deadline) or bool(bench.tuner.gave_up)

    def left_s() -> float:
        return clock.seconds_to(deadline + grace_s)

    def spent() -> float:
        return (clock.clock() - began) / max(deadline - began, 1e-3)

    def listen(progress: Progress) -> None:
        nonlocal lookups
        lookups = progress.lookups
        say("measure", search_line(progress, learned, clock.seconds_to(deadline)))

    def measure_batches(batches: Iterator[Sequence[Entry]]) -> Iterator[Measurement]:
        nonlocal measured_s

        def asked() -> Iterator[Sequence[Entry]]:
            nonlocal asked_s
            for batch in batches:
                asked_s = asked_s or clock.clock() - began
                yield batch

        def trials() -> Iterator[ProblemTrial | None]:
            if setting.device.index:
                # the tuner takes these in a thread of its own; libraries are asked for the current GPU, there the first
                torch.cuda.set_device(setting.device)
            for entry in bench.emission.made(problems, asked(), out_of_time):
                if entry is None:
                    yield None
                    continue
                kernels = [(s, k, None) for s, k in entry.asked if (entry.problem.key, s) not in done]
                if kernels and not setting.on_gpu and ahead.is_due(clock.seconds_to(deadline), deadline - began):
                    yield from ahead
                if kernels:
                    ahead.leave(entry.problem.key)
                for given, same in problems.by_tables(entry, kernels):
                    yield ProblemTrial(entry.problem, same, entry.bound_us, given=given)

        try:
            for found in bench.tuner.measure(
                trials(),
                progress=listen,
                deadline=deadline,
                ready_by=bench.ready_by,
                grace_s=grace_s,
                meanwhile=ahead,
            ):
                if ahead.takes(found):
                    continue  # it was not timed
                done.add((found.problem_key, found.schedule))
                measured_s = measured_s or clock.clock() - began
                yield found
        except NoWorkerError as error:
            failed.append(str(error.details["problem"]))

    known = search(
        alternatives.graph,
        problems,
        alternatives,
        measure_batches,
        options,
        out_of_time=out_of_time,
        spent=spent,
        say=partial(say, "measure"),
        pace=ON_GPU if setting.on_gpu else ON_CPU,
        solver=None if setting.on_gpu else Inline(),
        left_s=left_s,
        known=learned,
    )
    known.reused, known.asked_s, known.measured_s = lookups, asked_s, measured_s
    known.failed = failed[0] if failed else bench.tuner.gave_up
    return known


def qualified(
    bench: Bench,
    plans: Sequence[Plan],
    problems: Problems,
    known: Known,
    again: qualify.Remake,
    of_verified: qualify.Remake,
    clock: Deadline,
    has_baseline: bool,
    lost: list[str],
) -> list[Plan]:
    """The plans whose steps a worker has verified, see `qualify`."""
    least_s = 0.0 if has_baseline else qualify.LEAST_S  # without one there is no other answer
    until = max(clock.clock() + least_s, clock.within(qualify.SHARE))

    def verify(trials: Sequence[ProblemTrial]) -> Iterator[Measurement]:
        try:
            yield from bench.tuner.measure(trials, deadline=until, grace_s=QUALIFY_GRACE_S)
        except NoWorkerError as error:
            known.failed = str(error.details["problem"])
            lost.append(known.failed)

    return qualify.qualify(
        plans,
        problems,
        known,
        verify,
        again,
        of_verified,
        lambda: clock.passed(until),
        has_baseline=has_baseline,
        lost=lost,
        covered=lambda step: (
            clock.spent <= UNVERIFIED_BY and _stands_unverified(step, problems=problems, suspects=bench.tuner.suspects)
        ),
    )


def _stands_unverified(step: Step, *, problems: Problems, suspects: Collection[tuple[str, Schedule]]) -> bool:
    """Whether a step may be taken as it may without a budget: not if a worker was lost with it."""
    entry, call = problems.entries[step.problem_key], step.kernel
    if not isinstance(call, LibraryCall) or (step.problem_key, call.schedule) in suspects:
        return False
    return _is_covered(entry, call, device="cuda" if entry.on_gpu else "cpu")


def plans_of_verified(
    alternatives: Alternatives, problems: Problems, known: Known, setting: Setting, clock: Deadline
) -> list[Plan]:
    """The best plan of nothing but what was verified, if there is one."""

    def stands(entry: Entry, call: LibraryCall) -> bool:
        return known.is_right(entry.problem.key, call.schedule)

    options = replace(setting.options, solver_s=min(setting.options.solver_s, max(0.1, VERIFIED_SHARE * clock.left_s)))
    offers = choose.offers(choose.rank(problems, known, library_only=False, stands=stands))
    try:
        return [choose.plain_plan("verified", alternatives.graph, offers, alternatives, options)]
    except (OptionError, InvalidGraphError):
        return []


def progress_line(progress: Progress) -> str:
    """One line for people: a calm counter."""
    refused = ", ".join(f"{n} {v.value}" for v, n in sorted(progress.rejected.items(), key=lambda x: -x[1]))
    line = f"{progress.kernels} kernels measured, {progress.lookups} known"
    line += f", {progress.again} measured once more as their text has changed" * (progress.again > 0)
    return line + (f", rejected: {refused}" if refused else "")


def search_line(progress: Progress, known: Learning, left_s: float) -> str:
    """How many problems are expected, the best plan so far and the time that is left, before the counter."""
    done = len(known.best_us)
    line = f"{done} of about {done + known.open} problems, {left_s:.0f} s left, "
    if known.whole_us:
        line += f"best plan so far {known.whole_us / 1e3:.3g} ms; "
    elif known.plan_us:
        line += f"best plan about {known.plan_us / 1e3:.3g} ms, with guesses; "
    return line + progress_line(progress)


def _unmeasured(problems: Problems, setting: Setting) -> Known:
    makers = generators(library=True, generated=False, device=setting.device.type)
    for entry in problems.entries.values():
        if entry.called:
            make_kernels(entry, problems, makers, setting.facts, setting.options)
    return Known()


def select_in_time(
    alternatives: Alternatives, problems: Problems, known: Known, setting: Setting, lost: list[str], clock: Deadline
) -> list[Plan]:
    """`select_plans`; the library plan alone, made without a solver, where that takes too long or nothing has a price.

    Raises:
        OptionError: no plan was found within the limit on memory [W001].
    """
    _library_calls(problems, known, setting)
    options = setting.options
    if options.memory_limit_bytes or (options.budget_s > 0 and known.measurements):
        limit_s = clock.seconds_to(clock.at_last(SELECT_SHARE))
        share_s = max(0.1, limit_s / SOLVES)
        bounded = replace(setting, options=replace(options, solver_s=min(options.solver_s, share_s)))
        with contextlib.suppress(OutOfTime):
            return call_with_timeout(limit_s, setting.there, select_plans, alternatives, problems, known, bounded, lost)
    calls = choose.rank(problems, known, library_only=True, stands=_stands(setting))
    hurry = clock.until(clock.at_last(SELECT_SHARE))
    unsolved = replace(options, budget_s=0.0)
    try:
        return [choose.library_plan(alternatives.graph, calls, alternatives, unsolved, stop=hurry)]
    except InvalidGraphError as error:  # an operator of the framework was found wrong
        lost.append(str(error.details["problem"]))
        return []


def select_plans(
    alternatives: Alternatives, problems: Problems, known: Known, setting: Setting, lost: list[str] | None = None
) -> list[Plan]:
    """The best three plans over what was measured, the heuristic one, and the library plan that always exists.

    With a limit on memory only those that keep to it. `lost` is told why there are none.

    Raises:
        OptionError: none of the first was found within it [W001].
    """
    _library_calls(problems, known, setting)
    stands = _stands(setting)
    ranked = choose.rank(problems, known, library_only=False, stands=stands)
    try:
        found = choose.plans(alternatives.graph, choose.offers(ranked), alternatives, setting.options)
    except InvalidGraphError as error:  # every kernel of something that no plan can do without was refused
        found = []
        if lost is not None:
            lost.append(str(error.details["problem"]))
    for count, name in enumerate(choose.TRANSFORMED, 1):
        used = {dict(s.kernel.schedule.params).get("algorithm") for p in found for s in p.steps}
        if name in used:
            plain = choose.rank(problems, known, library_only=False, avoid=choose.TRANSFORMED[:count], stands=stands)
            offers = choose.offers(plain)
            with contextlib.suppress(OptionError, InvalidGraphError):  # over the limit on memory, or nothing is left
                found.append(
                    choose.plain_plan(f"without-{name}", alternatives.graph, offers, alternatives, setting.options)
                )
    if setting.options.allow_library or setting.options.budget_s <= 0:
        calls = choose.rank(problems, known, library_only=True, stands=stands)
        # over the limit on memory, or an operator of the framework was found wrong: then there is no such plan
        with contextlib.suppress(OptionError, InvalidGraphError):
            found.append(choose.library_plan(alternatives.graph, calls, alternatives, setting.options))
    return found


def _stands(setting: Setting) -> Callable[[Entry, LibraryCall], bool] | None:
    """Without a budget: which calls may stand though nobody will measure them; None: see `choose.rank`."""
    return partial(_is_covered, device=setting.device.type) if setting.options.budget_s <= 0 else None


def _is_covered(entry: Entry, call: LibraryCall, *, device: str) -> bool:
    return is_covered(entry.problem, call, device)


def _library_calls(problems: Problems, known: Known, setting: Setting) -> None:
    """Make the calls that no plan can do without, where that was not done; each is made once."""
    makers = generators(library=True, generated=False, device=setting.device.type)
    for entry in problems.entries.values():
        if entry.called and entry.kernels is None:
            make_kernels(entry, problems, makers, setting.facts, setting.options)
    if not setting.options.allow_library:
        _stand_in(problems, known, makers, setting)


def _stand_in(problems: Problems, known: Known, makers: Sequence[Generator], setting: Setting) -> None:
    """Library calls, unmeasured, for what no plan can do without and no generated kernel was found right for."""
    right = {key for (key, _), m in known.measurements.items() if m.verdict is Verdict.OK}
    for entry in problems.entries.values():
        if entry.essential and entry.problem.key not in right:
            most = setting.options.keep_per_problem
            for offer in (kernels_of(maker, entry.problem, setting.facts, most) for maker in makers):
                new = [pair for pair in offer.kernels if pair not in (entry.kernels or ())]
                entry.kernels = [*(entry.kernels or ()), *new]


def link(graph: Graph, plan: Plan, setting: Setting, left_s: float = math.inf) -> AnyExecutable:
    """Compile (or find) the plan's kernels, in the seconds that are left, and make it runnable."""
    if isinstance(setting.facts, GpuFacts):
        from weft.pipeline import gpu

        nvrtc = None if isinstance(setting.compiler, HostCompiler) else setting.compiler
        return gpu.link(
            graph, plan, setting.facts, nvrtc, setting.options, setting.environment, setting.lease, left_s=left_s
        )
    compiler = setting.compiler if isinstance(setting.compiler, HostCompiler) else None
    objects: dict[str, Path] = {}
    for step in plan.steps:
        if isinstance(step.kernel, KernelSource) and step.kernel.sha256 not in objects:
            if compiler is None:
                raise ToolchainError(tool="none", status=-1, log="a plan with generated kernels needs a compiler")
            kernel = step.kernel
            limit_s = min(setting.options.compile_timeout_s, left_s)
            made = compiler.compile(kernel.text, kernel.flags, cache_dir=setting.options.cache, timeout_s=limit_s)
            objects[kernel.sha256] = made.path
    linked = Linked(graph, plan, objects, compiler, setting.options.cache, setting.facts.threads, setting.environment)
    return Executable(linked)


def link_all(
    graph: Graph,
    plans: Sequence[Plan],
    setting: Setting,
    inputs: Tensors,
    eager: Callable[..., Tensors] | None,
    lost: list[str],
    framework: str = "eager",
    clock: Deadline = FOREVER,
) -> list[finish.Contender]:
    """Every plan as something that can be run on the example inputs; equal plans once. `lost` is told of the others.

    When its share of the time is up, or what the longest of those before took would pass it, only what an answer needs
    still is: some plan, if it is the library's and there is no framework.

    Raises:
        DeviceError: a plan took the GPU's context with it, which nothing in this process can use any more [W301].
    """
    if setting.on_gpu:
        # garbage that is found while weights are placed would leave room for them in the middle of larger segments
        gc.collect()
    contenders: list[finish.Contender] = []
    end, longest_s = clock.at_last(LINK_SHARE), 0.0
    tunes = setting.options.budget_s > 0
    answers = tunes and eager is not None  # without a budget there shall be a plan that can be saved
    seen: set[tuple[object, ...]] = set()
    variants = branched(graph, plans) if setting.on_gpu else alone(plans, setting.facts) if tunes else plans
    for plan in variants:  # on one thread only where that is timed
        identity = (plan.branches, plan.threads, *((s.kernel, s.inputs, s.outputs) for s in plan.steps))
        if identity in seen:
            continue
        seen.add(identity)
        if clock.clock() + longest_s >= end and (contenders or answers or plan.name != "library"):
            lost.append(f"there was no time for the plan {plan.name}")
            continue
        began = clock.clock()
        took_s = 0.0
        try:
            with collector.put_off():
                executable = link(graph, plan, setting, clock.seconds_to(clock.last))
            executable.check_indices = False  # until it is given out
            if tunes:  # else it is run where it is judged, and time is short
                first = time.perf_counter()
                setting.bounded(executable, clock)(*inputs)
                took_s = 0.0 if setting.on_gpu else time.perf_counter() - first  # there it is recorded
            longest_s = max(longest_s, clock.clock() - began)
        except OutOfTime:
            lost.append(f"the plan {plan.name} did not end in time")
            continue
        except finish.FAULTS as error:
            said = (str(error).splitlines() or [type(error).__name__])[0][:200]
            if not setting.is_sound():
                problem = f"the plan {plan.name} ended this process's use of the GPU: {said}"
                raise DeviceError(problem=problem) from error
            lost.append(f"the plan {plan.name} does not run: {said}")
            warnings.warn(f"Weft leaves out the plan {plan.name}, which does not run: {said}", stacklevel=2)
            continue
        contenders.append(
            finish.Contender(
                plan.name,
                # a replay runs on what the first run above has put in place
                executable.replay if setting.on_gpu and tunes else (lambda e=executable: e(*inputs)),  # type: ignore[misc,union-attr]
                executable.kernels,
                plan.predicted_us if all(s.measured for s in plan.steps) else 0.0,
                plan.name == "library",
                executable,
                first_s=took_s,
            )
        )
    if eager is not None:
        first = time.perf_counter()
        if not tunes or _takes(setting.bounded(eager, clock), inputs) or not contenders:
            run, free = (lambda: eager(*inputs)), not setting.options.memory_limit_bytes
            took_s = 0.0 if setting.on_gpu else time.perf_counter() - first
            contenders.append(finish.Contender(framework, run, 0, 0.0, True, None, eligible=free, first_s=took_s))
    return contenders


def first_run(eager: Callable[..., Tensors], inputs: Tensors, setting: Setting) -> None:
    """Run the framework's own execution once on a GPU, and leave the memory to who measures."""
    with setting.aside(), torch.no_grad():
        _takes(eager, inputs)
    torch.cuda.empty_cache()


def _takes(eager: Callable[..., Tensors], inputs: Tensors) -> bool:
    """False where only the framework refuses: drawn indices outside of what they index, a view of other strides.

    Or where it did not end in time.
    """
    try:
        eager(*inputs)
    except (IndexError, RuntimeError, OutOfTime):
        return False
    return True


def branched(graph: Graph, plans: Sequence[Plan]) -> list[Plan]:
    """The plans, and the solutions also with kernels side by side, in as many chains as that makes sense for."""
    found = list(plans)
    for plan in (p for p in plans if p.name.startswith("solution")):
        values, widths = survey_values(graph, plan), set()
        for most in BRANCHES:
            width = order_of(plan, values, most).width
            if width > 1 and width not in widths:
                widths.add(width)
                found.append(replace(plan, name=f"{plan.name}/{width}", branches=most))
    return found


def alone(plans: Sequence[Plan], facts: DeviceFacts) -> list[Plan]:
    """The plans, and those of small networks also on one thread: waking a team may take longer than they do.

    On a machine where others run it takes much longer: the team waits for a thread that does not run.
    """
    found = list(plans)
    if isinstance(facts, GpuFacts) or facts.threads <= 1:
        return found
    small = [p for p in plans if p.predicted_us <= ALONE_US]
    return [*found, *(replace(p, name=f"{p.name}/1 thread", threads=1) for p in small)]


def record_eager(
    eager: Callable[..., Tensors] | None, inputs: Tensors, setting: Setting, *, alone: bool = False
) -> Callable[..., Tensors] | None:
    """The framework's own model as a baseline: on a GPU recorded into a CUDA graph, where that is possible.

    `alone`: on streams of its own, because it may run beside a plan.
    """
    if eager is None or not setting.on_gpu:
        return eager
    from weft.pipeline import gpu

    captured = gpu.capture(eager, inputs, setting.options, None if alone else setting.lease)
    return eager if isinstance(captured, Declined) else captured


def working_dtype(graph: Graph) -> DType:
    """The lowest floating type that the model computes in: it decides the tolerance."""
    order = (DType.BF16, DType.F16, DType.F32, DType.F64)
    used = {n.type.dtype for n in graph.nodes}
    if any(d.is_float8 for d in used):
        return DType.BF16  # a value that is rounded to 8 bits may fall either way
    return next((d for d in order if d in used), DType.F32)
