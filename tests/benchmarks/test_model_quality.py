"""The recorded table replays: what the model says about measured kernels is what the document says it does."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from benchmarks.data.fusions import fusions
from benchmarks.data.measured import Case, Table, Timed, load_table, problem_of, table_of
from benchmarks.data.recorded import kernels_of_then
from benchmarks.model_quality import (
    DOCUMENT,
    OVERVIEW,
    PLACES,
    RECORDED,
    TABLES,
    TYPES,
    Quality,
    judge,
    judge_recorded,
    main,
    markdown,
    overview,
    quantile,
    read_databases,
    spearman,
    write_document,
)
from tests.orchestrate.test_estimate_cuda import convolved
from tests.slow import few

from weft.device.cuda.facts import GpuFacts
from weft.errors import ArtifactError
from weft.kernels.measurement import Measurement, Verdict
from weft.kernels.source import Schedule
from weft.orchestrate.estimate_cuda import gpu_estimate_us, gpu_lower_bound_us
from weft.orchestrate.extract import canonical_text
from weft.tune.store import Database, Record


@pytest.fixture(scope="module")
def table() -> Table:
    return load_table(RECORDED)


judged = cache(judge_recorded)


@pytest.fixture(scope="module")
def quality() -> Quality:
    return judged("first")


def written(place: str) -> str:
    """The figures in one place of the document."""
    found = re.search(rf"<!-- table: {place} -->\n(.*?)\n<!-- end -->", DOCUMENT.read_text(), re.DOTALL)
    assert found is not None
    return found[1]


def bare(text: str) -> str:
    return "\n".join(line for line in text.splitlines() if not line.startswith("as "))


@pytest.mark.parametrize("name", few(TABLES, 1))
def test_the_document_holds_the_figures_of_the_recorded_tables(name: str) -> None:
    """A change of a formula shows here: `python -m benchmarks.model_quality --document` writes what it leads to."""
    assert written(PLACES[name]) == markdown(judged(name))


@pytest.mark.slow
def test_all_tables_meet_all_targets() -> None:
    qualities = {name: judged(name) for name in TABLES}
    assert written(OVERVIEW) == overview(qualities)
    for q in qualities.values():
        ranked = q.ranking["all that a model ranks"]
        assert q.candidates >= 300 and q.problems >= 20
        assert q.violations == 0
        assert ranked.spearman >= 0.8 and ranked.recall_8 >= 0.7
        assert ranked.regret_8 <= 0.03 and ranked.regret_8_p90 <= 0.1
        assert q.fusions_right >= 0.9


@pytest.mark.slow
def test_gates_of_the_later_table() -> None:
    quality = judged("later")
    assert quality.candidates >= 5000 and quality.fusions >= 400
    for kind in ("pointwise", "tma"):
        assert quality.ranking[kind].pairs_right >= 0.8 and quality.ranking[kind].regret_1 <= 0.03
    assert quality.estimates["all"].spearman >= 0.92


def test_gates_of_todays_kernels() -> None:
    quality = judged("types")
    assert quality.candidates >= 2000 and quality.fusions >= 100
    everything = quality.ranking["all that a model ranks"]
    assert everything.pairs_right >= 0.8 and everything.regret_1 <= 0.04
    assert quality.ranking["simt"].spearman >= 0.8
    for kind in ("simt", "tma", "tma, TF32", "mma, TF32", "halo", "pointwise"):
        assert quality.ranking[kind].pairs_right >= 0.7
    assert quality.estimates["all"].spearman >= 0.95 and quality.estimates["all"].error <= 1.2


def test_todays_table_tells_the_types_apart(table: Table) -> None:
    types = load_table(TYPES)
    assert {case.tf32 for case in types.cases} == {True, False} and not any(case.tf32 for case in table.cases)
    of = [case for case in types.cases if case.tf32]
    assert all(types.facts_of(case).tf32 for case in of) and not types.facts.tf32
    texts = {case.text for case in of} & {case.text for case in types.cases if not case.tf32}
    assert len(texts) > 50  # the same problems, measured under both policies
    for whole, *parts in types.fusions:
        assert len({types.cases[i].tf32 for i in (whole, *parts)}) == 1
    assert Table.from_json(types.to_json()) == types
    assert TYPES.stat().st_size < 500_000


def test_gates(quality: Quality) -> None:
    assert quality.ranking["all that a model ranks"].pairs_right >= 0.8
    for template in ("mma", "wgmma"):
        assert quality.ranking[template].pairs_right >= 0.78 and quality.ranking[template].regret_1 <= 0.03
    assert quality.ranking["pointwise"].pairs_right >= 0.7
    assert quality.fusions >= 30
    everything = quality.estimates["all"]
    assert everything.spearman >= 0.9 and everything.error <= 1.25 and 0.8 <= everything.ratio <= 1.25


def test_a_kernel_that_beats_its_bound_is_counted(table: Table) -> None:
    number = next(i for i, c in enumerate(table.cases) if gpu_lower_bound_us(problem_of(c.text), table.facts) > 0.1)
    case = table.cases[number]
    cheating = replace(case.kernels[0], us=0.9 * gpu_lower_bound_us(problem_of(case.text), table.facts))
    few = Table(table.facts, (replace(case, kernels=(cheating, *case.kernels[1:])), *table.cases[:5]))
    assert judge(few).violations == 1
    assert judge(replace(few, cases=table.cases[:6])).violations == 0


def test_a_model_that_is_turned_around_is_judged_bad(table: Table) -> None:
    """The figures must tell a good model from its opposite: times 1/t in place of t."""
    cases = tuple(
        replace(c, kernels=tuple(replace(k, us=100 / k.us) for k in c.kernels))
        for c in table.cases
        if len(c.kernels) > 3
    )
    turned = judge(Table(table.facts, cases))
    assert turned.ranking["all that a model ranks"].pairs_right < 0.3
    assert turned.estimates["all"].spearman < -0.7


def test_texts_come_back(table: Table) -> None:
    for case in table.cases[::7]:
        problem = problem_of(case.text)
        assert canonical_text(problem) == bare(case.text) and problem.key == case.text


def test_tables_come_back(table: Table) -> None:
    small = Table(table.facts, table.cases[:20], ((3, 1, 2),))
    assert Table.from_json(small.to_json()) == replace(
        small,
        cases=tuple(replace(c, kernels=tuple(replace(k, us=round(k.us, 3)) for k in c.kernels)) for c in small.cases),
    )
    assert RECORDED.stat().st_size < 300_000


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: data.update(format=0),
        lambda data: data.pop("facts"),
        lambda data: data["cases"][0].update(text=[10**6]),
        lambda data: data["cases"][0].update(kernels=[[0, "fast"]]),
        lambda data: data["cases"][0].update(tf32="yes"),
        lambda data: data.update(fusions=[[0, 1, 10**6]]),
        lambda data: data["schedules"].__setitem__(0, {"generator": "cuda"}),
    ],
)
def test_a_spoiled_table_is_refused(table: Table, spoil: Callable[..., Any]) -> None:
    data = json.loads(Table(table.facts, table.cases[:3]).to_json())
    spoil(data)
    with pytest.raises(ArtifactError, match="malformed"):
        Table.from_json(json.dumps(data))


@pytest.mark.parametrize(
    "text",
    [
        "%0 = input 4xf32 row\n%1 = nonsense(%0) : 4xf32\nreturn %1 row",
        "%0 = input 4xf33 row\nreturn %0 row",
        "%0 = input 4xf32 row\n%2 = neg(%0) : 4xf32\nreturn %2 row",
        "%0 = input 4xf32 row\n%1 = reshape(%0) __import__('os').getcwd() : 2x2xf32\nreturn %1 row",
        "%0 = input 4xf32 row\n%1 = reshape(%0) ReshapeAttrs(shape=(2, 2), axis=0) : 2x2xf32\nreturn %1 row",
        "%0 = input 4xf32 row\n%1 = neg %0 : 4xf32\nreturn %1 row",
    ],
)
def test_what_is_no_canonical_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        problem_of(text)


def test_fusions_are_found_again(table: Table) -> None:
    """Those of a part of the table, from nothing but its texts."""
    chosen = table.fusions[:3]
    numbers = sorted({i for found in chosen for i in found})
    cases = [table.cases[i] for i in numbers]
    found = fusions(cases, [problem_of(c.text) for c in cases])
    for one in chosen:
        assert tuple(numbers.index(i) for i in one) in found
    for whole, *parts in found:
        lengths = [len(problem_of(cases[i].text).graph) for i in parts]
        assert len(problem_of(cases[whole].text).graph) > max(lengths)


def test_rank_correlation() -> None:
    assert spearman([1, 2, 3, 4], [10, 20, 30, 40]) == pytest.approx(1)
    assert spearman([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)
    assert spearman([1, 2, 3, 4, 5], [2, 1, 4, 3, 5]) == pytest.approx(0.8)
    assert spearman([1, 1, 2], [1, 2, 3]) == pytest.approx(math.sqrt(0.75))  # ties at their mean rank
    assert spearman([1, 1], [1, 2]) == 0.0
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0 and math.isnan(quantile([], 0.5))


@dataclass(frozen=True)
class Nowhere:
    text: str = "{}"


TEXT = "%0 = input 64xf16 row\n%1 = neg(%0) : 64xf16\nreturn %1 row"


def record(
    text: str, threads: int, us: float, started: float, verdict: Verdict = Verdict.OK, *, policy: str = "{}"
) -> Record:
    schedule = Schedule("cuda", (("threads", threads),))
    samples = (us,) if verdict is Verdict.OK else ()
    return Record(Measurement(text, schedule, verdict, samples, kernel=f"{threads}"), policy, started, 0)


def test_a_table_of_records(table: Table) -> None:
    other = TEXT.replace("neg", "abs")
    found = table_of(
        [
            record(other, 64, 3.0, 100.0),
            record(TEXT, 64, 2.0, 1.0),
            record(TEXT, 64, 1.5, 2.0),  # measured again
            record(TEXT, 128, 1.0, 3.0, Verdict.WRONG),
        ],
        table.facts,
        ["first"],
    )
    assert [(c.text, c.network, [k.us for k in c.kernels]) for c in found.cases] == [
        (TEXT, "first", [1.5]),
        (other, "1", [3.0]),
    ]


def test_policies_are_cases_of_their_own(table: Table) -> None:
    given = [record(TEXT, 64, 2.0, 1.0), record(TEXT, 64, 1.0, 2.0, policy='{"allow_tf32":true}')]
    found = table_of(given, table.facts)
    assert [(c.tf32, [k.us for k in c.kernels]) for c in found.cases] == [(False, [2.0]), (True, [1.0])]
    assert Table.from_json(found.to_json()) == found


def test_the_command_reads_a_database_and_leaves_it_alone(
    table: Table, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache, facts, recorded = tmp_path / "cache", tmp_path / "facts.json", tmp_path / "kernels.json"
    with Database.open(cache) as database:
        for case in table.cases[:4]:
            rows = [Measurement(case.text, k.schedule, Verdict.OK, (k.us,), kernel=str(k.us)) for k in case.kernels]
            database.commit(rows, Nowhere())
    facts.write_text(json.dumps({"facts": table.facts.to_json()}))
    before = (cache / "tuning.sqlite3").read_bytes()
    given = ["--database", str(cache / "tuning.sqlite3"), "--facts", str(facts), "--record", str(recorded)]
    assert main(given) == 0
    assert "measured below the sound bound | 0 | 0 of" in capsys.readouterr().out
    assert (cache / "tuning.sqlite3").read_bytes() == before
    assert [c.text for c in load_table(recorded).cases] == [c.text for c in table.cases[:4]]
    with pytest.raises(SystemExit):
        main(["--database", str(cache / "tuning.sqlite3")])
    assert read_databases([cache / "tuning.sqlite3"], facts, ["net"]).cases[0].network == "net"
    with pytest.raises(SystemExit):
        main(["--record", str(recorded)])


def test_a_document_without_a_place_is_refused(quality: Quality, tmp_path: Path) -> None:
    path = tmp_path / "document.md"
    path.write_text("nothing here")
    with pytest.raises(ValueError, match="no place"):
        write_document(quality, path)
    path.write_text("a\n<!-- table: model-quality -->\nold\n<!-- end -->\nb\n")
    write_document(quality, path)
    assert path.read_text() == f"a\n<!-- table: model-quality -->\n{markdown(quality)}\n<!-- end -->\nb\n"


def test_the_best_kernel_of_a_case() -> None:
    schedule = Schedule("cuda")
    assert Case(TEXT, "n", (Timed(schedule, 2.0), Timed(schedule, 1.0))).best_us == 1.0


def test_recorded_kernels_divided_exactly_where_todays_do_not() -> None:
    facts = GpuFacts()
    today = [gpu_estimate_us(convolved(end), facts) for end in ("none", "over 6", "exp where")]
    with kernels_of_then():
        then = [gpu_estimate_us(convolved(end), facts) for end in ("none", "over 6", "exp where")]
    assert then[0] == today[0] and then[1] > today[1] + 3 and then[2] > today[2] + 1
    assert [gpu_estimate_us(convolved(end), facts) for end in ("none", "over 6", "exp where")] == today
