"""What a kernel of layers reads from memory beside x: columns beside a value, and values that a step takes in.

They are read where they are needed, in the order in which a lane holds its columns: a second input costs the registers
of one product and nothing before. Their lines come into the L2 cache when a tile begins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from weft.generate.cuda.gemm.common.epilogue import wide_load
from weft.generate.cuda.intrinsics.prelude import load, storage
from weft.generate.cuda.mlp.image import vector_width, vector_width_beside
from weft.generate.cuda.mlp.match import Chain, End, InputMatrix, Layer, padded
from weft.generate.cuda.role.role import WRITTEN, Parameter
from weft.generate.expr.ctype import c_type
from weft.generate.expr.elementwise import Value, elementwise
from weft.generate.expr.integer import Int, behind, summed
from weft.ir.graph import NodeId
from weft.ir.prims import Prim
from weft.ir.types import DType
from weft.kernels.source import Pointer

PERIODIC = {Prim.SIN: "w_mlp_sin({0})", Prim.COS: "w_mlp_cos({0})"}
_WORDS = {8: "uint4", 4: "uint2", 2: "u32"}
Operand = Callable[[NodeId, int, dict[NodeId, list[Value]]], Value]
"""(node, which of two columns, known values) -> its value."""


def each(name: str, count: int) -> str:
    """Head of an unrolled loop."""
    return f"#pragma unroll\nfor (int {name} = 0; {name} < {count}; ++{name})"


def parameters(p: Chain) -> tuple[Parameter, ...]:
    """What a kernel reads besides weights, the image, what it stores."""
    inputs = (Parameter(f"in{i}", Pointer("in", at)) for i, at in enumerate(p.memory))
    stored = (Parameter(f"out{i}", Pointer("out", i), WRITTEN) for i in range(len(p.graph.outputs)))
    return (*inputs, Parameter("pk", Pointer("packed", 0)), *stored)


def neighbours_at(p: Chain, end: End, written: int) -> int:
    """Neighbouring columns of a lane that are stored at once; `written`: those behind the last product."""
    if end.part == len(p.layers):
        return written
    return 1 if any(x % 2 for x in (p.width(end.node), end.step, end.offset)) else 2


def place(p: Chain, end: End, plain: str) -> str:
    """C text: where row r of a stored value begins; `plain` where it is the only one."""
    if len(p.ends) == 1:
        return plain
    base = f"({storage(p.graph.type_of(end.node).dtype)}*)out{end.index}"
    return str(summed(base, Int("(u64)r") * end.step, end.offset))


def start(p: Chain, matrix: InputMatrix, row: str) -> Int:
    """C text: where a row of a matrix in memory begins."""
    base = f"(const {storage(matrix.dtype)}*)in{p.memory.index(matrix.index)}"
    return summed(base, Int(f"(u64){Int(row).tight}") * matrix.steps[0], matrix.offset)


def row_of(p: Chain, m: str, tall: int) -> str:
    """C text: row `half` of a lane in tile m of `tall` rows, or the last one."""
    row = summed("row0", Int(m) * tall, Int("half") * 8, "g")
    return f"{row} < {p.rows} ? {row} : {p.rows - 1}"


def near(p: Chain, tiles: int, tall: int) -> list[str]:
    """Statements: what is read later of this tile's rows comes into the L2 cache."""
    early = set(p.layers[0].beside) | set(p.read(1))
    lines = []
    for node, matrix in p.inputs.items():
        size = matrix.dtype.itemsize
        if node in (p.x, *early) or matrix.index == p.inputs[p.x].index or matrix.steps[0] == 0:
            continue
        span = (15 * matrix.steps[0] + 1 + (matrix.width - 1) * matrix.steps[1]) * size
        lines += [
            f"{each('m', tiles)} {{ const int near0 = row0 + m * {tall}; if (near0 + 16 <= {p.rows})",
            f"for (int i = lane; i < {-(-span // 128)}; i += 32)",
            f"w_prefetch((const char*)({start(p, matrix, 'near0')}) + i * 128); }}",
        ]
    return lines


def name_of(layer: Layer, node: NodeId) -> str:
    """The array of what stands beside other values in front of a product."""
    return f"s{layer.node}_{node}"


def operands_of(p: Chain, layer: Layer, tiles: int, tall: int, operand: Operand) -> list[str]:
    """Statements: the arrays of a layer's `beside`, one set of fragments each."""
    lines = []
    for node in dict.fromkeys(layer.beside):
        name = name_of(layer, node)
        lines.append(f"u32 {name}[{tiles}][{padded(p.width(node)) // 16}][4];")
        place = f"{name}[m]"
        lines += [f"{each('m', tiles)}", *fragments(p, node, row_of(p, "m", tall), place, operand)]
    return lines


def word_of(array: str, chunk: Int, first: int = 0) -> str:
    """C text: the word of row `half` of a lane in a chunk of 8 columns, in fragments of 16 from number `first` on."""
    return f"{array}[{first + chunk / 2}][{chunk % 2 * 2 + 'half'}]"


def fragments(p: Chain, node: NodeId, row: str, array: str, operand: Operand, first: int = 0) -> list[str]:
    """Statements: what a value is made of from memory into the fragments of an array, from number `first` on."""
    width, dtype = p.width(node), p.dtype
    operands = {p.value(o) for s in p.before[node] for o in p.graph.nodes[s].inputs}
    leaves = [v for v in p.inputs if v == node or v in operands]
    v = vector_width_beside(p, node)
    group, chunks = max(1, v // 2), padded(width) // 8
    lines = [f"{each('half', 2)} {{", f"const int r = {row}; (void)r;"]
    for leaf in leaves:
        matrix = p.inputs[leaf]
        lines.append(f"const {storage(matrix.dtype)}* const f{leaf} = {start(p, matrix, 'r')};")
    lines.append(f"{each('c', chunks // group)} {{")
    at, partial = Int("c") * (8 * group) + Int("q") * (2 * group), group == 1 and width % 16 != 0
    if leaves == [node] and p.inputs[node].dtype is dtype and v > 1:
        guard = f"if ({at} < {width}) " if partial else ""
        lines.append(f"{_WORDS[v]} w{' = 0' if guard else ''}; {guard}w = *(const {_WORDS[v]}*)(f{node} + {at});")
        words = ["w"] if v == 2 else [f"w.{f}" for f in "xyzw"[:group]]
        lines += [f"{word_of(array, Int('c') * group + i, first)} = {word};" for i, word in enumerate(words)]
        return [*lines, "}\n}"]
    for leaf in leaves:
        lines += _read(p.inputs[leaf], f"f{leaf}", f"v{leaf}", at, 2 * group, v, guard=partial)
    for i in range(group):
        known = {x: [Value(f"v{x}[{2 * i + e}]", p.inputs[x].dtype) for e in range(2)] for x in leaves}
        text, pair = _made(p, node, known, operand)
        j = Int("c") * group + i
        if width % 16:
            pair = [f"({summed(j * 8, '2 * q', e)} < {width} ? {x} : 0.0f)" for e, x in enumerate(pair)]
        lines += ["{", *text, f"{word_of(array, j, first)} = w_narrow2_{dtype.value}({pair[0]}, {pair[1]});", "}"]
    return [*lines, "}\n}"]


def _read(matrix: InputMatrix, start: str, to: str, at: Int, count: int, v: int, *, guard: bool) -> list[str]:
    """Statements: `count` neighbouring columns from `at` on as floats, zeros where there are none."""
    lines = [f"float {to}[{count}];"]
    if v == 1:
        for e in range(count):
            inside = f"if ({at + e} < {matrix.width}) " if guard or matrix.width % 2 else ""
            value = load(matrix.dtype, behind(start, (at + e) * matrix.steps[1]))
            lines.append(f"{to}[{e}] = 0.0f; {inside}{to}[{e}] = {value};")
        return lines
    if guard:
        lines += [*(f"{to}[{e}] = 0.0f;" for e in range(count)), f"if ({at} < {matrix.width}) {{"]
    per = min(count, 16 // matrix.dtype.itemsize)
    for i in range(0, count, per):
        lines += ["{", *wide_load("w", matrix.dtype, per, summed(start, at, i), (Int(to) + i).tight), "}"]
    return [*lines, *(["}"] if guard else [])]


def _made(p: Chain, node: NodeId, known: dict[NodeId, list[Value]], operand: Operand) -> tuple[list[str], list[str]]:
    """Statements for two columns of a value that is made of inputs, and the two in float."""
    found = dict(known)
    lines: list[str] = []
    for step in p.before[node]:
        record = p.graph.nodes[step]
        if step == node and record.prim is Prim.CAST and p.graph.type_of(record.inputs[0]).dtype is DType.F32:
            break  # it is rounded on its way into a fragment
        periodic = PERIODIC.get(record.prim) if record.type.dtype is DType.F32 else None
        pair = []
        for e in range(2):
            operands = [operand(o, e, found) for o in record.inputs]
            text = (
                periodic.format(operands[0].name)
                if periodic
                else elementwise(record.prim, operands, record.type.dtype)[0]
            )
            lines.append(f"const {c_type(record.type.dtype)} e{step}_{e} = {text};")
            pair.append(Value(f"e{step}_{e}", record.type.dtype))
        found[step] = pair
    last = node if node in found else p.value(p.graph.nodes[node].inputs[0])
    return lines, [x.name for x in found[last]]


def pairs(
    p: Chain, nodes: Sequence[NodeId], row: str, column: Int, *, whole: bool
) -> tuple[list[str], dict[NodeId, list[Value]]]:
    """Statements: two neighbouring columns of inputs from `column` on; `whole`: all columns exist."""
    lines: list[str] = []
    found: dict[NodeId, list[Value]] = {}
    for node in nodes:
        matrix = p.inputs[node]
        v = min(2, vector_width(matrix, free=True))
        lines.append(f"const {storage(matrix.dtype)}* const f{node} = {start(p, matrix, row)};")
        lines += _read(matrix, f"f{node}", f"y{node}", column, 2, v, guard=not whole)
        found[node] = [Value(f"y{node}[{e}]", matrix.dtype) for e in range(2)]
    return lines, found
