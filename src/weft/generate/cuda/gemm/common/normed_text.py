"""Text of what `normed` takes off a problem: values of a row, elements on their way, and partial sums of results."""

from __future__ import annotations

from collections.abc import Mapping

from weft.generate.contraction.match import Source
from weft.generate.cuda.gemm.common.normed import PIECE, Norm, column_of, reductions, row_of, scalar_of
from weft.generate.cuda.intrinsics.prelude import load
from weft.generate.expr.ctype import literal
from weft.generate.expr.elementwise import Value, elementwise
from weft.generate.expr.integer import Int
from weft.ir.graph import NodeId
from weft.ir.prims import CATEGORY, Category, Prim
from weft.ir.types import DType

FEW = """// `x` of the lane whose number differs in `bit`, among `count` neighbours that are here
#ifndef W_EMULATED
W_FN float w_few(float x, int bit, int count, int lane) {
  const u32 who = count == 32 ? 0xffffffffu : ((1u << count) - 1u) << (lane & -count);
  return __uint_as_float(__shfl_xor_sync(who, __float_as_uint(x), bit));
}
#endif
"""
STORE_IF = """// a store without a branch
#ifndef W_EMULATED
W_FN void w_store_if(void* p, uint4 v, bool in) {
  asm volatile("{ .reg .pred q; setp.ne.b32 q, %5, 0; @q st.global.v4.u32 [%0], {%1, %2, %3, %4}; }"
               ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"((int)in) : "memory");
}
#endif
"""
CHUNK = 8


def rows_text(
    norm: Norm, names: Mapping[Source, str], row: str, lanes: int, lane: str, to: list[str], words: str = ""
) -> list[str]:
    """Statements: the values of a row into the variables `to`, by `lanes` neighbouring lanes that all take part.

    `row` is C text of a row that exists; `lane` that of the lane among them. `words`: C text of two neighbours of the
    row at 16 `q` + 8 `u`, where four lanes hold all of it in registers.
    """
    work = _Rows(norm, names, lanes, lane, words)
    lines = [f"const long long row_ = {row};"]
    for node in reductions(norm):
        lines += work.sum(node)
    held: dict[NodeId, Value] = {}
    for node, name in zip(norm.rows, to, strict=True):
        value = work.value(node, "0", held, lines, one=True)
        lines.append(f"{name} = {value.name};")
    return ["{", *lines, "}"]


class _Rows:
    """Values of one row."""

    def __init__(self, norm: Norm, names: Mapping[Source, str], lanes: int, lane: str, words: str) -> None:
        self.norm, self.names, self.lanes, self.lane, self.words = norm, names, lanes, lane, words
        self.sums: dict[NodeId, Value] = {}
        self.given: dict[NodeId, Value] = {}
        self.fresh = 0

    def sum(self, node: NodeId) -> list[str]:
        """A sum over a row, by all lanes."""
        norm, lanes = self.norm, self.lanes
        wide = norm.width(node)
        name = f"s{node}_"
        of = norm.graph.nodes[node].inputs[0]
        lines = [f"float {name} = 0.0f;"]
        if self.words and norm.source in self._above(of):
            lines += self._by_words(of, name)
        elif wide == norm.length and norm.length % CHUNK == 0 and norm.source in self._above(of):
            lines += self._by_chunks(of, name)
        else:
            head = f"for (int j_ = {self.lane}; j_ < {wide}; j_ += {lanes}) {{"
            inner: list[str] = []
            value = self.value(of, "j_", {}, inner)
            lines += ["#pragma unroll", head, *inner, f"{name} += {value.name}; }}"]
        for bit in _bits(lanes):
            lines.append(f"{name} += __uint_as_float(w_shfl_word(__float_as_uint({name}), {bit}));")
        self.sums[node] = Value(name, DType.F32)
        return lines

    def _above(self, node: NodeId) -> set[NodeId]:
        found, todo = set[NodeId](), [node]
        while todo:
            at = todo.pop()
            if at not in found and at not in self.sums:
                found.add(at)
                todo += self.norm.graph.nodes[at].inputs
        return found

    def _by_words(self, of: NodeId, name: str) -> list[str]:
        """Sums over the operand's own elements, in registers."""
        head = f"#pragma unroll\nfor (int q = 0; q < {self.norm.length // 16}; ++q)\n#pragma unroll"
        lines = [
            head,
            f"for (int u = 0; u < 2; ++u) {{ const float2 h_ = w_unpack_{self.norm.dtype.value}({self.words});",
        ]
        for half in "xy":
            inner: list[str] = []
            self.given = {self.norm.source: Value(f"h_.{half}", self.norm.dtype)}
            value = self.value(of, "", {}, inner)
            lines += ["{", *inner, f"{name} += {value.name}; }}"]
        self.given = {}
        return [*lines, "}"]

    def _by_chunks(self, of: NodeId, name: str) -> list[str]:
        """Sums over the operand's own elements, 16 bytes at a time."""
        norm, lanes = self.norm, self.lanes
        source = self.names[Source("input", norm.graph.inputs.index(norm.source))]
        begin = f"const u16* const from_ = (const u16*){source} + row_ * {norm.length};"
        lines = [
            "{", begin, "#pragma unroll 4",
            f"for (int j_ = {self.lane} * {CHUNK}; j_ < {norm.length}; j_ += {CHUNK * lanes}) {{",
            "const uint4 w_ = *(const uint4*)(from_ + j_); float part_ = 0.0f;",
        ]  # fmt: skip
        for word in "xyzw":
            lines.append(f"{{ const float2 h_ = w_unpack_{norm.dtype.value}(w_.{word});")
            for half in "xy":
                inner: list[str] = []
                self.given = {norm.source: Value(f"h_.{half}", norm.dtype)}
                value = self.value(of, "", {}, inner)
                lines += ["{", *inner, f"part_ += {value.name}; }}"]
            lines.append("}")
        self.given = {}
        return [*lines, f"{name} += part_; }}", "}"]

    def value(self, node: NodeId, at: str, held: dict[NodeId, Value], lines: list[str], *, one: bool = False) -> Value:
        """A value at element `at` of the row; statements that it needs go to `lines`. `one`: it has but one element."""
        graph = self.norm.graph
        if node in held:
            return held[node]
        if node in self.sums:
            return self.sums[node]
        if node in self.given:
            return self.given[node]
        n = graph.nodes[node]
        number = scalar_of(graph, node)
        if number is not None:
            return Value(literal(number, n.type.dtype), n.type.dtype, constant=number)
        if n.prim in (Prim.BROADCAST, Prim.RESHAPE):
            return self.value(n.inputs[0], at, held, lines, one=one)
        self.fresh += 1
        name = f"v{self.fresh}_"
        if n.prim is Prim.INPUT:
            wide = n.type.size // self.norm.count
            place = "row_" if wide == 1 else str(Int("row_") * wide + at)
            from_ = self.names[Source("input", graph.inputs.index(node))]
            kind = "float" if n.type.dtype is DType.F32 else "u16"
            lines.append(f"const float {name} = {load(n.type.dtype, f'(const {kind}*){from_} + {place}')};")
        else:
            assert CATEGORY[n.prim] is Category.ELEMENTWISE, n.prim
            operands = [self.value(j, at, held, lines, one=one) for j in n.inputs]
            lines.append(f"const float {name} = {elementwise(n.prim, operands, n.type.dtype)[0]};")
        held[node] = Value(name, n.type.dtype)
        return held[node]


def element_text(norm: Norm, x: str, rows: list[str], columns: list[str], prefix: str) -> tuple[list[str], str]:
    """Statements, and the name of the normalised value of the element `x`; `rows` and `columns` in the norm's order."""
    graph = norm.graph
    values: dict[NodeId, Value] = {norm.source: Value(x, norm.dtype)}
    last = graph.nodes[norm.value]
    rounds = last.prim is Prim.CAST and len(norm.body) > 1  # whoever stores the value rounds it
    by_row, by_column = dict(zip(norm.rows, rows, strict=True)), dict(zip(norm.columns, columns, strict=True))
    lines = []
    for node in norm.body[:-1] if rounds else norm.body:
        n = graph.nodes[node]
        operands = []
        for j in n.inputs:
            number = scalar_of(graph, j) if graph.nodes[j].prim is Prim.BROADCAST else None
            dtype = graph.type_of(j).dtype
            if j in values:
                operands.append(values[j])
            elif number is not None:
                operands.append(Value(literal(number, dtype), dtype, constant=number))
            elif row_of(graph, j) in by_row:
                operands.append(Value(by_row[row_of(graph, j)], dtype))
            else:
                operands.append(Value(by_column[column_of(graph, j)], dtype))
        name = f"{prefix}{node}_"
        lines.append(f"const float {name} = {elementwise(n.prim, operands, n.type.dtype)[0]};")
        values[node] = Value(name, n.type.dtype)
    return lines, values[last.inputs[0] if rounds else norm.value].name


def columns_text(norm: Norm, names: Mapping[Source, str], at: str, padded: int, threads: int) -> list[str]:
    """Statements: the vectors along the sum into shared memory as f32, zeros behind their ends; `at` is where."""
    lines = []
    for i, node in enumerate(norm.columns):
        dtype = norm.graph.type_of(node).dtype
        kind = "float" if dtype is DType.F32 else "u16"
        from_ = names[Source("input", norm.graph.inputs.index(node))]
        value = load(dtype, f"(const {kind}*){from_} + i")
        ok = f"i < {norm.length} ? {value} : 0.0f" if padded > norm.length else value
        lines.append(
            f"for (int i = t; i < {padded}; i += {threads}) ((float*)(sm + {at}))[{i * padded + Int('i')}] = {ok};"
        )
    return lines


def column_bytes(norm: Norm, step: int) -> int:
    """Shared memory of the vectors along the sum, in whole steps."""
    return 4 * len(norm.columns) * padded_length(norm, step)


def padded_length(norm: Norm, step: int) -> int:
    """Elements of a row in whole steps of the sum."""
    return -(-norm.length // step) * step


def parts_text(dtype: DType, values: list[str], columns: int, prefix: str = "", later: str = "") -> list[str]:
    """Statements: mean and spread of `PIECE` results, of which this lane has neighbours, as they are stored.

    `later`: C text of an index; they are left in `mean_[...]` and `spread_[...]`, see `joined_text`.
    """
    width = len(values)
    lines = [f"float {prefix}p_[{width}];"]
    lines += [
        f"{{ const float2 h_ = w_unpack_{dtype.value}(w_narrow2_{dtype.value}({values[i]}, {values[i + 1]}));"
        f" {prefix}p_[{i}] = h_.x; {prefix}p_[{i + 1}] = h_.y; }}"
        for i in range(0, width, 2)
    ]
    terms = [f"{prefix}p_[{i}]" for i in range(width)]
    mean, spread = (f"{name}[{later}]" if later else f"{prefix}{name}" for name in ("mean_", "spread_"))
    kind = "" if later else "float "
    lines.append(f"{kind}{mean} = {_tree(terms)} * {literal(1.0 / width, DType.F32)};")
    lines += [f"{x} -= {mean};" for x in terms]
    lines.append(f"{kind}{spread} = {_tree([f'{x} * {x}' for x in terms])};")
    return lines if later else [*lines, *joined_text(width, columns, mean, spread)]


def joined_text(width: int, columns: int, mean: str, spread: str, inside: str = "") -> list[str]:
    """Statements: lanes join means and spreads of `width` results to those of a piece, and one of them stores these.

    Lanes that are here are all of a piece or none; the two of a pair compute the same. `m` and `n` are row and column.
    Source: Chan, Golub and LeVeque 1979, updating formulae for sums of squares.
    """
    lanes = PIECE // width
    lines = [
        f"{{ const float other = w_few({mean}, {bit}, {lanes}, lane), far = {mean} - other;"
        f" {spread} += w_few({spread}, {bit}, {lanes}, lane);"
        f" {spread} += far * far * {literal(width * bit / 2, DType.F32)}; {mean} = ({mean} + other) * 0.5f; }}"
        for bit in _bits(lanes)
    ]
    place = Int("(long long)m") * (columns // PIECE) + Int("n") / PIECE
    lines.append(
        f"if ({inside}(lane & {lanes - 1}) == 0) {{ ((float*)means)[{place}] = {mean};"
        f" ((float*)spreads)[{place}] = {spread}; }}"
    )
    return lines


def _tree(terms: list[str]) -> str:
    """A sum in pairs."""
    while len(terms) > 1:
        terms = [f"({' + '.join(terms[i : i + 2])})" for i in range(0, len(terms), 2)]
    return terms[0]


def _bits(lanes: int) -> list[int]:
    return [1 << i for i in range(lanes.bit_length() - 1)]
