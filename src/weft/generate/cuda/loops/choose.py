"""Which forms of a kernel are worth measuring, by static rules."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from weft.costmodel.profile import costs_of
from weft.device.cuda.facts import GpuFacts
from weft.generate.cuda.loops import pointwise
from weft.generate.cuda.loops.cross_cta import balanced, cross_cta_forms, stashed
from weft.generate.cuda.loops.forms import LEAST_CTAS, Form
from weft.generate.cuda.loops.rows import FULL, MAX_CARRIED, SHORT
from weft.generate.cuda.loops.scatter import scatter
from weft.generate.cuda.loops.split import long_reductions, possible_splits, split_rows
from weft.generate.cuda.loops.stages import MAX_ROW
from weft.generate.loopnest.plan import REDUCTIONS, live_nodes, reduced_axes
from weft.ir import attrs as a
from weft.ir.graph import Graph, NodeId
from weft.ir.moments import centred
from weft.ir.prims import CATEGORY, Category, Prim
from weft.kernels.candidate import Problem
from weft.kernels.formats import Format

LEAST_COLUMNS = 4
"""Vectors of neighbouring rows that a block takes: 64 bytes, two sectors of memory."""
THREADS = 256
WIDE_THREADS = 512
CLUSTER = 8
"""Largest size of a cluster that every device with clusters has."""
GATHERED = 4096
"""Results per multiprocessor from which threads that gather have several vectors."""
FEWEST_CORNERS = 4
"""Gathers of a resize of images by weights."""
MOST_JOINED = 16
"""Channels that a thread has all of."""
ALIKE = 0.25
"""A form with the vectors of an earlier one counts as so much slower, each time."""
ONCE_THREADS = 768
"""Threads of a multiprocessor, by the registers of a pass for mean and variance."""
MOST_STREAMED = 8
"""So many times what a thread keeps in registers it goes through at most where it keeps nothing."""
HALF = 2
"""Bytes of the numbers that wait as they were read."""
MOST_HELD = 1 << 14
"""Elements of a row that a block keeps in registers."""


def forms(problem: Problem, facts: GpuFacts) -> list[Form]:
    """The most promising first, at most eight."""
    graph = problem.graph
    reductions = [n for n in live_nodes(graph) if graph.nodes[n].prim in REDUCTIONS]
    if not reductions:
        return _pointwise(problem, facts)
    return _rows(problem, facts, reductions)


def _pointwise(problem: Problem, facts: GpuFacts) -> list[Form]:
    """By the model (see `pointwise`), except where memory decides and all blocks are much alike, and for gathers."""
    ranked = _ranked(problem, facts)
    size = max(problem.graph.type_of(n).size for n in problem.graph.outputs)
    if size >= facts.sms * GATHERED and any(n.prim is Prim.GATHER for n in problem.graph.nodes):
        shared = [Form(threads=256, items=2), Form(threads=128, items=4)]  # vectors share indices and weights
        ranked = (
            [ranked[0], *shared, *(f for f in ranked[1:] if f not in shared)] if ranked[0] not in shared else ranked
        )
        if sum(n.prim is Prim.GATHER for n in problem.graph.nodes) >= FEWEST_CORNERS:
            along = [Form(threads=t, items=k, corners=True) for t, k in ((128, 4), (256, 4), (128, 8))]
            ranked = [replace(along[1], eager=True), along[0], replace(along[0], eager=True), *along[1:], *ranked]
    if _joins_few(problem):
        ranked = [Form(threads=128, whole=True), Form(threads=256, whole=True), *ranked]
    return ranked[:8]


def _joins_few(problem: Problem) -> bool:
    """Whether few channels that lie last are joined."""
    graph = problem.graph
    return any(n.prim is Prim.CONCAT and cast("a.ConcatAttrs", n.attrs).axis == 1 for n in graph.nodes) and any(
        f is Format.LAST and graph.type_of(n).shape[1] <= MOST_JOINED
        for n, f in zip(graph.outputs, problem.output_formats, strict=True)
    )


def _ranked(problem: Problem, facts: GpuFacts) -> list[Form]:
    work = pointwise.work_of(problem)
    found = [Form(threads=n) for n in (128, 256, 64, 512)]
    found += [Form(threads=128, vector=8), Form(threads=64, vector=8), Form(threads=256, vector=4)]
    found += [Form(threads=256, items=2), Form(threads=128, items=4)]
    found += [Form(threads=n, tile=True) for n in (256, 128, 512)] if work.transposes else []
    ranked = sorted((pointwise.cycles(work, form, facts), i) for i, form in enumerate(found))
    seen: dict[tuple[int, bool], int] = {}
    unlike = []
    for modelled, i in ranked:  # the first few unlike each other
        kind = found[i].vector, found[i].tile
        unlike.append((modelled * (1 + ALIKE * seen.get(kind, 0)), i))
        seen[kind] = seen.get(kind, 0) + 1
    return [found[i] for _, i in sorted(unlike)][:8]


def _rows(problem: Problem, facts: GpuFacts, reductions: list[int]) -> list[Form]:
    graph = problem.graph
    largest = max(reductions, key=lambda n: graph.type_of(graph.nodes[n].inputs[0]).size)
    operand = graph.type_of(graph.nodes[largest].inputs[0])
    rows = max(graph.type_of(largest).size, 1)
    length = operand.size // rows
    beside = _rows_are_neighbours(problem, largest)
    dependent = len(reductions) > 1
    found = [Form(threads=128), Form(threads=256), Form(threads=256, vector=8)]
    if beside:
        found = [Form(threads=256, columns=4), Form(threads=256, vector=8, columns=4), Form(threads=128), *found[1:]]
        if length <= SHORT and rows >= FULL:
            found = [Form(threads=256), Form(threads=128), Form(threads=256, vector=8), *found[:2]]
    elif length >= 1024:
        found = [*found[:2], *([Form(threads=128, per_row=128)] if length <= 4096 else []), found[2]]
        found.append(Form(threads=512, per_row=512))
    elif length <= 256:
        found += [Form(threads=128, per_row=32), Form(threads=128, per_row=8)]
    else:
        found.insert(1, Form(threads=128, per_row=32))  # a warp has a row to itself: no barriers
        if rows < 4 * facts.sms and is_pair(graph):
            found.insert(2, Form(threads=128, per_row=128, single_pass=True))  # one barrier instead of two
    blocks = -(-rows // 32) if beside else rows
    alternating = _run(problem, largest) > 0  # a block takes several rows there, too
    fewest = -(-rows // 32) if beside or alternating else rows
    clusters = [_cluster(length, c) for c in (4, 2, 8) if length >= c * 2048] if facts.capability >= 90 else []
    if fewest < facts.sms and length >= (512 if beside else 4096) and operand.size >= 1 << 17:
        # rows alone do not fill the machine
        spread = [Form(threads=256, fuse=False, spread=k * facts.sms) for k in (2, 4, 1)]
        if blocks * 16 < facts.sms:  # a handful of blocks is hopeless
            found = [Form(threads=512, fuse=False, spread=2 * facts.sms)]
        feeds = dependent or any(graph.type_of(n).size >= operand.size for n in graph.outputs)
        divided = _split(problem, facts, beside=beside) if feeds else []
        if is_pair(graph):
            norms = _norms(problem, facts, operand.nbytes, divided, beside=beside)
            norms = _outward(problem, facts, norms, beside=beside)
            if length > MAX_ROW:  # sum and squares are launches of their own, whose blocks would have whole rows
                norms = [form for form in norms if form.cross_cta < LEAST_CTAS]
            return list(dict.fromkeys([*norms, *spread[: 3 - len(divided)], *found]))[:8]
        alone = found[:2] if not beside and blocks * 3 >= facts.sms * 2 and length <= MOST_HELD else []
        if alternating:
            found = [*divided, *spread[: 3 - len(divided)], *found]
        elif beside:
            clusters = _cluster_columns(problem, facts, rows, length)
            found = [*divided[:1], *clusters, *divided[1:], *spread[: 3 - len(divided)], *found]
        else:
            found = [*alone, *divided[::-1], *clusters, *spread[: 3 - len(divided)], *found]
    elif is_pair(graph) and length > MOST_HELD:
        divided = _split(problem, facts, beside=beside) if beside else []
        found = [*divided, *_once(problem, facts, beside=beside), *found, Form(threads=256, fuse=False)]
    elif dependent and length > MOST_HELD and not beside:
        found = [*clusters, *found]
    elif beside and not dependent and operand.nbytes >= costs_of(facts).reductions.large_bytes:
        found = [Form(threads=256, columns=k, fuse=False, spread=8 * facts.sms) for k in (16, 8)] + found
    elif dependent and (beside or length > 4096):
        once = _once(problem, facts, beside=beside) if is_pair(graph) and length >= 512 else []
        divided = _split(problem, facts, beside=beside) if beside and length >= 512 else []
        found = [*divided, *once[:1], *found]
        found.append(Form(threads=256, fuse=False))
    found.append(Form(threads=256, keep=False))
    return list(dict.fromkeys(found))[:8]


def _norms(problem: Problem, facts: GpuFacts, size: int, divided: list[Form], *, beside: bool) -> list[Form]:
    """Ways to mean and variance of few long rows, of so many bytes as f32: unlike each other first.

    Blocks that meet read memory once; next come two launches, which beat clusters at most sizes, whose blocks start
    and meet slowly. From where the L2 cache no longer holds what is read twice, an elementwise kernel of its own is
    worth a third, and where nothing of it is held, blocks that meet lose more by their short runs than by waiting.
    """
    once = _split(problem, facts, beside=beside, single_pass=True)
    clusters = _once(problem, facts, beside=beside)
    cross_cta_offers = _meeting(problem, facts, beside=beside)
    c = costs_of(facts).reductions
    apart = [replace(form, apart=True, spread=0) for form in once[:1]] if size >= c.large_bytes // 2 else []
    if size >= c.streamed * facts.l2_bytes:
        return [*apart, *divided[:1], *once[:1], *divided[1:], *once[1:], *clusters[:1]]
    if size >= c.large_bytes:
        return [*divided[:1], *cross_cta_offers, *apart, *once[:1], *divided[1:], *once[1:], *clusters[:1]]
    if not beside and not any(form.columns for form in clusters):  # rows that lie in one piece
        divided = divided[::-1]
    return [
        *cross_cta_offers[:1],
        *divided[:1],
        *cross_cta_offers[1:],
        *apart,
        *once[:1],
        *clusters[:2],
        *divided[1:],
        *once[1:],
    ]


def _outward(problem: Problem, facts: GpuFacts, ranked: list[Form], *, beside: bool) -> list[Form]:
    """These and, as far as measured to be faster: even blocks, and results stored from where they are computed."""
    rows = _rows_of(problem)
    streamed = costs_of(facts).reductions.streamed
    if not (beside and rows.lanes > 1) or rows.stored * 4 >= streamed * facts.l2_bytes * HALF:
        return ranked
    sizes = rows.count, rows.stored
    even = balanced(facts, *sizes, access=16, lanes=rows.lanes)
    padded = scatter(problem) is not None
    held = stashed(facts, *sizes, access=16, lanes=rows.lanes, beside=rows.beside) if padded else []
    if held:
        return [*(replace(form, scatter=True) for form in held), *ranked]
    if even or not padded:
        return [*even[:1], *ranked[:1], *even[1:], *ranked[1:]]
    wide = cross_cta_forms(facts, *sizes, access=16, lanes=rows.lanes, beside=True, wide=True)
    shown = [replace(form, scatter=True) for form in wide]
    return [*ranked[:1], *shown[:1], *ranked[1:2], *shown[1:], *ranked[2:]]


@dataclass(frozen=True, slots=True)
class _Rows:
    """The longest rows of a problem: how many, their bytes in memory, how many lie side by side, of a thread's read."""

    count: int
    stored: int
    beside: int
    lanes: int


def _rows_of(problem: Problem) -> _Rows:
    graph = problem.graph
    long = long_reductions(graph)
    operand = graph.type_of(graph.nodes[long[0]].inputs[0])
    large = [graph.type_of(n) for n in _sources(graph, long[0]) if graph.type_of(n).size * 2 >= operand.size]
    item = min((t.dtype.itemsize for t in large), default=operand.dtype.itemsize)
    lanes = 1 if _run(problem, long[0]) or item > HALF else 16 // item
    return _Rows(graph.type_of(long[0]).size, operand.size * item, operand.shape[1] if operand.rank > 1 else 1, lanes)


def _meeting(problem: Problem, facts: GpuFacts, *, beside: bool) -> list[Form]:
    """What `meetings` asks for."""
    graph = problem.graph
    long = long_reductions(graph)
    operand, rows = graph.type_of(graph.nodes[long[0]].inputs[0]), graph.type_of(long[0]).size
    large = [graph.type_of(n) for n in _sources(graph, long[0]) if graph.type_of(n).size * 2 >= operand.size]
    item = min((t.dtype.itemsize for t in large), default=operand.dtype.itemsize)
    run = _run(problem, long[0])
    access, lanes = (run * item, 1) if run else (16, 16 // item)
    return cross_cta_forms(facts, rows, operand.size * item, access=access, lanes=lanes, beside=beside or run > 0)


def _split(problem: Problem, facts: GpuFacts, *, beside: bool, single_pass: bool = False) -> list[Form]:
    """Long rows in parts, each of which a block keeps in registers: enough of them for all multiprocessors, and few.

    With `single_pass` it goes through them in one pass and need not keep them. What follows repeats the sums over parts
    in each of its blocks, so that many parts cost.
    """
    graph = problem.graph
    long = long_reductions(graph)
    if not long:
        return []
    operand = graph.type_of(graph.nodes[long[0]].inputs[0])
    rows = graph.type_of(long[0]).size
    large = [graph.type_of(n) for n in _sources(graph, long[0]) if graph.type_of(n).size * 2 >= operand.size]
    lanes = max(1, 16 // min((t.dtype.itemsize for t in large), default=operand.dtype.itemsize))
    last = Format.LAST in problem.input_formats
    columns = min(LEAST_COLUMNS, max(1, rows // lanes)) if beside else 1
    across = THREADS // columns
    per_turn = across if beside else across * lanes
    groups = max(1, rows // (lanes * columns)) if beside else rows
    run = _run(problem, long[0])
    if run:
        lanes = run
        groups = max(1, rows * run * operand.dtype.itemsize // 256)  # read as 16 bits: lines of 128 bytes
        per_turn = max(1, THREADS * rows * run // (groups * 64))
    most = per_turn * max(1, MAX_CARRIED // (lanes * max(1, len(large)))) * (MOST_STREAMED if single_pass else 1)
    sizes = {p: operand.size // rows // p for p in possible_splits(graph, long[0], last=last) if p > 1}
    able = [p for p, size in sizes.items() if per_turn // 2 <= size <= most]
    c = costs_of(facts).reductions
    enough = sum(t.nbytes for t in large) / facts.sms / c.block_bytes
    blocks = facts.sms * min(c.most_blocks, max(c.fewest_blocks, enough))
    found = []
    for wanted in (blocks / groups, 2 * blocks / groups):
        num_splits = min(able, key=lambda p: abs(math.log(p / wanted)), default=1)
        if split_rows(graph, num_splits, last=last) is not None:
            spread = max(2, round(blocks / facts.sms)) * facts.sms
            form = Form(THREADS, num_splits=num_splits, spread=spread, single_pass=single_pass)
            found.append(replace(form, per_row=0 if beside or run else THREADS, columns=columns if beside else 0))
    return list(dict.fromkeys(found))


def is_pair(graph: Graph) -> bool:
    """Whether all that is reduced over the longest rows is their sum and the squares about its mean."""
    long = long_reductions(graph)
    return len(long) == 2 and centred(graph, long[1]) == long[0]


def _once(problem: Problem, facts: GpuFacts, *, beside: bool) -> list[Form]:
    """One launch and one pass for mean and variance: clusters that fill the machine and that the L2 cache holds."""
    graph = problem.graph
    long = long_reductions(graph)
    if facts.capability < 90 or not is_pair(graph):
        return []
    operand = graph.type_of(graph.nodes[long[0]].inputs[0])
    rows = graph.type_of(long[0]).size
    length = operand.size // rows
    large = [graph.type_of(n) for n in _sources(graph, long[0]) if graph.type_of(n).size * 2 >= operand.size]
    item = min((t.dtype.itemsize for t in large), default=operand.dtype.itemsize)
    run = _run(problem, long[0])
    stored = rows * length * item
    c, port = costs_of(facts).reductions, costs_of(facts).roofline.l2_port_bytes
    ranked: list[tuple[float, Form]] = []
    for columns, cluster in ((1, CLUSTER), (2, CLUSTER), (4, CLUSTER)) if beside or run else ((0, 4), (0, 2), (0, 8)):
        access = run * item if run else 16
        blocks = -(-rows // max(1, columns * (1 if run else 16 // item))) * cluster
        vectors = stored // (access * blocks)  # of a block
        few = blocks <= 2 * facts.sms
        threads = min(WIDE_THREADS, max(128, 1 << (-(-vectors // (3 if few else 4)) - 1).bit_length()))
        resident = min(blocks, facts.sms * max(1, ONCE_THREADS // threads))
        if vectors < 64 or blocks * 3 < facts.sms or resident * vectors * access > facts.l2_bytes * c.held:
            continue
        read = stored * (max(1.0, 32 / (columns * access)) if columns else 1.0)
        cycles = -(-blocks // resident) * c.exchange + (2 * read + stored) / (min(blocks, facts.sms) * port)
        per_row = 0 if columns else threads
        ranked.append((cycles, Form(threads, columns=columns, per_row=per_row, cluster=cluster, single_pass=True)))
    # measured: what lies beside each other matters more than the number of blocks
    return [form for _, form in sorted(ranked, key=lambda x: (-x[1].columns, x[0]))]


def _run(problem: Problem, node: NodeId) -> int:
    """Elements of a row that lie side by side where the runs of rows alternate: groups of channels that lie last."""
    operand = problem.graph.type_of(problem.graph.nodes[node].inputs[0])
    if Format.LAST not in problem.input_formats or operand.rank < 5:
        return 0
    channels = [k for k in reduced_axes(problem.graph, node) if 0 < k < operand.rank - 2]
    run = math.prod(operand.shape[k] for k in channels)
    return run if channels and 1 not in channels and run * 2 <= 64 else 0


def _sources(graph: Graph, node: NodeId) -> set[NodeId]:
    """Inputs that a node depends on."""
    found, seen, stack = set[NodeId](), {node}, [node]
    while stack:
        n = stack.pop()
        if graph.nodes[n].prim is Prim.INPUT:
            found.add(n)
        fresh = set(graph.nodes[n].inputs) - seen
        seen |= fresh
        stack += fresh
    return found


def _cluster_columns(problem: Problem, facts: GpuFacts, rows: int, length: int) -> list[Form]:
    """One launch where clusters hold the rows of a few neighbouring channels in registers, and there are enough."""
    graph = problem.graph
    long = long_reductions(graph)
    if facts.capability < 90 or not long:
        return []
    operand = graph.type_of(graph.nodes[long[0]].inputs[0])
    large = [graph.type_of(n) for n in _sources(graph, long[0]) if graph.type_of(n).size * 2 >= operand.size]
    lanes = max(1, 16 // min((t.dtype.itemsize for t in large), default=operand.dtype.itemsize))
    found: list[Form] = []
    for columns in (4, 2):
        turns = -(-length * columns // (WIDE_THREADS * CLUSTER))
        blocks = rows // (lanes * columns) * CLUSTER
        held = turns * lanes * len(large) <= MAX_CARRIED
        if lanes >= 4 and held and blocks >= facts.sms // 5:
            found = [Form(WIDE_THREADS, columns=columns, cluster=CLUSTER)]
            if blocks >= facts.sms // 3:
                break
    return found


def _cluster(length: int, blocks: int) -> Form:
    """Sixteen to 32 elements for each thread of a cluster."""
    threads = min(1024, max(128, 1 << (length // (blocks * 32)).bit_length()))
    return Form(threads=threads, per_row=threads, cluster=blocks)


def _rows_are_neighbours(problem: Problem, root: int) -> bool:
    """Whether the elements of a row lie apart in memory, and those of neighbouring rows side by side."""
    graph = problem.graph
    start = graph.nodes[root].inputs[0]
    operand, axes = graph.type_of(start), reduced_axes(graph, root)
    formats = dict(zip(graph.inputs, problem.input_formats, strict=True))
    alike = [node for node in graph.inputs if graph.type_of(node).shape == operand.shape]
    alike = alike or sorted(_reshaped(graph, start))
    step = _step(graph, formats, alike[0] if alike else start)
    axis = None if step is None else _axis_of(operand.shape, step)
    return axis is not None and axis not in axes


def _step(graph: Graph, formats: Mapping[NodeId, Format], node: NodeId) -> int | None:
    """How far apart in a value, its last dimension counted first, elements are that lie side by side in memory.

    Of a value that moves what inputs have; None: of another.
    """
    record, shape = graph.nodes[node], graph.type_of(node).shape
    if record.prim is Prim.INPUT:
        inner = [d for d in formats[node].order(len(shape)) if shape[d] > 1]
        return math.prod(shape[inner[-1] + 1 :]) if inner else None
    moved = record.prim in (Prim.CONCAT, Prim.TRANSPOSE)
    if not moved and record.prim is not Prim.RESHAPE and CATEGORY[record.prim] is not Category.ELEMENTWISE:
        return None
    source = max(record.inputs, key=lambda x: graph.type_of(x).size, default=node)
    found = _step(graph, formats, source) if source != node else None
    if found is None or not moved:
        return found
    before = graph.type_of(source).shape
    axis = _axis_of(before, found)
    if axis is None:
        return None
    there = record.attrs.perm.index(axis) if isinstance(record.attrs, a.TransposeAttrs) else axis
    return found // math.prod(before[axis + 1 :]) * math.prod(shape[there + 1 :])


def _reshaped(graph: Graph, node: NodeId) -> set[NodeId]:
    """Inputs that a value has element by element, as they are or in another shape."""
    found, seen, stack, size = set[NodeId](), {node}, [node], graph.type_of(node).size
    while stack:
        n = stack.pop()
        prim = graph.nodes[n].prim
        if prim is Prim.INPUT:
            found.add(n)
        if prim is Prim.RESHAPE or CATEGORY[prim] is Category.ELEMENTWISE:
            fresh = {x for x in graph.nodes[n].inputs if graph.type_of(x).size == size} - seen
            seen |= fresh
            stack += fresh
    return found


def _axis_of(shape: Sequence[int], stride: int) -> int | None:
    """The axis along which elements are counted that are so far apart in rows-last order."""
    step = 1
    for axis in reversed(range(len(shape))):
        if shape[axis] > 1 and step <= stride < step * shape[axis]:
            return axis
        step *= shape[axis]
    return None
