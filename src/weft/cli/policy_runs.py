"""What the commands of `weft colocate` share: options, arrivals, samples of a file, and how runs are told."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar, cast

import typer

from weft.cli.show import Screen, plain, print_pairs, visible, writing
from weft.errors import ArtifactError, OptionError

if TYPE_CHECKING:
    from weft.colocate.compare import Cell
    from weft.kernels.policy_run import Comparison, PolicyRun
    from weft.kernels.samples import SampleRecord

_T = TypeVar("_T")
_MOST_BYTES = 64 << 20
_MOST_QUERIES = 5_000_000
_MOST_LOADS = 12
_MOST_MODELS = 16
_SHARED_LOAD = 0.8
"""Of all models together, where no load is given."""
_EXAMPLE = "benchmarks/data/nvidia-h200/colocate-samples.json of Weft's repository is such a file"

_EACH = "of several models once for all, or once for each, in their order"
Qos = Annotated[list[float], typer.Option(help=f"latency target in ms [default: 5 times the solo time]; {_EACH}")]
Load = Annotated[
    list[float],
    typer.Option(
        help="fraction of the rate that --of names, alone [default: 0.8 in equal parts, or a trace as is]; " + _EACH
    ),
]
Of = Annotated[
    Literal["peak", "service"],
    typer.Option("--of", help="peak: highest rate that keeps the target alone; service: 1/T"),
]
Given = Annotated[
    list[str],
    typer.Option("--arrivals", help=f"poisson, gamma:CV, spikes:FACTOR, or a trace file [default: poisson]; {_EACH}"),
]
Admit = Annotated[bool, typer.Option("--admit", help="refuse queries that would miss the target as they come")]
Queries = Annotated[int, typer.Option(help="queries to draw, of the model with the highest rate")]
Seed = Annotated[int, typer.Option(help="of all that is drawn")]
Report = Annotated[Path | None, typer.Option(help="also write an HTML report")]
Form = Annotated[Literal["text", "json"], typer.Option("--format", help="text for people, json for programs")]
Json = Annotated[bool, typer.Option("--json", help="the same as --format json")]


def cells_of(
    samples: SampleRecord, models: Sequence[str], job: str, *, qos: Sequence[float], load: Sequence[float], of: str,
    arrivals: Sequence[str], queries: int, seed: int, admit: bool = False, others: Sequence[float | None] = (),
) -> list[Cell]:  # fmt: skip
    """A cell of all models with their targets, loads and arrivals; behind it one to each further load.

    Raises:
        OptionError: a number that cannot be, or neither one value nor one to each model [W001].
        TargetError, ArrivalsError, PolicyError: as `weft.colocate.compare.cell_of` [W017, W016, W206].
    """
    from weft.colocate.arrivals import read_trace
    from weft.colocate.compare import cell_of, together

    if not 1 <= queries <= _MOST_QUERIES:
        raise OptionError(option="--queries", problem=f"{queries}: a number from 1 to {_MOST_QUERIES} is taken")
    if not 0 <= seed < 1 << 63:
        raise OptionError(option="--seed", problem=f"{seed}: a number from 0 to 2^63 - 1 is taken")
    if not 1 <= len(models) <= _MOST_MODELS:
        raise OptionError(option="--model", problem=f"{len(models)} models: from 1 to {_MOST_MODELS} are taken")
    count = len(models)
    targets, processes = _each("--qos", qos, count), [x or "poisson" for x in _each("--arrivals", arrivals, count)]
    traces = [None if _is_drawn(x) else read_trace(Path(x)) for x in processes]
    first = _each("--load", load, count)
    if count > 1 and not load:
        first = [_SHARED_LOAD / count if t is None else None for t in traces]
    found = []
    for at in [first, *([x] * count for x in others)]:
        cells = [
            cell_of(samples, model, job, qos_ms=target, load=x, of_peak=of == "peak", process=process, trace=trace,
                    queries=queries, seed=seed + k, admit=admit)
            for k, (model, target, x, process, trace)
            in enumerate(zip(models, targets, at, processes, traces, strict=True))
        ]  # fmt: skip
        found.append(together(cells, [t is None for t in traces]))
    return found


def _each(option: str, given: Sequence[_T], models: int) -> list[_T | None]:
    """The value of each model: none, the same for all, or its own. Raises OptionError: another number [W001]."""
    if len(given) in (0, 1):
        return [given[0] if given else None] * models
    if len(given) != models:
        raise OptionError(
            option=option, problem=f"{len(given)} values for {models} models: one, or one to each in their order"
        )
    return list(given)


def _is_drawn(arrivals: str) -> bool:
    """A process, and no file of its name."""
    return arrivals.partition(":")[0] in ("poisson", "gamma", "spikes") and not Path(arrivals).is_file()


def loads_of(text: str) -> list[float | None]:
    """Numbers with commas between them. Raises OptionError: it is something else [W001]."""
    try:
        found: list[float | None] = [float(x) for x in text.split(",") if x.strip()]
    except ValueError:
        raise OptionError(option="--loads", problem=f"{visible(text)!r}: numbers with commas between them") from None
    if len(found) > _MOST_LOADS:
        raise OptionError(option="--loads", problem=f"{len(found)} loads: at most {_MOST_LOADS} are taken")
    return found


def samples_of(path: Path | None) -> SampleRecord:
    """Of a file. Raises OptionError: none is given [W001]; ArtifactError: it holds none [W401]."""
    from weft.kernels.samples import read

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


def write_report(path: Path | None, found: Comparison) -> None:
    """If a place is given. Raises ArtifactError: it cannot be written [W401]."""
    if path is None:
        return
    from weft.report.colocate import render_policies

    with writing(path):
        path.write_text(render_policies(found), encoding="utf-8")


def show_run(screen: Screen, policy: str, found: Comparison) -> None:
    """The run of a policy, for people or programs: of several models one after the other."""
    runs = [r for r in found.runs if r.policy == policy]
    if screen.json:
        screen.data(data_of(runs[0]) if len(runs) == 1 else {"runs": [data_of(r) for r in runs]})
        return
    for k, run in enumerate(runs):
        if k:
            screen.out.print("")
        print_pairs(screen, told(run, found))


def show_comparison(screen: Screen, found: Comparison) -> None:
    """All runs, for people or programs."""
    if screen.json:
        screen.data(comparison_data(found))
    else:
        print_comparison(screen, found)


def data_of(run: PolicyRun) -> dict[str, object]:
    """All but what is for drawings."""
    from weft.kernels.dataclass_json import to_json

    plain_run = replace(run, cdf=(), chosen=())
    data = {k: v for k, v in cast("dict[str, object]", to_json(plain_run)).items() if k not in ("cdf", "chosen")}
    nan = run.over_exclusive != run.over_exclusive
    return data | {"p99_us": run.p99_us, "kept": run.kept, "over_exclusive": None if nan else run.over_exclusive}


def _interval(run: PolicyRun, q: float) -> str:
    """A quantile with its interval."""
    x = next((x for x in run.latency.quantiles if x.q == q), None)
    return "-" if x is None else f"{x.us / 1e3:.3f} ms ({x.low_us / 1e3:.3f} to {x.high_us / 1e3:.3f})"


def told(r: PolicyRun, found: Comparison) -> dict[str, str]:
    """A run for people, line by line."""
    share = r.latency.violations / max(r.latency.queries, 1)
    return {
        **_where(r, found),
        "policy": plain(r.policy) + (f" ({plain(r.note)})" if r.note else ""),
        "model": plain(r.model) + _company(r),
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
        **({"refused": f"{r.refused} queries, as they came"} if r.refused else {}),
        "best-effort": f"{r.be_throughput:.3f} of the whole GPU",
        "system": f"{r.system_throughput:.3f} (both jobs in their time alone, to a second)",
        "variants": ", ".join(f"{v.queries} {plain(v.name, 60)}" for v in r.variants if v.queries) or "-",
    }


def _company(r: PolicyRun) -> str:
    """What shared the GPU with a model."""
    others = f", together with {', '.join(map(plain, r.among))}" if r.among else ""
    return others + (f", beside {plain(r.job)}" if r.job else ", alone" if not r.among else ", without a job")


def _where(r: PolicyRun, found: Comparison) -> dict[str, str]:
    if r.simulated:
        return {"simulated": f"from samples of {plain(found.gpu)}, record {found.record}"}
    lines = {"measured": f"on {plain(found.gpu)}; samples {found.record}"}
    if r.latency.void:
        lines["VOID"] = plain(r.latency.void, 200)
    decision = "" if r.decision_us is None else f", a decision {r.decision_us:.1f} us"
    lines["harness"] = f"send delay {r.latency.send_delay_us:.1f} us{decision} (p99)"
    if r.off_lindley_us is not None:
        lines["harness"] += f"; {r.off_lindley_us:.1f} us off a single queue of its service times (p99)"
    return lines


def comparison_data(found: Comparison) -> dict[str, object]:
    """All runs for programs."""
    return {
        "simulated": found.runs[0].simulated, "gpu": found.gpu, "record": found.record,
        "runs": [data_of(r) for r in found.runs], "refused": {r.policy: r.reason for r in found.refused},
        "over_load": [data_of(r) for r in found.over_load],
    }  # fmt: skip


def print_comparison(screen: Screen, found: Comparison) -> None:
    """Runs of several policies as a table, and why others did not run."""
    job = plain(next((r.job for r in found.runs if r.job), "-"))
    models = [r for r in found.runs if r.policy == found.runs[0].policy]
    for first in models:
        said = "simulated" if first.simulated else "measured"
        screen.out.print(
            f"{said}: {plain(first.model)} beside {job}, {plain(first.arrivals)}, {first.rate_hz:.1f} a second"
            f" ({first.load:.2f} of the {first.load_of}), target {first.target_us / 1e3:.3f} ms;"
            f" samples of {plain(found.gpu)}, record {found.record}"
        )
    several = len(models) > 1
    rows = [
        [
            plain(r.policy), *([plain(r.model)] if several else []), f"{r.latency.quantile_us(0.5) / 1e3:.3f}",
            f"{r.p99_us / 1e3:.3f}", "yes" if r.kept else "no", f"{r.over_exclusive:.2f}", f"{r.latency.violations}",
            f"{r.be_throughput:.3f}", f"{r.system_throughput:.3f}",
        ]
        for r in found.runs
    ]  # fmt: skip
    head = [
        "policy",
        *(["model"] if several else []),
        "p50 ms",
        "p99 ms",
        "target kept",
        "× alone",
        "late",
        "BE rate",
        "system",
    ]
    screen.table("", head, rows)
    for r in found.runs:
        whose = f", {plain(r.model)}" if several else ""
        if r.refused:
            screen.out.print(f"{plain(r.policy)}{whose}: {r.refused} queries were refused as they came")
        if r.latency.void:
            screen.out.print(f"{plain(r.policy)}{whose}: VOID: {plain(r.latency.void, 200)}")
        if r.note and r.model == models[0].model:
            screen.out.print(f"{plain(r.policy)}: {plain(r.note)}")
    for refused in found.refused:
        screen.out.print(f"{plain(refused.policy)}: not run: {plain(refused.reason, 200)}")
