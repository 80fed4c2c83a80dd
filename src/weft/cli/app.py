"""Commands of `weft`. Each takes `--format text|json`; the environment is read here and nowhere below."""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TextIO, cast

import typer

import weft
from weft.cli.inputs import Dims, Inputs, dims_of, given_inputs, in_order
from weft.cli.later import LaterGroup
from weft.cli.limits import NO_LIMITS, limits_of, with_limits
from weft.cli.show import (
    Screen,
    memory,
    microseconds,
    plain,
    print_error,
    print_pairs,
    ratio,
    summary,
    visible,
    wants_json,
    writing,
)
from weft.device.files import private_directory
from weft.errors import ArtifactError, OptionError, UnsupportedError, WeftError
from weft.options import Options, default_cache_dir, parse_text
from weft.private import usable, weakness
from weft.sm_budget import SmBudget

if TYPE_CHECKING:
    import numpy as np
    import torch

    from weft.api import Compiled
    from weft.cli.peers import Peer
    from weft.kernels.record import CompileRecord
    from weft.pipeline.finish import Sample

PEERS = ("eager", "inductor", "max-autotune", "onnxruntime", "library")
Form = Literal["text", "json"]
FormOption = Annotated[Form, typer.Option("--format", help="text for people, json for programs")]
Budget = Annotated[
    float | None,
    typer.Option(help="seconds of tuning, 600; 0: nothing is measured: the stored plan, else a library plan"),
]
Device = Annotated[str, typer.Option(help="cpu, cuda or cuda:N")]

HELP = (weft.__doc__ or "").split("\n\n")[0]  # the rest is about Python
app = typer.Typer(cls=LaterGroup, add_completion=True, no_args_is_help=True, help=HELP, rich_markup_mode=None,
                  pretty_exceptions_enable=False)  # fmt: skip


def _print_version(value: bool) -> None:
    if value:
        print(f"weft {weft.__version__}")
        raise typer.Exit


@app.callback()
def _all_commands(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="print the version and end")
    ] = False,
) -> None:
    del version


def compile_model(*args: Any, **kwargs: Any) -> Compiled:
    """`weft.compile`, loaded by whoever compiles."""
    return weft.compile(*args, **kwargs)


def run() -> None:
    """Run the command line; every error ends in its text and exit code, never in a traceback."""
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            app()
    except WeftError as error:
        if wants_json(sys.argv[1:]):
            _tell_as_json(error)
        for line in str(error).splitlines():
            print(visible(line, 400) if line.startswith("  ") else f"weft: {visible(line, 400)}", file=sys.stderr)
        if error.exit_code == 70 or getattr(error, "__notes__", None):
            _point_to_log(error)
        sys.exit(error.exit_code)
    except SystemExit as ended:
        told = getattr(ended.__context__, "format_message", None)  # of what cannot be read as a command
        if ended.code == OptionError.exit_code and told is not None and wants_json(sys.argv[1:]):
            print_error(OptionError.code, str(told()), "see `weft COMMAND --help`")
        if ended.code == 130:  # the framework of commands catches the interrupt itself
            print("weft: interrupted; what was measured is kept", file=sys.stderr)
        raise
    except Exception as error:
        if wants_json(sys.argv[1:]):
            what = f"internal error: {type(error).__name__}: {error}"
            print_error("W900", what, "this is a bug in Weft: please report it with the log")
        text = next(iter(str(error).splitlines()), "")
        print(f"weft: internal error: {type(error).__name__}: {visible(text, 200)} [W900]", file=sys.stderr)
        print("  this is a bug in Weft: please report it with the log", file=sys.stderr)
        _point_to_log(error)
        sys.exit(70)


def _tell_as_json(error: WeftError) -> None:
    first, _, advice = str(error).partition("\n")
    print_error(error.code, first.removesuffix(f" [{error.code}]"), advice.strip())


def _show_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int,
    file: TextIO | None = None, line: str | None = None,
) -> None:  # fmt: skip
    """One line for people, without the place in our source."""
    del lineno, line
    ours = category.__module__.startswith("weft.") or str(message).startswith("Weft") or "weft" in Path(filename).parts
    text = " ".join(str(message).removeprefix("Weft: ").split())
    source = "" if ours else f" ({category.__name__} of {Path(filename).name})"
    (file or sys.stderr).write(f"weft: warning: {visible(text, 400)}{source}\n")


def _point_to_log(error: BaseException) -> None:
    """Write traceback and notes to a file of the cache and name it."""
    text = "".join(traceback.format_exception(error))
    try:
        cache = usable(default_cache_dir(os.environ))
        if cache is None:
            raise FileNotFoundError("no cache")
        folder = private_directory(cache / "logs")
        path = folder / f"error-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
        path.write_text(text, encoding="utf-8", errors="backslashreplace")
    except (OSError, WeftError):
        print("  no log could be written: the cache directory cannot be used", file=sys.stderr)
    else:
        print(f"  full log: {visible(str(path), 400)}", file=sys.stderr)


def _options(budget: float | None, memory_limit: str = "", sm_budget: str = "") -> Options:
    options = Options.from_environment(os.environ)
    if sm_budget:
        options = replace(options, sm_budget=cast("SmBudget", parse_text("--sm-budget", "SmBudget", sm_budget)))
    if memory_limit:
        limit = parse_text("--memory-limit", "int", memory_limit)
        options = replace(options, memory_limit_bytes=cast("int", limit))
    if budget is None:
        return options
    if not budget >= 0:
        raise OptionError(option="--budget", problem=f"{budget} is no time")
    return replace(options, budget_s=budget)


def _can_be_written(*paths: Path | None) -> None:
    """Told before anything is tuned, not after."""
    for path in paths:
        if path is not None and not path.parent.is_dir():
            problem = f"the folder {visible(str(path.parent))} does not exist"
            raise ArtifactError(where=visible(path.name), problem=problem, remedy="make it first")
        if path is not None and path.is_dir():
            problem = "cannot be written: it is a folder"
            raise ArtifactError(where=visible(path.name), problem=problem, remedy="choose another place")


def _compile(
    model: Path,
    options: Options,
    dims: list[str],
    device: str,
    limits: Mapping[str, str],
    screen: Screen,
    inputs: Sequence[torch.Tensor] | Mapping[str, torch.Tensor | None] | None = None,
) -> Compiled:
    compiled = compile_model(
        model,
        inputs,
        device=device,
        options=options,
        dims=dims_of(dims),
        limits=limits_of(limits),
        say=screen.progress,
    )
    screen.done()
    return compiled


@app.command("compile")
@with_limits
def compile_command(
    model: Annotated[Path, typer.Argument(help="ONNX file")],
    output: Annotated[Path | None, typer.Option("-o", "--output", help="where to save the plan")] = None,
    report: Annotated[Path | None, typer.Option(help="also write the HTML report")] = None,
    budget: Budget = None,
    memory_limit: Annotated[
        str, typer.Option(help="most memory of values alive at once, inputs and weights left out, e.g. 256MiB")
    ] = "",
    sm_budget: Annotated[
        str,
        typer.Option(
            help="on a GPU: what the plan may take of one SM, e.g. registers=49152,shared=200KiB,threads=1792"
        ),
    ] = "",
    dim: Dims = [],  # noqa: B006
    input: Inputs = [],  # noqa: B006
    device: Device = "cpu",
    format: FormOption = "text",
    limits: Mapping[str, str] = NO_LIMITS,
) -> None:
    """Compile an ONNX file to the fastest verified plan. Example: weft compile candy.onnx -o candy.weft."""
    screen = Screen(format)
    _can_be_written(output, report)
    given = given_inputs(input)
    options = _options(budget, memory_limit, sm_budget)
    if output is not None or report is not None:
        options = replace(options, in_parts=False)  # there is no one plan: it is told before anything is measured
    compiled = _compile(model, options, dim, device, limits, screen, given)
    if output is not None:
        from weft.kernels.dataclass_json import to_json

        digest = compiled.save(output)
        with writing(_record_path(output)):
            _record_path(output).write_text(json.dumps(to_json(compiled.record)))
        screen.err.print(f"saved {plain(str(output))} (digest {digest})")
    if report is not None:
        compiled.report(report)
        screen.err.print(f"report {plain(str(report))}")
    summary(screen, compiled.record)


def _record_path(plan: Path) -> Path:
    return plan.with_suffix(plan.suffix + ".record.json")


def _record(path: Path) -> CompileRecord:
    from weft.kernels.dataclass_json import from_json
    from weft.kernels.record import CompileRecord

    place = path if path.suffix == ".json" else _record_path(path)
    try:
        return from_json(CompileRecord, json.loads(place.read_text()))
    except (OSError, ValueError, RecursionError):
        raise ArtifactError(
            where=visible(place.name),
            problem="no readable record beside the plan",
            remedy="`weft compile -o` writes it",
        ) from None


@app.command("run")
def run_command(
    plan: Annotated[Path, typer.Argument(help="saved plan")],
    input: Inputs = [],  # noqa: B006
    output: Annotated[Path | None, typer.Option("-o", "--output", help="write outputs as .npz")] = None,
    trust: Annotated[str | None, typer.Option(help="digest of a plan that somebody else saved")] = None,
    format: FormOption = "text",
) -> None:
    """Run a saved plan on .npy files. Example: weft run candy.weft --input x=x.npy."""
    import numpy as np

    from weft.frontends.torch.dtypes import EMULATED
    from weft.pipeline.reference import example_inputs
    from weft.runtime.loaded import load

    screen = Screen(format)
    options = Options.from_environment(os.environ)
    loaded = load(plan, trust=trust, options=options)
    graph = loaded.executable.graph
    inputs = in_order(given_inputs(input), graph.input_names, example_inputs(graph, options.seed), every=True)
    outputs = [x.cpu() for x in loaded.flat(*[x.to(loaded.executable.device) for x in inputs])]
    if output is not None:
        with writing(output), output.open("wb") as file:  # a file object: `savez` appends a suffix to names
            np.savez(file, *[(x.float() if x.dtype in EMULATED else x).numpy() for x in outputs])
    rows = [_statistics(x) for x in outputs]
    if screen.json:
        screen.data(rows)
    else:
        shown = [
            [str(i), str(r["shape"]), str(r["dtype"]), f"{r['mean']:.6g}", f"{r['std']:.6g}"]
            for i, r in enumerate(rows)
        ]
        screen.table("", ["output", "shape", "type", "mean", "std"], shown)


def _statistics(x: torch.Tensor) -> dict[str, object]:
    wide = x.double()
    mean, std = float(wide.mean()), float(wide.std(correction=0))
    return {"shape": list(x.shape), "dtype": str(x.dtype), "mean": mean, "std": std}


@app.command()
@with_limits
def bench(
    model: Annotated[Path, typer.Argument(help="ONNX file")],
    against: Annotated[
        str, typer.Option(help=f"comma separated: {', '.join(PEERS)}; default: onnxruntime, on a GPU eager")
    ] = "",
    budget: Budget = None,
    rounds: Annotated[int, typer.Option(min=1, help="interleaved rounds")] = 15,
    dim: Dims = [],  # noqa: B006
    input: Inputs = [],  # noqa: B006
    device: Device = "cpu",
    format: FormOption = "text",
    limits: Mapping[str, str] = NO_LIMITS,
) -> None:
    """Compile an ONNX file and time it against its peers in one interleaved run.

    Example: weft bench model.onnx --against eager,inductor,onnxruntime. `eager` calls torch's own operator for each
    operator of the file, `inductor` compiles that, `max-autotune` does so by its slow mode, `library` is Weft's plan of
    library calls, untuned. On a GPU all are CUDA graphs on inputs that lie in their buffers.
    """
    import torch

    from weft.cli.peers import check_peers, disagreement
    from weft.pipeline.finish import interleave
    from weft.pipeline.reference import example_inputs

    screen = Screen(format)
    against = against or ("onnxruntime" if device == "cpu" else "eager")
    names = [name for name in dict.fromkeys(against.split(",")) if name]
    for name in names:
        if name not in PEERS:
            raise OptionError(option="--against", problem=f"{name!r} is not one of {', '.join(PEERS)}")
    check_peers(names, device)
    given = given_inputs(input)
    compiled = _compile(model, _options(budget), dim, device, limits, screen, given)

    place, graph = torch.device(device), compiled.graph
    inputs = [x.to(place) for x in in_order(given, graph.input_names, example_inputs(graph, 0))]
    peers = _peers(names, model, inputs, len(graph.outputs), dim, limits, device)
    wanted = compiled.run(*inputs)
    runs: dict[str, Callable[[], object]] = {"weft": _timed(compiled.run, inputs)}
    notes = {name: peer.note for name, peer in peers.items()}
    for name, peer in peers.items():
        if peer.run is not None:
            runs[name] = peer.run
            notes[name] = "; ".join(x for x in (peer.note, disagreement(peer.run(), wanted)) if x)
    samples = interleave(runs, rounds=rounds, seed=1, budget_s=120, sample=_sample(place))
    median = {k: statistics.median(v) for k, v in samples.items()}
    if screen.json:
        screen.data({"model": model.name, "median_us": median, "samples_us": samples, "notes": notes})
    else:
        rows = [[k, microseconds(v), ratio(v / median["weft"])] for k, v in median.items()]
        rows += [[k, "-", "-"] for k in peers if k not in median]
        screen.table("", ["", "median", "against weft"], rows)
        for name, note in notes.items():
            if note:
                screen.out.print(f"{name}: {plain(note, 400)}")


def _timed(
    run: Callable[..., Sequence[torch.Tensor]], inputs: list[torch.Tensor]
) -> Callable[[], Sequence[torch.Tensor]]:
    """What is timed: the call, on a GPU its graph on inputs that were copied before."""
    replay: Callable[[], Sequence[torch.Tensor]] | None = getattr(run, "replay", None)
    if replay is None:
        return partial(run, *inputs)
    run(*inputs)
    return replay


def _sample(place: torch.device) -> Sample | None:
    """How a run on this device is timed; None: by the host's clock."""
    if place.type == "cpu":
        return None
    from weft.platform.cuda.platform import sample_us

    return sample_us


def _peers(
    names: list[str], model: Path, inputs: list[torch.Tensor], results: int, dim: list[str],
    limits: Mapping[str, str], device: str,
) -> dict[str, Peer]:  # fmt: skip
    from weft.cli.peers import Peer, onnxruntime_peer, torch_peers
    from weft.frontends.onnx import import_onnx
    from weft.pipeline.finish import as_array

    found: dict[str, Peer] = {}
    if "onnxruntime" in names:
        found["onnxruntime"] = onnxruntime_peer(model, inputs, results, limits_of(limits))
    if of_torch := [name for name in names if name in ("eager", "inductor", "max-autotune")]:
        arrays = [as_array(x) for x in inputs]
        imported = import_onnx(model, limits=limits_of(limits), dims=dims_of(dim), example_inputs=arrays)
        found.update(torch_peers(of_torch, imported, inputs))
    if "library" in names:
        library = compile_model(
            model, inputs, options=_options(0.0), device=device, dims=dims_of(dim), limits=limits_of(limits)
        )
        found["library"] = Peer(_timed(library.executable, inputs))
    return {name: found[name] for name in names}


@app.command("fission")
@with_limits
def fission_command(
    model: Annotated[Path, typer.Argument(help="ONNX file")],
    output: Annotated[Path, typer.Argument(help="where to write the primitive graph as ONNX")],
    external: Annotated[
        bool, typer.Option("--external", help="weights beside it in OUTPUT.data; so above 1.9 GB")
    ] = False,
    dim: Dims = [],  # noqa: B006
    format: FormOption = "text",
    limits: Mapping[str, str] = NO_LIMITS,
) -> None:
    """Write the graph of primitives as an ONNX file with equal outputs. Example: weft fission in.onnx out.onnx."""
    from weft.frontends.onnx import import_onnx, write_onnx

    screen = Screen(format)
    imported = import_onnx(model, limits=limits_of(limits), dims=dims_of(dim))
    with writing(output):
        written = write_onnx(imported.graph, output, external=external)
    facts = {
        "operators": imported.operators,
        "primitives": len(imported.graph),
        "opaque": sum(u.count for u in imported.opaque),
    }
    files = [path.name for path in written]
    if screen.json:
        screen.data({**facts, "files": files})
    else:
        print_pairs(screen, {**{k: str(v) for k, v in facts.items()}, "files": ", ".join(plain(x) for x in files)})


def _arrays(
    given: Sequence[torch.Tensor] | Mapping[str, torch.Tensor | None] | None,
) -> list[np.ndarray[Any, Any]] | dict[str, np.ndarray[Any, Any] | None] | None:
    if isinstance(given, Mapping):
        return {name: None if x is None else x.numpy() for name, x in given.items()}
    return None if given is None else [x.numpy() for x in given]


@app.command()
@with_limits
def check(
    model: Annotated[Path, typer.Argument(help="ONNX file")],
    dim: Dims = [],  # noqa: B006
    input: Inputs = [],  # noqa: B006
    format: FormOption = "text",
    limits: Mapping[str, str] = NO_LIMITS,
) -> None:
    """Say what Weft can do with a model, without compiling it: every operator that falls back, and why."""
    from weft.frontends.onnx import import_onnx, import_partitioned
    from weft.frontends.onnx.errors import wants_values

    screen = Screen(format)
    bounds, sizes, examples = limits_of(limits), dims_of(dim), _arrays(given_inputs(input))
    left: Mapping[str, int] = {}
    reason = ""
    try:
        imported = import_onnx(model, limits=bounds, dims=sizes, example_inputs=examples, on_data=False)
    except UnsupportedError as error:
        if wants_values(error, examples):
            raise
        try:
            cut = import_partitioned(model, limits=bounds, dims=sizes, example_inputs=examples)
        except WeftError:
            raise error from None
        imported, left, reason = cut.compiled, cut.operators, str(error).splitlines()[0]
    if screen.json:
        opaque = [{"op": u.op, "reason": u.reason, "count": u.count} for u in imported.opaque]
        notes = list(imported.notes)
        counts = {"operators": imported.operators, "primitives": len(imported.graph)}
        rest = {"rest": {"reason": reason, "operators": dict(left)}} if left else {}
        screen.data({**counts, "notes": notes, "opaque": opaque, **rest})
        return
    print_pairs(screen, {"operators": str(imported.operators), "nodes": str(len(imported.graph))})
    for note in imported.notes:
        screen.out.print(f"note: {plain(note, 400)}")
    if left:
        screen.out.print(f"no plan holds the whole, and ONNX Runtime runs the rest: {plain(reason, 400)}")
        screen.table("the rest:", ["operator", "count"], [[plain(op), str(n)] for op, n in sorted(left.items())])
    if imported.opaque:
        rows = [[plain(u.op), str(u.count), plain(u.reason, 100)] for u in imported.opaque]
        screen.table("run by the framework:", ["operator", "count", "why"], rows)
    elif not left:
        screen.out.print("every operator is compiled")


@app.command()
def explain(
    plan: Annotated[Path, typer.Argument(help="saved plan, its .record.json, or with --line a folder of `weft gemm`")],
    node: Annotated[str | None, typer.Argument(help="kernel number, %node, or part of an operator's name")] = None,
    text: Annotated[bool, typer.Option("--text", help="the kernel's text, with a line for each header")] = False,
    line: Annotated[str | None, typer.Option(help="a line of that text: in which files of Weft it is written")] = None,
    format: FormOption = "text",
) -> None:
    """Why a kernel was chosen: winner, runner-up, margin, and why it was not fused further."""
    screen = Screen(format)
    if plan.is_dir() and line is not None:
        from weft.gemm.folder import read

        _, kernel = read(plan)
        _print_text(screen, [(0, str(kernel.schedule), kernel.text)], line)
        return
    from weft.generate.written import written_in
    from weft.kernels.dataclass_json import to_json

    record = _record(plan)
    steps = [s for s in record.steps if node is None or _matches(node, s.position, s.nodes, s.operators)]
    if not steps:
        problem = f"no kernel of this plan matches {visible(node or '')!r}; all {len(record.steps)}: leave NODE out"
        raise OptionError(option="NODE", problem=problem)
    if text or line is not None:
        _print_text(screen, [(s.position, s.schedule, s.source) for s in steps], line)
        return
    if screen.json:
        screen.data([cast("dict[str, Any]", to_json(s)) | {"written_in": written_in(s.schedule)} for s in steps])
        return
    if not record.is_tuned:
        screen.out.print(f"[bold]{plain(record.verdict, 200)}[/bold]")
    if record.sm_budget:
        screen.out.print(f"[bold]within {plain(record.sm_budget, 200)} of each SM[/bold]")
    for s in steps:
        screen.out.print(f"[bold]kernel {s.position}[/bold] {plain(s.schedule, 160)}")
        print_pairs(
            screen,
            {
                "  written in": ", ".join(written_in(s.schedule)) or "-",
                "  operators": ", ".join(plain(o) for o in s.operators) or "-",
                "  primitives": plain(", ".join(s.primitives), 400),
                "  time": microseconds(s.cost_us) if s.measured else "not measured",
                "  model": f"{microseconds(s.predicted_us)}, bound {microseconds(s.bound_us)}",
                "  runner-up": f"{plain(s.runner_up, 120)} {microseconds(s.runner_up_us)}" if s.runner_up else "none",
                "  tried": f"{s.alternatives} kernels, {s.rejected} rejected",
                **({"  of an SM": plain(s.sm_share, 200)} if s.sm_share else {}),
            },
        )
        for n in s.neighbours:
            screen.out.print(
                f"  not fused {plain(n.what, 90)}: "
                f"{microseconds(n.cost_us)} against {microseconds(n.parts_us)}: {plain(n.reason, 160)}"
            )


def _print_text(screen: Screen, kernels: Sequence[tuple[int, str, str]], line: str | None) -> None:
    """Texts of kernels (number, schedule, text), or where a line of them is written."""
    from weft.generate.written import origins, written_in
    from weft.kernels.dataclass_json import to_json

    found = [origins(line, schedule, text) if line is not None else [] for _, schedule, text in kernels]
    texts = [_shown(schedule, text) if line is None else "" for _, schedule, text in kernels]
    if screen.json:
        screen.data(
            [
                {"kernel": number, "written_in": written_in(schedule)}
                | ({"text": text} if line is None else {"origins": [cast("dict[str, Any]", to_json(o)) for o in at]})
                for (number, schedule, _), text, at in zip(kernels, texts, found, strict=True)
            ]
        )
        return
    for (number, schedule, _), text, at in zip(kernels, texts, found, strict=True):
        if line is None:
            print(f"// kernel {number}: written in {', '.join(written_in(schedule)) or 'no file: a call'}")
            print(text)
            continue
        screen.out.print(f"[bold]kernel {number}[/bold] {plain(schedule, 160)}")
        for origin in at:
            screen.out.print(f"  {origin.share:4.0%} of the line  {origin}")
        if not at:
            screen.out.print("  no text of Weft is like this line: is it one of this kernel's? See --text")


def _shown(schedule: str, text: str) -> str:
    """The text of a kernel as one reads it; a plan may hold any."""
    from weft.generate.written import without_headers, written_in
    from weft.kernels.pretty import pretty
    from weft.report.data import SOURCE_LIMIT
    from weft.report.text import clean_source

    generated = written_in(schedule) and len(text) <= SOURCE_LIMIT
    return clean_source(pretty(without_headers(text)) if generated else text, SOURCE_LIMIT)


def _matches(text: str, position: int, nodes: tuple[int, ...], operators: tuple[str, ...]) -> bool:
    if text.startswith("%") and text[1:].isdigit():
        return int(text[1:]) in nodes
    return text == str(position) or (not text.isdigit() and any(text in o for o in operators))


@app.command()
def report(
    plan: Annotated[Path, typer.Argument(help="saved plan or its .record.json")],
    output: Annotated[Path, typer.Option("-o", "--output", help="HTML file")] = Path("report.html"),
    beside: Annotated[
        Path | None, typer.Option(metavar="PLAN", help="another plan of the model, to be compared kernel by kernel")
    ] = None,
    format: FormOption = "text",
) -> None:
    """Write the HTML report of a saved plan: one offline file.

    It also shows the pairs of latency-critical and best-effort kernels that the tuning database has of the plan's GPU.
    """
    from weft.report import render
    from weft.tune.pairs import of_record
    from weft.tune.store import Database

    screen = Screen(format)
    record, other = _record(plan), _record(beside) if beside is not None else None
    with Database.open(Options.from_environment(os.environ).cache) as database:
        page = render(record, *of_record(database, record), beside=other)
    with writing(output):
        output.write_text(page, encoding="utf-8")
    if screen.json:
        screen.data({"report": str(output)})
    else:
        screen.out.print(f"wrote {plain(str(output))}")


@app.command()
def trace(
    plan: Annotated[Path, typer.Argument(help="saved plan")],
    output: Annotated[Path, typer.Option("-o", "--output", help="JSON file")] = Path("trace.json"),
    input: Inputs = [],  # noqa: B006
    trust: Annotated[str | None, typer.Option(help="digest of a plan that somebody else saved")] = None,
    format: FormOption = "text",
) -> None:
    """Run a saved plan once and write when each kernel ran, for chrome://tracing or Perfetto.

    Example: weft trace candy.weft -o trace.json.
    """
    from weft.pipeline.reference import example_inputs
    from weft.report.timeline import chrome_trace
    from weft.runtime.loaded import load
    from weft.runtime.timeline import timeline

    screen = Screen(format)
    executable = load(plan, trust=trust, options=Options.from_environment(os.environ)).executable
    graph = executable.graph
    given = in_order(given_inputs(input), graph.input_names, example_inputs(graph, 0))
    found = timeline(executable, [x.to(executable.device) for x in given])
    record = _record(plan) if _record_path(plan).is_file() else None
    with writing(output):
        output.write_text(chrome_trace(found, title=record.model if record else plan.stem, record=record))
    told = {"trace": str(output), "source": found.source, "spans": len(found.spans), "microseconds": found.microseconds}
    if screen.json:
        screen.data(told)
    else:
        print_pairs(
            screen, {k: microseconds(v) if isinstance(v, float) else plain(str(v), 400) for k, v in told.items()}
        )


@app.command()
def doctor(format: FormOption = "text") -> None:
    """What this machine has, and what Weft makes of it."""
    import torch

    from weft.device.cuda.describe import describe
    from weft.device.facts import cpu_facts
    from weft.device.toolchain import HostCompiler, find_compiler
    from weft.tune.store import Database

    screen = Screen(format)
    options = Options.from_environment(os.environ)
    facts, compiler = cpu_facts(options.cache), find_compiler()
    with Database.open(options.cache) as database:
        stats = database.stats()
    place = options.cache_dir or default_cache_dir(os.environ)
    problem = "no place" if place is None else weakness(place)
    if place is not None and not problem:
        try:
            with tempfile.TemporaryFile(dir=private_directory(place)):
                pass
        except OSError as error:
            problem = f"NOT writable: {error.strerror}"
    found = {
        "weft": weft.__version__,
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "cpu": facts.name,
        "cores": str(facts.cores),
        "threads": str(options.threads or torch.get_num_threads()),
        "vectors": f"{facts.simd_bytes} bytes",
        "peak f32": f"{facts.peak_flops_f32 / 1e9:.0f} GFLOP/s",
        "compiler": compiler.version
        if isinstance(compiler, HostCompiler)
        else f"none ({compiler.reason}): library plans only",
        **describe(),
        "cache": f"{place or 'none'}" + (f" ({problem}; nothing is kept)" if problem else ""),
        "database": f"{stats.rows} measurements of {stats.problems} problems in {stats.backend}, "
        f"{memory(stats.size_bytes)}",
    }
    if screen.json:
        screen.data(found)
    else:
        print_pairs(screen, {k: plain(v, 200) for k, v in found.items()})


@app.command("db")
def database_command(
    action: Annotated[Literal["stats", "verify", "prune"], typer.Argument(help="what to do")] = "stats",
    format: FormOption = "text",
) -> None:
    """Look after the tuning database."""
    from weft.tune.store import Database

    screen = Screen(format)
    options = Options.from_environment(os.environ)
    with Database.open(options.cache) as database:
        if action == "stats":
            stats = database.stats()
            result = {f.name: getattr(stats, f.name) for f in fields(stats)}
        elif action == "verify":
            result = dict(zip(("good", "bad"), database.verify(), strict=True))
        else:
            result = {"removed": database.prune()}
    if screen.json:
        screen.data(result)
    else:
        print_pairs(screen, {k: plain(_told(v), 400) for k, v in result.items()})


def _told(value: object) -> str:
    """A value of the database's statistics in words."""
    if isinstance(value, Mapping):
        return ", ".join(f"{n} {k}" for k, n in value.items()) or "none"
    return "; ".join(map(str, value)) or "none" if isinstance(value, list | tuple) else str(value)
