"""Cut a candidate out of its graph: a stand-alone problem with a canonical text.

Two candidates with equal text pose byte-identical problems, so each is generated and measured once. A rooted DAG with
ordered operands needs no search to be canonical; a missed symmetry costs a second measurement, never a wrong hit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import lru_cache
from weakref import ref

from weft.errors import InvalidGraphError
from weft.ir import attrs as a
from weft.ir.graph import Graph, GraphBuilder, Mask, Node, NodeId, bits
from weft.ir.prims import CATEGORY, COMMUTATIVE, Category, Prim
from weft.ir.remembered import while_it_lives
from weft.kernels.candidate import Candidate, Kind, Problem
from weft.kernels.formats import Format
from weft.orchestrate.alternatives import Alternatives
from weft.orchestrate.calls import is_view
from weft.orchestrate.images import formats_in
from weft.orchestrate.stored import Stored, is_leaf, origin_cover, tables_inside


@dataclass(frozen=True, slots=True)
class Extracted:
    """A problem, and where its inputs and outputs are in the graph that it was cut from."""

    problem: Problem
    inputs: tuple[NodeId, ...]
    """Per input of the problem: the value of the original graph (a graph input, a constant or a member's value)."""
    outputs: tuple[NodeId, ...]
    """Per output of the problem: the original node. A member of a value class stands for the class."""


@dataclass(frozen=True, slots=True)
class FormatChoice:
    """Formats of a candidate's inputs and outputs, in the candidate's order."""

    inputs: tuple[Format, ...]
    outputs: tuple[Format, ...]


def format_choices(graph: Graph, candidate: Candidate) -> tuple[FormatChoice, ...]:
    """The combinations of formats worth generating: all as given, all channels-last, and from one to the other.

    The mixed ones only for kernels without a contraction and with at most three such tensors: for these, writing the
    other order costs less than a conversion of its own.
    """
    ins = tuple(formats_in(graph, i) for i in candidate.inputs)
    outs = tuple(formats_in(graph, o) for o in candidate.outputs)
    if candidate.kind is Kind.CONVERT:
        return (
            FormatChoice((Format.ROW,), (Format.LAST,)),
            FormatChoice((Format.LAST,), (Format.ROW,)),
        )
    row = FormatChoice((Format.ROW,) * len(ins), (Format.ROW,) * len(outs))
    categories = {CATEGORY[graph.nodes[m].prim] for m in bits(candidate.members)}
    if Category.OPAQUE in categories or all(len(f) == 1 for f in ins + outs):
        return (row,)
    last_in, last_out = tuple(f[-1] for f in ins), tuple(f[-1] for f in outs)
    found = [row, FormatChoice(last_in, last_out)]
    dual = [f for f in ins + outs if len(f) > 1]
    if Category.LINEAR not in categories and len(dual) <= 3:
        found += [FormatChoice(row.inputs, last_out), FormatChoice(last_in, row.outputs)]
    return tuple(dict.fromkeys(found))


def extract(
    graph: Graph,
    candidate: Candidate,
    input_formats: Sequence[Format],
    output_formats: Sequence[Format],
    alternatives: Alternatives | None = None,
    known: Mapping[str, Problem] | None = None,
) -> Extracted:
    """The problem of a candidate. Formats are in the order of `candidate.inputs` and `candidate.outputs`.

    Nodes are emitted depth first from the outputs, operands first; operands of commutative primitives and the outputs
    are sorted by size and a hash of what they compute. Inputs are numbered at their first use. Attributes of the source
    operator, where the members are exactly one, are part of the text. A problem of `known` (by key) is not made again.

    Raises:
        InvalidGraphError: the candidate does not belong to the graph, or the number of formats is off.
    """
    if len(input_formats) != len(candidate.inputs) or len(output_formats) != len(candidate.outputs):
        raise InvalidGraphError(problem="one format per input and output of the candidate")
    classes = alternatives.classes if alternatives else {}
    cut = _Cut(graph, candidate, dict(zip(candidate.inputs, input_formats, strict=True)), dict(classes))
    formats = dict(zip(candidate.outputs, output_formats, strict=True))
    order = candidate.outputs
    if len(order) > 1:
        order = tuple(sorted(order, key=lambda o: (cut.hashes[cut.resolve(o)], formats[o].value, o)))
    b = GraphBuilder()
    for output in order:
        cut.emit(b, output)
    if len(cut.input_ids) != len(candidate.inputs):
        raise InvalidGraphError(problem="a candidate names an input that no member reads")
    outputs = [cut.emitted[cut.resolve(o)] for o in order]
    outs = tuple(formats[o] for o in order)
    lines = [*cut.lines, _returned(outputs, outs)]
    origin = _matching_origin(graph, candidate)
    source = graph.origins[origin] if origin >= 0 else None
    nodes = tuple(cut.find(o) for o in source.operands) if source is not None else ()
    if source is not None and source.rule:
        lines.append(_origin_text(source.rule, source.params, nodes))
    key = "\n".join(lines)
    problem = (known or {}).get(key)
    if problem is None:
        problem_graph = b.build(outputs)
        problem = Problem(problem_graph, key, tuple(cut.formats[i] for i in cut.input_ids), outs)
        if source is not None:
            positions = {n: i for i, n in enumerate(problem_graph.inputs)}
            problem = replace(
                problem,
                origin_rule=source.rule,
                origin_params=source.params,
                origin_operands=tuple(positions.get(n, -1) for n in nodes),
                origin_operand_nodes=nodes,
            )
    return Extracted(problem, tuple(cut.input_ids), tuple(order))


def canonical_text(problem: Problem) -> str:
    """The text of a problem: one line per node in its order, then outputs, then the source operator."""
    inputs = iter(problem.input_formats)
    lines = []
    for i, n in enumerate(problem.graph.nodes):
        if isinstance(n.attrs, a.InputAttrs):
            lines.append(_input_text(i, str(n.type), next(inputs).value, is_weight=n.attrs.is_weight))
        else:
            lines.append(_line(i, n.inputs, _texts_of(n)))
    lines.append(_returned(problem.graph.outputs, problem.output_formats))
    if problem.origin_rule:
        lines.append(_origin_text(problem.origin_rule, problem.origin_params, problem.origin_operand_nodes))
    return "\n".join(lines)


def _input_text(number: int, type: str, format: str, *, is_weight: bool) -> str:
    return f"%{number} = input {type} {format}" + (" weight" if is_weight else "")


def _line(number: int, operands: Sequence[int], texts: tuple[str, str]) -> str:
    return f"%{number} = {texts[0]}({', '.join([f'%{j}' for j in operands])}{texts[1]}"


def _texts_of(node: Node) -> tuple[str, str]:
    """What stands before and behind a node's operands in its line."""
    return node.prim.value, f") {_attrs_text(node)}: {node.type}"


def _returned(outputs: Sequence[int], formats: Sequence[Format]) -> str:
    return "return " + ", ".join(f"%{o} {f.value}" for o, f in zip(outputs, formats, strict=True))


def _origin_text(rule: str, params: Sequence[tuple[str, object]], nodes: Sequence[int]) -> str:
    named = ", ".join(f"{k}={v!r}" for k, v in params)
    operands = ", ".join(f"%{n}" if n >= 0 else "none" if n == -1 else "lost" for n in nodes)
    return f"as {rule}({operands}; {named})"


def _attrs_text(node: Node) -> str:
    if isinstance(node.attrs, a.NoAttrs):
        return ""
    if isinstance(node.attrs, a.ConstantAttrs):
        return f"{node.attrs.digest} "
    return _repr(node.attrs) + " "


@lru_cache(maxsize=4096)
def _repr(attrs: a.Attrs) -> str:
    # the reason why an operator is opaque is no part of what it computes
    return repr(replace(attrs, reason="") if isinstance(attrs, a.OpaqueAttrs) else attrs)


@dataclass(frozen=True, slots=True)
class _Shared:
    """What every cut of a graph needs of its nodes, made once."""

    commutes: tuple[bool, ...]
    free: tuple[bool, ...]
    """Copied into every cut that reads it."""
    identities: tuple[int, ...]
    """Equal for equal primitives, attributes and types."""
    hashed: tuple[bytes, ...]
    """What is hashed of a node itself."""
    texts: tuple[tuple[str, str], ...]
    types: tuple[str, ...]
    constant: tuple[bool, ...]
    leaves: tuple[bool, ...]


@while_it_lives
def _shared(graph: Graph) -> _Shared:
    numbers: dict[tuple[object, ...], int] = {}
    nodes = graph.nodes
    return _Shared(
        tuple(n.prim in COMMUTATIVE for n in nodes),
        tuple(n.prim in _FREE_INSIDE for n in nodes),
        tuple(numbers.setdefault((n.prim, n.attrs, n.type), i) for i, n in enumerate(nodes)),
        tuple(f"{n.prim.value} {_attrs_text(n)}{n.type}".encode() for n in nodes),
        tuple(map(_texts_of, nodes)),
        tuple(str(n.type) for n in nodes),
        tuple(n.prim is Prim.CONSTANT for n in nodes),
        tuple(is_leaf(graph, i) for i in range(len(nodes))),
    )


Walked = tuple[frozenset[NodeId], Mapping[NodeId, NodeId], Sequence[tuple[NodeId, tuple[NodeId, ...]]]]
"""Members; class -> the member read in its place inside; what the outputs need and its operands, these first."""


def _resolved(
    node: NodeId, members: AbstractSet[NodeId], inside: Mapping[NodeId, NodeId], classes: Mapping[NodeId, NodeId]
) -> NodeId:
    if node in members:
        return node
    if node in inside:
        return inside[node]
    return classes.get(node, node)


_last: list[tuple[ref[Graph], Candidate, Mapping[NodeId, NodeId], Walked]] = []
"""The candidate that was walked last: it is asked for once per combination of formats."""


def _walked(graph: Graph, candidate: Candidate, classes: Mapping[NodeId, NodeId]) -> Walked:
    if _last:
        last_graph, last_candidate, last_classes, walked = _last[0]
        if last_graph() is graph and last_candidate is candidate and last_classes == classes:
            return walked
    members = frozenset(bits(candidate.members))
    # inside, a member that computes the class is read in place of the class
    inside = {classes[m]: m for m in members if m in classes} if classes else {}
    inside = {c: m for c, m in inside.items() if c not in members}
    read = set(candidate.inputs) - members
    found: dict[NodeId, tuple[NodeId, ...]] = {}
    done: dict[NodeId, tuple[NodeId, ...]] = {}
    for output in candidate.outputs:
        stack = [_resolved(output, members, inside, classes)]
        while stack:
            node = stack[-1]
            if node in done:
                stack.pop()
                continue
            operands = found.get(node)
            if operands is None:
                operands = () if node in read else graph.nodes[node].inputs
                if classes:
                    operands = tuple([_resolved(i, members, inside, classes) for i in operands])
                found[node] = operands
            waiting = [i for i in operands if i not in done]
            if waiting:
                stack.extend(reversed(waiting))
                continue
            stack.pop()
            done[node] = operands
    walked = members, inside, tuple(done.items())
    _last[:] = [(ref(graph), candidate, dict(classes), walked)]
    return walked


class _Cut:
    """The nodes of one candidate: hashes, then emission."""

    def __init__(
        self, graph: Graph, candidate: Candidate, formats: dict[NodeId, Format], classes: dict[NodeId, NodeId]
    ) -> None:
        self.graph = graph
        self.formats = formats
        self.format_texts = {node: f.value for node, f in formats.items()}
        self.classes = classes
        self.members, self.inside, walked = _walked(graph, candidate, self.classes)
        self.read = formats.keys() - self.members
        """What is read from memory."""
        self.tables = frozenset(bits(tables_inside(graph, candidate.members)))
        self.shared = _shared(graph)
        self.settled: dict[NodeId, tuple[NodeId, ...]] = {}
        """Operands in their final order."""
        self.hashes: dict[NodeId, bytes] = {}
        self.sizes: dict[NodeId, int] = {}
        self.emitted: dict[NodeId, NodeId] = {}
        self.input_ids: list[NodeId] = []
        self.lines: list[str] = []
        """Canonical text of what was emitted."""
        for node, operands in walked:
            self._hash(node, operands)

    def resolve(self, node: NodeId) -> NodeId:
        """The node whose value is read where `node` is named: a member of its class inside, else the class."""
        return _resolved(node, self.members, self.inside, self.classes)

    def _rank(self, node: NodeId) -> tuple[int, bytes]:
        """Order of commutative operands: the larger expression first, so that a bias stands behind its product."""
        return (-self.sizes[node], self.hashes[node])

    def _hash(self, node: NodeId, operands: tuple[NodeId, ...]) -> None:
        """Settle the order of a node's operands, its hash and its size."""
        shared = self.shared
        if node in self.read:
            weight = "weight" if shared.constant[node] else ""
            text = f"input {shared.types[node]} {self.format_texts[node]} {weight}".encode()
        elif node not in self.tables and (shared.leaves[node] or (not shared.free[node] and node not in self.members)):
            raise InvalidGraphError(problem=f"%{node} is read by the candidate and neither member nor input")
        else:
            text = shared.hashed[node]
        if len(operands) > 1 and shared.commutes[node]:
            operands = tuple(sorted(operands, key=self._rank))
        self.settled[node] = operands
        parts = [text]
        size = 0 if shared.free[node] else 1
        for operand in operands:
            parts.append(self.hashes[operand])
            size += self.sizes[operand]
        self.hashes[node] = hashlib.blake2b(b"".join(parts), digest_size=16).digest()
        self.sizes[node] = min(size, 1 << 32)

    def emit(self, b: GraphBuilder, root: NodeId) -> None:
        """Copy a node and what it reads, operands first."""
        emitted, settled = self.emitted, self.settled
        stack = [self.resolve(root)]
        while stack:
            node = stack[-1]
            if node in emitted:
                stack.pop()
                continue
            waiting = [i for i in settled[node] if i not in emitted]
            if waiting:
                stack.extend(reversed(waiting))
                continue
            stack.pop()
            emitted[node] = self._copy(b, node)

    def _copy(self, b: GraphBuilder, node: NodeId) -> NodeId:
        n = self.graph.nodes[node]
        number = len(b)
        if node in self.read:
            self.input_ids.append(node)
            is_weight = self.shared.constant[node]
            type_text = self.shared.types[node]
            self.lines.append(_input_text(number, type_text, self.format_texts[node], is_weight=is_weight))
            return b.input(n.type, is_weight=is_weight)
        operands = tuple([self.emitted[i] for i in self.settled[node]])
        if isinstance(n.attrs, a.ConstantAttrs):
            found = b.adopt_constant(n.attrs.digest, self.graph.constant(node), n.type)
        else:  # the source operator is no part of a problem's node
            found = b.adopt_copy(n, operands, self.shared.identities[node])
        if found == number:
            self.lines.append(_line(number, operands, self.shared.texts[node]))
        return found

    def find(self, node: NodeId) -> NodeId:
        """Where a node of the original graph is in the problem; -2 if it is not there, -1 for an absent operand."""
        return self.emitted.get(self.resolve(node), -2) if node >= 0 else node


_FREE_INSIDE = frozenset({Prim.CONSTANT, Prim.BROADCAST, Prim.RESHAPE, Prim.IOTA})


def _matching_origin(graph: Graph, candidate: Candidate) -> int:
    """The first (outermost) source operator whose primitives and results are exactly the candidate's; -1 if none.

    What a library call covers may have views in front, which are operands of the operator.
    """
    index = _origin_index(graph)
    if candidate.kind is not Kind.CALL:
        return index.get((candidate.members, candidate.outputs), -1)
    known = _origins_by_result(graph).get(candidate.outputs, ())
    whole = [x for x in known if not x[0] & ~candidate.members and _are_views(graph, candidate.members & ~x[0])]
    return max(whole, key=lambda x: x[0].bit_count())[1] if whole else -1


def _are_views(graph: Graph, members: Mask) -> bool:
    return all(is_view(graph, node) for node in bits(members))


@while_it_lives
def _origins_by_result(graph: Graph) -> dict[tuple[NodeId, ...], list[tuple[Mask, int]]]:
    found: dict[tuple[NodeId, ...], list[tuple[Mask, int]]] = {}
    for (members, outputs), origin in _origin_index(graph).items():
        found.setdefault(outputs, []).append((members, origin))
    return found


@while_it_lives
def _origin_index(graph: Graph) -> dict[tuple[Mask, tuple[NodeId, ...]], int]:
    stored = Stored.of(graph)
    found: dict[tuple[Mask, tuple[NodeId, ...]], int] = {}
    for index in range(len(graph.origins)):
        cover = origin_cover(graph, stored, index)
        if cover is not None:
            members, outputs = cover
            written = stored.dag.written(members, stored.results) or outputs
            found.setdefault((members, tuple(bits(written))), index)
    return found
