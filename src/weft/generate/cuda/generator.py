"""The `cuda` generator: which problems it takes, in which ways, and the kernel of each."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import islice
from typing import final, overload

from weft.device.any import DeviceFacts
from weft.device.cuda.budget import over_budget
from weft.device.cuda.cubin import Usage
from weft.device.cuda.facts import GpuFacts
from weft.generate.cuda import templates
from weft.generate.cuda.intrinsics.prelude import machine_header, runtime_header
from weft.generate.cuda.loops import pools, scan
from weft.generate.cuda.loops.choose import forms
from weft.generate.cuda.loops.forms import Form
from weft.generate.cuda.loops.kernel import CudaText
from weft.generate.cuda.loops.lanes import Oversized
from weft.generate.cuda.role.assemble import noted, role_header, solo
from weft.generate.cuda.role.role import RoleSource
from weft.generate.cuda.shipped import loops_bucket, promoted
from weft.generate.cuda.table import BY_OPERATOR
from weft.generate.loopnest.plan import live_nodes
from weft.generate.loopnest.scans import has_scan
from weft.ir.declined import Declined
from weft.ir.graph import Graph
from weft.ir.prims import CATEGORY, Category, Prim
from weft.kernels.candidate import Problem
from weft.kernels.source import CudaSource, Schedule
from weft.kernels.stored_names import entry_name

OTHERS = 3
"""Schedules of loops beside those of a template."""
_LOOKED_AT = 24
"""Schedules whose kernels are written to see whether they find room in a budget."""
_LEAST = Usage(registers=8, shared_bytes=0)
"""What no kernel takes less of."""
MAX_CONSTANT_BYTES = 64 * 1024
"""More than this belongs into memory that the plan owns, not into the text of a kernel."""


@final
class CudaGenerator:
    """CUDA kernels, see `weft.generate.protocol.Generator`."""

    name = "cuda"

    def schedules(self, problem: Problem, facts: DeviceFacts) -> Sequence[Schedule] | Declined:
        """Some forms, the most promising first; a decline names what stands in the way.

        Under a budget of an SM those that may find room in it: the assembler has the last word.
        """
        if not isinstance(facts, GpuFacts):
            return Declined("CUDA kernels run on a GPU")
        found = self._offered(problem, facts)
        if facts.sm_budget is None or isinstance(found, Declined):
            return found
        few = list(islice(found, _LOOKED_AT))
        fitting = [s for s in few if _fits_budget(self.emit(problem, s), facts)]
        return fitting or Declined(f"none of the first {len(few)} kernels finds room in sm_budget")

    def _offered(self, problem: Problem, facts: GpuFacts) -> Sequence[Schedule] | Declined:
        if _has_contraction(problem.graph) or _is_known_by_operator(problem):
            return templates.schedules(problem, facts)
        declined = _refuse(problem)
        if declined is not None:
            return declined
        if has_scan(problem.graph):
            return scan.schedules(problem, facts)
        ranked = [form.schedule() for form in forms(problem, facts)]
        found = _Distinct(problem, promoted(loops_bucket(problem), ranked, facts.name))
        together = pools.schedules(problem, facts)
        if together:
            return [*together, *found[:OTHERS]]
        return found.declined or found

    def emit(self, problem: Problem, schedule: Schedule) -> CudaSource | Declined:
        """The kernel's text, or why there is none."""
        if _has_contraction(problem.graph) or not isinstance(templates.template_of(schedule), Declined):
            return templates.emit(problem, schedule)
        declined = _refuse(problem)
        if declined is not None:
            return declined
        if dict(schedule.params).get("template") == "pools":
            made = pools.roles(problem, schedule, (machine_header(), runtime_header(), role_header()))
            return solo(made, _entry(problem, schedule))
        if has_scan(problem.graph):
            made_scan = scan.roles(problem, schedule, (machine_header(), runtime_header(), role_header()))
            return made_scan if isinstance(made_scan, Declined) else solo(made_scan, _entry(problem, schedule))
        return _source(problem, schedule)

    def roles(self, problem: Problem, schedule: Schedule) -> RoleSource | Declined:
        """The roles of the kernel that `emit` gives, for who assembles them with others; or why there are none."""
        with noted() as found:
            _source.cache_clear()  # who finds a kernel there assembles nothing
            made = self.emit(problem, schedule)
        if isinstance(made, Declined):
            return made
        (source,) = found
        return source


def _fits_budget(source: CudaSource | Declined, facts: GpuFacts) -> bool:
    """Whether the threads and the dynamic shared memory of all launches do, with as few registers as kernels have."""
    return isinstance(source, Declined) or all(over_budget(x, _LEAST, facts) is None for x in source.launches)


@final
class _Distinct(Sequence[Schedule]):
    """Those schedules whose kernels differ (some parameters do not always matter), found as far as one looks.

    `declined`: why the first one has no kernel; later ones that have none are left out.
    """

    def __init__(self, problem: Problem, ranked: Sequence[Schedule]) -> None:
        self._problem = problem
        self._ranked = iter(ranked)
        self._texts: set[str] = set()
        self._found: list[Schedule] = []
        self.declined: Declined | None = None
        self.declined = self._advance()

    def _advance(self) -> Declined | None:
        """Look at the next one.

        Raises:
            StopIteration: there is none.
        """
        schedule = next(self._ranked)
        source = _source(self._problem, schedule)
        if isinstance(source, Declined):
            return source
        text = source.text.replace(source.entry, "")
        if text not in self._texts:
            self._texts.add(text)
            self._found.append(schedule)
        return None

    def _reach(self, count: int) -> None:
        with suppress(StopIteration):
            while len(self._found) < count:
                self._advance()

    @overload
    def __getitem__(self, index: int) -> Schedule: ...

    @overload
    def __getitem__(self, index: slice) -> list[Schedule]: ...

    def __getitem__(self, index: int | slice) -> Schedule | list[Schedule]:
        self._reach(index + 1 if isinstance(index, int) and index >= 0 else sys.maxsize)
        return self._found[index]

    def __len__(self) -> int:
        self._reach(sys.maxsize)
        return len(self._found)


@lru_cache(maxsize=32)
def _source(problem: Problem, schedule: Schedule) -> CudaSource | Declined:
    try:
        return CudaText(problem, Form.of(schedule), _entry(problem, schedule)).source(schedule)
    except Oversized:
        return Declined("too many values in one kernel")


def _entry(problem: Problem, schedule: Schedule) -> str:
    return entry_name(problem.key, schedule)


def _has_contraction(graph: Graph) -> bool:
    return any(CATEGORY[graph.nodes[n].prim] is Category.LINEAR for n in live_nodes(graph))


def _is_known_by_operator(problem: Problem) -> bool:
    """Whether a template takes it though there is no contraction in it."""
    return any(p.match(problem, tf32=False) is not None for p in BY_OPERATOR)


def _refuse(problem: Problem) -> Declined | None:
    graph = problem.graph
    for node in live_nodes(graph):
        record = graph.nodes[node]
        if CATEGORY[record.prim] is Category.OPAQUE:
            return Declined(f"{record.prim.value} is not a primitive of fused loops")
        if record.prim is Prim.CONSTANT and record.type.nbytes > MAX_CONSTANT_BYTES:
            return Declined(f"a constant of {record.type.nbytes} B in the text of a kernel")
        if math.prod(record.type.shape) >= 2**40:
            return Declined(f"{record.type} is too large")
        if record.prim in (Prim.ARGMAX, Prim.ARGMIN) and max(graph.type_of(record.inputs[0]).shape) >= 2**31:
            return Declined("positions past 32 bits")
    if len(set(graph.outputs)) != len(graph.outputs):
        return Declined("an output occurs twice")
    if any(graph.nodes[n].prim is Prim.CONSTANT for n in graph.outputs):
        return Declined("an output is a constant")
    return None
