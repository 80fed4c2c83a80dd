"""Kernels around a scan: the carried loop runs inside, states stay in registers, lanes are states side by side.

Rows are divided among the threads. Where the values are summed over a loop (a state space), that loop is the lanes;
else the loop along which memory is contiguous is. Without such a loop some rows take turns, so that the processor has
several chains to work on.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from weft.generate.cpp.frame import assemble, body_nest, constant_buffer, input_buffers, output_pointer
from weft.generate.cpp.kernel import across, narrow_casts, runtime_header
from weft.generate.expr import c_type, literal, splat, vector_type
from weft.generate.expr.elementwise import Value
from weft.generate.loopnest.body import Body, Lanes, combine, identity
from weft.generate.loopnest.index import Index, Var, index_of, inner_coefficient
from weft.generate.loopnest.memory import Buffer, Unfused, dense
from weft.generate.loopnest.nest import Nest
from weft.generate.loopnest.plan import Key, live_nodes
from weft.generate.loopnest.scans import ScanGroup, scan_group
from weft.generate.parameters import Parameters
from weft.ir.declined import Declined
from weft.ir.prims import Prim
from weft.ir.types import DType
from weft.kernels.candidate import Problem
from weft.kernels.source import KernelSource, Schedule
from weft.kernels.stored_names import entry_name

LEAST_LANES = 4
"""Fewer neighbours are computed one by one."""


@dataclass(frozen=True, slots=True)
class ScanConfig(Parameters):
    """Parameters of a scan's kernel; counts."""

    lanes: int
    threads: int
    chains: int
    """Vectors, or rows where no loop is vectorised, that a thread carries at once. Those of a sum are carried all."""

    def schedule(self) -> Schedule:
        """As a schedule of the cpp generator."""
        return self.named("cpp", template="scan")


@dataclass(frozen=True, slots=True)
class _Chain:
    """States of one register: where they are along the inner loop, and how many of its lanes exist (0: all)."""

    var: Var | None
    start: str
    vector: bool
    count: int = 0


def configs(group: ScanGroup, lanes: int, threads: Sequence[int]) -> list[ScanConfig]:
    """Those worth measuring, most promising first."""
    chains = (1,) if group.summed is not None else (4, 1, 2)
    return [ScanConfig(lanes, n, c) for c in chains for n in threads]


def emit(problem: Problem, schedule: Schedule) -> KernelSource | Declined:
    """The kernel of one schedule; depends on its arguments only."""
    group = scan_group(problem.graph)
    if isinstance(group, Declined):
        return group
    entry = entry_name(problem.key, schedule)
    try:
        text = _Text(problem, group, ScanConfig.of(schedule), entry).text()
    except Unfused:
        return Declined("a value of the scan is read before it is there")
    return KernelSource(schedule, text, entry)


class _Text:
    def __init__(self, problem: Problem, group: ScanGroup, config: ScanConfig, entry: str) -> None:
        self.group = group
        self.graph = group.graph
        self.config = config
        self.entry = entry
        self.inputs, self.declared = input_buffers(self.graph, problem)
        self.statics: list[str] = []
        for node in live_nodes(self.graph):
            if self.graph.nodes[node].prim is Prim.CONSTANT and self.graph.type_of(node).size > 1:
                self.inputs[node], text = constant_buffer(self.graph, node)
                self.statics.append(text)
        self.targets: dict[int, Buffer] = {}
        for position, node in enumerate(self.graph.outputs):
            t = self.graph.type_of(node)
            self.declared.append(output_pointer(self.graph, position))
            strides = problem.output_formats[position].strides(t.shape)
            self.targets[node] = dense(f"out{position}", t.dtype, t.shape, strides)
        self.nest = body_nest(entry)
        self.body = Body(self.graph, self.inputs, self.nest)

    def text(self) -> str:
        """The whole kernel."""
        inner = self.group.summed if self.group.summed is not None else self._inner()
        vector = inner is not None and self._contiguous(inner) > 0 and self.group.layout.sizes[inner] >= LEAST_LANES
        if self.group.summed is not None:
            self._summed(self.group.summed, vector)
        elif inner is None:
            self._region([], [_Chain(None, "", vector=False)], None)
        else:
            self._side_by_side(inner, vector)
        header = [f"#define WL {self.config.lanes}", runtime_header().rstrip(), *narrow_casts(self.graph)]
        return assemble(self.entry, self.config.threads, [*header, *self.statics], self.nest, self.declared)

    # loops

    def _inner(self) -> Key | None:
        """The loop whose turns are carried side by side."""
        keys = [k for k in self.group.free if self.group.layout.sizes[k] > 1]
        if not keys:
            return None
        best = max(keys, key=lambda k: (self._contiguous(k), keys.index(k)))
        if self._contiguous(best) > 0 and self.group.layout.sizes[best] >= LEAST_LANES:
            return best
        return max(keys, key=lambda k: self.group.layout.sizes[k])

    def _contiguous(self, key: Key) -> float:
        """Bytes of one turn that are neighbours along a loop, less those that are not."""
        variables = {k: Var(f"z{j}", self.group.layout.sizes[k]) for j, k in enumerate(self._loops())}
        body = Body(self.graph, self.inputs, Nest())
        for var in variables.values():
            body.bind(var, 0)
        at = {k: index_of(v) for k, v in variables.items()}
        group, layout = self.group, self.group.layout
        for operand in self.graph.nodes[group.scan].inputs:
            body.value(operand, layout.coord(operand, at))
        body.remember(group.scan, layout.coord(group.scan, at), Value("h", self.graph.type_of(group.scan).dtype))
        for o in group.full:
            body.value(o, layout.coord(o, at))
            body.store(self.targets[o], layout.coord(o, at), Value("x", self.graph.type_of(o).dtype))
        weigh = {1: 1.0, 0: 0.0}
        return sum(
            x.itemsize * weigh.get(c, -0.5) if (c := inner_coefficient(x.address, variables[key])) is not None else -1.0
            for x in body.accesses
        )

    def _loops(self) -> list[Key]:
        return [*self.group.free, self.group.time, *([] if self.group.summed is None else [self.group.summed])]

    def _summed(self, key: Key, vector: bool) -> None:
        """All states of one sum in registers."""
        size, lanes = self.group.layout.sizes[key], self.config.lanes
        step = lanes if vector else 1
        chains = []
        for start in range(0, size, step):
            var = Var(self.body.name("v"), size)
            left = size - start
            chains.append(_Chain(var, str(start), vector, left if vector and left < lanes else 0))
        self._region(list(self.group.free), chains, key)

    def _side_by_side(self, key: Key, vector: bool) -> None:
        """Some vectors, or rows, of a loop at once, and what is left of it."""
        size = self.group.layout.sizes[key]
        step = self.config.lanes if vector else 1
        whole = size // step
        together = math.gcd(whole, self.config.chains) if whole else 1
        outer = [k for k in self.group.free if k != key]
        if whole:
            group = Var(self.body.name("g"), whole // together)
            chains = [
                _Chain(Var(self.body.name("v"), size), f"{group.name} * {together * step} + {c * step}", vector)
                for c in range(together)
            ]
            self._region(outer, chains, key, group)
        if size % step:
            chain = _Chain(Var(self.body.name("v"), size), str(whole * step), vector, size % step)
            self._region(outer, [chain], key)

    def _region(self, outer: list[Key], chains: list[_Chain], inner: Key | None, group: Var | None = None) -> None:
        """Rows divided among the threads, and the carried loop inside."""
        body, layout = self.body, self.group.layout
        variables = {k: Var(body.name("i"), layout.sizes[k]) for k in outer}
        with self._rows([*variables.values(), *([group] if group is not None else [])]) as level:
            for chain in chains:
                if chain.var is not None:
                    self.nest.put(f"const long {chain.var.name} = {chain.start};")
                    body.bind(chain.var, level)
            dtype = self.graph.type_of(self.group.scan).dtype
            neutral = literal(int(self.group.attrs.kind == "prod"), dtype)
            states = [body.name("h") for _ in chains]
            for name, chain in zip(states, chains, strict=True):
                start = splat(neutral, dtype) if chain.vector else neutral
                self.nest.put(f"{vector_type(dtype) if chain.vector else c_type(dtype)} {name} = {start};")
            time = Var(body.name("t"), self.group.length)
            with body.loop(time):
                when = Index(time.size - 1, ((time, -1),)) if self.group.attrs.reverse else index_of(time)
                at = {k: index_of(v) for k, v in variables.items()} | {self.group.time: when}
                self._step(at, chains, states, inner, time)

    @contextmanager
    def _rows(self, variables: list[Var]) -> Iterator[int]:
        body = self.body
        total = math.prod(v.size for v in variables)
        turn = body.name("r")
        divided = self.config.threads > 1
        lo, hi = (f"{total} * tid / nt", f"{total} * (tid + 1) / nt") if divided else ("0", str(total))
        with body.block(f"for (long {turn} = {lo}; {turn} < {hi}; ++{turn})") as level:
            stride = 1
            for var in reversed(variables):
                text = f"{turn} / {stride}" if stride > 1 else turn
                self.nest.put(
                    f"const long {var.name} = {text}{'' if stride * var.size >= total else f' % {var.size}'};"
                )
                stride *= var.size
                body.bind(var, level)
            yield level

    # one turn

    def _step(
        self, at: dict[Key, Index], chains: list[_Chain], states: list[str], inner: Key | None, time: Var
    ) -> None:
        body, group = self.body, self.group
        sums: dict[int, list[tuple[str, bool]]] = {r: [] for r in group.reductions}
        for chain, state in zip(chains, states, strict=True):
            here = dict(at)
            if chain.var is not None and inner is not None:
                here[inner] = index_of(chain.var)
            if chain.vector and chain.var is not None:
                body.lanes = Lanes(chain.var, str(chain.count) if chain.count else "")
            self._carry(here, chain, state, time)
            for o in group.full:
                coord = group.layout.coord(o, here)
                body.store(self.targets[o], coord, body.value(o, coord).value)
            for r in group.reductions:
                self._add(r, here, chain, sums[r])
            body.lanes = None
        if inner is None or not group.reductions:
            return
        zeroed = {**at, inner: Index()}
        for r in group.reductions:
            record = self.graph.nodes[r]
            dtype = self.graph.type_of(record.inputs[0]).dtype
            parts = [
                f"{across(record.prim, dtype)}({n})" if vector else n
                for n, vector in _joined(record.prim, dtype, sums[r])
            ]
            name = body.name("s")
            total = parts[0]
            for part in parts[1:]:
                total = combine(record.prim, dtype, total, part)
            self.nest.put(f"const {c_type(dtype)} {name} = {total};")
            value = Value(name, record.type.dtype)
            coord = group.layout.result_coord(r, zeroed)
            body.remember(r, coord, value)
            if r in self.targets:
                body.store(self.targets[r], coord, value)
        for o in group.post:
            if o not in group.reductions:
                coord = group.layout.coord(o, zeroed)
                body.store(self.targets[o], coord, body.value(o, coord).value)

    def _carry(self, at: dict[Key, Index], chain: _Chain, state: str, time: Var) -> None:
        """One turn of the recurrence for one register of states."""
        body, group, layout = self.body, self.group, self.group.layout
        dtype = self.graph.type_of(group.scan).dtype
        operands = []
        for n in self.graph.nodes[group.scan].inputs:
            value = body.value(n, layout.coord(n, at)).value
            whole = value.vector or not chain.vector
            operands.append(value.name if whole else splat(value.name, dtype))
        level = self.nest.level
        before = body.define(dtype, chain.vector, state, level, "p").value if group.attrs.exclusive else None
        if group.attrs.kind == "linear":
            new = f"{time.name} == 0 ? {operands[1]} : w_plus(w_times({operands[0]}, {state}), {operands[1]})"
        else:
            new = f"{'w_plus' if group.attrs.kind == 'sum' else 'w_times'}({state}, {operands[0]})"
        after = body.define(dtype, chain.vector, new, level, "n").value
        self.nest.put(f"{state} = {after.name};")
        body.remember(group.scan, layout.coord(group.scan, at), before if before is not None else after)

    def _add(self, r: int, at: dict[Key, Index], chain: _Chain, parts: list[tuple[str, bool]]) -> None:
        """What a register of states gives to a sum; lanes that do not exist give nothing."""
        body = self.body
        record = self.graph.nodes[r]
        operand = record.inputs[0]
        dtype = self.graph.type_of(operand).dtype
        value = body.value(operand, self.group.layout.coord(operand, at)).value
        name = value.name if value.vector or not chain.vector else splat(value.name, dtype)
        if chain.vector and chain.count:
            none = splat(identity(record.prim, dtype), dtype)
            name = body.define(
                dtype, True, f"w_select(w_first({chain.count}), {name}, {none})", self.nest.level
            ).value.name
        parts.append((name, chain.vector))


def _joined(prim: Prim, dtype: DType, parts: list[tuple[str, bool]]) -> list[tuple[str, bool]]:
    """Parts of one kind by a fixed tree: at most one vector; all single numbers stay."""
    vectors = [n for n, vector in parts if vector]
    while len(vectors) > 1:
        vectors = [
            combine(prim, dtype, *vectors[j : j + 2]) if j + 1 < len(vectors) else vectors[j]
            for j in range(0, len(vectors), 2)
        ]
    return [(n, True) for n in vectors] + [(n, False) for n, vector in parts if not vector]
