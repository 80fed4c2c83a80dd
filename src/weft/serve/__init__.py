"""Saved plans as a service: queries of many callers in batches, in processes that may die.

`Server` answers queries without any protocol; `weft serve` is the command, and speaks those of KServe. `docs/serve.md`
has both.
"""

from __future__ import annotations

from weft.serve.server import Server
from weft.serve.settings import ServeOptions, Source

__all__ = ["ServeOptions", "Server", "Source"]
