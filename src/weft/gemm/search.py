"""The search for the fastest kernel of one product: feasible, estimated, built, verified, measured.

every configuration of the templates that fits      hundreds to thousands, each with the model's estimate
templates:   the first 16 by `templates.space`      exhaustive: all, up to a limit
built with NVRTC and gated: no spills, no serialised products; verified against float64; timed in rounds
each outcome in the tuning database, so that asking again measures nothing
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from weft.device.cuda.facts import GpuFacts, profile
from weft.device.cuda.nvrtc import CompiledCubin, CompileJob, Nvrtc, gate
from weft.errors import DeviceError, NoTemplateError
from weft.gemm.spec import Gemm, Search
from weft.generate.cuda import templates
from weft.generate.cuda.shipped import table_for
from weft.generate.cuda.space import Ranked, pruned, space
from weft.ir.declined import Declined
from weft.kernels.candidate import Problem
from weft.kernels.measurement import Measurement, Verdict
from weft.kernels.source import CudaSource, Schedule
from weft.tune.tuner import ProblemTrial, winner

KEEP = 16
"""Configurations that are measured of those that the model ranks."""
CHUNK = 32
"""Of an exhaustive search, those that are timed in the same rounds."""
COMPILED = 3
"""Configurations that a dry run compiles for each architecture."""
ARCHITECTURES = {"sm_90a": "h200", "sm_80": "a100"}
"""What a dry run compiles for, and whose facts it takes."""
Measure = Callable[[Iterable[ProblemTrial]], Iterator[Measurement]]
"""`weft.tune.tuner.Tuner.measure`, with a listener."""


@dataclass(slots=True)
class Outcome:
    """What became of one configuration."""

    schedule: Schedule
    modelled_us: float
    """NaN for an algorithm of the library."""
    state: str = "not tried"
    """A verdict of `weft.kernels.measurement`, `compiled`, `refused` or `not tried`."""
    samples_us: tuple[float, ...] = ()
    median_us: float = math.inf
    note: str = ""
    """Why it was rejected, or what it takes."""
    registers: int = 0
    """Per thread, where it was compiled here."""

    @property
    def template(self) -> str:
        """Which template, or `cublaslt`."""
        return str(dict(self.schedule.params).get("template", self.schedule.generator))


@dataclass(slots=True)
class SearchResult:
    """The outcome of a search."""

    gemm: Gemm
    device: str
    feasible: int
    """Configurations in all."""
    outcomes: list[Outcome]
    """In the order of the model, library calls last."""
    best: Outcome | None = None
    kernel: CudaSource | None = None
    """Of the best outcome."""
    seconds: float = 0.0
    stage_s: dict[str, float] = field(default_factory=dict)
    """Seconds of what it took, in order; see `search`, `weft.tune.tuner.Tuner.seconds` and the command."""
    table: str = ""
    """What is known of this GPU from measurements that came with the package, or why nothing is."""
    measured: bool = False
    against: dict[str, object] = field(default_factory=dict)
    """How the best kernel and cuBLASLt compare, where that was asked for."""
    library_us: float = math.inf
    """Of the library's best algorithm, in the same comparison."""

    @property
    def tflops(self) -> float:
        """Of the best kernel's median; 0 where nothing was measured."""
        us = self.best.median_us if self.best is not None else math.inf
        return self.gemm.flops / us / 1e6 if us < math.inf else 0.0


def feasible(g: Gemm, problem: Problem, facts: GpuFacts) -> Ranked:
    """Every configuration with its estimate in microseconds, best first.

    Raises:
        NoTemplateError: none takes the product on this GPU [W204].
    """
    found = space(problem, facts)
    if isinstance(found, Declined) or not found:
        why = found.reason if isinstance(found, Declined) else f"no configuration fits {facts.name}"
        raise NoTemplateError(op=f"gemm {g.name}", reason=why)
    return found


def chosen(g: Gemm, problem: Problem, facts: GpuFacts, ranked: Ranked, limit: int) -> Ranked:
    """What is measured of them: by the model, or all up to `limit`; never more than `t` says."""
    if g.search is Search.EXHAUSTIVE:
        return ranked[: min(g.most, limit)]
    return pruned(problem, facts, ranked, min(g.most, KEEP))


def search(g: Gemm, facts: GpuFacts, measure: Measure, *, limit: int) -> SearchResult:
    """Build, verify and time configurations of the templates.

    `stage_s` of the result: `rank` all configurations and choose the few, `emit` their texts, `measure` them.

    Args:
        g: the product.
        facts: the GPU.
        measure: a tuner's.
        limit: most configurations of an exhaustive search.

    Raises:
        NoTemplateError: none takes the product [W204].
        DeviceError: the device computes wrongly, or no worker starts [W301].
    """
    start = time.monotonic()
    problem = g.problem()
    facts = replace(facts, fast_f8=g.fast)
    ranked = feasible(g, problem, facts)
    outcomes = {s: Outcome(s, us) for us, s in chosen(g, problem, facts, ranked, limit)}
    ranked_at = time.monotonic()
    kernels: dict[Schedule, CudaSource] = {}
    for s, outcome in outcomes.items():
        source = templates.emit(problem, s)
        if isinstance(source, Declined):
            outcome.state, outcome.note = "refused", source.reason
        else:
            kernels[s] = source
    emitted_at = time.monotonic()
    measurements = list(measure(_trials(problem, kernels)))
    for m in measurements:
        outcome = outcomes[m.schedule]
        outcome.state, outcome.note = m.verdict.value, m.error
        outcome.samples_us, outcome.median_us = m.samples_us, m.median_us
    best = winner(measurements, None)
    found = SearchResult(g, facts.name, len(ranked), list(outcomes.values()), table=table_of(facts), measured=True)
    if best is not None:
        found.best, found.kernel = outcomes[best.schedule], kernels[best.schedule]
    end = time.monotonic()
    found.seconds = end - start
    found.stage_s = {"rank": ranked_at - start, "emit": emitted_at - ranked_at, "measure": end - emitted_at}
    return found


def table_of(facts: GpuFacts) -> str:
    """Whether a table of measured schedules took part in the choice, in words."""
    found = table_for(facts.name)
    if isinstance(found, Declined):
        return found.reason
    return f"{found.provenance.get('problems', 'some')} problems on {found.gpu}"


def _trials(problem: Problem, kernels: Mapping[Schedule, CudaSource]) -> Iterator[ProblemTrial]:
    """Chunks that are timed in the same rounds."""
    own = list(kernels.items())
    for at in range(0, len(own), CHUNK):
        yield ProblemTrial(problem, [(s, kernel, None) for s, kernel in own[at : at + CHUNK]])


def dry_run(g: Gemm, nvrtc: Nvrtc | Declined, *, limit: int, tf32: bool = False) -> dict[str, SearchResult]:
    """What would be measured, per architecture, the best few compiled and gated; no GPU is needed.

    Raises:
        DeviceError: there is no NVRTC, or it does not know an architecture [W301].
        NoTemplateError: none takes the product [W204].
    """
    if isinstance(nvrtc, Declined):
        raise DeviceError(problem=f"a dry run compiles, and there is no NVRTC: {nvrtc.reason}")
    found = {}
    for arch, name in ARCHITECTURES.items():
        start = time.monotonic()
        facts = replace(profile(name), tf32=tf32, fast_f8=g.fast)
        problem = g.problem()
        ranked = feasible(g, problem, facts)
        outcomes = [Outcome(s, us) for us, s in chosen(g, problem, facts, ranked, limit)]
        device = f"{facts.name} ({arch}), not measured"
        made = found[arch] = SearchResult(g, device, len(ranked), outcomes, table=table_of(facts))
        ranked_at = time.monotonic()
        _compile(made, problem, facts, nvrtc)
        end = time.monotonic()
        made.seconds, made.stage_s = end - start, {"rank": ranked_at - start, "compile": end - ranked_at}
    return found


def _compile(found: SearchResult, problem: Problem, facts: GpuFacts, nvrtc: Nvrtc) -> None:
    """Compile configurations until `COMPILED` of them pass the gate; the first that does is the best."""
    passed = 0
    for outcome in found.outcomes:
        if passed == COMPILED:
            break
        source = templates.emit(problem, outcome.schedule)
        if isinstance(source, Declined):
            outcome.state, outcome.note = "refused", source.reason
            continue
        job = CompileJob(source.text, facts.arch, source.flags, source.max_registers)
        (made,) = nvrtc.compile_many([job], threads=1)
        why = refusal(made, source, facts)
        if why or not isinstance(made, CompiledCubin):
            outcome.state, outcome.note = "refused", why
            continue
        passed += 1
        outcome.state, outcome.registers = "compiled", made.of(source.entry).registers
        if found.best is None:
            found.best, found.kernel = outcome, source


def refusal(made: object, source: CudaSource, facts: GpuFacts) -> str:
    """Why what the compiler made is not worth running; empty where it is."""
    if not isinstance(made, CompiledCubin):
        return str(made).splitlines()[0]
    for launch in source.launches:
        declined = gate(made, launch, facts)
        if isinstance(declined, Declined):
            return declined.reason
    return ""


def rejected(result: SearchResult) -> list[tuple[str, int]]:
    """How many configurations came to each end other than a time."""
    states = [o.state for o in result.outcomes if o.state not in (Verdict.OK.value, "compiled", "not tried")]
    return sorted(((s, states.count(s)) for s in set(states)), key=lambda x: (-x[1], x[0]))
