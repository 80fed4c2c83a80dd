"""A graph in parts: what no plan can hold is run by the framework, and what is round it is compiled.

Calls are taken in stages, which alternate between the two and hold whatever does not wait for a later one, so that a
call that the framework runs costs as few parts as can be. Calls of the framework's that may have an effect (random
numbers, operators of other libraries) stay in the order of the graph.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import fx
from torch.fx.passes.split_module import split_module

MOST_PARTS = 8
"""Compiled parts of a graph. One that would be cut into more is left to the framework: calls cost what plans win."""
LEAST_CALLS = 3
"""Of a compiled part without a product or convolution; a smaller one is left to the framework."""
_ATEN = frozenset({"aten", "prims"})
_HEAVY = ("mm", "bmm", "addmm", "baddbmm", "convolution", "linear", "matmul", "scaled_dot_product", "conv", "einsum")
_VIEWS = frozenset(
    f"aten.{name}"
    for name in (
        "view.default", "reshape.default", "_unsafe_view.default", "expand.default", "permute.default", "t.default",
        "transpose.int", "unsqueeze.default", "squeeze.dim", "squeeze.dims", "squeeze.default", "slice.Tensor",
        "select.int", "alias.default", "detach.default", "clone.default", "_to_copy.default", "split.Tensor",
        "split_with_sizes.default", "view.dtype",
    )
)  # fmt: skip


@dataclass(frozen=True)
class Part:
    """What is to be compiled of a graph."""

    name: str
    """Of the submodule in `Parts.module`."""
    graph: fx.GraphModule
    arguments: tuple[int, ...]
    """For each input the position of the whole graph's argument that it is, or -1."""
    share: float
    """Of the graph's calls that are compiled."""


@final
@dataclass(frozen=True)
class Parts:
    """A graph whose submodules are its parts."""

    module: fx.GraphModule
    compiled: tuple[Part, ...]

    def with_compiled(self, make: Callable[[Part], Callable[[list[Any]], Sequence[Any]]]) -> Callable[..., Any]:
        """The whole graph as a function of its arguments, each part as `make` gives it: a list in, a sequence out."""
        for part in self.compiled:
            (output,) = (n for n in part.graph.graph.nodes if n.op == "output")
            self.module.delete_submodule(part.name)
            several = isinstance(output.args[0], list | tuple)
            self.module.add_submodule(part.name, _Compiled(make(part), several=several))
        self.module.recompile()
        return self.module


@final
class _Compiled(torch.nn.Module):
    def __init__(self, run: Callable[[list[Any]], Sequence[Any]], *, several: bool) -> None:
        super().__init__()
        self._run, self._several = run, several

    def forward(self, *arguments: Any) -> Any:
        found = self._run(list(arguments))
        return tuple(found) if self._several else found[0]


def split(gm: fx.GraphModule, left: Collection[fx.Node]) -> Parts | None:
    """The parts of a graph of which the framework runs the calls `left`; None: nothing of it is worth compiling.

    `gm`: a functional ATen graph with types; `copy_` into arguments may stand at its end, and stays there.
    """
    calls = [n for n in gm.graph.nodes if n.op == "call_function"]
    copies = {n for n in calls if str(n.target) == "aten.copy_.default"}
    theirs = {*left, *_unread(gm.graph, copies)}
    while True:
        stages = _stages(calls, theirs, copies)
        small = _too_small(stages, theirs, copies)
        if not small:
            break
        theirs |= small
    ours = {stage for node, stage in stages.items() if _is_ours(node, theirs, copies)}
    if not ours or len(ours) > MOST_PARTS:
        return None
    module = split_module(gm, gm, lambda node: stages.get(node, 0))
    _last(module, f"submod_{max(stages.values())}" if copies else "")
    return Parts(module, _parts(gm, module, ours))


def _unread(graph: fx.Graph, copies: Collection[fx.Node]) -> set[fx.Node]:
    """Calls of which no result is needed: the front end passes them over."""
    read: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node.op == "output" or node in copies or node in read:
            read.add(node)
            read.update(node.all_input_nodes)
    return {n for n in graph.nodes if n.op == "call_function" and n not in read and n.target is not operator.getitem}


def _stages(calls: Sequence[fx.Node], theirs: Collection[fx.Node], copies: Collection[fx.Node]) -> dict[fx.Node, int]:
    """The stage of each call: even ones are compiled, odd ones are the framework's. Copies come last."""
    stages: dict[fx.Node, int] = {}
    ordered = 0
    for node in calls:
        if node in copies:
            continue
        if node.target is operator.getitem:
            stages[node] = stages[node.args[0]]  # type: ignore[index]
            continue
        stage = max((stages[x] for x in node.all_input_nodes if x in stages), default=0)
        framework = node in theirs
        if framework and _has_effect(node):
            stage = max(stage, ordered)
        if stage % 2 != framework:
            stage += 1
        if framework and _has_effect(node):
            ordered = stage
        stages[node] = stage
    _sink(stages, calls, theirs)
    last = max(stages.values(), default=0)
    stages.update(dict.fromkeys(copies, last + 1 + last % 2))
    return stages


def _sink(stages: dict[fx.Node, int], calls: Sequence[fx.Node], theirs: Collection[fx.Node]) -> None:
    """Moves views into the part that reads them first: a weight that is turned stays a constant there."""
    for node in reversed(calls):
        if node in theirs or node not in stages or str(node.target) not in _VIEWS:
            continue
        parts = [u for u in node.users if u.target is operator.getitem]
        readers = [u for x in (node, *parts) for u in x.users if u in stages and u not in parts]
        if readers:
            latest = min(stages[u] - stages[u] % 2 for u in readers)
            for moved in (node, *parts):
                stages[moved] = max(stages[moved], latest)


def _has_effect(node: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace not in _ATEN:
        return True
    return target._schema.is_mutable or torch.Tag.nondeterministic_seeded in target.tags


def _is_ours(node: fx.Node, theirs: Collection[fx.Node], copies: Collection[fx.Node]) -> bool:
    source = node
    while source.target is operator.getitem:
        source = source.args[0]  # type: ignore[assignment]
    return source not in theirs and source not in copies


def _too_small(stages: Mapping[fx.Node, int], theirs: Collection[fx.Node], copies: Collection[fx.Node]) -> set[fx.Node]:
    """The calls of compiled stages that are not worth a plan."""
    inside: dict[int, list[fx.Node]] = {}
    for node, stage in stages.items():
        if _is_ours(node, theirs, copies):
            inside.setdefault(stage, []).append(node)
    small: set[fx.Node] = set()
    for nodes in inside.values():
        if _work(nodes) < LEAST_CALLS:
            small.update(n for n in nodes if n.target is not operator.getitem)
    return small


def _work(nodes: Sequence[fx.Node]) -> int:
    """Calls that compute something; a product or convolution counts for as many as a part needs."""
    found = 0
    for node in nodes:
        name = str(node.target)
        if name in _VIEWS or node.target is operator.getitem or not isinstance(node.meta.get("val"), _TENSORS):
            continue
        heavy = name.partition(".")[2].lstrip("_").startswith(_HEAVY)
        found += LEAST_CALLS if heavy else 1
    return found


_TENSORS = (torch.Tensor, list, tuple)


def _last(module: fx.GraphModule, name: str) -> None:
    """Run the part of the copies into arguments behind all others: these may read what it writes."""
    for node in list(module.graph.nodes):
        if node.op == "call_module" and node.target == name:
            (output,) = (n for n in module.graph.nodes if n.op == "output")
            for moved in (node, *(u for u in node.users if u is not output)):
                output.prepend(moved)
            module.recompile()


def _parts(gm: fx.GraphModule, module: fx.GraphModule, ours: Collection[int]) -> tuple[Part, ...]:
    places = {n.name: k for k, n in enumerate(n for n in gm.graph.nodes if n.op == "placeholder")}
    found = []
    for node in module.graph.nodes:
        if node.op != "call_module" or int(str(node.target).removeprefix("submod_")) not in ours:
            continue
        graph = module.get_submodule(str(node.target))
        assert isinstance(graph, fx.GraphModule)
        given = tuple(
            places.get(x.name, -1) if isinstance(x, fx.Node) and x.op == "placeholder" else -1 for x in node.args
        )
        found.append(Part(str(node.target), graph, given, float(_work(list(graph.graph.nodes)))))
    whole = sum(p.share for p in found)
    return tuple(Part(p.name, p.graph, p.arguments, p.share / whole) for p in found)
