"""Training steps in bf16 autocast on an NVIDIA GPU: Weft against eager in a CUDA graph and torch.compile.

    python -m benchmarks.gpu_training [--only WORD,WORD] [--who weft,eager,inductor,autotune] [--again WHO,WHO]
                                      [--budget S] [--limit S] [--seconds S] [--free] [--warm] [--out -|FILE]
    python -m benchmarks.gpu_training --device cpu --small

A step is forward, loss, backward and optimizer (AdamW, or SGD with momentum) on a batch that lies on the device. Each
contender has a process of its own, which is ended after `--limit` seconds (540): its entry is then that it was not
compiled in time. Peers are recorded into a CUDA graph as a whole, copies of the batch into it included, with fused
optimizers; where that cannot be recorded, `graph` is false. `inductor` is torch.compile by default, `autotune` in mode
max-autotune-no-cudagraphs. Networks of images have channels last everywhere. Products of f32 are not rounded to TF32
by anybody. Peers run deterministic algorithms, as Weft does, unless `--free` lets them choose; `settings` says so.

Beside the time of a step (median of rounds, milliseconds) stand the seconds to the first step, and `memory_bytes`: the
most that the framework keeps from the device over some steps, graphs and weights included.

Everybody begins with the same weights and says the losses of the first five batches; so does eager in f32 without
autocast. `right`: each loss is no further from that one than twice eager's in bf16, and one last digit of a bf16.

Entries of a case are kept as they come: what has one is passed over, unless `--again` names it, so that the command can
be given again until nothing is left. `--device cpu --small` runs small forms of three networks, or those of `--only`,
on the processor beside eager, to see that everything works. With `--out -` rows go into the suite's record.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import signal
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

import weft
from benchmarks.cases.training import CASES, Trained
from benchmarks.harness.record import Record, Row, folder_of
from weft.training import Step as CompiledStep

SUITE = "training"
WHO = ("weft", "eager", "inductor", "autotune")
PRELOADED = ("scipy.optimize", "torch._dynamo", "weft.api", "weft.training", "benchmarks.cases.training")
"""Imported once, by the process that all others are forked from; that one computes nothing and knows no GPU."""
SHOWN = ("resnet50", "gpt2", "dlrm")
"""Of small forms, if no others are named."""
CHECKED, WARM, ROUNDS, ROUND_S = 5, 3, 15, 0.05
"""Batches whose losses are compared, steps before anything is recorded, samples, and how long each is at least."""
ULP = 2.0**-8
"""Of a bf16."""
_TOLD = 300
Step = Callable[..., torch.Tensor]
_CONTEXT = multiprocessing.get_context("forkserver")


# --- in a process of its own


class Placed:
    """A network, its optimizer and its batches on a device, and back at its beginning whenever that is asked for."""

    def __init__(self, case: Trained, device: str, *, small: bool, fused: bool) -> None:
        """`fused`: the optimizer is, and can be recorded."""
        torch.manual_seed(0)
        self.case, self.device, self.small = case, device, small
        self.model = self._laid(case.build(small).to(device).train())
        on_gpu = device == "cuda"
        self.optimizer = case.optimizer(self.model.parameters(), fused=fused and on_gpu, capturable=on_gpu and fused)
        self._first = {name: x.to("cpu", copy=True) for name, x in self.model.state_dict().items()}

    def _laid(self, x: Any) -> Any:
        if isinstance(x, torch.nn.Module):
            return x.to(memory_format=torch.channels_last) if self.case.images else x  # type: ignore[call-overload]
        return x.to(memory_format=torch.channels_last) if self.case.images and x.dim() == 4 else x

    def batch(self, number: int) -> tuple[torch.Tensor, ...]:
        """On the device."""
        return tuple(self._laid(x.to(self.device)) for x in self.case.batch(number, small=self.small))

    def back(self) -> None:
        """The first weights, and no state of the optimizer, in the tensors that hold them."""
        with torch.no_grad():
            for name, x in self.model.state_dict().items():
                x.copy_(self._first[name])
            for state in self.optimizer.state.values():
                for x in state.values():
                    if isinstance(x, torch.Tensor):
                        x.zero_()

    def losses(self, step: Step) -> list[float]:
        """Of the first batches."""
        self.back()
        return [float(step(*self.batch(k))) for k in range(CHECKED)]

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


def by_weft(placed: Placed, budget_s: float, *, warm: bool) -> tuple[Step, Row]:
    """A compiled step, and what is to be known of it."""

    def compiled() -> CompiledStep:
        options = weft.Options(budget_s=budget_s, device=placed.device, allow_tf32=False)
        case, batch = placed.case, placed.batch(0)
        return weft.compile_step(
            placed.model, case.loss, placed.optimizer, *batch, options=options, autocast=torch.bfloat16
        )

    began = time.perf_counter()
    step = compiled()
    record = step.record
    more: Row = {
        "tuning_s": round(time.perf_counter() - began, 1), "plan": record.chosen, "kernels": len(record.steps),
        "operators": record.operators, "opaque": {op: count for op, _, count in record.opaque},
        "plans": [[p.name, round(p.median_us, 1), p.note] for p in record.plans if math.isfinite(p.median_us)],
    }  # fmt: skip
    if warm:
        again = time.perf_counter()
        compiled()
        more["warm_s"] = round(time.perf_counter() - again, 1)
    return step, more


def by_peer(placed: Placed, who: str) -> tuple[Step, Row]:
    """A step of another maker, in a graph where there is one."""
    loss: Step = placed.loss
    if who != "eager":
        loss = torch.compile(loss, mode="max-autotune-no-cudagraphs" if who == "autotune" else None)
    step = placed.loop(loss)
    if placed.device == "cpu":
        step(*placed.batch(0))
        return step, {"graph": False}
    try:
        return recorded(step, placed.batch(0), placed.model), {"graph": True}
    except RuntimeError as error:
        torch.cuda.synchronize()
        why = (str(error).splitlines() or [type(error).__name__])[0]
        step(*placed.batch(0))
        return step, {"graph": False, "why_no_graph": why[:_TOLD]}


def timed(step: Step, batch: Sequence[torch.Tensor], device: str, rounds: int) -> list[float]:
    """Milliseconds of a step, a sample for each of the rounds."""

    def sample(count: int) -> float:
        if device == "cpu":
            start = time.perf_counter()
            for _ in range(count):
                step(*batch)
            return (time.perf_counter() - start) * 1e3
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        for _ in range(count):
            step(*batch)
        end.record()
        torch.cuda.synchronize()
        return float(begin.elapsed_time(end))

    if device == "cuda":
        sample(WARM)
    count = 1 if device == "cpu" else max(1, math.ceil(ROUND_S * 1e3 / max(sample(1), 1e-3)))
    return [sample(count) / count for _ in range(rounds)]


def memory_bytes(step: Step, batch: Sequence[torch.Tensor]) -> int:
    """The most that the framework keeps from the GPU over some steps."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(WARM):
        step(*batch)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_reserved()


def measured(name: str, who: str, given: Mapping[str, Any]) -> Row:
    """The entry of one contender, made in this process."""
    case, device, small = CASES[name], str(given["device"]), bool(given["small"])
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark = who != "weft"  # peers may try; plans of Weft take what the heuristic names
    if who != "weft" and not given["free"]:
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    began = time.perf_counter()
    placed = Placed(case, device, small=small, fused=who != "weft")
    step, row = by_weft(placed, given["budget"], warm=given["warm"]) if who == "weft" else by_peer(placed, who)
    batch = placed.batch(0)
    step(*batch)
    if device == "cuda":
        torch.cuda.synchronize()
    row["first_step_s"] = round(time.perf_counter() - began, 1)
    row["losses"] = placed.losses(step)
    samples = timed(step, batch, device, given["rounds"])
    row["ms"] = round(statistics.median(samples), 4)
    row["samples_ms"] = [round(x, 4) for x in samples]
    if device == "cuda":
        row["memory_bytes"] = memory_bytes(step, batch)
    if who == "eager":
        row["losses_f32"] = placed.losses(placed.loop(placed.loss, autocast=False))
    return row


def _answer(name: str, who: str, given: Mapping[str, Any], pipe: Connection, log: str) -> None:
    """What a process does: say one entry."""
    os.setsid()  # it and all that it starts can be ended together
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS adds up in one order then
    told = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(told, 1)
    os.dup2(told, 2)
    warnings.simplefilter("ignore")
    try:
        row = measured(name, who, given)
    except Exception as error:  # it is the contender's result
        import traceback

        traceback.print_exc()
        line = str(error).strip().partition("\n")[0]
        row = {"failed": f"{type(error).__name__}: {line}"[:_TOLD]}
    pipe.send(json.dumps(row))
    pipe.close()


# --- asking such processes


def asked(name: str, who: str, given: Mapping[str, Any], log: str) -> Row:
    """The entry of one contender, from a process of its own that is ended when its time is over."""
    ours, theirs = _CONTEXT.Pipe(duplex=False)
    process = _CONTEXT.Process(target=_answer, args=(name, who, given, theirs, log))
    began = time.perf_counter()
    process.start()
    theirs.close()
    limit_s = float(given["limit"])
    try:
        row: Row = json.loads(ours.recv()) if ours.poll(limit_s) else {"failed": f"no step in {limit_s:g} s"}
    except EOFError:
        process.join(10.0)
        code = process.exitcode or 0
        how = f"died: {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        row = {"failed": f"the process {how}"}
    with suppress(ProcessLookupError, PermissionError):
        if process.pid is not None and os.getpgid(process.pid) == process.pid:
            os.killpg(process.pid, signal.SIGKILL)
    process.join()
    return {**row, "seconds": round(time.perf_counter() - began, 1)}


# --- the record


def case_row(name: str, runs: Mapping[str, Row], settings: Row) -> Row:
    """A case as far as it is measured: what its entries come to, and the entries."""
    ms = {who: float(str(r["ms"])) for who, r in runs.items() if "ms" in r}
    memory = {who: int(str(r["memory_bytes"])) for who, r in runs.items() if "memory_bytes" in r}
    peers = {who: x for who, x in ms.items() if who != "weft"}
    best = min(peers, key=peers.__getitem__, default="")
    row: Row = {"record": "case", "suite": SUITE, "case": name, "settings": settings, "peers_ms": peers}
    if "weft" in ms:
        row["weft_ms"] = ms["weft"]
        row["right"] = is_right(runs)
        if best:
            row.update(best_peer=best, speedup_best=round(peers[best] / ms["weft"], 3))
        compilers = [x for who, x in memory.items() if who in ("inductor", "autotune")]
        if compilers and "weft" in memory:
            row["memory_share"] = round(memory["weft"] / min(compilers), 3)
    return {**row, "runs": dict(runs)}


def is_right(runs: Mapping[str, Row]) -> bool | None:
    """Whether Weft's losses are as near those of f32 as eager's; None: eager's are not known."""
    mine, eager = runs.get("weft", {}).get("losses"), runs.get("eager", {})
    if not isinstance(mine, list) or "losses_f32" not in eager:
        return None
    own, exact = eager["losses"], eager["losses_f32"]
    assert isinstance(own, list)
    assert isinstance(exact, list)
    # a NaN is not
    return all(abs(x - z) <= 2 * abs(y - z) + ULP * abs(z) for x, y, z in zip(mine, own, exact, strict=True))


def wanted(
    cases: Sequence[str], who: Sequence[str], again: Sequence[str], known: Mapping[str, Row]
) -> list[tuple[str, str]]:
    """Entries to be measured now: (case, contender)."""

    def left(case: str, contender: str) -> bool:
        runs = known.get(case, {}).get("runs", {})
        return contender in again or "all" in again or not isinstance(runs, dict) or contender not in runs

    return [(c, w) for c in cases for w in who if left(c, w)]


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
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what is left, and say what came of all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name holds one of these texts, by commas")
    parser.add_argument("--who", default="", help=f"of {','.join(WHO)}; on a processor weft,eager")
    parser.add_argument("--again", default="", help="contenders to be measured once more, by commas, or `all`")
    parser.add_argument("--budget", type=float, default=-1.0, help="of Weft's search, in seconds (120; small 0)")
    parser.add_argument("--limit", type=float, default=540.0, help="seconds that a contender may take (540)")
    parser.add_argument("--seconds", type=float, default=math.inf, help="none is begun after so many")
    parser.add_argument("--rounds", type=int, default=0, help=f"samples of each time ({ROUNDS}; small 2)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--small", action="store_true", help="small forms of the networks")
    parser.add_argument("--free", action="store_true", help="peers may take algorithms that are not deterministic")
    parser.add_argument("--warm", action="store_true", help="compile once more from the tuning database")
    parser.add_argument("--out", type=Path, help="write the record: into this file, or `-`: into that of the suite")
    given = parser.parse_args(arguments)
    who = [x for x in given.who.split(",") if x] or list(WHO if given.device == "cuda" else WHO[:2])
    if unknown := set(who) - set(WHO):
        parser.error(f"--who: {', '.join(sorted(unknown))} is none of {', '.join(WHO)}")
    only = given.only or (",".join(SHOWN) if given.small else "")
    cases = [c for c in CASES if any(word in c for word in only.split(","))]
    if given.small:  # of one network all have one small form
        cases = list({c.partition("/")[0]: c for c in reversed(cases)}.values())[::-1]
    if not cases:
        parser.error(f"--only: no case has {given.only} in its name")
    settings: dict[str, Any] = {
        "device": given.device, "small": given.small, "free": given.free, "warm": given.warm,
        "rounds": given.rounds or (2 if given.small else ROUNDS),
        "limit": given.limit, "budget": given.budget if given.budget >= 0 else 0.0 if given.small else 120.0,
    }  # fmt: skip
    end = time.perf_counter() + given.seconds
    _CONTEXT.set_forkserver_preload(list(PRELOADED))
    folder = folder_of(given.device, _CONTEXT)
    if not folder:
        sys.exit("benchmarks.gpu_training: torch sees no NVIDIA GPU; `--device cpu --small` runs on the processor")
    with tempfile.TemporaryDirectory(prefix="weft-training-") as temporary:
        log = Path(temporary) / "log.txt"
        path = None if given.out == Path("-") else given.out or Path(temporary) / "record.jsonl"
        record = Record(folder, SUITE, path=path)
        again = [x for x in given.again.split(",") if x]
        left = wanted(cases, who, again, record.before())
        shown = {k: settings[k] for k in ("small", "free", "budget", "rounds", "limit")}
        for name, contender in left:
            if time.perf_counter() > end:
                break
            known = record.before().get(name, {}).get("runs", {})
            runs: dict[str, Row] = dict(known) if isinstance(known, dict) else {}
            log.write_text("")
            runs[contender] = asked(name, contender, settings, str(log))
            if "failed" in runs[contender]:
                print(log.read_text()[-4000:], file=sys.stderr, flush=True)
            record.add(case_row(name, runs, shown))
        record.add(summary([r for r in record.cases if "runs" in r]))


if __name__ == "__main__":
    main()
