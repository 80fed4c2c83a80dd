"""Faults beside a model with a latency target: what each does to the queries, to the job's count and to the next run.

    python -m benchmarks.colocate_faults [--times 50] [--only ROW,...] [--seconds 540] [--out FILE|-]
    python -m benchmarks.colocate_faults --device cuda --plans DIR [...]

On the host queries are launched on streams of the host's own (`tests/colocate/fake_device.py`), by a virtual clock or,
beside processes, by the real one; jobs in other processes are real. On a GPU it is resnet50 at batch 1 with the plans
that `benchmarks.gpu_colocate --prepare DIR` compiled, the kernels of `mriq`, and a process that multiplies matrices.

A fault counts as right where every query has ended once, or the run was ended by the error that is due to it; where the
job's count is exact; and where the next run on the same machine is right. `again_s` is from the fault to the job's next
unit, or to the end of the next run's first query. Rows are kept as they come: a second call goes on.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from tests.colocate.fake_device import FakeDevice, FakeJob, RealTimeDevice, query
from tests.colocate.recorded import constant, samples

from benchmarks.harness.faults import WrongError, need
from benchmarks.harness.left import Left, add_option
from benchmarks.harness.record import Record, Row, folder_of_gpu
from weft.colocate.arrivals import Arrivals, poisson
from weft.colocate.gpu_machine import Form, GpuMachine, Lane, ending
from weft.colocate.job import digest, parse_job, resume, save_progress
from weft.colocate.live import LiveBackend, Machine, run
from weft.colocate.operating import Prepared, prepare
from weft.colocate.outcome import Outcome
from weft.colocate.policies import make
from weft.colocate.process_job import ProcessJob
from weft.colocate.process_machine import ProcessMachine
from weft.colocate.process_words import Confinement
from weft.errors import ArtifactError, DeviceError, WeftError
from weft.kernels.scheduling import JobProgress

QUERIES = 120
HIGH, LOW, COPIES = 1, 2, 3
STEADY = samples(constant(300.0), launch_us=5.0, stop_us=10.0)
TOML = (
    'name = "work"\nkind = "process"\nfile = "work.py"\nprogress = "p.json"\nsave_s = 0.05\nhang_s = 0.3\n'
    'memory = "1GiB"\n'
)
MISPREDICTED = 2
"""Times as long as it is known to be a variant takes."""
UNIT = """
import json, os, resource, time
GPU = {gpu}
if GPU:
    import torch
    x = torch.ones(1024, 1024, device="cuda")
done = []

def unit(number):
    assert number == len(done)
    while os.path.exists(__file__ + ".hang"):
        time.sleep(0.01)
    if os.path.exists(__file__ + ".raise"):
        raise OSError("no data")
    if os.path.exists(__file__ + ".memory"):
        if GPU:
            torch.empty(2 << 30, dtype=torch.uint8, device="cuda")
        resource.setrlimit(resource.RLIMIT_AS, (1 << 20, resource.getrlimit(resource.RLIMIT_AS)[1]))
        bytearray(2 << 30)
    if GPU:
        x @ x
    else:
        time.sleep(0.0005)
    yield
    done.append(number)

def save(path):
    with open(path, "w") as file:
        json.dump(done, file)

def load(path):
    with open(path) as file:
        done[:] = json.load(file)
"""
"""Its state is what it has done."""


@dataclass
class World:
    """What runs on a device: a machine for each run, and what a policy is told."""

    machine: Callable[[], Machine]
    prepared: Prepared
    rate_hz: float
    blocks: Callable[[], int] | None = None
    """Of the job in all, counted by the device itself."""
    jump: Callable[[int], None] | None = None
    """Let the clock go on by so many nanoseconds; None: by standing still."""
    job: ProcessJob | None = None
    folder: Path = Path()

    def arrivals(self, seed: int) -> Arrivals:
        return poisson(self.rate_hz, QUERIES, seed=seed)

    def run(self, seed: int, machine: Machine | None = None) -> Outcome:
        """All of a run's queries, checked."""
        own, p = machine or self.machine(), self.prepared
        with ending(own):
            policy = make(p.policy, p.setting)
            backend = LiveBackend(own, [(p, self.arrivals(seed))], policy=policy)
            out = run(policy, backend)
        whole(out, QUERIES)
        return out


def whole(out: Outcome, count: int) -> None:
    """So many queries have ended, each once and one after the other; no other has."""
    done = list(out.done_ns)
    need(all(d > 0 for d in done[:count]), "a query is lost")
    need(not any(d > 0 for d in done[count:]), "a query has ended that was not sent")
    need(all(a <= b for a, b in zip(out.begin_ns, out.begin_ns[1:count], strict=False)), "queries out of order")


MOST_BELIEVED = 5
"""Queries by a variant until it is known that it takes longer, three of five and two in flight, at most; those that met
a job that was told to stop and still ran say nothing of it, and do not count."""
Fault = Callable[[World, random.Random], float]
"""Injects one; seconds until all goes on. Raises WrongError."""


def expect(kind: type[BaseException], says: str, what: Callable[[], object]) -> None:
    try:
        what()
    except kind as error:
        need(says in str(error), f"it says {error}")
        return
    raise WrongError(f"no {kind.__name__}")


def again(world: World, seed: int) -> float:
    """The next run is right; seconds to the end of its first query."""
    begun = time.perf_counter()
    out = world.run(seed)
    return time.perf_counter() - begun - (out.span_ns - out.done_ns[0]) / 1e9 if world.jump is None else 0.0


def counted(world: World) -> None:
    """What the machine says of the job's blocks is what the device has, which counts in fractions."""
    if world.blocks is not None:
        before = world.blocks()
        out = world.run(0)
        need(
            abs(out.blocks - (world.blocks() - before)) <= 1, f"{out.blocks} blocks of {world.blocks() - before} count"
        )


def interrupt(world: World, rng: random.Random) -> float:
    """Ctrl-C at some call of the machine."""
    machine, left = world.machine(), [rng.randint(1, 4 * QUERIES)]
    for name in ("ended", "launch", "set_form", "sent"):
        call = getattr(machine, name)

        def called(*args: Any, call: Callable[..., Any] = call) -> Any:
            left[0] -= 1
            if left[0] == 0:
                raise KeyboardInterrupt
            return call(*args)

        setattr(machine, name, called)
    expect(KeyboardInterrupt, "", lambda: world.run(rng.randrange(1 << 30), machine))
    seconds = again(world, rng.randrange(1 << 30))
    counted(world)
    return seconds


def sender(world: World, rng: random.Random) -> float:
    """What sends queries ends."""
    machine, at, p = world.machine(), rng.randrange(QUERIES), world.prepared
    sent = machine.sent

    def stopped() -> int:
        count = sent()
        if count > at and world.jump is not None:
            world.jump(50_000)  # a virtual clock goes on by looks alone
        return min(at, count)

    machine.sent = stopped  # type: ignore[method-assign]
    policy = make(p.policy, p.setting)
    backend = LiveBackend(machine, [(p, world.arrivals(rng.randrange(1 << 30)))], policy=policy)

    def ran() -> None:
        with ending(machine):
            run(policy, backend)

    expect(DeviceError, f"query {at} was not sent", ran)
    whole(backend.outcome, at)
    return again(world, rng.randrange(1 << 30))


def forward(world: World, rng: random.Random) -> float:
    """The clock jumps, or the process stands still for a while."""
    machine, left, ns = world.machine(), [rng.randint(1, 2 * QUERIES)], rng.choice((10**7, 10**8, 10**9))
    ended = machine.ended

    def looked() -> Any:
        left[0] -= 1
        if left[0] == 0:
            if world.jump is not None:
                world.jump(ns)
            else:
                time.sleep(ns / 1e9)
        return ended()

    machine.ended = looked  # type: ignore[method-assign]
    world.run(rng.randrange(1 << 30), machine)
    return again(world, rng.randrange(1 << 30))


def backward(world: World, rng: random.Random) -> float:
    """The clock goes back."""
    machine, left = world.machine(), [rng.randint(3, 4 * QUERIES)]
    now, ns = machine.now_ns, rng.choice((10**8, 10**10))

    def looked() -> int:
        left[0] -= 1
        return now() - ns * (left[0] <= 0)

    machine.now_ns = looked  # type: ignore[method-assign]
    expect(DeviceError, "clock went back", lambda: world.run(rng.randrange(1 << 30), machine))
    return again(world, rng.randrange(1 << 30))


def hangs_inside(world: World, rng: random.Random) -> float:
    """A persistent kernel that does not end, behind all queries."""
    machine = world.machine()
    device = cast("FakeDevice", cast("Any", machine)._device)
    was, device.stop_ns = device.stop_ns, 10**12
    expect(DeviceError, "runs on after 10 s", lambda: world.run(rng.randrange(1 << 30), machine))
    device.stop_ns = was
    device.sleep(10**6)
    return again(world, rng.randrange(1 << 30))


def full(world: World, rng: random.Random) -> float:  # noqa: ARG001 - no query is asked
    """No byte more can be written while progress is saved."""
    spec = parse_job(TOML)
    with tempfile.TemporaryDirectory() as name:
        path, first = Path(name) / "p.json", JobProgress(digest(spec), rng.randint(0, 9), 0, 0)
        save_progress(path, first)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        was = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        begun = time.perf_counter()
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (rng.randint(0, 60), hard))
            expect(ArtifactError, "cannot be written", lambda: save_progress(path, replace(first, passes=10)))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            signal.signal(signal.SIGXFSZ, was)
        need(resume(path, spec) == first, "what was saved is lost")
        need([x.name for x in Path(name).iterdir()] == ["p.json"], "half a file is left")
        save_progress(path, replace(first, passes=10))
        return time.perf_counter() - begun


def mispredicted(world: World, rng: random.Random) -> float:
    """Variants take twice as long as they are known to, from some query on: by and by none of them is used."""
    machine, left = world.machine(), [rng.randint(QUERIES // 4, QUERIES // 2)]
    lanes = cast("dict[str, list[Lane]]", cast("Any", machine)._lanes)
    for own in lanes.values():
        for k, lane in enumerate(own[1:], 1):

            def launched(once: Callable[[], None] = lane.launch) -> None:
                for _ in range(MISPREDICTED if left[0] <= 0 else 1):
                    once()

            own[k] = replace(lane, launch=launched)
    launch = machine.launch

    def counted_launch(*args: Any) -> None:
        left[0] -= 1
        launch(*args)

    machine.launch = counted_launch  # type: ignore[method-assign,assignment]
    ended, stops = machine.ended, list[bool]()

    def noted() -> Any:
        found = ended()
        stops.extend(x.stops for x in found)
        return found

    machine.ended = noted  # type: ignore[method-assign]
    at = left[0]
    out = world.run(rng.randrange(1 << 30), machine)
    most = MOST_BELIEVED * (len(world.prepared.points) - 1)
    used = sum(v > 0 and not unsure for v, unsure in zip(out.variants[at:], stops[at:], strict=True))
    need(any(v > 0 for v in out.variants[:at]), "no variant was used before")
    need(used <= most, f"{used} queries by variants that take twice as long, at most {most} are due")
    return again(world, rng.randrange(1 << 30))


def until(holds: Callable[[], bool], limit_s: float = 120.0) -> float:
    begun = time.perf_counter()
    while not holds():
        need(time.perf_counter() - begun < limit_s, "it does not come")
        time.sleep(0.0005)
    return time.perf_counter() - begun


def of_process(what: str, world: World, rng: random.Random) -> float:
    """A fault of the job's process while queries run."""
    assert world.job is not None
    job, mark = world.job, world.folder / f"work.py.{what}"
    until(lambda: job.is_ready)
    machine, before, left = world.machine(), job.lives, [rng.randint(1, QUERIES)]
    ended = machine.ended

    def looked() -> Any:
        found = ended()
        left[0] -= len(found)
        if left[0] <= 0 and left[0] > -(10**9):
            left[0] = -(10**9)
            if what == "kill":
                os.kill(job.pid, signal.SIGKILL)
            else:
                mark.write_bytes(b"")
        return found

    machine.ended = looked  # type: ignore[method-assign]
    world.run(rng.randrange(1 << 30), machine)
    job.go(Confinement())
    until(lambda: job.lives > before)
    if what == "memory":
        need("emory" in job._words.told(), f"it says {job._words.told()}")
    mark.unlink(missing_ok=True)
    seconds = until(lambda: job.is_ready)
    units = job.units
    seconds += until(lambda: job.units > units)
    job.pause()
    until(lambda: not job.works)
    need(not job.failure, job.failure)
    return seconds


def of_supervisor(world: World, rng: random.Random) -> float:
    """What starts the job's process dies: the job is over, and no query knows."""
    assert world.job is not None
    job, machine, left = world.job, world.machine(), [rng.randint(1, QUERIES)]
    until(lambda: job.is_ready)
    ended = machine.ended

    def looked() -> Any:
        found = ended()
        left[0] -= len(found)
        if left[0] <= 0:
            left[0] = 10**9
            job._process.kill()
        return found

    machine.ended = looked  # type: ignore[method-assign]
    world.run(rng.randrange(1 << 30), machine)
    until(job.is_done)
    need("ended with -9" in job.failure, f"it says {job.failure}")
    return 0.0


ROWS: dict[str, tuple[str, Fault]] = {
    "Ctrl-C": ("kernels", interrupt),
    "the sender dies": ("kernels", sender),
    "the clock jumps": ("kernels", forward),
    "the clock goes back": ("kernels", backward),
    "a persistent kernel hangs": ("host", hangs_inside),
    "a variant is mispredicted": ("kernels", mispredicted),
    "the disk is full": ("kernels", full),
    "the job's memory is full": ("process", partial(of_process, "memory")),
    "the job raises": ("process", partial(of_process, "raise")),
    "the job hangs": ("process", partial(of_process, "hang")),
    "the job's process dies": ("process", partial(of_process, "kill")),
    "what starts it dies": ("alone", of_supervisor),
}
"""By the world that each needs; `alone`: a new one each time."""


@contextmanager
def host_kernels() -> Iterator[World]:
    device = FakeDevice(look_ns=2_000)
    p = prepare(STEADY, "weft", "net", "work", 1_500_000)

    def machine() -> GpuMachine:
        lanes = []
        for point in p.points:
            form = None if point.variant.number == 0 else Form(LOW, device.persistent)
            lanes.append(Lane(HIGH, query(device, HIGH, point.lc.at(0.5)), form))
        idle = Form(LOW, device.persistent)
        before = device.blocks
        job = FakeJob(device)
        job.blocks = lambda: round(device.blocks - before)  # type: ignore[method-assign]
        return GpuMachine(device, {"net": lanes}, copies=COPIES, job=job, idle=idle)

    def jump(ns: int) -> None:
        device.now += ns

    yield World(machine, p, 1500.0, lambda: round(device.blocks), jump)


@contextmanager
def process_of(folder: Path, *, gpu: bool) -> Iterator[ProcessJob]:
    (folder / "work.py").write_text(UNIT.format(gpu=gpu))
    (folder / "job.toml").write_text(TOML)
    with ExitStack() as held:
        job = ProcessJob(parse_job(TOML), folder, held=held, device="cuda" if gpu else "cpu")
        yield job


@contextmanager
def host_process() -> Iterator[World]:
    with tempfile.TemporaryDirectory(prefix="weft-faults-") as name, process_of(Path(name), gpu=False) as job:
        job.measure()
        device = RealTimeDevice()
        p = prepare(STEADY, "priority", "net", "work", 1_500_000)
        lanes = [Lane(HIGH, query(device, HIGH, x.lc.at(0.5))) for x in p.points]

        def machine() -> ProcessMachine:
            alone = GpuMachine(device, {"net": lanes}, copies=COPIES)
            return ProcessMachine(alone, job.anew(), {"net": [None, *(Confinement() for _ in lanes[1:])]})

        yield World(machine, p, 800.0, job=job, folder=Path(name))


@contextmanager
def gpu_world(plans: Path, budget: float, kind: str) -> Iterator[World]:
    """Resnet50 at batch 1 beside `mriq`, or beside a process."""
    from benchmarks.co_runner.plans import compiled, posed
    from benchmarks.gpu_colocate import spec_of
    from weft.colocate.gpu import BUDGET, GpuSession, Plans
    from weft.colocate.kernel_job import KernelJob
    from weft.device.cuda.driver import primary_context
    from weft.device.cuda.facts import gpu_facts

    torch.zeros(1, device="cuda")
    with primary_context(), ExitStack() as held:
        facts, model = gpu_facts(None, calibrate=False), posed("resnet50", 1)
        made = [compiled(model, b, plans, budget) for b in (None, BUDGET)]
        for plan in made:
            for static, given in zip(plan.static_inputs, model.inputs, strict=True):
                static.copy_(given)
        session = GpuSession("net", Plans(*made), facts, held=held)
        job: ProcessJob | None = None
        folder = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="weft-faults-")))
        if kind == "kernels":
            spec, place = spec_of("mriq")
            session.add_job(KernelJob(spec, place, facts=facts, held=held))
        else:
            job = held.enter_context(process_of(folder, gpu=True))
            session.add_job(job)
        modes = ("green36",) if kind == "kernels" else ("priority",)
        record, _ = session.record(modes, commit="", driver=facts.driver, queries=100)
        policy = "weft" if kind == "kernels" else "priority"
        p = prepare(record, policy, "net", record.jobs[0].name, 5_000_000)
        names = [x.variant.name for x in p.points[1:]]
        rate = 0.3e6 / record.models[0].solo.at(0.5)
        yield World(lambda: session.machine(names), p, rate, job=job, folder=folder)


@contextmanager
def world_of(kind: str, chosen: argparse.Namespace) -> Iterator[World]:
    if chosen.device == "cuda":
        with gpu_world(chosen.plans, chosen.budget, "kernels" if kind == "kernels" else "process") as world:
            yield world
        return
    with host_kernels() if kind in ("kernels", "host") else host_process() as world:
        yield world


def injected(name: str, count: int, seed: int, chosen: argparse.Namespace, end: float) -> Row:
    """A row of the table."""
    kind, fault = ROWS[name]
    rng, seconds, wrong = random.Random(seed), list[float](), list[str]()
    with ExitStack() as held:
        world = None if kind == "alone" else held.enter_context(world_of(kind, chosen))
        for _ in range(count):
            if time.perf_counter() > end:
                break
            try:
                with ExitStack() as own:
                    seconds.append(fault(world or own.enter_context(world_of(kind, chosen)), rng))
            except (WrongError, WeftError) as error:
                wrong.append(str(error).splitlines()[0][:200])
        if world is not None and world.job is not None and not wrong:
            world.job.finish()
            done = world.job.progress().passes
            state = world.folder / "p.json.states" / f"{done}.state"
            if state.read_text() != str(list(range(done))):
                wrong.append("a unit is lost or doubled")
    row: Row = {
        "record": "case", "suite": "colocate-faults", "case": name, "injected": len(seconds) + len(wrong),
        "right": len(seconds), "wrong": wrong[:5],
    }  # fmt: skip
    if seconds and max(seconds) > 0:
        row |= {"again_s": round(statistics.median(seconds), 3), "again_most_s": round(max(seconds), 3)}
    return row


def main(arguments: Sequence[str] | None = None) -> None:
    """Inject, print and record; the exit status is 1 where one was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--plans", type=Path, metavar="DIR", help="of `benchmarks.gpu_colocate --prepare`")
    parser.add_argument("--budget", type=float, default=20.0, help="seconds of tuning of a plan, as it was prepared")
    parser.add_argument("--times", "--count", dest="count", type=int, default=50, help="faults of each row")
    parser.add_argument("--only", default="", help="rows, by commas")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=540.0, help="nothing is begun after so many")
    parser.add_argument("--out", type=Path, help="write the record into this file; `-`: into that of the suite")
    add_option(parser)
    chosen = parser.parse_args(arguments)
    end = time.perf_counter() + chosen.seconds
    names = [x for x in chosen.only.split(",") if x] or list(ROWS)
    if unknown := [n for n in names if n not in ROWS]:
        parser.error(f"--only: no row {unknown[0]!r}; there are {', '.join(ROWS)}")
    if chosen.device == "cuda" and chosen.plans is None:
        parser.error("--device cuda needs --plans DIR")
    record = None
    if chosen.out:
        path = None if str(chosen.out) == "-" else chosen.out
        record = Record("cpu" if chosen.device == "cpu" else folder_of_gpu(), "colocate-faults", path=path)
    bad, left = 0, Left(record, end, only=chosen.left, good=lambda row: not row.get("wrong"))
    for name in names:
        if chosen.device == "cuda" and ROWS[name][0] == "host":
            print(f"{name}: not injected on a GPU: its context would be lost", flush=True)
            continue
        if not left.begins(case=name):
            continue
        row = injected(name, chosen.count, chosen.seed, chosen, left.until)
        bad += bool(row["wrong"])
        print(row, flush=True)
        if record is not None:
            record.add(row)
    sys.exit(left.status(bad or (record is not None and record.failed)))


if __name__ == "__main__":
    main()
