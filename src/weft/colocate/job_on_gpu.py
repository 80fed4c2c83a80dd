"""The best-effort job of a session: made on the GPU where it was left, and its progress saved whatever happens."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, final

from weft.errors import DeviceError

if TYPE_CHECKING:
    import torch

    from weft.colocate.gpu import GpuSession
    from weft.colocate.kernel_job import KernelJob
    from weft.colocate.network_job import NetworkGpuJob
    from weft.colocate.process_job import ProcessJob
    from weft.device.cuda.facts import GpuFacts
    from weft.kernels.scheduling import JobProgress, JobSpec
    from weft.runtime.cuda_executable import CudaExecutable

Examples: TypeAlias = "Sequence[torch.Tensor] | Mapping[str, torch.Tensor | None]"
Compile: TypeAlias = "Callable[[Path, Examples], CudaExecutable]"
"""The plan of a network's file, without a budget of an SM, for inputs like these."""


@final
@dataclass(frozen=True, slots=True)
class PlacedJob:
    """A job that a session has."""

    spec: JobSpec
    job: KernelJob | NetworkGpuJob | ProcessJob
    file: Path | None
    """Of its progress."""

    @property
    def is_done(self) -> bool:
        """Whether all of it was launched, or drawn, as far as is known."""
        done = self.job.is_done
        return done() if callable(done) else done

    def save(self) -> JobProgress:
        """Its progress, as far as it is known, into its file, if it has one.

        Raises:
            ArtifactError: it cannot be written [W401].
        """
        from weft.colocate.job import save_progress

        found = self.job.progress()
        if self.file is not None:
            save_progress(self.file, found)
        return found


@contextmanager
def job_on(
    session: GpuSession,
    spec: JobSpec,
    folder: Path,
    *,
    facts: GpuFacts,
    compiled: Compile,
    tell: Callable[[str], None],
) -> Iterator[PlacedJob]:
    """The job of a session, where it was left; at the end its results are written and its progress is saved.

    Args:
        session: which gets it.
        spec: of kernels, of a network or of a process.
        folder: where its job.toml lies.
        facts: the GPU.
        compiled: makes a network's plan.
        tell: is told how far it has come, in lines that hold names as the job.toml has them.

    Raises:
        WeftError: what making the job, its files, or the GPU raise.
    """
    from weft.colocate.job import resume
    from weft.colocate.kernel_job import KernelJob
    from weft.colocate.process_job import ProcessJob

    file = folder / spec.progress if spec.progress else None
    progress = resume(file, spec) if file is not None else None
    with ExitStack() as held:
        made: KernelJob | NetworkGpuJob | ProcessJob
        if spec.kind == "process":
            made = ProcessJob(spec, folder, held=held, progress=progress)
        elif spec.kind == "kernels":
            made = KernelJob(spec, folder, facts=facts, held=held, progress=progress)
        else:
            made = _network(session, spec, folder, compiled, held, progress)
        session.add_job(made)
        placed = PlacedJob(spec, made, file)
        try:
            yield placed
        finally:
            try:
                _finish(made)
            finally:  # what was written counts
                tell(_told(spec, placed.save()))
                if isinstance(made, ProcessJob) and made.lives > 1:
                    again = f"its process was started {made.lives} times, and {made.lost} units were done again"
                    tell(f"{spec.name}: {again}")


def examples(arrays: Mapping[str, torch.Tensor]) -> Examples:
    """Example inputs of a network by name; in order, where a file has no names of its own, or one array."""
    if len(arrays) == 1 or all(re.fullmatch(r"arr_[0-9]+", name) for name in arrays):
        return [arrays[name] for name in sorted(arrays, key=lambda n: int(n[4:]) if n.startswith("arr_") else 0)]
    return dict(arrays)


def _network(
    session: GpuSession, spec: JobSpec, folder: Path, compiled: Compile, held: ExitStack, progress: JobProgress | None
) -> NetworkGpuJob:
    import torch

    from weft.colocate.inference_files import input_files, members
    from weft.colocate.staged_plan import network_job

    first = folder / spec.inputs / input_files(folder / spec.inputs)[0]
    arrays = {name: torch.from_numpy(x) for name, x in members(first).items()}
    plan = compiled(folder / spec.model, examples(arrays))
    return network_job(
        spec, folder, plan, device=session.device, stream=session.low, held=held, progress=progress
    )  # fmt: skip


def _finish(job: KernelJob | NetworkGpuJob | ProcessJob) -> None:
    """All that was launched has ended, and is right as far as is seen."""
    from weft.colocate.network_job import NetworkGpuJob
    from weft.colocate.process_job import ProcessJob

    if isinstance(job, NetworkGpuJob | ProcessJob):
        job.finish()
    elif wrong := job.check():
        raise DeviceError(problem=f"{job.name}: {wrong}")


def _told(spec: JobSpec, found: JobProgress) -> str:
    """How far a job has come, for people."""
    if spec.passes and found.passes >= spec.passes:
        return f"{spec.name}: all {spec.passes} {'units' if spec.kind == 'process' else 'passes'} are done"
    unit = "input" if spec.kind == "network" else "stage"
    part = "stages" if spec.kind == "network" else "blocks"
    kept = f", saved in {spec.progress}" if spec.progress else ""
    if spec.kind == "process":
        return f"{spec.name}: {found.passes} units{kept}"
    return f"{spec.name}: {found.passes} passes, then {found.stage} {unit}s and {found.blocks} {part}{kept}"
