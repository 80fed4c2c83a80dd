"""Invented records of compilations, for the tests of the report."""

from __future__ import annotations

import math
import random
from typing import Any

from weft.kernels.record import CompileRecord, Neighbour, NodeRecord, PlanRecord, StageRecord, StepRecord

MARKUP = "</script><script>window.hacked=1</script><img src=x onerror=window.hacked=1>"
HOSTILE = (
    MARKUP,
    "\x1b[31mred\x1b]0;title\x07",
    "a\u202egnp.exe\u2066",
    "'\"><svg/onload=window.hacked=1>",
    "{{ 7 * 7 }}{% raw %}",
    "<!-- <script> -->",
    "\ud800 lone",
    "javascript:window.hacked=1",
    "zero\u200bwidth\u2028line\x00nul",
)


def make_record(
    kernels: int = 6, members: int = 3, *, names: tuple[str, ...] = ("conv1", "relu"), source_size: int = 200
) -> CompileRecord:
    """A chain of kernels with a skip from each to the one after next; every text slot takes turns of `names`."""
    chance = random.Random(0)

    def name() -> str:
        return chance.choice(names)

    nodes = [NodeRecord(0, "input", "1x8x16x16xf32", (), "", "", ())]
    steps = []
    outputs = [0]
    for k in range(kernels):
        weight = len(nodes)
        nodes.append(NodeRecord(weight, "constant", "8x8xf32", (), name(), "", ()))
        mine: list[Any] = []
        for i in range(members):
            inputs = (
                (len(nodes) - 1, weight) if mine else (outputs[-1], outputs[-2 if len(outputs) > 1 else -1], weight)
            )
            mine.append(len(nodes))
            nodes.append(
                NodeRecord(len(nodes), ["mul", "add", "exp"][i % 3], "1x8x16x16xf32", inputs, name(), name(), (k,))
            )
        cost = 5.0 + 40 * chance.random()
        steps.append(
            StepRecord(
                position=k,
                schedule=f"cpp.tile({k})" if names[0] == "conv1" else name(),
                kind="fused",
                primitives=tuple(nodes[n].prim for n in mine),
                nodes=tuple(mine),
                operators=(name(), name()),
                inputs=tuple(f"%{o} 1x8x16x16xf32 row" for o in outputs[-2:]),
                outputs=(f"%{mine[-1]} 1x8x16x16xf32 last",),
                cost_us=cost,
                bound_us=cost * 0.6,
                predicted_us=cost * (0.5 + chance.random()),
                in_place_us=0.0,
                runner_up=name() if k % 2 else "",
                runner_up_us=cost * 1.1 if k % 2 else 0.0,
                alternatives=5,
                rejected=1,
                neighbours=(
                    Neighbour(f"+ {name()}", cost * 3, cost * 2, "slower than its parts"),
                    Neighbour("+ exp", math.inf, cost * 2, "no generator makes it"),
                ),
                source=f"// kernel {k}\n"
                + f"out[i] = a[i] < {k} && b[i] > 0;  {name()}\n".ljust(40) * (source_size // 40),
            )
        )
        outputs.append(mine[-1])
    fast = tuple(100.0 + x for x in (3, 1, 2, 0, 4, 9, 5, 6))
    return CompileRecord(
        model=name(),
        device="cpu",
        environment=(("cpu", name()), ("weft", "0.1")),
        operators=2 * kernels,
        primitives=kernels * members,
        primitives_before=kernels * members + 2,
        stages=(
            StageRecord("import", 0.25, name()),
            StageRecord("measure", 12.0, "done"),
            StageRecord("link", 0.0, ""),
        ),
        candidates_raw=1234,
        candidates=321,
        capped=True,
        rejected_candidates=((name(), 12),),
        problems=200,
        pruned=150,
        measured=50,
        reused=3,
        rejected_kernels=((name(), 4),),
        opaque=((name(), name(), 2),),
        notes=(name(),),
        solver_seconds=0.2,
        solver_gap=0.001,
        solver_status="optimal",
        objective_us=99.0,
        plans=(
            PlanRecord("solution-1", kernels, 99.0, fast, 103.5, True, 1e-6),
            PlanRecord("library", kernels * 2, 210.0, tuple(2 * x for x in fast), 207.0, True, 0.0),
            PlanRecord("solution-2", kernels, 98.0, (), math.inf, False, math.nan, note=name()),
        ),
        chosen="solution-1",
        steps=tuple(steps),
        graph=tuple(nodes),
        arena_bytes=3 << 20,
        live_bytes=2 << 20,
        weight_bytes=5 << 10,
        seconds=12.3,
    )
