"""What suites of training steps share: a network with its optimizer and batches, steps by Weft and by peers, rows."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import weft
from benchmarks.cases.training import Trained
from benchmarks.harness import own_process
from benchmarks.harness.record import Row
from weft.kernels.record import StepRecord
from weft.training import Step as CompiledStep

SUITE = "training"
PRELOADED = ("scipy.optimize", "torch._dynamo", "weft.api", "weft.training", "benchmarks.cases.training")
"""Imported once, by the process that all others are forked from; that one computes nothing and knows no GPU."""
SHOWN = ("resnet50", "gpt2", "dlrm")
"""Of small forms, if no others are named."""
CHECKED, WARM, ROUNDS, ROUND_S = 5, 3, 15, 0.2
"""Batches whose losses are compared, steps before anything is recorded, samples, and how long each is at least."""
SEEDS, EPOCH, LAST = 5, 10, 30
"""Where many steps are trained: from how many seeds, over how many batches again and again, and of how many last steps
the loss counts."""
STAGE_S = 0.1
"""Stages of a compilation that took less are not named."""
SLOWEST = 40
"""Groups of like kernels of a plan that its entry names."""
NAME = 80
"""Letters of a kernel's name, where the profiler saw it."""
ULP, ULP_F32 = 2.0**-8, 2.0**-16
"""Of a bf16; and what sums of f32 in another order may come to after some steps."""
Step = Callable[..., torch.Tensor]


class Placed:
    """A network, its optimizer and its batches on a device, and back at its beginning whenever that is asked for."""

    def __init__(self, case: Trained, device: str, *, small: bool, fused: bool) -> None:
        """`fused`: the optimizer is, and on a GPU can be recorded."""
        torch.manual_seed(0)
        self.case, self.device, self.small = case, device, small
        self.model = self._laid(case.build(small).to(device).train())
        on_gpu = device == "cuda"
        self.optimizer = case.optimizer(self.model.parameters(), fused=fused, capturable=on_gpu and fused)
        self._first = {name: x.to("cpu", copy=True) for name, x in self.model.state_dict().items()}

    def _laid(self, x: Any) -> Any:
        if isinstance(x, torch.nn.Module):
            return x.to(memory_format=torch.channels_last) if self.case.images else x  # type: ignore[call-overload]
        return x.to(memory_format=torch.channels_last) if self.case.images and x.dim() == 4 else x

    def batch(self, number: int) -> tuple[torch.Tensor, ...]:
        """On the device."""
        return tuple(self._laid(x.to(self.device)) for x in self.case.batch(number, small=self.small))

    def back(self, weights: Mapping[str, torch.Tensor] | None = None) -> None:
        """The first weights, or these, and no state of the optimizer, in the tensors that hold them."""
        weights = self._first if weights is None else weights
        with torch.no_grad():
            for name, x in self.model.state_dict().items():
                x.copy_(weights[name])
            for state in self.optimizer.state.values():
                for x in state.values():
                    if isinstance(x, torch.Tensor):
                        x.zero_()

    def losses(self, step: Step) -> list[float]:
        """Of the first batches."""
        self.back()
        return [float(step(*self.batch(k))) for k in range(CHECKED)]

    def trained(self, step: Step, steps: int) -> list[float]:
        """Mean loss of the last steps, for each of the seeds: of weights, of random numbers, and of batches' order."""
        held = [self.batch(k) for k in range(EPOCH)]
        found = []
        for seed in range(SEEDS):
            torch.manual_seed(seed)
            self.back(self.case.build(self.small).state_dict())
            order = torch.randint(EPOCH, (steps,), generator=torch.Generator().manual_seed(seed)).tolist()
            losses = [step(*held[k]).detach().clone() for k in order]
            found.append(float(torch.stack(losses[-LAST:]).double().mean()))
        return found

    def loop(self, loss: Step, *, autocast: bool = True) -> Step:
        """A step as a loop does it; `loss`: of a batch."""

        def cast() -> AbstractContextManager[Any]:
            return torch.autocast(self.device, torch.bfloat16, cache_enabled=False) if autocast else nullcontext()

        def step(*batch: torch.Tensor) -> torch.Tensor:
            self.optimizer.zero_grad(set_to_none=True)
            with cast():
                found = loss(*batch)
            found.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            return found.detach()

        return step

    def loss(self, *batch: torch.Tensor) -> torch.Tensor:
        """Of the model on a batch."""
        return self.case.loss(self.model(*batch[:-1]), batch[-1])


def recorded(step: Step, batch: Sequence[torch.Tensor], model: torch.nn.Module) -> Step:
    """A step in a CUDA graph, after some that are run; a call copies its batch in and gives the loss.

    Raises:
        RuntimeError: something in it cannot be recorded.
    """
    held = [x.clone() for x in batch]
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM):
            step(*held)
    torch.cuda.current_stream().wait_stream(side)
    model.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step(*held)

    def run(*given: torch.Tensor) -> torch.Tensor:
        for mine, x in zip(held, given, strict=True):
            mine.copy_(x)
        graph.replay()
        return loss

    return run


def by_weft(placed: Placed, budget_s: float, *, warm: bool, autocast: bool = True) -> tuple[Step, Row]:
    """A compiled step, and what is to be known of it."""
    kind = torch.bfloat16 if autocast else None

    def compiled() -> CompiledStep:
        options = weft.Options(budget_s=budget_s, device=placed.device, allow_tf32=False)
        case, batch = placed.case, placed.batch(0)
        return weft.compile_step(placed.model, case.loss, placed.optimizer, *batch, options=options, autocast=kind)

    began = time.perf_counter()
    step = compiled()
    record = step.record
    more: Row = {
        "tuning_s": round(time.perf_counter() - began, 1), "plan": record.chosen, "kernels": len(record.steps),
        "operators": record.operators, "opaque": {op: count for op, _, count in record.opaque},
        "plans": [[p.name, round(p.median_us, 1) if math.isfinite(p.median_us) else None, p.note]
                  for p in record.plans],
        "kernels_us": round(sum(s.cost_us for s in record.steps), 1), "slowest": slowest(record.steps),
        "problems": [record.problems, record.wanted, record.unmeasured],
        "stages_s": {s.name: round(s.seconds, 1) for s in record.stages if s.seconds >= STAGE_S},
    }  # fmt: skip
    if warm:
        again = time.perf_counter()
        compiled()
        more["warm_s"] = round(time.perf_counter() - again, 1)
    return step, more


def slowest(steps: Sequence[StepRecord]) -> list[list[Any]]:
    """Like kernels together, the costliest first: microseconds of all, how many, by which generator, of what."""
    groups: dict[tuple[str, str], list[float]] = {}
    for s in steps:
        groups.setdefault((s.schedule[:80], " ".join(s.primitives[:8])), []).append(s.cost_us)
    costliest = sorted(groups.items(), key=lambda group: -sum(group[1]))[:SLOWEST]
    return [[round(sum(us), 1), len(us), *what] for what, us in costliest]


def kernels_seen(step: Step, batch: Sequence[torch.Tensor]) -> Row:
    """What a step runs on a GPU, in graphs, too, by the framework's profiler.

    Microseconds in kernels and from the first to the last; of the longest names microseconds and launches a step.
    """
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(WARM):
            step(*batch)
        torch.cuda.synchronize()
    events = [e for e in seen.events() if str(e.device_type).endswith("CUDA")]
    times: dict[str, list[float]] = {}
    for e in events:
        times.setdefault(e.name[:NAME], []).append(e.time_range.elapsed_us())
    span = max(e.time_range.end for e in events) - min(e.time_range.start for e in events)
    longest = sorted(times.items(), key=lambda x: -sum(x[1]))[:SLOWEST]
    return {
        "busy_us": round(sum(map(sum, times.values())) / WARM, 1), "span_us": round(span / WARM, 1),
        "seen": [[round(sum(us) / WARM, 1), round(len(us) / WARM, 1), name] for name, us in longest],
    }  # fmt: skip


def by_peer(placed: Placed, who: str, *, autocast: bool = True) -> tuple[Step, Row]:
    """A step of another maker, in a graph where there is one."""
    loss: Step = placed.loss
    if who != "eager":
        loss = torch.compile(loss, mode="max-autotune-no-cudagraphs" if who == "autotune" else None)
    step = placed.loop(loss, autocast=autocast)
    if placed.device == "cpu":
        step(*placed.batch(0))
        return step, {"graph": False}
    try:
        return recorded(step, placed.batch(0), placed.model), {"graph": True}
    except RuntimeError as error:
        torch.cuda.synchronize()
        why = (str(error).splitlines() or [type(error).__name__])[0]
        step(*placed.batch(0))
        return step, {"graph": False, "why_no_graph": why[: own_process.TOLD]}


def case_row(name: str, runs: Mapping[str, Row], settings: Row, suite: str = SUITE) -> Row:
    """A case as far as it is measured: what its entries come to, and the entries."""
    ms = {who: float(str(r["ms"])) for who, r in runs.items() if "ms" in r}
    memory = {who: int(str(r["memory_bytes"])) for who, r in runs.items() if "memory_bytes" in r}
    peers = {who: x for who, x in ms.items() if who != "weft"}
    best = min(peers, key=peers.__getitem__, default="")
    row: Row = {"record": "case", "suite": suite, "case": name, "settings": settings, "peers_ms": peers}
    if "weft" in ms:
        row["weft_ms"] = ms["weft"]
        row["right"] = is_right(runs)
        if best:
            row.update(best_peer=best, speedup_best=round(peers[best] / ms["weft"], 3))
        compilers = [x for who, x in memory.items() if who in ("inductor", "autotune")]
        if compilers and "weft" in memory:
            row["memory_share"] = round(memory["weft"] / min(compilers), 3)
        if "trained" in runs["weft"] and "trained" in runs.get("eager", {}):
            row["trained"] = long_run(runs["weft"]["trained"], runs["eager"]["trained"])
    return {**row, "runs": dict(runs)}


def long_run(mine: Any, eager: Any) -> Row:
    """Weft's loss after many steps, the mean over its seeds, and the range of eager's; whether it lies in there."""
    mean, least, most = statistics.fmean(mine), min(eager), max(eager)
    each = sum(least <= x <= most for x in mine)
    return {"weft": mean, "eager": [least, most], "inside": least <= mean <= most, "seeds_inside": each}


def is_right(runs: Mapping[str, Row]) -> bool | None:
    """Whether Weft's losses are as near the exact ones as eager's; None: eager's are not known.

    Exact are those of f32 where the step is in bf16, those of float64 where it is in f32: there the first loss is held
    to eager's by itself and all of them to the furthest of eager's, as what each is off by is chance, and grows.
    """
    mine, eager = runs.get("weft", {}).get("losses"), runs.get("eager", {})
    wide = "losses_f64" in eager
    exact = eager.get("losses_f64" if wide else "losses_f32")
    if not isinstance(mine, list) or exact is None:
        return None
    own, least = eager["losses"], ULP_F32 if wide else ULP
    assert isinstance(own, list)
    assert isinstance(exact, list)
    allowed = [2 * abs(y - z) for y, z in zip(own, exact, strict=True)]
    if wide:
        allowed[1:] = [max(allowed)] * (len(allowed) - 1)
    # a NaN is not
    return all(abs(x - z) <= most + least * abs(z) for x, z, most in zip(mine, exact, allowed, strict=True))


def summary(rows: Sequence[Row]) -> Row:
    """The last line of the record, over what was measured beside a peer."""
    found = [float(str(r["speedup_best"])) for r in rows if "speedup_best" in r]
    shares = [float(str(r["memory_share"])) for r in rows if "memory_share" in r]
    mean = math.exp(statistics.fmean(map(math.log, found))) if found else 0.0
    return {
        "record": "summary", "suite": SUITE, "cases": len(rows), "compared": len(found),
        "right": sum(r.get("right") is True for r in rows), "wrong": sum(r.get("right") is False for r in rows),
        "speedup_mean": round(mean, 3), "speedup_least": min(found, default=0.0), "slower": sum(x < 1 for x in found),
        "memory_share_most": max(shares, default=0.0),
        "trained": sum("trained" in r for r in rows),
        "trained_outside": [r["case"] for r in rows if isinstance(x := r.get("trained"), dict) and not x["inside"]],
    }  # fmt: skip
