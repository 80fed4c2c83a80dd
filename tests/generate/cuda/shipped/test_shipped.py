"""The table of measured schedules: what it says, what it changes, when it has no say, and that it is not stale."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from benchmarks.model_quality import LATER, RECORDED
from benchmarks.shipped_table import TABLE, figures, judged, known, stale, table_of, without

from weft.device.cuda.facts import profile
from weft.errors import ArtifactError
from weft.gemm.spec import Gemm
from weft.generate.cuda import templates
from weft.generate.cuda.gemm.common.product import product
from weft.generate.cuda.gemm.mma import cost
from weft.generate.cuda.generator import CudaGenerator
from weft.generate.cuda.shipped import (
    Bucket,
    Shipped,
    kind_of,
    loops_bucket,
    measured_best,
    product_bucket,
    promoted,
    table_for,
)
from weft.generate.cuda.shipped.table import MARGIN, MOST_LOOKED_AT, REMEDY, Tried
from weft.generate.cuda.space import pruned, space
from weft.ir import attrs as a
from weft.ir.declined import Declined
from weft.ir.graph import GraphBuilder
from weft.ir.prims import Prim
from weft.ir.types import DType, TensorType
from weft.kernels.candidate import Problem
from weft.kernels.formats import Format
from weft.kernels.source import Schedule

H200 = profile("h200")
HERE = Bucket("here", (10, 4))
S, T, U = (Schedule("cuda", (("template", name),)) for name in "stu")
REBUILD = "the table is stale: `python -m benchmarks.shipped_table --write` makes it again of the records"


def made(*tried: Tried, at: tuple[int, ...] = HERE.point) -> Shipped:
    return Shipped("x", {"here": {at: tried}})


def bucket_of(g: Gemm) -> Bucket:
    p = product(g.problem())
    assert not isinstance(p, Declined)
    found = product_bucket(p, cost.sizes_of(p))
    assert found is not None
    return found


@pytest.fixture
def other_tables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A folder in place of the package's."""
    files = resources.files
    shipped = "weft.generate.cuda.shipped"
    monkeypatch.setattr(resources, "files", lambda package: tmp_path if package == shipped else files(package))
    table_for.cache_clear()
    yield tmp_path
    table_for.cache_clear()


# -- what it says


def test_what_was_fastest_in_a_bucket_is_expected_to_be_the_fastest_near_it() -> None:
    found = made(Tried("s", 5, 0.5), Tried("t", 5, 0.0))
    here, near, far = (found.expected(Bucket("here", (x, 4))) for x in (10, 11, 40))
    assert here["t"] < 0 < here["s"]
    assert here["t"] < near["t"] < 0  # less is known there
    assert far == {}
    assert found.expected(Bucket("elsewhere", (10, 4))) == {}


def test_little_that_is_known_counts_little() -> None:
    often, once = (made(Tried("s", n, 0.4), Tried("t", n, 0.0)).expected(HERE)["t"] for n in (20, 1))
    assert often < once < 0


def test_the_first_becomes_what_is_expected_to_win_clearly_and_the_rest_keeps_its_order() -> None:
    clear = made(Tried("s", 9, 0.5), Tried("t", 9, 0.3), Tried("u", 9, 0.0))
    assert promoted(HERE, [S, T, U], "x", table=clear) == [U, S, T]
    close = made(Tried("s", 99, MARGIN * 0.9), Tried("t", 99, 0.0))
    assert promoted(HERE, [S, T, U], "x", table=close) == [S, T, U]
    assert promoted(None, [S, T, U], "x", table=clear) == [S, T, U]
    assert promoted(HERE, [S], "x", table=clear) == [S]
    many = [Schedule("cuda", (("n", i), ("template", "s"))) for i in range(MOST_LOOKED_AT)]
    assert promoted(HERE, [*many, U], "x", table=clear) == [*many, U]


def test_a_model_that_is_sure_outweighs_a_table_that_is_not() -> None:
    found = made(Tried("s", 2, 0.2), Tried("t", 2, 0.0))
    assert promoted(HERE, [S, T], "x", {S: 1.0, T: 1.01}, found) == [T, S]
    assert promoted(HERE, [S, T], "x", {S: 1.0, T: 2.0}, found) == [S, T]


# -- its file


def test_a_table_is_written_and_read_again() -> None:
    found = made(Tried("s", 5, 0.5), Tried("t", 7, 0.0))
    again = Shipped.from_json(found.to_json())
    assert again.buckets == found.buckets
    assert again.gpu == "x"


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda d: d | {"format": 7}, "format 7, not 1"),
        (lambda d: {k: v for k, v in d.items() if k != "places"}, "KeyError"),
        (lambda d: d | {"kinds": []}, "IndexError"),
        (lambda d: d | {"places": {"here": [[[1, 2], [[0, 0, 5]]]]}}, "cannot be"),
        (lambda d: d | {"places": {"here": [[[1, 2], [[0, 1, -5]]]]}}, "cannot be"),
        (lambda d: d | {"places": {"here": [[[1], [[0, 1, 5]]], [[1, 2], [[0, 1, 5]]]]}}, "cannot be"),
        (lambda d: d | {"places": [1]}, "AttributeError"),
        (lambda d: [d], "TypeError"),
    ],
)
def test_a_malformed_or_old_table_is_an_error_that_says_what_to_do(damage: Callable[..., Any], told: str) -> None:
    data = json.loads(made(Tried("s", 5, 0.5)).to_json())
    with pytest.raises(ArtifactError, match=told) as raised:
        Shipped.from_json(json.dumps(damage(data)))
    assert REMEDY in str(raised.value)
    with pytest.raises(ArtifactError, match="malformed"):
        Shipped.from_json(made(Tried("s", 5, 0.5)).to_json()[:50])


def test_without_a_readable_table_the_models_decide_and_the_reason_is_named(other_tables: Path) -> None:
    told = table_for("NVIDIA H200")
    assert isinstance(told, Declined)
    assert "nvidia-h200.json cannot be read: No such file" in told.reason
    alone = [templates.schedules(g.problem(), replace(H200, name="none")) for g in (Gemm(layout="nt"), Gemm(m=16))]
    assert alone == [templates.schedules(g.problem(), H200) for g in (Gemm(layout="nt"), Gemm(m=16))]
    for text, why in (("{", "malformed"), (made(Tried("s", 1, 0.0)).to_json(), "is that of x")):
        (other_tables / "nvidia-h200.json").write_text(text)
        table_for.cache_clear()
        told = table_for("NVIDIA H200")
        assert isinstance(told, Declined)
        assert why in told.reason


def test_a_gpu_that_was_not_measured_has_no_table() -> None:
    for name in ("NVIDIA H100 80GB HBM3", "NVIDIA H200 NVL", ""):
        told = table_for(name)
        assert isinstance(told, Declined)
        assert told.reason == f"no table of measured schedules for {name}"
    assert measured_best(bucket_of(Gemm(layout="nt")), "", 4) == []


# -- what it changes


def test_the_table_of_the_package_is_small_and_says_where_it_comes_from() -> None:
    assert TABLE.stat().st_size < 300_000
    found = table_for("NVIDIA H200")
    assert isinstance(found, Shipped)
    assert found.gpu == H200.name
    told = found.provenance
    assert {"gpu", "driver", "problems", "measurements", "records", "command"} <= told.keys()
    assert all(record["commit"] and record["date"] for record in told["records"])
    assert told["measurements"] > told["problems"] > 2000


def test_only_the_order_changes() -> None:
    changed = 0
    for g in (Gemm(n, n, k, layout=x) for n in (64, 256, 1024) for k in (64, 512, 4096) for x in ("nn", "nt")):
        problem = g.problem()
        p = product(problem)
        assert not isinstance(p, Declined)
        alone = [s for _, s in templates.modelled(p, H200)]
        found = list(templates.schedules(problem, H200))  # type: ignore[arg-type]
        assert sorted(map(str, alone)) == sorted(map(str, found))
        assert found[1:] == [s for s in alone if s != found[0]]
        changed += found != alone
    assert changed


def test_elementwise_kernels_are_ordered_by_it_too(other_tables: Path) -> None:
    b = GraphBuilder()
    x, y = (b.input(TensorType(DType.F16, (1 << 18,))) for _ in range(2))
    problem = Problem(b.build([b.add(Prim.ADD, x, y)]), "add", (Format.ROW, Format.ROW), (Format.ROW,))
    bucket = loops_bucket(problem)
    assert bucket is not None
    alone = CudaGenerator().schedules(problem, H200)
    assert not isinstance(alone, Declined)
    last = next(s for s in reversed(alone[:MOST_LOOKED_AT]) if kind_of(s) != kind_of(alone[0]))
    tried = (Tried(kind_of(alone[0]), 9, 0.5), Tried(kind_of(last), 9, 0.0))
    (other_tables / "nvidia-h200.json").write_text(Shipped(H200.name, {bucket.key: {bucket.point: tried}}).to_json())
    table_for.cache_clear()
    found = CudaGenerator().schedules(problem, H200)
    assert not isinstance(found, Declined)
    assert list(found) == [last, *(s for s in alone if s != last)]


@pytest.mark.parametrize(
    ("prim", "attrs"),
    [(Prim.REDUCE_SUM, a.ReduceAttrs((1,))), (Prim.WINDOW_MAX, a.WindowAttrs((2, 2), (2, 2), (0, 0), (0, 0), (1, 1)))],
)
def test_reductions_and_windows_stay_with_their_rules(prim: Prim, attrs: a.Attrs) -> None:
    b = GraphBuilder()
    x = b.input(TensorType(DType.F16, (1, 8, 32, 32)))
    graph = b.build([b.add(prim, x, attrs=attrs)])
    assert loops_bucket(Problem(graph, "p", (Format.LAST,), (Format.LAST,))) is None


def test_what_was_fastest_elsewhere_is_among_the_sixteen_of_a_product() -> None:
    g = Gemm(1024, 1024, 1024, layout="nt")
    problem = g.problem()
    best = measured_best(bucket_of(g), H200.name, 4)
    assert best
    ranked = space(problem, H200)
    assert not isinstance(ranked, Declined)
    near = {kind_of(s) for us, s in ranked if us <= 1.4 * ranked[0][0]}
    few = pruned(problem, H200, ranked, 16)
    assert len(few) == len({s for _, s in few}) == 16
    assert set(best) & near <= {kind_of(s) for _, s in few}
    assert few[0][1] == templates.schedules(problem, H200)[0]  # type: ignore[index]


# -- whether it is right


@pytest.mark.slow
def test_no_entry_is_stale() -> None:
    found = table_for("NVIDIA H200")
    assert isinstance(found, Shipped)
    gone = stale(found, known(H200))
    assert not gone, f"{REBUILD}; without a kernel today: {', '.join(sorted(gone))}"
    unknown = Shipped("x", {"here": {HERE.point: (Tried("s", 1, 0.0),)}})
    assert stale(unknown, []) == {"s"}
    assert without(unknown, {"s"}).buckets == {"here": {}}


@pytest.mark.slow
def test_first_choices_for_a_network_that_the_table_has_not_seen_are_better_than_the_models_alone() -> None:
    cases = known(H200, (LATER,))
    chosen = judged(cases, H200, ("resnet50", "bert_base"))
    assert {x.network for x in chosen} == {"resnet50", "bert_base"}
    assert len(chosen) > 100
    model, table_ = (sum(x) / len(chosen) for x in ([c.model for c in chosen], [c.table for c in chosen]))
    assert table_ < model
    assert all(c.model >= 0 <= c.table for c in chosen)
    head, *_ = figures(chosen).splitlines()[2:]
    assert head.startswith(f"| all | {len(chosen)} | {100 * model:.1f} % | {100 * table_:.1f} % |")


@pytest.mark.slow
def test_a_table_is_made_of_the_best_of_each_kind_in_each_problem() -> None:
    case = next(x for x in known(H200, (RECORDED,)) if len({kind_of(s) for s in x.times}) > 2)
    found = table_of([case, case])
    tried = {t.kind: t for t in found.buckets[case.bucket.key][case.bucket.point]}
    assert {t.seen for t in tried.values()} == {2}
    fastest = min(case.times, key=lambda s: case.times[s])
    assert tried[kind_of(fastest)].slower == 0.0
    for kind, t in tried.items():
        best = min(us for s, us in case.times.items() if kind_of(s) == kind)
        assert t.slower == pytest.approx(min(1.0, math.log(best / case.times[fastest])))
