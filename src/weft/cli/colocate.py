"""`weft colocate`: two jobs on one GPU under a scheduling policy, on a GPU or simulated from recorded samples."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from weft.cli.colocate_gpu import prepare_command, run_command
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
    loads_of,
    samples_of,
    show_comparison,
    show_run,
    write_report,
)
from weft.cli.show import Screen
from weft.errors import OptionError

if TYPE_CHECKING:
    from weft.kernels.policy_run import Comparison


class _RunUnlessNamed(TyperGroup):
    """`weft colocate -s weft -m net.onnx` is `weft colocate run -s weft -m net.onnx`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As the group does."""
        if args and args[0].startswith("-") and args[0] not in ("--help", "--install-completion", "--show-completion"):
            args = ["run", *args]
        return list(super().parse_args(ctx, args))


app = typer.Typer(
    cls=_RunUnlessNamed,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Two jobs on one GPU under a scheduling policy: on a GPU, or simulated from recorded samples.",
)
app.command("run")(run_command)
app.command("prepare")(prepare_command)

Model = Annotated[
    list[str],
    typer.Option("-m", "--model", help="latency-critical model, as the record calls it; several: each with its own -m"),
]
Job = Annotated[str, typer.Option("--be", help="best-effort job: its name in the record, or a job.toml")]
Record = Annotated[Path | None, typer.Option("--record", help="recorded samples, a JSON file")]


@app.command("simulate")
def simulate_command(
    policy: Annotated[str, typer.Option("-s", "--scheduler", help="scheduling policy, e.g. weft, tally, green:36")],
    model: Model,
    be: Job = "",
    qos: Qos = [],  # noqa: B006
    load: Load = [],  # noqa: B006
    of: Of = "peak",
    arrivals: Given = [],  # noqa: B006
    admit: Admit = False,
    record: Record = None,
    queries: Queries = 20_000,
    seed: Seed = 0,
    report: Report = None,
    format: Form = "text",
    as_json: Json = False,
) -> None:
    """What one policy would come to: latencies against the target, and what the best-effort job gets. Simulated.

    Several models share the GPU with the job: -m for each, and --qos, --load and --arrivals once for all or for each.

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
    found = _compared(screen, [policy], model, be, qos, load, (), of, arrivals, record, queries, seed, admit)
    if found.refused:
        refused = found.refused[0]
        raise PolicyError(policy=refused.policy, reason=refused.reason, remedy="record it, or choose another policy")
    write_report(report, found)
    show_run(screen, policy, found)


@app.command("compare")
def compare_command(
    model: Model,
    be: Job = "",
    policies: Annotated[
        str, typer.Option("-s", "--schedulers", help="comma separated [default: all]; exclusive is always among them")
    ] = "",
    qos: Qos = [],  # noqa: B006
    load: Load = [],  # noqa: B006
    of: Of = "peak",
    arrivals: Given = [],  # noqa: B006
    admit: Admit = False,
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
    others = loads_of(loads)
    found = _compared(screen, names, model, be, qos, load, others, of, arrivals, record, queries, seed, admit)
    write_report(report, found)
    show_comparison(screen, found)


def _compared(
    screen: Screen, names: Sequence[str], models: Sequence[str], be: str, qos: Sequence[float], load: Sequence[float],
    others: Sequence[float | None], of: str, arrivals: Sequence[str], record: Path | None, queries: int, seed: int,
    admit: bool,
) -> Comparison:  # fmt: skip
    """`load` is that of the table, the others those of the report."""
    from weft.colocate.compare import compare

    samples = samples_of(record)
    cells = cells_of(
        samples,
        models,
        _job(be),
        qos=qos,
        load=load,
        of=of,
        arrivals=arrivals,
        queries=queries,
        seed=seed,
        admit=admit,
        others=others,
    )
    screen.progress("simulate", f"{len(names)} policies at {len(cells)} loads, {len(cells[0].arrivals)} queries each")
    found = compare(samples, names, cells[0], cells[1:])
    screen.done()
    return found


def _job(be: str) -> str:
    """The name of a job; of a job.toml that in it."""
    if not be.endswith(".toml"):
        return be
    from weft.colocate.job import read_job

    return read_job(Path(be)).name
