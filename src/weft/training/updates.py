"""What an optimizer does to its parameters, as functions of tensors that can be traced; and its state, read and made.

The arithmetic is that of `torch.optim`, operation by operation. Whatever a scheduler may change between steps (learning
rate, weight decay, momentum or betas, epsilon) is an input, in float64, so that no plan depends on it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from weft.errors import StepError

SETTINGS = ("lr", "weight_decay", "first", "second", "eps")
"""Columns of the settings of a group; `first` is the momentum or the first beta, `second` the second beta."""


@dataclass(frozen=True, slots=True)
class Rule:
    """How the parameters of one group are updated, as far as it decides which operations there are."""

    kind: str
    """`sgd` or `adam`."""
    decays: bool = False
    decoupled: bool = False
    momentum: bool = False
    nesterov: bool = False
    maximize: bool = False
    amsgrad: bool = False

    @property
    def slots(self) -> tuple[str, ...]:
        """State that is kept for each parameter, by the names of `torch.optim`, without the number of steps."""
        if self.kind == "sgd":
            return ("momentum_buffer",) if self.momentum else ()
        return ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if self.amsgrad else ("exp_avg", "exp_avg_sq")

    @property
    def counts(self) -> bool:
        """Whether the number of steps is part of the state."""
        return self.kind == "adam"


def rules_of(optimizer: torch.optim.Optimizer) -> tuple[Rule, ...]:
    """One rule per parameter group.

    Raises:
        StepError: another optimizer than SGD, Adam and AdamW, or a setting that no rule has [W020].
    """
    kind = type(optimizer)
    if kind not in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW):
        problem = f"there is no rule for the optimizer {kind.__name__}"
        remedy = 'use SGD, Adam or AdamW of torch.optim, or keep your loop with `torch.compile(model, backend="weft")`'
        raise StepError(problem=problem, remedy=remedy)
    return tuple(_rule_of(kind, group) for group in optimizer.param_groups)


def _rule_of(kind: type, group: Mapping[str, Any]) -> Rule:
    if group.get("differentiable"):
        raise StepError(problem="the optimizer is differentiable", remedy="construct it without `differentiable`")
    decays, maximize = float(group["weight_decay"]) != 0.0, bool(group["maximize"])
    if kind is torch.optim.SGD:
        momentum = float(group["momentum"]) != 0.0
        if momentum and float(group["dampening"]) != 0.0:
            problem = "SGD with dampening: its first step differs from all others"
            raise StepError(problem=problem, remedy="set `dampening` to 0")
        return Rule("sgd", decays, momentum=momentum, nesterov=bool(group["nesterov"]), maximize=maximize)
    if any(isinstance(x, torch.Tensor) for x in group["betas"]):
        raise StepError(problem="a beta of the optimizer is a tensor", remedy="give the betas as numbers")
    decoupled = bool(group.get("decoupled_weight_decay", kind is torch.optim.AdamW))
    return Rule("adam", decays, decoupled, maximize=maximize, amsgrad=bool(group["amsgrad"]))


def settings_of(group: Mapping[str, Any], rule: Rule) -> tuple[float, ...]:
    """The values of `SETTINGS` now; a learning rate that is a tensor counts as 0 here."""
    lr = 0.0 if isinstance(group["lr"], torch.Tensor) else float(group["lr"])
    decay = float(group["weight_decay"])
    if rule.kind == "sgd":
        return lr, decay, float(group["momentum"]), 0.0, 0.0
    first, second = group["betas"]
    return lr, decay, float(first), float(second), float(group["eps"])


def made_state(optimizer: torch.optim.Optimizer, parameter: torch.Tensor, rule: Rule) -> None:
    """Give a parameter the state that it lacks, as the optimizer's own first step would."""
    if not rule.slots:
        return
    state = optimizer.state[parameter]
    for name in rule.slots:
        if state.get(name) is None:
            state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
    if rule.counts and "step" not in state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
    elif rule.counts and (not isinstance(state["step"], torch.Tensor) or state["step"].device != parameter.device):
        state["step"] = torch.as_tensor(state["step"], dtype=torch.float32).to(parameter.device)


def updated(
    rule: Rule,
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    state: Sequence[torch.Tensor],
    steps: torch.Tensor | None,
    settings: torch.Tensor,
) -> list[torch.Tensor]:
    """The parameter and its state (`Rule.slots`) after one step; `steps` counts this one.

    `settings` is a float64 vector of `SETTINGS`, `steps` a float32 scalar. All results have the types of what they
    replace; 16-bit ones are computed in f32 and rounded once.
    """
    kinds = [parameter.dtype, *(x.dtype for x in state)]
    parameter, gradient, *state = (_wide(x) for x in (parameter, gradient, *state))
    found = _updated(rule, parameter, gradient, state, steps, settings)
    return [x.to(kind) for x, kind in zip(found, kinds, strict=True)]


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.float32) if x.dtype in (torch.float16, torch.bfloat16) else x


def _updated(
    rule: Rule,
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    state: Sequence[torch.Tensor],
    steps: torch.Tensor | None,
    settings: torch.Tensor,
) -> list[torch.Tensor]:
    lr, decay, first, second, eps = settings.unbind()
    if rule.maximize:
        gradient = -gradient
    if rule.decays and not rule.decoupled:
        gradient = gradient + _like(decay, parameter) * parameter
    if rule.kind == "sgd":
        return _sgd(rule, parameter, gradient, state, lr, first)
    if rule.decays and rule.decoupled:
        parameter = parameter * _like(1.0 - lr * decay, parameter)
    assert steps is not None
    mean = state[0] + _like(1.0 - first, parameter) * (gradient - state[0])
    square = _like(second, parameter) * state[1] + _like(1.0 - second, parameter) * (gradient * gradient)
    count = steps.to(torch.float64)
    size = lr / (1.0 - first**count)
    root = torch.sqrt(1.0 - second**count)
    largest = [torch.maximum(state[2], square)] if rule.amsgrad else []
    below = torch.sqrt(largest[0] if largest else square) / _like(root, parameter) + _like(eps, parameter)
    return [parameter - _like(size, parameter) * (mean / below), mean, square, *largest]


def _sgd(
    rule: Rule,
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    state: Sequence[torch.Tensor],
    lr: torch.Tensor,
    momentum: torch.Tensor,
) -> list[torch.Tensor]:
    kept: list[torch.Tensor] = []
    if rule.momentum:
        kept = [_like(momentum, parameter) * state[0] + gradient]
        gradient = gradient + _like(momentum, parameter) * kept[0] if rule.nesterov else kept[0]
    return [parameter - _like(lr, parameter) * gradient, *kept]


def _like(scalar: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A float64 scalar, rounded once to the type of the parameter, as the framework takes it."""
    return scalar.to(parameter.dtype)
