"""Kernels around a scan. A thread carries one state and its neighbours the next ones, or a row has the lanes of warps.

`lanes`: every thread goes along the carried loop; states that are summed stand in neighbouring lanes, which exchange
what they give to each sum. `warps`: the carried loop is cut into pieces of one element for each lane; prefixes of a
piece are found by exchanges (`weft_cuda_scan.h`), and what is carried is handed to the next piece. States that are
summed take turns in the same lanes, so that each lane has its own sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from weft.device.cuda.facts import GpuFacts
from weft.generate.cuda.loops.body import CudaBody
from weft.generate.cuda.loops.kernel import table_words
from weft.generate.cuda.loops.lanes import digits
from weft.generate.cuda.loops.wait import with_wait
from weft.generate.cuda.role.role import DeviceRole, Parameter, RoleSource
from weft.generate.expr import Value, c_type, literal
from weft.generate.expr.ctype import storage_type
from weft.generate.loopnest.body import combine, identity
from weft.generate.loopnest.index import Index, Var, index_of, inner_coefficient
from weft.generate.loopnest.memory import Buffer, Unfused, dense
from weft.generate.loopnest.nest import Nest
from weft.generate.loopnest.plan import Key, live_nodes
from weft.generate.loopnest.scans import ScanGroup, scan_group
from weft.generate.parameters import Parameters
from weft.ir import attrs as a
from weft.ir.declined import Declined
from weft.ir.prims import Prim
from weft.ir.types import DType
from weft.kernels.candidate import Problem
from weft.kernels.formats import Format
from weft.kernels.source import Pointer, Schedule

WARP = 32
THREADS = 128
MOST_WARPS = 8
"""Of a block that has one row."""
UNROLLED = 4
"""Turns of the carried loop whose reads are under way at once."""
_MONOID = {"sum": "w_added", "prod": "w_multiplied", "linear": "w_linear"}


@dataclass(frozen=True, slots=True)
class ScanForm(Parameters):
    """Parameters of a scan's kernel."""

    threads: int
    """Of a block."""
    warps: int
    """That share one row; 0: every thread goes along the carried loop by itself."""

    def schedule(self) -> Schedule:
        """As a schedule of the cuda generator."""
        return self.named("cuda", template="scan")


@cache
def scan_header() -> str:
    """Text of weft_cuda_scan.h."""
    return Path(__file__).with_name("weft_cuda_scan.h").read_text(encoding="utf-8")


def schedules(problem: Problem, facts: GpuFacts) -> list[Schedule] | Declined:
    """Those worth measuring: first the one that gives the machine more threads, unless rows do that alone."""
    group = scan_group(problem.graph)
    if isinstance(group, Declined):
        return group
    if any(problem.graph.type_of(n).size >= 2**31 for n in live_nodes(problem.graph)):
        return Declined("positions past 32 bits in the kernel of a scan")
    own = [ScanForm(THREADS, 0), ScanForm(THREADS // 2, 0)] if group.states <= WARP else []
    shared = [ScanForm(THREADS, 1), ScanForm(2 * THREADS, 1)] if group.states <= WARP else []
    if group.summed is None and group.length >= 4 * WARP:
        most = min(MOST_WARPS, group.length // WARP)
        long = [ScanForm(WARP * w, w) for w in (most, most // 2) if w > 1]
        shared = long + shared if group.rows < 4 * facts.sms else shared + long
    many = group.rows * group.states >= facts.sms * facts.threads_per_sm // 4
    found = own + shared if many else shared + own
    return [f.schedule() for f in found] or Declined(f"{group.states} states are summed")


def roles(problem: Problem, schedule: Schedule, headers: Sequence[str]) -> RoleSource | Declined:
    """The role; `headers`: what all kernels begin with."""
    group = scan_group(problem.graph)
    if isinstance(group, Declined):
        return group
    form = ScanForm.of(schedule)
    try:
        role = _Text(problem, group, form).role()
    except Unfused:
        return Declined("a value of the scan is read before it is there")
    return RoleSource(schedule, (*headers, scan_header()), (role,))


class _Text:
    def __init__(self, problem: Problem, group: ScanGroup, form: ScanForm) -> None:
        self.problem, self.group, self.form = problem, group, form
        graph = self.graph = group.graph
        self.parameters: list[Parameter] = []
        self.tables: dict[str, str] = {}
        self.locals: list[str] = []
        self.shared: set[str] = set()
        """What earlier kernels may write or read."""
        readable: dict[int, Buffer] = {}
        for position, node in enumerate(graph.inputs):
            t, name = graph.type_of(node), f"in{position}"
            readable[node] = dense(name, t.dtype, t.shape, problem.input_formats[position].strides(t.shape), fixed=True)
            self.parameters.append(Parameter(name, Pointer("in", position), f"const {storage_type(t.dtype)}*"))
            attrs = graph.nodes[node].attrs
            if not (isinstance(attrs, a.InputAttrs) and attrs.is_weight):
                self.shared.add(name)
        for node in live_nodes(graph):
            t = graph.type_of(node)
            if graph.nodes[node].prim is Prim.CONSTANT and t.size > 1:
                name, kind = f"table{node}", storage_type(t.dtype)
                readable[node] = dense(name, t.dtype, t.shape, Format.ROW.strides(t.shape), fixed=True)
                self.tables[name] = table_words(graph, node)
                self.locals.append(f"  const {kind}* const {name} = (const {kind}*){name}_words;")
        self.targets: dict[int, Buffer] = {}
        for position, node in enumerate(graph.outputs):
            t, name = graph.type_of(node), f"out{position}"
            self.targets[node] = dense(name, t.dtype, t.shape, problem.output_formats[position].strides(t.shape))
            self.parameters.append(Parameter(name, Pointer("out", position), f"{storage_type(t.dtype)}* __restrict__"))
            self.shared.add(name)
        self.readable = readable
        self.nest = Nest()
        self.body = CudaBody(graph, readable, self.nest)
        self.dtype = graph.type_of(group.scan).dtype
        self.at: dict[Key, Index] = {}
        self.inside = ""
        """Condition under which the row of a thread exists; empty: it always does."""

    def role(self) -> DeviceRole:
        """The whole role."""
        blocks = self._by_lanes() if self.form.warps == 0 else self._by_warps()
        lines = [line for item in self.nest.stack for line in item.lines()][1:-1]
        body = [*self.locals, *(x if x.startswith("#") else f"  {x}" for x in with_wait(lines, self.shared))]
        return DeviceRole(
            threads=self.form.threads,
            body="\n".join(body),
            parameters=tuple(self.parameters),
            grid=(blocks, 1, 1),
            globals="".join(f"{x}\n" for x in self.tables.values()),
        )

    # rows

    def _rows(self, row: str, total: int) -> None:
        """Loop variables of the row that `row` counts; of `total` turns, the last ones may be repeated."""
        rows = self.group.rows
        if total != rows:
            self.inside = self.body.name("k")
            self.nest.put(f"const bool {self.inside} = {row} < {rows}u;")
            name = self.body.name("r")
            self.nest.put(f"const w_index {name} = {self.inside} ? {row} : {rows - 1}u;")
            row = name
        keys = self._ordered()
        variables = [Var(self.body.name("i"), self.group.layout.sizes[k]) for k in keys]
        for line in digits(variables, row, 1):
            self.nest.put(line)
        for key, var in zip(keys, variables, strict=True):
            self.body.know(var.name)
            self.at[key] = index_of(var) if var.size > 1 else Index()

    def _ordered(self) -> list[Key]:
        """The free loops; last the one along which most memory is contiguous."""
        group, layout = self.group, self.group.layout
        keys = [*group.free, group.time, *([] if group.summed is None else [group.summed])]
        variables = {k: Var(f"z{j}", layout.sizes[k]) for j, k in enumerate(keys)}
        body = CudaBody(self.graph, self.readable, Nest())
        for var in variables.values():
            body.bind(var, 0)
        at = {k: index_of(v) for k, v in variables.items()}
        for operand in self.graph.nodes[group.scan].inputs:
            body.value(operand, layout.coord(operand, at))

        def weight(key: Key) -> int:
            return sum(x.itemsize for x in body.accesses if inner_coefficient(x.address, variables[key]) == 1)

        return sorted(group.free, key=lambda k: (weight(k), group.free.index(k)))

    def _when(self, time: Index) -> Index:
        return Index(self.group.length - 1) + time * -1 if self.group.attrs.reverse else time

    # every thread by itself

    def _by_lanes(self) -> int:
        group, body = self.group, self.body
        width = 1 << (group.states - 1).bit_length()
        total = group.rows * width
        blocks = -(-total // self.form.threads)
        thread = f"role.block_x() * {self.form.threads}u + role.thread()"
        self.nest.put(f"const w_index p = {thread};")
        row = "p"
        alive = ""
        if group.summed is not None:
            self.nest.put(f"const w_index row = p / {width}u, lane = p % {width}u;")
            row = "row"
            var = Var("n", group.states)
            self.nest.put(
                f"const w_index n = {'lane' if width == group.states else f'lane < {group.states}u ? lane : 0u'};"
            )
            body.know("n")
            self.at[group.summed] = index_of(var)
            alive = "" if width == group.states else f"lane < {group.states}u"
        self._rows(row, blocks * self.form.threads // width)
        self.nest.put(f"{c_type(self.dtype)} h = {self._neutral()};")
        time = Var("t", group.length)
        with body.loop(time, pragma=f"#pragma unroll {UNROLLED}"):
            at = {**self.at, group.time: self._when(index_of(time))}
            xs = [self._operand(k, at) for k in range(len(self.graph.nodes[group.scan].inputs))]
            level = self.nest.level
            before = body.define(self.dtype, False, "h", level, "p").value
            new = {
                "sum": f"w_plus(h, {xs[0]})",
                "prod": f"w_times(h, {xs[0]})",
                "linear": f"t == 0 ? {xs[-1]} : w_plus(w_times({xs[0]}, h), {xs[-1]})",
            }[group.attrs.kind]
            after = body.define(self.dtype, False, new, level, "e").value
            self.nest.put(f"h = {after.name};")
            body.remember(group.scan, group.layout.coord(group.scan, at), before if group.attrs.exclusive else after)
            self._store_full(at, alive)
            sums = {}
            for r in group.reductions:
                name = self._given(r, at, alive)
                prim, kind = self._reduced(r)
                with_others = combine(prim, kind, name, f"w_shfl({name}, o)")
                self.nest.put("#pragma unroll")
                self.nest.put(f"for (int o = 1; o < {width}; o *= 2) {name} = {with_others};")
                sums[r] = name
            self._store_post(at, sums, "lane == 0u")
        return blocks

    # warps

    def _by_warps(self) -> int:
        group, body = self.group, self.body
        per_row, own = self.form.warps, self.form.warps > 1
        rows = 1 if own else self.form.threads // WARP
        blocks = -(-group.rows // rows)
        monoid = f"{_MONOID[group.attrs.kind]}<{c_type(self.dtype)}>"
        self.nest.put("const unsigned lane = role.thread() % 32u;")
        if own:
            self.nest.put("const unsigned warp = role.thread() / 32u;")
            self.nest.put(f"W_SHARED {monoid} totals[{2 * per_row}];")
            self.nest.put("const w_index row = role.block_x();")
        else:
            self.nest.put(f"const w_index row = role.block_x() * {rows}u + role.thread() / 32u;")
        self._rows("row", blocks * rows)
        states = group.states
        self.nest.put(f"{c_type(self.dtype)} h[{states}];")
        self.nest.put("#pragma unroll")
        self.nest.put(f"for (int i = 0; i < {states}; ++i) h[i] = {self._neutral()};")
        step = WARP * per_row
        piece = Var("c", -(-group.length // step))
        pragma = f"#pragma unroll {UNROLLED}" if group.summed is None and not own else "#pragma unroll 1"
        with body.loop(piece, pragma=pragma):
            position = f"c * {step} + {'warp * 32u + ' if own else ''}lane"
            self.nest.put(f"const w_index s = {position};")
            there = "" if group.length % step == 0 else f"s < {group.length}u"
            self.nest.put(f"const w_index t = {f'{there} ? s : {group.length - 1}u' if there else 's'};")
            time = Var("t", group.length)
            body.know("t")
            at = {**self.at, group.time: self._when(index_of(time))}
            sums = {r: body.name("s") for r in group.reductions}
            for r, name in sums.items():
                prim, kind = self._reduced(r)
                self.nest.put(f"{c_type(kind)} {name} = {identity(prim, kind)};")
            if group.summed is None:
                self._piece(at, "0", there, monoid)
                self._store_full(at, there)
            else:
                turn = Var("n", states)
                with body.loop(turn, pragma="#pragma unroll"):
                    here = {**at, group.summed: index_of(turn)}
                    self._piece(here, "n", there, monoid)
                    self._store_full(here, there)
                    for r, name in sums.items():
                        prim, kind = self._reduced(r)
                        operand = self.graph.nodes[r].inputs[0]
                        value = body.value(operand, group.layout.coord(operand, here)).value.name
                        self.nest.put(f"{name} = {combine(prim, kind, name, value)};")
                self._store_post(at, sums, there)
        return blocks

    def _piece(self, at: dict[Key, Index], state: str, there: str, monoid: str) -> None:
        """The values of one piece from what is carried into it."""
        group, body = self.group, self.body
        xs = [self._operand(k, at) for k in range(len(self.graph.nodes[group.scan].inputs))]
        first = f"t == 0u ? {literal(0, self.dtype)} : {xs[0]}"
        own = f"{{{first}, {xs[-1]}}}" if group.attrs.kind == "linear" else f"{{{xs[0]}}}"
        name, before, total = body.name("m"), body.name("b"), body.name("w")
        self.nest.put(f"{monoid} {total} = {own};")
        if there:
            self.nest.put(f"if (!({there})) {total} = {monoid}::none();")
        self.nest.put(f"{monoid} {before} = w_before({total}, lane);")
        if self.form.warps > 1:
            self.nest.put(f"if (lane == 0u) totals[(c & 1) * {self.form.warps} + warp] = {total};")
            self.nest.put("role.sync();")
            places = f"totals + (c & 1) * {self.form.warps}"
            self.nest.put(f"{before} = w_before_warps<{self.form.warps}>({places}, {before}, warp, {total});")
        level = self.nest.level
        left = body.define(self.dtype, False, f"{before}.of(h[{state}])", level, "p").value
        self.nest.put(f"h[{state}] = {total}.of(h[{state}]);")
        value = left
        if not group.attrs.exclusive:
            new = {
                "sum": f"w_plus({left.name}, {xs[0]})",
                "prod": f"w_times({left.name}, {xs[0]})",
                "linear": f"t == 0u ? {xs[-1]} : w_plus(w_times({xs[0]}, {left.name}), {xs[-1]})",
            }[group.attrs.kind]
            value = body.define(self.dtype, False, new, level, name).value
        body.remember(group.scan, group.layout.coord(group.scan, at), value)

    # values

    def _neutral(self) -> str:
        return literal(int(self.group.attrs.kind == "prod"), self.dtype)

    def _operand(self, k: int, at: dict[Key, Index]) -> str:
        node = self.graph.nodes[self.group.scan].inputs[k]
        return self.body.value(node, self.group.layout.coord(node, at)).value.name

    def _reduced(self, r: int) -> tuple[Prim, DType]:
        record = self.graph.nodes[r]
        return record.prim, self.graph.type_of(record.inputs[0]).dtype

    def _given(self, r: int, at: dict[Key, Index], alive: str) -> str:
        """Name of a variable with what a lane gives to a sum."""
        prim, kind = self._reduced(r)
        operand = self.graph.nodes[r].inputs[0]
        value = self.body.value(operand, self.group.layout.coord(operand, at)).value.name
        name = self.body.name("s")
        self.nest.put(f"{c_type(kind)} {name} = {f'{alive} ? {value} : {identity(prim, kind)}' if alive else value};")
        return name

    def _guard(self, *conditions: str) -> str:
        return " && ".join(c for c in (self.inside, *conditions) if c)

    def _store_full(self, at: dict[Key, Index], alive: str) -> None:
        for o in self.group.full:
            coord = self.group.layout.coord(o, at)
            self.body.store(self.targets[o], coord, self.body.value(o, coord).value)
        if self.group.full:
            self.body.flush(self._guard(alive))

    def _store_post(self, at: dict[Key, Index], sums: dict[int, str], alive: str) -> None:
        group = self.group
        if group.summed is None:
            return
        zeroed = {**at, group.summed: Index()}
        for r, name in sums.items():
            coord = group.layout.result_coord(r, zeroed)
            value = Value(name, self.graph.type_of(r).dtype)
            self.body.remember(r, coord, value)
            if r in self.targets:
                self.body.store(self.targets[r], coord, value)
        for o in group.post:
            if o not in group.reductions:
                coord = group.layout.coord(o, zeroed)
                self.body.store(self.targets[o], coord, self.body.value(o, coord).value)
        self.body.flush(self._guard(alive))
