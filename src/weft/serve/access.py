"""What the two protocols share in front of a server: its limits, its token, the time of a query."""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from pathlib import Path

from weft.errors import OptionError
from weft.serve.errors import UnauthorizedError

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


def check_token(options: FrontOptions, authorization: str | None) -> None:
    """UnauthorizedError where the server has a token and the request does not show it [W019]."""
    if not options.token:
        return
    scheme, _, shown = (authorization or "").partition(" ")
    if scheme.lower() != "bearer" or not hmac.compare_digest(shown.strip().encode(), options.token.encode()):
        raise UnauthorizedError(problem="the request does not have the server's token")
