"""Pairs in the database: what is found again and what is measured anew, the choice, the search, damaged rows."""

from __future__ import annotations

import hashlib
import math
import random
import sqlite3
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from benchmarks.cases.colocate_lc import hosts, lc_kernel
from benchmarks.gpu_pairs import job_of
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from tests.tune.records import environment, measurement

from weft.device.cuda.facts import profile
from weft.errors import ArtifactError
from weft.generate.cuda.role.fused import fuse, shapes
from weft.kernels.colocation import FusedSource, FusionShape, RoleRegisters
from weft.kernels.pairs import PairKey, PairRecord, geometric_mean, record_from_json, record_to_json
from weft.kernels.source import Schedule
from weft.tune import pairs
from weft.tune.halving import dominates
from weft.tune.keys import PACKAGE
from weft.tune.pairs import (
    Arm,
    blocks_of,
    front,
    keep,
    key_of,
    known,
    lookup,
    read_rows,
    refused,
    study,
    summed_up,
    timed,
    verdict,
    write_rows,
)
from weft.tune.store import FILE_NAME, Database

KEY = PairKey("p" * 64, "j" * 64, "k" * 64, 0, "NVIDIA H200", "580.1", "{}")
SHAPE = FusionShape("idle", 96, 4, 1024, 2, RoleRegisters(104, 200, 104))
SCHEDULE = Schedule("cuda", (("bm", 128), ("box", (1, 2, 64)), ("template", "tma")))


def record(kernel: str = "k", s: float = 0.1, f: float = 0.5, ratio: float = 1.3, **more: Any) -> PairRecord:
    key = replace(KEY, kernel=kernel)
    return replace(
        PairRecord(key, "vgg16/conv3x3-64-224", "mriq", SCHEDULE, SHAPE, "c" * 64, 9, 12, 100.0, 700.0, f, s, 0.02,
                   ratio, (("serial", 1300.0), ("streams", 1280.0)), "", 1e9),
        **more,
    )  # fmt: skip


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    with Database.open(tmp_path) as found:
        yield found


def test_records_are_read_back() -> None:
    for one in (record(), record(schedule=None, shape=None, declined="no room", ratio=math.nan), record(peers=())):
        again = record_from_json(record_to_json(one))
        assert repr(again) == repr(one)
    text = write_rows([record("a"), record("b")])
    assert read_rows(text + "\n") == (record("a"), record("b")) and len(text.splitlines()) == 2


def test_a_shape_from_before_has_todays_defaults() -> None:
    data: Any = record_to_json(record())
    del data["shape"]["min_ctas_per_sm"], data["idle"]
    assert record_from_json(data).shape == SHAPE and math.isnan(record_from_json(data).idle)
    data["shape"]["colour"] = 1
    with pytest.raises(ArtifactError):
        record_from_json(data)


@pytest.mark.parametrize(
    "change",
    [
        {"ratio": 0.0}, {"ratio": math.nan}, {"lc_us": -1.0}, {"be_us": math.inf}, {"slowdown": -1.5},
        {"fraction": -0.1},
    ],
)  # fmt: skip
def test_times_that_cannot_be_are_no_record(change: dict[str, float]) -> None:
    with pytest.raises(ArtifactError, match="a time that cannot be"):
        record_from_json(record_to_json(record(**change)))  # type: ignore[arg-type]


@pytest.mark.parametrize("data", [None, [], {}, {"schedule": None, "shape": None}, {"schedule": 1, "shape": {}}])
def test_values_that_are_no_record(data: Any) -> None:
    with pytest.raises(ArtifactError, match=r"malformed"):
        record_from_json(data)
    with pytest.raises(ArtifactError, match=r"malformed|no JSON"):
        read_rows("{" if data is None else "[1]")


def test_a_record_is_found_again_in_another_process(tmp_path: Path) -> None:
    with Database.open(tmp_path) as first:
        keep(first, [record("a"), record("b", s=0.2)])
        keep(first, [record("a", ratio=1.4, started=2e9)])
    with Database.open(tmp_path) as again:
        assert known(again) == (record("b", s=0.2), record("a", ratio=1.4, started=2e9))
        assert lookup(again, replace(KEY, kernel="a")) == record("a", ratio=1.4, started=2e9)
        assert again.stats().others == {"pair": 3} and again.stats().rows == 0
        assert again.prune() == 1
        assert len(known(again)) == 2 and again.verify() == (2, 0)


@pytest.mark.parametrize("field", ["problem", "job", "kernel", "gpu", "driver", "measuring", "blocks"])
def test_what_changed_is_measured_anew(field: str, database: Database) -> None:
    keep(database, [record()])
    same = replace(KEY, kernel="k")
    other = replace(same, **{field: 7 if field == "blocks" else "other"})  # type: ignore[arg-type]
    assert lookup(database, same) is not None and lookup(database, other) is None


def test_kernels_and_pairs_lie_beside_each_other(tmp_path: Path) -> None:
    with Database.open(tmp_path) as database:
        database.commit(measurement(0), environment())
        keep(database, [record()])
        database.commit(measurement(1), environment())
        assert len(list(database.records())) == 2 and len(known(database)) == 1
        assert database.stats().problems == 2 and database.stats().quarantined == 0
        assert database.prune(environment()) == 0 and len(known(database)) == 1, "pairs stay where others are left"


def test_who_does_not_know_pairs_passes_over_them(database: Database) -> None:
    keep(database, [record()])
    (row,) = database._found(None)
    from weft.tune.store import is_of_other_version, read_row

    assert read_row(row) is None and is_of_other_version(row), "never quarantined by an earlier version"


def test_damaged_rows_are_never_used(tmp_path: Path) -> None:
    with Database.open(tmp_path) as database:
        keep(database, [record("a"), record("b")])
    with sqlite3.connect(tmp_path / FILE_NAME) as base:
        base.execute("UPDATE trials SET body = replace(body, '1.3', '9.9') WHERE rowid = 1")
    with Database.open(tmp_path) as again:
        assert [r.key.kernel for r in known(again)] == ["b"]
        assert again.stats().quarantined == 1 and any("quarantine" in p for p in again.problems)


def test_a_sound_row_of_another_record_is_left_out(database: Database) -> None:
    database.keep("pair", [("{}", record_to_json(record())), ('{"x":1}', [1, 2])])  # under keys that are not theirs
    assert known(database) == () and lookup(database, replace(KEY, kernel="k")) is None
    assert database.of_kind("others") == {}


def test_a_damaged_file_gives_its_pairs(tmp_path: Path) -> None:
    from weft.tune.store import set_aside

    with Database.open(tmp_path) as database:
        keep(database, [record("a"), record("b")])
    _, rows = set_aside(tmp_path / FILE_NAME)
    assert len(rows) == 2


# The choice.


def test_what_does_not_pay_is_not_on_the_front() -> None:
    right = record("a", s=0.1, f=0.5)
    wrong = record("w", s=0.0, f=3.0, declined="the results differ")
    slower = record("l", s=0.05, f=0.6, ratio=0.99)
    dear = record("d", s=0.3, f=0.3)
    never = record("n", s=2.5, f=9.0)
    assert front([wrong, slower, right, dear, never]) == (right,)
    assert front([wrong, slower, dear, never]) == ()
    many = [record(str(k), s=k / 20, f=0.2 + k / 8, ratio=1.1 + k / 100) for k in range(9)]
    assert len(front(many)) == 4 and many[-1] in front(many)


def test_a_pair_is_summed_up_from_its_newest_version() -> None:
    old = [record("a", ratio=2.0, started=1.0), record("b", s=0.2, f=0.9, ratio=1.6, started=2.0)]
    new = [replace(r, key=replace(r.key, driver="590.2"), ratio=r.ratio / 1.5, started=r.started + 10) for r in old]
    other = record("c", be="sgemm", declined="no room for 256 threads", started=3.0)
    found = summed_up([*new, other, *old])
    assert [(s.lc, s.be, s.driver, s.kept) for s in found] == [
        ("vgg16/conv3x3-64-224", "mriq", "590.2", True), ("vgg16/conv3x3-64-224", "sgemm", "580.1", False),
    ]  # fmt: skip
    assert found[0].ratio == pytest.approx(2.0 / 1.5) and found[0].measured == 2 and found[0].declined == 0
    assert (found[1].ratio, found[1].reason, found[1].declined) == (1.0, "no room for 256 threads", 1)
    assert [s.driver for s in summed_up([*new, *old], all_versions=True)] == ["580.1", "590.2"]
    assert geometric_mean(found) == pytest.approx(math.sqrt(2.0 / 1.5)) and math.isnan(geometric_mean(()))
    assert summed_up([]) == ()


@pytest.mark.parametrize(
    ("one", "said"),
    [
        (record(ratio=0.93), "0.930 of the best peer (streams)"),
        (record(s=0.6, f=0.4, ratio=1.1), "gains 0.400 and costs 0.600"),
        (record(s=2.2, f=4.0), "LC takes 3.20 times as long"),
        (record(ratio=0.5, peers=()), "a peer"),
    ],
)
def test_why_nothing_is_kept(one: PairRecord, said: str) -> None:
    (found,) = summed_up([one, record("x", declined="wrong", started=2e9)])
    assert not found.kept and said in found.reason and (found.measured, found.declined) == (1, 1)


# The search.


def arms(count: int) -> list[Arm]:
    empty: Any = None
    return [Arm(record(f"k{i}", launches=0, rounds=0, ratio=math.nan), empty) for i in range(count)]


def machine(told: Sequence[tuple[float, float] | None], calls: list[tuple[str, int]]) -> pairs.Measure:
    def measure(arm: Arm, rounds: int) -> PairRecord:
        name = arm.record.key.kernel
        calls.append((name, rounds))
        point = told[int(name[1:])]
        if point is None:
            return refused(arm.record, "the results differ")
        s, f = point
        return replace(arm.record, rounds=rounds, slowdown=s, fraction=f, ratio=(1 + f) / (1 + s), started=1.0 * rounds)

    return measure


def test_a_search_finds_the_front_and_keeps_every_measurement(database: Database) -> None:
    told = [(0.1, 0.3), (0.2, 0.9), None, (0.3, 0.5), (0.02, 0.1), (0.6, 0.2), (0.5, 1.4), (0.4, 0.3)]
    calls: list[tuple[str, int]] = []
    found = study(database, arms(8), machine(told, calls))
    assert found is not None and [p.key.kernel for p in found.front] == ["k4", "k0", "k1", "k6"]
    assert found.declined == 1 and found.measured == 7 and found.kept
    best = max((1 + f) / (1 + s) for s, f in filter(None, told))
    assert found.ratio == pytest.approx(best)
    rounds = {n: max(r for m, r in calls if m == n) for n, _ in calls}
    assert rounds["k2"] == 3 and rounds["k6"] == 12 and rounds["k5"] == 3, "what cannot be on the front is dropped"
    assert {r.key.kernel for r in known(database)} == {f"k{i}" for i in range(8)}
    again: list[tuple[str, int]] = []
    assert study(database, arms(8), machine(told, again)) == found and again == [], "all of it is known"
    assert study(database, [], machine(told, again)) is None


def test_a_search_that_is_cut_off_goes_on(database: Database) -> None:
    told = [(0.1 * k, 0.2 + 0.3 * k) for k in range(4)]
    calls: list[tuple[str, int]] = []
    whole = machine(told, calls)

    def dies(arm: Arm, rounds: int) -> PairRecord:
        if len(calls) == 6:
            raise KeyboardInterrupt
        return whole(arm, rounds)

    with pytest.raises(KeyboardInterrupt):
        study(database, arms(4), dies)
    study(database, arms(4), whole)
    assert len(calls) == len(set(calls)) == 12, "nothing is measured twice"


def test_kernels_that_came_later_are_measured_beside_what_is_known(database: Database) -> None:
    told = [(0.3, 0.4), (0.2, 0.5), (0.1, 0.9)]
    study(database, arms(2), machine(told, []))
    calls: list[tuple[str, int]] = []
    found = study(database, arms(3), machine(told, calls))
    assert found is not None and [p.key.kernel for p in found.front] == ["k2"]
    assert {n for n, _ in calls} == {"k2"}


TRUE = st.tuples(st.integers(0, 16).map(lambda n: n / 16), st.integers(0, 32).map(lambda n: n / 16))
"""(s, f) of a kernel."""


def noisy(told: Sequence[tuple[float, float]], peer: float, noise: float, seed: int) -> pairs.Measure:
    """Times that are off by at most `noise` over the root of the rounds; `peer`: how much better than serial it is."""

    def measure(arm: Arm, rounds: int) -> PairRecord:
        name = arm.record.key.kernel
        chance = random.Random(f"{seed} {name} {rounds}")
        s, f = (x + chance.uniform(-noise, noise) / math.sqrt(rounds) for x in told[int(name[1:])])
        found = (1 + f) / (1 + s) / peer
        peers = (("serial", 1001.0 * peer), ("streams", 1000.0))
        return replace(
            arm.record, rounds=rounds, slowdown=s, fraction=max(0.0, f), ratio=found, peers=peers, started=1.0
        )

    return measure


@settings(deadline=None, max_examples=40, phases=[Phase.explicit, Phase.generate])
@given(
    st.lists(TRUE, min_size=1, max_size=12),
    st.sampled_from([1.0, 1.1, 1.5]),
    st.sampled_from([0.0, 0.02, 0.1]),
    st.integers(0, 99),
    st.one_of(st.none(), st.integers(3, 150)),
)
def test_a_search_under_noise_is_as_good_as_measuring_all(
    told: list[tuple[float, float]], peer: float, noise: float, seed: int, budget: int | None
) -> None:
    with tempfile.TemporaryDirectory() as folder, Database.open(Path(folder)) as database:
        every, spent = arms(len(told)), 0
        model = noisy(told, peer, noise, seed)

        def measure(arm: Arm, rounds: int) -> PairRecord:
            nonlocal spent
            spent += rounds
            return model(arm, rounds)

        found = study(database, every, measure, budget=budget)
        assert found is not None and found.best is not None
        assert budget is None or spent <= budget
        # a front, of kernels that pay
        assert all(p.pays for p in found.front) and len(found.front) <= 4
        assert not any(dominates(p, q) for p in found.front for q in found.front)
        works = [(1 + f) / (1 + s) / peer for s, f in told]
        if budget is None:
            # each of three steps may prefer what seems to dominate; and so may the choice among all that was measured
            off = [noise / math.sqrt(n) for n in (3, 6, 12)]
            bound = (2 * sum(off) + 2.5 * off[0]) * (1 + max(works) * peer) / peer
            assert works[int(found.best.key.kernel[1:])] >= max(works) - bound - 1e-9
        # the verdict is kept, and the same search measures nothing again
        verdicts = [r for r in known(database) if not r.key.kernel]
        assert len(verdicts) == (not found.kept)
        for v in verdicts:
            assert v.declined == f"do not fuse: {found.reason}" and v.ratio == found.best.ratio
            assert v.best_peer == ("streams", 1000.0) and v.schedule is None and not v.pays
        spent, rows = 0, len(known(database))
        for other in (measure, noisy(told, peer, 1.0, seed + 1)):
            assert study(database, every, other, budget=budget) == found, "what is declined stays declined"
        assert spent == 0 and len(known(database)) == rows
        assert summed_up(known(database))[0].kept == found.kept


def test_a_verdict_travels_without_its_kernels(database: Database) -> None:
    found = study(database, arms(3), machine([(0.5, 0.2), (0.4, 0.1), (0.1, 0.05)], []))
    assert found is not None and not found.kept and found.best is not None
    (one,) = [r for r in known(database) if not r.key.kernel]
    assert one.ratio == found.best.ratio < 1 and one.peers == found.best.peers
    (alone,) = summed_up(read_rows(write_rows([one])))
    assert not alone.kept and alone.reason == one.declined and alone.best == one
    (all_of_it,) = summed_up(known(database))
    assert (all_of_it.measured, all_of_it.declined, all_of_it.reason) == (3, 0, found.reason), "it is no kernel"
    with pytest.raises(ValueError, match="pay"):
        verdict(summed_up([record()])[0], record())


def test_a_pair_of_which_no_kernel_is_right_has_a_verdict_too(database: Database) -> None:
    for _ in range(2):
        found = study(database, arms(2), machine([None, None], []))
        assert found is not None and found.declined == 2 and found.best is None
        assert [r.declined for r in known(database) if not r.key.kernel] == ["do not fuse: the results differ"]
    assert database.stats().others == {"pair": 3, "pair search": 1}


def test_short_runs_are_no_choice(database: Database) -> None:
    def measure(arm: Arm, rounds: int) -> PairRecord:
        return replace(arm.record, rounds=rounds, ratio=1.4, peers=() if rounds < 9 else arm.record.peers)

    found = study(database, arms(2), measure, rounds=1, most_rounds=1)
    assert found is not None and not found.kept and "in a short run" in found.reason and found.best is None
    assert all(r.key.kernel for r in known(database)), "and no verdict"
    found = study(database, arms(2), measure, rounds=1, most_rounds=9, share=9)
    assert found is not None and found.kept and found.best is not None and found.best.rounds == 9


def test_searches_that_are_none(database: Database) -> None:
    two = arms(2)
    with pytest.raises(ValueError, match="several pairs"):
        study(database, [two[0], replace(two[1], record=replace(two[1].record, be="other"))], machine([], []))
    with pytest.raises(ValueError, match="another kernel"):
        study(database, two, lambda arm, rounds: record("else"))


# Keys and times.


@dataclass(frozen=True)
class Measured:
    launches: int = 10
    lc_us: float = 1000.0
    be_us: float = 2000.0
    inside_us: float = 1200.0
    idle_us: float = 1050.0
    inside_blocks: int = 300
    ratio: float = 1.25


def test_times_become_what_is_lost_and_gained() -> None:
    found = timed(record(started=0.0), Measured(), 600, {"streams": 3000.0, "serial": 2900.0}, 9)
    assert (found.lc_us, found.be_us, found.launches, found.rounds) == (100.0, 2000.0, 10, 9)
    assert found.fraction == pytest.approx(1.0) and found.slowdown == pytest.approx(0.2) and found.ratio == 1.25
    assert found.idle == pytest.approx(0.05)
    assert found.peers == (("serial", 2900.0), ("streams", 3000.0)) and found.started > 0 and found.pays
    for bad in (Measured(launches=0), Measured(lc_us=0.0), Measured(be_us=math.nan)):
        with pytest.raises(ValueError, match="launches of"):
            timed(record(), bad, 600, {}, 9)


def test_fractions_are_numbers_of_blocks() -> None:
    assert blocks_of(0.5, 100.0, 1000.0, 4000) == 200
    assert blocks_of(2.0, 100.0, 50.0, 40) == 40 and blocks_of(1e-6, 1.0, 1000.0, 40) == 1
    with pytest.raises(ValueError, match="of a job of"):
        blocks_of(0.0, 1.0, 1.0, 1)


@pytest.fixture(scope="module")
def made() -> Callable[[str, int], tuple[Any, Any, FusedSource]]:
    facts = profile("h200")

    def make(job: str, shape: int) -> tuple[Any, Any, FusedSource]:
        kernel, be = lc_kernel("resnet50/conv1x1-64-256-56"), job_of(job, small=True).sources
        source = hosts(kernel, facts, 1)[0]
        found = fuse(source, be, shapes(source, be, facts)[shape], facts=facts)
        assert isinstance(found, FusedSource)
        return kernel.problem, be, found

    return make


def test_keys_tell_kernels_apart(made: Callable[[str, int], tuple[Any, Any, FusedSource]]) -> None:
    at: dict[str, Any] = {"gpu": "NVIDIA H200", "driver": "580.1", "compiler": "nvrtc 13.0 sm_90a"}
    problem, be, fused = made("mriq", 0)
    key = key_of(problem, be, fused, **at)
    assert key == key_of(*made("mriq", 0), **at), "the same again"
    assert key_of(*made("mriq", 1), **at).kernel != key.kernel and key_of(*made("mriq", 1), **at).job == key.job
    other = key_of(*made("cp", 0), **at)
    assert other.job != key.job and other.kernel != key.kernel and other.problem == key.problem
    assert key_of(problem, be, replace(fused, flags=("-x",)), **at).kernel != key.kernel
    assert key_of(problem, be, fused, **{**at, "compiler": "nvrtc 13.1 sm_90a"}).measuring != key.measuring
    none = key_of(problem, be, None, **at)
    assert none.kernel == "" and none.job == key.job
    assert len({key.problem, key.job, key.kernel}) == 3


def test_sources_that_measure_are_in_the_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for part in pairs.MEASURING_PARTS:
        assert (PACKAGE / part).is_file(), part
        (tmp_path / part).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / part).write_bytes((PACKAGE / part).read_bytes())
    now = pairs.measuring("x")
    monkeypatch.setattr(pairs, "PACKAGE", tmp_path)
    assert pairs.measuring("x") == now
    from weft.tune.keys import source_hash

    (tmp_path / "tune" / "cuda_pair.py").write_text("changed")
    source_hash.cache_clear()
    assert pairs.measuring("x") != now


def test_machine_code_is_told_by_its_digest(tmp_path: Path) -> None:
    (tmp_path / "x.cubin").write_bytes(b"code")
    assert pairs.cubin_digest(tmp_path / "x.cubin") == hashlib.sha256(b"code").hexdigest()
    with pytest.raises(OSError, match="No such file"):
        pairs.cubin_digest(tmp_path / "none")
