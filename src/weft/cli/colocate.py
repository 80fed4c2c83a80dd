"""`weft colocate`: two jobs on one GPU under a scheduling policy, simulated from recorded samples."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal, cast

import typer

from weft.cli.show import Screen, plain, print_pairs, visible
from weft.errors import ArtifactError, OptionError
from weft.kernels.dataclass_json import to_json
from weft.kernels.policy_run import Comparison, PolicyRun
from weft.kernels.samples import SampleRecord, read

_MOST_BYTES = 64 << 20
_MOST_QUERIES = 5_000_000
_MOST_LOADS = 12
_EXAMPLE = "benchmarks/data/nvidia-h200/colocate-samples.json of Weft's repository is such a file"

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False,
                  help="Two jobs on one GPU under a scheduling policy, simulated from recorded samples.")  # fmt: skip

Model = Annotated[str, typer.Option("-m", "--model", help="latency-critical model, as the record calls it")]
Job = Annotated[str, typer.Option("--be", help="best-effort job: its name in the record, or a job.toml")]
Qos = Annotated[float | None, typer.Option(help="latency target in ms [default: 5 times the solo time]")]
Load = Annotated[
    float | None, typer.Option(help="fraction of the rate that --of names [default: 0.8, or a trace as is]")
]
Of = Annotated[
    Literal["peak", "service"],
    typer.Option("--of", help="peak: highest rate that keeps the target alone; service: 1/T"),
]
Given = Annotated[str, typer.Option("--arrivals", help="poisson, gamma:CV, spikes:FACTOR, or a trace file")]
Record = Annotated[Path | None, typer.Option("--record", help="recorded samples, a JSON file")]
Queries = Annotated[int, typer.Option(help="queries to draw")]
Seed = Annotated[int, typer.Option(help="of all that is drawn")]
Report = Annotated[Path | None, typer.Option(help="also write an HTML report")]
Form = Annotated[Literal["text", "json"], typer.Option("--format", help="text for people, json for programs")]
Json = Annotated[bool, typer.Option("--json", help="the same as --format json")]


@app.command("simulate")
def simulate_command(
    policy: Annotated[str, typer.Option("-s", "--scheduler", help="scheduling policy, e.g. weft, tally, green:36")],
    model: Model,
    be: Job = "",
    qos: Qos = None,
    load: Load = None,
    of: Of = "peak",
    arrivals: Given = "poisson",
    record: Record = None,
    queries: Queries = 20_000,
    seed: Seed = 0,
    report: Report = None,
    format: Form = "text",
    as_json: Json = False,
) -> None:
    """What one policy would come to: latencies against the target, and what the best-effort job gets. Simulated.

    Example: weft colocate simulate -s weft -m vgg16/b16 --be cp --qos 5 --load 0.8 --record colocate-samples.json.
    """
    from weft.colocate.policies import NEEDS_NO_JOB, checked
    from weft.colocate.policy import PolicyError

    screen = Screen("json" if as_json else format)
    checked(policy)
    if not be and policy not in NEEDS_NO_JOB:
        raise PolicyError(
            policy=policy, reason="it shares the GPU with a job, and there is none", remedy="give --be JOB"
        )
    found = _compared(screen, [policy], model, be, qos, [load], of, arrivals, record, queries, seed)
    if found.refused:
        refused = found.refused[0]
        raise PolicyError(policy=refused.policy, reason=refused.reason, remedy="record it, or choose another policy")
    run = next(r for r in found.runs if r.policy == policy)
    _write(report, found)
    if screen.json:
        screen.data(_data(run))
        return
    print_pairs(screen, _told(run, found))


@app.command("compare")
def compare_command(
    model: Model,
    be: Job = "",
    policies: Annotated[
        str, typer.Option("-s", "--schedulers", help="comma separated [default: all]; exclusive is always among them")
    ] = "",
    qos: Qos = None,
    load: Load = None,
    of: Of = "peak",
    arrivals: Given = "poisson",
    record: Record = None,
    queries: Queries = 20_000,
    seed: Seed = 0,
    loads: Annotated[str, typer.Option(help="comma separated: also at these loads, for the report")] = "",
    report: Report = None,
    format: Form = "text",
    as_json: Json = False,
) -> None:
    """Several policies on the same arrivals. Those that cannot run are told with the reason. Simulated.

    Example: weft colocate compare -m vgg16/b16 --be cp --record colocate-samples.json --report report.html.
    """
    from weft.colocate.policies import NAMES, checked

    screen = Screen("json" if as_json else format)
    names = [checked(n.strip()) for n in policies.split(",") if n.strip()] if policies else list(NAMES)
    if not be:
        raise OptionError(option="--be", problem="policies are compared with a job beside the model: give one")
    others = _loads(loads)
    found = _compared(screen, names, model, be, qos, [load, *others], of, arrivals, record, queries, seed)
    _write(report, found)
    if screen.json:
        screen.data({
            "simulated": True, "gpu": found.gpu, "record": found.record, "runs": [_data(r) for r in found.runs],
            "refused": {r.policy: r.reason for r in found.refused}, "over_load": [_data(r) for r in found.over_load],
        })  # fmt: skip
        return
    _table(screen, found)


def _compared(
    screen: Screen, names: Sequence[str], model: str, be: str, qos: float | None, loads: Sequence[float | None],
    of: str, arrivals: str, record: Path | None, queries: int, seed: int,
) -> Comparison:  # fmt: skip
    """The first load is that of the table, the others those of the report."""
    from weft.colocate.arrivals import read_trace
    from weft.colocate.compare import cell_of, compare

    samples = _samples(record)
    job = _job(be)
    if not 1 <= queries <= _MOST_QUERIES:
        raise OptionError(option="--queries", problem=f"{queries}: a number from 1 to {_MOST_QUERIES} is taken")
    if not 0 <= seed < 1 << 63:
        raise OptionError(option="--seed", problem=f"{seed}: a number from 0 to 2^63 - 1 is taken")
    drawn = arrivals.partition(":")[0] in ("poisson", "gamma", "spikes") and not Path(arrivals).is_file()
    trace = None if drawn else read_trace(Path(arrivals))
    cells = [
        cell_of(samples, model, job, qos_ms=qos, load=load, of_peak=of == "peak", process=arrivals, trace=trace,
                queries=queries, seed=seed)
        for load in loads
    ]  # fmt: skip
    screen.progress("simulate", f"{len(names)} policies at {len(cells)} loads, {len(cells[0].arrivals)} queries each")
    found = compare(samples, names, cells[0], cells[1:])
    screen.done()
    return found


def _loads(text: str) -> list[float | None]:
    try:
        found: list[float | None] = [float(x) for x in text.split(",") if x.strip()]
    except ValueError:
        raise OptionError(option="--loads", problem=f"{visible(text)!r}: numbers with commas between them") from None
    if len(found) > _MOST_LOADS:
        raise OptionError(option="--loads", problem=f"{len(found)} loads: at most {_MOST_LOADS} are taken")
    return found


def _job(be: str) -> str:
    """The name of a job; of a job.toml that in it."""
    if not be.endswith(".toml"):
        return be
    from weft.colocate.job import read_job

    return read_job(Path(be)).name


def _samples(path: Path | None) -> SampleRecord:
    if path is None:
        raise OptionError(option="--record", problem=f"samples that were recorded on a GPU are needed: {_EXAMPLE}")
    remedy = _EXAMPLE
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ArtifactError(where=visible(path.name), problem=f"more than {_MOST_BYTES >> 20} MiB", remedy=remedy)
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        problem = f"it cannot be read: {getattr(error, 'strerror', None) or 'no text in UTF-8'}"
        raise ArtifactError(where=visible(path.name), problem=problem, remedy=remedy) from None
    except (ValueError, RecursionError):
        raise ArtifactError(where=visible(path.name), problem="no JSON", remedy=remedy) from None
    return read(data)


def _write(path: Path | None, found: Comparison) -> None:
    if path is None:
        return
    from weft.report.colocate import render_policies

    try:
        path.write_text(render_policies(found), encoding="utf-8")
    except OSError as error:
        raise ArtifactError(
            where=visible(path.name), problem=f"it cannot be written: {error.strerror}", remedy="choose another place"
        ) from None


def _data(run: PolicyRun) -> dict[str, object]:
    """All but what is for drawings."""
    plain_run = replace(run, cdf=(), chosen=())
    data = {k: v for k, v in cast("dict[str, object]", to_json(plain_run)).items() if k not in ("cdf", "chosen")}
    nan = run.over_exclusive != run.over_exclusive
    return data | {"p99_us": run.p99_us, "kept": run.kept, "over_exclusive": None if nan else run.over_exclusive}


def _interval(run: PolicyRun, q: float) -> str:
    """A quantile with its interval."""
    x = next((x for x in run.latency.quantiles if x.q == q), None)
    return "-" if x is None else f"{x.us / 1e3:.3f} ms ({x.low_us / 1e3:.3f} to {x.high_us / 1e3:.3f})"


def _told(r: PolicyRun, found: Comparison) -> dict[str, str]:
    share = r.latency.violations / max(r.latency.queries, 1)
    return {
        "simulated": f"from samples of {plain(found.gpu)}, record {found.record}",
        "policy": plain(r.policy) + (f" ({plain(r.note)})" if r.note else ""),
        "model": plain(r.model) + (f", beside {plain(r.job)}" if r.job else ", alone"),
        "arrivals": f"{plain(r.arrivals)}, {r.rate_hz:.1f} a second, {r.load:.2f} of the {r.load_of}"
        if r.load_of != "trace"
        else f"{plain(r.arrivals)}, {r.rate_hz:.1f} a second",
        "target": f"{r.target_us / 1e3:.3f} ms: {'kept' if r.kept else 'NOT kept'} at p99",
        "p50": _interval(r, 0.5),
        "p95": _interval(r, 0.95),
        "p99": _interval(r, 0.99),
        "p99.9": _interval(r, 0.999),
        "over exclusive": f"{r.over_exclusive:.3f} times its p99 on the same arrivals",
        "violations": f"{r.latency.violations} of {r.latency.queries} queries ({share:.2%})",
        "best-effort": f"{r.be_throughput:.3f} of the whole GPU",
        "system": f"{r.system_throughput:.3f} (both jobs in their time alone, to a second)",
        "variants": ", ".join(f"{v.queries} {plain(v.name, 60)}" for v in r.variants if v.queries) or "-",
    }


def _table(screen: Screen, found: Comparison) -> None:
    first = found.runs[0]
    screen.out.print(
        f"simulated: {plain(first.model)} beside {plain(next((r.job for r in found.runs if r.job), '-'))}, "
        f"{plain(first.arrivals)}, {first.rate_hz:.1f} a second ({first.load:.2f} of the {first.load_of}), "
        f"target {first.target_us / 1e3:.3f} ms; samples of {plain(found.gpu)}, record {found.record}"
    )
    rows = [
        [
            plain(r.policy), f"{r.latency.quantile_us(0.5) / 1e3:.3f}", f"{r.p99_us / 1e3:.3f}",
            "yes" if r.kept else "no", f"{r.over_exclusive:.2f}", f"{r.latency.violations}", f"{r.be_throughput:.3f}",
            f"{r.system_throughput:.3f}",
        ]
        for r in found.runs
    ]  # fmt: skip
    head = ["policy", "p50 ms", "p99 ms", "target kept", "× alone", "late", "BE rate", "system"]
    screen.table("", head, rows)
    for r in found.runs:
        if r.note:
            screen.out.print(f"{plain(r.policy)}: {plain(r.note)}")
    for refused in found.refused:
        screen.out.print(f"{plain(refused.policy)}: not run: {plain(refused.reason, 200)}")
