"""`weft colocate run` and `prepare`: a model's file and a job on this GPU, under scheduling policies."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from weft.cli.colocate_job import job_of, telling
from weft.cli.inputs import Dims, dims_of
from weft.cli.policy_runs import (
    Admit,
    Form,
    Given,
    Json,
    Load,
    Of,
    Qos,
    Queries,
    Report,
    Seed,
    cells_of,
    samples_of,
    show_comparison,
    show_run,
    write_report,
)
from weft.cli.show import Screen, plain, visible, writing
from weft.errors import DeviceError, OptionError, UnsupportedError

if TYPE_CHECKING:
    from weft.api import Compiled
    from weft.colocate.gpu import GpuSession
    from weft.colocate.job_on_gpu import Examples
    from weft.kernels.policy_run import Refused
    from weft.kernels.samples import ModelSamples, SampleRecord
    from weft.kernels.scheduling import JobSpec
    from weft.options import Options
    from weft.runtime.cuda_executable import CudaExecutable

Save: TypeAlias = "Callable[[Path], object]"
"""Writes a plan to a file."""
Files = Annotated[
    list[Path],
    typer.Option("-m", "--model", help="latency-critical model, an ONNX file; several: each with its own -m"),
]
Job = Annotated[Path | None, typer.Option("--be", help="best-effort job, a job.toml")]
Modes = Annotated[
    str, typer.Option(help="ways of sharing to measure, comma separated, e.g. 'co-runner 128,green36' [default: all]")
]
Budget = Annotated[float, typer.Option(help="seconds of tuning for each of the model's plans")]
Fuse = Annotated[float, typer.Option("--fuse", help="seconds to look for steps to fuse with the job; 0: none are")]


def run_command(
    models: Files,
    policies: Annotated[
        str, typer.Option("-s", "--scheduler", help="scheduling policies, comma separated; exclusive is among them")
    ] = "weft",
    be: Job = None,
    qos: Qos = [],  # noqa: B006
    load: Load = [],  # noqa: B006
    of: Of = "peak",
    arrivals: Given = [],  # noqa: B006
    admit: Admit = False,
    record: Annotated[
        Path | None, typer.Option("--record", help="samples of `weft colocate prepare` [default: measured now]")
    ] = None,
    queries: Queries = 3_300,
    seed: Seed = 0,
    modes: Modes = "",
    budget: Budget = 60.0,
    fuse: Fuse = 60.0,
    dim: Dims = [],  # noqa: B006
    report: Report = None,
    format: Form = "text",
    as_json: Json = False,
) -> None:
    """Models beside a best-effort job on this GPU: latencies against the target, and what the job gets.

    Several models share the GPU with the job: -m for each, and --qos, --load and --arrivals once for all or for each.

    Example: weft colocate run -s weft -m resnet50.onnx --be mriq/job.toml --qos 2 --load 0.8.
    """
    from weft.colocate.compare import ComparisonInterruptedError, compare
    from weft.colocate.policies import NEEDS_NO_JOB, checked
    from weft.colocate.policy import PolicyError

    screen = Screen("json" if as_json else format)
    names = [checked(n.strip()) for n in policies.split(",") if n.strip()]
    if not names:
        raise OptionError(option="--scheduler", problem="no policy is named")
    if be is None and set(names) - NEEDS_NO_JOB:
        raise PolicyError(
            policy=names[0], reason="it shares the GPU with a job, and there is none", remedy="give --be JOB"
        )
    names, apart = _without_mps(names)
    given = samples_of(record) if record is not None else None
    with _session(screen, models, be, budget, dim, mps="mps" in names) as session:
        samples = given or _measured(screen, session, modes, fuse)[0]
        job = samples.jobs[0].name if samples.jobs else ""
        (cell,) = cells_of(
            samples,
            session.models,
            job,
            qos=qos,
            load=load,
            of=of,
            arrivals=arrivals,
            queries=queries,
            seed=seed,
            admit=admit,
        )
        screen.progress("run", f"{len(names)} policies, {len(cell.arrivals)} queries each")
        try:
            found = compare(
                samples,
                names,
                cell,
                carry_out=lambda p, c: session.run_all(p, [x.arrivals for x in c.every], admit=c.admit),
                settle=session.settled,
            )
        except ComparisonInterruptedError as ended:  # what had ended is kept
            screen.done()
            write_report(report, ended.comparison)
            show_comparison(screen, ended.comparison)
            raise
        screen.done()
    found = replace(found, refused=(*found.refused, *apart))
    write_report(report, found)
    if len({r.policy for r in found.runs}) > 2 or found.refused:
        show_comparison(screen, found)
    else:
        show_run(screen, found.runs[-1].policy, found)


def prepare_command(
    models: Files,
    output: Annotated[Path, typer.Option("-o", "--output", help="where the samples are written, a JSON file")],
    be: Job = None,
    modes: Modes = "",
    queries: Annotated[int, typer.Option(help="queries of each way")] = 400,
    seed: Seed = 0,
    budget: Budget = 60.0,
    fuse: Fuse = 60.0,
    dim: Dims = [],  # noqa: B006
    bundle: Annotated[
        Path | None,
        typer.Option(help="also a co-location bundle for `weft serve`: a new folder with the model and the job"),
    ] = None,
    qos: Annotated[float, typer.Option(help="latency target of the bundle in ms; 0: 5 times the solo time")] = 0.0,
    format: Form = "text",
) -> None:
    """Measure models and a job on this GPU in every way in which they can share it: samples for `run` and `simulate`.

    Example: weft colocate prepare -m resnet50.onnx --be mriq/job.toml -o samples.json --bundle resnet50.colocate.
    """
    from weft.colocate.recording import RecordInterruptedError
    from weft.kernels.samples import write

    screen = Screen(format)
    mps = _is_mps(modes)
    if not 20 <= queries <= 100_000:
        raise OptionError(option="--queries", problem=f"{queries}: a number from 20 to 100000 is taken")
    _check_bundle(bundle, models, be, qos, mps=mps)
    saves: dict[str, Save] = {}
    try:
        with _session(screen, models, be, budget, dim, mps=mps, saves=saves) as session:
            samples, refused = _measured(screen, session, modes, fuse, queries=queries, seed=seed)
    except RecordInterruptedError as ended:  # what was measured is kept
        with writing(output):
            output.write_text(write(ended.record), encoding="utf-8")
        raise
    with writing(output):
        output.write_text(write(samples), encoding="utf-8")
    if bundle is not None and be is not None:
        _write_bundle(screen, bundle, models[0].stem, be, samples, qos, saves)
    if screen.json:
        data = {m.name: _data(samples, m) for m in samples.models}
        first, *others = data.values()
        screen.data({
            "record": samples.digest, "gpu": samples.gpu, "refused": refused, **({"models": data} if others else first)
        })  # fmt: skip
        return
    _show(screen, samples, refused)


def _check_bundle(bundle: Path | None, models: Sequence[Path], be: Path | None, qos: float, *, mps: bool) -> None:
    """Before anything is measured.

    Raises:
        OptionError: no bundle could be made of these [W001].
    """
    if bundle is None:
        if qos:
            raise OptionError(option="--qos", problem="it is the target of a bundle: give --bundle, too")
        return
    if len(models) > 1 or be is None or mps:
        raise OptionError(option="--bundle", problem="a bundle is of one model and a job that is no client of MPS")
    if not 0 <= qos < math.inf:
        raise OptionError(option="--qos", problem=f"{qos} is no time")
    if bundle.exists():
        raise OptionError(option="--bundle", problem=f"{visible(str(bundle), 200)} is there already: choose a new name")
    if bundle.resolve().is_relative_to(be.parent.resolve()):
        problem = f"{visible(str(bundle), 200)} lies in the job's folder, of which it is to hold a copy"
        raise OptionError(option="--bundle", problem=problem)
    if not bundle.parent.is_dir():
        raise OptionError(option="--bundle", problem=f"there is no folder {visible(str(bundle.parent), 200)}")


def _write_bundle(
    screen: Screen, folder: Path, model: str, be: Path, samples: SampleRecord, qos: float, saves: Mapping[str, Save]
) -> None:
    from weft.colocate.bundle import write_bundle
    from weft.colocate.compare import target_of
    from weft.options import Options

    target_ns = target_of(samples.models[0], qos or None)
    digest = write_bundle(
        folder, model=model, target_ns=target_ns, samples=samples, job=be, save=saves,
        trust_dir=Options.from_environment(os.environ).cache,
    )  # fmt: skip
    screen.err.print(f"{plain(str(folder), 200)}: target {target_ns / 1e6:.3g} ms, digest {digest}")


def _without_mps(names: Sequence[str]) -> tuple[list[str], tuple[Refused, ...]]:
    """Policies of one call: `mps` has one of its own, where all processes are its clients; refused beside others."""
    from weft.kernels.policy_run import Refused

    if "mps" not in names or set(names) <= {"exclusive", "mps"}:
        return list(names), ()
    reason = "under MPS all processes of a call are its clients: give it a call of its own, with the same --seed"
    return [n for n in names if n != "mps"], (Refused("mps", reason),)


def _is_mps(modes: str) -> bool:
    """Whether the way to be measured is MPS.

    Raises:
        OptionError: another one besides [W001].
    """
    names = {n.strip() for n in modes.split(",") if n.strip()}
    if "mps" in names and len(names) > 1:
        raise OptionError(option="--modes", problem="mps is measured in a call of its own")
    return "mps" in names


def _as_client(held: ExitStack) -> None:
    """Make this process a client of MPS, before it knows of a GPU.

    Raises:
        PolicyError: the machine does not allow it [W206].
    """
    from weft.colocate.policy import PolicyError
    from weft.device.cuda.mps import started
    from weft.ir.declined import Declined

    found = started(held)
    if isinstance(found, Declined):
        raise PolicyError(policy="mps", reason=f"no MPS: {found.reason}", remedy="choose another policy")


def _data(samples: SampleRecord, model: ModelSamples) -> dict[str, object]:
    """What was measured of a model, for programs."""
    modes = [m for m in samples.modes if m.model == model.name]
    steps = [s for s in samples.steps if s.model == model.name]
    return {
        "solo_us": model.solo.at(0.5),
        "modes": {m.name: {"lc_us": m.lc.at(0.5), "be_rate": m.be_rate} for m in modes},
        "steps": {s.step: {"count": s.count, "slowdown": s.slowdown, "be": s.fraction} for s in steps},
    }


def _show(screen: Screen, samples: SampleRecord, refused: dict[str, str]) -> None:
    for model in samples.models:
        _show_model(screen, samples, model)
    for name, reason in refused.items():
        screen.out.print(f"{plain(name)}: not here: {plain(reason, 200)}")


def _show_model(screen: Screen, samples: SampleRecord, model: ModelSamples) -> None:
    alone = model.solo
    rows = [["alone", f"{alone.at(0.5):.1f}", f"{alone.at(0.99):.1f}", "", "", ""]]
    for m in samples.modes:
        if m.model != model.name:
            continue
        slower = m.lc.at(0.5) / alone.at(0.5)
        rows.append([m.name, f"{m.lc.at(0.5):.1f}", f"{m.lc.at(0.99):.1f}", f"{slower:.3f}", f"{m.be_rate:.3f}",
                     f"{1 / slower + m.be_rate:.2f}"])  # fmt: skip
    title = f"{plain(model.name)} on {plain(samples.gpu)}, record {samples.digest}"
    screen.table(title, ["way", "p50 us", "p99 us", "× alone", "BE rate", "added work"], rows)
    steps = [s for s in samples.steps if s.model == model.name]
    fused = [[s.step, str(s.count), f"{s.lc_us:.1f}", f"{1 + s.slowdown:.3f}", f"{s.fraction:.3f}",
              f"{(1 + s.fraction) / (1 + s.slowdown):.2f}"] for s in steps]  # fmt: skip
    if fused:
        screen.table("fused steps", ["step", "times", "us", "× alone", "BE work", "added work"], fused)


def _measured(
    screen: Screen, session: GpuSession, modes: str, fuse: float, *, queries: int = 400, seed: int = 0
) -> tuple[SampleRecord, dict[str, str]]:
    import weft

    if not 0 <= fuse < math.inf:
        raise OptionError(option="--fuse", problem=f"{fuse} is no time")
    names = [n.strip() for n in modes.split(",") if n.strip()] or list(session.modes)
    screen.progress("measure", f"{', '.join(session.models)}, {len(names)} ways of sharing")
    made_by = f"weft {weft.__version__}"
    found = session.record(names, commit=made_by, driver=_driver(), queries=queries, seed=seed, fuse_s=fuse)
    screen.done()
    return found


def _driver() -> str:
    from weft.device.cuda.facts import gpu_facts

    return gpu_facts(None, calibrate=False).driver


@contextmanager
def _session(
    screen: Screen, models: Sequence[Path], be: Path | None, budget: float, dims: Sequence[str], *, mps: bool = False,
    saves: dict[str, Save] | None = None,
) -> Iterator[GpuSession]:  # fmt: skip
    """The models compiled with and without a budget of an SM, and the job on the GPU.

    `mps`: this process and the job's are clients of MPS. `saves`: gets what writes the plans of the first model, and of
    a job that is a network, by their names in a bundle.

    Raises:
        PolicyError: the machine has no MPS [W206].
        OptionError: a budget that is no time, or models of one name [W001].
        DeviceError: there is no GPU [W301].
        WeftError: what reading the files and compiling the model raise.
    """
    if not budget >= 0:
        raise OptionError(option="--budget", problem=f"{budget} is no time")
    names = [m.stem for m in models]
    if twice := next((n for n in names if names.count(n) > 1), ""):
        raise OptionError(option="--model", problem=f"{visible(twice)!r} twice: models are known by their files' names")
    spec = job_of(be)
    with ExitStack() as client:
        if mps:
            _as_client(client)
        with _on_gpu(screen, models, be, spec, budget, dims, mps=mps, saves={} if saves is None else saves) as session:
            yield session


@contextmanager
def _on_gpu(
    screen: Screen, models: Sequence[Path], be: Path | None, spec: JobSpec | None, budget: float, dims: Sequence[str],
    *, mps: bool, saves: dict[str, Save],
) -> Iterator[GpuSession]:  # fmt: skip
    names = [m.stem for m in models]
    import torch

    if not torch.cuda.is_available():
        raise DeviceError(problem="a model beside a job needs an NVIDIA GPU, and there is none here")
    from weft.colocate.bundle import BUDGETED, JOB_PLAN, PLAN
    from weft.colocate.gpu import BUDGET, GpuSession, Plans
    from weft.colocate.job_on_gpu import job_on
    from weft.colocate.kernel_process import as_process
    from weft.colocate.network import plan_on_gpu
    from weft.device.cuda.driver import primary_context
    from weft.device.cuda.facts import gpu_facts
    from weft.options import Options

    torch.zeros(1, device="cuda")
    usual = replace(Options.from_environment(os.environ), budget_s=budget, device="cuda")

    def network(file: Path, given: Examples) -> CudaExecutable:
        compiled = _compiled(screen, file, usual, given=given)
        saves[JOB_PLAN] = compiled.save
        return plan_on_gpu(compiled, "--be")

    with primary_context(), ExitStack() as held:
        made = []
        for model in models:
            plans = []
            for sm_budget in (None, BUDGET) if spec is not None and not mps else (None,):
                options = replace(usual, sm_budget=sm_budget)
                try:
                    compiled = _compiled(screen, model, options, dims_of(dims))
                    plans.append(plan_on_gpu(compiled, "--model"))
                    saves.setdefault(PLAN if sm_budget is None else BUDGETED, compiled.save)
                except UnsupportedError as error:
                    if sm_budget is None:
                        raise
                    screen.err.print(f"no co-runner beside {plain(model.stem)}: {plain(str(error), 200)}")
            for static in (x for p in plans for x in p.static_inputs):
                if static.is_floating_point():
                    static.normal_(generator=torch.Generator(device="cuda").manual_seed(0))
            made.append(Plans(*plans))
        facts = gpu_facts(None, calibrate=False)
        session = GpuSession(names[0], made[0], facts, held=held, mps=mps)
        for name, further in zip(names[1:], made[1:], strict=True):
            session.add_model(name, further)
        if spec is not None and be is not None:
            folder = be.parent
            if mps and spec.kind != "process":
                folder = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="weft-job-")))
                spec = as_process(spec, be, folder)
            held.enter_context(job_on(session, spec, folder, facts=facts, compiled=network, tell=telling(screen)))
        yield session


def _compiled(
    screen: Screen, model: Path, options: Options, dims: Mapping[str, int] | None = None, given: Examples | None = None
) -> Compiled:
    import weft

    made = weft.compile(model, given, options=options, dims=dims, name=model.stem, say=screen.progress)
    screen.done()
    return made
