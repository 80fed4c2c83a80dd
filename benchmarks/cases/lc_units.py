"""What the latency-critical kernels of the tables of pairs leave of each unit: counted traffic over measured time.

Only kernels of the `tma` template are counted: what their main loops load, write to shared memory and read there is
known from the tile. Shares are means over the whole launch, prologue and epilogue included, so main loops are nearer to
their bounds than these say. Peaks are those that the cost model was fitted with (`weft.costmodel`): a share above 1
would be a mistake in counting.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.cases.colocate_lc import GPU, LcKernel
from weft.costmodel.profile import costs_of
from weft.device.cuda.facts import GpuFacts, profile
from weft.generate.cuda.gemm.pattern import PRODUCT
from weft.generate.cuda.gemm.tma import choose, cost
from weft.generate.cuda.gemm.tma.shape import TmaConfig
from weft.ir.declined import Declined

BOUND = 0.7
"""Share of a unit from which it is said to bound a kernel: what is left of the time is its beginning and end."""
FLOP_PER_CYCLE = 4096
"""Of the tensor cores of one multiprocessor, f16 (989.4 TFLOP/s at 1,830 MHz on 132 of them)."""


@dataclass(frozen=True, slots=True)
class Used:
    """Shares of one multiprocessor's units, and of the memory, while a kernel runs."""

    us: float
    clock_mhz: float
    tile: str
    tensor: float
    shared: float
    """Of the bytes that shared memory takes and gives: written by TMA, read by wgmma."""
    port: float
    """Of the bytes that come from the L2 cache."""
    memory: float
    """Of the GPU's memory, if every input is read and every output written once."""

    @property
    def bound(self) -> str:
        """The unit that is used most."""
        shares = {
            "tensor cores": self.tensor,
            "shared memory": self.shared,
            "L2 to SM": self.port,
            "memory": self.memory,
        }
        name = max(shares, key=lambda k: shares[k])
        return name if shares[name] >= BOUND else "latency"


def used(kernel: LcKernel, clock_mhz: float = 0.0, facts: GpuFacts | None = None) -> Used | Declined:
    """Of the fastest recorded kernel of the `tma` template; `clock_mhz`: at which it ran (0: the GPU's usual one)."""
    facts = facts or profile(GPU)
    costs = costs_of(facts).tma
    fastest = min(kernel.timed, key=lambda t: t.us)
    if dict(fastest.schedule.params).get("template") != "tma":
        return Declined("the fastest kernel is of another template")
    matched = PRODUCT.match(kernel.problem, tf32=False)
    case = matched if isinstance(matched, Declined) else choose.case_of(matched, facts)
    if case is None or isinstance(case, Declined):
        return case or Declined("the model does not take it")
    s = TmaConfig.of(fastest.schedule)
    clock = clock_mhz or facts.clock_ghz * 1e3
    through, loaded = cost.traffic(case, s)
    blocks = cost.units(case, s) * s.multicast_ctas * s.split * cost.k_blocks(case, s)
    each = fastest.us * clock * facts.sms  # cycles of all multiprocessors
    return Used(
        us=fastest.us,
        clock_mhz=clock,
        tile=f"{s.bm}x{s.bn}",
        tensor=kernel.flops / each / FLOP_PER_CYCLE,
        shared=through * blocks / each / costs.shared,
        port=loaded * blocks / each / costs.port,
        memory=kernel.bytes / fastest.us / 1e3 / facts.read_bandwidth[-1][1],
    )
