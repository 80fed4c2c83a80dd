"""Weft's products against cuBLASLt with the best of its heuristic's first 16 algorithms, on an NVIDIA GPU.

    python -m benchmarks.gpu_gemm_lt [GROUP ...] [--kernels 8] [--every] [--out FILE] [--seconds S] [--dry]

How a product is measured is told in `benchmarks.harness.race`: random normal data, every kernel checked against
float64, CUDA graphs, operands that rotate through three times the L2 cache, both sides interleaved. Kernels
are those that the compiler would measure first. Epilogues that the library does not fuse run as torch's operators
behind it.

Results are written case by case as JSON lines; cases that FILE has already are not measured again. Everything runs in
a process of its own, which is replaced when it does not answer for `--stall` seconds or dies; the kernel that ran then
is left out. `--dry` writes and compiles the kernels without a GPU.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import queue
import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.cases.gemm import GROUPS
from benchmarks.harness.child import Child, Silence
from benchmarks.harness.left import MORE, add_option
from benchmarks.harness.record import RESULTS, ROOT, Row, environment, folder_of_gpu, lines_of, merge
from weft.device.cuda.facts import GpuFacts, gpu_facts, profile
from weft.device.cuda.nvrtc import CompiledCubin, Nvrtc, find_nvrtc, gate
from weft.errors import DeviceError, ToolchainError, WeftError
from weft.gemm.spec import Gemm
from weft.generate.cuda import templates
from weft.generate.cuda.space import Ranked, kind, pruned, space
from weft.ir.declined import Declined
from weft.kernels.candidate import Problem
from weft.kernels.source import CudaSource, Schedule
from weft.kernels.stored_names import text_as_called

Line = dict[str, Any]
T = TypeVar("T")
FEW = 16
"""Configurations that the model chooses."""
KINDS_WITHIN, RANDOM_WITHIN = 3.0, 5.0
"""See `sampled`."""
EXHAUSTIVE = ROOT / "data" / "nvidia-h200" / "exhaustive.json"
CONFIGURATIONS = EXHAUSTIVE.with_name("configurations.json")
"""The same of other groups: the few configurations of each product, not all."""
CLOSE = 1.03
TRIES = 3
"""Of a case whose kernels end the process."""


def kernels_of(g: Gemm, facts: GpuFacts, most: int, *, every: bool = False) -> list[tuple[float, Schedule, CudaSource]]:
    """(modelled microseconds, schedule, kernel): the most promising first, or with `every` those of `sampled`."""
    problem = g.problem()
    ranked = space(problem, facts)
    if isinstance(ranked, Declined):
        return []
    found = []
    for us, schedule in sampled(problem, facts, ranked, most) if every else pruned(problem, facts, ranked, most):
        source = templates.emit(problem, schedule)
        if isinstance(source, CudaSource):
            found.append((us, schedule, source))
    return found


def sampled(problem: Problem, facts: GpuFacts, ranked: Ranked, most: int) -> Ranked:
    """What stands for all configurations where not all can be measured.

    The model's 16; then in turns the next by its rank, the best of the next kind within `KINDS_WITHIN` of the best, and
    a random one within `RANDOM_WITHIN` of it, until there are `most`.
    """
    found = dict.fromkeys(s for _, s in pruned(problem, facts, ranked, min(most, FEW)))
    kinds: dict[object, Schedule] = {}
    for us, s in ranked:
        if us <= KINDS_WITHIN * ranked[0][0]:
            kinds.setdefault(kind(s), s)
    anything = [s for us, s in ranked if us <= RANDOM_WITHIN * ranked[0][0]]
    random.Random(problem.key).shuffle(anything)
    strata = [iter([s for _, s in ranked]), iter(kinds.values()), iter(anything)]
    while len(found) < min(most, len(ranked)):
        for stratum in strata:
            new = next((s for s in stratum if s not in found), None)
            if new is not None and len(found) < most:
                found[new] = None
    modelled = {s: us for us, s in ranked}
    return [(modelled[s], s) for s in found]


def build(source: CudaSource, facts: GpuFacts, nvrtc: Nvrtc, cache: Path | None) -> CompiledCubin | str:
    """The cubin, or why there is none worth running."""
    try:
        made = nvrtc.compile(
            source.text, arch=facts.arch, flags=source.flags, max_registers=source.max_registers, cache_dir=cache
        )
    except (ToolchainError, DeviceError) as error:
        return str(error).splitlines()[0]
    for launch in source.launches:
        declined = gate(made, launch, facts)
        if isinstance(declined, Declined):
            return declined.reason
    return made


def measure(g: Gemm, group: str, built: Sequence[tuple[float, Schedule, CudaSource, Any]], l2: int, say: Any) -> Line:
    """One case, on the GPU."""
    from benchmarks.harness.race import Race
    from weft.device.cuda.cublaslt import find_cublaslt

    lt = find_cublaslt()
    if isinstance(lt, Declined):
        raise SystemExit(lt.reason)
    start = time.perf_counter()
    tf32 = group == "tf32"
    race = Race(g, l2, tf32=tf32)
    refused: list[str] = []
    modelled: dict[str, float] = {}
    for us, schedule, source, made in built:
        if not isinstance(made, CompiledCubin):
            refused.append(f"{schedule}: {made}")
            continue
        modelled[str(schedule)] = us
        try:
            race.add_kernel(str(schedule), source, str(made.path))
        except DeviceError as error:
            refused.append(f"{schedule}: {str(error).splitlines()[0]}")
    race.add_library(lt, tf32=tf32)
    told: set[str] = set()

    def before(name: str) -> None:
        if name not in told:
            told.add(name)
            say({"running": name})

    found = race.run(before)
    best = {side: min((x for x in found if x.side == side), key=lambda x: x.median_us, default=None) for side in SIDES}
    refused += [f"{x.side} {x.name}: {x.refused}" for x in found if x.refused]
    line: Line = {"record": "case", "group": group, "case": g.name, "sets": len(race.inputs), "refused": refused}
    for side, x in best.items():
        if x is not None and x.median_us < math.inf:
            line |= {f"{side}_us": round(x.median_us, 3), f"{side}_name": x.name, f"{side}_error": f"{x.error:.2e}"}
            line |= {f"{side}_samples": [round(us, 3) for us in x.samples_us]}
    line["all"] = {f"{x.side} {x.name}": round(min(x.samples_us), 3) for x in found if x.samples_us and not x.refused}
    line["modelled"] = {k: round(v, 2) for k, v in modelled.items()}
    if "weft_us" in line and "library_us" in line:
        line["ratio"] = round(line["library_us"] / line["weft_us"], 4)
        line["tflops"] = round(g.flops / line["weft_us"] / 1e6, 1)
    line["seconds"] = round(time.perf_counter() - start, 2)
    return line


SIDES = ("weft", "library")


def say(line: Mapping[str, Any]) -> None:
    """One JSON line."""
    print(json.dumps(line), flush=True)


def child(given: argparse.Namespace) -> None:
    """All cases that are left, in this process."""
    import torch

    torch.backends.cuda.matmul.allow_tf32 = False
    torch.zeros(1, device="cuda")
    facts, nvrtc = gpu_facts(None, calibrate=False), find_nvrtc()
    if isinstance(nvrtc, Declined):
        raise SystemExit(nvrtc.reason)
    known = read(Path(given.out))
    if not known:
        command = f"python -m benchmarks.gpu_gemm_lt {' '.join(given.groups)} --kernels {given.kernels}"
        say(environment(command + " --every" * given.every))
    done = {(x["group"], x["case"]) for x in known if "case" in x}
    if given.every and not given.again and EXHAUSTIVE.exists():
        done |= {("exhaustive", x["case"]) for x in read_times(EXHAUSTIVE)}
    bad = {(x["poisoned"], x["kernel"]) for x in known if "poisoned" in x}
    left = [(group, g) for group in given.groups for g in GROUPS[group] if (group, g.name) not in done]
    left = [x for x in left if given.only in x[1].name]
    ahead: queue.Queue[tuple[str, Gemm, list[tuple[float, Schedule, CudaSource, Future[Any]]]]] = queue.Queue()
    with ThreadPoolExecutor(max(1, len(os.sched_getaffinity(0)) - 2)) as pool, ThreadPoolExecutor(1) as writer:

        def write() -> None:
            for group, g in left:
                allowed = replace(facts, tf32=group == "tf32", fast_f8=g.fast)
                made = kernels_of(g, allowed, given.kernels, every=given.every)
                made = [x for x in made if (g.name, f"weft {x[1]}") not in bad]
                made = [x for x in made if not any(dict(x[1].params).get(name) for name in given.without.split(","))]
                jobs = [(us, s, k, pool.submit(build, k, facts, nvrtc, Path(given.cache))) for us, s, k in made]
                ahead.put((group, g, jobs))

        writing = writer.submit(write)
        for _ in left:
            group, g, jobs = next_of(ahead, writing)
            say({"begin": g.name, "group": group})
            built = [(us, s, k, job.result()) for us, s, k, job in jobs]
            say(measure(g, group, built, facts.l2_bytes, say))
            torch.cuda.empty_cache()
    say({"end": len(left)})


def next_of(ahead: queue.Queue[T], writing: Future[None]) -> T:
    """What the writer has ready next; raises what it ended with."""
    while True:
        try:
            return ahead.get(timeout=0.5)
        except queue.Empty:
            if writing.done():
                writing.result()


def read(path: Path) -> list[Line]:
    """Lines of a file of results; a last one that was cut off does not count."""
    found: list[Line] = lines_of(path)
    return found


def watch(given: argparse.Namespace, end: float) -> tuple[bool, str, Line]:
    """One child process to its end, its stall or the end of the time: (all done, what went wrong, what ran)."""
    command = [sys.executable, "-m", "benchmarks.gpu_gemm_lt", *given.groups, "--child", "--out", given.out]
    command += ["--cache", given.cache, "--kernels", str(given.kernels), "--only", given.only]
    command += ["--without", given.without, *["--every"] * given.every, *["--again"] * given.again]
    running: Line = {}
    first = True
    with Child(command) as process, Path(given.out).open("a") as out:
        while True:
            try:
                text = process.line(min(end - time.monotonic(), given.stall * (4 if first else 1)))
            except Silence:
                over = time.monotonic() >= end
                return False, "the time is up" if over else f"no answer for {given.stall} s", running
            if text is None:
                return False, f"it ended with status {process.status}", running
            first = False
            line = json.loads(text) if text.startswith("{") else {}
            if "end" in line:
                return True, "", running
            if "record" in line:
                out.write(text)
                out.flush()
            if "case" in line:
                short = {k: line.get(k) for k in ("group", "case", "weft_us", "library_us", "ratio", "seconds")}
                print(json.dumps(short), flush=True)
            if "begin" in line:
                running = line
            elif "running" in line:
                running |= line


def dry(given: argparse.Namespace) -> None:
    """Writes and compiles the kernels for the architecture of an H200."""
    known, nvrtc = profile("h200"), find_nvrtc()
    if isinstance(nvrtc, Declined):
        raise SystemExit(f"the kernels cannot be compiled here: {nvrtc.reason}")
    for group in given.groups:
        for g in GROUPS[group]:
            if given.only in g.name:
                facts = replace(known, tf32=group == "tf32", fast_f8=g.fast)
                for us, schedule, source in kernels_of(g, facts, given.kernels, every=given.every):
                    made = build(source, facts, nvrtc, None)
                    good = isinstance(made, CompiledCubin)
                    say(
                        {"case": g.name, "schedule": str(schedule), "us": round(us, 2), "refused": "" if good else made}
                    )


def keep(path: Path, device: str = "nvidia-h200") -> None:
    """Put a file of results, without single samples, into the records of the repository, in place of the same cases.

    Rows name their commit. A product that has no pair of times is a row, too.
    """
    lines = read(path)
    head = next(x for x in lines if x.get("record") == "environment")
    short = ("record", "group", "case", "library_us", "weft_us", "ratio", "tflops", "weft_name", "library_name")
    rows: list[Row] = []
    for x in lines:
        if "case" in x and "ratio" in x:
            rows.append({k: x[k] for k in short})
        elif "case" in x:
            why = x.get("error") or "; ".join(x.get("refused", ())) or "no pair of times"
            rows.append({"record": "case", "group": x["group"], "case": x["case"], "failed": str(why)[:300]})
    merge(RESULTS / device / "gemm.jsonl", head, rows, ("group", "case"))


def times_of(line: Line) -> dict[str, float]:
    """The times of Weft's configurations in a line of results."""
    return {k.removeprefix("weft "): us for k, us in line.get("all", {}).items() if k.startswith("weft ")}


def keep_times(path: Path, to: Path) -> None:
    """Put the times of all configurations in a file of results into a table, in place of what it had of these cases.

    Schedules stand there once each, times by their number.
    """
    lines = read(path)
    if not any(map(times_of, lines)):
        raise SystemExit(f"{path.name} has no times")
    environments = json.loads(to.read_text())["environments"] if to.exists() else []
    environments += [x for x in lines if x.get("record") == "environment" and x not in environments]
    schedules: dict[str, int] = {}
    cases = {}
    for x in (*(read_times(to) if to.exists() else ()), *lines):
        if times := times_of(x):
            timed = [[schedules.setdefault(s, len(schedules)), us] for s, us in times.items()]
            cases[x["case"]] = {"library_us": x.get("library_us"), "weft": timed}
    head = {"environments": environments, "schedules": list(schedules)}
    rows = ",\n".join(f"{json.dumps(k)}:{json.dumps(x, separators=(',', ':'))}" for k, x in cases.items())
    to.write_text(json.dumps(head, indent=0)[:-2] + f',\n"cases":{{\n{rows}\n}}}}\n')


def read_times(path: Path) -> list[Line]:
    """The lines from which such a table was made, as far as it has them."""
    data = json.loads(path.read_text())
    names = data["schedules"]
    return [
        {"case": case, "library_us": x["library_us"], "all": {f"weft {names[i]}": us for i, us in x["weft"]}}
        for case, x in data["cases"].items()
    ]


def by_name(ranked: Iterable[Schedule], times: Mapping[str, float]) -> dict[str, Schedule]:
    """Schedules by their names in a record: parameters that came later count for nothing, and the first one wins."""
    recorded = {text_as_called(text): text for text in times}
    names = {name for text in recorded for name in re.findall(r"[(,](\w+)=", text)}
    found: dict[str, Schedule] = {}
    for s in ranked:
        kept = tuple((name, value) for name, value in s.params if name in names)
        told = str(Schedule(s.generator, kept))
        found.setdefault(recorded.get(told, told), s)
    return found


def quality(lines: Iterable[Line], facts: GpuFacts, few: int = FEW) -> dict[str, float]:
    """By case of a run with `--every`: the fastest of the few that the model chooses now, over the fastest of all.

    Configurations that were not measured do not count; a case of whose few none was, is infinite.
    """
    cases = {g.name: g for g in GROUPS["exhaustive"]}
    found = {}
    for x in lines:
        g, times = cases.get(x.get("case", "")), times_of(x)
        if g is None or not times:
            continue
        problem = g.problem()
        ranked = space(problem, facts)
        kept = [] if isinstance(ranked, Declined) else pruned(problem, facts, ranked, few)
        chosen = by_name([s for _, s in kept], times)
        found[g.name] = min((times[s] for s in chosen if s in times), default=math.inf) / min(times.values())
    return found


def print_quality(lines: Sequence[Line], facts: GpuFacts) -> None:
    """A line for each case, and how many have a configuration near the best among the model's few."""
    found, first = quality(lines, facts), quality(lines, facts, 1)
    counts = {x["case"]: len(times_of(x)) for x in lines if "case" in x}
    print(f"{'case':40} {'measured':>8} {'first':>6} {'of 16':>6}   (over the fastest)")
    for case, ratio in found.items():
        print(f"{case:40} {counts[case]:8} {first[case]:6.3f} {ratio:6.3f}")
    print(f"within {CLOSE - 1:.0%} of the fastest: {sum(r <= CLOSE for r in found.values())} of {len(found)} cases")


def summary(lines: Iterable[Line]) -> None:
    """A table of all cases, then geometric mean and least ratio of each group."""
    kept = {(x["group"], x["case"]): x for x in lines if "case" in x}
    print(f"{'case':46} {'library':>10} {'weft':>10} {'TFLOP/s':>8} {'ratio':>6}  kernel")
    for (group, case), x in kept.items():
        if "ratio" in x:
            name = x["weft_name"].removeprefix("cuda(").removesuffix(")")
            print(
                f"{group + ' ' + case:46} {x['library_us']:10.2f} {x['weft_us']:10.2f} {x['tflops']:8.1f}"
                f" {x['ratio']:6.2f}  {name}"
            )
        else:
            print(f"{group + ' ' + case:46} {x.get('error') or 'no pair of times'}")
    for group in dict.fromkeys(g for g, _ in kept):
        ratios = {c: x["ratio"] for (g, c), x in kept.items() if g == group and "ratio" in x}
        if ratios:
            mean = math.exp(sum(map(math.log, ratios.values())) / len(ratios))
            least = min(ratios, key=lambda c: ratios[c])
            below = sum(r < 0.9 for r in ratios.values())
            print(
                f"{group}: {len(ratios)} cases, geometric mean {mean:.3f}, least {ratios[least]:.2f} ({least}),"
                f" {below} under 0.9"
            )
    wrong = [
        (x["case"], why) for x in kept.values() for why in x.get("refused", ()) if "wrong" in why or "changes" in why
    ]
    for case, why in wrong:
        print("WRONG", case, why)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="benchmarks.gpu_gemm_lt", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=", ".join(GROUPS))
    parser.add_argument("--kernels", type=int, default=8, help="configurations of each product (8)")
    parser.add_argument("--every", action="store_true", help="configurations of all kinds, for a table of the model")
    parser.add_argument("--out", default="", help="file of results, JSON lines; what it has is not measured again")
    parser.add_argument("--seconds", type=float, default=230.0, help="when to stop (230)")
    parser.add_argument("--stall", type=float, default=20.0, help="seconds without an answer after which to start anew")
    parser.add_argument("--again", action="store_true", help="with --every: also what the kept table has already")
    parser.add_argument("--only", default="", help="cases whose name has this text")
    parser.add_argument("--keep", metavar="FILE", help="no GPU: put a run's results into benchmarks/results")
    parser.add_argument("--without", default="", help="parameters, by commas: what has one is left out")
    parser.add_argument("--record", action="store_true", help="put the results of FILE into the record after the run")
    add_option(parser)
    parser.add_argument("--quality", metavar="FILE", help="no GPU: how good the model's 16 are, by a run with --every")
    parser.add_argument("--dry", action="store_true", help="no GPU: write and compile")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--cache", default="", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    given.groups = given.groups or [x for x in GROUPS if x != "exhaustive"]
    if unknown := set(given.groups) - set(GROUPS):
        parser.error(f"no group {', '.join(sorted(unknown))}; there are {', '.join(GROUPS)}")
    if given.keep:
        if any(x.get("group") == "exhaustive" for x in read(Path(given.keep))):
            keep_times(Path(given.keep), EXHAUSTIVE)
        else:
            keep(Path(given.keep))
            keep_times(Path(given.keep), CONFIGURATIONS)
        return
    if given.quality:
        path = Path(given.quality)
        print_quality(read_times(path) if path.suffix == ".json" else read(path), profile("h200"))
        return
    if given.dry:
        dry(given)
        return
    if given.child:
        child(given)
        return
    if given.record and not given.out:
        parser.error("--record needs --out FILE")
    end, ended = time.monotonic() + given.seconds, False
    tried: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="weft-gemm-") as folder:
        given.cache = folder
        given.out = given.out or str(Path(folder) / "results.jsonl")
        while time.monotonic() < end:
            ended, why, running = watch(given, end)
            if ended:
                break
            case = running.get("begin", "")
            print(f"{case or 'start'}: {why}; {running.get('running', '')}", flush=True)
            tried[case] += 1
            if not case and tried[case] >= TRIES:
                break
            with Path(given.out).open("a") as out:
                if tried[case] >= TRIES:
                    out.write(json.dumps({"group": running["group"], "case": case, "error": why}) + "\n")
                elif case and time.monotonic() < end:
                    out.write(json.dumps({"poisoned": case, "kernel": running.get("running", "")}) + "\n")
        results = read(Path(given.out)) if Path(given.out).exists() else []
        summary(results)
        if given.record and any("case" in x for x in results):
            keep(Path(given.out), folder_of_gpu())
        if given.left:
            sys.exit(int(any("error" in x for x in results)) if ended else MORE)


if __name__ == "__main__":
    try:
        main()
    except WeftError as error:
        raise SystemExit(str(error)) from None
