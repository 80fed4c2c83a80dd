"""Fused kernels under compute-sanitizer, without a GPU: their order, their texts, what becomes of what a tool says."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Collection
from pathlib import Path

import pytest
from benchmarks.best_effort import jobs
from benchmarks.gpu_pairs import job_of
from benchmarks.harness.record import Row
from tests.slow import few
from tools.sanitize import PLANTED
from tools.sanitize_pairs import (
    BINDINGS,
    CHUNKS,
    CO_RUNNER,
    NO_LC,
    Case,
    Share,
    Watch,
    cases,
    digest,
    explained,
    followed,
    hosts,
    kernel_of,
    main,
    ordered,
    reported,
    rows_of,
    shared_out,
    summary,
)
from tools.sanitize_table import sanitize_rows

from tools import sanitize_pairs
from weft.device.cuda.facts import profile
from weft.device.cuda.nvrtc import Nvrtc, find_nvrtc
from weft.generate.cuda.table import NAMED
from weft.ir.declined import Declined
from weft.kernels.colocation import FusedSource

FACTS = profile("h200")


def test_all_triples_once_and_the_most_unlike_ones_first() -> None:
    plain = ("extra", "two roles", "filling", "in time")
    by_template: dict[str, list[tuple[str, Collection[str]]]] = {
        "a": [("a1", plain), ("a2", BINDINGS)], "b": [("b1", plain)], "c": [("c1", plain)],
    }  # fmt: skip
    names = ["w", "x", "y", "z"]
    every = ordered(by_template, names)
    assert len({str(c) for c in every}) == len(every) == 4 * (5 + 4 + 4) + 2 * 4
    assert {c.template for c in every[:3]} == set(by_template) and len({c.job for c in every[:3]}) == 3
    front = [c for c in every[: 4 * 5] if c.template != NO_LC]
    assert {(c.template, c.job) for c in front} == {(t, n) for t in by_template for n in names}
    assert {c.label for c in every if c.binding == "idle"} == {"a2"}
    counts = Counter((c.template, c.binding) for c in every)
    assert set(counts.values()) == {4} and counts[NO_LC, CO_RUNNER] == counts[NO_LC, CHUNKS] == 4


OF_TRAINING = {"depthwise_wgrad", "attention_gradient", "embedding_gradient"}
"""No latency-critical model has them."""


def test_every_template_has_its_cases() -> None:
    every = cases(FACTS)
    assert {c.template for c in every} >= {*NAMED, "pools"} - OF_TRAINING
    assert {c.job for c in every} == set(jobs.names()) and {c.binding for c in every} == {*BINDINGS, CO_RUNNER, CHUNKS}
    assert {str(c) for c in cases(FACTS, ["tma"])} == {str(c) for c in every if c.template == "tma"}
    assert all(c.label == NO_LC or hosts(FACTS)[c.label].template == c.template for c in every)


KINDS = [f"tma/{x}/histo" for x in BINDINGS[:-1]] + [
    "attention_tma/idle/cp",
    f"{NO_LC}/{CO_RUNNER}/fft",
    f"{NO_LC}/{CHUNKS}/fft",
]


@pytest.mark.slow
@pytest.mark.parametrize("name", few(KINDS, 1))
def test_kernels_compile_for_an_entry_of_their_own(name: str, tmp_path: Path) -> None:
    nvrtc = find_nvrtc()
    assert isinstance(nvrtc, Nvrtc)
    case = next(c for c in cases(FACTS) if str(c) == name)
    made = kernel_of(case, job_of(case.job, small=True), FACTS)
    assert isinstance(made, FusedSource), made
    shape = made.shape
    if case.binding in (CO_RUNNER, CHUNKS):
        assert shape is None
    else:
        assert shape is not None
        found = {"idle": shape.place == "idle", "filling": shape.fill_grid, "in time": shape.in_time}
        assert [k for k, x in (found | {"two roles": shape.replicas == 2}).items() if x] == [
            x for x in BINDINGS[1:] if x == case.binding
        ]
    taken = nvrtc.compile(made.text, arch="sm_90a", flags=made.flags, cache_dir=tmp_path).of(made.entry)
    assert taken.registers > 0 and len(digest(made)) == 12
    others = {
        kernel.entry
        for c in cases(FACTS)[:9]
        if isinstance(kernel := kernel_of(c, job_of(c.job, small=True), FACTS), FusedSource)
    }
    assert made.entry not in others


LOG = """========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at pair_one+0x70
=========     and Read access at pair_one+0xb0 [240 hazards]
========= Invalid __global__ write of size 4 bytes
=========     at planted+0x110
"""
SAID: list[Row] = [
    {"begun": "tma/extra/cp"},
    {"case": "tma/extra/cp", "entry": "pair_one", "kernel": "12", "lc": "product", "seconds": 1.5, "blocks": 6},
    {"begun": "tma/idle/cp"},
    {"case": "tma/idle/cp", "declined": "no shape", "seconds": 0.1},
    {"begun": "mma/extra/cp"},
    {"case": "mma/extra/cp", "known": True, "seconds": 0.1},
    {"begun": "mlp/extra/cp"},
    {
        "case": "mlp/extra/cp",
        "entry": "pair_two",
        "kernel": "34",
        "lc": "layers",
        "seconds": 1.0,
        "wrong": "the results",
    },
]


def test_rows_of_what_was_said() -> None:
    rows, found = rows_of("racecheck", [*SAID, {"begun": PLANTED}], LOG, "")
    assert found and [x["case"] for x in rows] == ["tma/extra/cp", "tma/idle/cp", "mlp/extra/cp"]
    assert (rows[0]["errors"], rows[0]["blocks"], rows[0]["explained"]) == (1, 6, "")
    assert "Race reported" in str(rows[0]["said"])
    assert rows[1]["declined"] == "no shape" and rows[2]["failed"] == "the results" and rows[2]["errors"] == 0
    assert "1 fused kernels, 0 clean, 0 with explained reports, 1 with others, 1 failed, 1 declined" in summary(
        rows, ["racecheck"]
    )


def test_a_table_of_what_was_found() -> None:
    rows = [*rows_of("memcheck", SAID, "", "")[0], *rows_of("racecheck", SAID, LOG, "")[0]]
    made = {row[0]: row[1:] for row in sanitize_rows(rows)}
    assert made["tma"] == ["1", "1", "1", "1", "0", "0", "0", "1", "0", "0", "1", "0"]
    assert made["mlp"] == ["1", "1", "0", "0", "0", "0", "1", "0", "0", "0", "0", "1"]
    assert made["**all**"][0:2] == ["1", "1"] and not sanitize_rows([])


def test_a_case_in_which_a_process_ends_fails() -> None:
    rows, found = rows_of("memcheck", [*SAID, {"begun": "simt/extra/cp"}], "", "no word for 60 s")
    assert not found and rows[-1] == {
        "record": "case", "suite": "colocate-sanitize", "case": "simt/extra/cp", "tool": "memcheck",
        "failed": "no word for 60 s",
    }  # fmt: skip


def test_cases_behind_the_last_report_that_is_printed_have_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tool prints so many reports and then none: what comes behind them is not clean, but unknown."""
    said: list[Row] = [*SAID[:2], *SAID[6:], {"begun": PLANTED}]
    assert reported(said, LOG) == said
    monkeypatch.setattr(sanitize_pairs, "PRINTED", 1)
    silent = LOG.partition("========= Invalid")[0]
    assert reported(said, silent) == said[:2]
    rows, found = rows_of("racecheck", reported(said, silent), silent, "")
    assert [(x["case"], x["errors"]) for x in rows] == [("tma/extra/cp", 1)] and not found
    assert reported(said, LOG) == said, "it found what was planted: nothing was left out"
    assert reported(said, "") == said


@pytest.mark.skipif(isinstance(find_nvrtc(), Declined), reason="no NVRTC")
def test_racecheck_follows_meetings_of_a_cluster() -> None:
    """One more barrier behind each, of the role's own threads, with a number that no role has; nothing else changes."""
    every = [c for c in cases(FACTS) if c.binding == "extra" and c.job == "histo"]
    made = {c.template: kernel_of(c, job_of(c.job, small=True), FACTS) for c in every}
    met = 0
    for template, kernel in made.items():
        assert isinstance(kernel, FusedSource), kernel
        changed = followed(kernel)
        behind = r"(::w_cluster_meet<[^;]*;) w_barrier<(\d+), (\d+)>\(\);"
        added = re.findall(behind, changed.text)
        if changed == kernel:
            assert "::w_cluster_meet<" not in kernel.text
            continue
        met += 1
        assert len(added) == kernel.text.count("::w_cluster_meet<") > 0, template
        assert {int(n) for *_, n in added} == {kernel.lc.threads}
        assert not {int(b) for _, b, _ in added} & {b for role in (kernel.lc, *kernel.be) for b in role.barriers}
        assert re.sub(behind, r"\1", changed.text) == kernel.text
    assert met >= 3
    nvrtc = find_nvrtc()
    assert isinstance(nvrtc, Nvrtc)
    cluster = made["loops, cluster"]
    assert isinstance(cluster, FusedSource)
    nvrtc.compile(followed(cluster).text, arch="sm_90a", flags=cluster.flags)


def test_only_reports_that_are_known_are_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sanitize_pairs, "EXPLAINED", (("racecheck", "240 hazards", "because"),))
    assert explained("racecheck", ["x [240 hazards]", "y [240 hazards]"]) == "because"
    assert explained("racecheck", ["x [240 hazards]", "another"]) == ""
    assert explained("memcheck", ["x [240 hazards]"]) == "" and explained("racecheck", []) == ""


EXITED = """========= Potential invalid __shared__ read of size 4 bytes at {}+0x4290 by thread (0,0,0) in block (0,0,0)
=========     Address 0x1000410 is located in a block that might have already exited
"""


def test_an_exit_of_a_cluster_is_explained_where_the_role_alone_is_clean() -> None:
    """The tool does not follow mbarriers; alone, its CTAs meet by barrier.cluster at the same places."""
    said: list[Row] = [{"begun": "x"}, {**SAID[1], "alone": ["k_alone"]}]
    rows, _ = rows_of("racecheck", said, EXITED.format("pair_one"), "")
    assert rows[0]["errors"] == 1 and "mbarriers" in str(rows[0]["explained"])
    rows, _ = rows_of("racecheck", said, EXITED.format("pair_one") + EXITED.format("k_alone"), "")
    assert (rows[0]["errors"], rows[0]["explained"]) == (2, "")
    rows, _ = rows_of("memcheck", said, EXITED.format("pair_one"), "")
    assert (rows[0]["errors"], rows[0]["explained"]) == (1, "")


def test_processes_begin_at_the_front() -> None:
    every = [Case("t", "t", "extra", str(k)) for k in range(10)]
    shares = shared_out(every, ["memcheck", "racecheck"], 6)
    assert [(s.tool, [c.job for c in s.left]) for s in shares[:2]] == [
        ("memcheck", ["0", "3", "6", "9"]),
        ("racecheck", ["0", "3", "6", "9"]),
    ]
    assert len(shares) == 6 and sorted(c.job for s in shares if s.tool == "memcheck" for c in s.left) == sorted(
        c.job for c in every
    )


PROGRAM = """#!{python}
import json, pathlib, sys, time
folder = pathlib.Path(sys.argv[sys.argv.index("--watched") + 1])
log = open(sys.argv[sys.argv.index("--log-file") + 1], "w")
told = json.loads((folder / "cases.json").read_text())
report = (folder / "report.jsonl").open("a")
def say(**row):
    report.write(json.dumps(row) + "\\n")
    report.flush()
for (template, label, binding, job), known in told["cases"]:
    case = f"{{template}}/{{binding}}/{{job}}"
    say(begun=case)
    if job == "dies":
        sys.exit(3)
    if job == "hangs":
        time.sleep(60)
    if job == "races":
        log.write(f"========= Error: Race reported between Write access at e{{job}}+0x70\\n")
    say(case=case, entry="e" + job, kernel="k" + known, lc=label, seconds=0.1, blocks=1)
say(begun="planted fault")
log.write("========= Invalid __shared__ read\\n=========     at planted+0x10\\n")
"""


def test_a_process_is_started_anew_behind_the_case_that_ended_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "compute-sanitizer"
    program.write_text(PROGRAM.format(python=sys.executable))
    program.chmod(0o700)
    monkeypatch.setattr(sanitize_pairs, "SILENT_S", 1.0)
    names = ["a", "dies", "b", "hangs", "races", "c"]
    every = [Case("t", "t", "extra", n) for n in names]
    watch = Watch(str(program), known={"t/extra/c/memcheck": "before"})
    watch.run([Share("memcheck", every)], 30)
    rows = {str(x["case"]).rpartition("/")[2]: x for x in watch.rows}
    assert list(rows) == names and not watch.unfound
    assert "failed" in rows["dies"] and "no word for 1 s" in str(rows["hangs"]["failed"])
    assert rows["races"]["errors"] == 1 and rows["b"]["errors"] == rows["c"]["errors"] == 0
    assert rows["c"]["kernel"] == "kbefore" and "said" not in rows["c"]
    assert len(capsys.readouterr().out.splitlines()) == len(names)
    assert [json.loads(json.dumps(x)) for x in watch.rows] == watch.rows


def test_a_tool_that_does_not_run_here_is_said(tmp_path: Path) -> None:
    refuses = tmp_path / "compute-sanitizer"
    refuses.write_text("#!/bin/sh\necho '========= Device not supported'\nexit 1\n")
    refuses.chmod(0o700)
    watch = Watch(str(refuses))
    watch.run([Share("racecheck", [Case("t", "t", "extra", "a")])], 30)
    assert watch.rows == [] and "Device not supported" in watch.unfound[0]


def test_arguments_that_are_wrong(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--processes", "0"])
    assert ended.value.code == 2 and "at least one" in capsys.readouterr().err
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 2 and "no compute-sanitizer" in capsys.readouterr().err
    main(["--list", "--only", "aes"])
    assert all(line.endswith("/aes") for line in capsys.readouterr().out.splitlines())
