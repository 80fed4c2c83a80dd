"""A best-effort job beside a served model: on a machine that computes on this processor, with the real protocol."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from tests.colocate.recorded import constant, samples
from tests.serve.conftest import Saved
from tests.serve.fakes import Launcher, ThreadWorker, answer, query, signature
from tests.serve.test_process import right, special, wait_for, works

import weft
from weft.colocate.bundle import MANIFEST, PLAN, read_bundle, write_bundle
from weft.colocate.live import Ended, JobWork
from weft.colocate.operating import prepare
from weft.colocate.policies import make
from weft.colocate.policy import drive
from weft.colocate.serving import Served as Beside_
from weft.colocate.serving import ServingBackend
from weft.errors import ArtifactError, DeviceError, OptionError, WeftError
from weft.kernels.scheduling import OFF, JobProgress, Query
from weft.serve import ServeOptions, Server, beside, metrics, worker
from weft.serve.backend import JobState
from weft.serve.beside import ChannelInbox, RingIo, _Telling
from weft.serve.channel import DONE, RUN, Channel, Kind
from weft.serve.errors import InferenceFailedError, LostDeviceError
from weft.serve.layout import places
from weft.serve.process import ProcessBackend
from weft.serve.ring import Ring
from weft.serve.served import Served
from weft.serve.settings import found_in

ROWS = 4
RECORD = samples(constant(100.0))


class HostMachine:
    """Queries compute `answer` at once, on the arrays of a ring; the job counts how often it was begun."""

    def __init__(self, ring: Ring, die: Callable[[], None]) -> None:
        self._ring, self._die = ring, die
        self._flying: list[Ended] = []
        self.form, self.begun, self.closed = OFF, 0, False

    def now_ns(self) -> int:
        return time.perf_counter_ns()

    def launch(self, query: Query, variant: int) -> None:
        (x, n), (y,) = self._ring.inputs(query.number, 0), self._ring.outputs(query.number, 0)
        if (n == -3).any():
            self._die()
            raise LostDeviceError(problem="cuda:0 answers no more")
        began = self.now_ns()
        y[...] = answer(x, n)
        self._flying.append(Ended(began, self.now_ns(), 0, began))

    def ended(self) -> Sequence[Ended]:
        found, self._flying = self._flying, []
        return found

    def set_form(self, form: int) -> None:
        self.begun += form != OFF
        self.form = form

    def kernels(self, us: float) -> None:
        self.begun += 1

    def kernels_run(self) -> bool:
        return False

    def job_is_done(self) -> bool:
        return False

    def pause(self, until_ns: int) -> None:
        pass

    def rest_ns(self) -> int:
        return 10**9

    def close_job(self) -> JobWork:
        self.closed = True
        return JobWork(0, 0.0)


class HostBeside:
    """What a worker runs of a bundle, without a GPU."""

    def __init__(self, die: Callable[[], None], refuse: WeftError | None) -> None:
        self.signature = signature((ROWS,))
        self._die, self._refuse = die, refuse
        self.opened = self.closed = False

    def warm_up(self) -> None:
        pass

    def open(self, ring: Ring, channel: Channel) -> Callable[[], None]:
        if self._refuse is not None:
            raise self._refuse
        self.opened = True
        prepared = prepare(RECORD, "weft", "net", "work", 500_000_000)
        policy = make("weft", prepared.setting)
        machine = HostMachine(ring, self._die)
        names = [p.variant.name for p in prepared.points]

        def tell(served: Beside_, cap: int) -> None:
            variants = dict(zip(names, served.variants, strict=True))
            told = {"job": "work", "done": False, "passes": machine.begun, "queries": served.queries}
            with contextlib.suppress(OSError):
                channel.send_json(Kind.JOB, {**told, "late": served.late, "cap": cap, "variants": variants})

        inbox = ChannelInbox(channel, ring, tell=tell)
        return lambda: drive(policy, ServingBackend(cast("Any", machine), prepared, inbox, policy=policy))

    def close(self) -> None:
        self.closed = True


class Bundles(Launcher):
    """Workers of a bundle; the one that is not to be alone has the job."""

    def __init__(self) -> None:
        super().__init__((ROWS,))
        self.alone: list[bool] = []
        self.made: list[HostBeside] = []
        self.refuse_open: WeftError | None = None

    def __call__(self, end: socket.socket) -> Any:
        launcher = self

        class Process(ThreadWorker):
            def _load(self, settings: Mapping[str, object], fds: Sequence[int]) -> Any:
                assert settings["bundle"]
                launcher.alone.append(bool(settings["alone"]))
                if settings["alone"]:
                    return super()._load(settings, fds)
                launcher.made.append(HostBeside(self.kill, launcher.refuse_open))
                return launcher.made[-1], self._digest

        self.started.append(Process(end, None, self.sizes, self.digest, die_at_once=False))
        return self.started[-1]


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    folder = tmp_path / "net.colocate"
    folder.mkdir()
    (folder / MANIFEST).write_text("{}")
    return folder


@contextmanager
def served(launcher: Bundles, bundle: Path, *, standby: bool = False) -> Iterator[Served]:
    found = Served("net", "1", ProcessBackend([bundle], launch=launcher, standby=standby))
    found.start()
    try:
        yield found
    finally:
        found.close()


def test_queries_are_answered_beside_the_job_and_it_is_told_how_it_stands(bundle: Path) -> None:
    launcher = Bundles()
    with served(launcher, bundle) as model:
        given = [query(1 + i % ROWS, i) for i in range(200)]
        futures = [model.submit(q) for q in given]
        assert all(right(q, f) for q, f in zip(given, futures, strict=True))
        wait_for(lambda: (job := model.backend.job) is not None and job.queries > 0)
        job = model.backend.job
        assert job is not None and job.name == "work" and job.runs and not job.done
        assert sum(job.variants.values()) == job.queries and next(iter(job.variants)) == "alone"
        assert job.passes > 0, "it was begun where no query ran"
    assert launcher.alone == [False]
    wait_for(lambda: launcher.made[0].closed)


@pytest.mark.parametrize("standby", [False, True])
def test_behind_a_worker_that_died_the_model_is_alone(bundle: Path, standby: bool) -> None:
    launcher = Bundles()
    with served(launcher, bundle, standby=standby) as model:
        assert works(model)
        wait_for(lambda: model.backend.job is not None)
        if standby:
            wait_for(lambda: model.backend.stands_by)
        with pytest.raises(InferenceFailedError):
            model.submit(special(-3)).result(20)
        assert works(model)
        assert launcher.alone[0] is False and all(launcher.alone[1:]) and len(launcher.alone) > 1
        job = model.backend.job
        assert job is not None and not job.runs, "it is set aside"


def test_a_job_that_cannot_be_opened_says_why(bundle: Path) -> None:
    launcher = Bundles()
    launcher.refuse_open = ArtifactError(where="x", problem="it was measured on another GPU", remedy="prepare it again")
    found = Served("net", "1", ProcessBackend([bundle], launch=launcher))
    with pytest.raises(ArtifactError, match="it was measured on another GPU"):
        found.start()
    found.close()


def test_a_bundle_is_given_alone_and_other_folders_are_none(bundle: Path, tmp_path: Path) -> None:
    plan = tmp_path / "x.weft"
    plan.touch()
    with pytest.raises(ArtifactError, match="holds the only plan of its model"):
        ProcessBackend([plan, bundle])
    (tmp_path / "folder").mkdir()
    with pytest.raises(ArtifactError, match="a folder, and no co-location bundle"):
        ProcessBackend([tmp_path / "folder"])
    with pytest.raises(OptionError, match="in a process of its own alone"):
        Server({"net": [str(bundle)]}, ServeOptions(isolated=False))


def test_a_repository_has_bundles_too(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "mlp.weft").touch()
    found = {s.name: s.files for s in found_in(tmp_path)}
    assert found == {"net.colocate": (bundle,), "mlp": (tmp_path / "mlp.weft",)}


def is_ready(server: Server) -> bool:
    return server.ready


def test_a_load_ends_the_job_before_it_begins_it_again(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = Bundles()
    monkeypatch.setattr("weft.serve.process.started", launcher)
    with Server({"net": [str(bundle)]}) as server:
        given = query(3, 0)
        assert right(given, server.submit(given, model="net"))
        closed: list[bool] = []
        start = launcher.__call__

        def began(end: socket.socket) -> Any:
            closed.append(all(x.closed for x in launcher.made if x.opened))
            return start(end)

        monkeypatch.setattr("weft.serve.process.started", began)
        server.load("net")
        assert closed == [True] and launcher.alone == [False, False]
        assert right(given, server.submit(given, model="net"))
        job = server.model("net").backend.job
        assert job is None or job.runs
        assert is_ready(server)
        launcher.refuse_open = ArtifactError(problem="no job", remedy="none")
        with pytest.raises(ArtifactError, match="no job"):
            server.load("net")
        with pytest.raises(WeftError):
            server.submit(given, model="net")
        assert not is_ready(server)
        launcher.refuse_open = None
        server.load("net")
        server.unload("net")
        closed.clear()
        server.load("net")
        assert closed == [True] and launcher.alone == [False] * 5, "the one that was leaving has left"
        assert is_ready(server)


# --- the parts


def pair() -> tuple[Channel, Channel]:
    here, there = socket.socketpair()
    return Channel(here), Channel(there)


def test_batches_become_queries_and_their_ends_answers() -> None:
    front, back = pair()
    ring, fd = Ring.made(signature((ROWS,)), 2)
    clock = iter(np.arange(10) / 4)
    inbox = ChannelInbox(back, ring, tell=lambda *_: None, clock=lambda: float(next(clock)))
    assert inbox.take() == []
    front.send(Kind.RUN, RUN.pack(1, 0, 0.5))
    front.send(Kind.RUN, RUN.pack(2, 0, 0.0))
    assert [(c.number, c.waited_ns) for c in inbox.take()] == [(1, 500_000_000), (2, 0)]
    inbox.done(1, Ended(0, 1, 0, 0))
    told = front.receive()
    assert told is not None and told.kind is Kind.DONE and DONE.unpack(told.body) == (1, 0.5)
    assert ring.marked(1) and not ring.marked(2)
    began = time.monotonic()
    inbox.wait(20_000_000)
    assert time.monotonic() - began >= 0.015
    front.hang_up()
    assert inbox.take() == []
    assert not inbox.is_open
    inbox.wait(10**12)  # nobody comes any more: it returns
    for end in (front, back):
        end.close()
    os.close(fd)


def test_somebody_who_says_something_else_is_gone() -> None:
    front, back = pair()
    ring, fd = Ring.made(signature((ROWS,)), 2)
    inbox = ChannelInbox(back, ring, tell=lambda *_: None)
    front.send(Kind.READY)
    assert inbox.take() == [] and not inbox.is_open
    for end in (front, back):
        end.close()
    os.close(fd)


class Copies:
    """Copies at once, and notes on which stream."""

    def __init__(self) -> None:
        self.streams: list[int] = []

    def fill(self, address: int, place: int, size: int, stream: int) -> None:
        ctypes.memmove(address, place, size)
        self.streams.append(stream)

    def copy(self, place: int, address: int, size: int, stream: int) -> None:
        ctypes.memmove(place, address, size)
        self.streams.append(stream)


def test_inputs_and_results_are_copied_between_a_slot_and_a_plan() -> None:
    ring, fd = Ring.made(signature((ROWS,)), 2)
    x, n, y = torch.zeros(ROWS, 2), torch.zeros(ROWS, dtype=torch.int64), torch.zeros(ROWS, 2)
    plan = cast("Any", SimpleNamespace(static_inputs=(x, n), static_outputs=(y,)))
    io, copies = RingIo(ring), Copies()
    io.begin(Query("net", 3, 0, 0))
    io.fill(plan, 7)
    io.fetch(plan, 7)
    assert not copies.streams, "nothing is copied while variants are measured"
    io.queue = cast("Any", copies)
    for number in (3, 4, 5):
        io.begin(Query("net", number, 0, 0))
        given = query(ROWS, number)
        for place, name in zip(ring.inputs(number, 0), ("x", "n"), strict=True):
            place[...] = given[name]
        io.fill(plan, 7)
        y.copy_(torch.from_numpy(answer(x.numpy(), n.numpy())))
        io.fetch(plan, 7)
        assert np.array_equal(ring.outputs(number, 0)[0], answer(given["x"], given["n"]))
    assert copies.streams == [7] * 9
    begin, size = ring.place
    assert begin < ring.inputs(2, 0)[0].ctypes.data < begin + size
    os.close(fd)


def test_progress_is_saved_now_and_then_and_a_full_disk_costs_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    front, back = pair()
    now = [0.0]
    saves: list[float] = []

    def save() -> None:
        saves.append(now[0])
        if len(saves) > 1:
            raise ArtifactError(
                where="p.json", problem="progress cannot be written: \x1b[2JNo space", remedy="make room"
            )

    job = SimpleNamespace(progress=lambda: JobProgress("d", 5, 0, 0))
    spec = SimpleNamespace(name="work", kind="network")
    placed = cast("Any", SimpleNamespace(job=job, spec=spec, is_done=True, save=save))
    tell = _Telling(back, placed, ["alone", "co-runner 128"], clock=lambda: now[0])
    for second in range(100):
        now[0] = float(second)
        tell(Beside_(7, 1, [3, 4]), 1)
    assert saves == [31.0, 62.0, 93.0]
    said = capsys.readouterr().err
    assert said.count("progress cannot be written") == 1 and "\x1b" not in said
    told = front.receive()
    assert told is not None and told.kind is Kind.JOB
    found = JobState.from_json(told.json())
    assert found == JobState("work", True, True, 5, 7, 1, 1, {"alone": 3, "co-runner 128": 4})
    front.close()
    tell(Beside_(0, 0, [0, 0]), 0)  # nobody is there to be told
    spec.kind = "process"
    now[0] = 1000.0
    tell(Beside_(0, 0, [0, 0]), 0)
    assert len(saves) == 3, "a process saves its progress itself, with its state"
    back.close()


def test_metrics_of_a_job() -> None:
    state = JobState('w"ork', False, False, 5, 7, 1, 2, {"alone": 3, "co\\runner": 4})
    text = "\n".join(metrics._beside([('model="net"', state), ('model="other"', None)]))
    assert (
        'weft_job_running{model="net",job="w\\"ork"} 0' in text
        and 'weft_job_passes{model="net",job="w\\"ork"} 5' in text
    )
    assert 'weft_beside_batches_total{model="net",variant="co\\\\runner"} 4' in text
    assert 'weft_beside_late_total{model="net"} 1' in text and "other" not in text
    assert list(metrics._beside([('model="net"', None)])) == []


def test_a_sick_worker_s_word_about_its_job_is_not_taken() -> None:
    good = {"job": "w", "done": False, "passes": 1, "queries": 1, "late": 0, "cap": 0, "variants": {"alone": 1}}
    assert JobState.from_json(good) == JobState("w", True, False, 1, 1, 0, 0, {"alone": 1})
    for key, value in (("passes", "x"), ("variants", 3), ("variants", {"a": None}), ("cap", None)):
        with pytest.raises((ValueError, TypeError, AttributeError)):
            JobState.from_json({**good, key: value})
    with pytest.raises(KeyError):
        JobState.from_json({})


def test_a_worker_knows_what_answers_by_itself() -> None:
    assert isinstance(HostBeside(lambda: None, None), worker.Answering)
    assert not isinstance(replace, worker.Answering)


# --- what a worker makes of a folder


def written(folder: Path, plan: Path, cache: Path | None, target_ns: int = 10**9) -> Path:
    """A bundle whose plan is that file, with a job of kernels that nobody launches."""
    job = folder / "job"
    job.mkdir()
    (job / "kernel.toml").write_text("")
    (job / "job.toml").write_text('name = "work"\nkind = "kernels"\nstages = ["kernel.toml"]\nprogress = "p.json"\n')
    save = {PLAN: lambda path: path.write_bytes(plan.read_bytes())}
    made = folder / "net.colocate"
    write_bundle(
        made, model="net", target_ns=target_ns, samples=RECORD, job=job / "job.toml", save=save, trust_dir=cache
    )
    return made


def settings_of(saved: Saved, made: Path, *, alone: bool) -> dict[str, object]:
    return {
        "threads": 0, "cache": str(saved.cache), "names": [made.name], "trust": [], "bundle": True, "alone": alone,
    }  # fmt: skip


@contextmanager
def opened_folder(made: Path) -> Iterator[int]:
    fd = os.open(made, os.O_RDONLY)
    try:
        yield fd
    finally:
        os.close(fd)


def test_without_its_job_a_bundle_is_a_plan(saved: Saved, tmp_path: Path) -> None:
    made = written(tmp_path, saved.one, saved.cache)
    with opened_folder(made) as fd:
        model, digest = worker.load_plans(settings_of(saved, made, alone=True), [fd])
    assert not isinstance(model, worker.Answering) and len(digest) == 64
    inputs, outputs = places(model.signature, 1)
    inputs[0][...] = 1
    model.bind(0, inputs, outputs)()
    assert np.allclose(outputs[0], saved.answer("mlp", np.ones((1, 16), np.float32))[0], atol=1e-6)


def test_a_bundle_that_is_not_trusted_is_refused_by_its_name(saved: Saved, tmp_path: Path) -> None:
    made = written(tmp_path, saved.one, None, target_ns=123)  # no other test has recorded its digest
    with (
        opened_folder(made) as fd,
        pytest.raises(ArtifactError, match=r"^net.colocate: holds a job, which is code, and is not trusted"),
    ):
        worker.load_plans(settings_of(saved, made, alone=True), [fd])


def test_a_real_worker_without_a_gpu_says_so(saved: Saved, tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    made = written(tmp_path, saved.one, saved.cache)
    with (
        pytest.raises(WeftError, match="needs a CUDA GPU, and there is none here"),
        Server({"net": [str(made)]}, ServeOptions(cache=saved.cache)),
    ):
        pass


class Session:
    """Stands in for `weft.colocate.gpu.GpuSession`: queries run on the ring, through the copies that it is given."""

    def __init__(self, name: str, plans: Any, facts: Any, *, held: Any, io: Any) -> None:
        assert name == "net" and facts.name == RECORD.gpu
        self.plan, self.io, self.device = plans.plain, io, Copies()
        self.job: Any = None

    def settled(self, prepared: Any) -> Any:
        self.io.fill(self.plan, 7)
        assert not self.device.streams, "a variant is measured on what the buffers hold"
        return prepared

    def copies_us(self) -> float:
        return 5.0

    def policy_of(self, prepared: Sequence[Any]) -> tuple[Any, Any]:
        assert prepared[0].points[0].variant.lc_us == RECORD.models[0].solo.at(0.5) + 5.0
        return make(prepared[0].policy, prepared[0].setting), None

    def machine_of(self, prepared: Sequence[Any]) -> Any:
        session = self

        class Machine(HostMachine):
            def __init__(self) -> None:
                self._flying, self.form, self.begun = [], OFF, 0

            def launch(self, query: Query, variant: int) -> None:
                session.io.begin(query)
                began = self.now_ns()
                session.io.fill(session.plan, 7)
                (x,), (y,) = session.plan.static_inputs, session.plan.static_outputs
                y.copy_(session.plan.run(x))
                session.io.fetch(session.plan, 7)
                self._flying.append(Ended(began, self.now_ns(), 0, began))

            def give_back(self) -> None:
                pass

        return Machine()


def test_what_a_worker_makes_of_a_bundle(
    saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = written(tmp_path, saved.eight, saved.cache)
    loaded = weft.load(saved.eight, options=weft.Options(cache_dir=saved.cache))
    graph = loaded.executable.graph
    plan = SimpleNamespace(
        graph=graph, plan=SimpleNamespace(checks=()), static_inputs=(torch.zeros(8, 16),),
        static_outputs=(torch.zeros(8, 4),), run=lambda x: loaded.flat(x)[0], replay=lambda: None,
    )  # fmt: skip
    events: list[str] = []

    @contextmanager
    def job_on(session: Session, spec: Any, folder: Path, **_: object) -> Iterator[Any]:
        assert folder == made / "job" and spec.name == "work"
        job = SimpleNamespace(progress=lambda: JobProgress("d", 5, 0, 0))
        yield SimpleNamespace(job=job, spec=spec, is_done=False, save=lambda: events.append("save"))
        events.append("ended")

    monkeypatch.setattr("weft.colocate.network.plan_on_gpu", lambda *_: plan)
    monkeypatch.setattr("weft.colocate.gpu.GpuSession", Session)
    monkeypatch.setattr("weft.colocate.job_on_gpu.job_on", job_on)
    monkeypatch.setattr("weft.device.cuda.driver.primary_context", contextlib.nullcontext)
    monkeypatch.setattr("weft.device.cuda.facts.gpu_facts", lambda *_, **__: SimpleNamespace(name=RECORD.gpu))
    monkeypatch.setattr("weft.device.cuda.streams.pinned", lambda *_: events.append("pinned"))
    front, back = pair()
    with opened_folder(made) as fd:
        model, _ = worker.load_plans(settings_of(saved, made, alone=False), [fd])
        second, _ = worker.load_plans(settings_of(saved, made, alone=False), [fd])
    assert isinstance(model, worker.Answering) and model.signature.sizes == (8,)
    assert not isinstance(second, worker.Answering), "the job is in one process"
    assert "net.colocate: its job is beside the model in another process" in capsys.readouterr().err
    model.warm_up()
    ring, memory = Ring.made(model.signature, 2)
    run = model.open(ring, back)
    assert events == ["pinned"]
    given = np.random.default_rng(3).standard_normal((8, 16)).astype(np.float32)
    for number in (1, 2):
        ring.inputs(number, 0)[0][...] = given * number
        front.send(Kind.RUN, RUN.pack(number, 0, 0.0))
    front.hang_up()
    run()
    assert ring.marked(1) and ring.marked(2)
    for number in (1, 2):
        (want,) = saved.answer("mlp", given * number)
        assert np.allclose(ring.outputs(number, 0)[0], want, atol=1e-6)
    model.close()
    assert events[-1] == "ended"
    with opened_folder(made) as fd:
        third, _ = worker.load_plans(settings_of(saved, made, alone=False), [fd])
    assert isinstance(third, worker.Answering), "it is free again"
    third.close()
    for end in (front, back):
        end.close()
    os.close(memory)


def test_where_the_gpu_fails_progress_is_saved_and_the_process_ends(
    saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = read_bundle(written(tmp_path, saved.eight, saved.cache), cache_dir=saved.cache)
    loaded = weft.load(saved.eight, options=weft.Options(cache_dir=saved.cache))
    plan = SimpleNamespace(
        graph=loaded.executable.graph, plan=SimpleNamespace(checks=()), static_outputs=(torch.zeros(8, 4),)
    )
    monkeypatch.setattr("weft.colocate.network.plan_on_gpu", lambda *_: plan)
    model = beside.Beside(bundle, weft.Options(cache_dir=saved.cache), os.dup(2))
    saves: list[int] = []
    model._placed = cast("Any", SimpleNamespace(save=lambda: saves.append(1)))

    class Fails(HostMachine):
        def __init__(self) -> None:
            self.form, self.begun, self.closed = OFF, 0, False

        def set_form(self, form: int) -> None:
            raise DeviceError(problem="cuGraphLaunch gives 700")

        def give_back(self) -> None:
            pass

    prepared = prepare(RECORD, "weft", "net", "work", 10**9)
    policy = make("weft", prepared.setting)
    machine = cast("Any", Fails())
    front, back = pair()
    ring, memory = Ring.made(model.signature, 2)
    inbox = ChannelInbox(back, ring, tell=lambda *_: None)
    with pytest.raises(LostDeviceError, match="cuGraphLaunch gives 700"):
        model._run(policy, ServingBackend(machine, prepared, inbox, policy=policy), machine)
    assert saves == [1]
    for end in (front, back):
        end.close()
    os.close(memory)


def test_a_plan_that_looks_at_indices_cannot_run_beside_a_job(
    saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = read_bundle(written(tmp_path, saved.eight, saved.cache), cache_dir=saved.cache)
    graph = weft.load(saved.eight, options=weft.Options(cache_dir=saved.cache)).executable.graph
    for checks, output in (((1,), torch.zeros(8, 4)), ((), torch.zeros(1, 4).expand(8, 4))):
        plan = SimpleNamespace(graph=graph, plan=SimpleNamespace(checks=checks), static_outputs=(output,))
        monkeypatch.setattr("weft.colocate.network.plan_on_gpu", lambda *_, found=plan: found)
        with pytest.raises(ArtifactError, match="looks at indices, or gives a value repeated"):
            beside.Beside(bundle, weft.Options(cache_dir=saved.cache), os.dup(2))
