"""A network that is gone leaves no weights behind in what the stages remember."""

from __future__ import annotations

import gc
import weakref

from tests.orchestrate.graphs import Net

from weft.ir.graph import Graph
from weft.orchestrate.alternatives import Alternatives, find_alternatives
from weft.orchestrate.enumerate import enumerate_candidates
from weft.orchestrate.extract import extract, format_choices
from weft.orchestrate.select import Priced, select


def network() -> Graph:
    net = Net()
    x = net.input(4, 32)
    return net.build(net.relu(net.linear(x, 16)))


def compiled() -> tuple[weakref.ref[Graph], weakref.ref[Alternatives]]:
    found = find_alternatives(network(), strict=False)
    priced = []
    for c in enumerate_candidates(found.graph, alternatives=found).candidates:
        for f in format_choices(found.graph, c):
            extract(found.graph, c, f.inputs, f.outputs, found)
            priced.append(Priced(c, f.inputs, f.outputs, 1.0))
    assert select(found.graph, priced, alternatives=found)
    return weakref.ref(found.graph), weakref.ref(found)


def test_nothing_is_left() -> None:
    graph, alternatives = compiled()
    gc.collect()
    assert graph() is None and alternatives() is None
