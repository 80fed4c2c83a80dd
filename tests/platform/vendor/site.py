"""What `tune` has of it: kernels are measured on the CPU, in its worker."""

from __future__ import annotations

from tests.platform.vendor.facts import XpuFacts

from weft.device.facts import CpuFacts
from weft.device.toolchain import HostCompiler
from weft.options import Options
from weft.tune.site import HostSite, host_worker
from weft.tune.timing import TimingPolicy
from weft.tune.transport import ProcessTransport


def site(options: Options, facts: XpuFacts, compiler: object, policy: TimingPolicy | None) -> HostSite:
    """See `Kind.site`."""
    here = CpuFacts(name=facts.name)
    return HostSite(options, here, compiler if isinstance(compiler, HostCompiler) else None, policy)


def worker(options: Options, threads: int) -> ProcessTransport:
    """See `Kind.worker`."""
    return host_worker(1)
