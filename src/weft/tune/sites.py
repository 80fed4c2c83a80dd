"""The site of a device, and the process that measures there: `weft.device.kinds` names them for each kind.

They stand apart from `site` and `cuda_site`, whose text is a part of what measurements are stored under.
"""

from __future__ import annotations

from weft.device.any import DeviceFacts
from weft.device.cuda.facts import GpuFacts
from weft.device.cuda.nvrtc import Nvrtc
from weft.device.facts import CpuFacts
from weft.device.kinds import kind_of, kind_with, part
from weft.device.toolchain import HostCompiler
from weft.options import Options
from weft.tune.cuda_site import CudaSite, cuda_worker
from weft.tune.site import HostSite, Site, host_worker
from weft.tune.timing import TimingPolicy
from weft.tune.transport import ProcessTransport


def site_of(
    options: Options, facts: DeviceFacts, compiler: HostCompiler | Nvrtc | None, policy: TimingPolicy | None = None
) -> Site:
    """Where kernels for the device with these facts are built and measured; without a compiler, library calls alone.

    Raises:
        TypeError: facts of no kind of device that there is.
    """
    found: Site = part(kind_with(facts).site)(options, facts, compiler, policy)
    return found


def worker_of(options: Options, threads: int) -> ProcessTransport:
    """The process that measures on the device which the options name, not started; of a CPU with so many threads.

    Raises:
        KeyError: a device of no kind that there is.
    """
    found: ProcessTransport = part(kind_of(options.device).worker)(options, threads)
    return found


def host_site(options: Options, facts: CpuFacts, compiler: object, policy: TimingPolicy | None) -> HostSite:
    """This machine's CPU; a compiler for another kind of device counts as none."""
    return HostSite(options, facts, compiler if isinstance(compiler, HostCompiler) else None, policy)


def cuda_site(options: Options, facts: GpuFacts, compiler: object, policy: TimingPolicy | None) -> CudaSite:
    """An NVIDIA GPU, all of it; a compiler for another kind of device counts as none."""
    return CudaSite(options, facts.whole, compiler if isinstance(compiler, Nvrtc) else None, policy)


def host_process(options: Options, threads: int) -> ProcessTransport:  # noqa: ARG001 - every kind is asked so
    """What measures on this CPU with so many threads, not started."""
    return host_worker(threads)


def cuda_process(options: Options, threads: int) -> ProcessTransport:  # noqa: ARG001 - its threads are the options' own
    """What measures on an NVIDIA GPU, not started."""
    return cuda_worker(options)
