"""A ring of stages in shared memory between what copies and what reads them, as the text of a kernel has it.

A stage has two mbarriers: `full` counts the bytes that copies bring, `empty` the warps that have read them. The slot of
copy number `it` and the parity of its phase follow from `it`, or are counted along with it. Beside it is what stands in
front of every ring: tensor maps are prefetched, barriers initialised, and the initialisation is made visible to TMA.
Source: PTX ISA, mbarrier; CUTLASS, PipelineTmaAsync and PipelineState (index and phase).
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.generate.expr.integer import Int

PHASES = "// the parity of a slot's phase flips whenever the ring comes round"
"""Comment of the text where a loop over stages begins."""


@dataclass(frozen=True, slots=True)
class Ring:
    """The barriers of `stages` slots, 8 bytes each, from two shared addresses on."""

    stages: int
    full: str = "sb + FULL"
    """C text of the address of the first full barrier."""
    empty: str = "sb + EMPTY"

    def slot(self, it: Int | str = "it") -> Int:
        """C text: the slot of copy number `it`."""
        return Int(str(it)) % self.stages

    def parity(self, it: Int | str = "it") -> str:
        """C text: the parity of its phase."""
        return f"{Int(str(it)) / self.stages} & 1"

    def filled_at(self, slot: Int | str = "slot") -> str:
        """C text: the address of the full barrier of a slot."""
        return f"{self.full}{_behind(slot)}"

    def read_at(self, slot: Int | str = "slot") -> str:
        """C text: the address of its empty barrier."""
        return f"{self.empty}{_behind(slot)}"

    def await_filled(self, slot: Int | str, parity: str) -> str:
        """Statement: wait until the copies of a phase are there."""
        return f"w_bar_wait({self.filled_at(slot)}, {parity});"

    def await_read(self, slot: Int | str, parity: str) -> str:
        """Statement: wait until all have read the slot; those who copy ask with the other parity than readers."""
        return f"w_bar_wait({self.read_at(slot)}, {parity});"

    def release(self, slot: Int | str) -> str:
        """Statement: this warp has read a slot."""
        return f"if (lane == 0) w_bar_arrive({self.read_at(slot)});"

    def counted(self, slot: str = "slot", lap: str = "lap") -> str:
        """Expression: on to the next slot, and the parity of its phase, without a remainder."""
        return f"{slot} = {slot} == {self.stages - 1} ? 0 : {slot} + 1, {lap} ^= {slot} == 0"

    def advance(self, slot: str = "slot", wrapped: str = "parity ^= 1") -> str:
        """Statement: the same; `wrapped` is done when the ring comes round."""
        return f"if (++{slot} == {self.stages}) {{ {slot} = 0; {wrapped}; }}"


def _behind(slot: Int | str) -> str:
    """What leads from the first barrier to that of a slot."""
    place = 8 * (slot if isinstance(slot, Int) else Int(slot))
    return "" if place.text == "0" else f" + {place}"


def initialised(readers: int, *rings: Ring) -> str:
    """Statement: the barriers of rings of as many stages, of which `readers` warps read every slot."""
    each = " ".join(f"w_bar_init({r.filled_at('i')}, 1); w_bar_init({r.read_at('i')}, {readers});" for r in rings)
    return f"for (int i = 0; i < {rings[0].stages}; ++i) {{ {each} }}"


def prologue(*barriers: str, then: str = "") -> str:
    """Statement: one thread initialises barriers and makes that visible to TMA; the block's threads meet behind it.

    `then`: statements behind that of the same thread.
    """
    return f"if (t == 0) {{ {' '.join(barriers)} w_bar_ready();{' ' * bool(then)}{then} }}"


def prefetched(*maps: str) -> str:
    """Statements: tensor maps, by their names, come into the cache of descriptors."""
    return " ".join(f"w_map_prefetch(&{name});" for name in maps)
