"""The ring of stages between the warp that loads and those that multiply, as the loop over k-tiles sees it."""

from __future__ import annotations

from dataclasses import dataclass

from weft.generate.cuda.gemm.tma.shape import TmaConfig

PHASES = "// the parity of a slot's phase flips whenever the ring comes round"
"""Comment of the text where a loop over stages begins."""


@dataclass(frozen=True, slots=True)
class Ring:
    """Texts by which a loop over the k-tiles of a tile finds the slot of number `it`, and gives one back."""

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
        return f"if ({test}) {self.arrive}(sb + EMPTY + 8 * {slot}{self.peer});"


def ring(s: TmaConfig) -> Ring:
    """Remainders by what is no power of two took a tenth of the time of small steps: there the slot is counted."""
    if not s.multicast:
        lanes, arrive, peer = "lane == 0", "w_bar_arrive", ""
    else:
        lanes, arrive = f"lane < {s.cluster_m + s.cluster_n - 1}", "w_bar_arrive_at"
        peer = ", lane" if 1 in (s.cluster_m, s.cluster_n) else f", rank ^ {s.peer}"
    n, step = s.stages, "++st, ++it"
    if n & (n - 1) == 0:
        return Ring("", step, f"slot = it % {n}, ", f"it / {n} & 1", f"((it - 1) % {n})", lanes, arrive, peer)
    before = f"u32 slot = it % {n}, lap = it / {n} & 1;\n"
    step += f", slot = slot == {n - 1} ? 0 : slot + 1, lap ^= slot == 0"
    return Ring(before, step, "", "lap", f"(slot == 0 ? {n - 1} : slot - 1)", lanes, arrive, peer)
