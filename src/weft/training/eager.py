"""A step by the framework's own operators: autograd, and the optimizer's fused kernels where it has them.

It is what a plan of the step is timed beside, and answers where no plan is faster. Its arguments and results are those
of the traced graph, which by itself, operator by operator, is some times slower.
"""

from __future__ import annotations

import copy
import operator
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import final

import torch

from weft.frontends.torch import Program
from weft.runtime.executable import without_autocast
from weft.runtime.in_place import InPlace
from weft.training.trace import Both, Form, Tensors, Traced, called, stepped

_FUSED_TYPES = (torch.float32, torch.float64)


@dataclass(frozen=True)
class _Parts:
    """A step's arguments (see `Traced`)."""

    trained: list[torch.Tensor]
    fixed: list[torch.Tensor]
    inputs: list[torch.Tensor]
    scale: list[torch.Tensor]
    states: list[torch.Tensor]
    counters: list[torch.Tensor]
    settings: list[torch.Tensor]
    growth: list[torch.Tensor]
    skipped: list[torch.Tensor]
    sums: list[torch.Tensor]


@final
class EagerStep:
    """Called with the tensors that a plan of the step takes; gives fresh ones in the order of its results.

    `in_place` makes the same for tensors that stay where they are, which get the results at the end of a call: no
    exception, and no interrupt, leaves some of them written and others not.
    """

    def __init__(
        self, both: Both, tensors: Tensors, form: Form, traced: Traced, program: Program,
        arguments: Sequence[torch.Tensor], inputs: int,
    ) -> None:  # fmt: skip
        """`arguments`: a step's, for those that the program does not take; `inputs`: how many the batch has.

        The step draws nothing.

        Raises:
            Exception: what the module raises that cannot be copied.
        """
        assert not traced.draws, "the framework's own random numbers are others"
        shared = {id(x): x for x in (*both.parameters(), *both.buffers())}
        # a call puts other tensors into its module: one that is interrupted meanwhile leaves the user's as it is
        self._both = copy.deepcopy(both, shared)
        self._form, self._program = form, program
        self._names = tuple(tensors.trained), tuple(tensors.fixed)
        self._spare = {k: x for k, x in enumerate(arguments) if k not in set(program.arguments)}
        self._count, self._inputs = len(arguments), inputs
        places = [k - len(tensors.trained) for k in traced.written]
        self._buffers = [k for k in places if 0 <= k < len(tensors.fixed)]
        self._wanted = [k for k, result in enumerate(program.results) if result.value >= 0]

    def __call__(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """One step; nothing that is given is written."""
        parts = self._parts(tensors)
        loss, buffers, gradients = self._differentiated(parts)
        with torch.no_grad():
            own = replace(parts, trained=[x.clone() for x in parts.trained], states=[x.clone() for x in parts.states])
            counted = [c + 1.0 for c in parts.counters]
            updates = _fused(self._form, own, gradients, counted)
            if updates is None:
                return self._chosen([loss, *buffers, *self._stepped(parts, gradients)])
            _all(updates)
        return self._chosen([loss, *buffers, *own.trained, *own.states, *counted])

    @property
    def in_place(self) -> InPlace:
        """As that of `Executable`."""

        def make(
            bound: Mapping[int, torch.Tensor], written: Sequence[tuple[int, torch.Tensor]]
        ) -> Callable[..., Sequence[torch.Tensor]]:
            del bound  # all is read where it lies
            return lambda *tensors: self._write(tensors, written)

        return make

    def _write(
        self, tensors: Sequence[torch.Tensor], written: Sequence[tuple[int, torch.Tensor]]
    ) -> list[torch.Tensor]:
        """A step whose results are written into these tensors, each by its position."""
        parts = self._parts(tensors)
        loss, buffers, gradients = self._differentiated(parts)
        with torch.no_grad():
            counted = [c + 1.0 for c in parts.counters]
            held = {x.data_ptr() for x in (*parts.trained, *parts.states)}
            own = held <= {x.data_ptr() for _, x in written}
            updates = _fused(self._form, parts, gradients, counted) if own else None
            if updates is None:
                found = self._chosen([loss, *buffers, *self._stepped(parts, gradients)])
                updates, held = [], set()
            else:
                found = self._chosen([loss, *buffers, *parts.trained, *parts.states, *counted])
            others = [(k, x) for k, x in written if x.data_ptr() not in held]
            if others:
                copied = [x for _, x in others], [found[k] for k, _ in others]
                updates = [*updates, partial(torch._foreach_copy_, *copied)]
            _all(updates)
        return found

    def _parts(self, tensors: Sequence[torch.Tensor]) -> _Parts:
        """The arguments by what they are."""
        given = dict(self._spare) | dict(zip(self._program.arguments, tensors, strict=True))
        rest = iter([given[k] for k in range(self._count)])
        form, (trained, fixed) = self._form, self._names
        rules = [form.rules[g] for g in form.groups]

        def some(count: int) -> list[torch.Tensor]:
            return [next(rest) for _ in range(count)]

        states = sum(len(rule.slots) for rule in rules) if form.last else 0
        counters = 1 + max(form.counters, default=-1) if form.last else 0
        scaled = int(form.scaling is not None)
        sizes = (
            len(trained), len(fixed), self._inputs, scaled, states, counters, int(form.last), scaled * form.last,
            int(form.skips and form.last), len(trained) * (form.batches > 1),
        )  # fmt: skip
        return _Parts(*map(some, sizes))

    def _differentiated(self, parts: _Parts) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
        """The loss, new values of the buffers that are written, and the gradients."""
        form, kind = self._form, parts.trained[0].device.type
        with torch.inference_mode(mode=False), torch.enable_grad(), without_autocast(kind):
            trained = [x.detach().requires_grad_() for x in parts.trained]
            fixed = [x.detach().clone() if k in self._buffers else x.detach() for k, x in enumerate(parts.fixed)]
            values = (*trained, *fixed)
            state = dict(zip((*self._names[0], *self._names[1]), values, strict=True))
            loss = called(self._both, state, parts.inputs, form)
            given = loss / form.batches if form.batches > 1 else loss
            given = given * parts.scale[0].to(loss.dtype) if form.scaling else given
            gradients = torch.autograd.grad(given, trained)
        return loss.detach(), [fixed[k] for k in self._buffers], list(gradients)

    def _stepped(self, parts: _Parts, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        p, rules = parts, [self._form.rules[g] for g in self._form.groups]
        return stepped(
            self._form, rules, p.trained, gradients, p.states, p.counters, p.settings, p.scale, p.growth, p.skipped,
            p.sums,
        )  # fmt: skip

    def _chosen(self, results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [results[k] for k in self._wanted]


def _all(calls: Iterable[Callable[[], object]]) -> None:
    """Call functions of C one after another: no Python runs, and no interrupt is heard, between two of them."""
    deque(map(operator.call, calls), maxlen=0)


def _fused(
    form: Form, parts: _Parts, gradients: Sequence[torch.Tensor], counted: Sequence[torch.Tensor]
) -> list[Callable[[], object]] | None:
    """Calls that update the parameters and their state in place, one for each group; None: there are none for this.

    `counted`: numbers of steps, this one included.
    """
    plain = form.last and form.batches == 1 and not (form.skips or form.clip_norm or form.scaling)
    tensors = (*parts.trained, *parts.states)
    if not plain or any(x.dtype not in _FUSED_TYPES or not x.is_cpu or not _is_dense(x) for x in tensors):
        return None
    found: list[Callable[[], object]] = []
    for number, rule in enumerate(form.rules):
        own = [k for k, g in enumerate(form.groups) if g == number]
        slots = _slots(form, parts.states, own)
        weights = [parts.trained[k] for k in own]
        if any(x.dtype is not weights[0].dtype for x in (*weights, *(x for slot in slots for x in slot))):
            return None
        if not own:
            continue
        alike = zip(weights, (gradients[k] for k in own), strict=True)
        grads = [g if g.stride() == x.stride() else torch.empty_like(x).copy_(g) for x, g in alike]
        lr, decay, first, second, eps = parts.settings[0][number].tolist()
        if rule.kind == "sgd":
            call = partial(
                torch._fused_sgd_, weights, grads, slots[0] if slots else [], weight_decay=decay, momentum=first, lr=lr,
                dampening=0.0, nesterov=rule.nesterov, maximize=rule.maximize, is_first_step=False,
            )  # fmt: skip
        else:
            call = partial(
                torch._fused_adamw_ if rule.decoupled else torch._fused_adam_, weights, grads, slots[0], slots[1],
                slots[2] if rule.amsgrad else [], [counted[form.counters[k]] for k in own], lr=lr, beta1=first,
                beta2=second, weight_decay=decay, eps=eps, amsgrad=rule.amsgrad, maximize=rule.maximize,
            )  # fmt: skip
        found.append(call)
    return found


def _slots(form: Form, states: Sequence[torch.Tensor], own: Sequence[int]) -> list[list[torch.Tensor]]:
    """The state of some parameters, by its kind."""
    rest = iter(states)
    of = [[next(rest) for _ in form.rules[g].slots] for g in form.groups]
    return [list(x) for x in zip(*(of[k] for k in own), strict=True)]


def _is_dense(x: torch.Tensor) -> bool:
    """Whether its elements fill a piece of memory, in whatever order: what fused kernels take."""
    span = sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) + 1 if x.numel() else 0
    return span == x.numel() and all(s > 0 for n, s in zip(x.shape, x.stride(), strict=True) if n > 1)
