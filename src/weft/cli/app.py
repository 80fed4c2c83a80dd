"""Commands of `weft`. Each takes `--format text|json`; the environment is read here and nowhere below."""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
import typer

import weft
from weft.api import Compiled, load
from weft.api import compile as compile_model
from weft.cli.show import Screen, microseconds, plain, print_pairs, summary
from weft.errors import ArtifactError, OptionError, WeftError
from weft.kernels.dataclass_json import from_json, to_json
from weft.kernels.record import CompileRecord
from weft.options import Options

Form = Literal["text", "json"]
FormOption = Annotated[Form, typer.Option("--format", help="text for people, json for programs")]
Budget = Annotated[float, typer.Option(help="seconds of tuning; 0: library plan, nothing is measured")]
Dims = Annotated[list[str], typer.Option("--dim", help="size of a symbolic dimension, e.g. batch=4")]
Device = Annotated[str, typer.Option(help="cpu")]

app = typer.Typer(add_completion=False, no_args_is_help=True, help=weft.__doc__, rich_markup_mode=None,
                  pretty_exceptions_enable=False)  # fmt: skip


def run() -> None:
    """Run the command line; every error of ours ends in its text and exit code, never in a traceback."""
    try:
        app()
    except WeftError as error:
        print(f"weft: {error}", file=sys.stderr)
        if error.exit_code == 70:
            raise
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("weft: interrupted; what was measured is kept", file=sys.stderr)
        sys.exit(130)


def _options(budget: float) -> Options:
    return replace(Options.from_environment(os.environ), budget_s=budget)


def _dims(pairs: list[str]) -> dict[str, int]:
    found: dict[str, int] = {}
    for pair in pairs:
        name, _, size = pair.partition("=")
        if not size.isdigit():
            raise OptionError(option="--dim", problem=f"{pair!r} is not NAME=SIZE")
        found[name] = int(size)
    return found


def _compile(model: Path, budget: float, dims: list[str], device: str, screen: Screen) -> Compiled:
    compiled = compile_model(model, device=device, options=_options(budget), dims=_dims(dims), say=screen.progress)
    screen.done()
    return compiled


@app.command("compile")
def compile_command(
    model: Annotated[Path, typer.Argument(help="ONNX file")],
    output: Annotated[Path | None, typer.Option("-o", "--output", help="where to save the plan")] = None,
    report: Annotated[Path | None, typer.Option(help="also write the HTML report")] = None,
    budget: Budget = 600.0,
    dim: Dims = [],  # noqa: B006
    device: Device = "cpu",
    format: FormOption = "text",
) -> None:
    """Compile an ONNX file to the fastest verified plan. Example: weft compile candy.onnx -o candy.weft."""
    screen = Screen(format)
    compiled = _compile(model, budget, dim, device, screen)
    if output is not None:
        digest = compiled.save(output)
        _record_path(output).write_text(json.dumps(to_json(compiled.record)))
        screen.err.print(f"saved {plain(str(output))} (digest {digest})")
    if report is not None:
        compiled.report(report)
        screen.err.print(f"report {plain(str(report))}")
    summary(screen, compiled.record)


def _record_path(plan: Path) -> Path:
    return plan.with_suffix(plan.suffix + ".record.json")


def _record(path: Path) -> CompileRecord:
    place = path if path.suffix == ".json" else _record_path(path)
    try:
        return from_json(CompileRecord, json.loads(place.read_text()))
    except (OSError, ValueError):
        raise ArtifactError(
            where=plain(place.name), problem="no readable record beside the plan", remedy="`weft compile -o` writes it"
        ) from None


@app.command("run")
def run_command(
    plan: Annotated[Path, typer.Argument(help="saved plan")],
    input: Annotated[list[Path], typer.Option("--input", help="one .npy file per input, in order")] = [],  # noqa: B006
    output: Annotated[Path | None, typer.Option("-o", "--output", help="write outputs as .npz")] = None,
    trust: Annotated[str | None, typer.Option(help="digest of a plan that somebody else saved")] = None,
    format: FormOption = "text",
) -> None:
    """Run a saved plan on .npy files. Example: weft run candy.weft --input x.npy."""
    screen = Screen(format)
    loaded = load(plan, trust=trust, options=Options.from_environment(os.environ))
    tensors = []
    for path in input:
        try:
            tensors.append(torch.from_numpy(np.load(path, allow_pickle=False)))
        except (OSError, ValueError) as error:
            raise OptionError(option="--input", problem=f"{plain(path.name)}: {error}") from None
    result = loaded(*tensors)
    outputs = [result] if isinstance(result, torch.Tensor) else list(result)
    if output is not None:
        np.savez(output, *[x.numpy() for x in outputs])
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
def bench(
    model: Annotated[Path, typer.Argument(help="ONNX file")],
    against: Annotated[str, typer.Option(help="comma separated: onnxruntime, library")] = "onnxruntime",
    budget: Budget = 600.0,
    rounds: Annotated[int, typer.Option(help="interleaved rounds")] = 15,
    dim: Dims = [],  # noqa: B006
    format: FormOption = "text",
) -> None:
    """Compile an ONNX file and time it against its peers in one interleaved run."""
    from weft.pipeline.finish import interleave

    screen = Screen(format)
    compiled = _compile(model, budget, dim, "cpu", screen)
    from weft.pipeline.reference import example_inputs

    inputs = example_inputs(compiled.executable.graph, 0)
    runs: dict[str, Callable[[], object]] = {"weft": partial(compiled, *inputs)}
    for peer in filter(None, against.split(",")):
        if peer == "onnxruntime":
            runs[peer] = _onnxruntime(model, inputs)
        elif peer == "library":
            plain_plan = compile_model(model, options=_options(0.0), dims=_dims(dim))
            runs[peer] = partial(plain_plan, *inputs)
        else:
            raise OptionError(option="--against", problem=f"{peer!r} is not one of onnxruntime, library")
    samples = interleave(runs, rounds=rounds, seed=1, budget_s=120)
    median = {k: statistics.median(v) for k, v in samples.items()}
    if screen.json:
        screen.data({"model": model.name, "median_us": median, "samples_us": samples})
    else:
        rows = [[k, microseconds(v), f"{v / median['weft']:.2f}"] for k, v in median.items()]
        screen.table("", ["", "median", "against weft"], rows)


def _onnxruntime(model: Path, inputs: list[torch.Tensor]) -> Callable[[], object]:
    try:
        import onnxruntime
    except ImportError:
        raise OptionError(option="--against", problem="onnxruntime is not installed") from None
    chosen = onnxruntime.SessionOptions()
    chosen.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(str(model), chosen, providers=["CPUExecutionProvider"])
    feeds = {i.name: x.numpy() for i, x in zip(session.get_inputs(), inputs, strict=False)}
    return lambda: session.run(None, feeds)


@app.command("fission")
def fission_command(
    model: Annotated[Path, typer.Argument(help="ONNX file")],
    output: Annotated[Path, typer.Argument(help="where to write the primitive graph as ONNX")],
    dim: Dims = [],  # noqa: B006
    format: FormOption = "text",
) -> None:
    """Write the graph of primitives as an ONNX file with equal outputs."""
    from weft.frontends.onnx import import_onnx
    from weft.frontends.onnx.export import export_onnx

    screen = Screen(format)
    imported = import_onnx(model, dims=_dims(dim))
    try:
        output.write_bytes(export_onnx(imported.graph))
    except OSError as error:
        raise ArtifactError(
            where=plain(output.name), problem=str(error.strerror), remedy="choose another place"
        ) from None
    facts = {
        "operators": imported.operators,
        "primitives": len(imported.graph),
        "opaque": sum(u.count for u in imported.opaque),
    }
    if screen.json:
        screen.data(facts)
    else:
        print_pairs(screen, {k: str(v) for k, v in facts.items()})


@app.command()
def check(
    model: Annotated[Path, typer.Argument(help="ONNX file")],
    dim: Dims = [],  # noqa: B006
    format: FormOption = "text",
) -> None:
    """Say what Weft can do with a model, without compiling it: every operator that falls back, and why."""
    from weft.frontends.onnx import import_onnx

    screen = Screen(format)
    imported = import_onnx(model, dims=_dims(dim))
    if screen.json:
        opaque = [{"op": u.op, "reason": u.reason, "count": u.count} for u in imported.opaque]
        notes = list(imported.notes)
        counts = {"operators": imported.operators, "primitives": len(imported.graph)}
        screen.data({**counts, "notes": notes, "opaque": opaque})
        return
    print_pairs(screen, {"operators": str(imported.operators), "nodes": str(len(imported.graph))})
    for note in imported.notes:
        screen.out.print(f"note: {plain(note, 200)}")
    if imported.opaque:
        rows = [[plain(u.op), str(u.count), plain(u.reason, 100)] for u in imported.opaque]
        screen.table("run by the framework:", ["operator", "count", "why"], rows)
    else:
        screen.out.print("every operator is compiled")


@app.command()
def explain(
    plan: Annotated[Path, typer.Argument(help="saved plan or its .record.json")],
    node: Annotated[str | None, typer.Argument(help="kernel number, %node, or part of an operator's name")] = None,
    format: FormOption = "text",
) -> None:
    """Why a kernel was chosen: winner, runner-up, margin, and why it was not fused further."""
    screen = Screen(format)
    record = _record(plan)
    steps = [s for s in record.steps if node is None or _matches(node, s.position, s.nodes, s.operators)]
    if not steps:
        raise OptionError(option="NODE", problem=f"no kernel of this plan matches {plain(node or '')!r}")
    if screen.json:
        screen.data([to_json(s) for s in steps])
        return
    for s in steps:
        screen.out.print(f"[bold]kernel {s.position}[/bold] {plain(s.schedule, 160)}")
        print_pairs(
            screen,
            {
                "  operators": ", ".join(plain(o) for o in s.operators) or "-",
                "  primitives": ", ".join(s.primitives),
                "  time": microseconds(s.cost_us),
                "  model": f"{microseconds(s.predicted_us)}, bound {microseconds(s.bound_us)}",
                "  runner-up": f"{plain(s.runner_up, 120)} {microseconds(s.runner_up_us)}" if s.runner_up else "none",
                "  tried": f"{s.alternatives} kernels, {s.rejected} rejected",
            },
        )
        for n in s.neighbours:
            screen.out.print(
                f"  not fused {plain(n.what, 90)}: "
                f"{microseconds(n.cost_us)} against {microseconds(n.parts_us)}: {n.reason}"
            )


def _matches(text: str, position: int, nodes: tuple[int, ...], operators: tuple[str, ...]) -> bool:
    if text.startswith("%") and text[1:].isdigit():
        return int(text[1:]) in nodes
    return text == str(position) or (not text.isdigit() and any(text in o for o in operators))


@app.command()
def report(
    plan: Annotated[Path, typer.Argument(help="saved plan or its .record.json")],
    output: Annotated[Path, typer.Option("-o", "--output", help="HTML file")] = Path("report.html"),
    format: FormOption = "text",
) -> None:
    """Write the HTML report of a saved plan: one offline file."""
    from weft.report import render

    screen = Screen(format)
    try:
        output.write_text(render(_record(plan)), encoding="utf-8")
    except OSError as error:
        raise ArtifactError(
            where=plain(output.name), problem=str(error.strerror), remedy="choose another place"
        ) from None
    if screen.json:
        screen.data({"report": str(output)})
    else:
        screen.out.print(f"wrote {plain(str(output))}")


@app.command()
def doctor(format: FormOption = "text") -> None:
    """What this machine has, and what Weft makes of it."""
    from weft.device.facts import cpu_facts
    from weft.device.toolchain import HostCompiler, find_compiler
    from weft.tune.store import Database

    screen = Screen(format)
    options = Options.from_environment(os.environ)
    facts, compiler = cpu_facts(options.cache), find_compiler()
    with Database.open(options.cache) as database:
        stats = database.stats()
    writable = True
    try:
        options.cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=options.cache):
            pass
    except OSError:
        writable = False
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
        "cache": f"{options.cache}" + ("" if writable else " (NOT writable: nothing is kept)"),
        "database": str(stats),
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
        result = {"stats": database.stats, "verify": database.verify, "prune": database.prune}[action]()
    if screen.json:
        screen.data(to_json(result))
    else:
        screen.out.print(plain(str(result), 400))
