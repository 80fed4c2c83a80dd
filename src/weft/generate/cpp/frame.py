"""What stands around the loops of a C++ kernel: inputs and constants as buffers, the threads, the entry."""

from __future__ import annotations

from collections.abc import Sequence

from weft.generate.expr import literal
from weft.generate.expr.ctype import storage_type
from weft.generate.loopnest.memory import Buffer, dense
from weft.generate.loopnest.nest import Nest
from weft.ir.graph import Graph, NodeId
from weft.kernels.candidate import Problem
from weft.kernels.formats import Format

SIGNATURE = "const void* const* inputs, void* const* outputs, void* workspace, const void* const* packed"


def body_nest(entry: str) -> Nest:
    """An empty body of the function that every thread runs."""
    nest = Nest()
    nest.stack[0].head = (
        f"static void {entry}_body(const void* const* inputs, void* const* outputs, char* workspace, "
        "const long tid, const long nt)"
    )
    return nest


def input_buffers(graph: Graph, problem: Problem) -> tuple[dict[NodeId, Buffer], list[str]]:
    """Where inputs lie, and the declarations of their pointers."""
    found: dict[NodeId, Buffer] = {}
    declared = []
    for position, node in enumerate(graph.inputs):
        t = graph.type_of(node)
        kind = storage_type(t.dtype)
        declared.append(f"const {kind}* const __restrict in{position} = (const {kind}*)inputs[{position}];")
        strides = problem.input_formats[position].strides(t.shape)
        found[node] = dense(f"in{position}", t.dtype, t.shape, strides, fixed=True)
    return found, declared


def output_pointer(graph: Graph, position: int) -> str:
    """The declaration of an output's pointer."""
    kind = storage_type(graph.type_of(graph.outputs[position]).dtype)
    return f"{kind}* const __restrict out{position} = ({kind}*)outputs[{position}];"


def constant_buffer(graph: Graph, node: NodeId) -> tuple[Buffer, str]:
    """A constant as a static array: 16-bit ones are written as exact floats."""
    t = graph.type_of(node)
    dtype = t.dtype.accumulator
    numbers = graph.constant(node).reshape(-1).tolist()
    name = f"table{node}"
    body = ", ".join(literal(x, dtype) for x in numbers)
    text = f"alignas(64) static const {storage_type(dtype)} {name}[{len(numbers)}] = {{{body}}};"
    return dense(name, dtype, t.shape, Format.ROW.strides(t.shape), fixed=True), text


def assemble(entry: str, threads: int, header: Sequence[str], nest: Nest, declared: Sequence[str]) -> str:
    """The text of a kernel. `header`: everything before its body."""
    call = f"{entry}_body(inputs, outputs, (char*)workspace, "
    run = (
        f"  {call}0, 1);"
        if threads <= 1
        else (
            f"#pragma omp parallel num_threads((int)w_least(omp_get_max_threads(), {threads}))\n"
            f"  {call}omp_get_thread_num(), omp_get_num_threads());"
        )
    )
    body = nest.stack[0]
    body.items = [*declared, *body.items]
    return "\n".join([*header, *body.lines(), f'extern "C" void {entry}({SIGNATURE}) {{', run, "}", ""])
