"""What follows the sum: an expression of the graph over a few neighbouring results, and the stores of the outputs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from weft.generate.contraction.match import Contraction, Source, Step, StridedLayout, constants_of
from weft.generate.cuda.gemm.common.normed_text import parts_text
from weft.generate.cuda.gemm.common.product import Product, is_weight, offset_of
from weft.generate.cuda.gemm.common.sink import Rounded, Sink, ToGlobal, ToShared
from weft.generate.cuda.intrinsics.approx import FUNCTIONS, may_approximate, times_inverse
from weft.generate.cuda.intrinsics.prelude import load, storage, store
from weft.generate.cuda.role.role import WRITTEN, Parameter
from weft.generate.expr.ctype import c_type, literal
from weft.generate.expr.elementwise import Value, elementwise
from weft.generate.expr.integer import Int, behind, integer
from weft.ir.prims import Prim
from weft.ir.types import DType, to_bits
from weft.kernels.source import Pointer

_GLOBAL = ToGlobal()

_WIDE = {16: "uint4", 8: "uint2", 4: "u32", 2: "u16"}


@dataclass(frozen=True, slots=True)
class Epilogue:
    """How the results of a block become outputs."""

    width: int
    """Neighbouring columns that one thread finishes at once."""
    by_row: bool
    """True: neighbouring threads take neighbouring rows (outputs whose channels lie apart)."""


def plan(p: Product, most: int = 0) -> Epilogue:
    """Widest vectors that the outputs' places in memory allow; `most`: of sums of integers, else 16 bytes of them."""
    layouts = [w for _, w in p.c.outputs]
    if p.n > 1 and layouts[0].channel != 1:
        return Epilogue(1, True)
    sizes = [_dtype(p.c, slot, p.sum_dtype).itemsize for slot, _ in p.c.outputs]
    for width in (8, 4, 2):
        fits = all(
            w.channel == 1 and _aligned(p, w, min(width, 16 // size)) for w, size in zip(layouts, sizes, strict=True)
        )
        if (
            p.n % width == 0
            and fits
            and width <= (8 if p.float8 else most if most and p.integers else 16 // p.sum_dtype.itemsize)
        ):
            return Epilogue(width, False)
    return Epilogue(1, False)


def _dtype(c: Contraction, slot: int, dtype: DType) -> DType:
    return dtype if slot < 0 else c.body[slot].dtype


def _aligned(p: Product, layout: StridedLayout, by: int) -> bool:
    steps = [s for s, n in zip(layout.dims, p.c.dims, strict=True) if n > 1]
    if p.c.groups > 1 or p.c.heads:
        steps.append(layout.group)
    return all(s % by == 0 for s in (*steps, layout.offset))


def scalar(c: Contraction, step: Step) -> Value | None:
    """A leaf that is a constant of one value, as a literal."""
    if step.source is None or step.source.kind != "const" or c.graph is None:
        return None
    data = np.asarray(c.graph.constant(step.source.index))
    if data.size != 1:
        return None
    number = data.reshape(()).item()
    return Value(literal(number, step.dtype), step.dtype, constant=float(number))


def leaves(c: Contraction) -> tuple[tuple[int, Step], ...]:
    """(slot, leaf) of those that are read from memory."""
    return tuple((i, s) for i, s in enumerate(c.body) if s.source is not None and scalar(c, s) is None)


@dataclass(frozen=True, slots=True)
class Arguments:
    """Parameters of the kernel in order; and text of the constants it holds itself."""

    parameters: tuple[Parameter, ...]
    constants: str
    names: Mapping[Source, str]


def arguments(p: Product, packed: bool, work: bool, state: bool) -> Arguments:
    """Every buffer once: inputs that are read, packed weights, outputs, scratch memory."""
    c = p.c
    sources = [c.a, *([] if packed else [c.w]), *(s.source for _, s in leaves(c) if s.source is not None)]
    sources += [Source("input", i) for i in p.norm.inputs()] if p.norm is not None else []
    parameters: list[Parameter] = []
    names: dict[Source, str] = {}
    constants = ""
    for source in dict.fromkeys(sources):
        if source.kind == "input":
            names[source] = f"in{source.index}"
            parameters.append(Parameter(names[source], Pointer("in", source.index)))
        else:
            names[source] = f"kc{source.index}"
            constants += constant_array(c, source.index)
    if packed:
        parameters.append(Parameter("pk", Pointer("packed", 0)))
    places = [p.positions[k] if p.positions else k for k in range(len(c.outputs))]
    parameters += [Parameter(f"out{k}", Pointer("out", at), WRITTEN) for k, at in enumerate(places)]
    further = (
        [("means", p.partial_stats.mean), ("spreads", p.partial_stats.spread)] if p.partial_stats is not None else []
    )
    further += [("normed", p.norm.stored)] if p.norm is not None and p.norm.stored >= 0 else []
    parameters += [Parameter(name, Pointer("out", at), WRITTEN) for name, at in further]
    if p.column_sums:
        parameters.append(Parameter("sums", Pointer("out", len(c.outputs)), WRITTEN))
    parameters += [
        Parameter(name, Pointer(name, 0), WRITTEN) for wanted, name in ((work, "work"), (state, "state")) if wanted
    ]
    return Arguments(tuple(parameters), constants, names)


def constant_array(c: Contraction, node: int, prefix: str = "kc") -> str:
    """A constant of the graph as an array in the text, bits exactly as in memory."""
    assert c.graph is not None
    dtype = c.graph.type_of(node).dtype
    data = np.ravel(np.asarray(constants_of(c)[node]))
    if dtype.is_emulated:
        body = ",".join(map(str, to_bits(data, dtype).tolist()))
    elif dtype is DType.F16:
        body = ",".join(map(str, data.view(np.uint16).tolist()))
    elif dtype is DType.BOOL:
        body = ",".join(str(int(x)) for x in data)
    else:
        body = ",".join(literal(x, dtype) for x in data.tolist())
    return f"__device__ __align__(16) const {storage(dtype)} {prefix}{node}[] = {{{body}}};\n"


def _place(p: Product, layout: StridedLayout) -> Int:
    """Element offset of (m, n) in a block whose group and batch are g and b."""
    c, n = p.c, Int("n")
    place = offset_of(layout, c.dims, p.rows, "m") + offset_of(layout, c.dims, p.batch, "b")
    if c.groups > 1:
        place += Int("g") * layout.group
    place += layout.offset
    size = c.heads
    if size and layout.group != size * layout.channel:
        return place + n / size * layout.group + n % size * layout.channel
    return place if p.n == 1 else place + n * layout.channel


def wide_load(temporary: str, dtype: DType, width: int, address: Int | str, to: str) -> list[str]:
    """Statements: `width` neighbouring elements into the array `to`; `temporary` is a free name."""
    size = dtype.itemsize
    per = min(width, 16 // size)
    if dtype in (DType.F16, DType.BF16) and width >= 2:
        words = [f"{temporary}.{f}" for f in "xyzw"[: width // 2]] if width > 2 else [temporary]
        lines = [f"const {_WIDE[per * size]} {temporary} = *(const {_WIDE[per * size]}*)({address});"]
        for i, word in enumerate(words):
            lines.append(
                f"{{ const float2 h = w_unpack_{dtype.value}({word}); {to}[{2 * i}] = h.x; {to}[{2 * i + 1}] = h.y; }}"
            )
        return lines
    if dtype.is_float8 and width >= 2:
        return [f"w_ldv((const w_{dtype.value}*)({address}), {to});"]
    if dtype is DType.F32 and width >= 2:
        lines = []
        kind = "float4" if per == 4 else "float2"
        for i in range(0, width, per):
            lines.append(f"{{ const {kind} h = *(const {kind}*)({integer(address) + i});")
            lines += [f"{to}[{i + j}] = h.{f};" for j, f in enumerate("xyzw"[:per])]
            lines.append("}")
        return lines
    if dtype is DType.I32 and width % 4 == 0:
        return [
            f"{{ const uint4 h = *(const uint4*)({integer(address) + i}); "
            + " ".join(f"{to}[{i + j}] = (int)h.{f};" for j, f in enumerate("xyzw"))
            + " }"
            for i in range(0, width, 4)
        ]
    if dtype is DType.BOOL and width in (4, 8):
        words = [temporary] if width == 4 else [f"{temporary}.x", f"{temporary}.y"]
        lines = [f"const {_WIDE[width]} {temporary} = *(const {_WIDE[width]}*)({address});"]
        return lines + [f"{to}[{i}] = ({words[i // 4]} >> {i % 4 * 8} & 1u) != 0u;" for i in range(width)]
    return [f"{to}[{i}] = {load(dtype, str(integer(address) + i))};" for i in range(width)]


def stored_words(words: Sequence[str], address: Int | str) -> str:
    """Statement: one, two or four words to memory at once."""
    if len(words) == 1:
        return f"*(u32*)({address}) = {words[0]};"
    return f"*(uint{len(words)}*)({address}) = make_uint{len(words)}({', '.join(words)});"


def wide_store(values: Sequence[str], dtype: DType, address: Int | str) -> list[str]:
    """Statements: `values` to neighbouring elements from `address` on, rounded once."""
    width = len(values)
    if dtype in (DType.F16, DType.BF16) and width >= 2:
        pairs = [f"w_narrow2_{dtype.value}({values[i]}, {values[i + 1]})" for i in range(0, width, 2)]
        return [stored_words(pairs, address)]
    if dtype is DType.F32 and width % 4 == 0:
        return [
            f"*(float4*)({integer(address) + i}) = make_float4({', '.join(values[i : i + 4])});"
            for i in range(0, width, 4)
        ]
    if dtype is DType.F32 and width == 2:
        return [f"*(float2*)({address}) = make_float2({values[0]}, {values[1]});"]
    if dtype.is_float8 and width >= 2:
        return [f"{{ const float q[{width}] = {{{', '.join(values)}}}; w_stv((w_{dtype.value}*)({address}), q); }}"]
    if dtype in (DType.I8, DType.U8) and width == 8:
        low, high = (
            " | ".join(f"(u32)(unsigned char)({x}){f' << {8 * i}' if i else ''}" for i, x in enumerate(half))
            for half in (values[:4], values[4:])
        )
        return [f"*(uint2*)({address}) = make_uint2({low}, {high});"]
    if dtype is DType.I32 and width % 4 == 0:
        return [
            f"*(uint4*)({integer(address) + i}) = make_uint4({', '.join(f'(u32)({x})' for x in values[i : i + 4])});"
            for i in range(0, width, 4)
        ]
    if dtype in (DType.I8, DType.U8) and width == 4:
        word = " | ".join(f"(u32)(unsigned char)({x}){f' << {8 * i}' if i else ''}" for i, x in enumerate(values))
        return [f"*(u32*)({address}) = {word};"]
    return [store(dtype, str(integer(address) + i), value) for i, value in enumerate(values)]


def prefetch(p: Product, names: Mapping[Source, str], columns: int, first: str = "n0") -> list[str]:
    """Statements that ask for what the end of a block reads of constant vectors along its columns `first`...

    They belong before the wait for predecessors: in a network, weights were last used a whole inference ago.
    """
    c = p.c
    lines = []
    for _, step in leaves(c):
        layout, source = step.layout, step.source
        assert layout is not None
        assert source is not None
        constant = source.kind == "input" and is_weight(c, source.index)
        if not constant or any(layout.dims) or layout.channel != 1 or p.n == 1 or (c.heads and layout.group != c.heads):
            continue
        per = 128 // step.dtype.itemsize
        count = -(-min(columns, p.n) // per) + 1
        base = f"(const {storage(step.dtype)}*){names[source]}"
        last = f"n < {p.n} ? n : {p.n - 1}"
        ask = f"w_prefetch({Int(base) + layout.offset + Int('g') * layout.group + Int(last)});"
        lines.append(f"if (t < {count}) {{ const int n = {first} + t * {per}; {ask} }}")
    return lines


def _approximate(c: Contraction) -> bool:
    """Whether the machine's own functions are exact enough; see `rough`."""
    return c.graph is not None and may_approximate(c.graph)


def _approximate_text(prim: Prim, operands: Sequence[Value]) -> str | None:
    """Text of a function of f32 by the machine's own; None where it has none that is shorter."""
    if prim not in FUNCTIONS:
        return None
    divisor = operands[-1].constant
    if divisor is None:
        return FUNCTIONS[prim].format(*(x.name for x in operands))
    return times_inverse(operands[0].name, divisor) if prim is Prim.DIV else None


def exact(c: Contraction) -> tuple[int, int, int]:
    """Steps that round correctly at a price: divisions by constants, other divisions of a value, other functions.

    Divisions by powers of two are none, and there are none where the machine's own functions are exact enough.
    """
    clipped, divided, others = 0, 0, 0
    for step in () if _approximate(c) else c.body:
        if step.prim not in FUNCTIONS or c_type(step.dtype) != "w_f32":
            continue
        first, last = (scalar(c, c.body[s]) if s >= 0 else None for s in (step.args[0], step.args[-1]))
        if step.prim is not Prim.DIV:
            others += 1
        elif last is not None:
            clipped += abs(math.frexp(last.constant or 0.0)[0]) != 0.5
        else:
            divided += first is None
    return clipped, divided, others


def _shifted_erf(c: Contraction) -> dict[int, int]:
    """Slot of 1 + erf(x) -> slot of erf(x), where nothing else reads that: without the 1 a small result errs more."""
    found: dict[int, int] = {}
    for slot, step in enumerate(c.body):
        if step.prim is Prim.ADD and c_type(step.dtype) == "w_f32":
            for erf, one in (step.args, step.args[::-1]):
                number = scalar(c, c.body[one]) if one >= 0 else None
                if erf >= 0 and c.body[erf].prim is Prim.ERF and number is not None and number.constant == 1.0:
                    found[slot] = erf
    read = [s for i, step in enumerate(c.body) if i not in found for s in step.args] + [s for s, _ in c.outputs]
    return {slot: erf for slot, erf in found.items() if erf not in read}


def _shares(c: Contraction) -> frozenset[int]:
    """Slots of quotients with a divisor of 1 + an exponential: at least 1, and where it is infinite they are zero."""

    def one_plus(slot: int) -> bool:
        step = c.body[slot]
        if step.prim is not Prim.ADD or c_type(step.dtype) != "w_f32" or min(step.args) < 0:
            return False
        ones = [number is not None and number.constant == 1.0 for number in (scalar(c, c.body[s]) for s in step.args)]
        others = [c.body[s].prim for s, one in zip(step.args, ones, strict=True) if not one]
        return others == [Prim.EXP]

    return frozenset(
        slot
        for slot, step in enumerate(c.body)
        if step.prim in (Prim.DIV, Prim.RECIPROCAL) and step.args[-1] >= 0 and one_plus(step.args[-1])
    )


def streamed(p: Product, *, by_row: bool) -> list[int]:
    """Slots of operands as wide as the product's that are read in pieces of 16 bytes.

    Either they differ by row (residuals) or they do not (biases).
    """
    found = []
    for slot, step in leaves(p.c):
        layout = step.layout
        assert layout is not None
        moves = any(s for s, n in zip(layout.dims, p.c.dims, strict=True) if n > 1)
        if (
            moves == by_row
            and layout.channel == 1
            and step.dtype.itemsize * p.vector == 16
            and plan(p, p.vector).width == p.vector
            and _aligned(p, layout, p.vector)
        ):
            found.append(slot)
    return found


def address(p: Product, names: Mapping[Source, str], slot: int) -> str:
    """C text of the address of a leaf's element at row m and column n of group g and batch b."""
    step = p.c.body[slot]
    assert step.layout is not None
    assert step.source is not None
    return behind(f"(const {storage(step.dtype)}*){names[step.source]}", _place(p, step.layout))


def _sum(p: Product, acc: str, i: int) -> str:
    """A sum as a value of its type; integers travel as bits of floats."""
    return f"__float_as_int({acc}[{i}])" if p.integers else f"{acc}[{i}]"


def body(
    p: Product,
    names: Mapping[Source, str],
    width: int,
    acc: str = "acc",
    prefix: str = "",
    given: Mapping[int, str] | None = None,
    later: str = "",
    sink: Sink = _GLOBAL,
) -> list[str]:
    """Statements that finish `width` results `acc[0..]` at row m and columns n.. of group g and batch b.

    `given`: C text of the address of vectors that were read earlier, by slot. `later`: see `parts_text`.
    `sink`: where results go; all but global memory is for one output.
    """
    c = p.c
    lines: list[str] = []
    values: dict[int, list[Value]] = {}
    for slot, step in leaves(c):
        assert step.layout is not None
        name, kind = f"{prefix}x{slot}", storage(step.dtype)
        layout = step.layout
        where = (given or {}).get(slot) or address(p, names, slot)
        lines.append(f"const {kind}* const {name}p = {where};")
        if not layout.channel or p.n == 1 or width == 1:
            lines.append(f"const {c_type(step.dtype)} {name} = {load(step.dtype, name + 'p')};")
            values[slot] = [Value(name, step.dtype)] * width
            continue
        lines.append(f"{c_type(step.dtype)} {name}[{width}];")
        per = min(width, 16 // step.dtype.itemsize)
        if layout.channel == 1 and _aligned(p, layout, per):
            lines += wide_load(f"{name}w", step.dtype, width, f"{name}p", name)
        else:
            lines += [
                f"{name}[{i}] = {load(step.dtype, str(Int(f'{name}p') + i * layout.channel))};" for i in range(width)
            ]
        values[slot] = [Value(f"{name}[{i}]", step.dtype) for i in range(width)]
    approximate = _approximate(c)
    shifted = _shifted_erf(c) if approximate else {}
    shares = _shares(c) if approximate else frozenset()
    for slot, step in enumerate(c.body):
        if slot in values or slot in shifted.values():
            continue
        number = scalar(c, step)
        if number is not None:
            values[slot] = [number] * width
            continue
        found: list[Value] = []
        args = c.body[shifted[slot]].args if slot in shifted else step.args
        for i in range(width):
            operands = [Value(_sum(p, acc, i), p.sum_dtype) if s < 0 else values[s][i] for s in args]
            if slot in shifted:
                text = f"w_rough_one_plus_erf({operands[0].name})"
            elif slot in shares:
                text = f"w_rough_share({operands[0].name if len(operands) > 1 else '1.0f'}, {operands[-1].name})"
            else:
                short = (
                    _approximate_text(step.prim, operands) if approximate and c_type(step.dtype) == "w_f32" else None
                )
                text = short or elementwise(step.prim, operands, step.dtype)[0]
            value = Value(f"{prefix}e{slot}_{i}", step.dtype)
            lines.append(f"const {value.c_type} {value.name} = {text};")
            found.append(value)
        values[slot] = found
    for k, (slot, layout) in enumerate(c.outputs):
        dtype = _dtype(c, slot, p.sum_dtype)
        kind = storage(dtype)
        to = f"({sink.address})" if isinstance(sink, ToShared) else behind(f"out{k}", _place(p, layout))
        lines.append(f"{kind}* const {prefix}y{k} = ({kind}*){to};")
        names_of = [_sum(p, acc, i) if slot < 0 else values[slot][i].name for i in range(width)]
        if isinstance(sink, Rounded):
            lines.append(stored_words(sink.words, f"{prefix}y{k}"))
        else:
            lines += wide_store(names_of, dtype, f"{prefix}y{k}")
        if p.column_sums and k == 0:
            lines += [f"total[{i}] += {name};" for i, name in enumerate(names_of)]
        if p.partial_stats is not None and k == 0:
            lines += parts_text(dtype, names_of, p.n, prefix, later)
    return lines
