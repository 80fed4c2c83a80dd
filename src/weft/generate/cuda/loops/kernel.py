"""A problem and a form in, the text and the launches of one CUDA source out."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from weft.generate.cuda.intrinsics.approx import approx_header, may_approximate
from weft.generate.cuda.intrinsics.prelude import float8, machine_header, runtime_header
from weft.generate.cuda.loops.body import Accesses, CudaBody, TileKey
from weft.generate.cuda.loops.cross_cta import factors_together
from weft.generate.cuda.loops.forms import LEAST_CTAS, Form
from weft.generate.cuda.loops.lanes import Oversized, Scene
from weft.generate.cuda.loops.launch import Draft
from weft.generate.cuda.loops.moments import Moments, meet_header, moments_header
from weft.generate.cuda.loops.point import emit_parts, parts_of
from weft.generate.cuda.loops.rows import Rows
from weft.generate.cuda.loops.scatter import Scatter, scatter, scatter_header
from weft.generate.cuda.loops.split import split_rows
from weft.generate.cuda.loops.stages import Part, Segment, build_segments, choose_roots, is_heavy
from weft.generate.cuda.loops.tile import Tiled
from weft.generate.cuda.loops.wait import WAIT, with_wait
from weft.generate.cuda.role.assemble import role_header, solo
from weft.generate.cuda.role.role import DeviceRole, Parameter, RoleSource
from weft.generate.expr.ctype import storage_type
from weft.generate.loopnest.body import Coord
from weft.generate.loopnest.memory import Buffer, Unfused, dense
from weft.generate.loopnest.nest import Nest
from weft.generate.loopnest.plan import Layout, build_stages, live_nodes
from weft.generate.loopnest.windows import separate_windows
from weft.ir import attrs as a
from weft.ir.graph import Graph, NodeId
from weft.ir.prims import Prim
from weft.ir.types import DType, to_bits
from weft.kernels.candidate import Problem
from weft.kernels.formats import Format
from weft.kernels.source import CudaSource, Pointer, Schedule

ALIGN = 256
SHARED = 227 << 10
OWN_SHARED = 4 << 10
USUAL_SHARED = 48 << 10
OWN_MOST = 24 << 10
ROOM_STEP = 128
REGISTERS = 1 << 16
LEAST_REGISTERS = 80
MOST_AT_ONCE = 4
"""Blocks whose values wait in shared memory: bytes of a multiprocessor and beside those values; what a launch may have
unasked, and most that a kernel declares of that; registers; how many."""
_NAME = re.compile(r"\b(?:in|out|v|state|table)\d+\b")


class CudaText:
    """Builds one source; see `source`."""

    def __init__(self, problem: Problem, form: Form, entry: str) -> None:
        self.problem = problem
        self.form = form
        self.entry = entry
        self.scatter: Scatter | None = scatter(problem) if form.scatter else None
        graph = problem.graph if self.scatter is None else self.scatter.inner(problem.graph)
        self.graph: Graph = separate_windows(graph, live_nodes(graph))
        if form.num_splits > 1:
            last = Format.LAST in problem.input_formats
            self.graph = split_rows(self.graph, form.num_splits, last=last) or self.graph
        if form.cross_cta >= LEAST_CTAS:
            self.graph = factors_together(self.graph)
        cut: set[NodeId] = set()
        for _ in range(32):  # each turn takes one more value out of registers
            try:
                self._build(frozenset(cut))
                return
            except Unfused as signal:
                if signal.node in cut:
                    raise Oversized from signal
                cut.add(signal.node)
        raise Oversized

    # plan

    def _build(self, cut: frozenset[NodeId]) -> None:
        graph = self.graph
        live = live_nodes(graph)
        self.approximate = may_approximate(graph)
        self.layout = Layout(graph, live)
        self.roots = choose_roots(graph, live, keep=self.form.keep)
        stages, self.reads = build_stages(graph, self.layout, self.roots, frozenset())
        form = self.form
        self.segments = build_segments(self.layout, stages, self.reads, fuse=form.fuse, cut=cut, apart=form.apart)
        self.accesses = Accesses(self.form.vector)
        self.carried: dict[str, dict[int, set[tuple[NodeId, Coord]]]] = {}
        """Per launch and stage the values that the first pass asked for."""
        self.tiles: dict[str, dict[int, list[TileKey]]] = {}
        self._emit(live)
        self.accesses.frozen = True
        self._emit(live)

    def _emit(self, live: Sequence[NodeId]) -> None:
        self.workspace_bytes = 0
        self.state_bytes = 0
        self.pointers: dict[str, tuple[Pointer, str]] = {}
        self.tables: dict[str, str] = {}
        self.drafts: list[Draft] = []
        self.fixed = self._fixed_buffers(live)
        self.stored = self._stored_roots()
        written: set[NodeId] = set()
        for launch in self._grouped():
            readable = self.fixed | {r: b for r, b in self.stored.items() if r in written}
            targets = {r: b for r, b in self.stored.items() if any(r in s.roots for s in launch)}
            self._launch(launch, Scene(self.graph, self.layout, readable, targets))
            written |= set(targets)

    def _grouped(self) -> list[list[Segment]]:
        """Segments that run side by side in one launch: elementwise ones that need nothing of each other."""
        groups: list[list[Segment]] = []
        for segment in self.segments:
            last = groups[-1] if groups else None
            if last is None or segment.rows is not None or last[0].rows is not None or self._needs(segment, last):
                groups.append([segment])
            else:
                last.append(segment)
        return groups

    def _needs(self, segment: Segment, others: Sequence[Segment]) -> bool:
        """Whether a segment must read what the others store (cheap values it computes again)."""
        theirs = {r for other in others for r in other.roots}
        return any(
            r not in self.graph.outputs or is_heavy(self.graph, r, self.roots)
            for root in segment.roots
            for r in self.reads[root]
            if r in theirs
        )

    # memory

    def _fixed_buffers(self, live: Sequence[NodeId]) -> dict[NodeId, Buffer]:
        found: dict[NodeId, Buffer] = {}
        for position, node in enumerate(self.graph.inputs):
            t = self.graph.type_of(node)
            strides = self.problem.input_formats[position].strides(t.shape)
            name = f"in{position}"
            self.pointers[name] = (Pointer("in", position), storage_type(t.dtype))
            found[node] = dense(name, t.dtype, t.shape, strides, fixed=True)
        for node in live:
            t = self.graph.type_of(node)
            if self.graph.nodes[node].prim is Prim.CONSTANT and t.size > 1:
                found[node] = dense(f"table{node}", t.dtype, t.shape, Format.ROW.strides(t.shape), fixed=True)
                self.tables[f"table{node}"] = table_words(self.graph, node)
        return found

    def _stored_roots(self) -> dict[NodeId, Buffer]:
        """Outputs, and what one segment computes and another reads."""
        graph = self.graph
        segment_of = {r: k for k, s in enumerate(self.segments) for r in s.roots}
        found: dict[NodeId, Buffer] = {}
        formats = self.problem.output_formats
        fmt = Format.LAST if formats.count(Format.LAST) * 2 > len(formats) else Format.ROW
        for root in sorted(self.roots):
            t = graph.type_of(root)
            if root in graph.outputs:
                position = graph.outputs.index(root)
                name = f"out{position}"
                self.pointers[name] = (Pointer("out", position), storage_type(t.dtype))
                strides = self.problem.output_formats[position].strides(t.shape)
                found[root] = dense(name, t.dtype, t.shape, strides)
                if self.scatter is not None:  # rows and columns of the result are found when it is stored
                    found[root] = dense(name, t.dtype, t.shape[:2], self.scatter.strides[:2])
            elif any(root in self.reads[r] and segment_of[r] != segment_of[root] for r in self.roots):
                name = self.allocate(t.size, t.dtype.accumulator)
                found[root] = dense(name, t.dtype.accumulator, t.shape, fmt.strides(t.shape))
        return found

    def allocate(self, count: int, dtype: DType) -> str:
        """Name of an array in the workspace."""
        name = f"v{sum(n.startswith('v') for n in self.pointers)}"
        self.pointers[name] = (Pointer("work", self.workspace_bytes), storage_type(dtype))
        self.workspace_bytes += -(-count * dtype.itemsize // ALIGN) * ALIGN
        return name

    def counters(self, count: int) -> str:
        """Name of an array of counters, zero between calls."""
        name = f"state{sum(n.startswith('state') for n in self.pointers)}"
        self.pointers[name] = (Pointer("state", self.state_bytes), "unsigned")
        self.state_bytes += -(-count * 4 // ALIGN) * ALIGN
        return name

    # launches

    def _draft(self, scene: Scene, threads: int) -> Draft:
        nest = Nest()
        number = len(self.drafts)
        body = CudaBody(self.graph, scene.readable, nest, self.accesses)
        body.approximate = self.approximate
        body.scatter = self.scatter
        return Draft(str(number or ""), threads, nest, body)

    @property
    def weights(self) -> set[str]:
        """Names of inputs that no kernel ever writes."""
        records = enumerate(self.graph.nodes[n].attrs for n in self.graph.inputs)
        return {f"in{k}" for k, x in records if isinstance(x, a.InputAttrs) and x.is_weight}

    def _launch(self, segments: Sequence[Segment], scene: Scene) -> None:
        if segments[0].rows is not None:
            draft = self._draft(scene, self.form.threads)
            (Moments if self.form.single_pass else Rows)(self, draft, scene, segments[0]).emit()
        else:
            draft = self._draft(scene, self.form.threads)
            parts: list[Part | Tiled] = []
            for segment in segments:
                parts += parts_of(scene, segment.stages[0], self.form, f"i{len(parts)}_")
            emit_parts(draft, scene, parts, self.form, self.tiles.setdefault(draft.suffix, {}))
        if draft.blocks:
            self.drafts.append(draft)

    def source(self, schedule: Schedule) -> CudaSource:
        """The finished source."""
        drafts = [(draft, *self._lines(draft)) for draft in self.drafts]
        made = [self._role(*x, first=number == 0) for number, x in enumerate(drafts)]
        if not made:  # nothing but empty tensors; still a launch, so that there is something to time
            made = [DeviceRole(32, "\n".join(WAIT), (), (1, 1, 1))]
        tables = {n for _, _, names in drafts for n in names if n.startswith("table")}
        fixed = "".join(f"{self.tables[t]}\n" for t in sorted(tables, key=_natural))
        made[0] = replace(made[0], globals=fixed)
        source = RoleSource(
            schedule=schedule,
            headers=tuple(f"{x.rstrip()}\n" for x in self._headers("\n".join(x.body for x in made))),
            roles=tuple(made),
            workspace_bytes=self.workspace_bytes,
            state_bytes=self.state_bytes,
            capability=90 if any(d.cluster > 1 for d in self.drafts) else 80,
        )
        return solo(source, self.entry)

    def _headers(self, text: str) -> Iterator[str]:
        """The headers that the bodies need, in order."""
        if self._is_wide():
            yield "#define W_WIDE"
        yield machine_header()
        yield runtime_header()
        yield role_header()
        if any(self.graph.type_of(n).dtype.is_float8 for n in live_nodes(self.graph)):
            yield float8()
        if "w_rough_" in text:
            yield approx_header()
        if "w_moments<" in text or "w_meet<" in text:
            yield moments_header()
        if "w_meet<" in text:
            yield meet_header()
        if "w_show<" in text:
            yield scatter_header()

    def _lines(self, draft: Draft) -> tuple[list[str], list[str]]:
        """The statements of a launch, and the names of the buffers and tables in them."""
        lines = [line for item in draft.nest.stack for line in item.lines()]
        if self.scatter is not None and any("w_show<" in line for line in lines):
            draft.shared += self.scatter.shared()
            draft.prologue += self.scatter.prologue(draft.threads)
        return lines, sorted(set(_NAME.findall("\n".join([*draft.prologue, *lines]))), key=_natural)

    def _role(self, draft: Draft, lines: list[str], names: Sequence[str], *, first: bool) -> DeviceRole:
        text = "\n".join(lines)
        parameters = []
        locals_ = []
        # a later launch starts when the first has waited for whoever wrote the inputs
        settled = self.weights if first else {f"in{k}" for k in range(len(self.graph.inputs))}
        shared = [name for name in names if name not in self.tables and name not in settled]
        for name in names:
            if name in self.tables:
                kind = next(b.dtype for b in self.fixed.values() if b.name == name)
                c = storage_type(kind)
                locals_.append(f"  const {c}* const {name} = (const {c}*){name}_words;")
                continue
            pointer, c = self.pointers[name]
            written = pointer.kind == "state" or re.search(rf"w_(?:stv?|show)(?:<\d+>)?\({name} ", text) is not None
            parameters.append(Parameter(name, pointer, f"{c}* __restrict__" if written else f"const {c}*"))
        body = [
            *(f"  {line}" for line in draft.shared),
            *locals_,
            *(f"  {line}" for line in draft.prologue),
            *(f"  {line}" if not line.startswith("#") else line for line in with_wait(lines[1:-1], shared)),
        ]
        return DeviceRole(
            threads=draft.threads,
            body="\n".join(body),
            parameters=tuple(parameters),
            grid=(draft.blocks, 1, 1),
            name=draft.suffix,
            min_ctas_per_sm=_at_once(draft),
            shared_bytes=_asked(draft),
            shared_alignment=16,
            cluster=(draft.cluster, 1, 1),
        )

    def _is_wide(self) -> bool:
        return any(self.graph.type_of(n).size >= 2**31 for n in live_nodes(self.graph)) or self.workspace_bytes >= 2**33


def table_words(graph: Graph, node: NodeId) -> str:
    """A constant as its bytes: the compiler takes no infinity in a table."""
    dtype = graph.type_of(node).dtype
    data = np.ascontiguousarray(graph.constant(node))
    if dtype.is_emulated:
        data = to_bits(data, dtype)
    raw = data.tobytes()
    words = np.frombuffer(raw + b"\0" * (-len(raw) % 16), np.uint32)
    text = ", ".join(f"{w}u" for w in words.tolist())
    return f"W_TABLE unsigned table{node}_words[{len(words)}] = {{{text}}};"


def _asked(draft: Draft) -> int:
    """Shared memory of a launch: more than is usual has to be asked for, by what the kernel declares itself, too."""
    return (
        max(draft.smem_stash, USUAL_SHARED + ROOM_STEP)
        if draft.smem_stash > USUAL_SHARED - OWN_MOST
        else draft.smem_stash
    )


def _at_once(draft: Draft) -> int:
    """As many blocks run at once on a multiprocessor as have room: some read while others wait. 0: not told."""
    if not draft.smem_stash:
        return 0
    return max(
        1, min(MOST_AT_ONCE, SHARED // (draft.smem_stash + OWN_SHARED), REGISTERS // (LEAST_REGISTERS * draft.threads))
    )


def _natural(name: str) -> tuple[str, int]:
    head = name.rstrip("0123456789")
    return head, int(name[len(head) :])
