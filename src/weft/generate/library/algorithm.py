"""A product by one algorithm of cuBLASLt, as a step of a library call: what is recorded, and how it is found again.

The step is `weft.cublaslt(x, w, bias, residual)` with the fields of `Algorithm` as keyword arguments. The bytes mean
something to one version of the library on one kind of GPU only, so both are recorded with them, under a seal. Imports
no framework; `lt_call` runs the step.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import get_args

from weft.device.cuda.cublaslt import Activation
from weft.errors import ArtifactError
from weft.kernels.source import CallStep, CallValue, Kernel, LibraryCall, Ref, ScheduleParam

TARGET = "weft.cublaslt"
FORM = "lt"
"""Of the schedules."""
COMPUTE = ("f16", "bf16", "tf32", "f32")
DATA_BYTES = 64
STEP = 1
"""Raised when `lt_call` runs a record in another way: what was saved or measured before is not found again."""
MOST_WORKSPACE = 32 << 20
"""Bytes that an algorithm may take of a plan's memory while it runs: what NVIDIA recommends for Hopper."""
_ROOM = "room"
"""Keyword of the workspace: memory that a plan gives to the step."""
_WORDS = ("activation", "compute", "data", "gpu", "version")
_NAMES = frozenset({*_WORDS, "workspace"})


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One algorithm for one product."""

    compute: str
    """One of `COMPUTE`: the type of the operands, `tf32` for f32 in memory."""
    activation: Activation
    data: str
    """The library's 64 bytes, as hexadecimal digits."""
    version: str
    """Of the library."""
    gpu: str
    """See `identity`."""
    workspace: int
    """Bytes."""

    @property
    def seal(self) -> str:
        """Shows that a record was damaged."""
        text = json.dumps([STEP, *(getattr(self, name) for name in sorted(_NAMES))])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def keywords(self) -> tuple[tuple[str, CallValue], ...]:
        """Of the step, sorted by name."""
        return tuple(sorted([*((name, getattr(self, name)) for name in _NAMES), ("seal", self.seal), ("step", STEP)]))

    def params(self) -> dict[str, ScheduleParam]:
        """Of the schedule, besides its number."""
        return {name: getattr(self, name) for name in _NAMES - {"activation"}}


def identity(name: str, capability: int, sms: int) -> str:
    """What an algorithm was chosen for: a GPU of another name or size may want, or have, another."""
    return f"{name}, sm_{capability}, {sms} multiprocessors"


def algorithm_of(keywords: Mapping[str, CallValue]) -> Algorithm:
    """The record that a step carries.

    Raises:
        ArtifactError: it is incomplete, malformed or damaged [W401].
    """
    words = {name: keywords.get(name) for name in _WORDS}
    workspace = keywords.get("workspace")
    if keywords.get("step") != STEP:
        raise ArtifactError(
            problem=f"a product's record of its algorithm is of form {keywords.get('step')!r}, this Weft reads {STEP}",
            remedy="compile the model again",
        )
    if keywords.keys() - {_ROOM, "out"} != _NAMES | {"seal", "step"} or not all(
        isinstance(x, str) for x in words.values()
    ):
        raise _damaged("fields are missing, or of the wrong type")
    if not isinstance(workspace, int) or isinstance(workspace, bool) or not 0 <= workspace <= MOST_WORKSPACE:
        raise _damaged(f"a workspace of {workspace!r} bytes")
    if words["compute"] not in COMPUTE or words["activation"] not in get_args(Activation):
        raise _damaged(f"no product in {words['compute']!r} with the activation {words['activation']!r}")
    found = Algorithm(**words, workspace=workspace)  # type: ignore[arg-type]
    if len(found.data) != 2 * DATA_BYTES or set(found.data) - set("0123456789abcdef"):
        raise _damaged(f"its algorithm is not {DATA_BYTES} bytes")
    if keywords["seal"] != found.seal:
        raise _damaged("its seal does not fit")
    return found


def _damaged(what: str) -> ArtifactError:
    return ArtifactError(
        problem=f"a product's record of its algorithm is damaged: {what}", remedy="compile the model again"
    )


def chosen(kernel: Kernel) -> Iterator[Algorithm]:
    """The records in a kernel.

    Raises:
        ArtifactError: as for `algorithm_of` [W401].
    """
    for step in kernel.run if isinstance(kernel, LibraryCall) else ():
        if step.target == TARGET:
            yield algorithm_of(dict(step.kwargs))


def names_algorithm(kernel: Kernel) -> bool:
    """Whether a kernel hands recorded bytes to a native library."""
    return isinstance(kernel, LibraryCall) and any(s.target == TARGET for s in (*kernel.prepare, *kernel.run))


def workspace_bytes(kernel: Kernel) -> int:
    """Memory that a plan gives a kernel's algorithms while they run."""
    return max((x.workspace for x in chosen(kernel)), default=0)


def with_room(call: LibraryCall, position: int) -> LibraryCall:
    """The call with its workspace passed in as the input at that position."""

    def given(step: CallStep) -> CallStep:
        if step.target != TARGET:
            return step
        return replace(step, kwargs=tuple(sorted([*step.kwargs, (_ROOM, Ref("in", position))], key=lambda x: x[0])))

    return replace(call, run=tuple(given(s) for s in call.run))
