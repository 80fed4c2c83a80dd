"""A step by the framework's own operators: autograd, and the optimizer's fused kernels where it has them.

It is what a plan of the step is timed beside, and answers where no plan is faster. Its arguments and results are those
of the traced graph, which by itself, operator by operator, is some times slower.
"""

from __future__ import annotations

import operator
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast, final

import torch

from weft.frontends.torch import Program
from weft.frontends.torch.copies import deep_copy
from weft.generate.library.deterministic import deterministic
from weft.runtime.executable import without_autocast
from weft.runtime.in_place import Baking, InPlace, copies
from weft.runtime.streams import take_workspaces
from weft.training.form import Both, Form, Tensors, called, unlaid
from weft.training.stepped import stepped
from weft.training.trace import Traced

_FUSED_TYPES = (torch.float32, torch.float64)
Rows = Sequence[Sequence[float]]
"""The settings on the host, a row for each group."""


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

    On a GPU it can be recorded: learning rates are read there, other settings are numbers of the host to the fused
    kernels. A call that is recorded holds those that were read last. Operators are deterministic where they can be.
    """

    def __init__(
        self, both: Both, tensors: Tensors, form: Form, traced: Traced, program: Program,
        arguments: Sequence[torch.Tensor], inputs: int, *, bakes: bool | None = None,
    ) -> None:  # fmt: skip
        """`arguments`: a step's, for those that the program does not take; `inputs`: how many the batch has.

        The step draws nothing. `bakes`: whether it is as on a GPU; None: if it is on one.

        Raises:
            Exception: what the module raises that cannot be copied.
        """
        assert not traced.draws, "the framework's own random numbers are others"
        shared: dict[int, Any] = {id(x): x for x in (*both.parameters(), *both.buffers())}
        # a call puts other tensors into its module: one that is interrupted meanwhile leaves the user's as it is
        self._both = cast("Both", deep_copy(both, shared))
        self._alone = threading.Lock()
        """A call puts tensors into the module: one that nobody waits for any more may still be at it in its thread."""
        self._last: Sequence[torch.Tensor] = ()
        """On a CPU the gradients of the step before, as a loop keeps them, until there are activations behind them: at
        its heap's end the C library gives free memory back, and has it mapped anew (112,000 pages of BERT-base's)."""
        self._form, self._program = form, program
        self._names = tuple(tensors.trained), tuple(tensors.fixed)
        self._spare = {k: x for k, x in enumerate(arguments) if k not in set(program.arguments)}
        self._count, self._inputs = len(arguments), inputs
        places = [k - len(tensors.trained) for k in traced.written]
        self._buffers = [k for k in places if 0 <= k < len(tensors.fixed)]
        self._wanted = [k for k, result in enumerate(program.results) if result.value >= 0]
        self._bakes = arguments[0].is_cuda if bakes is None else bakes
        self._device = arguments[0].device
        self._strict = True
        self._settings = sum(self._sizes()[:6])
        self._numbers: Rows | None = None
        if self._bakes and _has_fused(form):
            self._numbers = arguments[self._settings].tolist()

    def __call__(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """One step; nothing that is given is written."""
        return self.apart(tensors, self._read)

    @property
    def in_place(self) -> InPlace:
        """As that of `Executable`."""

        def making(numbers: Callable[[_Parts], Rows | None]) -> InPlace:
            return lambda bound, written: _InPlace(self, written, numbers)  # all is read where it lies

        if not self._bakes:
            return making(self._read)
        read = making(lambda _: None)
        if not _has_fused(self._form) or self._settings not in self._program.arguments:
            return read
        place = self._program.arguments.index(self._settings)

        def held(values: Mapping[int, torch.Tensor]) -> InPlace:
            rows: Rows = values[place].tolist()
            return making(lambda _: rows)

        return Baking(frozenset({place}), held, read)

    def _read(self, parts: _Parts) -> Rows | None:
        """The settings as they are; while a graph is recorded those that were read last."""
        if not _has_fused(self._form):
            return None
        settings = parts.settings[0]
        if not (settings.is_cuda and torch.cuda.is_current_stream_capturing()):
            self._numbers = settings.tolist()
        return self._numbers

    def apart(self, tensors: Sequence[torch.Tensor], numbers: Callable[[_Parts], Rows | None]) -> list[torch.Tensor]:
        """A step that writes nothing that is given. `numbers` gives its settings; None: they are left on the device."""
        with self._alone:
            return self._deterministic(lambda: self._apart(self._parts(tensors), numbers))

    def _apart(self, parts: _Parts, numbers: Callable[[_Parts], Rows | None]) -> list[torch.Tensor]:
        rows = numbers(parts)
        loss, buffers, gradients = self._differentiated(parts)
        with torch.no_grad():
            own = replace(parts, trained=[x.clone() for x in parts.trained], states=[x.clone() for x in parts.states])
            counted = [c + 1.0 for c in parts.counters]
            updates = self._fused(own, gradients, counted, rows)
            if updates is None:
                return self._chosen([loss, *buffers, *self._stepped(parts, gradients)])
            _all(updates)
        return self._chosen([loss, *buffers, *own.trained, *own.states, *counted])

    def _deterministic(self, step: Callable[[], list[torch.Tensor]]) -> list[torch.Tensor]:
        """A step by deterministic operators: attention's are taken only where those that have none are errors."""
        if not self._bakes:
            return step()
        if self._strict:
            try:
                with deterministic(warn_only=False):
                    take_workspaces(self._device)
                    return step()
            except RuntimeError as error:
                if "deterministic" not in str(error):
                    raise
                self._strict = False  # before anything is written, and before it is recorded: it is run dry first
        with deterministic(warn_only=True):
            take_workspaces(self._device)
            return step()

    def write(
        self,
        tensors: Sequence[torch.Tensor],
        written: Sequence[tuple[int, torch.Tensor]],
        numbers: Callable[[_Parts], Rows | None],
    ) -> list[torch.Tensor]:
        """A step whose results are written into these tensors, each by its position; `numbers`: as for `apart`."""
        with self._alone:
            return self._deterministic(lambda: self._write(self._parts(tensors), written, numbers))

    def _write(
        self, parts: _Parts, written: Sequence[tuple[int, torch.Tensor]], numbers: Callable[[_Parts], Rows | None]
    ) -> list[torch.Tensor]:
        rows = numbers(parts)
        loss, buffers, gradients = self._differentiated(parts)
        with torch.no_grad():
            counted = [c + 1.0 for c in parts.counters]
            held = {x.data_ptr() for x in (*parts.trained, *parts.states)}
            own = held <= {x.data_ptr() for _, x in written}
            updates = self._fused(parts, gradients, counted, rows) if own else None
            if updates is None:
                found = self._chosen([loss, *buffers, *self._stepped(parts, gradients)])
                updates, held = [], set()
            else:
                found = self._chosen([loss, *buffers, *parts.trained, *parts.states, *counted])
            _all([*updates, *copies((x, found[k]) for k, x in written if x.data_ptr() not in held)])
        if self._device.type == "cpu":
            self._last = gradients
        return found

    def _parts(self, tensors: Sequence[torch.Tensor]) -> _Parts:
        """The arguments by what they are."""
        given = dict(self._spare) | dict(zip(self._program.arguments, tensors, strict=True))
        rest = iter([given[k] for k in range(self._count)])

        def some(count: int) -> list[torch.Tensor]:
            return [next(rest) for _ in range(count)]

        return _Parts(*map(some, self._sizes()))

    def _sizes(self) -> tuple[int, ...]:
        """How many arguments each field of `_Parts` has."""
        form, (trained, fixed) = self._form, self._names
        rules = [form.rules[g] for g in form.groups]
        states = sum(len(rule.slots) for rule in rules) if form.last else 0
        counters = 1 + max(form.counters, default=-1) if form.last else 0
        scaled = int(form.scaling is not None)
        return (
            len(trained), len(fixed), self._inputs, scaled, states, counters, int(form.last), scaled * form.last,
            int(form.skips and form.last), len(trained) * (form.batches > 1),
        )  # fmt: skip

    def _differentiated(self, parts: _Parts) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
        """The loss, new values of the buffers that are written, and the gradients."""
        form, kind = self._form, parts.trained[0].device.type
        with torch.inference_mode(mode=False), torch.enable_grad(), without_autocast(kind):
            trained = [x.detach().requires_grad_() for x in parts.trained]
            fixed = [x.detach().clone() if k in self._buffers else x.detach() for k, x in enumerate(parts.fixed)]
            count = len(trained)
            inputs = [unlaid(x, form.order(count + k)) for k, x in enumerate(parts.inputs)]
            values = (*(unlaid(x, form.order(k)) for k, x in enumerate(trained)), *fixed)
            state = dict(zip((*self._names[0], *self._names[1]), values, strict=True))
            loss = called(self._both, state, inputs, form)
            given = loss / form.batches if form.batches > 1 else loss
            given = given * parts.scale[0].to(loss.dtype) if form.scaling else given
            self._last = ()
            gradients = torch.autograd.grad(given, trained)
        return loss.detach(), [fixed[k] for k in self._buffers], list(gradients)

    def _stepped(self, parts: _Parts, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        p, rules = parts, [self._form.rules[g] for g in self._form.groups]
        return stepped(
            self._form, rules, p.trained, gradients, p.states, p.counters, p.settings, p.scale, p.growth, p.skipped,
            p.sums,
        )  # fmt: skip

    def _fused(
        self, parts: _Parts, gradients: Sequence[torch.Tensor], counted: Sequence[torch.Tensor], rows: Rows | None
    ) -> list[Callable[[], object]] | None:
        return None if rows is None else _fused(self._form, parts, gradients, counted, rows, recorded=self._bakes)

    def _chosen(self, results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [results[k] for k in self._wanted]


@final
@dataclass(frozen=True)
class _InPlace:
    """A step that writes into tensors that stay where they are."""

    step: EagerStep
    written: Sequence[tuple[int, torch.Tensor]]
    numbers: Callable[[_Parts], Rows | None]

    def __call__(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """One step."""
        return self.step.write(tensors, self.written, self.numbers)

    def dry(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """The same results; nothing that is given is written."""
        return self.step.apart(tensors, self.numbers)


def _all(calls: Iterable[Callable[[], object]]) -> None:
    """Call functions of C one after another: no Python runs, and no interrupt is heard, between two of them."""
    deque(map(operator.call, calls), maxlen=0)


def _has_fused(form: Form) -> bool:
    """Whether nothing but the optimizer comes behind the gradients of one batch."""
    return form.last and form.batches == 1 and not (form.skips or form.clip_norm or form.scaling)


def _fused(
    form: Form,
    parts: _Parts,
    gradients: Sequence[torch.Tensor],
    counted: Sequence[torch.Tensor],
    rows: Rows,
    *,
    recorded: bool,
) -> list[Callable[[], object]] | None:
    """Calls that update the parameters and their state in place, one for each group; None: there are none for this.

    `counted`: numbers of steps, this one included. `rows`: the settings. `recorded`: learning rates are read where they
    are, by kernels for which they are f32, the numbers of steps, too.
    """
    types = (torch.float32,) if recorded else _FUSED_TYPES
    narrow = not recorded or all(x.dtype is torch.float32 for x in counted)
    if not narrow or any(x.dtype not in types or not _is_dense(x) for x in (*parts.trained, *parts.states)):
        return None
    found: list[Callable[[], object]] = []
    for number, rule in enumerate(form.rules):
        own = [k for k, g in enumerate(form.groups) if g == number]
        slots = _slots(form, parts.states, own)
        weights = [parts.trained[k] for k in own]
        if any(x.dtype is not weights[0].dtype for x in (*weights, *(x for slot in slots for x in slot))):
            return None
        if any(x.stride() != w.stride() for slot in slots for x, w in zip(slot, weights, strict=True)):
            return None
        if not own:
            continue
        alike = zip(weights, (gradients[k] for k in own), strict=True)
        grads = [g if g.stride() == x.stride() else torch.empty_like(x).copy_(g) for x, g in alike]
        rate, decay, first, second, eps = rows[number]
        if rule.momentum and first <= 0.0:
            return None  # no step of this rule: kernels refuse it
        lr = parts.settings[0][number, 0].to(torch.float32) if recorded else rate
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
