"""`weft diff`: a plan layer by layer against the framework."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from weft.cli.inputs import Dims, Inputs, dims_of, given_inputs, in_order
from weft.cli.limits import NO_LIMITS, limits_of, with_limits
from weft.cli.show import Screen, plain, visible
from weft.errors import OptionError
from weft.options import Options

if TYPE_CHECKING:
    import torch

    from weft.frontends.onnx import Limits
    from weft.ir.graph import Graph, NodeId
    from weft.ir.types import Array
    from weft.pipeline.layers import Layer, Own
    from weft.runtime.any import AnyExecutable

_SOURCE = re.compile(r"node '(.*)' \((\w+)\)", re.DOTALL)


@with_limits
def diff_command(
    model: Annotated[Path, typer.Argument(help="ONNX file, or a saved plan (.weft)")],
    of: Annotated[
        Path | None, typer.Option("--of", help="ONNX file that a saved plan is compared with; else its own graph")
    ] = None,
    against: Annotated[
        Literal["auto", "onnxruntime", "primitives"],
        typer.Option(help="whose values stand beside Weft's: ONNX Runtime's where it is installed, or one call each"),
    ] = "auto",
    input: Inputs = [],  # noqa: B006
    budget: Annotated[float | None, typer.Option(help="seconds of tuning; 0, the default: the plan remembered")] = None,
    dim: Dims = [],  # noqa: B006
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N")] = "cpu",
    trust: Annotated[str | None, typer.Option(help="digest of a plan that somebody else saved")] = None,
    format: Annotated[Literal["text", "json"], typer.Option("--format", help="text for people, json for programs")] = (
        "text"
    ),
    limits: Mapping[str, str] = NO_LIMITS,
) -> None:
    """Compare what each kernel of a plan stores with the framework's values, in float64. Exit code 1 if one is off.

    Example: weft diff model.onnx. The first layer over its limit is named; a limit is that of a whole model of the
    layer's type, or, where rounding goes further, a multiple of what the framework's own arithmetic is off by.
    weft diff model.weft --of model.onnx holds a saved plan against the file: its weights, names and values.
    """
    from weft.api import compile as compile_model
    from weft.api import load
    from weft.pipeline.layers import compare
    from weft.pipeline.reference import example_inputs

    screen = Screen(format)
    options = replace(Options.from_environment(os.environ), budget_s=budget or 0.0)
    given = given_inputs(input)
    own: Own | None = None
    notes: list[str] = []
    source, named = of, None
    if model.suffix == ".weft":
        if against == "onnxruntime" and of is None:
            raise OptionError(option="--against", problem="a saved plan holds no ONNX file: give it by --of")
        executable = load(model, trust=trust, options=options).executable
    elif of is not None:
        raise OptionError(option="--of", problem="is for a saved plan (.weft)")
    else:
        source = model
        executable = compile_model(
            model, given, device=device, options=options, dims=dims_of(dim), limits=limits_of(limits),
            say=screen.progress,
        ).executable  # fmt: skip
        screen.done()
    graph = executable.graph
    inputs = in_order(given, graph.input_names, example_inputs(graph, options.seed))
    if of is not None:
        named, note = _of_model(of, executable, inputs, limits_of(limits))
        notes += note
    if source is not None and against != "primitives":
        found = onnxruntime_values(source, executable, named or graph, inputs, limits_of(limits))
        if isinstance(found, str):
            if against == "onnxruntime":
                raise OptionError(option="--against", problem=found)
            notes.append(f"the framework's values are those of single library calls: {found}")
        else:
            own = found
    layers = compare(executable, inputs, own, "onnxruntime", named)
    first = next((k for k, layer in enumerate(layers) if not layer.ok), None)
    if screen.json:
        rows = [asdict(layer) for layer in layers]
        screen.data({"model": model.name, "layers": rows, "first_over": first, "notes": notes})
    else:
        _show(screen, layers, first, notes)
    if first is not None:
        raise typer.Exit(1)


def _of_model(
    model: Path, executable: AnyExecutable, inputs: Sequence[torch.Tensor], limits: Limits
) -> tuple[Graph, list[str]]:
    """A saved plan's graph as the file has it; what is to be said about that.

    Raises:
        OptionError: it is no plan of this file [W001].
    """
    from weft.frontends.onnx import import_onnx
    from weft.ir.declined import Declined
    from weft.pipeline.finish import as_array
    from weft.pipeline.refit import graph_of

    imported = import_onnx(model, limits=limits, example_inputs=[as_array(x) for x in inputs])
    found = graph_of(executable, imported)
    if isinstance(found, Declined):
        raise OptionError(option="--of", problem=f"{visible(model.name)}: {visible(found.reason, 300)}")
    graph, others = found
    told = [f"{others} constants of the plan are not those of {model.name}"] if others else []
    return graph, told


def _show(screen: Screen, layers: Sequence[Layer], first: int | None, notes: Sequence[str]) -> None:
    rows = [
        [
            str(x.step),
            plain(", ".join(map(_short, x.operators)), 60),
            f"{x.weft.worst:.2g}",
            f"{x.weft.rms:.2g}",
            f"{x.framework.worst:.2g}",
            f"{x.framework.rms:.2g}",
            x.against,
            "" if x.ok else plain(x.note, 60),
        ]
        for x in layers
    ]
    head = ["kernel", "operators", "max", "rms", "theirs: max", "rms", "whose", "over its limit"]
    screen.table("", head, rows)
    for note in notes:
        screen.out.print(plain(note, 300))
    if first is None:
        screen.out.print(f"all {len(layers)} values are within their limits")
    else:
        x = layers[first]
        screen.out.print(f"the first over its limit: kernel {x.step}, {plain(', '.join(x.operators), 200)}")


def _short(operator: str) -> str:
    """An operator of a file by its name and type."""
    match = _SOURCE.fullmatch(operator)
    return f"{match[1]} ({match[2]})" if match else operator


def onnxruntime_values(
    model: Path, executable: AnyExecutable, graph: Graph, inputs: Sequence[torch.Tensor], limits: Limits | None
) -> Own | str:
    """ONNX Runtime's own values of what a plan stores, where they are an operator's results; or why there are none.

    `graph` is the plan's with the names of the file's operators.
    """
    import numpy as np
    import torch

    from weft.cli.peers import TRIAL_S
    from weft.frontends.onnx import Limits
    from weft.frontends.onnx.check import parse
    from weft.frontends.onnx.trial import session_of
    from weft.frontends.onnx.whole import onnxruntime_model
    from weft.ir.declined import Declined

    if any(x.is_cuda for x in inputs) or executable.linked.facts.get("gpu"):
        return "ONNX Runtime is compared with on the CPU only"
    bounds = limits or Limits()
    types = [graph.type_of(n) for n in graph.inputs]
    tried = onnxruntime_model(
        model, types, len(graph.outputs), limits=bounds, threads=torch.get_num_threads(), seconds=TRIAL_S
    )
    if isinstance(tried, Declined):
        return f"ONNX Runtime does not run the model: {tried.reason}"
    proto = parse(model.read_bytes(), bounds)
    names = _tensors(graph, [(n.name, n.op_type, list(n.output)) for n in proto.graph.node])

    def own(nodes: Sequence[NodeId]) -> Mapping[NodeId, Array]:
        wanted = {n: names[n] for n in nodes if n in names}
        known = {o.name for o in proto.graph.output}
        for name in dict.fromkeys(wanted.values()):
            if name not in known:
                proto.graph.output.add(name=name)
        try:
            session = session_of(proto.SerializeToString(), torch.get_num_threads())
            feed = {i.name: x.contiguous().numpy() for i, x in zip(session.get_inputs(), inputs, strict=True)}
            found = dict(zip(wanted, session.run(list(wanted.values()), feed), strict=True)) if wanted else {}
        except Exception:  # the runtime's own classes; what it does not give is compared with single calls
            return {}
        return {n: np.asarray(x) for n, x in found.items() if isinstance(x, np.ndarray)}

    return own


def _tensors(graph: Graph, nodes: Sequence[tuple[str, str, list[str]]]) -> dict[NodeId, str]:
    """Nodes of a graph that are results of the file's operators, by these operators' names, with their tensors' names.

    Names that stand twice, as those of a function that is called twice would, are left out.
    """
    places: dict[tuple[str, str], list[list[str]]] = {}
    for name, op, outputs in nodes:
        places.setdefault((name, op), []).append(outputs)
    found: dict[NodeId, str] = {}
    for origin in graph.origins:
        match = _SOURCE.fullmatch(origin.source)
        known = places.get((match[1], match[2]), []) if match else []
        if len(known) == 1:
            pairs = zip(origin.results, known[0], strict=False)
            found.update({node: name for node, name in pairs if node >= 0 and name})
    return found
