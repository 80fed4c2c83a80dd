"""Forward, loss and backward as one functional graph, traced once.

torch's own way (`aot_export_module`) runs a step three times: to see what it writes, to trace it, and to trace what it
has traced without arguments that nobody gives. Which parameters the loss depends on would be a fourth.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel

from weft.errors import ModelRaisesError, StepError, WeftError
from weft.frontends.torch import decompositions, whole_resizes
from weft.training.form import Both, Form, Tensors, called, laid, unlaid
from weft.training.layers import LayersInParts

_sync: Callable[[torch.Tensor], None] = torch._sync  # type: ignore[attr-defined]
"""What was written to a functional tensor, or to a view of it, is in it."""


@dataclass(frozen=True)
class Joint:
    """The graph of a loss and its gradients.

    Arguments: trained parameters, fixed tensors, the inputs and the target, and the scale if the form has one; as the
    form lays them. Results: new values of the fixed tensors that are written, the loss, and the gradients.
    """

    gm: fx.GraphModule
    tensors: Tensors
    """Parameters that the loss does not depend on, which eager leaves as they are, are fixed."""
    form: Form
    """Its groups and orders are those of `tensors`."""
    written: tuple[int, ...]
    """Which of the fixed tensors, in the order of the results."""


def differentiated(both: Both, tensors: Tensors, inputs: Sequence[torch.Tensor], form: Form) -> Joint:
    """The loss of inputs of these shapes, the last of which is the target, and its gradients.

    Nothing is computed, and the model stays as it is.

    Raises:
        StepError: the loss is no loss, or the step writes into its inputs or parameters [W020].
        ModelRaisesError: the model or the loss raises on these inputs, or cannot be traced [W116].
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    count, names = len(tensors.trained), (*tensors.trained, *tensors.fixed)
    with mode:
        trained = [laid(mode.from_tensor(x.detach()), form.order(k)) for k, x in enumerate(tensors.trained.values())]
        given = [laid(mode.from_tensor(x), form.order(count + k)) for k, x in enumerate(inputs)]
        scale = [torch.ones((), device=inputs[0].device)] if form.scaling else []
        fixed = [mode.from_tensor(x.detach()) for x in tensors.fixed.values()]
        arguments = [*(torch.nn.Parameter(x) for x in trained), *fixed, *given, *scale]
    written: list[int] = []

    def run(*flat: torch.Tensor) -> list[torch.Tensor | None]:
        held = [FunctionalTensor.to_functional(x) for x in flat]
        read = held[len(names) : len(names) + len(inputs)]
        batch = [unlaid(x, form.order(count + k)) for k, x in enumerate(read)]
        own = [unlaid(x, form.order(k)) for k, x in enumerate(held[:count])]
        state = dict(zip(names, (*own, *held[count : len(names)]), strict=True))
        loss = _checked_loss(called(both, state, batch, form))
        whole = loss / form.batches if form.batches > 1 else loss
        if form.scaling is not None:
            whole = whole * held[-1].to(loss.dtype)
        for x in held:
            _sync(x)
        written[:] = _written(flat, held, range(count, len(names)))
        found = torch.autograd.grad(whole, held[:count], allow_unused=True)
        results: list[torch.Tensor | None] = [*(held[count + k] for k in written), loss, *found]
        return [None if x is None else _plain(x) for x in results]

    # torch's kernels that make graphs functional stay out where Python's do
    without = torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.Functionalize))
    with tracing(both), mode, enable_python_dispatcher(), FunctionalTensorMode(export=True), without:
        gm = _raising(lambda: make_fx(run, decomposition_table=decompositions())(*arguments))
    joint = Joint(gm, tensors, form, tuple(written))
    unused = frozenset(n for n, g in zip(tensors.trained, _results(gm)[-count:], strict=True) if g is None)
    if not unused:
        return joint
    if any(form.order(k) for k, n in enumerate(tensors.trained) if n in unused):
        fewer, other = _fixed(tensors, form, unused)
        return differentiated(both, fewer, inputs, other)
    return _without_unused(joint, unused)


def _plain(x: torch.Tensor) -> torch.Tensor:
    """What a functional tensor holds."""
    assert isinstance(x, FunctionalTensor)
    _sync(x)
    found: torch.Tensor = torch._from_functional_tensor(x.elem)
    return found


def _written(before: Sequence[torch.Tensor], after: Sequence[torch.Tensor], fixed: range) -> list[int]:
    """Which of the fixed tensors a step has written.

    Raises:
        StepError: it has written something else [W020].
        RuntimeError: one has another shape or memory than before.
    """
    found = []
    for k, (old, new) in enumerate(zip(before, after, strict=True)):
        assert isinstance(new, FunctionalTensor)
        now = torch._from_functional_tensor(new.elem)
        moved = torch._functionalize_was_storage_changed(new.elem)
        if moved or (now.shape, now.stride()) != (old.shape, old.stride()):
            raise RuntimeError("a tensor of the model, or an input, gets another shape or memory")
        if not torch._functionalize_has_data_mutation(new.elem):  # type: ignore[attr-defined]
            continue
        if k not in fixed:
            problem = "the model writes into its inputs or parameters while it runs"
            raise StepError(problem=problem, remedy="compute new tensors in `forward`")
        found.append(k - fixed.start)
    return found


def _results(gm: fx.GraphModule) -> list[fx.Node | None]:
    (output,) = (n for n in gm.graph.nodes if n.op == "output")
    return list(output.args[0])


def _fixed(tensors: Tensors, form: Form, names: frozenset[str]) -> tuple[Tensors, Form]:
    """With some of the trained parameters behind the fixed tensors, which are taken as they are."""
    trained = {n: x for n, x in tensors.trained.items() if n not in names}
    fixed = {**tensors.fixed, **{n: x for n, x in tensors.trained.items() if n in names}}
    kept = [k for k, n in enumerate(tensors.trained) if n not in names]
    orders = tuple(form.order(k) for k in (*kept, *range(len(tensors.trained), len(form.orders))))
    form = replace(form, groups=tuple(form.groups[k] for k in kept), orders=orders if any(orders) else ())
    return Tensors(trained, fixed), form


def _without_unused(joint: Joint, names: frozenset[str]) -> Joint:
    """Parameters that have no gradient, and lie as they are, as fixed tensors."""
    graph, before = joint.gm.graph, joint.tensors
    tensors, form = _fixed(before, joint.form, names)
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    behind = placeholders[len(before.trained) + len(before.fixed)]
    for name, node in zip(before.trained, placeholders, strict=False):
        if name in names:
            behind.prepend(node)
    for k, node in enumerate(n for n in graph.nodes if n.op == "placeholder"):
        node.name = node.target = f"arg{k}_1"  # as if they had been traced so
    (output,) = (n for n in graph.nodes if n.op == "output")
    output.args = ([x for x in _results(joint.gm) if x is not None],)
    return Joint(joint.gm, tensors, form, joint.written)


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
def tracing(both: Both | None) -> Iterator[None]:
    """Attention and recurrence (of `both`) as `LayersInParts` has them, resizes whole; no warnings of torch.

    Graphs have no text, which nobody runs. What torch would log of an operator that refuses its operands is in the
    error that is raised.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with (
            _unlogged(),
            _weights_apart(both),
            sdpa_kernel(SDPBackend.MATH),
            LayersInParts(),
            torch.backends.mkldnn.flags(enabled=False),
            whole_resizes(),
            _use_lazy_graph_module(True),
        ):
            yield


@contextlib.contextmanager
def _unlogged() -> Iterator[None]:
    log = logging.getLogger(FakeTensorMode.__module__)
    held, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = held


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
