"""The best-effort job of `weft colocate run` and `prepare`, as the command line names it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from weft.cli.show import Screen, plain

if TYPE_CHECKING:
    from weft.kernels.scheduling import JobSpec

_LINE = 400
"""Characters of a line about a job."""


def job_of(be: Path | None) -> JobSpec | None:
    """What a job.toml says, if there is one.

    Raises:
        JobError: it cannot be taken [W018].
    """
    from weft.colocate.job import read_job

    return None if be is None else read_job(be)


def telling(screen: Screen) -> Callable[[str], None]:
    """Lines about a job, on standard error: what its job.toml says is not believed."""
    return lambda line: screen.err.print(plain(line, _LINE))
