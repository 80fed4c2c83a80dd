"""The command line in this process."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from weft.cli import app as cli

Weft = Callable[..., tuple[int, str, str]]
"""Arguments to (status, standard output, standard error)."""


def runner(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Weft:
    """What runs `weft` with arguments, on wide lines."""
    monkeypatch.setenv("COLUMNS", "400")

    def call(*args: object) -> tuple[int, str, str]:
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["weft", *map(str, args)])
        with pytest.raises(SystemExit) as ended:
            cli.run()
        found = capsys.readouterr()
        return int(ended.value.code or 0), found.out, found.err

    return call
