"""What a step of the optimizer does to gradients, operation by operation: before, for each parameter, and behind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from weft.training.form import Form, Scaling
from weft.training.updates import Rule, updated


@dataclass(frozen=True)
class Ready:
    """What updates of parameters read."""

    gradients: Sequence[torch.Tensor]
    counted: Sequence[torch.Tensor]
    """Numbers of steps, this one with them."""
    rows: Sequence[torch.Tensor]
    """The settings of each group."""
    fine: Sequence[torch.Tensor]
    """Whether all gradients are finite, where a step may be skipped."""

    @property
    def flat(self) -> list[torch.Tensor]:
        """All, in order."""
        return [*self.gradients, *self.counted, *self.rows, *self.fine]


def summed(gradients: Sequence[torch.Tensor], sums: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """With the gradients of the batches before, if there are any."""
    return [x + g.to(x.dtype) for x, g in zip(sums, gradients, strict=True)] if sums else list(gradients)


def ready(
    form: Form,
    gradients: Sequence[torch.Tensor],
    counters: Sequence[torch.Tensor],
    settings: Sequence[torch.Tensor],
    scale: Sequence[torch.Tensor],
) -> Ready:
    """Gradients as they are applied: without the scale, and clipped."""
    if form.scaling is not None:
        inverse = scale[0].reciprocal()
        gradients = [g * inverse.to(g.dtype) for g in gradients]
    fine = [torch.stack([torch.isfinite(g).all() for g in gradients]).all()] if form.skips else []
    if form.clip_norm:
        parts = torch.stack([torch.sum(_wide(g) * _wide(g)) for g in gradients])
        factor = torch.clamp(form.clip_norm / (torch.sqrt(torch.sum(parts)) + 1e-6), max=1.0)
        gradients = [g * factor.to(g.dtype) for g in gradients]
    return Ready(gradients, [c + 1.0 for c in counters], settings[0].unbind(), fine)


def decided(
    form: Form,
    fine: Sequence[torch.Tensor],
    new: Sequence[torch.Tensor],
    old: Sequence[torch.Tensor],
    scale: Sequence[torch.Tensor],
    growth: Sequence[torch.Tensor],
    skipped: Sequence[torch.Tensor],
    sums: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    """New values of parameters, state and numbers of steps, or the old ones where a step is skipped, and what follows.

    Those are the scale and its growth, the number of skipped steps, and the sums, which begin anew.
    """
    found = list(new)
    for is_fine in fine:
        found = [torch.where(is_fine, x, before) for x, before in zip(new, old, strict=True)]
        if form.scaling is not None:
            found += _rescaled(form.scaling, is_fine, scale[0], growth[0])
        found.append(skipped[0] + torch.logical_not(is_fine).to(torch.int64))
    return [*found, *(torch.zeros_like(x) for x in sums)]


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
    """All of it: new values of all arguments but gradients and settings.

    Of a batch that is not the last, those of the sums alone.
    """
    gradients = summed(gradients, sums)
    if not form.last:
        return gradients
    given = ready(form, gradients, counters, settings, scale)
    renewed: list[torch.Tensor] = []
    kept: list[torch.Tensor] = []
    rest = iter(states)
    for k, rule in enumerate(rules):
        state = [next(rest) for _ in rule.slots]
        steps = given.counted[form.counters[k]] if rule.counts else None
        first, *others = updated(rule, parameters[k], given.gradients[k], state, steps, given.rows[form.groups[k]])
        renewed.append(first)
        kept += others
    new, old = [*renewed, *kept, *given.counted], [*parameters, *states, *counters]
    return decided(form, given.fine, new, old, scale, growth, skipped, sums)


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.float32) if x.dtype in (torch.float16, torch.bfloat16) else x


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
