"""Algorithms of NVIDIA's libraries in library calls: what is recorded of them, and how it is read again.

The steps are `weft.cublaslt(x, w, bias, residual)`, a product with the fields of `Algorithm` as keyword arguments, and
`weft.cudnn(x, w, bias, residual, ...)`, a convolution with those of `Engine`. A record means something to one version
of its library on one kind of GPU only, so both are recorded with it, under a seal. Imports no framework; `lt_call` and
`conv_call` run the steps.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import ClassVar, TypeVar, get_args

from weft.device.cuda.cublaslt import Activation
from weft.device.cuda.cudnn import Activation as Convolved
from weft.errors import ArtifactError
from weft.kernels.source import CallStep, CallValue, Kernel, LibraryCall, Ref, ScheduleParam

TARGET, CONVOLUTION = "weft.cublaslt", "weft.cudnn"
FORM, ENGINE_FORM = "lt", "engine"
"""Of the schedules."""
COMPUTE = ("f16", "bf16", "tf32", "f32")
DATA_BYTES = 64
STEP = 1
"""Raised when `lt_call` runs a record in another way: what was saved or measured before is not found again."""
MOST_WORKSPACE = 32 << 20
"""Bytes that an algorithm may take of a plan's memory while it runs: what NVIDIA recommends for Hopper."""
_ROOM = "room"
"""Keyword of the workspace: memory that a plan gives to the step."""
MOST_KNOBS = 64
_KNOBS = re.compile(r"([0-9]{1,4}:-?[0-9]{1,9}(,[0-9]{1,4}:-?[0-9]{1,9})*)?")
_STEPS = frozenset({TARGET, CONVOLUTION})


class Record:
    """What both records can do; their fields are texts and whole numbers."""

    what: ClassVar[str]
    library: ClassVar[str]
    """For people."""
    version: str
    gpu: str
    workspace: int

    def check(self, version: str, gpu: str, where: str = "") -> None:
        """ArtifactError: it was chosen with another version of the library than this, or for another GPU [W401]."""
        remedy = "compile the model again on this machine"
        if self.version != version:
            text = f"{self.what} is one of {self.library} {self.version}, here is {version}"
            raise ArtifactError(where=where, problem=text, remedy=remedy)
        if self.gpu != gpu:
            text = f"{self.what} was chosen for {self.gpu}, here is {gpu}"
            raise ArtifactError(where=where, problem=text, remedy=remedy)

    def named(self) -> dict[str, str | int]:
        """Its fields."""
        return {x.name: getattr(self, x.name) for x in fields(self)}  # type: ignore[arg-type]

    @property
    def seal(self) -> str:
        """Shows that a record was damaged."""
        text = json.dumps([STEP, *(value for _, value in sorted(self.named().items()))])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def keywords(self) -> tuple[tuple[str, CallValue], ...]:
        """Of the step, sorted by name."""
        return tuple(sorted([*self.named().items(), ("seal", self.seal), ("step", STEP)]))

    def params(self) -> dict[str, ScheduleParam]:
        """Of the schedule, besides its number."""
        return {name: value for name, value in self.named().items() if name != "activation"}


@dataclass(frozen=True)
class Algorithm(Record):
    """One algorithm of cuBLASLt for one product."""

    what = "a product's algorithm"
    library = "cuBLASLt"

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


@dataclass(frozen=True)
class Engine(Record):
    """One engine of cuDNN with its settings, for one convolution."""

    what = "a convolution's engine"
    library = "cuDNN"

    compute: str
    """One of `COMPUTE`."""
    activation: Convolved
    number: int
    """Of the engine."""
    knobs: str
    """Kind and value of each setting, as `2:5,14:3`; empty without."""
    version: str
    """Of the library."""
    gpu: str
    """See `identity`."""
    workspace: int
    """Bytes."""

    @property
    def settings(self) -> tuple[tuple[int, int], ...]:
        """As the library takes them."""
        pairs = (x.split(":") for x in self.knobs.split(",") if x)
        return tuple((int(kind), int(value)) for kind, value in pairs)


def identity(name: str, capability: int, sms: int) -> str:
    """What an algorithm was chosen for: a GPU of another name or size may want, or have, another."""
    return f"{name}, sm_{capability}, {sms} multiprocessors"


def algorithm_of(keywords: Mapping[str, CallValue]) -> Algorithm:
    """The record that a product's step carries.

    Raises:
        ArtifactError: it is incomplete, malformed or damaged [W401].
    """
    found = _read(Algorithm, keywords, "a product")
    if found.activation not in get_args(Activation):
        raise _damaged("a product", f"no activation {found.activation!r}")
    if len(found.data) != 2 * DATA_BYTES or set(found.data) - set("0123456789abcdef"):
        raise _damaged("a product", f"its algorithm is not {DATA_BYTES} bytes")
    return found


def engine_of(keywords: Mapping[str, CallValue]) -> Engine:
    """The record that a convolution's step carries.

    Raises:
        ArtifactError: as for `algorithm_of` [W401].
    """
    found = _read(Engine, keywords, "a convolution")
    if found.activation not in get_args(Convolved):
        raise _damaged("a convolution", f"no activation {found.activation!r}")
    if not _KNOBS.fullmatch(found.knobs) or found.knobs.count(":") > MOST_KNOBS or not 0 <= found.number < 1 << 31:
        raise _damaged("a convolution", "its engine and settings are no numbers")
    return found


R = TypeVar("R", Algorithm, Engine)


def _read(kind: type[R], keywords: Mapping[str, CallValue], what: str) -> R:
    if keywords.get("step") != STEP:
        raise ArtifactError(
            problem=f"{what}'s record of its algorithm is of form {keywords.get('step')!r}, this Weft reads {STEP}",
            remedy="compile the model again",
        )
    types = {x.name: int if x.type == "int" else str for x in fields(kind)}
    given = {name: keywords.get(name) for name in types}
    if keywords.keys() - {_ROOM, "out"} != types.keys() | {"seal", "step"} or any(
        type(given[name]) is not wanted for name, wanted in types.items()
    ):
        raise _damaged(what, "fields are missing, or of the wrong type")
    found = kind(**given)  # type: ignore[arg-type]
    if not 0 <= found.workspace <= MOST_WORKSPACE:
        raise _damaged(what, f"a workspace of {found.workspace!r} bytes")
    if found.compute not in COMPUTE:
        raise _damaged(what, f"no sums in {found.compute!r}")
    if keywords["seal"] != found.seal:
        raise _damaged(what, "its seal does not fit")
    return found


def _damaged(what: str, why: str) -> ArtifactError:
    return ArtifactError(
        problem=f"{what}'s record of its algorithm is damaged: {why}", remedy="compile the model again"
    )


def chosen(kernel: Kernel) -> Iterator[Algorithm | Engine]:
    """The records in a kernel.

    Raises:
        ArtifactError: as for `algorithm_of` [W401].
    """
    for step in kernel.run if isinstance(kernel, LibraryCall) else ():
        if step.target == TARGET:
            yield algorithm_of(dict(step.kwargs))
        elif step.target == CONVOLUTION:
            yield engine_of(dict(step.kwargs))


def names_algorithm(kernel: Kernel) -> bool:
    """Whether a kernel hands recorded bytes or numbers to a native library."""
    return isinstance(kernel, LibraryCall) and any(s.target in _STEPS for s in (*kernel.prepare, *kernel.run))


def workspace_bytes(kernel: Kernel) -> int:
    """Memory that a plan gives a kernel's algorithms while they run."""
    return max((x.workspace for x in chosen(kernel)), default=0)


def with_room(call: LibraryCall, position: int) -> LibraryCall:
    """The call with its workspace passed in as the input at that position."""

    def given(step: CallStep) -> CallStep:
        if step.target not in _STEPS:
            return step
        return replace(step, kwargs=tuple(sorted([*step.kwargs, (_ROOM, Ref("in", position))], key=lambda x: x[0])))

    return replace(call, run=tuple(given(s) for s in call.run))
