"""The state of the pipeline in the loop over the k-tiles of a tile: which stage of the ring is next, and its parity."""

from __future__ import annotations

from dataclasses import dataclass

from weft.generate.cuda.gemm.tma.shape import TmaConfig
from weft.generate.cuda.intrinsics.ring import Ring


@dataclass(frozen=True, slots=True)
class PipelineState:
    """Texts by which a loop over the k-tiles of a tile finds the slot of number `it`, and gives one back."""

    ring: Ring
    before: str
    """In front of the loop."""
    step: str
    slot: str
    """Declares the slot, where that is done in the loop."""
    parity: str
    last: str
    """The slot before."""
    lanes: str
    """Which lanes of a warp arrive: one for each CTA that loads for this one, or for which this one loads."""
    arrive: str
    peer: str
    """The CTA at whose barrier a lane arrives, as a further argument; "": this one."""
    begin: str = "int st = first"
    condition: str = "st < last"

    @property
    def head(self) -> str:
        """What stands in the parentheses of a `for`."""
        return f"{self.begin}; {self.condition}; {self.step}"

    def release(self, slot: str, *, unless_first: bool = False) -> str:
        """Statement: this warp has read `slot`; `unless_first`: but for the first k-tile, with none before it."""
        test = f"st > first && {self.lanes}" if unless_first else self.lanes
        return f"if ({test}) {self.arrive}({self.ring.read_at(slot)}{self.peer});"


def pipeline_state(s: TmaConfig) -> PipelineState:
    """Remainders by what is no power of two took a tenth of the time of small steps: there the slot is counted."""
    if not s.multicast:
        lanes, arrive, peer = "lane == 0", "w_bar_arrive", ""
    else:
        lanes, arrive = f"lane < {s.cluster_m + s.cluster_n - 1}", "w_bar_arrive_at"
        peer = ", lane" if 1 in (s.cluster_m, s.cluster_n) else f", rank ^ {s.peer}"
    n, step, ring = s.stages, "++st, ++it", Ring(s.stages)
    slot, parity = ring.slot(), ring.parity()
    if n & (n - 1) == 0:
        return PipelineState(ring, "", step, f"slot = {slot}, ", parity, f"((it - 1) % {n})", lanes, arrive, peer)
    before = f"u32 slot = {slot}, lap = {parity};\n"
    step += f", {ring.counted()}"
    return PipelineState(ring, before, step, "", "lap", f"(slot == 0 ? {n - 1} : slot - 1)", lanes, arrive, peer)
