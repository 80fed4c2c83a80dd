"""A job of kernels in a process of its own: each unit is all its kernels once, launched as they are.

Under MPS, where the job may not run in the model's process. It has no work counter: nothing stops a kernel, and its
progress is not saved.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from weft.colocate.job import JobError
from weft.kernels.scheduling import JobSpec

FILE = "kernels.py"
_TEXT = """from weft.colocate.kernel_process import units

unit = units({path!r})
"""


class Passes(Protocol):
    """What units are of: `KernelJob`."""

    def put_pass(self, stream: int) -> None:
        """All kernels once, on a stream."""
        ...


def as_process(spec: JobSpec, job_toml: Path, folder: Path) -> JobSpec:
    """The same job as one of a process, whose file is written into a folder.

    Raises:
        JobError: a job of a network: its files are those of a process already [W018].
    """
    if spec.kind == "process":
        return spec
    if spec.kind != "kernels":
        problem = "under MPS the job is of a process or of kernels"
        raise JobError(where=spec.name, key="kind", problem=problem, remedy="give such a job, or another policy")
    (folder / FILE).write_text(_TEXT.format(path=str(job_toml.resolve())), encoding="utf-8")
    return replace(spec, kind="process", stages=(), file=FILE, function="unit", progress="")


def units(
    job_toml: str, made: Callable[[Path], tuple[Passes, Callable[[], int]]] | None = None
) -> Callable[[int], None]:
    """The function of a unit. `made`: the job of a file, and what gives the present stream; None: on the GPU."""
    job, stream = (made or _on_gpu)(Path(job_toml))

    def unit(number: int) -> None:  # noqa: ARG001 - each is as the one before
        job.put_pass(stream())

    return unit


def _on_gpu(path: Path) -> tuple[Passes, Callable[[], int]]:
    """For as long as the process lives."""
    import torch

    from weft.colocate.job import read_job
    from weft.colocate.kernel_job import KernelJob
    from weft.device.cuda.driver import primary_context
    from weft.device.cuda.facts import gpu_facts

    _HELD.enter_context(primary_context())
    job = KernelJob(read_job(path), path.parent, facts=gpu_facts(None, calibrate=False), held=_HELD)
    return job, lambda: int(torch.cuda.current_stream().cuda_stream)


_HELD = ExitStack()
"""Of the process: its memory goes with it."""
