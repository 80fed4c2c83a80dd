"""All kernels of a job once with each fused step of a plan, as Tacker has it: the rest runs behind the step.

A fused kernel ends with LC, whatever of the job has run by then. Here the counter's limit is lowered in front of a
step, by the device, to so many blocks from where the job stands, and a persistent kernel runs behind the step what is
left up to it. The limit that the host gave is put back behind the last such step of a plan. None of these four kernels
begins before all on its stream has ended.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from weft.colocate.kernel_job import KEPT_AT, CoRunner, KernelJob
from weft.device.cuda.confined import ConfinedJob
from weft.device.cuda.facts import GpuFacts
from weft.generate.bind import CudaModule, Prepared
from weft.ir.declined import Declined
from weft.kernels.colocation import WorkCounter

DRAIN_CTAS = (8, 4, 2, 1)
"""Of a multiprocessor, for what a fused step leaves: as many as stay there at once."""
TEXT = """extern "C" __global__ void w_keep(const unsigned* limit, unsigned* kept) { *kept = *limit; }
extern "C" __global__ void w_grant(unsigned* limit, const unsigned* finished, const unsigned* kept,
                                   unsigned long long blocks) {
  const unsigned goal = *finished + (unsigned)blocks;  // nothing draws: all that were drawn have ended
  *limit = (int)(goal - *kept) < 0 ? goal : *kept;
}
extern "C" __global__ void w_give_back(unsigned* limit, const unsigned* kept) { *limit = *kept; }
"""


@final
@dataclass(frozen=True, slots=True)
class WholeKernels:
    """What stands around fused steps."""

    keep: Prepared
    grant: Prepared
    drain: Prepared
    give_back: Prepared

    def around(self, fused: Prepared, *, first: bool, last: bool) -> Prepared:
        """A fused step with all kernels of the job; `first`, `last`: of those of its plan."""
        parts = [*([self.keep] if first else []), self.grant, fused, self.drain, *([self.give_back] if last else [])]

        def run(stream: int) -> None:
            for part in parts:
                part(stream)

        return run


def whole_kernels(job: KernelJob, facts: GpuFacts) -> WholeKernels | Declined:
    """Compiled, loaded and bound to the job's counter; or why there are none.

    Raises:
        DeviceError: the GPU refuses a kernel [W301, W302].
    """
    (result,) = job.compiler([ConfinedJob(TEXT, facts.arch, ("w_keep",))])
    drain = drain_of(job, facts)
    if isinstance(drain, Declined):
        return drain
    if isinstance(result, Declined):
        return result
    limit, finished = (job.counter + WorkCounter.offset(name) for name in ("limit", "finished"))
    kept, module = job.counter + KEPT_AT, job.module(result)
    return WholeKernels(
        _bound(module, "w_keep", limit, kept), _bound(module, "w_grant", limit, finished, kept, job.pass_blocks),
        drain.launch, _bound(module, "w_give_back", limit, kept),
    )  # fmt: skip


def drain_of(job: KernelJob, facts: GpuFacts, *, counter: int = 0) -> CoRunner | Declined:
    """The job as a persistent kernel that runs what fused steps leave; `counter`: as of `KernelJob.co_runner`.

    Raises:
        KernelDeclinedError: its constants are not those of the files [W205].
        DeviceError: the GPU refuses it [W301, W302].
    """
    found: CoRunner | Declined = Declined(f"{job.name} has no persistent kernel")
    for ctas in DRAIN_CTAS:
        found = job.co_runner(ctas * facts.sms, counter=counter)
        if not isinstance(found, Declined):
            break
    return found


def _bound(module: CudaModule, entry: str, *arguments: int) -> Prepared:
    function = module.function(entry)
    function.prepare(0, (1, 1, 1))
    one = (1, 1, 1)
    return function.bind(one, one, arguments, shared_bytes=0, cluster=one, dependent=False).launch
