"""Fused kernels under compute-sanitizer: memcheck and racecheck, once per template, binding and best-effort kernel.

    python -m tools.sanitize_pairs [--tools memcheck,racecheck] [--processes 16] [--seconds 540] [--only tma,...]
        [--cache DIR] [--out FILE|-] [--program PATH] [--again] [--list]

Latency-critical kernels are those of `tools.sanitize`, by template, its forms in turn; best-effort kernels the jobs
of `benchmarks/best_effort` at small sizes; bindings are further warps (`extra`), idle ones (`idle`), two roles in a
CTA, a grid that is filled (`filling`), blocks that are drawn in time, and the persistent co-runner, with single
blocks and with chunks of them, which has no other kernel beside it. All memory is of exactly its size. A case
repacks, runs LC alone and then fused until its blocks have run, some launches at most; LC's results must be the same.
Cases come in an order in which each template is met before any is met twice. Every process runs one tool over a share
of the cases, ends with a planted fault that the tool must find, and is started anew behind a case in which it ended.
A row stands until the kernel's text changes.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import final

import numpy as np
from benchmarks.best_effort import jobs
from benchmarks.gpu_pairs import Job, Loader, job_of
from benchmarks.harness.left import MORE, add_option
from benchmarks.harness.record import Record, Row, folder_of_gpu

from tools import sanitize
from weft.device.cuda.driver import Module, primary_context
from weft.device.cuda.facts import GpuFacts, gpu_facts, profile
from weft.device.cuda.nvrtc import Nvrtc, find_nvrtc
from weft.device.cuda.streams import Stream, device_memory, fill, read_back, write
from weft.errors import DeviceError, ToolchainError
from weft.generate.bind import Addresses, BoundCuda
from weft.generate.bind_fused import BoundFused
from weft.generate.cuda import CudaGenerator
from weft.generate.cuda.role.fused import fuse, judge, lc_role, shapes
from weft.generate.cuda.role.persistent import persistent
from weft.generate.cuda.role.role import DeviceRole, RoleSource
from weft.ir.declined import Declined
from weft.kernels.candidate import Problem
from weft.kernels.colocation import BYTES, FusedSource, FusionShape, WorkCounter
from weft.kernels.source import CudaSource

SUITE = "colocate-sanitize"
BINDINGS = ("extra", "two roles", "filling", "in time", "idle")
CO_RUNNER = "co-runner"
CHUNKS = "co-runner, chunks"
NO_LC = "none"
"""In place of a template where no kernel is beside the job."""
LAUNCHES = 4
"""Of a fused kernel, at most: its roles end with LC."""
SILENT_S = 60.0
"""After which a process that has ended no case is ended itself."""
EXPLAINED: tuple[tuple[str, str, str], ...] = (
    (
        "racecheck",
        r"Potential invalid __shared__ (read|write) .* at pair_.* in a block that might have already exited",
        "CTAs meet at mbarriers before one ends, which the tool does not follow; by barrier.cluster the role is clean",
    ),
)
"""(tool, what a report holds as a regular expression, why it is no fault)."""
SHOWN = 600
"""Characters of the first report that a row keeps."""
PRINTED = 1000
"""Reports of a process: the tool is silent about what comes behind them."""
_MEETING = re.compile(r"::w_cluster_meet<(\d+)u, \d+u>\([^;]*\);")
"""Where a role's threads wait for those of the other CTAs of a cluster; how many warps."""


@dataclass(frozen=True, slots=True)
class Case:
    """One fused kernel."""

    template: str
    label: str
    """As `tools.sanitize` calls the kernel of the template."""
    binding: str
    job: str

    def __str__(self) -> str:
        return f"{self.template}/{self.binding}/{self.job}"


@dataclass(frozen=True, slots=True)
class Host:
    """A latency-critical kernel."""

    label: str
    template: str
    problem: Problem
    source: RoleSource
    alone: CudaSource


@cache
def hosts(facts: GpuFacts) -> dict[str, Host]:
    """Kernels of `tools.sanitize` that can be latency-critical roles, by label."""
    found: dict[str, Host] = {}
    maker = CudaGenerator()
    given = {label for label, (_, source) in sanitize.cases(facts).items() if isinstance(source, CudaSource)}
    for label, problem, source in sanitize.sources(facts):
        if label in given:  # no template makes it of a problem
            continue
        roles = maker.roles(problem, source.schedule)
        if isinstance(roles, Declined) or isinstance(lc_role(roles), Declined):
            continue
        kind = dict(source.schedule.params).get("template")
        template = str(kind) if kind else f"loops, {label.rstrip(' 0123456789').split(', ')[-1]}"
        found.setdefault(label, Host(label, template, problem, roles, source))
    return found


def ordered(by_template: Mapping[str, Sequence[tuple[str, Collection[str]]]], names: Sequence[str]) -> list[Case]:
    """All cases: of each template its labels, each with the bindings it can have, with each job in each binding.

    In each pass every template is met once, with another job and in another binding than in the pass before; its labels
    take turns. The first passes, as many as there are jobs, are those of every template and job.
    """
    every: list[Case] = []
    templates = list(by_template)
    for turn in range(len(BINDINGS)):
        for at in range(len(names)):
            for t, template in enumerate(templates):
                labels = by_template[template]
                kinds = [b for b in BINDINGS if any(b in can for _, can in labels)]
                if turn < len(kinds):
                    binding = kinds[(t + at + turn) % len(kinds)]
                    fit = [label for label, can in labels if binding in can]
                    every.append(Case(template, fit[(at + turn) % len(fit)], binding, names[(t + at) % len(names)]))
            if turn == 0:
                every += [Case(NO_LC, NO_LC, binding, names[at]) for binding in (CO_RUNNER, CHUNKS)]
    return list({str(c): c for c in every}.values())


def cases(facts: GpuFacts, only: Sequence[str] = ()) -> list[Case]:
    """In order; `only`: those of which a part between slashes is one of these."""
    by_template: dict[str, list[tuple[str, Collection[str]]]] = {}
    for host in hosts(facts).values():
        by_template.setdefault(host.template, []).append((host.label, bindings_of(host.source.roles[0])))
    every = ordered(by_template, jobs.names())
    return [c for c in every if not only or set(only) & set(str(c).split("/"))]


def bindings_of(lc: DeviceRole) -> list[str]:
    """Those that a role can have: only idle threads can be taken, and a grid in clusters is not filled."""
    unlike = {"idle": not lc.idle_threads, "filling": math.prod(lc.cluster) > 1}
    return [b for b in BINDINGS if not unlike.get(b)]


def shape_of(binding: str, every: Sequence[FusionShape]) -> FusionShape | None:
    """The first shape of a binding."""

    def fits(s: FusionShape) -> bool:
        place = "idle" if binding == "idle" else "extra"
        many = 2 if binding == "two roles" else 1
        return (s.place, s.replicas, s.fill_grid) == (place, many, binding == "filling")

    found = next((s for s in every if fits(s)), None)
    return replace(found, in_time=True) if found is not None and binding == "in time" else found


def kernel_of(case: Case, job: Job, facts: GpuFacts) -> FusedSource | Declined:
    """The kernel of a case, whose entry no other has."""
    entry = f"pair_{hashlib.sha256(str(case).encode()).hexdigest()[:16]}"
    if case.binding == CO_RUNNER:
        return persistent(job.sources, ctas=4, entry=entry, facts=facts)
    if case.binding == CHUNKS:
        return persistent(job.sources, ctas=4, chunk=3, ahead=True, entry=entry, facts=facts)
    source = hosts(facts)[case.label].source
    shape = shape_of(case.binding, shapes(source, job.sources, facts))
    if shape is None:
        return Declined("no shape")
    return fuse(source, job.sources, shape, entry=entry, facts=facts)


def digest(made: FusedSource) -> str:
    """Of a kernel's text."""
    return hashlib.sha256(made.text.encode()).hexdigest()[:12]


def followed(made: FusedSource) -> FusedSource:
    """A kernel as racecheck can follow it: with one more barrier where a role of a cluster meets that of other CTAs.

    Such roles meet at mbarriers, to which each CTA arrives from outside (`w_cluster_meet`); that orders what the
    threads of a CTA do before and afterwards, which the tool does not see: it reports what one thread wrote before and
    another reads afterwards. The barrier of the role's threads in the CTA, right behind the meeting, orders nothing
    that the meeting does not; whatever else is missing is still reported. Raises ValueError where all sixteen barriers
    are in use.
    """
    if _MEETING.search(made.text) is None:
        return made
    used = {number for role in (made.lc, *made.be) for number in role.barriers}
    free = max(set(range(1, 16)) - used, default=0)
    if not free:
        raise ValueError("no barrier is left")

    def both(found: re.Match[str]) -> str:
        return f"{found[0]} w_barrier<{free}, {32 * int(found[1])}>();"

    return replace(made, text=_MEETING.sub(both, made.text))


# ---- in the process that a tool watches


@final
class Alone:
    """A latency-critical kernel with its memory, run once by itself."""

    def __init__(self, host: Host, loader: Loader, stream: Stream, held: ExitStack) -> None:
        graph, chance = host.problem.graph, np.random.default_rng(0)
        source = host.alone

        def room(size: int) -> int:
            return held.enter_context(device_memory(max(size, 1)))

        inputs = []
        for node in graph.inputs:
            data = sanitize.values(graph.type_of(node), chance)
            inputs.append(room(len(data)))
            write(inputs[-1], data)
        self._outputs = [(room(graph.type_of(n).nbytes), graph.type_of(n).nbytes) for n in graph.outputs]
        packed = [room(n) for n in source.packed_bytes]
        work = room(source.workspace_bytes) if source.workspace_bytes else 0
        state = room(source.state_bytes) if source.state_bytes else 0
        if state:
            fill(state, 0, source.state_bytes)
        bound = BoundCuda(source, loader.compiled(source.text, source.flags).path, driver=loader.driver)
        bound.pack(inputs, packed, stream.handle)
        self.at = Addresses(inputs, [a for a, _ in self._outputs], packed, work, state)
        bound.prepare(self.at)(stream.handle)
        stream.synchronise()
        self.results = self.now()

    def now(self) -> list[bytes]:
        """What its outputs hold."""
        return [read_back(a, n) for a, n in self._outputs]

    def forget(self) -> None:
        """Other bytes into the outputs."""
        for a, n in self._outputs:
            fill(a, 0xA5, n)


@final
class Watched:
    """What runs under a tool."""

    def __init__(self, tool: str, loader: Loader, facts: GpuFacts, held: ExitStack) -> None:
        self.tool, self.loader, self.facts, self._held = tool, loader, facts, held
        self._stream = Stream()
        held.callback(self._stream.close)
        self._alone: dict[str, Alone] = {}
        self.told: Row = {}
        """Which kernel the newest case launches."""

    def run(self, case: Case, known: str) -> Row:
        """One case: what was found beside what the tool says. `known`: the digest of a kernel that has a row."""
        self.told = {}
        job = job_of(case.job, small=True)
        made = kernel_of(case, job, self.facts)
        if isinstance(made, Declined):
            return {"declined": made.reason}
        own = digest(made)
        if own == known:
            return {"known": True}
        if self.tool == "racecheck":
            made = followed(made)
        cubin = self.loader.compiled(made.text, made.flags)
        self.told = {"entry": made.entry, "kernel": own, "lc": case.label}
        if case.label != NO_LC:  # launched by itself, too: what the tool says of that is said of the case
            self.told["alone"] = [x.entry for x in hosts(self.facts)[case.label].alone.launches]
        if isinstance(wrong := judge(made, cubin.of(made.entry), self.facts, 0), Declined):
            return {**self.told, "declined": wrong.reason}
        if case.label != NO_LC and case.label not in self._alone:
            self._alone[case.label] = Alone(hosts(self.facts)[case.label], self.loader, self._stream, self._held)
        with ExitStack() as held:
            return {**self.told, **self._launched(case, made, job, held)}

    def _launched(self, case: Case, made: FusedSource, job: Job, held: ExitStack) -> Row:
        at = {}
        for name, data in job.job.buffers().items():
            at[name] = held.enter_context(device_memory(max(1, data.nbytes)))
            write(at[name], np.ascontiguousarray(data).tobytes())
        cubin = self.loader.compiled(made.text, made.flags)
        self.loader.fill(cubin, ("w_be{}",), job.stages)
        counter = held.enter_context(device_memory(BYTES))
        total = sum(made.stages)
        write(counter, WorkCounter.start(made.stages, total).pack())
        alone = self._alone.get(case.label)
        lc = Addresses(()) if alone is None else alone.at
        bound = BoundFused(made, cubin.path, driver=self.loader.driver)
        launch, ran = bound.prepare([lc, *job.addresses(at)], counter), 0
        for _ in range(LAUNCHES):
            if alone is not None:
                alone.forget()
            launch(self._stream.handle)
            self._stream.synchronise()
            now = WorkCounter.unpack(read_back(counter, BYTES))
            ran = now.finished
            if ran != min(now.ticket, now.end):
                return {"wrong": f"{min(now.ticket, now.end)} blocks were drawn, {ran} have ended"}
            if alone is not None and alone.now() != alone.results:
                return {"wrong": "the latency-critical results differ"}
            if ran == total:
                break
        return {"blocks": ran}


def watched(given: Path, report: Path, cache_folder: Path | None) -> None:
    """What a tool watches: the cases of a file one after another, a line in `report` before and after each."""
    nvrtc = find_nvrtc()
    if not isinstance(nvrtc, Nvrtc):
        sys.exit(f"tools.sanitize_pairs: no NVRTC ({nvrtc.reason})")
    told = json.loads(given.read_text())
    with report.open("a") as file, primary_context(), ExitStack() as held:
        facts = gpu_facts(None, calibrate=False)
        loader = Loader(nvrtc, facts.arch, held, cache_folder)
        work = Watched(told["tool"], loader, facts, held)

        def say(row: Row) -> None:
            file.write(json.dumps(row) + "\n")
            file.flush()

        for fields, known in told["cases"]:
            if time.time() > told["until"]:
                break
            case, begun = Case(*fields), time.perf_counter()
            say({"begun": str(case)})
            broken = False
            try:
                row = work.run(case, known)
            except ToolchainError as error:
                row = {"declined": str(error).splitlines()[0][:200]}
            except DeviceError as error:
                row, broken = {**work.told, "wrong": str(error).splitlines()[0][:200]}, True
            say({"case": str(case), "seconds": round(time.perf_counter() - begun, 2), **row})
            if broken:  # nothing more may run in this context
                sys.exit(3)
        say({"begun": sanitize.PLANTED})
        module = Module(nvrtc.compile(sanitize.PLANTED_TEXT, arch=facts.arch).path)
        stream = Stream()
        with device_memory(256) as x:
            module.function(sanitize.PLANTED_ENTRY).launch((1, 1, 1), (64, 1, 1), [x], stream=stream.handle)
            stream.synchronise()  # the tool may turn the fault into an error here, after which nothing runs


# ---- beside it


@dataclass(slots=True)
class Share:
    """A process under a tool, with the cases that it still has to run."""

    tool: str
    left: list[Case]
    process: subprocess.Popen[bytes] | None = None
    folder: Path = Path()
    heard: float = 0.0
    size: int = 0
    number: int = field(default=0)


def explained(tool: str, reports: Sequence[str]) -> str:
    """Why none of the reports is a fault; empty: one is not known."""
    found = []
    for text in reports:
        why = next((why for t, pattern, why in EXPLAINED if t == tool and re.search(pattern, text)), "")
        if not why:
            return ""
        found.append(why)
    return "; ".join(dict.fromkeys(found))


def entries_of(said: Sequence[Row]) -> dict[str, list[str]]:
    """The kernels of each case, the latency-critical one by itself too, and that with the planted fault."""
    found = {str(x["case"]): [str(x["entry"]), *map(str, _list(x.get("alone")))] for x in said if "entry" in x}
    return {**found, sanitize.PLANTED: [sanitize.PLANTED_ENTRY]}


def _list(x: object) -> list[object]:
    return list(x) if isinstance(x, list) else []


def reported(said: Sequence[Row], log: str) -> list[Row]:
    """What a process told of cases that its tool may have reported on: nothing behind the last report it prints."""
    found = sanitize.reports(log, entries_of(said))
    if sum(map(len, found.values())) < PRINTED or sanitize.PLANTED in found:
        return list(said)
    last = max((k for k, x in enumerate(said) if str(x.get("case")) in found), default=-1)
    return list(said[: last + 1])


def rows_of(tool: str, said: Sequence[Row], log: str, why: str) -> tuple[list[Row], bool]:
    """Rows of what a process has told and its tool reported, and whether it found what was planted.

    `why`: it did not run to its end. The case that was under way then failed.
    """
    begun = [str(x["begun"]) for x in said if "begun" in x]
    ended = {str(x["case"]) for x in said if "case" in x}
    reports = sanitize.reports(log, entries_of(said))
    rows: list[Row] = []
    for x in said:
        if "case" not in x or "known" in x:
            continue
        base: Row = {"record": "case", "suite": SUITE, "case": x["case"], "tool": tool}
        if "declined" in x:
            rows.append({**base, "declined": x["declined"], "kernel": x.get("kernel", "")})
            continue
        own = reports.get(str(x["case"]), [])
        row: Row = {**base, "errors": len(own), "explained": explained(tool, own), "seconds": x["seconds"],
                    "lc": x.get("lc", ""), "kernel": x.get("kernel", ""), "blocks": x.get("blocks", 0)}  # fmt: skip
        if own:
            row["said"] = " ".join(own[0].split())[:SHOWN]
        if "wrong" in x:
            row["failed"] = x["wrong"]
        rows.append(row)
    if begun and begun[-1] not in ended and begun[-1] != sanitize.PLANTED:
        rows.append({"record": "case", "suite": SUITE, "case": begun[-1], "tool": tool, "failed": why or "it ended"})
    return rows, bool(reports.get(sanitize.PLANTED))


@final
class Watch:
    """Processes under tools, and the rows that come of them."""

    def __init__(
        self,
        program: str,
        record: Record | None = None,
        known: Mapping[str, str] | None = None,
        cache: Path | None = None,
    ) -> None:
        """`known`: digests of kernels that have a row, by case and tool; `cache`: folder of cubins."""
        self.program, self.record, self.known, self.cache = program, record, known or {}, cache
        self.rows: list[Row] = []
        self.unfound: list[str] = []
        """Tools that did not find what was planted, with what they said."""
        self.late: list[str] = []
        """Cases that were not begun in time."""

    def start(self, share: Share, folder: Path, until: float) -> None:
        """Run what is left of a share."""
        share.number += 1
        share.folder = folder / f"{share.tool}-{id(share)}-{share.number}"
        share.folder.mkdir()
        told = [((c.template, c.label, c.binding, c.job), self.known.get(f"{c}/{share.tool}", "")) for c in share.left]
        (share.folder / "cases.json").write_text(json.dumps({"tool": share.tool, "cases": told, "until": until}))
        log = str(share.folder / "log.txt")
        command = [self.program, "--tool", share.tool, "--log-file", log, "--print-limit", str(PRINTED),
                   sys.executable, "-m", "tools.sanitize_pairs", "--watched", str(share.folder)]  # fmt: skip
        command += ["--cache", str(self.cache)] if self.cache else []
        with (share.folder / "said.txt").open("wb") as file:
            share.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, cwd=sanitize.ROOT, start_new_session=True
            )
        share.heard, share.size = time.monotonic(), 0

    def ended(self, share: Share, why: str) -> None:
        """Take the rows of a process that has ended; what is left of its share are the cases behind them."""
        said = _lines(share.folder / "report.jsonl")
        log = share.folder / "log.txt"
        text = log.read_text(errors="replace") if log.exists() else ""
        told = " ".join((share.folder / "said.txt").read_text(errors="replace").split())[-300:]
        said = reported(said, text)
        rows, found = rows_of(share.tool, said, text, why or told)
        planted = any(x.get("begun") == sanitize.PLANTED for x in said)
        if planted and not found:
            self.unfound.append(f"{share.tool} did not find the planted fault")
        if not said:
            self.unfound.append(f"{share.tool} does not run here: {why or told or 'it says nothing'}")
        for row in rows:
            self.rows.append(row)
            if self.record is not None:
                self.record.add(row)
            else:
                print(json.dumps(row), flush=True)
        over = {str(x.get("case", x.get("begun"))) for x in said}
        left = [c for c in share.left if str(c) not in over]
        if planted:
            self.late += [f"{c}, {share.tool}" for c in left]
        share.left = [] if planted or not said else left
        share.process = None

    def run(self, shares: Sequence[Share], seconds: float) -> None:
        """All shares at once, until they have ended or there is no time."""
        end = time.monotonic() + seconds
        with tempfile.TemporaryDirectory(prefix="weft-sanitize-") as name:
            folder = Path(name)
            until = time.time() + 0.9 * seconds
            for share in shares:
                self.start(share, folder, until)
            while running := [s for s in shares if s.process is not None]:
                time.sleep(0.05)
                for share in running:
                    self._look(share, folder, until, late=time.monotonic() > end)
        self.late += [f"{c}, {s.tool}" for s in shares for c in s.left]

    def _look(self, share: Share, folder: Path, until: float, *, late: bool) -> None:
        assert share.process is not None
        report = share.folder / "report.jsonl"
        size = report.stat().st_size if report.exists() else 0
        if size != share.size:
            share.size, share.heard = size, time.monotonic()
        why = ""
        if share.process.poll() is None:
            why = "not done in time" if late else ""
            if time.monotonic() - share.heard > SILENT_S:
                why = f"no word for {SILENT_S:g} s"
            if not why:
                return
            os.killpg(share.process.pid, signal.SIGKILL)  # the tool's own child too
            share.process.wait()
        self.ended(share, why)
        if share.left and not late and time.time() < until:
            self.start(share, folder, until)


def _lines(path: Path) -> list[Row]:
    found: list[Row] = []
    for text in path.read_text().splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):
            found.append(json.loads(text))
    return found


def shared_out(every: Sequence[Case], tools: Sequence[str], processes: int) -> list[Share]:
    """Every tool has as many processes; their cases take turns, so that all begin at the front."""
    each = max(1, processes // len(tools))
    found = [Share(tool, list(every[k::each])) for k in range(each) for tool in tools]
    return [s for s in found if s.left]


def summary(rows: Sequence[Row], tools: Sequence[str]) -> str:
    """A line for each tool."""
    lines = []
    for tool in tools:
        own = [x for x in rows if x.get("tool") == tool]
        counted = [x for x in own if "declined" not in x and "failed" not in x]
        named = [x for x in counted if x["errors"]]
        open_ = [x for x in named if not x["explained"]]
        lines.append(
            f"{tool}: {len(counted)} fused kernels, {len(counted) - len(named)} clean,"
            f" {len(named) - len(open_)} with explained reports, {len(open_)} with others,"
            f" {sum('failed' in x for x in own)} failed, {sum('declined' in x for x in own)} declined"
        )
    return "\n".join(lines)


def known_of(record: Record | None) -> dict[str, str]:
    """Digests of kernels by case and tool, of rows that neither failed nor hold a report that nothing explains."""
    every = [] if record is None else record.cases
    rows = [x for x in every if "failed" not in x and (not x.get("errors") or x.get("explained"))]
    return {f"{x['case']}/{x['tool']}": str(x.get("kernel", "")) for x in rows}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the tools; the exit status is 1 for a finding that nothing explains, 2 where a tool does not run here."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", default=",".join(sanitize.TOOLS))
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 2, help="at once")
    parser.add_argument("--seconds", type=float, default=540.0, help="no case is begun after nine tenths of so many")
    parser.add_argument("--only", default="", help="templates, bindings and jobs, by commas")
    parser.add_argument("--cache", type=Path, help="folder in which cubins are kept")
    parser.add_argument("--program", default="", help="compute-sanitizer, where it is not found")
    parser.add_argument("--again", action="store_true", help="kernels that have a row, too")
    parser.add_argument("--out", type=Path, help="write the record into this file; `-`: into that of the suite")
    parser.add_argument("--list", action="store_true", help="print the cases in their order; no GPU")
    parser.add_argument("--watched", type=Path, help=argparse.SUPPRESS)
    add_option(parser)
    chosen = parser.parse_args(arguments)
    if chosen.watched is not None:
        watched(chosen.watched / "cases.json", chosen.watched / "report.jsonl", chosen.cache)
        return
    only = [x for x in chosen.only.split(",") if x]
    tools = [x for x in chosen.tools.split(",") if x]
    if not tools or chosen.processes < 1:
        parser.error("--tools and --processes: at least one")
    if chosen.list:
        print("\n".join(map(str, cases(profile("h200"), only))))
        return
    program = chosen.program or shutil.which("compute-sanitizer")
    program = program or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if program is None:
        print("tools.sanitize_pairs: no compute-sanitizer (it comes with the CUDA toolkit): --program", file=sys.stderr)
        sys.exit(2)
    with primary_context():
        every = cases(gpu_facts(None, calibrate=False), only)
    if not every:
        parser.error(f"--only {chosen.only}: no case is named so")
    with ExitStack() as ends:
        record = None
        if chosen.out:
            path = None if str(chosen.out) == "-" else chosen.out
            record = Record(folder_of_gpu(), SUITE, path=path, key=("case", "tool"))
            ends.callback(lambda: None if chosen.left else record.close())
        watch = Watch(program, record, {} if chosen.again else known_of(record), chosen.cache)
        watch.run(shared_out(every, tools, chosen.processes), chosen.seconds)
    print(summary(watch.rows, tools), flush=True)
    for wrong in dict.fromkeys(watch.unfound):
        print(f"tools.sanitize_pairs: {wrong}", file=sys.stderr)
    if chosen.left and watch.late and not watch.unfound:
        print(f"{len(watch.late)} cases were not begun in time", flush=True)
        sys.exit(MORE)
    bad = any("failed" in x or (x.get("errors") and not x.get("explained")) for x in watch.rows)
    sys.exit(2 if watch.unfound else 1 if bad else 0)


if __name__ == "__main__":
    main()
