from __future__ import annotations

import gc
import io
import math
import mmap
import shutil
from collections.abc import Generator, Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.faults.fake import FakeTransport, Plan, fake_trial

from weft.device.facts import CpuFacts
from weft.ir import attrs as a
from weft.ir.graph import GraphBuilder
from weft.ir.prims import Prim
from weft.ir.types import DType, TensorType
from weft.kernels.codec import kernel_sha256
from weft.kernels.measurement import Verdict
from weft.kernels.source import CallStep, KernelSource, LibraryCall, Ref, Schedule
from weft.options import Options
from weft.tune import keys, worker
from weft.tune.inputs import Domain, InputSet, draw
from weft.tune.messages import BOARD_BYTES, encode
from weft.tune.site import Built, Refused
from weft.tune.store import Database
from weft.tune.tuner import ProblemTrial, Progress, Tuner, _Build, _first_built, _Work

PAIR = [Schedule("library"), Schedule("cpp")]


def tuner(database: Database, transport: FakeTransport, **changes: object) -> Tuner:
    return Tuner(Options(), CpuFacts(), database, transport=transport, **changes)  # type: ignore[arg-type]


def test_a_warm_run_makes_no_trial(tmp_path: Path) -> None:
    trials = [fake_trial(n, PAIR) for n in range(6)]
    with Database.open(tmp_path) as database:
        with tuner(database, FakeTransport({})) as cold:
            first = list(cold.measure(trials))
        seen: list[Progress] = []
        transport = FakeTransport({})
        with tuner(database, transport) as warm:
            assert list(warm.measure(trials, progress=seen.append)) == first
        assert warm.workers_started == 0 and transport.started == 0
        assert seen[-1].lookups == 12 and seen[-1].kernels == 0 and seen[-1].trials == 6


def test_only_what_is_new_is_measured() -> None:
    database, transport = Database.open(None), FakeTransport({})
    with tuner(database, transport) as first:
        list(first.measure([fake_trial(1, PAIR[:1])]))
        before = database.stats().rows
        list(first.measure([fake_trial(1, PAIR)]))
    assert (before, database.stats().rows) == (1, 2)


def test_a_change_of_the_sources_costs_nothing_where_the_kernel_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package is copied and a generator changed in the copy; then what measures is."""
    package = tmp_path / "weft"
    shutil.copytree(keys.PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(keys, "PACKAGE", package)
    database = Database.open(None)

    def starts() -> int:
        keys.source_hash.cache_clear()
        transport = FakeTransport({})
        with tuner(database, transport) as t:
            assert [m.verdict for m in t.measure([fake_trial(1, PAIR)])] == [Verdict.OK] * 2
        return transport.started

    assert starts() == 1
    with (package / "generate" / "cpp" / "__init__.py").open("a") as file:
        file.write("\nX = 1\n")
    assert starts() == 0
    with (package / "tune" / "verify.py").open("a") as file:
        file.write("\nX = 1\n")
    assert starts() == 1
    keys.source_hash.cache_clear()


def test_another_kernel_under_the_same_schedule_is_measured() -> None:
    database = Database.open(None)
    library, generated = fake_trial(1, PAIR).kernels
    assert isinstance(library[1], LibraryCall) and isinstance(generated[1], KernelSource)
    text, size = replace(generated[1], text="// other"), replace(generated[1], workspace_bytes=64)
    call = replace(library[1], prepare=(CallStep("aten.neg.default", (Ref("in", 0),)),))
    cases = [
        ([library, generated], 2),
        ([library, (PAIR[1], text, generated[2])], 1),
        ([library, (PAIR[1], size, generated[2])], 1),
        ([(PAIR[0], call, None), generated], 1),
        ([library, generated], 0),
    ]
    rows = 0
    for kernels, new in cases:
        transport = FakeTransport({})
        with tuner(database, transport) as t:
            found = list(t.measure([replace(fake_trial(1, PAIR), kernels=kernels)]))
        assert [m.kernel for m in found] == [kernel_sha256(k) for _, k, _ in kernels]
        rows += new
        assert database.stats().rows == rows and transport.started == (new > 0)


def test_a_kernel_that_killed_twice_is_known_by_its_content_only() -> None:
    database = Database.open(None)
    trial = fake_trial(1, PAIR)
    with tuner(database, FakeTransport({PAIR[1]: Plan.CRASH})) as t:
        assert [m.verdict for m in t.measure([trial])] == [Verdict.OK, Verdict.POISONED]
    transport = FakeTransport({})
    with tuner(database, transport, retry_failed=True) as t:
        assert [m.verdict for m in t.measure([trial])] == [Verdict.OK, Verdict.POISONED]
        assert transport.started == 0
        source = trial.kernels[1][1]
        assert isinstance(source, KernelSource)
        mended = (PAIR[1], replace(source, text="// mended"), trial.kernels[1][2])
        found = list(t.measure([replace(trial, kernels=[trial.kernels[0], mended])]))
    assert [m.verdict for m in found] == [Verdict.OK, Verdict.OK]


def test_progress_counts_rejections_and_what_is_left() -> None:
    plans = {Schedule("cpp", (("n", 0),)): Plan.WRONG, Schedule("cpp", (("n", 2),)): Plan.CRASH}
    trials = [fake_trial(n, [PAIR[0], Schedule("cpp", (("n", n),))]) for n in range(4)]
    seen: list[Progress] = []
    now = iter(range(1000))
    with tuner(Database.open(None), FakeTransport(plans), clock=lambda: float(next(now))) as t:
        list(t.measure(trials, progress=seen.append, total=4))
    assert [p.trials for p in seen] == [1, 2, 3, 4]
    assert seen[-1].rejected == {Verdict.WRONG: 1, Verdict.POISONED: 1} and seen[-1].kernels == 8
    assert 0 < seen[0].eta_s < math.inf and seen[-1].eta_s == 0
    assert seen[0].rejected == {Verdict.WRONG: 1}


def test_no_trial_starts_after_the_deadline_but_lookups_go_on() -> None:
    database = Database.open(None)
    with tuner(database, FakeTransport({})) as t:
        known = list(t.measure([fake_trial(40, PAIR)]))
    now = 0.0

    def tick() -> None:
        nonlocal now
        now += 10.0

    transport = FakeTransport({}, on_trial=tick)
    with tuner(database, transport, clock=lambda: now) as t:
        found = list(t.measure([fake_trial(n, PAIR) for n in range(41)], deadline=25.0))
    assert found[:-2] == [m for n in range(3) for m in found if m.problem_key.startswith(f"{n}\n")]
    assert found[-2:] == known


def test_trials_are_taken_lazily() -> None:
    taken = 0

    def endless() -> Iterator[Any]:
        nonlocal taken
        while True:
            yield fake_trial(taken, PAIR)
            taken += 1

    with tuner(Database.open(None), FakeTransport({})) as t:
        stream = t.measure(endless())
        assert next(stream).verdict is Verdict.OK
        assert isinstance(stream, Generator)
        stream.close()
    assert taken <= 24


def test_a_source_without_a_compiler_is_rejected_and_the_call_still_measured() -> None:
    library = fake_trial(1, PAIR).kernels[0]
    trial = replace(fake_trial(1, PAIR), kernels=[library, (PAIR[1], KernelSource(PAIR[1], "x", "k0"), None)])
    with tuner(Database.open(None), FakeTransport({})) as t:
        found = list(t.measure([trial]))
    assert [m.verdict for m in found] == [Verdict.OK, Verdict.COMPILE]
    assert "no C++ compiler" in found[1].error


def test_a_trial_without_kernels_is_nothing() -> None:
    with tuner(Database.open(None), FakeTransport({})) as t:
        assert list(t.measure([ProblemTrial(fake_trial(1, PAIR).problem, [])])) == []
        assert t.workers_started == 0


def test_integers_for_opaque_operators_are_small() -> None:
    b = GraphBuilder()
    x, i = b.input(TensorType(DType.F32, (3, 4))), b.input(TensorType(DType.I64, (40,)))
    attrs = a.OpaqueAttrs("aten", "aten.embedding", "{}", 0, (TensorType(DType.F32, (3,)),))
    graph = b.build([b.add(Prim.OPAQUE, x, i, attrs=attrs)])
    for kind in InputSet:
        values = draw(graph, kind, Domain.ZERO_MEAN, seed=0)[1]
        assert set(values.tolist()) <= {0, 1}


def test_a_worker_that_was_started_early_is_the_one_that_measures() -> None:
    database, transport = Database.open(None), FakeTransport({})
    with tuner(database, transport) as t:
        t.start_early()
        t.start_early()
        assert (transport.started, t.workers_started) == (1, 1)
        assert [m.verdict for m in t.measure([fake_trial(1, PAIR)])] == [Verdict.OK] * 2
        t.start_early()
        assert transport.started == 1


def test_a_worker_that_does_not_start_early_starts_when_it_is_needed() -> None:
    database, transport = Database.open(None), FakeTransport({}, dead_on_arrival=1)
    with tuner(database, transport) as t:
        t.start_early()
        assert [m.verdict for m in t.measure([fake_trial(1, PAIR)])] == [Verdict.OK] * 2
    assert transport.started == 2


def test_what_is_built_first_is_measured_first() -> None:
    futures: list[Future[Built | Refused | None]] = [Future() for _ in range(3)]
    builds = [_Build(_Work(fake_trial(k, PAIR)), {0: f}) for k, f in enumerate(futures)]
    assert _first_built(builds) is None
    futures[1].set_result(None)
    assert _first_built(builds) is builds[1]
    futures[0].set_result(None)
    assert _first_built(builds) is builds[0], "the earliest of those that are there"
    builds.remove(builds[1])
    assert len(builds) == 2 and all(b.futures[0] is not futures[1] for b in builds)


def verified_only(number: int, schedules: list[Schedule], *, finite: bool = False) -> ProblemTrial:
    return replace(fake_trial(number, schedules), timed=False, finite=finite)


def test_what_is_not_timed_is_verified_and_remembered() -> None:
    database, transport = Database.open(None), FakeTransport({PAIR[1]: Plan.HALF})
    with tuner(database, transport) as asked:
        right, wrong = asked.measure([verified_only(1, PAIR)])
        assert (right.verdict, right.samples_us, wrong.verdict) == (Verdict.OK, (), Verdict.UNWRITTEN)
        assert list(asked.measure([verified_only(1, PAIR)])) == [right, wrong]
    assert transport.started == 1
    with tuner(database, FakeTransport({})) as later:
        assert list(later.measure([verified_only(1, PAIR)])) == [right, wrong]
        assert later.workers_started == 0
        timed = list(later.measure([fake_trial(1, PAIR)]))
        assert all(m.samples_us for m in timed), "no verdict without a time stands for a time"


def test_what_was_timed_need_not_be_verified_again() -> None:
    database = Database.open(None)
    with tuner(database, FakeTransport({PAIR[1]: Plan.WRONG})) as first:
        timed = list(first.measure([fake_trial(1, PAIR)]))
        assert list(first.measure([verified_only(1, PAIR)])) == timed


def test_what_was_given_up_as_slow_is_verified_where_it_is_needed() -> None:
    """A slow kernel is left after the first set of inputs."""
    slow = {PAIR[1]: Plan.SLOW}
    with tuner(Database.open(None), FakeTransport(slow)) as asked:
        assert [m.verdict for m in asked.measure([fake_trial(1, PAIR)])] == [Verdict.OK, Verdict.SLOW]
        assert [m.verdict for m in asked.measure([verified_only(1, PAIR)])] == [Verdict.OK, Verdict.OK]
        assert [m.verdict for m in asked.measure([fake_trial(1, PAIR)])] == [Verdict.OK, Verdict.SLOW]


def test_a_fault_where_nothing_is_timed_has_its_verdict() -> None:
    plans = {PAIR[0]: Plan.CRASH, PAIR[1]: Plan.HANG}
    with tuner(Database.open(None), FakeTransport(plans)) as asked:
        found = [m.verdict for m in asked.measure([verified_only(1, PAIR)])]
    assert found == [Verdict.POISONED, Verdict.HANG]


def test_on_finite_inputs_alone() -> None:
    transport = FakeTransport({})
    with tuner(Database.open(None), transport) as asked:
        list(asked.measure([verified_only(1, PAIR[:1], finite=True)]))
        plain = len(transport._values)
        list(asked.measure([verified_only(2, PAIR[:1])]))
    assert (plain, len(transport._values) - plain) == (2, 3), "sets of inputs"


@pytest.mark.parametrize(
    ("max_bytes", "taken", "trims"),
    [
        (0, 1 << 40, 0),
        (1 << 30, 0, 0),
        (1 << 30, 1 << 40, 0),
        (8 << 30, 0, 0),
        (8 << 30, (4 << 30) - 1, 0),
        (8 << 30, (4 << 30) + 1, 2),
    ],
)
def test_a_worker_gives_back_what_it_keeps_where_room_is_short(
    max_bytes: int, taken: int, trims: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind each trial, with the references of others; with little to begin with it keeps nothing."""
    now = [1 << 32]
    done: dict[str, int] = {"kept": 0, "trims": 0, "made": 0}

    def counted(what: str) -> Any:
        def call(*_: object) -> bool:
            done[what] += 1
            return True

        return call

    def trial(*_: object) -> None:
        now[0] = (1 << 32) + taken

    monkeypatch.setattr(worker, "_limit", lambda most: None)
    monkeypatch.setattr(worker, "_address_space", lambda: now[0])
    monkeypatch.setattr(worker, "keep_freed_memory", counted("kept"))
    monkeypatch.setattr(worker, "trim_heap", counted("trims"))
    monkeypatch.setattr(worker, "run_trial", trial)
    monkeypatch.setattr(worker, "References", counted("made"))
    monkeypatch.setattr(worker.TrialRequest, "from_message", lambda message: None)
    monkeypatch.setattr(gc, "freeze", lambda: None)
    hello = encode({"op": "hello", "threads": torch.get_num_threads(), "max_bytes": max_bytes})
    asked = hello + 2 * encode({"op": "trial"}) + encode({"op": "bye"})
    with mmap.mmap(-1, BOARD_BYTES) as board:
        worker.serve(worker.PipeChannel(io.BytesIO(asked), io.BytesIO(), board))
    assert done == {"kept": int(max_bytes != 1 << 30), "trims": trims, "made": 1 + trims}


def test_a_worker_does_not_walk_what_it_has_loaded_after_every_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "_limit", lambda most: None)
    monkeypatch.setattr(worker, "keep_freed_memory", lambda: True)
    said = io.BytesIO()
    hello = encode({"op": "hello", "threads": torch.get_num_threads(), "max_bytes": 0})
    frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    with mmap.mmap(-1, BOARD_BYTES) as board:
        try:
            worker.serve(worker.PipeChannel(io.BytesIO(hello), said, board))
            loaded = gc.get_freeze_count()
        finally:
            if not frozen:  # else all that there is stays so, as the tests have it
                gc.unfreeze()
    assert loaded > 10_000
