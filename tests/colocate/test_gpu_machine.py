"""The GPU as what policies run on: what is put on which stream, in what order, and what is said of it."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from tests.colocate.fake_device import FakeDevice, FakeJob, query
from tests.colocate.recorded import constant, samples

from weft.colocate.arrivals import Arrivals, poisson
from weft.colocate.gpu_machine import AHEAD, Form, GpuMachine, Lane, ending
from weft.colocate.live import Ended, LiveBackend, run
from weft.colocate.operating import Prepared, prepare
from weft.colocate.outcome import Outcome, off_lindley_us
from weft.colocate.policies import NAMES, make
from weft.errors import DeviceError
from weft.kernels.samples import SampleRecord
from weft.kernels.scheduling import OFF, Query

US = 1000
HIGH, LOW, COPIES, PART, REST = 1, 2, 3, 4, 5
STEADY = samples(constant(100.0), launch_us=5.0, stop_us=10.0)
SHORT = replace(STEADY, jobs=tuple(replace(j, kernel_us=20.0) for j in STEADY.jobs))
"""With whole kernels that fused steps have room for."""
ALL = [n for n in NAMES if n != "mps"] + ["green:16"]


def machine_of(device: FakeDevice, policy: str, record: SampleRecord = STEADY) -> tuple[GpuMachine, Prepared]:
    """A machine with the variants that the policy is made for."""
    p = prepare(record, policy, "net", "" if policy == "exclusive" else "work", 500 * US)
    lanes = []
    inside = Form(HIGH, None, inside=True)
    for point in p.points:
        kind, us = point.variant.sharing, point.lc.at(0.5)
        if kind == "role":
            lanes.append(Lane(HIGH, query(device, HIGH, us, draws=True), inside))
        elif kind == "partition":
            lanes.append(Lane(PART, query(device, PART, us), Form(REST, device.persistent)))
        elif kind in ("priority", "streams"):
            lanes.append(Lane(HIGH, query(device, HIGH, us), Form(LOW, None)))
        elif kind == "co-runner":
            lanes.append(Lane(HIGH, query(device, HIGH, us), Form(LOW, device.persistent, 96, 40_000)))
        else:
            lanes.append(Lane(HIGH, query(device, HIGH, us)))
    if p.job is None:
        return GpuMachine(device, {"net": lanes}, copies=COPIES), p
    return GpuMachine(device, {"net": lanes}, copies=COPIES, job=FakeJob(device), idle=Form(LOW, device.persistent)), p


def lived(policy: str, arrivals: Arrivals, record: SampleRecord = STEADY) -> tuple[Outcome, FakeDevice]:
    device = FakeDevice()
    machine, p = machine_of(device, policy, record)
    made = make(policy, p.setting)
    return run(made, LiveBackend(machine, [(p, arrivals)], policy=made)), device


@pytest.mark.parametrize("policy", ALL)
def test_every_policy_runs(policy: str) -> None:
    out, device = lived(policy, poisson(4000.0, 300, seed=2))
    assert all(d > 0 for d in out.done_ns) and device.resident == 0
    assert (np.diff(out.begin_ns) >= 0).all()
    running = {"query": 0, "drawing": 0, "persistent": 0, "plain": 0}
    for _, what, value in device.log:
        if what in running:
            running[what] += 1 if value == "begin" else -1
            assert running["query"] + running["drawing"] <= 1 and running["persistent"] <= 1, "one query, the job once"
    assert not any(running.values())
    if policy != "exclusive":
        assert out.work_us > 0
        plain = sum(what == "plain" and value == "end" for _, what, value in device.log)
        assert out.work_us == pytest.approx(out.blocks + 300.0 * plain, abs=1.0)


def test_runs_give_their_events_back() -> None:
    """However many there are, a session has as many events as the longest of them takes."""
    device, taken = FakeDevice(), []
    for seed in range(6):
        machine, p = machine_of(device, "weft")
        with ending(machine):
            made = make("weft", p.setting)
            run(made, LiveBackend(machine, [(p, poisson(4000.0, 60, seed=seed % 2))], policy=made))
        taken.append(device.events)
    assert taken[0] > 0 and taken[-1] == taken[1] and len(device.free) == device.events
    machine, _ = machine_of(device, "weft")

    def interrupted() -> None:
        with ending(machine):
            machine.set_form(0)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert len(device.free) == device.events == taken[-1] and device.stop


@pytest.mark.parametrize("policy", ["tally", "orion", "weft"])
def test_no_query_runs_beside_what_it_did_not_choose(policy: str) -> None:
    """The job on the whole GPU was told to stop when a query begins, unless the variant of the query has it beside."""
    out, device = lived(policy, poisson(4000.0, 200, seed=3))
    queries = iter(out.variants)
    resident, draws, beside_its_end = 0, False, 0
    for _, what, value in device.log:
        if what == "persistent":
            resident += 1 if value == "begin" else -1
        draws = what == "arm" or (draws and what != "stop")
        if (what, value) == ("query", "begin"):
            assert next(queries) > 0 or not (resident and draws)
            beside_its_end += resident
    assert policy == "orion" or beside_its_end > 0, "nor does it wait for the end"


def test_exclusive_is_a_single_queue() -> None:
    out, _ = lived("exclusive", poisson(6000.0, 500, seed=4))
    assert off_lindley_us(out) < 10.0
    service = np.array(out.done_ns) - np.array(out.begin_ns)
    assert np.median(service) == pytest.approx(100 * US, abs=2 * US)


@pytest.mark.parametrize("policy", ["tacker", "aker"])
def test_what_fused_steps_draw_is_counted(policy: str) -> None:
    out, device = lived(policy, poisson(4000.0, 200, seed=5), SHORT)
    assert any(out.variants) and any(what == "drawing" for _, what, _ in device.log)
    assert out.blocks == round(device.blocks) > 0 and device.stop and not device.inside


def with_roles(device: FakeDevice) -> GpuMachine:
    """A machine whose variants 1 and 2 have roles in their kernels, and 3 a co-runner."""
    inside = Form(HIGH, None, inside=True)
    lanes = [
        Lane(HIGH, query(device, HIGH, 100.0)),
        Lane(HIGH, query(device, HIGH, 110.0, draws=True), inside),
        Lane(HIGH, query(device, HIGH, 120.0, draws=True), inside),
        Lane(HIGH, query(device, HIGH, 130.0), Form(LOW, device.persistent)),
    ]
    idle = Form(LOW, device.persistent)
    return GpuMachine(device, {"net": lanes}, copies=COPIES, job=FakeJob(device), idle=idle)


def ended(machine: GpuMachine, n: int) -> None:
    done = 0
    while done < n:
        done += len(machine.ended())


def told_of(device: FakeDevice) -> list[str]:
    """What the device did, the ends left out."""
    return [what for _, what, value in device.log if value != "end"]


def test_roles_draw_during_their_query_and_nothing_else_is_launched() -> None:
    device = FakeDevice()
    machine = with_roles(device)
    machine.launch(queries(1)[0], 1)
    ended(machine, 1)
    device.sleep(1_000_000)
    assert told_of(device) == ["arm", "drawing", "stop"]
    assert machine.close_job().blocks == round(device.blocks) == pytest.approx(110, abs=2)


def test_the_job_is_armed_once_for_queries_with_roles_that_follow_each_other() -> None:
    device = FakeDevice()
    machine = with_roles(device)
    for q, variant in zip(queries(4), (1, 2, 2, 1), strict=True):
        machine.launch(q, variant)
    ended(machine, 4)
    device.sleep(100_000)
    assert told_of(device) == ["arm", *["drawing"] * 4, "stop"]


@pytest.mark.parametrize("others", [(0,), (3,), (0, 1), (3, 1), (1, 0, 3, 2, 0)])
def test_each_form_is_told_to_stop_before_the_next_begins(others: tuple[int, ...]) -> None:
    """Queries with roles, alone and beside a co-runner: `FakeDevice` looks that no two of them draw at a time."""
    device = FakeDevice()
    machine = with_roles(device)
    variants = (1, *others)
    for q, variant in zip(queries(len(variants)), variants, strict=True):
        machine.launch(q, variant)
        if q.number % 2:
            ended(machine, 2)
    ended(machine, len(variants) % 2)
    device.sleep(1_000_000)
    said = [x for x in told_of(device) if x in ("arm", "stop")]
    assert said == ["arm", "stop"] * (len(said) // 2) and device.resident == 0
    assert machine.close_job().blocks == round(device.blocks)


def test_the_whole_gpu_and_plain_kernels_wait_for_roles_and_roles_for_them() -> None:
    device = FakeDevice()
    machine = with_roles(device)
    first, second, third = queries(3)
    machine.set_form(0)
    machine.set_form(OFF)
    machine.launch(first, 1)
    machine.set_form(0)  # while it is under way
    machine.set_form(OFF)
    machine.launch(second, 1)
    machine.kernels(300.0)
    machine.launch(third, 2)
    ended(machine, 3)
    device.sleep(2_000_000)
    assert marks(device).count("drawing end") == 3 and marks(device).count("plain end") == 1
    plain = marks(device).index("plain begin")
    assert marks(device)[plain - 1] == "drawing end" and marks(device)[plain + 2] == "drawing begin"
    assert machine.close_job().blocks == round(device.blocks)


def test_who_closes_the_job_waits_for_queries_that_draw() -> None:
    device = FakeDevice()
    machine = with_roles(device)
    machine.launch(queries(1)[0], 1)
    device.sleep(50_000)
    assert machine.close_job().blocks == round(device.blocks) and device.now >= 110_000


def test_a_stop_of_roles_comes_before_the_job_is_armed_anew() -> None:
    """However late the stream of copies is: else it would end what begins next."""
    device = FakeDevice()
    machine = with_roles(device)
    machine.launch(queries(1)[0], 1)
    device.work(COPIES, 900_000, "copies")
    ended(machine, 1)
    machine.set_form(0)
    device.sleep(3_000_000)
    assert [x for x in told_of(device) if x != "copies"] == ["arm", "drawing", "stop", "arm", "persistent"]
    assert device.resident == 1 and not device.stop
    machine.close_job()


def queries(n: int) -> list[Query]:
    return [Query("net", i, 0, 500 * US) for i in range(n)]


def test_a_job_beside_a_query_begins_and_ends_with_it() -> None:
    device = FakeDevice()
    form = Form(LOW, device.persistent, 96, 40_000)
    machine = GpuMachine(
        device, {"net": [Lane(HIGH, query(device, HIGH, 100.0)), Lane(HIGH, query(device, HIGH, 110.0), form)]},
        copies=COPIES, job=FakeJob(device), idle=Form(LOW, device.persistent),
    )  # fmt: skip
    first, second = queries(2)
    machine.launch(first, 1)
    machine.launch(second, 0)
    device.sleep(400_000)
    kinds = [(what, value) for _, what, value in device.log]
    assert kinds[:3] == [("query", "begin"), ("arm", (96, 40_000)), ("persistent", "begin")]
    assert kinds[3:6] == [("query", "end"), ("stop", None), ("query", "begin")], "behind what it was for"
    assert kinds[6] == ("persistent", "end"), "which the next one does not wait for"
    first_ended, second_ended = _two(machine)
    assert not first_ended.stops and second_ended.stops
    assert machine.close_job().blocks == round(device.blocks) > 0


def _two(machine: GpuMachine) -> list[Ended]:
    found: list[Ended] = []
    while len(found) < 2:
        found += machine.ended()
    return found


def test_a_query_that_finds_the_job_there_is_told_of() -> None:
    device = FakeDevice()
    machine, _ = machine_of(device, "tally")
    machine.set_form(0)
    device.sleep(50_000)
    machine.set_form(OFF)
    first, second = queries(2)
    machine.launch(first, 0)
    device.sleep(20_000)
    machine.launch(second, 0)
    assert [x.stops for x in _two(machine)] == [True, False]


def test_a_stop_is_not_lost_behind_a_late_begin() -> None:
    """On, off and on again at once: each stop is told behind what it is for."""
    device = FakeDevice()
    machine, _ = machine_of(device, "tally")
    for form in (0, OFF, 0, OFF, 0, OFF):
        machine.set_form(form)
    device.sleep(1_000_000)
    marks = [what for _, what, value in device.log if what in ("arm", "stop") or value == "begin"]
    assert marks == ["arm", "persistent", "stop"] * 3 and device.resident == 0
    assert machine.close_job().blocks == round(device.blocks)


def test_plain_kernels_come_before_what_is_launched_later() -> None:
    device = FakeDevice()
    machine, _ = machine_of(device, "serial")
    machine.kernels(1000.0)
    assert machine.kernels_run()
    machine.launch(queries(1)[0], 0)
    while not machine.ended():
        pass
    kinds = [what for _, what, value in device.log if value == "begin"]
    assert kinds == ["plain", "plain", "plain", "query"], "of 300 us each"
    assert not machine.kernels_run() and machine.close_job().work_us == 900.0


def test_kernels_are_fed_while_the_thread_sleeps() -> None:
    device = FakeDevice()
    machine, _ = machine_of(device, "priority")
    machine.set_form(1)
    end = device.now + 30_000_000
    while device.now < end:
        machine.pause(end + 1_000_000)
    busy = sum(300 * US for _, what, value in device.log if (what, value) == ("plain", "end"))
    assert busy > 0.95 * 30_000_000 and len(device.queues[LOW]) <= 2 * AHEAD
    assert machine.close_job().work_us >= busy / 1e3


def test_events_are_used_again() -> None:
    device = FakeDevice()
    machine, _ = machine_of(device, "exclusive")
    for q in queries(200):
        machine.launch(q, 0)
        while not machine.ended():
            machine.pause(device.now + 1_000_000)
    assert device.events < 10


def test_what_does_not_end_is_told() -> None:
    device = FakeDevice(stop_ns=1 << 50)
    machine, _ = machine_of(device, "tally")
    machine.set_form(0)
    device.sleep(100_000)
    with pytest.raises(DeviceError, match="runs on after 10 s"):
        machine.close_job()


@pytest.mark.parametrize(("job", "idle", "form"), list(itertools.product([False, True], repeat=3)))
def test_a_job_and_its_forms_belong_together(job: bool, idle: bool, form: bool) -> None:
    device = FakeDevice()
    lanes = {"net": [Lane(HIGH, query(device, HIGH, 1.0), Form(LOW, None) if form else None)]}
    given = {"job": FakeJob(device) if job else None, "idle": Form(LOW, device.persistent) if idle else None}
    if (job and idle) or not (job or idle or form):
        assert GpuMachine(device, lanes, copies=COPIES, **given).close_job().blocks == 0  # type: ignore[arg-type]
        return
    with pytest.raises(ValueError, match="a form where no query runs"):
        GpuMachine(device, lanes, copies=COPIES, **given)  # type: ignore[arg-type]


def both(device: FakeDevice, form: Form) -> GpuMachine:
    """A machine whose variant 1 has a form of the job beside it, on the same stream as variant 0, and 2 on another."""
    lanes = [
        Lane(HIGH, query(device, HIGH, 100.0)),
        Lane(HIGH, query(device, HIGH, 110.0), form),
        Lane(PART, query(device, PART, 120.0)),
    ]
    idle = Form(LOW, device.persistent)
    return GpuMachine(device, {"net": lanes}, copies=COPIES, job=FakeJob(device), idle=idle)


def marks(device: FakeDevice) -> list[str]:
    return [f"{what} {value}" for _, what, value in device.log if value in ("begin", "end")]


def test_a_job_does_not_begin_beside_a_query_of_another_variant() -> None:
    """That query may need what the job would take: it would wait for the job's end, and that for the query's."""
    device = FakeDevice()
    machine = both(device, Form(LOW, device.persistent, 96, 40_000))
    first, second = queries(2)
    machine.launch(first, 0)
    machine.launch(second, 1)
    device.sleep(1_000_000)
    assert marks(device)[:2] == ["query begin", "query end"]
    assert set(marks(device)[2:4]) == {"persistent begin", "query begin"}
    assert len(machine.ended()) == 2 and machine.close_job().blocks > 0


def test_a_job_stays_from_query_to_query_of_one_variant() -> None:
    device = FakeDevice()
    machine = both(device, Form(LOW, device.persistent))
    asked = queries(6)
    done = 0
    for q in asked:
        machine.launch(q, 1)
        while q.number - done >= 1:
            done += len(machine.ended())
    while done < 6:
        done += len(machine.ended())
    device.sleep(100_000)
    assert marks(device).count("persistent begin") == 1 and marks(device)[-1] == "persistent end"
    assert device.resident == 0, "no query is in flight: it is told to stop"


def test_kernels_of_a_job_beside_a_query_run_once() -> None:
    device = FakeDevice()
    machine = both(device, Form(LOW, None))
    machine.launch(queries(1)[0], 1)
    while not machine.ended():
        pass
    device.sleep(10_000_000)
    machine.ended()
    device.sleep(10_000_000)
    assert marks(device).count("plain begin") == 1 and machine.close_job().work_us == 300.0


@pytest.mark.parametrize("variant", [1, 2])
def test_whatever_follows_waits_for_plain_kernels(variant: int) -> None:
    device = FakeDevice()
    machine = both(device, Form(LOW, device.persistent))
    machine.kernels(300.0)
    machine.launch(queries(1)[0], variant)
    device.sleep(2_000_000)
    assert marks(device)[:2] == ["plain begin", "plain end"] and "query end" in marks(device)
    machine.ended()
    machine.set_form(0)
    machine.set_form(OFF)
    machine.kernels(300.0)
    machine.set_form(0)
    device.sleep(2_000_000)
    running = 0
    for mark in marks(device):
        what, when = mark.split()
        running += (1 if when == "begin" else -1) * (what in ("plain", "persistent"))
        assert running <= 1, "the job runs twice at a time"
    machine.close_job()


def test_a_query_is_timed_from_the_launch_of_its_graph() -> None:
    """The event before it happens at once on a stream that is idle, while the host still launches."""
    device = FakeDevice(look_ns=40_000)
    machine = both(device, Form(LOW, None))
    machine.launch(queries(1)[0], 0)
    found = list(machine.ended())
    while not found:
        found += machine.ended()
    assert 100 * US <= found[0].done_ns - found[0].begin_ns <= 100 * US + 2 * 40_000
