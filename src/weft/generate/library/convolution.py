"""Convolutions by several engines of cuDNN, each a schedule of its own: which apply, and their calls.

    relu(conv(x, w) + bias + residual)      bias, residual and relu each optional

The engines are the heuristic's first few that add up in one order (see `conv_call`); a plan records the engine's number
and settings. A convolution that is soon over, or that something else follows, is left to generated kernels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

from weft.device.cuda.cudnn import Activation, Convolution
from weft.errors import DeviceError
from weft.generate.library.algorithm import CONVOLUTION, ENGINE_FORM, MOST_WORKSPACE, Engine, identity
from weft.generate.library.fused import Tail, plain_convolution
from weft.generate.library.lt import takes_long
from weft.generate.library.translate import Program
from weft.ir import attrs as a
from weft.ir.declined import Declined
from weft.ir.graph import Graph, NodeId
from weft.ir.types import DType
from weft.kernels.candidate import Problem
from weft.kernels.formats import Format
from weft.kernels.source import LibraryCall, Schedule

if TYPE_CHECKING:
    from weft.device.cuda.facts import GpuFacts
    from weft.generate.library.conv_call import Engines

ENGINES = 3
"""Schedules of one problem."""
_COMPUTE = {DType.F16: "f16", DType.BF16: "bf16", DType.F32: "f32"}


@dataclass(frozen=True, slots=True)
class Match:
    """A problem as one convolution."""

    node: NodeId
    bias: NodeId | None
    residual: NodeId | None
    activation: Activation

    def attrs(self, graph: Graph) -> a.ConvAttrs:
        """Steps, padding, distances."""
        return cast("a.ConvAttrs", graph.nodes[self.node].attrs)


def match_convolution(problem: Problem) -> Match | Declined:
    """A problem as one convolution with what the library does to its result, or why it is none."""
    graph = problem.graph
    made = plain_convolution(graph, _COMPUTE, "convolution of floats", even=False)
    if isinstance(made, Declined):
        return made
    tail = Tail(graph, made, 1)
    name = tail.activation[0]
    if not tail.matched or name not in ("none", "relu") or graph.type_of(graph.outputs[0]) != graph.type_of(made):
        return Declined("what follows the convolution is no bias + residual + relu")
    if tail.residual is not None and _format(problem, tail.residual) is not problem.output_formats[0]:
        return Declined("the residual lies otherwise than the result")
    return Match(made, tail.bias, tail.residual, "relu" if name == "relu" else "")


def engine_schedules(problem: Problem, facts: GpuFacts) -> list[Schedule]:
    """The library's best few engines for a problem, best first; none where it is no contender, or not there."""
    from weft.generate.library.conv_call import engines

    match = match_convolution(problem)
    if isinstance(match, Declined):
        return []
    asked = _asked(problem, match, tf32=facts.tf32)
    if isinstance(asked, Declined) or not is_contender(asked, facts):
        return []
    found = engines()
    if isinstance(found, Declined) or found.gpu != identity(facts.name, facts.capability, facts.sms):
        return []
    return [
        Schedule("library", tuple(sorted([("algorithm", number), ("form", ENGINE_FORM), *x.params().items()])))
        for number, x in enumerate(engines_for(found, asked))
    ]


def engines_for(found: Engines, asked: Convolution) -> list[Engine]:
    """The heuristic's first few for a convolution."""
    with found.lock:
        try:
            offered = found.cudnn.algorithms(asked, ENGINES, workspace=MOST_WORKSPACE)
        except DeviceError:
            return []  # the framework's own call remains
        return [
            Engine(
                asked.dtype,
                asked.activation,
                x.engine,
                ",".join(f"{kind}:{value}" for kind, value in x.knobs),
                found.cudnn.version,
                found.gpu,
                x.workspace,
            )
            for x in offered
        ]


def is_contender(asked: Convolution, facts: GpuFacts) -> bool:
    """Whether a convolution is so large that the library comes near generated kernels.

    With nothing behind it, it is seldom all that a plan wants of a kernel: the framework's own call stands for those.
    """
    if not (asked.bias or asked.residual or asked.activation):
        return False
    size = 4 if asked.dtype in ("f32", "tf32") else 2
    moved = size * sum(math.prod(t) for t in (asked.x, asked.w, asked.y, *([asked.y] if asked.residual else [])))
    return takes_long(asked.flops, asked.dtype, moved, facts)


def engine_call(problem: Problem, schedule: Schedule) -> LibraryCall | Declined:
    """The call by the engine that the schedule names."""
    match = match_convolution(problem)
    if isinstance(match, Declined):
        return match
    given = dict(schedule.params)
    texts = {name: str(given[name]) for name in ("compute", "knobs", "version", "gpu")}
    numbers = {name: int(cast("int", given[name])) for name in ("number", "workspace")}
    chosen = Engine(**texts, **numbers, activation=match.activation)  # type: ignore[arg-type]
    graph = problem.graph
    at, (x, w) = match.attrs(graph), graph.nodes[match.node].inputs
    p = Program(graph)
    last = _format(problem, x) is Format.LAST
    weight = p.call(
        "aten.clone.default", p.value(w), memory_format="format:channels_last" if last else "format:contiguous"
    )
    channels = graph.nodes[match.node].type.shape[1]
    bias = None if match.bias is None else p.call("aten.reshape.default", p.value(match.bias), (channels,))
    residual = None if match.residual is None else p.value(match.residual)
    where = (at.strides, at.pads_lo, at.pads_hi, at.dilations)
    made = p.call(CONVOLUTION, p.value(x), weight, bias, residual, *where, **dict(chosen.keywords))  # type: ignore[arg-type]
    p.bind(graph.outputs[0], made)
    if made.kind != "tmp":
        return Declined("a convolution of constants")
    return replace(p.finish(schedule), out_variant=True)


def _asked(problem: Problem, match: Match, *, tf32: bool) -> Convolution | Declined:
    """What the library is asked for: the same function of the tensors that a call uses."""
    import torch

    from weft.generate.library.conv_call import convolution_of
    from weft.generate.library.execute import TORCH_DTYPE

    graph = problem.graph
    n = graph.nodes[match.node]
    at, (x, w) = match.attrs(graph), n.inputs
    order = _format(problem, x)

    def tensor(shape: tuple[int, ...], format_: Format) -> torch.Tensor:
        return torch.empty_strided(shape, format_.strides(shape), dtype=TORCH_DTYPE[n.type.dtype], device="meta")

    compute = _COMPUTE[n.type.dtype]
    weight = torch.empty(graph.type_of(w).shape, dtype=TORCH_DTYPE[n.type.dtype], device="meta")
    laid = torch.channels_last if order is Format.LAST else torch.contiguous_format
    return convolution_of(
        tensor(graph.type_of(x).shape, order),
        weight.clone(memory_format=laid),
        tensor(n.type.shape, problem.output_formats[0]),
        "tf32" if tf32 and compute == "f32" else compute,
        strides=at.strides,
        pads=(at.pads_lo, at.pads_hi),
        dilations=at.dilations,
        bias=match.bias is not None,
        residual=match.residual is not None,
        activation=match.activation,
    )


def _format(problem: Problem, node: NodeId) -> Format:
    return problem.input_formats[problem.graph.inputs.index(node)]
