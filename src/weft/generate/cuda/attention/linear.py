"""Linear attention as one kernel: out = f((A B) C), where A B sums over many tokens and is small.

    s[p, e] = sum over n of A[p, n] B[e, n],  y[p, n] = sum over e of s[p, e] C[e, n],  out[p, n] = f(y[p, n], y[r, n])

A block owns one head: it reads A, B and C once, keeps them in shared memory as f32, sums tiles of s in slices of the
tokens that meet in a fixed order, and every thread finishes some rows of one token. A, B and C are a function of one
input or of a concatenation of inputs, in any strides; rows of one constant may follow those of A (a denominator).

Source: Cai et al., arXiv:2205.14756 (ReLU linear attention with the row of ones).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from weft.device.cuda.facts import GpuFacts
from weft.generate.contraction.values import Expr, NotStridedError, Reader, View
from weft.generate.cuda.attention.load import each, expression
from weft.generate.cuda.intrinsics.prelude import prelude, storage, store
from weft.generate.cuda.role.role import WRITTEN, DeviceRole, Parameter, RoleSource
from weft.generate.expr.ctype import literal
from weft.generate.expr.elementwise import Value
from weft.generate.expr.integer import Int, behind, summed
from weft.generate.parameters import Parameters
from weft.ir import attrs as a
from weft.ir.declined import Declined
from weft.ir.graph import Graph, NodeId
from weft.ir.prims import Prim
from weft.ir.types import DType
from weft.kernels.candidate import Problem
from weft.kernels.source import Pointer, Schedule

_FLOATS = (DType.F16, DType.BF16, DType.F32)
_MOST_ROWS = 48
_TOKENS = 256
"""Tokens in shared memory at once."""
_IN_FLIGHT = 8
"""Vectors that one thread loads before it stores the first."""
_WORDS = {2: "u16", 4: "u32", 8: "uint2", 16: "uint4"}
_LIMIT = 1 << 31


@dataclass(frozen=True, slots=True)
class Operand:
    """A, B or C: views (*batch, rows, tokens)."""

    name: str
    expr: Expr
    leaf: Expr
    """The one input or choice that `expr` is a function of."""
    rows: int
    constant: tuple[float, ...]
    """Rows of one number each that follow."""


@dataclass(frozen=True, slots=True)
class Linear:
    """Sizes are counts."""

    problem: Problem
    batch: tuple[int, ...]
    p: int
    """Rows of A with those of constants."""
    e: int
    summed: int
    """Tokens of A and B."""
    tokens: int
    """Tokens of C and of the output."""
    rows: int
    """Rows of the output."""
    operands: tuple[Operand, Operand, Operand]
    result: Expr
    """Its product leaves have views (*batch, rows, tokens) of y in row-major order."""
    out: View


def linear(problem: Problem) -> Linear | Declined:
    """The linear attention that a problem is, or why it is none that the template takes."""
    graph = problem.graph
    products = [i for i, n in enumerate(graph.nodes) if n.prim is Prim.MATMUL]
    if len(products) != 2 or len(graph.outputs) != 1:
        return Declined("not two products with one result")
    first, second = products
    if graph.nodes[second].inputs[0] != first:
        return Declined("the left operand of the second product is not the first")
    if any(graph.type_of(i).size >= _LIMIT for i in (*graph.inputs, *graph.outputs)):
        return Declined("a value of 2^31 elements or more")
    try:
        return _matched(problem, first, second)
    except NotStridedError as no:
        return Declined(no.reason)


def _matched(problem: Problem, first: NodeId, second: NodeId) -> Linear:
    graph = problem.graph
    one, two = graph.type_of(first), graph.type_of(second)
    *batch, p, e = one.shape
    out = graph.type_of(graph.outputs[0])
    left, right = graph.nodes[first].inputs
    operands = (left, right, graph.nodes[second].inputs[1])
    if not one.dtype.is_float or one.dtype is DType.F64 or out.dtype not in _FLOATS:
        raise NotStridedError(f"linear attention of {one.dtype.value} stored as {out.dtype.value}")
    if max(p, e) > _MOST_ROWS:
        raise NotStridedError(f"a product of {p} by {e} between two products")
    if any(graph.type_of(i).shape[:-2] != tuple(batch) for i in operands) or two.shape[:-2] != tuple(batch):
        raise NotStridedError("linear attention whose operands are repeated along the batch")
    if out.shape[:-2] != tuple(batch) or out.shape[-1] != two.shape[-1] or not 1 <= out.shape[-2] <= p:
        raise NotStridedError("a result that is no function of rows and tokens")
    reader = Reader(problem, {}, concat=True)
    padded, constant = _rows_of_constants(graph, left)
    a_rows = p - len(constant)
    found = (
        _operand("a", reader.read(padded), a_rows, constant, transposed=False),
        _operand("b", reader.read(right), e, (), transposed=True),
        _operand("c", reader.read(operands[2]), e, (), transposed=False),
    )
    y = Expr("product", DType.F32, View(two.shape, _row_major(two.shape)))
    result = Reader(problem, {second: y}).read(graph.outputs[0])
    for leaf in result.leaves:
        _check_result(leaf, two.shape)
    strides = problem.output_formats[0].strides(out.shape)
    return Linear(
        problem, tuple(batch), p, e, graph.type_of(left).shape[-1], two.shape[-1], out.shape[-2], found, result,
        View(out.shape, strides),
    )  # fmt: skip


def _row_major(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))


def _rows_of_constants(graph: Graph, node: NodeId) -> tuple[NodeId, tuple[float, ...]]:
    """The value in front of a padding that appends rows, and what these hold."""
    n = graph.nodes[node]
    if n.prim is not Prim.PAD:
        return node, ()
    pad = cast("a.PadAttrs", n.attrs)
    rank = n.type.rank
    if pad.mode != "constant" or any(pad.lo) or any(x for d, x in enumerate(pad.hi) if d != rank - 2):
        raise NotStridedError("a padding that does more than append rows")
    return n.inputs[0], (pad.value,) * pad.hi[-2]


def _operand(name: str, x: Expr, rows: int, constant: tuple[float, ...], *, transposed: bool) -> Operand:
    """`transposed`: rows are columns of the graph's operand."""
    if transposed:
        x = x.mapped(lambda v: v.transpose((*range(len(v.shape) - 2), len(v.shape) - 1, len(v.shape) - 2)))
    parts = x.parts()
    choices = [y for y in parts if y.kind == "choice"]
    leaves = choices or [y for y in parts if y.kind == "input"]
    inside = {id(y) for c in choices for y in c.args}
    if len(leaves) != 1 or any(y.view is not None and y is not leaves[0] and id(y) not in inside for y in parts):
        raise NotStridedError("an operand of linear attention that is no function of one value")
    if leaves[0].dtype not in _FLOATS:
        raise NotStridedError(f"an operand of linear attention in {leaves[0].dtype.value}")
    return Operand(name, x, leaves[0], rows, constant)


def _check_result(leaf: Expr, shape: tuple[int, ...]) -> None:
    """A row of y at the same token, of the same head."""
    assert leaf.view is not None
    own = _row_major(shape)
    tokens = shape[-1]
    *batch, row, token = leaf.view.strides
    if leaf.kind != "product":
        raise NotStridedError("another operand behind linear attention")
    same = all(s == o for s, o, n in zip(batch, own, shape, strict=False) if n > 1) and (token == 1 or tokens == 1)
    if not same or row not in (0, tokens) or leaf.view.offset % tokens or leaf.view.offset // tokens >= shape[-2]:
        raise NotStridedError("a result that is no function of rows and tokens")


@dataclass(frozen=True, slots=True)
class LinearAttentionConfig(Parameters):
    """Parameters of the template."""

    threads: int

    def schedule(self) -> Schedule:
        """As a schedule of the cuda generator."""
        return self.named("cuda", template="linear_attention")


def schedules(p: Linear, facts: GpuFacts) -> Sequence[Schedule] | Declined:
    """Numbers of threads worth measuring."""
    fitting = [n for n in (512, 256, 1024, 128) if _shared_bytes(p, n) <= facts.shared_per_block]
    if p.tokens <= 64:
        fitting.sort()
    return [LinearAttentionConfig(n).schedule() for n in fitting] or Declined(
        "linear attention does not fit in shared memory"
    )


def _tile(p: Linear) -> int:
    """Tokens in shared memory at once, a multiple of 4."""
    return min(_TOKENS, -(-max(p.summed, p.tokens) // 4) * 4)


def _pitch(p: Linear) -> int:
    """Floats from row to row: rows that threads read side by side lie in different banks."""
    tile = _tile(p)
    return tile + (4 if tile % 8 == 0 else 0)


def _tiles(p: Linear) -> tuple[int, int]:
    """Parts of 4 rows of s along A and B."""
    return -(-p.p // 4), -(-p.e // 4)


def _slices(p: Linear, threads: int) -> int:
    tp, te = _tiles(p)
    return max(1, min(threads // (tp * te), _tile(p) // 4))


def _sizes(p: Linear, threads: int) -> tuple[int, int, int]:
    """Floats of the operands, of partial sums (in the same place as A and B), and of s."""
    tp, te = _tiles(p)
    partial = _slices(p, threads) * tp * te * 16
    return max((p.p + p.e) * _pitch(p), partial), p.e * _pitch(p), p.p * te * 4


def _shared_bytes(p: Linear, threads: int) -> int:
    return -(-4 * sum(_sizes(p, threads)) // 16) * 16


def roles(p: Linear, schedule: Schedule) -> RoleSource | Declined:
    """The roles of one schedule made by `LinearAttentionConfig.schedule`."""
    threads = LinearAttentionConfig.of(schedule).threads
    tp, te = _tiles(p)
    if threads < tp * te:
        return Declined(f"{threads} threads for {tp * te} parts of a product")
    inputs = sorted({x.index for o in p.operands for x in o.expr.leaves if x.kind == "input"})
    role = DeviceRole(
        threads=threads,
        body="\n".join(_body(p, threads)),
        parameters=(
            *(Parameter(f"in{i}", Pointer("in", i)) for i in inputs),
            Parameter("out0", Pointer("out", 0), WRITTEN),
        ),
        grid=(math.prod(p.batch), 1, 1),
        min_ctas_per_sm=1,
        shared_bytes=_shared_bytes(p, threads),
    )
    return RoleSource(schedule, (prelude(),), (role,), capability=80)


def _body(p: Linear, threads: int) -> list[str]:
    tile, pitch = _tile(p), _pitch(p)
    joint, second, _ = _sizes(p, threads)
    tp, te = _tiles(p)
    slices = _slices(p, threads)
    once = max(p.summed, p.tokens) <= tile
    cells = "float4 x[4], y[4];"
    for name, base, at, step, rows in (("x", "sa", "tp", tp, p.p), ("y", "sb", "te", te, p.e)):
        own = at + Int("i") * step
        row = f"const int r = {own} < {rows} ? {own} : {rows - 1};"
        cells += f"\n{each('i', 4)} {{ {row} {name}[i] = *(const float4*)({base} + r * {pitch} + q * 4); }}"
    dots = "".join(f"acc[i][j] = fmaf(x[i].{f}, y[j].{f}, acc[i][j]);\n" for f in "xyzw")
    lines = [
        "const int t = role.thread(), z = role.block_x();",
        "(void)z;",
        f"float* const sa = (float*)sm, * const sb = sa + {p.p * pitch}, * const sc = sa + {joint};",
        f"float* const ss = sc + {second};",
        *(line for o in p.operands for line in _fill(p, o, threads)),
        f"const int slice = {Int('t') / (tp * te)}, tp = {Int('t') % (tp * te) / te}, te = {Int('t') % te};",
        f"float acc[4][4];\n{each('i', 4)}\n{each('j', 4)} acc[i][j] = 0.0f;",
        "role.pdl_wait(); role.pdl_trigger();",
    ]
    if once:
        lines += ["fill_a(0, sa); fill_b(0, sb); fill_c(0, sc); role.sync();", "{"]
    else:
        lines += [
            f"#pragma unroll 1\nfor (int n0 = 0; n0 < {p.summed}; n0 += {tile}) {{",
            "fill_a(n0, sa); fill_b(n0, sb); role.sync();",
        ]
    lines += [
        f"if (slice < {slices}) for (int q = slice; q < {tile // 4}; q += {slices}) {{",
        cells,
        f"{each('i', 4)}\n{each('j', 4)} {{\n{dots}}}",
        "}\nrole.sync();\n}",
        # partial sums take the place of A and B
        f"if (slice < {slices})\n{each('i', 4)}\n{each('j', 4)}",
        f"sa[slice * {tp * te * 16} + (tp + {Int('i') * tp}) * {te * 4} + te + {Int('j') * te}] = acc[i][j];",
        "role.sync();",
        f"for (int x = t; x < {p.p * te * 4}; x += {threads}) {{ float sum = sa[x];",
        f"for (int y = 1; y < {slices}; ++y) sum += sa[y * {tp * te * 16} + x];",
        f"ss[x] = x % {te * 4} < {p.e} ? sum : 0.0f;\n}}",
    ]
    return [*lines, *_rows(p, threads, once=once)]


def _rows(p: Linear, threads: int, *, once: bool) -> list[str]:
    """The second product, and what follows it."""
    tile, pitch, width = _tile(p), _pitch(p), _tiles(p)[1] * 4
    groups = max(1, min(threads // tile, p.rows))
    lines = []
    if once:
        lines += ["role.sync();", "{ const int n0 = 0; (void)n0;"]
    else:
        lines += [
            f"#pragma unroll 1\nfor (int n0 = 0; n0 < {p.tokens}; n0 += {tile}) {{",
            "role.sync(); fill_c(n0, sc); role.sync();",
        ]
    lines += [
        f"for (int x = t; x < {groups * tile}; x += {threads}) {{ const int at = x % {tile}, n = n0 + at;",
        f"if (n < {p.tokens}) {{ float c[{width}];",
        f"{each('e', width)} c[e] = e < {p.e} ? sc[(e < {p.e} ? e : 0) * {pitch} + at] : 0.0f;",
        "auto product = [&](int row) { float sum = 0.0f;",
        f"{each('e', width // 4)} {{ const float4 w = *(const float4*)(ss + row * {width} + e * 4);",
        "sum = fmaf(w.x, c[4 * e], sum); sum = fmaf(w.y, c[4 * e + 1], sum);",
        "sum = fmaf(w.z, c[4 * e + 2], sum); sum = fmaf(w.w, c[4 * e + 3], sum); }",
        "return sum; };",
    ]
    known: dict[int, Value] = {}
    varying = []
    for i, leaf in enumerate(p.result.leaves):
        assert leaf.view is not None
        row = leaf.view.offset // p.tokens
        known[id(leaf)] = Value(f"y{i}", DType.F32)
        if leaf.view.strides[-2] and p.rows > 1:
            varying.append(f"const float y{i} = product({Int('r') + row});")
        else:
            lines.append(f"const float y{i} = product({row});")
    text, value = expression(p.result, known)
    dtype = p.problem.graph.type_of(p.problem.graph.outputs[0]).dtype
    *_, row_step, step = p.out.strides
    place = summed(_heads(p, p.out), Int("r") * row_step, Int("n") * step)
    lines += [
        f"for (int r = x / {tile}; r < {p.rows}; r += {groups}) {{",
        *varying,
        *text,
        f"{storage(dtype)}* const to = {behind(f'({storage(dtype)}*)out0', place)};",
        store(dtype, "to", value.name),
        "}\n}\n}\n}",
    ]
    return lines


def _heads(p: Linear, view: View) -> Int:
    """Offset of the block's head."""
    place = Int("0")
    inner = 1
    for n, step in reversed(list(zip(p.batch, view.strides, strict=False))):
        place += Int("z") / inner % n * step
        inner *= n
    return place + view.offset


def _sources(leaf: Expr) -> tuple[Expr, ...]:
    return leaf.args[1:] if leaf.kind == "choice" else (leaf,)


def _vector(p: Linear, o: Operand, tokens: int) -> tuple[bool, int]:
    """(vectors lie along tokens, elements of a vector): the longest that all addresses allow."""
    views = [x.view for x in _sources(o.leaf) if x.view is not None]
    for along_tokens in (True, False):
        at = -1 if along_tokens else -2
        count = tokens if along_tokens else o.rows
        if any(v.strides[at] != 1 and count > 1 for v in views):
            continue
        for width in (8, 4, 2, 1):
            if width * o.leaf.dtype.itemsize > 16 or count % width or (along_tokens and _tile(p) % width):
                continue
            others = [s for v in views for d, s in enumerate(v.strides) if d != len(v.strides) + at and v.shape[d] > 1]
            if all(s % width == 0 for s in (*others, *(v.offset for v in views))) and _uniform(o.leaf, at, width):
                return along_tokens, width
    return True, 1


def _uniform(leaf: Expr, at: int, width: int) -> bool:
    """Whether all elements of a vector are in the same part of a concatenation."""
    if leaf.kind != "choice" or width == 1:
        return True
    view = leaf.args[0].view
    assert view is not None
    if view.strides[at] == 0:
        return True
    rest = [s for d, s in enumerate(view.strides) if d != len(view.strides) + at and view.shape[d] > 1]
    return all(x % width == 0 for x in (*rest, view.offset, *leaf.limits))


def _fill(p: Linear, o: Operand, threads: int) -> list[str]:
    """The lambda fill_<name>(n0, to): a tile of tokens as f32; zeros where there is no token."""
    tile, pitch = _tile(p), _pitch(p)
    tokens = p.tokens if o.name == "c" else p.summed
    along, width = _vector(p, o, tokens)
    inner = tile // width if along else o.rows // width
    total, x = o.rows * tile // width, Int("x")
    unroll = min(_IN_FLIGHT, -(-total // threads))
    where = (
        f"r = {x / inner}, n = {'n0' + x % inner * width}"
        if along
        else f"r = {x % inner * width}, n = {'n0' + x / inner}"
    )
    kind, word = storage(o.leaf.dtype), _WORDS[width * o.leaf.dtype.itemsize]
    at = f"const int x = x0 + u * {threads}, {where}; const bool inside = x < {total} && n < {tokens};"
    lines = [
        f"auto fill_{o.name} = [&](int n0, float* to) {{",
        f"for (int x0 = t; x0 < {total}; x0 += {threads * unroll}) {{ {word} raw[{unroll}];",
        f"{each('u', unroll)} {{ {at}",
        f"if (inside) raw[u] = *(const {word}*)({_address(p, o.leaf, kind)});",
        "}",
        f"{each('u', unroll)} {{ {at}",
        f"if (x < {total}) {{ float v[{width}];",
        f"{each('i', width)} v[i] = 0.0f;",
        "if (inside) {",
        *_unpacked(o.leaf.dtype, width),
        f"{each('i', width)} {{",
    ]
    text, value = expression(o.expr, {id(o.leaf): Value("v[i]", o.leaf.dtype)})
    put = f"to[r * {pitch} + n - n0 + i]" if along else f"to[(r + i) * {pitch} + n - n0]"
    lines += [*text, f"v[i] = (float){value.name};", "}\n}", f"{each('i', width)} {put} = v[i];", "}\n}\n}"]
    for row, number in enumerate(o.constant, start=o.rows):
        inside = f"n0 + x < {tokens} ? {literal(float(number), DType.F32)} : 0.0f"
        lines.append(f"for (int x = t; x < {tile}; x += {threads}) to[{row * pitch} + x] = {inside};")
    return [*lines, "};"]


def _address(p: Linear, leaf: Expr, kind: str) -> str:
    """Where element (r, n) of the block's head lies."""

    def place(view: View | None) -> Int:
        assert view is not None
        return summed(_heads(p, view), Int("r") * view.strides[-2], Int("n") * view.strides[-1])

    *others, last = (behind(f"(const {kind}*)in{x.index}", place(x.view)) for x in _sources(leaf))
    text = last
    for limit, other in reversed(list(zip(leaf.limits, others, strict=False))):
        text = f"{place(leaf.args[0].view)} < {limit} ? {other} : ({text})"
    return text


def _unpacked(dtype: DType, width: int) -> list[str]:
    """raw[u] into v."""
    fields = ["raw[u]"] if width * dtype.itemsize <= 4 else [f"raw[u].{f}" for f in "xyzw"]
    if dtype is DType.F32:
        return [f"v[{i}] = __uint_as_float({fields[i]});" for i in range(width)]
    if width == 1:
        return [f"v[0] = w_unpack_{dtype.value}(raw[u]).x;"]
    return [
        f"{{ const float2 h = w_unpack_{dtype.value}({fields[i]}); v[{2 * i}] = h.x; v[{2 * i + 1}] = h.y; }}"
        for i in range(width // 2)
    ]
