"""`weft.compile_step`: forward, loss, backward and optimizer as one plan, and what calls it.

A plan computes new values of everything that a step writes before anything is written; one call then copies them.
"""

from __future__ import annotations

import logging
import operator
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, final, overload

import torch

from weft.device.heap import heap_trimmed
from weft.errors import ExampleInputsError, OptionError, StepError
from weft.frontends.torch import Program, import_fx_program
from weft.kernels.record import CompileRecord
from weft.options import Options
from weft.pipeline import collector
from weft.pipeline.compile import compile_imported
from weft.pipeline.job import Compilation
from weft.platform.table import platform_of
from weft.runtime.executable import without_autocast
from weft.runtime.in_place import Baking, InPlace
from weft.torch_backend.engine import Run
from weft.torch_backend.region import eager_of
from weft.training.eager import EagerStep
from weft.training.form import Both, Form, Order, Scaling, Tensors, laid, order_of
from weft.training.joint import differentiated
from weft.training.trace import Traced, trace
from weft.training.updates import made_state, rules_of, settings_of

_ANOTHER = 'or keep your loop with `torch.compile(model, backend="weft")`'
_AUTOCAST = (None, torch.bfloat16, torch.float16)
_RENEWALS = 4
"""So often a graph is recorded anew because settings changed that it holds; then it reads them."""
log = logging.getLogger("weft")


def compile_step(
    model: torch.nn.Module,
    loss: Callable[[Any, torch.Tensor], torch.Tensor],
    optimizer: torch.optim.Optimizer,
    *example_inputs: torch.Tensor,
    options: Options | None = None,
    clip_norm: float = 0.0,
    skip_nonfinite: bool = False,
    scaler: torch.amp.GradScaler | None = None,
    autocast: torch.dtype | None = None,
    batches: int = 1,
) -> Step:
    """Compile a training step: `step(*inputs, target)` does what a loop does with a batch, and gives the loss.

    That is `loss(model(*inputs), target)`, its gradients, and one step of the optimizer, which reads the parameters'
    own tensors and its own state and writes them in place: `model.state_dict()`, `optimizer.state_dict()` and
    schedulers work as with the loop. Gradients are not kept: `.grad` stays as it is.

    Args:
        model: called as `model(*inputs)`, in the mode (`train`, `eval`) that it is in when a step is called. What it
            decides in Python is decided when a plan is made.
        loss: of the model's output, whatever that is, and the target: one float.
        optimizer: SGD (without dampening), Adam or AdamW of `torch.optim`. Parameters of the model that it lacks, or
            that require no gradient, stay as they are. Its learning rate, weight decay, momentum, betas and epsilon are
            read at each step.
        example_inputs: tensors that the model is called with, and the target behind them, all on one device. Other
            shapes or types are compiled when a call brings them, up to `options.max_plans`.
        options: see `weft.Options`; the device is that of the parameters.
        clip_norm: the gradients' norm over all parameters is brought down to it, as by `clip_grad_norm_`; 0: not.
        skip_nonfinite: a step with a gradient that is infinite or NaN leaves parameters, the optimizer's state and
            the numbers of its steps as they were, without waiting for the device; `Step.skipped` counts. Statistics of
            batch norms are updated, as in eager.
        scaler: the loss is scaled by it and gradients are scaled back; it grows and shrinks as by its own `update`, and
            steps that are not finite are skipped. Its own state is read and written.
        autocast: the model and its loss run under `torch.autocast` with this type, bfloat16 or float16.
        batches: so many calls make one step: gradients of the loss divided by it are summed over them, and the last
            one updates the parameters. The sums are kept by the step, in the parameters' types.

    Raises:
        StepError: an optimizer without a rule, a parameter that is not the model's, a loss that is none [W020].
        ExampleInputsError: no example inputs, or something else than tensors [W001].
        OptionError: a type that autocast does not have, a norm below 0, fewer than one batch [W001].
        ModelRaisesError: the model or the loss raises on the example inputs, or cannot be traced [W116].
        UnsupportedError: an operator that no graph holds, random numbers other than dropout's among them [W201].
    """
    if autocast not in _AUTOCAST:
        raise OptionError(option="autocast", problem=f"{autocast} is neither torch.bfloat16 nor torch.float16")
    if not 0 <= clip_norm < float("inf"):
        raise OptionError(option="clip_norm", problem=f"{clip_norm!r} is no norm, a finite number of 0 or more")
    if type(batches) is not int or batches < 1:
        raise OptionError(option="batches", problem=f"{batches!r} is no number of batches, 1 or more")
    if len(example_inputs) < 2:
        problem = f"{len(example_inputs)} example inputs: at least one input of the model and the target are needed"
        raise ExampleInputsError(option="example_inputs", problem=problem)
    if scaler is not None and not scaler.is_enabled():
        scaler = None
    chosen = Chosen(float(clip_norm), skip_nonfinite or scaler is not None, autocast, batches)
    step = Step(Both(model, loss), optimizer, scaler, chosen, options or Options())
    step.prepare(*example_inputs)
    return step


class Chosen(NamedTuple):
    """What the caller asked of a step."""

    clip_norm: float
    skips: bool
    autocast: torch.dtype | None
    batches: int


@dataclass
class _Plan:
    """One compiled step."""

    traced: Traced
    program: Program
    compilation: Compilation
    form: Form
    trained: tuple[torch.Tensor, ...]
    fixed: tuple[torch.Tensor, ...]
    place: _Place | None = None
    views: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    """Of arguments, by position, that a step takes with their dimensions in another order: the tensor, and so."""
    writes: _Writes | None = None
    """Those of the last call."""


@dataclass(frozen=True)
class _Writes:
    """What a call writes, for as long as it is given the same tensors where they were."""

    own: list[torch.Tensor]
    state: _State | None
    addresses: list[int]
    """Of the model's tensors."""
    targets: list[torch.Tensor]
    sources: list[int]


@dataclass(frozen=True)
class _Place:
    """A plan that reads and writes the model's own tensors: on a GPU one graph a step."""

    make: InPlace
    positions: Mapping[int, int]
    """Of the arguments that it reads in place, by that of the plan's input."""
    addresses: list[int]
    """Of those."""
    targets: Sequence[torch.Tensor]
    """What it writes. It stays where it is for as long as this list is given (`_Writes`)."""
    written: list[int]
    """Addresses of those."""
    numbers: tuple[tuple[float, ...], ...] | None = None
    """Settings that it holds, those of each group but the learning rate; None: it reads all."""
    renewals: int = 0
    """How often these changed."""


@dataclass
class _State:
    """The optimizer's tensors as they were found."""

    tensors: list[torch.Tensor]
    """Of each trained parameter, in order."""
    counted: list[list[torch.Tensor]]
    """Numbers of steps that are equal, all of those of one counter."""
    counters: tuple[int, ...]
    """Of each trained parameter, its counter; -1: none."""
    counts: list[torch.Tensor]
    """The numbers of steps in the order of the parameters."""
    versions: list[int]
    """Of those, when they were read or written last: somebody else may have written them."""

    def is_still(self, tensors: Sequence[torch.Tensor], counts: Sequence[torch.Tensor]) -> bool:
        """Whether these, which the optimizer has now, are the same, and nobody else wrote the numbers of steps."""
        same = len(tensors) == len(self.tensors) and len(counts) == len(self.counts)
        same = same and all(map(operator.is_, tensors, self.tensors)) and all(map(operator.is_, counts, self.counts))
        return same and self.versions == [x._version for x in counts]

    def settle(self) -> None:
        """A step of ours has written the numbers of steps."""
        self.versions = [x._version for x in self.counts]


@final
class Step:
    """A compiled training step, made by `weft.compile_step`. Calls from several threads run one after another.

    A call that raises, or is interrupted, leaves all parameters, buffers and the optimizer's state as they were.
    """

    def __init__(
        self,
        both: Both,
        optimizer: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler | None,
        chosen: Chosen,
        options: Options,
    ) -> None:
        self._both, self._optimizer, self._scaler, self._chosen = both, optimizer, scaler, chosen
        self._options = options
        self._lock = threading.RLock()
        self._plans: OrderedDict[object, _Plan] = OrderedDict()  # the one used last at the end
        self._unused: dict[object, frozenset[str]] = {}
        self._state: _State | None = None
        self._settings: tuple[tuple[tuple[float, ...], ...], torch.Tensor] | None = None
        self._first: _Plan | None = None
        self._sums: dict[int, torch.Tensor] = {}
        self._summed = 0
        self.skipped: torch.Tensor | None = None
        """How many steps were skipped: an int64 scalar on the device; None: none can be."""

    @property
    def record(self) -> CompileRecord:
        """How the plan of the example inputs came about."""
        assert self._first is not None, "compile_step makes it"
        return self._first.compilation.record

    @property
    def compilation(self) -> Compilation:
        """What the example inputs' plan came to; once it was called, `run` reads and writes in place."""
        assert self._first is not None, "compile_step makes it"
        return self._first.compilation

    @property
    def plans(self) -> int:
        """How many are kept, at most `options.max_plans`."""
        return len(self._plans)

    def prepare(self, *inputs: torch.Tensor) -> None:
        """Compile for inputs of these shapes, the target last; nothing is computed, no weight is changed.

        Raises: as `weft.compile_step`.
        """
        with self._lock:
            for last in (True, False)[: min(self._chosen.batches, 2)]:
                self._plan(inputs, last=last)

    @property
    def summed(self) -> int:
        """Of how many batches gradients are summed, and wait for the others of their step."""
        return self._summed

    def forget(self) -> None:
        """Leave the gradients that are summed so far: the next call is the first of a step's."""
        with self._lock:
            self._sums.clear()
            self._summed = 0

    def __call__(self, *inputs: torch.Tensor) -> torch.Tensor:
        """One step on a batch, the target last. The loss of the batch before the update, a scalar without a gradient.

        Raises:
            StepError: tensors on another device than the parameters [W020].
            And as `weft.compile_step`, where the batch's shapes need a new plan. Nothing was written then.
        """
        with self._lock:
            last = self._summed + 1 == self._chosen.batches
            plan = self._plan(inputs, last=last)
            arguments = self._arguments(plan, inputs)
            program = plan.program
            with torch.no_grad():
                targets, sources = self._writes(plan, arguments)
                self._placed(plan, arguments, targets, sources)
                found = list(plan.compilation.run(*(arguments[k] for k in program.arguments)))
                if targets and plan.place is None:
                    # one call: neither an interrupt nor an error of Python's comes between two of the copies
                    torch._foreach_copy_(targets, [found[k] for k in sources])
                elif targets:
                    torch.autograd.graph.increment_version(targets)  # graphs of autograd that saved them raise then
            if self._state is not None:
                self._state.settle()
            self._summed = 0 if last else self._summed + 1
            if last:
                self._optimizer._opt_called = True  # type: ignore[attr-defined]  # what schedulers look for
            first = program.results[0]
            return found[first.value] if first.value >= 0 else arguments[first.argument].clone()

    def _placed(
        self, plan: _Plan, arguments: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], sources: Sequence[int]
    ) -> None:
        """Let the plan have the model's tensors for memory, if what runs it can; anew where they moved.

        So, too, where it holds settings and one of them changed.
        """
        place = plan.place
        make: InPlace | None = place.make if place is not None else getattr(plan.compilation.run, "in_place", None)
        if make is None:
            return
        if place is None:
            own = {*range(len(plan.trained) + len(plan.fixed)), *plan.traced.written}
            positions: Mapping[int, int] = {n: k for n, k in enumerate(plan.program.arguments) if k in own}
        else:
            positions = place.positions
        bound = [arguments[k] for k in positions.values()]
        addresses = [x.data_ptr() for x in bound]
        renewals = place.renewals if place is not None else 0
        numbers = self._held() if isinstance(make, Baking) and renewals <= _RENEWALS else None
        if place is not None and (place.addresses, place.numbers) == (addresses, numbers):
            if place.targets is targets:
                return
            if place.written == [x.data_ptr() for x in targets]:
                plan.place = replace(place, targets=targets)
                return
        renewals += int(place is not None and place.numbers != numbers)
        numbers = numbers if renewals <= _RENEWALS else None
        making = make
        if isinstance(make, Baking) and numbers is not None:
            making = make.held({n: arguments[plan.program.arguments[n]] for n in make.inputs})
        (key,) = (k for k, p in self._plans.items() if p is plan)
        del self._plans[key]  # should there be no room for another, the next call compiles it again
        plan.compilation, plan.place = replace(plan.compilation, plan=None, eager=None), None  # its memory goes first
        # also what only cycles hold: else the new one takes other streams, and a part of a larger piece of memory
        platform_of(str(plan.trained[0].device)).free_memory(garbage=True)
        run = making(dict(zip(positions, bound, strict=True)), list(zip(sources, targets, strict=True)))
        written = [x.data_ptr() for x in targets]
        place = _Place(make, positions, addresses, targets, written, numbers, renewals)
        plan.compilation, plan.place = replace(plan.compilation, eager=run), place
        self._plans[key] = plan

    def _held(self) -> tuple[tuple[float, ...], ...]:
        """The settings but the learning rates, as they were last sent to the device."""
        assert self._settings is not None, "the arguments have been read"
        return tuple(row[1:] for row in self._settings[0])

    def _writes(self, plan: _Plan, arguments: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[int]]:
        """What is written, and which result it gets; a number of steps stands for all that are equal to it."""
        state, last = self._state, plan.writes
        written = [arguments[position] for position in plan.traced.written]
        addresses = [x.data_ptr() for x in written]
        same = last is not None and last.state is state and last.addresses == addresses
        if last is not None and same and all(map(operator.is_, written, last.own)):
            return last.targets, last.sources
        alike = {id(same[0]): same for same in state.counted} if state is not None else {}
        targets: list[torch.Tensor] = []
        sources: list[int] = []
        for own, result in zip(written, plan.program.results[1:], strict=True):
            if result.value < 0:
                continue  # handed back as it is
            for target in alike.get(id(own), [own]):
                targets.append(target.detach())
                sources.append(result.value)
        plan.writes = _Writes(written, state, addresses, targets, sources)
        return targets, sources

    # what a step reads

    def _tensors(self) -> tuple[Tensors, tuple[int, ...]]:
        """The model's tensors, and the group of each that is trained.

        Raises:
            StepError: a parameter of the optimizer is not the model's, or nothing is trained [W020].
        """
        named = dict(self._both.named_parameters())
        names = {id(p): n for n, p in named.items()}
        group: dict[str, int] = {}
        for k, settings in enumerate(self._optimizer.param_groups):
            for parameter in settings["params"]:
                if id(parameter) not in names:
                    problem = f"the optimizer has a parameter of shape {tuple(parameter.shape)} that is not the model's"
                    raise StepError(problem=problem, remedy="construct it with `model.parameters()`")
                if parameter.requires_grad:
                    group[names[id(parameter)]] = k
        trained = {n: p for n, p in named.items() if n in group}
        if not trained:
            problem = "no parameter that the optimizer has requires a gradient"
            raise StepError(problem=problem, remedy="leave some layers unfrozen")
        odd = next((n for n, p in trained.items() if not p.is_floating_point() or p.layout is not torch.strided), None)
        if odd is not None:
            problem = f"parameter {odd} is {trained[odd].dtype}, {trained[odd].layout}"
            raise StepError(problem=problem, remedy="train dense floats")
        fixed: dict[str, torch.Tensor] = {n: p for n, p in named.items() if n not in group}
        fixed.update(self._both.named_buffers())
        return Tensors(trained, fixed), tuple(group[n] for n in trained)

    def _plan(self, inputs: Sequence[object], *, last: bool) -> _Plan:
        """For these inputs and everything else that decides what a step is, compiled if need be."""
        given = _checked(inputs)
        both = self._both
        both.training = both.model.training
        rules = rules_of(self._optimizer)
        known = tuple(p.requires_grad for settings in self._optimizer.param_groups for p in settings["params"])
        shapes = tuple((x.shape, x.dtype, x.device) for x in given)
        key: tuple[object, ...] = (shapes, rules, known, both.training, self._scaling(), last)
        plan = self._plans.get(key)
        if plan is not None and self._found_state(plan) == plan.form.counters:
            self._plans.move_to_end(key)  # one call: an interrupt beside it costs no plan
            return plan
        if plan is None:
            while len(self._plans) >= max(self._options.max_plans, 1) * min(self._chosen.batches, 2):
                self._plans.popitem(last=False)
        with heap_trimmed():
            plan = self._made(given, last=last)
        self._plans[key] = plan
        if self._first is None:
            self._first = plan
        return plan

    def _made(self, given: Sequence[torch.Tensor], *, last: bool) -> _Plan:
        tensors, groups = self._tensors()
        device = next(iter(tensors.trained.values())).device
        for name, x in {**tensors.trained, **tensors.fixed, **{f"input {k}": x for k, x in enumerate(given)}}.items():
            if x.device != device:
                raise StepError(problem=f"{name} is on {x.device}, the parameters on {device}", remedy="move it there")
        rules = rules_of(self._optimizer)
        chosen = self._chosen
        how = (chosen.clip_norm, chosen.skips, self._scaling(), chosen.autocast, chosen.batches, last)
        orders = tuple(order_of(x) for x in (*tensors.trained.values(), *given))
        form = Form(rules, groups, (), *how, orders if any(orders) else ())
        with collector.put_off():
            joint = differentiated(self._both, tensors, given, form)
        tensors = joint.tensors
        self._state = self._read_state(tuple(tensors.trained.values()), joint.form.groups, joint.form)
        form = replace(joint.form, counters=self._state.counters)
        options = replace(self._options, device=str(device))
        with collector.put_off(), without_autocast(device.type), torch.no_grad():
            traced = trace(joint, form)
            program = import_fx_program(traced.gm, (), device=options.device)
        trained, fixed = tuple(tensors.trained.values()), tuple(tensors.fixed.values())
        with without_autocast(device.type), torch.no_grad():
            held = _Plan(traced, program, None, form, trained, fixed)  # type: ignore[arg-type]
            arguments = self._arguments(held, given)
            count = len(trained) + len(fixed) + len(given)
            examples = _Examples([partial(self._example, k, arguments[k], count) for k in program.arguments])
            own = {n for n, k in enumerate(program.arguments) if not len(trained) + len(fixed) <= k < count}
            own |= {n for n, k in enumerate(program.arguments) if not arguments[k].is_floating_point()}
            eager = self._eager(held, tensors, arguments, len(given))
            compilation = compile_imported(
                replace(program.imported, held=frozenset(own)),
                options,
                example_inputs=examples,
                eager=eager,
                model="training step",
                replaces=_replaces(traced, program),
            )
        return replace(held, compilation=compilation)

    def _eager(
        self, plan: _Plan, tensors: Tensors, arguments: Sequence[torch.Tensor], inputs: int
    ) -> Callable[..., Sequence[torch.Tensor]]:
        """The step by the framework's own operators: a loop's; else, operator by operator, the traced graph."""
        if arguments[0].device.type in ("cpu", "cuda") and not plan.traced.draws:
            try:
                return EagerStep(self._both, tensors, plan.form, plan.traced, plan.program, arguments, inputs)
            except Exception:
                log.debug("weft: a training step's module is not copied, its graph is run instead", exc_info=True)
        graph: Run = eager_of(plan.traced.gm, plan.program)
        return lambda *given: graph(given)

    def _example(self, position: int, value: torch.Tensor, count: int) -> torch.Tensor:
        """What a plan is judged on: the model's own tensors; state of the optimizer that is not zero everywhere."""
        if position < count or not value.is_floating_point() or value.dim() == 0 or value.dtype is torch.float64:
            return value
        g = torch.Generator().manual_seed(self._options.seed + position)
        return (1e-4 + 1e-3 * torch.rand(value.shape, generator=g)).to(value)

    def _arguments(self, plan: _Plan, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """In the order of `Traced`."""
        device = plan.trained[0].device
        state = self._state
        assert state is not None, "a plan was found"
        form, count = plan.form, len(plan.trained)
        trained = [_viewed(plan, k, x, form.order(k)) for k, x in enumerate(plan.trained)]
        found = [*trained, *plan.fixed, *(laid(x, form.order(count + k)) for k, x in enumerate(inputs))]
        if self._scaler is not None:
            found.append(self._scale(device)[0])
        if plan.traced.draws:
            found.append(torch.randint(-(1 << 63), (1 << 63) - 1, (), dtype=torch.int64, device=device))
        if plan.form.skips and self.skipped is None:
            self.skipped = torch.zeros((), dtype=torch.int64, device=device)
        if plan.form.last:
            slots = [k for k, group in enumerate(form.groups) for _ in form.rules[group].slots]
            first = len(found)
            found += [
                _viewed(plan, first + n, x, form.order(k))
                for n, (k, x) in enumerate(zip(slots, state.tensors, strict=True))
            ]
            found += [same[0] for same in state.counted]
            found.append(self._settings_now(device))
            if self._scaler is not None:
                found.append(self._scale(device)[1])
            found += [self.skipped] if plan.form.skips and self.skipped is not None else []
        if plan.form.batches > 1:
            found += [laid(self._sum_of(x), form.order(k)) for k, x in enumerate(plan.trained)]
        return found

    def _sum_of(self, parameter: torch.Tensor) -> torch.Tensor:
        """Of a parameter's gradients."""
        found = self._sums.get(id(parameter))
        if found is None or (found.dtype, found.device) != (parameter.dtype, parameter.device):
            found = self._sums[id(parameter)] = torch.zeros_like(parameter.detach())
        return found

    def _scaling(self) -> Scaling | None:
        scaler = self._scaler
        if scaler is None:
            return None
        return Scaling(scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval())

    def _scale(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """The scaler's scale and growth, float32 and int32 scalars of its own."""
        scaler: Any = self._scaler
        if scaler._scale is None:
            scaler._lazy_init_scale_growth_tracker(device)
        return scaler._scale, scaler._growth_tracker

    def _settings_now(self, device: torch.device) -> torch.Tensor:
        """(groups, `SETTINGS`) in float64 on the device; sent there only when something changed."""
        groups = self._optimizer.param_groups
        rules = rules_of(self._optimizer)
        rows = tuple(settings_of(group, rule) for group, rule in zip(groups, rules, strict=True))
        if self._settings is None or self._settings[0] != rows or self._settings[1].device != device:
            self._settings = (rows, torch.tensor(rows, dtype=torch.float64).to(device))
        found = self._settings[1]
        for k, group in enumerate(groups):
            if isinstance(group["lr"], torch.Tensor):
                found = found.clone()
                found[k, 0] = group["lr"].to(device)
        return found

    # the optimizer's state

    def _found_state(self, plan: _Plan) -> tuple[int, ...] | None:
        """Reads the state again where it is no longer what it was; the counters of the parameters."""
        tensors: list[torch.Tensor] = []
        counts: list[torch.Tensor] = []
        for parameter, group in zip(plan.trained, plan.form.groups, strict=True):
            rule = plan.form.rules[group]
            own: Mapping[str, Any] = self._optimizer.state.get(parameter, {})
            if any(own.get(name) is None for name in rule.slots) or (rule.counts and "step" not in own):
                made_state(self._optimizer, parameter, rule)
            tensors += [own[name] for name in rule.slots]
            counts += [own["step"]] if rule.counts else []
        state = self._state
        if state is None or not state.is_still(tensors, counts):
            self._state = state = self._read_state(plan.trained, plan.form.groups, plan.form)
        return state.counters

    def _read_state(self, trained: Sequence[torch.Tensor], groups: Sequence[int], form: Form) -> _State:
        """The state of all parameters; numbers of steps that are equal share a counter, for which they are read."""
        tensors: list[torch.Tensor] = []
        counted: dict[float, list[torch.Tensor]] = {}
        counters: list[int] = []
        counts: list[torch.Tensor] = []
        for parameter, group in zip(trained, groups, strict=True):
            rule = form.rules[group]
            made_state(self._optimizer, parameter, rule)
            own = self._optimizer.state.get(parameter, {})
            for name in rule.slots:
                if own[name].shape != parameter.shape or own[name].device != parameter.device:
                    problem = f"the optimizer's {name} is {tuple(own[name].shape)} on {own[name].device}"
                    remedy = f"its parameter is {tuple(parameter.shape)} on {parameter.device}: load a state that fits"
                    raise StepError(problem=problem, remedy=remedy)
                tensors.append(own[name])
            if rule.counts:
                key = float(own["step"])
                counters.append(list(counted).index(key) if key in counted else len(counted))
                counted.setdefault(key, []).append(own["step"])
                counts.append(own["step"])
            else:
                counters.append(-1)
        return _State(tensors, list(counted.values()), tuple(counters), counts, [x._version for x in counts])


@final
class _Examples(Sequence[torch.Tensor]):
    """Tensors that are made each time they are asked for: a plan that was chosen before asks for none."""

    def __init__(self, make: Sequence[Callable[[], torch.Tensor]]) -> None:
        self._make = make

    def __len__(self) -> int:
        return len(self._make)

    @overload
    def __getitem__(self, k: int) -> torch.Tensor: ...

    @overload
    def __getitem__(self, k: slice) -> list[torch.Tensor]: ...

    def __getitem__(self, k: int | slice) -> torch.Tensor | list[torch.Tensor]:
        return [make() for make in self._make[k]] if isinstance(k, slice) else self._make[k]()


def _replaces(traced: Traced, program: Program) -> dict[int, int]:
    """Results that are written where an argument lies, and these, by their positions in the program's graph."""
    place = {position: n for n, position in enumerate(program.arguments)}
    pairs = zip(traced.written, program.results[1:], strict=True)
    return {result.value: place[at] for at, result in pairs if result.value >= 0 and at in place}


def _viewed(plan: _Plan, position: int, x: torch.Tensor, order: Order) -> torch.Tensor:
    """`laid`, the same view at every call for as long as the tensor stays where it is."""
    if not order:
        return x
    held, view = plan.views.get(position, (None, x))
    if held is not x or view.data_ptr() != x.data_ptr():
        view = laid(x, order)
        plan.views[position] = x, view
    return view


def _checked(inputs: Sequence[object]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for k, x in enumerate(inputs):
        if not isinstance(x, torch.Tensor) or x.layout is not torch.strided:
            problem = f"argument {k} is a {type(x).__name__}, not a dense tensor"
            raise ExampleInputsError(option="example_inputs", problem=problem)
        found.append(x.detach())
    if len(found) < 2:
        problem = f"{len(found)} tensors: at least one input of the model and the target are needed"
        raise ExampleInputsError(option="example_inputs", problem=problem)
    return found
