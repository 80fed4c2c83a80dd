"""An optimizer's update behind the gradient of an embedding table, as text: what is read, computed and written.

Its operands lie in memory as the table does. None is read through the read-only cache or said to be apart from results,
which may lie in the same memory.
"""

from __future__ import annotations

from collections.abc import Iterator

from weft.generate.cuda.embedding_gradient.match import EmbeddingGradient, Update
from weft.generate.cuda.intrinsics.prelude import load, storage
from weft.generate.cuda.intrinsics.vectors import kind_of, packed, unpacked
from weft.generate.cuda.role.role import WRITTEN, Parameter
from weft.generate.expr.ctype import c_type, literal
from weft.generate.expr.elementwise import Value, elementwise
from weft.ir.types import DType
from weft.kernels.source import Pointer

_ALIASED = "const void*", "void*"
"""Types of pointers to what is read and written, where both may be the same."""


def parameters(m: EmbeddingGradient) -> tuple[Parameter, ...]:
    """What an update reads beside the gradient, and the outputs."""
    if m.update is None:
        return (Parameter("out0", Pointer("out", 0), WRITTEN),)
    read, written = _ALIASED
    operands = (x for x in (*m.update.tables, *m.update.scalars) if x.position != m.dy)
    return (
        *(Parameter(f"in{x.position}", Pointer("in", x.position), read) for x in operands),
        *(Parameter(f"out{k}", Pointer("out", k), written) for k in range(len(m.update.results))),
    )


def aliases(m: EmbeddingGradient) -> tuple[tuple[int, int], ...]:
    """(input, output) that may lie in the same memory: elements as large, in the same places, of the table's shape."""
    if m.update is None:
        return ()
    tables = [x for x in m.update.tables if x.position != m.dy]
    return tuple(
        (x.position, k)
        for x in tables
        for k, result in enumerate(m.update.results)
        if x.dtype.itemsize == result.dtype.itemsize
    )


def scalars(u: Update) -> list[str]:
    """Statements: those of one element into registers."""
    return [
        f"const {c_type(x.dtype)} s{x.position} = {load(x.dtype, f'(const {storage(x.dtype)}*)in{x.position}')};"
        for x in u.scalars
    ]


def declared(u: Update, width: int, count: int, name: str) -> list[str]:
    """Declarations: `count` vectors of each operand in registers."""
    return [f"{kind_of(x.dtype, width)} {name}{x.position}[{count}];" for x in u.tables]


def asked(u: Update, width: int, count: int, name: str, step: str, place: str, there: str) -> list[str]:
    """Statements: such vectors are read, vector `v` from `place` + `step` on."""
    lines = []
    for x in u.tables:
        kind = kind_of(x.dtype, width)
        lines += [
            "#pragma unroll",
            f"for (int v = 0; v < {count}; ++v)",
            f"w_read_if({name}{x.position}[v], (const {kind}*)in{x.position} + {place} + {step}, {there});",
        ]
    return lines


def taken(u: Update, width: int, count: int, name: str, source: str) -> list[str]:
    """Statements: vectors `name` are those that were read as `source`."""
    lines = declared(u, width, count, name)
    for x in u.tables:
        copied = f"{name}{x.position}[v] = {source}{x.position}[v];"
        lines += ["#pragma unroll", f"for (int v = 0; v < {count}; ++v) {copied}"]
    return lines


def stored(u: Update, width: int, place: str) -> list[str]:
    """Statements: the results of the sums `f` and of vector `v` of each operand, as vectors at `place`."""
    every = range(len(u.results))
    lines = []
    for x in u.tables:
        lines += [f"float t{x.position}[{width}];", *unpacked(x.dtype, width, f"y{x.position}[v]", f"t{x.position}")]
    return [
        *lines,
        f"float {', '.join(f'r{k}[{width}]' for k in every)};",
        "#pragma unroll",
        f"for (int e = 0; e < {width}; ++e) {{",
        *_computed(u),
        "}",
        *(
            f"(({kind_of(x.dtype, width)}*)out{k})[{place}] = {packed(x.dtype, width, f'r{k}', 0)};"
            for k, x in enumerate(u.results)
        ),
    ]


def _computed(u: Update) -> Iterator[str]:
    """Statements of one element `e`: rounding is as in kernels of the call and of the update, one behind the other."""
    values: dict[int, Value] = {}
    for k, result in enumerate(u.results):
        for x in result.parts():
            if id(x) in values:
                continue
            if x.kind == "number":
                number = bool(x.number) if x.dtype is DType.BOOL else x.number
                values[id(x)] = Value(literal(number, x.dtype), x.dtype, constant=float(x.number))
            elif x.kind == "product":
                rounded = "f[e]" if x.dtype is DType.F32 else f"w_round_{x.dtype.value}(f[e])"
                values[id(x)] = Value(rounded, x.dtype)
            elif x.kind == "input":
                table = any(x.index == t.position for t in u.tables)
                values[id(x)] = Value(f"t{x.index}[e]" if table else f"s{x.index}", x.dtype)
            else:
                text, _ = elementwise(x.prim, [values[id(y)] for y in x.args], x.dtype)
                name = f"e{len(values)}"
                values[id(x)] = Value(name, x.dtype)
                yield f"const {c_type(x.dtype)} {name} = {text};"
        yield f"r{k}[e] = {values[id(result)].name};"
