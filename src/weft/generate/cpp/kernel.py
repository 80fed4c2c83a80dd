"""A problem and a form in, the text of one kernel out: loops around bodies."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import cast

from weft.generate.cpp.frame import assemble, body_nest, constant_buffer, input_buffers, output_pointer
from weft.generate.expr import Value, c_type, splat, vector_type
from weft.generate.expr.ctype import storage_type
from weft.generate.loopnest.body import TILE, Body, Coord, Lanes, Tile, combine, identity
from weft.generate.loopnest.index import Index, Var, index_of, inner_coefficient
from weft.generate.loopnest.memory import Buffer, Digit, Unfused, Unpinned, dense
from weft.generate.loopnest.nest import Nest
from weft.generate.loopnest.plan import (
    ARGS,
    REDUCTIONS,
    Key,
    Layout,
    Segment,
    Stage,
    build_segments,
    build_stages,
    choose_roots,
    live_nodes,
    reduced_axes,
)
from weft.generate.loopnest.windows import separate_windows
from weft.ir.graph import Graph, NodeId
from weft.ir.prims import Prim
from weft.ir.types import DType
from weft.kernels.candidate import Problem
from weft.kernels.formats import Format

STACK_BYTES = 128 * 1024
"""Scratch of one thread that may lie on its stack; more goes to the workspace."""
MAX_SEGMENTS = 9
"""Pieces into which one loop is cut at the edges of pads, joins and windows."""
TOO_BIG = 6000
"""Values that one kernel may compute before it counts as unreasonable."""


@dataclass(frozen=True, slots=True)
class Form:
    """What a schedule decides."""

    lanes: int
    """Elements per vector."""
    threads: int
    """Most threads that may run the kernel; 1: no parallel region."""
    rows: bool
    """Stages share their outer loops."""
    keep: bool
    """Costly values that several stages need are stored."""
    unroll: int
    """Vectors per turn of a reduction loop."""


class Oversized(Exception):  # noqa: N818 - turned into a Declined
    """The kernel would compute too many values; the group is better split."""


@dataclass(slots=True)
class Loops:
    """The loops of one stage after merging: variables, and each root's loops in terms of them."""

    free: list[Var]
    reduced: list[Var]
    at: dict[Key, Index]
    vector: Var | None = None
    cuts: dict[Var, list[int]] = field(default_factory=dict)
    across: Var | None = None
    """The loop along which strided reads are contiguous: worth going through transposed tiles."""


@cache
def runtime_header() -> str:
    """Text of weft_simd.h."""
    return Path(__file__).with_name("weft_simd.h").read_text()


def narrow_casts(graph: Graph) -> list[str]:
    """Casts of floats to integers of 8 or 16 bits, by way of 32, which wraps where C++ leaves the value undefined.

    Without it a compiler may keep a number that the integer cannot hold, such as -1 in a byte, for what reads it.
    Outside of 32 bits the value stays undefined. Empty for graphs without such a cast.
    """
    nodes = [n for n in graph.nodes if n.prim is Prim.CAST and n.type.dtype in _NARROW]
    if not any(graph.type_of(n.inputs[0]).dtype.is_float for n in nodes):
        return []
    lines = []
    for kind, source in itertools.product(_NARROW.values(), ("f32", "f64")):
        wide = "__builtin_convertvector(x, w_i32v)"
        lines += [
            f"W_FN w_{kind} w_to_{kind}(w_{source} x) {{ return (w_{kind})(w_i32)x; }}",
            f"W_FN w_{kind}v w_to_{kind}v(w_{source}v x) {{ return __builtin_convertvector({wide}, w_{kind}v); }}",
        ]
    return lines


_NARROW = {DType.I16: "i16", DType.I8: "i8", DType.U8: "u8"}
SUM_BLOCK = 256
"""Terms of a column's sum that go into one accumulator before it is added to the total; a power of two."""


class KernelText:
    """Builds one kernel; `text` is the result."""

    def __init__(self, problem: Problem, form: Form, entry: str) -> None:
        self.graph = separate_windows(problem.graph, live_nodes(problem.graph))
        self.problem = problem
        self.form = form
        self.entry = entry
        self.workspace_bytes = 0
        self.text = ""
        alone: set[NodeId] = set()
        banned: set[Key] = set()
        for _ in range(64):  # each turn forbids one more thing; the plainest plan always works
            try:
                self._build(frozenset(alone), frozenset(banned))
                return
            except Unfused as signal:
                alone.add(signal.node)
            except Unpinned as signal:
                banned.add(self._shared_key[signal.var])
        raise Oversized

    # whole kernel

    def _build(self, alone: frozenset[NodeId], banned: frozenset[Key]) -> None:
        graph, form = self.graph, self.form
        self.workspace_bytes = 0
        self.stack_bytes = 0
        self._shared_key: dict[Var, Key] = {}
        self.buffers: dict[NodeId, Buffer] = {}
        live = live_nodes(graph)
        self.layout = Layout(graph, live)
        roots = choose_roots(graph, live, keep=form.keep)
        self.stages, self.reads = build_stages(graph, self.layout, roots, alone)
        self.names = 0
        self.nest = body_nest(self.entry)
        self.statics: list[str] = []
        self.declared: list[str] = []
        self.fixed_buffers = self._fixed_buffers(live)
        inner = [self._inner_keys(stage) for stage in self.stages]
        self.segments = build_segments(self.layout, self.stages, rows=form.rows, inner=inner, banned=banned)
        self.segment_of = {r: s for s, seg in enumerate(self.segments) for st in seg.stages for r in st.roots}
        self.buffers = self._place_roots()
        for number, segment in enumerate(self.segments):
            if number:
                self._barrier()
            self._segment(number, segment)
        self.text = self._assemble()

    def _assemble(self) -> str:
        header = [
            f"#define WL {self.form.lanes}",
            runtime_header().rstrip(),
            *narrow_casts(self.graph),
            *self.statics,
        ]
        return assemble(self.entry, self.form.threads, header, self.nest, self.declared)

    def _barrier(self) -> None:
        if self.form.threads > 1:
            self.nest.put("#pragma omp barrier")

    def _name(self, prefix: str) -> str:
        self.names += 1
        return f"{prefix}{self.names}"

    # memory

    def _fixed_buffers(self, live: Sequence[NodeId]) -> dict[NodeId, Buffer]:
        graph = self.graph
        found, declared = input_buffers(graph, self.problem)
        self.declared += declared
        for node in live:
            if graph.nodes[node].prim is Prim.CONSTANT and graph.type_of(node).size > 1:
                found[node], text = constant_buffer(graph, node)
                self.statics.append(text)
        return found

    def _allocate(self, count: int, dtype: DType, *, per_thread: bool, prefix: str) -> str:
        """A 64-byte aligned array; returns its name."""
        name = self._name(prefix)
        size = -(-count * dtype.itemsize // 64) * 64
        kind = storage_type(dtype)
        if per_thread and self.stack_bytes + size <= STACK_BYTES:
            self.stack_bytes += size
            self.declared.append(f"alignas(64) {kind} {name}[{max(count, 1)}];")
            return name
        offset = self.workspace_bytes
        self.workspace_bytes += size * (self.form.threads if per_thread else 1)
        shift = f" + tid * {size}" if per_thread else ""
        self.declared.append(f"{kind}* const {name} = ({kind}*)(workspace + {offset}{shift});")
        return name

    def _place_roots(self) -> dict[NodeId, Buffer]:
        """Where every root lies, seen from its own segment (pins included)."""
        graph = self.graph
        found: dict[NodeId, Buffer] = {}
        last_row = Format.ROW
        formats = [f for f, o in zip(self.problem.output_formats, graph.outputs, strict=True)]
        if formats.count(Format.LAST) * 2 > len(formats):
            last_row = Format.LAST
        consumers: dict[NodeId, set[int]] = {}
        for root, reads in self.reads.items():
            for r in reads:
                consumers.setdefault(r, set()).add(self.segment_of[root])
        for number, segment in enumerate(self.segments):
            shared = {key: Var(f"p{number}_{j}", self.layout.sizes[key]) for j, key in enumerate(segment.shared)}
            self._shared_key |= {var: key for key, var in shared.items()}
            for stage in segment.stages:
                for root in stage.roots:
                    t = graph.type_of(root)
                    dims = self.layout.keys(root)
                    pinned = tuple(
                        (Digit(d, stride, self.layout.sizes[key], 0), shared[key])
                        for d, dim in enumerate(dims)
                        for key, stride in dim
                        if key in shared
                    )
                    if graph.nodes[root].prim in REDUCTIONS:
                        pinned = self._pins_of_result(root, shared)
                    if root in graph.outputs:
                        position = graph.outputs.index(root)
                        self.declared.append(output_pointer(graph, position))
                        strides = self.problem.output_formats[position].strides(t.shape)
                        whole = dense(f"out{position}", t.dtype, t.shape, strides)
                        found[root] = Buffer(whole.name, whole.dtype, whole.digits, pinned)
                        continue
                    dtype = t.dtype.accumulator
                    local = bool(segment.shared) and consumers.get(root, set()) <= {number}
                    if local:
                        found[root] = self._scratch(root, dtype, pinned)
                    else:
                        name = self._allocate(t.size, dtype, per_thread=False, prefix="v")
                        whole = dense(name, dtype, t.shape, last_row.strides(t.shape))
                        found[root] = Buffer(name, dtype, whole.digits, pinned)
        return found

    def _pins_of_result(self, root: NodeId, shared: dict[Key, Var]) -> tuple[tuple[Digit, Var], ...]:
        operand = self.graph.nodes[root].inputs[0]
        shape = self.graph.type_of(root).shape
        return tuple(
            (Digit(d, stride, self.layout.sizes[key], 0), shared[key])
            for d, dim in enumerate(self.layout.keys(operand))
            for key, stride in dim
            if key in shared and shape[d] > 1
        )

    def _scratch(self, root: NodeId, dtype: DType, pinned: tuple[tuple[Digit, Var], ...]) -> Buffer:
        """The part of a value that one turn of the shared loops makes."""
        t = self.graph.type_of(root)
        operand = self.graph.nodes[root].inputs[0] if self.graph.nodes[root].prim in REDUCTIONS else root
        held = {(digit.dim, digit.inner) for digit, _ in pinned}
        digits: list[Digit] = []
        stride = 1
        dims = list(enumerate(self.layout.keys(operand)))
        if t.rank == 4 and Format.LAST in self.problem.output_formats + self.problem.input_formats:
            dims = [dims[0], dims[2], dims[3], dims[1]]
        for d, dim in reversed(dims):
            if t.shape[d] <= 1:
                continue
            for key, inner in reversed(dim):
                if (d, inner) not in held:
                    digits.append(Digit(d, inner, self.layout.sizes[key], stride))
                    stride *= self.layout.sizes[key]
        name = self._allocate(stride, dtype, per_thread=True, prefix="s")
        return Buffer(name, dtype, tuple(digits), pinned)

    # choosing loops

    def _probe(self, stage: Stage, at: dict[Key, Index], variables: Sequence[Var]) -> Body:
        """A body that computed the stage's roots once, as scalars, into text that is thrown away."""
        found = self.buffers or {r: self._provisional(r) for s in self.stages for r in s.roots}
        readable = {n: b for n, b in (self.fixed_buffers | found).items() if n not in stage.roots}
        body = Body(self.graph, readable, Nest())
        for var in variables:
            body.bind(var, 0)
        for root in stage.pre:
            body.remember(root, self.layout.coord(root, at), body.value(root, self.layout.coord(root, at)).value)
        for root in stage.reductions:
            operand = self.graph.nodes[root].inputs[0]
            body.value(operand, self.layout.coord(operand, at))
            body.remember(root, self.layout.result_coord(root, at), Value("r", self.graph.type_of(root).dtype))
        loads = len(body.accesses)
        for root in stage.post:
            body.remember(root, self.layout.coord(root, at), body.value(root, self.layout.coord(root, at)).value)
        del body.accesses[loads:]
        if not stage.reductions:
            for root in stage.pre:
                body.store(found[root], self.layout.coord(root, at), Value("x", self.graph.type_of(root).dtype))
        if body.count > TOO_BIG:
            raise Oversized
        return body

    def _provisional(self, root: NodeId) -> Buffer:
        """Where a root would lie if nothing were shared."""
        t = self.graph.type_of(root)
        fmt = Format.ROW
        if root in self.graph.outputs:
            fmt = self.problem.output_formats[self.graph.outputs.index(root)]
        return dense("x", t.dtype, t.shape, fmt.strides(t.shape))

    def _inner_keys(self, stage: Stage) -> frozenset[Key]:
        """Loops that must stay inside: the one along which most memory is contiguous."""
        keys = [*stage.free, *stage.reduced]
        work = math.prod(self.layout.sizes[k] for k in keys)
        most = max(math.prod(self.layout.sizes[k] for k in [*s.free, *s.reduced]) for s in self.stages)
        if work * 16 < most:
            return frozenset()
        variables = {k: Var(f"z{j}", self.layout.sizes[k]) for j, k in enumerate(keys)}
        body = self._probe(stage, {k: index_of(v) for k, v in variables.items()}, list(variables.values()))
        best = self._best_vector(body, list(variables.values()))
        return frozenset(k for k, v in variables.items() if v == best)

    def _best_vector(self, body: Body, candidates: Sequence[Var]) -> Var | None:
        best: Var | None = None
        best_score = -math.inf
        shape = set(candidates)
        reach = [math.prod(v.size for v in x.address.variables & shape) for x in body.accesses]
        volume = max(reach, default=1)
        for var in candidates:
            if var.size < 2:
                continue
            score, contiguous = 0.0, False
            for access, elements in zip(body.accesses, reach, strict=True):
                c = inner_coefficient(access.address, var)
                weight = access.itemsize * (4 if access.write else 1) * elements / max(volume, 1)
                contiguous |= c == 1
                score += weight * {1: 1.0, 0: 0.25, 2: 0.0, None: -0.6}.get(c, -0.5)
            for index in body.fixed:
                if index.coefficient(var) is None:
                    score -= 4
            if not contiguous:
                continue
            lanes = self.form.lanes
            score *= var.size / (math.ceil(var.size / lanes) * lanes) if score > 0 else 1.0
            if score > best_score:
                best, best_score = var, score
        return best

    def _loops(self, stage: Stage, shared: dict[Key, Var]) -> Loops:
        """Order, merge and cut the loops of a stage."""
        sizes = self.layout.sizes
        at: dict[Key, Index] = {k: index_of(v) for k, v in shared.items()}
        groups: list[list[Var]] = [[], []]
        for which, keys in enumerate((stage.free, stage.reduced)):
            for key in keys:
                if key not in shared:
                    var = Var(self._name("i"), sizes[key])
                    at[key] = index_of(var)
                    groups[which].append(var)
        everything = [*shared.values(), *groups[0], *groups[1]]
        body = self._probe(stage, at, everything)
        for group in groups:
            if all(v.size > 0 for v in group):
                self._merge(group, at, body)
        body = self._probe(stage, at, [*shared.values(), *groups[0], *groups[1]])
        vector = self._best_vector(body, [*groups[0], *groups[1]])
        if any(self.graph.nodes[r].prim in ARGS for r in stage.reductions) and vector in groups[1]:
            vector = self._best_vector(body, groups[0])
        if any(v.size == 0 for v in groups[1]):
            vector = None
        loops = Loops(groups[0], groups[1], at, vector)
        main = [a.address for a in body.accesses if a.write] or [a.address for a in body.accesses]

        def stride(var: Var) -> int:
            return max((abs(x.coefficient(var) or 0) for x in main), default=0)

        for group in groups:
            group.sort(key=stride, reverse=True)
        if vector is not None and not stage.reductions:
            loops.across = self._transposed(body, loops)
        if vector is not None:
            self._cut(loops, vector, body.conditions)
        for var in loops.free:
            if var is not vector:
                self._cut(loops, var, [(i, n) for i, n in body.joints if i.variables == {var}])
        return loops

    @staticmethod
    def _transposed(body: Body, loops: Loops) -> Var | None:
        """The one loop along which every read that strides along the vectorised loop is contiguous, if any."""
        vector = cast("Var", loops.vector)
        strided = [x for x in body.accesses if x.address.coefficient(vector) not in (0, 1)]
        if any(x.write for x in strided) or vector.size < TILE // 2:
            return None
        found = {
            v
            for v in loops.free
            if v is not vector
            and v.size >= TILE // 2
            and any((x.address.coefficient(vector) or 0) > 1 and x.address.coefficient(v) == 1 for x in strided)
        }
        return found.pop() if len(found) == 1 else None

    def _tiles(self, body: Body, stage: Stage, loops: Loops, *, divided: bool) -> None:
        """Elementwise roots through transposed tiles of the strided reads."""
        across = cast("Var", loops.across)
        body.busy = set(stage.roots)
        block = Var(self._name("i"), -(-across.size // TILE))
        inside = Var(self._name("i"), TILE)
        at = {k: i.substitute({across: index_of(block) * TILE + Index(0, ((inside, 1),))}) for k, i in loops.at.items()}
        tiled = Loops([], [], at, loops.vector, loops.cuts)
        outer = [block if v is across else v for v in loops.free if v is not loops.vector]

        def run() -> None:
            rows = body.name("n")
            self.nest.put(f"const long {rows} = w_least({TILE}, {across.size} - {block.name} * {TILE});")

            def points(copies: list[tuple[dict[Var, Index], Lanes | None]]) -> None:
                ((values, lanes),) = copies
                body.tile = None if lanes is None else Tile(inside, rows, self.nest.level)
                with body.loop(inside, "0", rows):
                    body.lanes = lanes
                    self._store_pre(body, stage, self._moved(tiled, values))
                    body.lanes = None
                body.tile = None

            self._sweep(body, tiled, None, 1, points, again=True)

        if divided and self.form.threads > 1:
            with self._parallel(body, outer, math.prod(v.size for v in outer)):
                run()
        else:
            with self._nested(body, outer):
                run()
        body.busy = set()

    @staticmethod
    def _merge(group: list[Var], at: dict[Key, Index], body: Body) -> None:
        """Make one loop of two wherever every address steps through both as through one."""
        merged = True
        while merged:
            merged = False
            for outer in group:
                for inner in group:
                    if outer is inner or 1 in (outer.size, inner.size):
                        continue
                    addresses = [a.address for a in body.accesses]
                    if not all(
                        (c := x.coefficient(inner)) is not None and x.coefficient(outer) == c * inner.size
                        for x in addresses
                    ) or any(x.coefficient(v) != 0 for x in KernelText._tests(body) for v in (outer, inner)):
                        continue
                    both = Var(f"{outer.name}_{inner.name}", outer.size * inner.size)
                    values = {outer: index_of(both) // inner.size, inner: index_of(both) % inner.size}
                    at.update({key: index.substitute(values) for key, index in at.items()})
                    body.accesses = [type(a)(a.address.substitute(values), a.itemsize, a.write) for a in body.accesses]
                    body.conditions = [(i.substitute(values), n) for i, n in body.conditions]
                    body.fixed = [i.substitute(values) for i in body.fixed]
                    group[group.index(outer)] = both
                    group.remove(inner)
                    merged = True
                    break
                if merged:
                    break

    @staticmethod
    def _tests(body: Body) -> list[Index]:
        return [i for i, _ in body.conditions] + body.fixed

    @staticmethod
    def _cut(loops: Loops, var: Var, conditions: Sequence[tuple[Index, int]]) -> None:
        """Where the tests that involve `var` change their outcome."""
        points: set[int] = set()
        for index, n in conditions:
            c = index.coefficient(var)
            if not c:
                continue
            rest = index + Index(0, ((var, -c),))
            lo, hi = rest.bounds
            if c < 0:  # mirror: -c * var + ... counts from the other end
                c, lo, hi = -c, n - 1 - hi, n - 1 - lo
            points |= {-(lo // c), (n - 1 - hi) // c + 1, (-1 - hi) // c + 1, -((lo - n) // c)}
        inner = sorted(p for p in points if 0 < p < var.size)
        if len(inner) < MAX_SEGMENTS:
            loops.cuts[var] = inner

    # emitting

    def _segment(self, number: int, segment: Segment) -> None:
        seen = dict(self.buffers)
        for root, buffer in seen.items():
            if self.segment_of[root] != number:
                seen[root] = Buffer(buffer.name, buffer.dtype, buffer.digits)
        body = Body(self.graph, self.fixed_buffers | seen, self.nest)
        body._serial = self.names
        if segment.shared:
            shared = {k: v for v, k in self._shared_key.items() if v.name.startswith(f"p{number}_")}
            total = math.prod(v.size for v in shared.values())
            with self._parallel(body, list(shared.values()), total):
                body.floor = self.nest.level
                for stage in segment.stages:
                    self._stage(body, stage, shared, divided=False)
        else:
            for stage in segment.stages:
                self._stage(body, stage, {}, divided=True)
        self.names = body._serial

    @contextmanager
    def _parallel(self, body: Body, variables: Sequence[Var], total: int, chunks: int = 1) -> Iterator[str]:
        """One loop over all turns of several, divided among the threads; yields the chunk's variable."""
        turn, chunk = body.name("t"), body.name("q")
        count = total * chunks
        bounds = (f"{count} * tid / nt", f"{count} * (tid + 1) / nt") if self.form.threads > 1 else ("0", str(count))
        with body.block(f"for (long {turn} = {bounds[0]}; {turn} < {bounds[1]}; ++{turn})") as level:
            stride = chunks
            if chunks > 1:
                self.nest.put(f"const long {chunk} = {turn} % {chunks};")
            for var in reversed(variables):
                divided = f"{turn} / {stride}" if stride > 1 else turn
                outermost = stride * var.size >= count
                self.nest.put(f"const long {var.name} = {divided}{'' if outermost else f' % {var.size}'};")
                stride *= max(var.size, 1)
                body.bind(var, level)
            yield chunk

    @contextmanager
    def _nested(
        self, body: Body, variables: Sequence[Var], bounds: dict[Var, tuple[str, str]] | None = None
    ) -> Iterator[None]:
        if not variables:
            yield
            return
        with body.loop(variables[0], *(bounds or {}).get(variables[0], ())), self._nested(body, variables[1:], bounds):
            yield

    def _stage(self, body: Body, stage: Stage, shared: dict[Key, Var], *, divided: bool) -> None:
        loops = self._loops(stage, shared)
        if any(v.size == 0 for v in loops.free) or any(v.size == 0 for v in shared.values()):
            return
        for piece in self._joined_pieces(loops):
            self._piece(body, stage, piece, divided=divided)

    def _joined_pieces(self, loops: Loops) -> list[Loops]:
        """The stage's loops, once per operand of a join: each piece reads only its own operand."""
        for var in loops.free:
            cuts = loops.cuts.get(var)
            if var is loops.vector or not cuts:
                continue
            pieces = []
            bounds = [0, *cuts, var.size]
            for first, end in itertools.pairwise(bounds):
                part = Var(self._name("i"), end - first)
                values = {var: index_of(part) + first}
                pieces += self._joined_pieces(
                    Loops(
                        [part if v is var else v for v in loops.free],
                        loops.reduced,
                        {k: i.substitute(values) for k, i in loops.at.items()},
                        loops.vector,
                        {v: c for v, c in loops.cuts.items() if v is not var},
                        loops.across,
                    )
                )
            return pieces
        return [loops]

    def _piece(self, body: Body, stage: Stage, loops: Loops, *, divided: bool) -> None:
        if loops.across is not None:
            self._tiles(body, stage, loops, divided=divided)
            return
        outer = [v for v in loops.free if v is not loops.vector]
        chunked = loops.vector is not None and loops.vector in loops.free
        total = math.prod(v.size for v in outer)
        threads = self.form.threads
        body.busy = set(stage.roots)
        if not divided or threads <= 1:
            with self._nested(body, outer):
                self._inner(body, stage, loops, None)
            body.busy = set()
            return
        lanes = self.form.lanes
        vectors = -(-cast("Var", loops.vector).size // lanes) if chunked else 1
        volume = math.prod(v.size for v in loops.reduced)
        args = any(self.graph.nodes[r].prim in ARGS for r in stage.reductions)
        if stage.reductions and total * vectors < threads and volume >= 2 * threads and not args:
            self._split_reduction(body, stage, loops, outer)
            body.busy = set()
            return
        chunks = 1
        if chunked and total < 8 * threads:
            # a few pieces per thread, of at least eight vectors each where there is that much
            chunks = max(1, min(-(-8 * threads // total), vectors // (1 if stage.reductions else 8)))
        with self._parallel(body, outer, total, chunks) as chunk:
            if chunks == 1:
                self._inner(body, stage, loops, None)
            else:
                size = cast("Var", loops.vector).size
                step = -(-vectors // chunks) * lanes
                lo, hi = body.name("b"), body.name("b")
                self.nest.put(f"const long {lo} = {chunk} * {step}, {hi} = w_least({lo} + {step}, {size});")
                self._inner(body, stage, loops, (lo, hi))
        body.busy = set()

    def _pieces(self, body: Body, loops: Loops, bounds: tuple[str, str] | None) -> Iterator[tuple[int, int, str, str]]:
        """Pieces of the vectorised loop between its cuts: (first, length, lower, upper bound inside the piece)."""
        var = cast("Var", loops.vector)
        cuts = [0, *loops.cuts.get(var, []), var.size]
        for first, end in itertools.pairwise(cuts):
            if bounds is None:
                yield first, end - first, "0", str(end - first)
            elif len(cuts) == 2:
                yield first, end - first, bounds[0], bounds[1]
            else:
                lo, hi = body.name("b"), body.name("b")
                self.nest.put(
                    f"const long {lo} = w_most({bounds[0]} - {first}, 0), "
                    f"{hi} = w_least({bounds[1]} - {first}, {end - first});"
                )
                yield first, end - first, lo, hi

    def _sweep(
        self,
        body: Body,
        loops: Loops,
        bounds: tuple[str, str] | None,
        unroll: int,
        emit: Callable[[list[tuple[dict[Var, Index], Lanes | None]]], None],
        *,
        again: bool = False,
    ) -> None:
        """Run along the vectorised loop: blocks of vectors, single vectors, the rest; `emit` gets each turn's copies.

        `again`: elements may be computed twice.
        """
        if loops.vector is None:
            emit([({}, None)])
            return
        lanes = self.form.lanes
        for first, length, lo, hi in list(self._pieces(body, loops, bounds)):
            it = body.name("x")
            scalar = length < 4 or (length < lanes and length < loops.vector.size)
            fixed = int(hi) if lo == "0" and hi.isdigit() else None
            with body.block(""):
                self.nest.put(f"long {it} = {lo};")
                if scalar:
                    self._turn(body, loops, f"for (; {it} < {hi}; ++{it})", it, first, length, 1, "", emit, scalar=True)
                    continue
                block = unroll * lanes
                if unroll > 1 and (fixed is None or fixed >= block):
                    head = f"for (; {it} + {block} <= {hi}; {it} += {block})"
                    self._turn(body, loops, head, it, first, length, unroll, "", emit)
                left = fixed % block if fixed is not None and unroll > 1 else fixed
                if left is None or left >= lanes:
                    head = f"for (; {it} + {lanes} <= {hi}; {it} += {lanes})"
                    self._turn(body, loops, head, it, first, length, 1, "", emit)
                if again and fixed is not None and fixed >= lanes and fixed % lanes:
                    # the last vector overlaps the one before: storing equal values twice beats a partial vector
                    self.nest.put(f"{it} = {fixed - lanes};")
                    self._turn(body, loops, "", it, first, length, 1, "", emit)
                elif fixed is None or fixed % lanes:
                    self._turn(body, loops, f"if ({it} < {hi})", it, first, length, 1, f"{hi} - {it}", emit)

    def _turn(
        self,
        body: Body,
        loops: Loops,
        head: str,
        it: str,
        first: int,
        length: int,
        copies: int,
        count: str,
        emit: Callable[[list[tuple[dict[Var, Index], Lanes | None]]], None],
        *,
        scalar: bool = False,
    ) -> None:
        vector = cast("Var", loops.vector)
        with body.block(head) as level:
            made: list[tuple[dict[Var, Index], Lanes | None]] = []
            left = ""
            if count:
                left = body.name("n")
                self.nest.put(f"const long {left} = {count};")
            for u in range(copies):
                var = Var(body.name("j"), length)
                self.nest.put(f"const long {var.name} = {it}{f' + {u * self.form.lanes}' if u else ''};")
                body.bind(var, level)
                # a piece of one element still counts from its own variable
                index = Index(first, ((var, 1),))
                made.append(({vector: index}, None if scalar else Lanes(var, left)))
            emit(made)

    def _inner(self, body: Body, stage: Stage, loops: Loops, bounds: tuple[str, str] | None) -> None:
        """The stage inside its outer free loops."""
        if any(v.size == 0 for v in loops.reduced):  # neutral elements; nothing may be read
            self._finish(body, stage, self._zeroed(stage, loops.at), self._state(body, stage, False))
            return
        if not stage.reductions:

            def points(copies: list[tuple[dict[Var, Index], Lanes | None]]) -> None:
                for values, lanes in copies:
                    body.lanes = lanes
                    self._store_pre(body, stage, self._moved(loops, values))
                body.lanes = None

            if loops.vector is None:
                points([({}, None)])
            else:
                self._sweep(body, loops, bounds, 1, points, again=True)
            return
        if loops.vector is not None and loops.vector in loops.free:
            self._sweep(
                body, loops, bounds, self.form.unroll, lambda copies: self._reduce_columns(body, stage, loops, copies)
            )
            return
        sums = self._reduce_rows(body, stage, loops, {})
        self._finish(body, stage, self._zeroed(stage, loops.at), sums)

    @staticmethod
    def _moved(loops: Loops, values: dict[Var, Index]) -> dict[Key, Index]:
        return {k: i.substitute(values) for k, i in loops.at.items()} if values else loops.at

    def _zeroed(self, stage: Stage, at: dict[Key, Index]) -> dict[Key, Index]:
        return {**at, **dict.fromkeys(stage.reduced, Index())}

    def _compute(self, body: Body, root: NodeId, coord: Coord) -> Value:
        """The root's value itself, not what its buffer holds."""
        body.busy.discard(root)
        hidden = body.buffers
        body.buffers = {n: b for n, b in hidden.items() if n != root}
        placed = body.value(root, coord)
        body.buffers = hidden
        body.busy.add(root)
        return placed.value

    def _store_pre(self, body: Body, stage: Stage, at: dict[Key, Index]) -> None:
        for root in stage.pre:
            coord = self.layout.coord(root, at)
            value = self._compute(body, root, coord)
            body.store(self.buffers_here(root), coord, value)

    def buffers_here(self, root: NodeId) -> Buffer:
        """Where a root of the open segment is written."""
        return self.buffers[root]

    # reductions

    def _state(self, body: Body, stage: Stage, vector: bool, tag: str = "") -> dict[NodeId, str]:
        """Declare accumulators at their neutral elements."""
        names = {}
        for root in stage.reductions:
            record = self.graph.nodes[root]
            dtype = self.graph.type_of(record.inputs[0]).dtype
            name = body.name(f"r{tag}")
            start = identity(record.prim, dtype)
            kind = vector_type(dtype) if vector else c_type(dtype)
            self.nest.put(f"{kind} {name} = {splat(start, dtype) if vector else start};")
            if record.prim in ARGS:
                self.nest.put(f"{'w_i64v' if vector else 'w_i64'} {name}_at = {{}};")
            names[root] = name
        return names

    def _accumulate(
        self, body: Body, stage: Stage, at: dict[Key, Index], names: dict[NodeId, str], *, across: bool
    ) -> None:
        """One step of every reduction at the element `at`; `across`: lanes are reduced elements."""
        lanes = body.lanes
        for root in stage.reductions:
            record = self.graph.nodes[root]
            operand = record.inputs[0]
            dtype = self.graph.type_of(operand).dtype
            value = body.value(operand, self.layout.coord(operand, at)).value
            wide = lanes is not None
            name = value.name if value.vector or not wide else splat(value.name, dtype)
            acc = names[root]
            if record.prim in ARGS:
                axis = self.layout.coord(operand, at)[_axes(self.graph, root)[0]]
                self._arg_step(body, record.prim, dtype, acc, name, axis, wide)
                continue
            step = combine(record.prim, dtype, acc, name)
            if across and lanes is not None and lanes.count:
                step = f"w_select(w_first({lanes.count}), {step}, {acc})"
            self.nest.put(f"{acc} = {step};")

    def _arg_step(self, body: Body, prim: Prim, dtype: DType, acc: str, x: str, axis: Index, wide: bool) -> None:
        sign = ">" if prim is Prim.ARGMAX else "<"
        kind = DType.I64
        position = f"(w_i64)({axis.text()})"
        if dtype is DType.BOOL:
            better = f"({x} & ~{acc})" if wide else f"({x} && !{acc})"
            if prim is Prim.ARGMIN:
                better = f"(~{x} & {acc})" if wide else f"(!{x} && {acc})"
        elif dtype.is_float:
            better = f"w_mask({x} {sign} {acc}) | w_mask(({x} != {x}) & ({acc} == {acc}))"
        else:
            better = f"w_mask({x} {sign} {acc})"
        name = body.name("m")
        self.nest.put(f"const {'w_boolv' if wide else 'bool'} {name} = {better};")
        self.nest.put(f"{acc} = w_select({name}, {x}, {acc});")
        new = splat(position, kind) if wide else position
        self.nest.put(f"{acc}_at = w_select({name}, {new}, {acc}_at);")

    # A column's sum runs over every reduced element in one accumulator. In f32 its rounding error grows with the
    # length, so long ones are summed in blocks: the error then grows with the block and the number of blocks.

    def _totals(self, body: Body, stage: Stage, loops: Loops, vector: bool) -> dict[NodeId, str]:
        """Second accumulators of the sums that are long enough to need them."""
        if math.prod(v.size for v in loops.reduced) < 2 * SUM_BLOCK or loops.reduced[-1].size < SUM_BLOCK // 16:
            return {}
        found = {}
        for root in stage.reductions:
            record = self.graph.nodes[root]
            dtype = self.graph.type_of(record.inputs[0]).dtype
            if record.prim is not Prim.REDUCE_SUM or not dtype.is_float:
                continue
            found[root] = body.name("rt")
            zero = identity(record.prim, dtype)
            kind = vector_type(dtype) if vector else c_type(dtype)
            self.nest.put(f"{kind} {found[root]} = {splat(zero, dtype) if vector else zero};")
        return found

    def _flush(
        self,
        body: Body,
        loops: Loops,
        sums: list[tuple[dict[NodeId, str], dict[NodeId, str], tuple[dict[Var, Index], Lanes | None]]],
    ) -> None:
        """At the end of a block the accumulators move into the totals."""
        if not any(totals for _, totals, _ in sums):
            return
        inner = loops.reduced[-1]
        text = index_of(inner).text()
        ends = (
            f"({text} & {SUM_BLOCK - 1}) == {SUM_BLOCK - 1}"
            if inner.size > SUM_BLOCK
            else f"{text} == {inner.size - 1}"
        )
        with body.block(f"if ({ends})"):
            for names, totals, (_, lanes) in sums:
                for root, total in totals.items():
                    dtype = self.graph.type_of(self.graph.nodes[root].inputs[0]).dtype
                    zero = identity(Prim.REDUCE_SUM, dtype)
                    self.nest.put(f"{total} = w_plus({total}, {names[root]});")
                    self.nest.put(f"{names[root]} = {splat(zero, dtype) if lanes is not None else zero};")

    def _join(self, names: dict[NodeId, str], totals: dict[NodeId, str]) -> None:
        """What is left of the last block."""
        for root, total in totals.items():
            self.nest.put(f"{names[root]} = w_plus({total}, {names[root]});")

    def _run_columns(
        self,
        body: Body,
        stage: Stage,
        loops: Loops,
        copies: list[tuple[dict[Var, Index], Lanes | None]],
        bounds: dict[Var, tuple[str, str]],
    ) -> list[dict[NodeId, str]]:
        """The reduced loops within `bounds`, lanes being results; returns the accumulators of each copy."""
        states = [self._state(body, stage, lanes is not None) for _, lanes in copies]
        totals = [self._totals(body, stage, loops, lanes is not None) for _, lanes in copies]
        with self._nested(body, loops.reduced, bounds):
            for (values, lanes), names in zip(copies, states, strict=True):
                body.lanes = lanes
                at = self._moved(loops, values)
                self._store_pre(body, stage, at)
                self._accumulate(body, stage, at, names, across=False)
                body.lanes = None
            self._flush(body, loops, list(zip(states, totals, copies, strict=True)))
        for names, total in zip(states, totals, strict=True):
            self._join(names, total)
        return states

    def _reduce_columns(
        self, body: Body, stage: Stage, loops: Loops, copies: list[tuple[dict[Var, Index], Lanes | None]]
    ) -> None:
        """Lanes are results; the reduced loops run inside."""
        states = self._run_columns(body, stage, loops, copies, {})
        for (values, lanes), names in zip(copies, states, strict=True):
            body.lanes = lanes
            self._finish(body, stage, self._zeroed(stage, self._moved(loops, values)), names)
            body.lanes = None

    def _reduce_rows(
        self, body: Body, stage: Stage, loops: Loops, bounds: dict[Var, tuple[str, str]]
    ) -> dict[NodeId, str]:
        """Lanes (if any) are reduced elements; returns the names of the scalar results."""
        if loops.vector is None:
            names = self._state(body, stage, False)
            with self._nested(body, loops.reduced, bounds):
                self._store_pre(body, stage, loops.at)
                self._accumulate(body, stage, loops.at, names, across=False)
            return names
        unroll = self.form.unroll
        scalar = self._state(body, stage, False, "s")
        vectors = [self._state(body, stage, True, "v") for _ in range(unroll)]

        def points(copies: list[tuple[dict[Var, Index], Lanes | None]]) -> None:
            for u, (values, lanes) in enumerate(copies):
                body.lanes = lanes
                at = self._moved(loops, values)
                self._store_pre(body, stage, at)
                self._accumulate(body, stage, at, vectors[u] if lanes else scalar, across=True)
            body.lanes = None

        outer = [v for v in loops.reduced if v is not loops.vector]
        with self._nested(body, outer, bounds):
            self._sweep(body, loops, bounds.get(loops.vector), unroll, points)
        out = {}
        for root in stage.reductions:
            record = self.graph.nodes[root]
            dtype = self.graph.type_of(record.inputs[0]).dtype
            parts = [v[root] for v in vectors]
            while len(parts) > 1:  # a fixed tree
                parts = [
                    combine(record.prim, dtype, parts[j], parts[j + 1]) if j + 1 < len(parts) else parts[j]
                    for j in range(0, len(parts), 2)
                ]
            total = body.name("r")
            self.nest.put(
                f"const {c_type(dtype)} {total} = "
                f"{combine(record.prim, dtype, f'{across(record.prim, dtype)}({parts[0]})', scalar[root])};"
            )
            out[root] = total
        return out

    def _finish(self, body: Body, stage: Stage, at: dict[Key, Index], names: dict[NodeId, str]) -> None:
        """Store results, then whatever is computed from them in the same loops."""
        vector = body.lanes is not None
        for root in stage.reductions:
            record = self.graph.nodes[root]
            name = names[root]
            dtype = record.type.dtype
            if record.prim in ARGS:
                name = f"{name}_at"
            done = body.name("r")
            self.nest.put(f"const {vector_type(dtype) if vector else c_type(dtype)} {done} = {name};")
            value = Value(done, dtype, vector)
            coord = self.layout.result_coord(root, at)
            body.remember(root, coord, value)
            body.store(self.buffers_here(root), coord, value)
        for root in stage.post:
            coord = self.layout.coord(root, at)
            value = self._compute(body, root, coord)
            body.store(self.buffers_here(root), coord, value)

    def _split_reduction(self, body: Body, stage: Stage, loops: Loops, outer: list[Var]) -> None:
        """Few results, long sums: every thread reduces its part, then the parts are combined in the threads' order."""
        graph, threads = self.graph, self.form.threads
        free = loops.free
        count = math.prod(v.size for v in free)
        partial: dict[NodeId, str] = {}
        for root in stage.reductions:
            dtype = graph.type_of(graph.nodes[root].inputs[0]).dtype.accumulator
            partial[root] = self._allocate(count * threads, dtype, per_thread=False, prefix="y")
        position = Index()
        for v in free:
            position = position * v.size + index_of(v)
        cut = loops.reduced[0] if loops.reduced[0].size >= threads else max(loops.reduced, key=lambda v: v.size)
        lo, hi = body.name("b"), body.name("b")
        grain = self.form.lanes if cut is loops.vector else 1
        units = -(-cut.size // grain)
        self.nest.put(
            f"const long {lo} = {units} * tid / nt * {grain}, "
            f"{hi} = w_least({units} * (tid + 1) / nt * {grain}, {cut.size});"
        )
        bounds = {cut: (lo, hi)}
        whole = {
            root: Buffer(partial[root], graph.type_of(graph.nodes[root].inputs[0]).dtype.accumulator, ())
            for root in partial
        }

        def keep(names: dict[NodeId, str], values: dict[Var, Index]) -> None:
            for root, name in names.items():
                dtype = graph.type_of(graph.nodes[root].inputs[0]).dtype
                where = position.substitute(values) + Index()
                value = Value(name, dtype, body.lanes is not None)
                buffer = whole[root]
                shifted = Buffer(f"{buffer.name} + tid * {count}", buffer.dtype, ())
                _store_at(body, shifted, where, value)

        if loops.vector is not None and loops.vector in free:
            with self._nested(body, outer):

                def columns(copies: list[tuple[dict[Var, Index], Lanes | None]]) -> None:
                    states = self._run_columns(body, stage, loops, copies, bounds)
                    for (values, lanes), names in zip(copies, states, strict=True):
                        body.lanes = lanes
                        keep(names, values)
                        body.lanes = None

                self._sweep(body, loops, None, self.form.unroll, columns)
        else:
            with self._nested(body, free):
                keep(self._reduce_rows(body, stage, loops, bounds), {})
        self._barrier()
        flat = loops.free
        with self._parallel(body, flat, count):
            names = self._state(body, stage, False)
            k = body.name("k")
            with body.block(f"for (long {k} = 0; {k} < nt; ++{k})"):
                for root, name in names.items():
                    record = graph.nodes[root]
                    dtype = graph.type_of(record.inputs[0]).dtype
                    x = f"w_ld({partial[root]} + {k} * {count} + {position.text()})"
                    self.nest.put(f"{name} = {combine(record.prim, dtype, name, x)};")
            self._finish(body, stage, self._zeroed(stage, loops.at), names)


def _store_at(body: Body, buffer: Buffer, address: Index, value: Value) -> None:
    """Write a value at a computed address."""
    lanes = body.lanes
    if lanes is None:
        body.nest.put(f"w_st({buffer.name} + {address.text()}, {value.name});")
    elif address.coefficient(lanes.var) == 1:
        suffix, tail = ("_n", f", {lanes.count}") if lanes.count else ("", "")
        body.nest.put(f"w_stv{suffix}({buffer.name} + {address.text()}, {value.name}{tail});")
    else:
        array = body.name("a")
        body.nest.put(f"{c_type(value.dtype)} {array}[WL]; w_stv({array}, {value.name});")
        at = f"{buffer.name} + {address.text(lanes.var)}"
        body.nest.put(f"for (long l = 0; l < {lanes.count or 'WL'}; ++l) w_st({at}, {array}[l]);")


def _axes(graph: Graph, root: NodeId) -> tuple[int, ...]:
    return reduced_axes(graph, root)


def across(prim: Prim, dtype: DType) -> str:
    """The function that reduces the lanes of a vector."""
    if dtype is DType.BOOL:
        return "w_across_any" if prim is Prim.REDUCE_MAX else "w_across_all"
    return {
        Prim.REDUCE_SUM: "w_across_sum",
        Prim.REDUCE_PROD: "w_across_prod",
        Prim.REDUCE_MAX: "w_across_max",
        Prim.REDUCE_MIN: "w_across_min",
    }[prim]
