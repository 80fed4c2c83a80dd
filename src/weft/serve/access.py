"""What the two protocols share in front of a server: its limits, its token; and what their process is told."""

from __future__ import annotations

import hmac
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from weft.errors import OptionError
from weft.serve.errors import UnauthorizedError
from weft.serve.settings import ServeOptions, Source

MIB = 1 << 20
LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True, slots=True)
class FrontOptions:
    """Where a server listens, and what it takes from there."""

    host: str = "127.0.0.1"
    port: int = 8000
    """Of HTTP; 0: any."""
    grpc_port: int = 8001
    """0: any; -1: none."""
    token: str = ""
    """What requests have to show, health apart; empty: nothing."""
    cert: Path | None = None
    """TLS: a certificate and its key, in PEM."""
    key: Path | None = None
    max_body_bytes: int = 64 * MIB
    max_header_bytes: int = 16 << 10
    max_connections: int = 1024
    """Of HTTP at once; further ones are refused."""
    read_s: float = 30.0
    """How long a body may take to arrive."""
    control: bool = True
    """Whether models may be loaded and unloaded from outside."""

    def __post_init__(self) -> None:
        for name in ("port", "grpc_port"):
            if not -(name == "grpc_port") <= getattr(self, name) <= 65535:
                raise OptionError(option=name, problem=f"{getattr(self, name)} is no port")
        for name in ("max_body_bytes", "max_header_bytes", "max_connections"):
            if getattr(self, name) < 1:
                raise OptionError(option=name, problem=f"{getattr(self, name)} is less than 1")
        if (self.cert is None) != (self.key is None):
            raise OptionError(option="--tls-cert", problem="a certificate and its key are given together")
        for path in (self.cert, self.key):
            if path is not None and not path.is_file():
                raise OptionError(option="--tls-cert", problem=f"{path} is no file")
        if self.token and not (self.token.isascii() and self.token.isprintable() and len(self.token) <= 4096):
            raise OptionError(option="--token-file", problem="a token is printable ASCII, at most 4096 characters")

    @property
    def is_open(self) -> bool:
        """Whether others than this machine reach it without showing anything."""
        return self.host not in LOOPBACK and not self.token


@dataclass(frozen=True, slots=True)
class FrontSettings:
    """What the process of a front end reads."""

    models: tuple[Source, ...]
    directory: Path | None
    options: ServeOptions
    front: FrontOptions
    fd: int
    """Of the socket that waits for HTTP."""
    standby: bool = False
    """It opens its ports when it is told to."""
    without: tuple[str, ...] = ()
    """Models that are not loaded until somebody asks for it."""

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self), default=str)

    @classmethod
    def from_json(cls, text: str) -> FrontSettings:
        """What `to_json` wrote."""
        data: dict[str, Any] = json.loads(text)

        def paths(given: Mapping[str, Any], *names: str) -> dict[str, Any]:
            return {k: Path(v) if k in names and v is not None else v for k, v in given.items()}

        models = [Source(m["name"], m["version"], tuple(map(Path, m["files"]))) for m in data["models"]]
        options = paths(data["options"], "cache")
        return cls(
            tuple(models), None if data["directory"] is None else Path(data["directory"]),
            ServeOptions(**{**options, "trust": tuple(options["trust"])}),
            FrontOptions(**paths(data["front"], "cert", "key")), int(data["fd"]), bool(data["standby"]),
            tuple(data["without"]),
        )  # fmt: skip


def check_token(options: FrontOptions, authorization: str | None) -> None:
    """UnauthorizedError where the server has a token and the request does not show it [W019]."""
    if not options.token:
        return
    scheme, _, shown = (authorization or "").partition(" ")
    if scheme.lower() != "bearer" or not hmac.compare_digest(shown.strip().encode(), options.token.encode()):
        raise UnauthorizedError(problem="the request does not have the server's token")
