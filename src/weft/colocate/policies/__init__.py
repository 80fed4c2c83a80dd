"""Scheduling policies by name. Those of papers are our implementations of what is published, and say so."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from weft.colocate.policies.baselines import Beside, Exclusive, Green, Serial, TimeSlice
from weft.colocate.policies.papers import Aker, Orion, Tacker, Tally
from weft.colocate.policies.weft import Weft
from weft.colocate.policy import Policy, PolicyError, Setting

NOTES: Mapping[str, str] = {
    "exclusive": "",
    "serial": "our implementation of Baymax' reordering",
    "streams": "",
    "priority": "",
    "green": "the split chosen while it runs",
    "timeslice": "",
    "mps": "",
    "orion": "our implementation of Orion",
    "tally": "our implementation of Tally",
    "tacker": "our implementation of Tacker",
    "aker": "our implementation of Aker",
    "weft": "",
}
"""What must be said of a policy, by name. `green:N` is besides these."""
_MAKE: Mapping[str, Callable[[Setting], Policy]] = {
    "exclusive": Exclusive,
    "serial": Serial,
    "streams": lambda s: Beside("streams", s),
    "priority": lambda s: Beside("priority", s),
    "green": Green,
    "timeslice": TimeSlice,
    "mps": lambda s: Beside("mps", s),
    "orion": Orion,
    "tally": Tally,
    "tacker": Tacker,
    "aker": Aker,
    "weft": Weft,
}
NAMES = tuple(NOTES)
NEEDS_NO_JOB = frozenset({"exclusive"})
NEEDS_BLOCKS: Mapping[str, str] = {
    "tally": "it stops the job's kernels between two of their blocks",
    "tacker": "it fuses the job's kernels with the model's",
    "aker": "it fuses parts of the job's kernels with the model's",
}
"""Policies that do not run with a job in another process, and why: nothing of that is in reach but whole segments."""


def checked(name: str) -> str:
    """The name of a policy, if there is one.

    Raises:
        PolicyError: there is none [W206].
    """
    if name in NOTES or re.fullmatch(r"green:[1-9][0-9]{0,2}", name):
        return name
    raise PolicyError(
        policy=name[:40], reason="there is none of this name", remedy=f"one of {', '.join(NAMES)}, or green:SMS"
    )


def note_of(name: str) -> str:
    """What must be said of a policy."""
    return NOTES.get(name, "")


def make(name: str, setting: Setting) -> Policy:
    """A policy by name, new: it knows of no run before.

    Raises:
        PolicyError: there is none, or it needs a job [W206].
    """
    checked(name)
    if setting.job is None and name not in NEEDS_NO_JOB:
        raise PolicyError(policy=name, reason="it shares the GPU with a job, and there is none", remedy="give --be JOB")
    return Beside(name, setting) if name.startswith("green:") else _MAKE[name](setting)
