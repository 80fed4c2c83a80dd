"""What the parameters of every template share: how they become a schedule and are read back."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any, Self, cast

from weft.kernels.source import Schedule


class Parameters:
    """Base of the frozen dataclasses whose fields are the parameters of a template."""

    __slots__ = ()

    @classmethod
    def of(cls, schedule: Schedule) -> Self:
        """Read back what `named` wrote; what the schedule does not tell is as it is by default.

        Raises:
            KeyError: a schedule of another template.
        """
        p = dict(schedule.params)
        return cls(**{f.name: p[f.name] for f in fields(cast("Any", cls)) if f.name in p or f.default is MISSING})

    def named(self, generator: str, **names: str) -> Schedule:
        """The fields and these names, sorted, as a schedule of a generator."""
        own = {f.name: getattr(self, f.name) for f in fields(cast("Any", self))}
        return Schedule(generator, tuple(sorted({**own, **names}.items())))
