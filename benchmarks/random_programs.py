"""Random torch programs (tests/fuzz/programs.py) through the compiler, against the framework and float64.

    python -m benchmarks.random_programs [--device cpu|cuda] [--count 1000] [--seed 0] [--part 1/1] [--jobs J]
    python -m benchmarks.random_programs --show SEED      # the program of a number, and what becomes of it
    python -m benchmarks.random_programs --shrink SEED    # the least program that fails as that one does

Programs of even numbers run as plans that are made of generated kernels wherever one takes a problem (`fused`, one per
primitive `single`, at random `mixed`; `pipeline/untuned.py`); those of odd numbers through `weft.compile`, at a budget
of 0, every eighth of them at one of `BUDGET_S`. Each is called twice on its inputs as they lie and once on dense ones.
Outputs must have the framework's types and shapes, and be as near to float64 as gate B, or gate A against the
framework's own error, asks for (`pipeline/finish.py`). A program is

    right      in every output of every call
    wrong      in one of them
    crashed    raises, is refused, takes its process with it, or does not end

A program that the framework itself does not run on the device (refused by it, or the use of the GPU ended by it, before
Weft is asked) says nothing: the one `AGAIN` numbers on is taken instead, and a line tells of it.

Programs run in worker processes. The file of results has a line for each that is not right, with its text, and a
summary; parts of one run (`--part`) add to it.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from tests.fuzz import programs
from tests.fuzz.programs import Program

import weft
from benchmarks.harness.record import RESULTS, environment
from tools import pool
from weft.frontends.torch import import_exported
from weft.ir.types import DType
from weft.options import Options
from weft.pipeline.finish import as_array, as_good
from weft.pipeline.setting import survey
from weft.pipeline.untuned import build
from weft.tune.tolerance import gate_b

FORCED = ("fused", "single", "mixed")
BUDGET_S = 2.0
TIMEOUT_S = 120.0
"""Of one program."""
AGAIN = 48_000_000
"""From a program that the framework does not run to the one taken instead, which runs the same way."""
DRAWS = 5
"""Programs for one number, at most."""
ENDED_BY_FRAMEWORK = 77
"""Exit status of a process whose GPU the framework's own execution made unusable."""
Call = Callable[..., Sequence[torch.Tensor]]


class RefusedError(Exception):
    """The framework's own execution of a program raised."""


@dataclass(frozen=True)
class Outcome:
    """What became of a program."""

    seed: int
    way: str
    outcome: str
    note: str = ""


def way_of(seed: int) -> str:
    """How the program of that number runs."""
    if seed % 2 == 0:
        return FORCED[seed // 2 % len(FORCED)]
    return f"budget {BUDGET_S:g}" if seed // 2 % 8 == 0 else "budget 0"


def compiled(program: Program, given: Sequence[torch.Tensor], way: str, device: str) -> Call:
    """The program as something that can be called with its arguments."""
    module = programs.Module(program, given).eval()
    arguments = programs.arguments(program, given)
    options = Options(device=device, threads=torch.get_num_threads(), build_jobs=1, seed=program.seed)
    if way in FORCED:
        with torch.no_grad():
            exported = torch.export.export(module, tuple(arguments), strict=False)
        built = build(import_exported(exported, device=device), options, [way])
        return next(iter(built.executables.values()))
    budget = float(way.removeprefix("budget "))
    model = weft.compile(module, arguments, options=replace(options, budget_s=budget))

    def call(*tensors: torch.Tensor) -> Sequence[torch.Tensor]:
        found = model(*tensors)
        return (found,) if isinstance(found, torch.Tensor) else found

    return call


def differences(found: Sequence[torch.Tensor], wanted: Wanted) -> str:
    """What is wrong with the outputs of one call; empty: nothing."""
    if len(found) != len(wanted.plain):
        return f"{len(found)} outputs, not {len(wanted.plain)}"
    for k, (got, plain, exact, kind) in enumerate(zip(found, wanted.plain, wanted.exact, wanted.kinds, strict=True)):
        if got.shape != plain.shape or got.dtype != plain.dtype:
            return f"output {k}: {list(got.shape)} {got.dtype}, not {list(plain.shape)} {plain.dtype}"
        mine, theirs, truth = as_array(got), as_array(plain), as_array(exact)
        judged = gate_b(kind if got.is_floating_point() else programs.OURS[got.dtype], got=mine, want=truth)
        if judged.ok or (got.is_floating_point() and as_good(kind, mine, theirs, truth)):
            continue
        return f"output {k}: {judged.outside:.2%} outside, cosine {judged.cosine:.6f}, largest error {judged.worst:.3g}"
    return ""


@dataclass(frozen=True)
class Wanted:
    """What a program must give."""

    plain: Sequence[torch.Tensor]
    """By the framework's operators, in the program's own types, on the device."""
    exact: Sequence[torch.Tensor]
    """With floats of 64 bits."""
    kinds: Sequence[DType]


def settled(given: Sequence[torch.Tensor]) -> None:
    """Wait for the device: what went wrong until now is raised here, not at whoever comes next."""
    if any(t.is_cuda for t in given):
        torch.cuda.synchronize()


def wanted_of(program: Program, given: Sequence[torch.Tensor]) -> Wanted:
    """See `Wanted`.

    Raises:
        RefusedError: the framework does not run it.
    """
    host = programs.draw(program)
    wide = [t.double() if t.is_floating_point() else t for t in host]
    exact = programs.run(program, wide, wide=True)
    kinds = programs.kinds_of_outputs(program, host)
    settled(given)
    try:
        plain = programs.run(program, given)
        settled(given)
    except Exception as error:
        raise RefusedError(f"{type(error).__name__}: {str(error).strip()[:300]}") from error
    return Wanted(plain, exact, kinds)


def check(program: Program, way: str, device: str) -> str:
    """Compile, call three times, compare; empty: right."""
    with torch.no_grad():
        given = programs.draw(program, device)
        before = [t.clone() for t in given]
        wanted = wanted_of(program, given)
        call = compiled(program, given, way, device)
        dense = {id(t): t.contiguous() for t in given}
        layouts = {"first call": given, "second call": given, "dense inputs": [dense[id(t)] for t in given]}
        for name, tensors in layouts.items():
            found = call(*programs.arguments(program, tensors))
            if wrong := differences(found, wanted):
                return f"{name}, {wrong}"
        for k, (t, was) in enumerate(zip(given, before, strict=True)):
            if not torch.equal(as_bits(t), as_bits(was)):
                return f"input {k} has other values than before"
        settled(given)
    return ""


def as_bits(t: torch.Tensor) -> torch.Tensor:
    """So that NaN equals itself."""
    # a dimension of size one may have any stride, which another element type refuses
    return t.contiguous().reshape(-1).as_strided((t.numel(),), (1,)).view(torch.uint8)


def examine(program: Program, way: str, device: str) -> Outcome:
    """The outcome of one program, in this process."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the framework at the program
            wrong = check(program, way, device)
    except RefusedError as refused:
        _leave_if_lost(device, ENDED_BY_FRAMEWORK)
        return Outcome(program.seed, way, "refused", str(refused))
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        said = f"{type(error).__name__}: {str(error).strip()[:300]} ({Path(where.filename).name}:{where.lineno})"
        _leave_if_lost(device, 1)
        return Outcome(program.seed, way, "crashed", said)
    return Outcome(program.seed, way, "wrong" if wrong else "right", wrong)


def _leave_if_lost(device: str, status: int) -> None:
    """A process whose GPU context is gone is no use to the next program: its end is this one's outcome."""
    if device.startswith("cuda"):
        try:
            torch.cuda.synchronize()
            torch.ones(8, device=device).sum().item()
        except RuntimeError:
            os._exit(status)


def work(task: tuple[int, str]) -> Outcome:
    """One program in a worker process."""
    seed, device = task
    logging.getLogger("weft").setLevel(logging.ERROR)
    logging.getLogger("torch").setLevel(logging.ERROR)
    torch.set_num_threads(1 + seed // 2 % 2)
    torch.backends.cudnn.allow_tf32 = False
    return examine(programs.make(seed), way_of(seed), device)


def run(seeds: Sequence[int], device: str, jobs: int) -> list[Outcome]:
    """Outcomes of all programs, in the order of their numbers; with no jobs in this process, for tests.

    Among them those that the framework refused, beside the outcomes of what was taken instead.
    """
    found: list[Outcome] = []
    for draw in range(DRAWS):
        made = _round(seeds, device, jobs)
        found += made
        seeds = [x.seed + AGAIN for x in made if x.outcome == "refused"]
        if draw == DRAWS - 1:
            found += [Outcome(x, way_of(x), "crashed", f"the framework refused {DRAWS} programs") for x in seeds]
    return sorted(found, key=lambda x: x.seed % AGAIN)


def _round(seeds: Sequence[int], device: str, jobs: int) -> list[Outcome]:
    if not jobs:
        return [examine(programs.make(seed), way_of(seed), device) for seed in seeds]
    found: list[Outcome] = []
    survey(Options(device=device))  # probed once, before the others disturb it
    for task, outcome in pool.run(work, [(s, device) for s in seeds], jobs=jobs, timeout_s=TIMEOUT_S):
        one = outcome
        if isinstance(outcome, pool.Lost):
            theirs = outcome.reason.endswith(f" status {ENDED_BY_FRAMEWORK}")
            note = "the framework ended the use of the GPU" if theirs else outcome.reason
            one = Outcome(task[0], way_of(task[0]), "refused" if theirs else "crashed", note)
        found.append(one)
        if one.outcome != "right":
            print(json.dumps(asdict(one)), flush=True)
    return found


def lines(found: Sequence[Outcome]) -> list[dict[str, object]]:
    """Records of what is not right."""
    bad = [x for x in found if x.outcome != "right"]
    head: dict[str, object] = {"record": "case", "suite": "random-programs"}
    return [{**head, "case": f"program {x.seed}", **asdict(x), "text": programs.make(x.seed).text} for x in bad]


def summary(cases: Sequence[dict[str, object]], total: int, ways: dict[str, int]) -> dict[str, object]:
    """The last line."""
    count = {o: sum(x["outcome"] == o for x in cases) for o in ("wrong", "crashed")}
    right = total - sum(count.values())
    refused = sum(x["outcome"] == "refused" for x in cases)
    head: dict[str, object] = {"record": "summary", "suite": "random-programs", "total": total, "right": right}
    return {**head, **count, "refused_by_the_framework": refused, "ways": ways}


def shrunk(seed: int, device: str) -> Program:
    """The least program that fails as that of the number does; each attempt in a process of its own."""
    wanted = next(x for _, x in pool.run(work, [(seed, device)], jobs=1, timeout_s=TIMEOUT_S))
    kind = "crashed" if isinstance(wanted, pool.Lost) else wanted.outcome
    if kind == "right":
        sys.exit(f"program {seed} is right")

    def fails(candidate: Program) -> bool:
        task = (candidate, way_of(seed), device)
        outcome = next(x for _, x in pool.run(work_on, [task], jobs=1, timeout_s=TIMEOUT_S))
        return ("crashed" if isinstance(outcome, pool.Lost) else outcome.outcome) == kind

    return programs.shrink(programs.make(seed), fails, tries=60)


def work_on(task: tuple[Program, str, str]) -> Outcome:
    """A given program in a worker process."""
    torch.set_num_threads(1 + task[0].seed // 2 % 2)
    torch.backends.cudnn.allow_tf32 = False
    return examine(*task)


def _part(text: str) -> tuple[int, int]:
    part, _, parts = text.partition("/")
    if not 1 <= int(part) <= int(parts):
        raise argparse.ArgumentTypeError(f"{text}: K/N, K from 1 to N")
    return int(part), int(parts)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run, record, exit with 1 where a program was not right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="the first number")
    parser.add_argument("--part", type=_part, default=(1, 1), metavar="K/N", help="every Nth program from the Kth on")
    parser.add_argument("--jobs", type=int, default=max(1, len(os.sched_getaffinity(0)) // 2), help="programs at once")
    parser.add_argument("--out", type=Path, help="instead of the file of results")
    parser.add_argument("--show", type=int, metavar="SEED")
    parser.add_argument("--shrink", type=int, metavar="SEED")
    given = parser.parse_args(arguments)
    if given.show is not None:
        print(programs.make(given.show).text)
        print(next(x for _, x in pool.run(work, [(given.show, given.device)], jobs=1, timeout_s=TIMEOUT_S)))
        return
    if given.shrink is not None:
        print(shrunk(given.shrink, given.device).text)
        return
    name = "cpu" if given.device == "cpu" else torch.cuda.get_device_name().lower().replace(" ", "-")
    path = given.out or RESULTS / name / "random-programs.jsonl"
    part, parts = given.part
    seeds = range(given.seed, given.seed + given.count)[part - 1 :: parts]
    began = time.monotonic()
    found = run(seeds, given.device, given.jobs)
    judged = [x for x in found if x.outcome != "refused"]
    cases, total, ways = lines(found), len(judged), dict(Counter(x.way for x in judged))
    command = " ".join(["python -m benchmarks.random_programs", *sys.argv[1:]])
    head = environment(command, on_cpu=given.device == "cpu")
    if part > 1 and path.exists():
        old = [json.loads(x) for x in path.read_text().splitlines()]
        head, last = old[0], old[-1]
        cases, total = old[1:-1] + cases, total + last["total"]
        ways = {w: ways.get(w, 0) + last["ways"].get(w, 0) for w in {*ways, *last["ways"]}}
    end = summary(cases, total, dict(sorted(ways.items())))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(x) + "\n" for x in (head, *cases, end)))
    print(json.dumps({**end, "seconds": round(time.monotonic() - began, 1)}))
    sys.exit(0 if end["right"] == total else 1)


if __name__ == "__main__":
    main()
