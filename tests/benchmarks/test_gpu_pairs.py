from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from benchmarks.gpu_pairs import Bench, accumulators, candidates, gemm_of, job_of, lc_of, main, mangled, united, varied
from benchmarks.harness.record import Record, lines_of
from benchmarks.pairs_matrix import summaries
from tests.generate.test_bind import Recorder

from benchmarks import gpu_pairs, pair_timeline
from weft.device.cuda.facts import GpuFacts, profile
from weft.generate.bind import Addresses, BoundCuda
from weft.generate.cuda.gemm.tma.shape import TmaConfig
from weft.generate.cuda.role.assemble import solo
from weft.ir.types import DType
from weft.kernels.colocation import FusionShape, RoleRegisters
from weft.tune.cuda_pair import Pair, PairTimes, Rate, Side
from weft.tune.pairs import fused_digest, known
from weft.tune.store import Database


def test_products_by_their_sizes() -> None:
    g = gemm_of("64x32x128")
    assert (g.m, g.n, g.k, g.dtype, g.layout) == (64, 32, 128, DType.BF16, "nt")
    for text in ("64x32", "64x32x0", "axbxc", "64x32x128x1", "-1x2x3"):
        with pytest.raises(ValueError, match="is not of the form"):
            gemm_of(text)


def test_names_of_variables_are_those_of_the_compiler() -> None:
    assert mangled(["w_be0", "w_f0", "table"]) == "_ZN5w_be04w_f05tableE"


def test_a_job_as_roles_has_its_buffers_in_place() -> None:
    job = job_of("histo", small=True)
    names = list(job.job.buffers())
    at = {name: 0x1000 * (i + 1) for i, name in enumerate(names)}
    clear, count = job.addresses(at)
    assert list(clear.outputs) == [at["counts"]] and list(count.inputs) == [at["values"]]
    assert list(count.outputs) == [at["counts"]]
    assert len(job.sources) == 2 and job.shared_bytes >= job.sources[1].roles[0].shared_bytes > 0


def test_products_and_jobs_give_fused_kernels() -> None:
    facts, job = GpuFacts(), job_of("mriq", small=True)
    lc = lc_of("4096x4096x4096", facts, 3, job.shared_bytes, contents=False)
    assert len(lc.sources) == 3 and lc.outputs == (2 * 4096 * 4096,)
    assert min(accumulators(s) for s in lc.sources) <= 64, "one that leaves registers"
    found = candidates(lc, [0, 2], job, facts)
    assert {c.lc for c in found} <= {0, 2} and found
    for one in found:
        role = lc.sources[one.lc].roles[0]
        assert one.made.threads >= role.threads and one.shape.threads >= 96
        assert one.made.grid == (132, 1, 1) and one.shape.fill_grid == (role.grid[0] < 132)


def test_a_network_s_kernel_is_an_lc_role() -> None:
    facts = GpuFacts()
    lc = lc_of("resnet50/conv3x3s2-512-14", facts, 4, 4096)
    assert [len(x) for x in lc.inputs] and any(lc.weights) and len(lc.weights) == len(lc.inputs)
    assert all(s.roles[0].shared_bytes + 4096 <= facts.shared_per_block for s in lc.sources)
    clusters = [source.roles[0].cluster for source in lc.sources]
    assert {math.prod(c) for c in clusters} == {2, 4}, "its fastest kernels run in clusters"
    assert [x.launches[0].cluster for x in lc.others] == [(4, 1, 1)], "the fastest leaves too little shared memory"
    made = candidates(lc, [0], job_of("mriq", small=True), facts)
    assert made and all(c.made.cluster == clusters[0] and not c.shape.fill_grid for c in made)
    both, numbers = united([lc, lc_of("resnet50/conv3x3s2-512-14", facts, 2, 4096, contents=False)])
    assert numbers == [[0, 1, 2, 3], [0, 1]] or len(both.sources) > 4
    with pytest.raises(ValueError, match="nor one of vgg16/"):
        lc_of("resnet50/nothing", facts, 4, 0)


def test_all_launches_of_a_source_take_part() -> None:
    """Rows of 510 numbers begin at addresses that no tensor map takes: operands are copied first."""
    facts, job = GpuFacts(), job_of("mriq", small=True)
    lc = lc_of("512x512x510", facts, 3, job.shared_bytes, contents=False)
    assert len(lc.sources) == 3 and set(lc.whole) >= {s.schedule for s in lc.sources}
    for number, source in enumerate(lc.sources):
        every, launch = lc.launches(number)
        assert [r.name for r in every.launched] == ["copy", ""] and launch == 1
        assert source.roles == (every.launched[1],) and source.workspace_bytes == every.workspace_bytes > 0
    made = candidates(lc, range(3), job, facts)
    assert {c.lc for c in made} == {0, 1, 2}
    both, numbers = united([lc, lc_of("512x512x510", facts, 2, 50_000, contents=False)])
    assert all(both.launches(k)[1] == 1 for k in (*numbers[0], *numbers[1]))

    seen = Recorder()
    bench = object.__new__(Bench)
    alone = solo(lc.launches(0)[0], "lc")
    assert len(alone.launches) == 2, "as the peers run it"
    at = Addresses([0x100000, 0x200000], [0x300000], (), 0x400000, 0)
    given: Any = {"lc": lc, "_bound": [BoundCuda(alone, "/nowhere/x.cubin", driver=seen.driver)], "at": [at]}
    for name, value in given.items():
        setattr(bench, name, value)
    bench.in_order(0, lambda stream: seen.launched.append(("fused", (), True, stream)))(5)
    assert [x[0] for x in seen.launched] == ["lc_copy", "fused"] and {x[3] for x in seen.launched} == {5}


def test_a_source_of_one_launch_stays_what_it_is() -> None:
    lc = lc_of("512x512x512", GpuFacts(), 2, 1024, contents=False)
    assert lc.whole == {} and lc.launches(1) == (lc.sources[1], 0)
    bench = object.__new__(Bench)
    bench.lc = lc

    def fused(stream: int) -> None:
        raise AssertionError(stream)

    assert bench.in_order(0, fused) is fused


def shape(place: str, threads: int, replicas: int, registers: int | None, *, fill: bool) -> FusionShape:
    split = RoleRegisters(24, 200, registers) if registers else None
    return FusionShape(place, threads, 2, 1024, replicas, split, 1, fill)  # type: ignore[arg-type]


def test_hosts_are_tried_with_and_without_a_register_split() -> None:
    lc = lc_of("bert_base/product-2048x3072x768", profile("h200"), 3, 1104, contents=False)
    schedules = [s.schedule for s in lc.sources]
    split = [s for s in schedules if dict(s.params).get("register_split")]
    assert split and len(set(schedules)) == len(schedules)
    for one in split:
        plain = schedules[schedules.index(one) - 1]
        assert TmaConfig.of(plain) == replace(TmaConfig.of(one), register_split=False), "the one before it"
        at, before = (next(s for s in lc.sources if s.schedule == x).roles[0] for x in (one, plain))
        assert before.registers is None and before.threads == at.threads - 96 and at.idle_threads == 96
        assert at.registers is not None and at.registers.producer < at.registers.consumer


def test_shapes_of_each_kind_are_tried() -> None:
    every = [shape("extra", n, r, None, fill=f) for n in (256, 128, 32) for r in (1, 2) for f in (False, True)]
    assert [(s.threads, s.replicas, s.fill_grid) for s in varied(every, 40, fills=True)] == [
        (256, 1, True),
        (256, 2, True),
        (128, 1, True),
    ]
    every = [shape("idle", 96, 1, r, fill=True) for r in (40, 56, 80, 104)] + [shape("idle", 32, 3, 40, fill=True)]
    assert [s.registers and s.registers.best_effort for s in varied(every, 48, fills=True)] == [56, 80]
    assert [s.registers and s.registers.best_effort for s in varied(every, 200, fills=True)] == [104]
    only = [shape("extra", 128, 1, None, fill=False)]
    assert varied(only, 40, fills=False) == only and varied(only, 40, fills=True) == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--lc", "1x2"], "is not of the form"),
        (["--be", "nothing"], "no job 'nothing'"),
        (["--rounds", "0"], "at least 1"),
        (["--hosts", "0"], "at least 1"),
    ],
)
def test_arguments_that_are_wrong(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2 and said in capsys.readouterr().err


class Said:
    """Children that say what the test wants: rows, then how they end."""

    def __init__(self, *ends: tuple[list[str], Exception | None]) -> None:
        self.ends, self.given = list(ends), []  # type: ignore[var-annotated]

    def __call__(self, lc: str, names: list[str], arguments: list[str]) -> Said:
        self.given.append(list(names))
        self.now = self.ends.pop(0)
        return self

    def rows(self, limit_s: float) -> Iterator[dict[str, object]]:
        for name in self.now[0]:
            yield {"record": "case", "case": f"lc/{name}"}
        if self.now[1] is not None:
            raise self.now[1]

    def end(self) -> None:
        pass


def test_a_pair_whose_process_dies_or_hangs_has_a_row_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    said = Said((["a"], RuntimeError("ended with -11")), ([], TimeoutError("no word for 60 s")), (["d"], None))
    monkeypatch.setattr(gpu_pairs, "Child", said)
    rows = list(gpu_pairs.pairs("lc", ["a", "b", "c", "d"], [], 60.0, time.perf_counter() + 1e3))
    assert [(r["case"], r.get("failed")) for r in rows] == [
        ("lc/a", None), ("lc/b", "ended with -11"), ("lc/c", "no word for 60 s"), ("lc/d", None),
    ]  # fmt: skip
    assert said.given == [["a", "b", "c", "d"], ["c", "d"], ["d"]]
    assert [(r["kept"], r["ratio"]) for r in rows if "failed" in r] == [(False, 1.0)] * 2


def record_at(path: Path) -> Record:
    return Record("cpu", gpu_pairs.SUITE, path=path, command="a test")


def kept_in(path: Path) -> dict[str, Any]:
    return {str(x["case"]): x for x in lines_of(path) if x["record"] == "case"}


def test_a_pair_whose_process_dies_is_in_the_record(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    said = Said((["a"], RuntimeError("ended with -11")), (["c"], None))
    monkeypatch.setattr(gpu_pairs, "Child", said)
    path = tmp_path / "r.jsonl"
    record_at(path).add({"record": "case", "case": "lc/b", "kept": True, "ratio": 1.3, "commit": "c0"})
    rows = gpu_pairs.pairs("lc", ["a", "b", "c"], [], 60.0, time.perf_counter() + 1e3)
    assert [r["case"] for r in gpu_pairs.recorded(record_at(path), rows)] == ["lc/a", "lc/b", "lc/c"]
    found = kept_in(path)
    assert set(found) == {"lc/a", "lc/b", "lc/c"} and "failed" not in found["lc/a"]
    lost = found["lc/b"]
    assert (lost["failed"], lost["kept"], lost["ratio"]) == ("ended with -11", False, 1.0)
    assert lost["last_measured"] == "c0" and lost["suite"] == gpu_pairs.SUITE
    assert [s.reason for s in summaries([*lines_of(path)[:1], lost])] == ["ended with -11"]


def test_a_pair_with_which_the_run_was_killed_has_a_row(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    begun: dict[str, object] = {"record": "begun", "case": "lc/a"}
    rows = gpu_pairs.recorded(record_at(path), iter([begun]))
    assert next(rows) is begun
    lost = kept_in(path)["lc/a"]  # as the file is when this process is killed
    assert (lost["failed"], lost["kept"], lost["ratio"]) == ("the run ended meanwhile", False, 1.0)
    done = {"record": "case", "case": "lc/a", "kept": False, "ratio": 1.0, "note": "no shape fits"}
    list(gpu_pairs.recorded(record_at(path), iter([begun, done])))
    assert kept_in(path)["lc/a"]["note"] == "no shape fits" and "failed" not in kept_in(path)["lc/a"]


@pytest.mark.parametrize("known_before", [True, False])
def test_who_interrupts_leaves_the_row_as_it_was(known_before: bool, tmp_path: Path) -> None:
    def interrupted() -> Iterator[Any]:
        yield {"record": "begun", "case": "lc/a"}
        raise KeyboardInterrupt

    path, old = tmp_path / "r.jsonl", {"record": "case", "case": "lc/a", "kept": True, "ratio": 1.3, "commit": "c0"}
    if known_before:
        record_at(path).add(old)
    with pytest.raises(KeyboardInterrupt):
        list(gpu_pairs.recorded(record_at(path), interrupted()))
    assert kept_in(path) == ({"lc/a": old} if known_before else {})


def test_pairs_that_come_too_late_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_pairs, "Child", Said())
    assert list(gpu_pairs.pairs("lc", ["a", "b"], [], 60.0, 0.0)) == [{"record": "late", "case": "lc/a, b"}]


def test_a_process_that_ends_without_its_pairs_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_pairs, "Child", Said(([], None)))
    (row,) = gpu_pairs.pairs("lc", ["a"], [], 60.0, time.perf_counter() + 1e3)
    assert row["failed"] == "its process ended before its pairs did"


class Machine:
    """A GPU of times: kernels of more threads gain more and cost more; `peer`: the best one over the serial one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, peer: float) -> None:
        self.moments, self.runs, self.splits, self.peer = 0, [], 0, peer  # type: ignore[var-annotated]
        code = folder / "x.cubin"
        code.write_bytes(b"code")
        self.loader: Any = SimpleNamespace(
            compile_all=lambda texts: None,
            compiled=lambda text, flags=(): SimpleNamespace(path=code),
            nvrtc=SimpleNamespace(identity=lambda: "nvrtc of a test"),
        )
        for name, stand_in in (
            ("registers_of", lambda loader, job: 40),
            ("refusal", lambda loader, lc, one, facts: "spills" if one.lc == 1 else ""),
            ("rate", self.rate),
            ("measure", self.measure),
        ):
            monkeypatch.setattr(gpu_pairs, name, stand_in)

    def bench(self, lc: Any, database: Database) -> Bench:
        bench = object.__new__(Bench)
        given: Any = {
            "lc": lc, "facts": GpuFacts(), "loader": self.loader, "rounds": 9, "database": database, "gpu": None,
            "times": [50.0] * len(lc.sources), "best": 0, "alone": [None] * len(lc.sources), "memory": (),
            "_job": lambda job, held: (None, 800.0, None, [], 40), "_split": lambda side: None,
            "_pair": lambda one, *_: Pair(Side((), ()), Side((), ()), one, lambda _: None, 0, 0, (80,)),
            "_wrong": self.wrong, "_metered": lambda times, pair: {"watts": {}},
        }  # fmt: skip
        for name, value in given.items():
            setattr(bench, name, value)
        return bench

    def wrong(self, one: Any, pair: Any, wanted: Any, splits: Any) -> str:
        self.splits += bool(splits)
        return ""

    def rate(self, gpu: Any, pair: Any, n: int, rounds: int) -> Rate:
        self.moments += n != 4
        threads = pair.fused.made.threads
        return Rate(50.0 * (1 + threads / 2000), threads / 100)

    def measure(self, gpu: Any, pair: Any, n: int, rounds: int, peers: Any) -> PairTimes:
        self.runs.append(rounds)
        found = self.rate(None, pair, 4, 3)
        peer = 50.0 * n + 800.0
        inside, ran = found.inside_us * n, round(found.blocks * n)
        left = max(0.0, 800.0 * (1 - ran / 80))
        both = {"serial": peer, "streams": peer * self.peer}
        return PairTimes(n, 50.0 * n, 800.0, both, inside + left, inside, 50.5 * n, min(80, ran), True)


def searched(machine: Machine, folder: Path) -> tuple[list[dict[str, Any]], list[Any]]:
    job = job_of("mriq", small=True)
    lc = lc_of("4096x4096x4096", GpuFacts(), 3, job.shared_bytes, contents=False)
    with Database.open(folder) as database:
        rows: list[Any] = list(machine.bench(lc, database).rows(job, [0, 1, 2]))
        return rows, list(known(database))


def test_a_pair_is_searched_and_kept_and_not_measured_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine = Machine(monkeypatch, tmp_path, peer=0.99)
    rows, kept = searched(machine, tmp_path)
    shapes, last = [r for r in rows if r["record"] == "shape"], rows[-1]
    assert last["record"] == "case" and last["case"] == "4096x4096x4096/mriq" and "watts" in last
    assert machine.runs.count(9) >= 1 and machine.splits == machine.runs.count(9), "the last run has all splits"
    assert set(machine.runs) == {3, 9} and machine.runs.count(9) <= machine.runs.count(3) <= machine.moments
    assert {r.get("declined") for r in shapes} == {None, "spills"}
    measured = [r["measured_ratio"] for r in shapes if r["rounds"] == 9]
    assert last["measured_ratio"] == max(measured) and last["kept"] == (max(measured) > 1)
    assert last["fraction"] == pytest.approx(800 / (50 * last["launches"]), abs=1e-3)
    assert last["idle_slowdown"] == 0.01 and last["blocks"] > 0
    assert {r.cubin for r in kept if not r.declined} == {hashlib.sha256(b"code").hexdigest()}
    assert any(r.shape.in_time for r in kept if r.shape), "the best also in time"
    again = Machine(monkeypatch, tmp_path, peer=0.99)
    rows, now = searched(again, tmp_path)
    assert (again.moments, again.runs) == (0, []) and len(rows) == 1 and repr(now) == repr(kept)
    assert {k: v for k, v in rows[0].items() if k != "known"} == {k: v for k, v in last.items() if k != "watts"}


def test_a_pair_that_loses_has_a_verdict(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rows, kept = searched(Machine(monkeypatch, tmp_path, peer=0.5), tmp_path)
    assert not rows[-1]["kept"] and rows[-1]["ratio"] == 1.0 and rows[-1]["measured_ratio"] < 1
    (one,) = [r for r in kept if not r.key.kernel]
    assert one.declined.startswith("do not fuse: 0.") and one.best_peer[0] == "streams"


def test_a_timeline_is_of_the_best_kernel_that_is_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine = Machine(monkeypatch, tmp_path, peer=0.99)
    monkeypatch.setattr(pair_timeline, "refusal", lambda loader, lc, one, facts: "spills" if one.lc == 1 else "")
    rows, kept = searched(machine, tmp_path)
    job, facts = job_of("mriq", small=True), GpuFacts()
    lc = lc_of("4096x4096x4096", facts, 3, job.shared_bytes, contents=False)
    every = candidates(lc, [1, 0, 2], job, facts)
    with Database.open(tmp_path) as database, Database.open(None) as empty:
        best = pair_timeline.chosen_kernel(every, database, machine.loader, lc, facts)
        ratios = {r.key.kernel: r.ratio for r in kept if r.compared and r.key.kernel and not r.declined}
        mine = {fused_digest(c.made) for c in every}
        assert ratios[fused_digest(best.made)] == max(v for k, v in ratios.items() if k in mine)
        first = pair_timeline.chosen_kernel(every, empty, machine.loader, lc, facts)
        assert first == next(c for c in every if c.lc != 1)
        with pytest.raises(ValueError, match="no shape runs"):
            pair_timeline.chosen_kernel([c for c in every if c.lc == 1], empty, machine.loader, lc, facts)
    made = pair_timeline.recording(machine.loader, lc, job, best, facts)
    assert "w_span_ended<" in made.text and made.parameters == best.made.parameters and rows
    with pytest.raises(ValueError, match="does not run: spills"):
        pair_timeline.recording(machine.loader, lc, job, replace(best, lc=1), facts)


@pytest.mark.slow
def test_a_child_says_what_it_died_of() -> None:
    child = gpu_pairs.Child("1x1x1", ["nothing"], [])
    try:
        with pytest.raises(RuntimeError, match=r"ended with 2: .*no job 'nothing'"):
            list(child.rows(120.0))
    finally:
        child.end()
