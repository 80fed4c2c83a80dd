"""Which measured problems are two other measured ones at once: cut a problem, and look the parts up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from benchmarks.data.measured import Case
from weft.ir import attrs as a
from weft.ir.graph import Graph, GraphBuilder, Mask, bits
from weft.ir.prims import Prim
from weft.kernels.candidate import Candidate, Problem
from weft.kernels.formats import Format
from weft.orchestrate.extract import extract
from weft.orchestrate.stored import Stored

MOST_CUTS = 400
"""Cuts of one problem that are looked at."""


def fusions(cases: Sequence[Case], problems: Sequence[Problem]) -> tuple[tuple[int, ...], ...]:
    """Numbers of (a case, and two that do the same one after the other), all that are found."""
    known: dict[bool, dict[str, int]] = {False: {}, True: {}}  # by what products of f32 may do
    for k, case in reversed(list(enumerate(cases))):
        known[case.tf32][_bare(case.text)] = k
    of = [known[case.tf32] for case in cases]
    found = ((whole, *parts) for whole, problem in enumerate(problems) for parts in _Cuts(problem, of[whole]).all())
    return tuple(dict.fromkeys(found))


def _bare(text: str) -> str:
    """A canonical text without its source operator: parts of a problem do not know theirs."""
    return "\n".join(line for line in text.splitlines() if not line.startswith("as "))


class _Cuts:
    """One problem taken apart into measured ones; intermediate values in either format."""

    def __init__(self, problem: Problem, known: Mapping[str, int]) -> None:
        self.known = known
        self.graph = _with_weights(problem.graph)
        self.stored = Stored.of(self.graph)
        self.formats = dict(zip(problem.graph.inputs, problem.input_formats, strict=True))
        self.formats |= dict(zip(problem.graph.outputs, problem.output_formats, strict=True))

    def all(self) -> Iterator[tuple[int, int]]:
        """Numbers of the parts, in order."""
        for middle in (Format.ROW, Format.LAST):
            for first in self._first_parts():
                before = self._look_up(first, middle)
                after = None if before is None else self._look_up(self.stored.work & ~first, middle)
                if before is not None and after is not None:
                    yield before, after

    def _first_parts(self) -> Iterator[Mask]:
        """Sets of members whose producers are among them: what may run before the rest."""
        stored, seen, waiting = self.stored, {0}, [0]
        while waiting and len(seen) < MOST_CUTS:
            done = waiting.pop()
            for member in bits(stored.work & ~done):
                grown = done | 1 << member
                if not stored.reads[member] & stored.work & ~done and grown not in seen:
                    seen.add(grown)
                    waiting.append(grown)
                    if grown != stored.work:
                        yield grown

    def _look_up(self, members: Mask, middle: Format) -> int | None:
        inputs = tuple(bits(self.stored.inputs_of(members)))
        written = tuple(bits(self.stored.dag.written(members, self.stored.results)))
        if not written:
            return None

        def of(value: int) -> Format:
            node = self.graph.nodes[value]
            image = node.type.rank == 4 and node.prim is not Prim.CONSTANT
            return self.formats.get(value, middle if image else Format.ROW)

        candidate = Candidate(members, inputs, written)
        cut = extract(self.graph, candidate, [of(i) for i in inputs], [of(o) for o in written])
        return self.known.get(_bare(cut.problem.key))


def _with_weights(graph: Graph) -> Graph:
    """The same graph with weights as constants, as they stand in a whole network."""
    builder = GraphBuilder()
    for i, node in enumerate(graph.nodes):
        if isinstance(node.attrs, a.InputAttrs) and node.attrs.is_weight:
            zeros = np.broadcast_to(np.zeros((), node.type.dtype.numpy), node.type.shape)
            builder.adopt_constant(f"weight {i}", zeros, node.type)
        elif isinstance(node.attrs, a.InputAttrs):
            builder.input(node.type)
        elif isinstance(node.attrs, a.ConstantAttrs):
            builder.adopt_constant(node.attrs.digest, graph.constant(i), node.type)
        else:
            builder.adopt(node, node.inputs)
    return builder.build(graph.outputs)
