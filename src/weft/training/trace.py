"""One training step as one functional graph: forward, loss and backward traced together, the optimizer behind them.

The framework traces; what is added here is the update of the parameters, random numbers that follow from a number and
a position, and the order of arguments and results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from weft.frontends.torch import decompositions
from weft.frontends.torch.table import WITHOUT_EFFECT
from weft.training.form import Form, laid
from weft.training.joint import Joint, tracing
from weft.training.random import with_seed
from weft.training.stepped import decided, ready, summed
from weft.training.updates import SETTINGS, Rule, updated


@dataclass(frozen=True)
class Traced:
    """The graph of a step.

    Arguments: trained parameters, fixed tensors, the inputs and the target, the scale if it has one, the seed if
    anything is drawn, the state of each trained parameter, the numbers of steps, the settings (groups, `SETTINGS`)
    in float64, the growth of the scale if it has one, the number of skipped steps if it may skip, the sums of gradients
    if several batches make a step. All but the last of these batches lack what is between seed and sums.

    Results: the loss, then new values of `written`.
    """

    gm: fx.GraphModule
    written: tuple[int, ...]
    """Positions of the arguments that get the results behind the loss, in order."""
    draws: bool
    """Whether it has a seed."""


def trace(joint: Joint, form: Form) -> Traced:
    """The whole step; `form` is that of the gradients, with the counters. Nothing is computed.

    Raises:
        UnsupportedError: a call that draws in another way than dropout [W201].
    """
    return _with_updates(joint, form, with_seed(joint.gm))


def _with_updates(joint: Joint, form: Form, seed: fx.Node | None) -> Traced:
    """The joint graph with the optimizer behind its gradients."""
    graph, count = joint.gm.graph, len(joint.tensors.trained)
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    (output,) = (n for n in graph.nodes if n.op == "output")
    results: Any = output.args[0]
    *buffers, loss = results[: len(joint.written) + 1]
    scale = [n for n in placeholders if n is not seed][-1:] if form.scaling else []
    renewed, targets = _put_updates(joint, form, placeholders[:count], results[len(buffers) + 1 :], scale)
    places = {n: k for k, n in enumerate(n for n in graph.nodes if n.op == "placeholder")}
    for node in list(graph.nodes):
        if str(node.target) in WITHOUT_EFFECT:
            graph.erase_node(node)  # of casts that change nothing, without a type of its own
    output.args = ((loss, *buffers, *renewed),)
    graph.eliminate_dead_code()
    graph.lint()
    written = (*(count + k for k in joint.written), *(places[n] for n in targets))
    return Traced(_LazyGraphModule(joint.gm, graph), written, draws=seed is not None)


def _put_updates(
    joint: Joint, form: Form, parameters: Sequence[fx.Node], gradients: Sequence[fx.Node], scale: Sequence[fx.Node]
) -> tuple[list[fx.Node], list[fx.Node]]:
    """Write what happens to the gradients into their graph, its arguments behind those that are there.

    New values, and the arguments whose they are: parameters, state, numbers of steps, the scale and its growth, the
    number of skipped steps, sums. Of a batch that is not the last, the sums alone.
    """
    mode, trained = FakeTensorMode(allow_non_fake_inputs=True), joint.tensors.trained.values()
    rules, last = [form.rules[g] for g in form.groups], form.last
    with tracing(None), mode:
        put = _Spliced(joint.gm.graph)
        values = [mode.from_tensor(laid(x.detach(), form.order(k))) for k, x in enumerate(trained)]
        scalar = partial(torch.zeros, (), device=values[0].device)
        for node, gradient, x in zip(parameters, gradients, values, strict=True):
            put.like[node], put.like[gradient] = x, torch.empty_like(x)
        put.like.update((node, scalar()) for node in scale)
        held = [x for x, rule in zip(values, rules, strict=True) for _ in rule.slots]
        states = put.arguments("state", map(torch.empty_like, held if last else ()))
        counters = put.arguments("counter", (scalar() for _ in range(1 + max(form.counters, default=-1)) if last))
        rows = torch.zeros(len(form.rules), len(SETTINGS), dtype=torch.float64, device=values[0].device)
        settings = put.arguments("settings", [rows] if last else ())
        growth = put.arguments("growth", [scalar(dtype=torch.int32)] if form.scaling and last else ())
        skipped = put.arguments("skipped", [scalar(dtype=torch.int64)] if form.skips and last else ())
        sums = put.arguments("sum", map(torch.empty_like, values if form.batches > 1 else ()))
        gradients = put.calls(summed, gradients, sums)
        if not last:
            return gradients, sums
        given = put.calls(lambda *x: ready(form, *x).flat, gradients, counters, settings, scale)
        gradients, counted = given[: len(gradients)], given[len(gradients) :][: len(counters)]
        by_group = given[len(gradients) + len(counters) :][: len(form.rules)]
        fine = given[len(gradients) + len(counters) + len(form.rules) :]
        renewed: list[fx.Node] = []
        kept: list[fx.Node] = []
        rest = iter(states)
        for k, rule in enumerate(rules):
            state = [next(rest) for _ in rule.slots]
            steps = [counted[form.counters[k]]] if rule.counts else []
            one = [parameters[k]], [gradients[k]], state, steps, [by_group[form.groups[k]]]
            first, *others = put.calls(partial(_one, rule), *one, known_by=rule)
            renewed.append(first)
            kept += others
        found = [*renewed, *kept, *counted]
        if fine or sums:
            old = [*parameters, *states, *counters]
            found = put.calls(partial(decided, form), fine, found, old, scale, growth, skipped, sums)
    return found, [*parameters, *states, *counters, *scale, *growth, *skipped, *sums]


def _one(rule: Rule, *given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """`updated` of one parameter, each argument in a sequence."""
    (parameter,), (gradient,), state, steps, (settings,) = given
    return updated(rule, parameter, gradient, state, steps[0] if steps else None, settings)


@final
class _Spliced:
    """Functions of tensors traced into a graph, before its output.

    A step has hundreds of parameters of few shapes: what is done to each is traced once for a shape, and copied.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._last = next(n for n in reversed(graph.nodes) if n.op == "placeholder")
        self._output = next(n for n in reversed(graph.nodes) if n.op == "output")
        self._known: dict[object, fx.GraphModule] = {}
        self.like: dict[fx.Node, torch.Tensor] = {}
        """Tensors like those that the nodes stand for; they need no memory."""

    def arguments(self, name: str, likes: Iterable[torch.Tensor]) -> list[fx.Node]:
        """Further arguments behind all others."""
        found = []
        for k, x in enumerate(likes):
            with self._graph.inserting_after(self._last):
                self._last = self._graph.placeholder(f"{name}_{k}")
            self._last.meta["val"] = self.like[self._last] = x
            found.append(self._last)
        return found

    def calls(
        self, function: Callable[..., list[torch.Tensor]], *given: Sequence[fx.Node], known_by: object = None
    ) -> list[fx.Node]:
        """What a function gives for these; it is the same one wherever it is known by the same."""
        sizes, nodes = [len(x) for x in given], [n for x in given for n in x]
        likes = [self.like[n] for n in nodes]

        def flat(*tensors: torch.Tensor) -> list[torch.Tensor]:
            rest = iter(tensors)
            return function(*([next(rest) for _ in range(size)] for size in sizes))

        key = known_by, *((x.shape, x.stride(), x.dtype) for x in likes)
        traced = self._known.get(key) if known_by is not None else None
        if traced is None:
            traced = self._known[key] = make_fx(flat, decomposition_table=decompositions())(*likes)
        own = (n for n in traced.graph.nodes if n.op == "placeholder")
        (output,) = (n for n in traced.graph.nodes if n.op == "output")
        with self._graph.inserting_before(self._output):
            found: Any = self._graph.graph_copy(traced.graph, dict(zip(own, nodes, strict=True)))
        for node, x in zip(found, output.args[0], strict=True):
            self.like.setdefault(node, x.meta["val"].detach())
        return list(found)
