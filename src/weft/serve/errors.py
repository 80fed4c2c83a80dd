"""What a server answers in place of a result: W019 where the caller can mend it, W304 where the server cannot now."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from weft.errors import ArtifactError, DeviceError, InputError, OptionError, RefitError, UserError, WeftError


class RequestError(UserError):
    """A request that is malformed, or does not fit the model."""

    code = "W019"
    template = "{problem}"
    todo = "docs/serve.md says what a request holds; the model's metadata has names, types and shapes"


class UnknownModelError(RequestError):
    """No model, or no version of it, by this name."""

    todo = "`v2/repository/index` lists what there is"


class TooLargeError(RequestError):
    """A request over a limit of the server."""

    todo = "send less at once, or start the server with a larger limit"


class UnauthorizedError(RequestError):
    """A request without the server's token."""

    todo = "send the header `Authorization: Bearer TOKEN`"


class ServeError(DeviceError):
    """A query that the server could not answer."""

    code = "W304"
    template = "{problem}"
    todo = "send it again later; the server's log and `/metrics` say more"

    def __init__(self, *, problem: str, where: str = "", retry_after_s: float = 1.0) -> None:
        super().__init__(where=where, problem=problem)
        self.retry_after_s = retry_after_s
        """When it may be worth another try."""


class OverloadedError(ServeError):
    """More queries wait than may, or this one could not be answered in time."""

    todo = "send it again after the time that the answer names, or send fewer at once"


class UnavailableError(ServeError):
    """The model or the server is not ready: it starts, ends, or its worker is gone."""


class DeadlineError(ServeError):
    """The time of a query was over before its answer was there."""

    todo = "give it more time, or send fewer queries at once"


class InferenceFailedError(ServeError):
    """The plan raised, or its worker died with this query alone in it."""


class LostDeviceError(InferenceFailedError):
    """The GPU answers this process no more, whatever it is asked: another process has to take its place."""


@dataclass(frozen=True, slots=True)
class Status:
    """How the two protocols say it."""

    http: int
    grpc: str
    """Name of the status code."""


STATUS: Mapping[type[WeftError], Status] = {
    UnknownModelError: Status(404, "NOT_FOUND"),
    TooLargeError: Status(413, "RESOURCE_EXHAUSTED"),
    UnauthorizedError: Status(401, "UNAUTHENTICATED"),
    RequestError: Status(400, "INVALID_ARGUMENT"),
    InputError: Status(400, "INVALID_ARGUMENT"),
    OptionError: Status(400, "INVALID_ARGUMENT"),
    RefitError: Status(400, "INVALID_ARGUMENT"),
    ArtifactError: Status(400, "FAILED_PRECONDITION"),
    OverloadedError: Status(429, "RESOURCE_EXHAUSTED"),
    DeadlineError: Status(504, "DEADLINE_EXCEEDED"),
    UnavailableError: Status(503, "UNAVAILABLE"),
    InferenceFailedError: Status(500, "INTERNAL"),
    ServeError: Status(500, "INTERNAL"),
}
"""Of each class, and of its subclasses that have no row."""


def status_of(error: WeftError) -> Status:
    """How an error is answered; one that no row knows is the server's."""
    return next((STATUS[k] for k in type(error).__mro__ if k in STATUS), Status(500, "INTERNAL"))


def line_of(error: WeftError) -> str:
    """The text of an error in one line."""
    return "; ".join(x.strip() for x in str(error).splitlines())
