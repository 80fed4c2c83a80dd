"""What the whole model should give: inputs to judge and time it on, and the outputs they must lead to."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType

import torch

from weft.errors import RefusedError
from weft.generate.library.execute import BoundCall, plain_math
from weft.generate.library.translate import Program
from weft.ir.attrs import OpaqueAttrs
from weft.ir.declined import Declined
from weft.ir.graph import Graph
from weft.ir.prims import Prim
from weft.ir.types import Array, DType
from weft.kernels.source import Schedule
from weft.pipeline.deadline import OutOfTime
from weft.pipeline.finish import Expected, as_array
from weft.runtime.executable import to_torch
from weft.tune.inputs import Domain, InputSet, draw
from weft.tune.oracle import Mode, evaluate

OWN = "against the framework's own result: there was no time for float64"
PLAIN = "against its primitives one by one: there was no time for float64"
NO_INTEGERS: Mapping[int, Array] = MappingProxyType({})


def example_inputs(graph: Graph, seed: int, integers: Mapping[int, Array] = NO_INTEGERS) -> list[torch.Tensor]:
    """Zero-mean normal values; integers that are used as indices stay in range. `integers` are taken as they are."""
    found = draw(graph, InputSet.NORMAL, Domain.ZERO_MEAN, seed=seed)
    for k, array in integers.items():
        found[k] = torch.tensor(array, dtype=found[k].dtype).reshape(found[k].shape)
    return found


SPREAD = 2
"""Rows of other inputs are larger or smaller by powers of two, up to this one."""


def other_inputs(
    graph: Graph, inputs: Sequence[torch.Tensor], seed: int, held: Collection[int] = ()
) -> list[torch.Tensor] | None:
    """Floats of another draw, in which the rows along the first axis that has several differ by their magnitude.

    What is no float stays, as it may be an index, and so do inputs that are `held`. None: nothing is left to differ.
    """
    drawn = draw(graph, InputSet.NORMAL, Domain.ZERO_MEAN, seed=seed + 1)
    found = list(inputs)
    for k, (x, y) in enumerate(zip(inputs, drawn, strict=True)):
        if k in held or not x.is_floating_point() or not x.numel():
            continue
        if y.element_size() > 1:  # 8-bit floats have no room
            axis = next((d for d, n in enumerate(y.shape) if n > 1), 0)
            rows = [n if d == axis else 1 for d, n in enumerate(y.shape)]
            g = torch.Generator().manual_seed(seed + k)
            y *= torch.exp2(torch.randint(-SPREAD, SPREAD + 1, rows, generator=g)).to(y.dtype)
        found[k] = y.to(x.device)
    return None if all(x is y for x, y in zip(found, inputs, strict=True)) else found


def outputs(
    graph: Graph,
    inputs: Sequence[torch.Tensor],
    eager: Callable[..., Sequence[torch.Tensor]] | None,
    *,
    allow_tf32: bool = False,
) -> Expected:
    """The graph as it was imported (before any clean-up), in float64 and in its own types.

    `allow_tf32`: on a GPU its products of f32 may round their operands to TF32.

    The framework's own result stands in for float64 where an operator has no meaning outside it, or where the device
    has no memory for float64.
    """
    with torch.no_grad():
        try:
            plain = kept(primitive_by_primitive(graph, inputs, allow_tf32=allow_tf32))
        except RefusedError as error:
            raise _placed(error, graph) from error
        return _precise(graph, inputs, plain, eager, lambda: None)


def outputs_in_time(
    graph: Graph,
    inputs: Sequence[torch.Tensor],
    eager: Callable[..., Sequence[torch.Tensor]] | None,
    *,
    allow_tf32: bool = False,
    stop: Callable[[], bool],
    precise: bool,
) -> Expected | None:
    """`outputs` where there is time for that, and `precise` asks for it.

    Once `stop` says so, between two primitives, the framework's own result stands for float64, else that of the
    primitives, and either for the other. None: there is not even that.
    """
    check = _raising(stop)
    with torch.no_grad():
        plain: list[Array | torch.Tensor] = []
        try:
            plain = kept(primitive_by_primitive(graph, inputs, allow_tf32=allow_tf32, check=check))
            if precise:
                return _precise(graph, inputs, plain, eager, check)
        except RefusedError as error:
            raise _placed(error, graph) from error
        except OutOfTime:
            pass  # what is known by now must do
        try:
            own = kept(eager(*inputs)) if eager is not None else plain
        except (IndexError, RuntimeError, OutOfTime):
            own = plain
        if not own:
            return None
        return Expected(own, plain or own, PLAIN if own is plain else OWN)


def _raising(stop: Callable[[], bool]) -> Callable[[], None]:
    def check() -> None:
        if stop():
            raise OutOfTime

    return check


def _precise(
    graph: Graph,
    inputs: Sequence[torch.Tensor],
    plain: Sequence[Array | torch.Tensor],
    eager: Callable[..., Sequence[torch.Tensor]] | None,
    check: Callable[[], None],
) -> Expected:
    device = inputs[0].device if inputs else "cpu"
    try:
        found = evaluate(graph, list(inputs), Mode.PRECISE, seed=0, device=device, calls=True, check=check)
    except torch.OutOfMemoryError:
        found = Declined("no memory for float64")
    if not isinstance(found, Declined):
        return Expected(kept(found.outputs), plain)
    try:
        return Expected(kept(eager(*inputs)) if eager is not None else plain, plain)
    except (IndexError, RuntimeError):  # the framework cannot run it, or refuses drawn indices
        return Expected(plain, plain)


LARGE, KEPT_SHARE = 1 << 24, 0.1
"""Bytes of outputs from which on they stay on a GPU, and the share of its free memory that they may take there."""


def kept(outputs: Sequence[torch.Tensor]) -> list[Array | torch.Tensor]:
    """Outputs to compare with: on the host, but copies on the GPU where they are many bytes and there is room."""
    size = sum(x.nbytes for x in outputs)
    on_gpu = size >= LARGE and all(x.is_cuda for x in outputs)
    if not on_gpu or size > KEPT_SHARE * torch.cuda.mem_get_info(outputs[0].device)[0]:
        return [as_array(x) for x in outputs]
    try:
        return [x.detach().clone() for x in outputs]  # what runs again may write where these lie
    except torch.OutOfMemoryError:
        return [as_array(x) for x in outputs]


def _placed(error: RefusedError, graph: Graph) -> RefusedError:
    """The error with the operator's place in the model."""
    for node in graph.nodes:
        if isinstance(node.attrs, OpaqueAttrs) and node.attrs.payload == error.payload and node.origin >= 0:
            return RefusedError(
                where=graph.origins[node.origin].source, problem=str(error.details["problem"]), payload=error.payload
            )
    return error


def primitive_by_primitive(
    graph: Graph,
    inputs: Sequence[torch.Tensor],
    *,
    allow_tf32: bool = False,
    check: Callable[[], None] = lambda: None,
) -> list[torch.Tensor]:
    """Every primitive of the graph as its own library call, in its own types. `check` is called before each."""
    program = Program(graph)
    device = inputs[0].device if inputs else torch.device("cpu")
    weights: dict[int, torch.Tensor] = {}
    for node, n in enumerate(graph.nodes):
        if n.prim is Prim.CONSTANT:
            position = len(graph.inputs) + len(weights)
            program.bind_weight(node, position)
            weights[position] = to_torch(graph.constant(node), n.type.dtype).to(device)
    call = program.finish(Schedule("library", (("form", "primitives"),)))
    with plain_math(allow_tf32=allow_tf32):
        return BoundCall(call, weights, device=device).run(list(inputs), check=check)


def working_dtype(graph: Graph) -> DType:
    """The lowest floating type that the model computes in: it decides the tolerance."""
    order = (DType.BF16, DType.F16, DType.F32, DType.F64)
    used = {n.type.dtype for n in graph.nodes}
    if any(d.is_float8 for d in used):
        return DType.BF16  # a value that is rounded to 8 bits may fall either way
    return next((d for d in order if d in used), DType.F32)
