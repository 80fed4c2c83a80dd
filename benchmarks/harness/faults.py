"""What suites that inject faults share: how a fault that did what it may not is told."""

from __future__ import annotations


class WrongError(Exception):
    """A fault did what it may not."""


def need(holds: bool, what: str) -> None:
    """Go on if it holds.

    Raises:
        WrongError: it does not.
    """
    if not holds:
        raise WrongError(what)
