"""One training step as one functional graph: forward, loss and backward traced together, the optimizer behind them.

The framework traces (`aot_export_module`); what is added here is the update of the parameters, random numbers that
follow from a number and a position, and the order of arguments and results.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import fx
from torch._functorch.aot_autograd import aot_export_module
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel

from weft.errors import ModelRaisesError, StepError, WeftError
from weft.frontends.torch import decompositions, whole_resizes
from weft.frontends.torch.table import WITHOUT_EFFECT
from weft.training.layers import LayersInParts
from weft.training.random import with_seed
from weft.training.updates import SETTINGS, Rule, updated

Named = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Tensors:
    """What a step reads besides its inputs, and may write."""

    trained: Named
    """Parameters that are differentiated and updated, each once, by their first names."""
    fixed: Named
    """Buffers, and parameters that stay as they are."""


@dataclass(frozen=True)
class Scaling:
    """How a `torch.amp.GradScaler` changes its scale."""

    growth: float
    backoff: float
    interval: int


Order = tuple[int, ...]
"""Dimensions of a dense tensor from the outermost in memory on; empty: as they are.

A step takes its parameters, their state, their sums and its inputs with their dimensions in this order, so that a plan
reads and writes them where they lie, channels last too.
"""


def order_of(x: torch.Tensor) -> Order:
    """In which a dense tensor lies in memory; empty where it is row-major, or not dense."""
    if x.dim() < 2 or x.is_contiguous():
        return ()
    strides = x.stride()
    order = tuple(sorted(range(x.dim()), key=lambda k: (-strides[k], k)))
    return order if x.permute(order).is_contiguous() else ()


def laid(x: torch.Tensor, order: Order) -> torch.Tensor:
    """With its dimensions in that order: a view."""
    return x.permute(order) if order else x


def unlaid(x: torch.Tensor, order: Order) -> torch.Tensor:
    """Of what `laid` gives, the tensor that it was."""
    return x.permute([order.index(k) for k in range(len(order))]) if order else x


@dataclass(frozen=True)
class Form:
    """What the graph of a step depends on, besides model and shapes."""

    rules: tuple[Rule, ...]
    """One per group of parameters."""
    groups: tuple[int, ...]
    """Of each trained parameter."""
    counters: tuple[int, ...]
    """Of each trained parameter: which number of steps is its own; -1: its rule has none."""
    clip_norm: float = 0.0
    skips: bool = False
    scaling: Scaling | None = None
    autocast: torch.dtype | None = None
    batches: int = 1
    """Whose gradients, each divided by it, are summed before parameters are updated."""
    last: bool = True
    """Whether it is the last of these batches; else gradients are added to sums and nothing is updated."""
    orders: tuple[Order, ...] = ()
    """Of each trained parameter, and of each input; empty: all are row-major."""

    def order(self, position: int) -> Order:
        """Of a trained parameter, or behind them of an input."""
        return self.orders[position] if self.orders else ()

    @property
    def outputs(self) -> int:
        """Losses that the differentiated module gives: with another that is differentiated, two."""
        return 2 if self.scaling is not None or self.batches > 1 else 1


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


class _Own(torch.autograd.Function):
    """The identity, with a gradient of its own: a trace names gradients, and two biases that are added share one."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        del ctx
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        del ctx
        return gradient.clone()


_own: Callable[[torch.Tensor], torch.Tensor] = _Own.apply


class Both(torch.nn.Module):
    """A model and its loss as one module."""

    def __init__(self, model: torch.nn.Module, loss: Callable[..., Any]) -> None:
        super().__init__()
        self.model = model
        self.loss = loss
        self.training = model.training

    def forward(self, *inputs: torch.Tensor) -> Any:
        """The loss of all but the last input, which is the target."""
        return self.loss(self.model(*inputs[:-1]), inputs[-1])


@final
class _Joint(torch.nn.Module):
    """A module whose tensors are its own, each once, whatever the module that it calls has tied."""

    def __init__(self, both: Both, tensors: Tensors, form: Form) -> None:
        super().__init__()
        self._both = (both,)  # hidden: its tensors are not to be found twice
        self._form = form
        self._names = {n: f"trained_{k}" for k, n in enumerate(tensors.trained)}
        self._names |= {n: f"fixed_{k}" for k, n in enumerate(tensors.fixed)}
        self._trained = frozenset(tensors.trained)
        for k, (name, tensor) in enumerate(tensors.trained.items()):
            order = form.order(k)
            own = torch.nn.Parameter(laid(tensor.detach(), order)) if order else tensor
            self.register_parameter(self._names[name], own)  # type: ignore[arg-type]
        for name, tensor in tensors.fixed.items():
            self.register_buffer(self._names[name], tensor.detach())
        self.training = both.training

    def forward(self, *arguments: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The loss; before it what is differentiated, where that is scaled or of several batches."""
        count, form = len(self._trained), self._form
        read = arguments[:-1] if form.scaling else arguments
        inputs = [unlaid(x, form.order(count + k)) for k, x in enumerate(read)]
        state = {}
        for k, (name, own) in enumerate(self._names.items()):
            tensor = getattr(self, own)
            state[name] = unlaid(_own(tensor), form.order(k)) if name in self._trained else tensor
        loss = _checked_loss(called(self._both[0], state, inputs, self._form))
        if self._form.outputs == 1:
            return (loss,)
        given = loss / self._form.batches if self._form.batches > 1 else loss
        return (given * arguments[-1].to(loss.dtype) if self._form.scaling else given, loss.detach())


def called(both: Both, state: Named, inputs: Sequence[torch.Tensor], form: Form) -> Any:
    """What the loss gives with the tensors of `state`, which tied ones share, under the form's autocast."""
    with contextlib.ExitStack() as stack:
        if form.autocast is not None:
            stack.enter_context(torch.autocast(inputs[0].device.type, form.autocast, cache_enabled=False))
        return torch.func.functional_call(both, dict(state), tuple(inputs), tie_weights=True)


def _checked_loss(loss: object) -> torch.Tensor:
    problem = ""
    if not isinstance(loss, torch.Tensor):
        problem = f"the loss is a {type(loss).__name__}"
    elif loss.dim() or not loss.is_floating_point():
        problem = f"the loss is {loss.dtype} of shape {tuple(loss.shape)}"
    elif not loss.requires_grad:
        problem = "the loss depends on no parameter that the optimizer has and that requires a gradient"
    if problem:
        raise StepError(problem=problem, remedy="`loss(output, target)` gives one float, as `CrossEntropyLoss()` does")
    assert isinstance(loss, torch.Tensor)
    return loss


@contextlib.contextmanager
def _tracing(both: Both | None) -> Iterator[None]:
    """Attention and recurrence (of `both`) as `LayersInParts` has them, resizes whole; no warnings of torch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with (
            _weights_apart(both),
            sdpa_kernel(SDPBackend.MATH),
            LayersInParts(),
            torch.backends.mkldnn.flags(enabled=False),
            whole_resizes(),
        ):
            yield


@contextlib.contextmanager
def _weights_apart(both: Both | None) -> Iterator[None]:
    """Recurrent layers do not gather weights that are not theirs in one piece: those of a trace have no memory."""
    layers = [m for m in both.modules() if isinstance(m, torch.nn.RNNBase)] if both is not None else []
    for m in layers:
        m.__dict__["flatten_parameters"] = lambda: None
    try:
        yield
    finally:
        for m in layers:
            del m.__dict__["flatten_parameters"]


def without_gradient(both: Both, tensors: Tensors, inputs: Sequence[torch.Tensor], form: Form) -> frozenset[str]:
    """Trained parameters that the loss does not depend on: eager leaves them as they are. Nothing is computed.

    Raises:
        StepError: the loss is no loss [W020].
        ModelRaisesError: the model or the loss raises on these inputs [W116].
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode, _tracing(both):
        own = _without_memory(tensors, mode)
        fake = [mode.from_tensor(x) for x in inputs]
        loss = _checked_loss(_raising(lambda: called(both, {**own.trained, **own.fixed}, fake, form)))
        found: Sequence[Any] = torch.autograd.grad(loss, list(own.trained.values()), allow_unused=True)
    return frozenset(n for n, g in zip(own.trained, found, strict=True) if g is None)


def _raising(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except WeftError:
        raise
    except Exception as error:  # whatever the model raises
        told = (str(error).splitlines() or [type(error).__name__])[0]
        problem = f"the model or the loss raises on the example inputs: {type(error).__name__}: {told}"
        remedy = "call `loss(model(*inputs), target)` by itself; it must not decide by the values of tensors"
        raise ModelRaisesError(problem=problem, remedy=remedy) from error


def trace(both: Both, tensors: Tensors, inputs: Sequence[torch.Tensor], form: Form) -> Traced:
    """The whole step for inputs of these shapes, the last of which is the target.

    Nothing is computed, and the model stays as it is.

    Raises:
        StepError: the loss is no loss, or the step writes into its inputs [W020].
        ModelRaisesError: the model cannot be traced [W116].
    """
    # the framework runs what it has traced once more, which takes a step's time and memory of tensors that have some
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        scale = [torch.ones((), device=inputs[0].device)] if form.scaling else []
        joint = _Joint(both, _without_memory(tensors, mode), form)
        count = len(tensors.trained)
        given = (mode.from_tensor(x) for x in inputs)
        arguments = (*(laid(x, form.order(count + k)) for k, x in enumerate(given)), *scale)
    with _tracing(both), mode:
        gm, signature = _raising(
            lambda: aot_export_module(
                joint, arguments, trace_joint=True, output_loss_index=0, decompositions=decompositions()
            )
        )
    if signature.user_inputs_to_mutate or signature.parameters_to_mutate:
        problem = "the model writes into its inputs or parameters while it runs"
        raise StepError(problem=problem, remedy="compute new tensors in `forward`")
    seed = with_seed(gm)
    return _with_updates(gm, signature, tensors, form, seed)


def _without_memory(tensors: Tensors, mode: FakeTensorMode) -> Tensors:
    """Tensors of the same sizes, of which nothing is computed."""
    trained = {n: torch.nn.Parameter(mode.from_tensor(x.detach())) for n, x in tensors.trained.items()}
    return Tensors(trained, {n: mode.from_tensor(x.detach()) for n, x in tensors.fixed.items()})


def _with_updates(gm: fx.GraphModule, signature: Any, tensors: Tensors, form: Form, seed: fx.Node | None) -> Traced:
    """The joint graph with the optimizer behind its gradients."""
    graph, count = gm.graph, len(tensors.trained)
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    (output,) = (n for n in graph.nodes if n.op == "output")
    outputs: Any = output.args[0]
    by_name = {n.name: n for n in outputs if n is not None}
    buffers = list(signature.buffers_to_mutate.items())
    loss = outputs[len(buffers) + form.outputs - 1]
    gradients = {p: by_name[g] for g, p in signature.backward_signature.gradients_to_parameters.items()}

    behind = _traced_update(tensors, form)
    inner = [n for n in behind.graph.nodes if n.op == "placeholder"]
    own = dict(zip(inner, placeholders[:count], strict=False))
    own.update(zip(inner[count:], [gradients[f"trained_{k}"] for k in range(count)], strict=False))
    last = placeholders[-1]
    for node in inner[2 * count :]:
        if node.name.startswith("scale"):
            own[node] = next(n for n in reversed(placeholders) if n is not seed)
            continue
        with graph.inserting_after(last):
            last = graph.placeholder(node.name)
        last.meta["val"] = node.meta["val"]
        own[node] = last
    with graph.inserting_before(output):
        renewed: Any = graph.graph_copy(behind.graph, own)
    places = {n: k for k, n in enumerate(n for n in graph.nodes if n.op == "placeholder")}
    written = [n for n in (*inner[:count], *inner[2 * count :]) if not n.name.startswith("settings")]
    targets = [own[n] for n in written if form.last or n.name.startswith("sum")]
    fixed = [count + int(name.removeprefix("fixed_")) for _, name in buffers]
    for node in list(graph.nodes):
        if str(node.target) in WITHOUT_EFFECT:
            graph.erase_node(node)  # of casts that change nothing, without a type of its own
    output.args = ((loss, *outputs[: len(buffers)], *renewed),)
    graph.eliminate_dead_code()
    graph.lint()
    return Traced(fx.GraphModule(gm, graph), (*fixed, *(places[n] for n in targets)), draws=seed is not None)


def _traced_update(tensors: Tensors, form: Form) -> fx.GraphModule:
    """What happens to the gradients.

    Arguments by name: parameter_k, gradient_k, state_k, counter_k, settings_0, scale_0, growth_0, skipped_0, sum_k.
    Results: new values of all of them but gradients and settings; of a batch that is not the last, of the sums.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    device = next(iter(tensors.trained.values())).device
    rules = [form.rules[g] for g in form.groups]
    last = form.last
    with mode:
        ordered = [laid(x.detach(), form.order(k)) for k, x in enumerate(tensors.trained.values())]
        parameters: list[torch.Tensor] = [mode.from_tensor(x) for x in ordered]
        groups: list[list[torch.Tensor]] = [
            parameters,
            [torch.empty_like(x) for x in parameters],
            [torch.empty_like(x) for x, rule in zip(parameters, rules, strict=True) for _ in rule.slots if last],
            [torch.zeros((), device=device) for _ in range(1 + max(form.counters, default=-1)) if last],
            [torch.zeros(len(form.rules), len(SETTINGS), dtype=torch.float64, device=device)] if last else [],
            [torch.zeros((), device=device)] if form.scaling and last else [],
            [torch.zeros((), dtype=torch.int32, device=device)] if form.scaling and last else [],
            [torch.zeros((), dtype=torch.int64, device=device)] if form.skips and last else [],
            [torch.empty_like(x) for x in parameters] if form.batches > 1 else [],
        ]
    names = [f"{name}_{k}" for name, group in zip(_NAMES, groups, strict=True) for k in range(len(group))]
    sizes = [len(group) for group in groups]

    def step(*flat: torch.Tensor) -> list[torch.Tensor]:
        rest = iter(flat)
        return stepped(form, rules, *([next(rest) for _ in range(size)] for size in sizes))

    with _tracing(None), mode:
        behind = make_fx(step, decomposition_table=decompositions())(*(x for group in groups for x in group))
    for node, name in zip((n for n in behind.graph.nodes if n.op == "placeholder"), names, strict=True):
        node.name = node.target = name
    return behind


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.float32) if x.dtype in (torch.float16, torch.bfloat16) else x


_NAMES = ("parameter", "gradient", "state", "counter", "settings", "scale", "growth", "skipped", "sum")


def stepped(
    form: Form,
    rules: Sequence[Rule],
    parameters: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    states: Sequence[torch.Tensor],
    counters: Sequence[torch.Tensor],
    settings: Sequence[torch.Tensor],
    scale: Sequence[torch.Tensor],
    growth: Sequence[torch.Tensor],
    skipped: Sequence[torch.Tensor],
    sums: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    """What happens to gradients, operation by operation; arguments and results as those of `_traced_update`."""
    if sums:
        gradients = [x + g.to(x.dtype) for x, g in zip(sums, gradients, strict=True)]
    if not form.last:
        return list(gradients)
    if form.scaling is not None:
        inverse = scale[0].reciprocal()
        gradients = [g * inverse.to(g.dtype) for g in gradients]
    fine = None
    if form.skips:
        fine = torch.stack([torch.isfinite(g).all() for g in gradients]).all()
    if form.clip_norm:
        parts = torch.stack([torch.sum(_wide(g) * _wide(g)) for g in gradients])
        factor = torch.clamp(form.clip_norm / (torch.sqrt(torch.sum(parts)) + 1e-6), max=1.0)
        gradients = [g * factor.to(g.dtype) for g in gradients]
    counted = [c + 1.0 for c in counters]
    rows = settings[0].unbind()
    renewed: list[torch.Tensor] = []
    kept: list[torch.Tensor] = []
    rest = iter(states)
    for k, rule in enumerate(rules):
        state = [next(rest) for _ in rule.slots]
        steps = counted[form.counters[k]] if rule.counts else None
        first, *others = updated(rule, parameters[k], gradients[k], state, steps, rows[form.groups[k]])
        renewed.append(first)
        kept += others
    found = [*renewed, *kept, *counted]
    if fine is not None:
        before = [*parameters, *states, *counters]
        found = [torch.where(fine, new, old) for new, old in zip(found, before, strict=True)]
    if form.scaling is not None and fine is not None:
        found += _rescaled(form.scaling, fine, scale[0], growth[0])
    if fine is not None:
        found.append(skipped[0] + torch.logical_not(fine).to(torch.int64))
    return [*found, *(torch.zeros_like(x) for x in sums)]


def _rescaled(
    scaling: Scaling, fine: torch.Tensor, scale: torch.Tensor, growth: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and growth after a step, as `torch.amp.GradScaler.update` has them."""
    longer = growth + 1
    due = longer == scaling.interval
    larger = scale * scaling.growth
    grown = torch.where(torch.logical_and(due, torch.isfinite(larger)), larger, scale)
    found = torch.where(fine, grown, scale * scaling.backoff)
    none = torch.zeros_like(growth)
    return found, torch.where(fine, torch.where(due, none, longer), none)
