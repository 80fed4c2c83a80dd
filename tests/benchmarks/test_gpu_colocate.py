"""Rows of models with latency targets beside jobs, on a machine with a virtual clock."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.best_effort import jobs
from tests.colocate.recorded import constant, samples
from tests.colocate.virtual_machine import VirtualMachine
from tools.colocate_tables import HEAD, near, over, policy_rows

from benchmarks import gpu_colocate as g
from weft.colocate.compare import Cell
from weft.colocate.gpu import BUDGET
from weft.colocate.inference_files import input_files, members
from weft.colocate.live import LiveBackend, run
from weft.colocate.operating import Prepared
from weft.colocate.outcome import Outcome
from weft.colocate.policies import make

STEADY = samples(constant(100.0), launch_us=5.0, stop_us=10.0)
PAIR = g.Pair("net", 1, "work", (0.5,), True, ("tally", "green:99", "weft"))


def carried_out(prepared: Sequence[Prepared], cell: Cell) -> Outcome:
    (p,) = prepared
    machine = VirtualMachine(
        [round(x.lc.at(0.5) * 1e3) for x in p.points],
        [x.variant.idle_rate for x in p.points],
        [x.variant.be_us / x.variant.lc_us for x in p.points],
        launch_ns=5_000,
        stop_ns=10_000,
    )
    policy = make(p.policy, p.setting)
    return run(policy, LiveBackend(machine, [(p, cell.arrivals)], policy=policy))


def rows_of(pair: g.Pair, **more: Any) -> list[dict[str, Any]]:
    return list(g.cell_rows("suite", pair, STEADY, 0.5, carried_out, queries=400, seed=1, **more))


def test_all_policies_run_on_the_same_arrivals_and_are_simulated() -> None:
    rows = rows_of(PAIR)
    assert [r["case"] for r in rows] == [f"net/b1/work/0.5/{x}" for x in ("exclusive", "tally", "green:99", "weft")]
    ran = [r for r in rows if "be" in r]
    assert len({r["arrivals"] for r in ran}) == 1 and all(r["target_ms"] == 0.5 for r in ran)
    assert "such a partition" in str(rows[2]["declined"]) and len(ran) == 3
    for r in ran:  # the machine is what the samples say
        assert r["simulated"]["p99_ms"] == pytest.approx(r["p99_ms"], rel=1e-3) and near(r)
        assert r["decision_us"] == 0.0 and "void" not in r
    assert "off_lindley_us" in rows[0] and "off_lindley_us" not in rows[1]


def test_relative_targets_are_those_of_the_model_alone() -> None:
    rows = rows_of(g.Pair("net", 1, "work", (0.5,), False, ("weft",), relative=True))
    alone = rows[0]["p99_ms"]
    assert [r["case"].split("/", 4)[-1] for r in rows] == ["exclusive", "1.1/weft", "1.25/weft"]
    assert [r["target_ms"] for r in rows[1:]] == [pytest.approx(x * alone, abs=1e-3) for x in (1.1, 1.25)]


def test_what_is_known_is_not_run_again() -> None:
    rows = rows_of(PAIR, known=lambda case: case.endswith("/tally"))
    assert [r["policy"] for r in rows] == ["exclusive", "green:99", "weft"]


def test_wefts_row_names_its_peers() -> None:
    def row(policy: str, be: float, *, kept: bool = True) -> dict[str, object]:
        return {"case": f"net/b1/work/0.5/{policy}", "policy": policy, "be": be, "kept": kept}

    rows = [row("exclusive", 0.0), row("serial", 0.3), row("priority", 0.9, kept=False), row("weft", 0.36)]
    found = g.peers_of(rows, PAIR, 0.5)
    assert found is not None and found["peers_be"] == {"serial": 0.3} and found["ratio"] == 1.2
    assert g.peers_of(rows[:3], PAIR, 0.5) is None
    lonely = g.peers_of([row("weft", 0.36)], PAIR, 0.5)
    assert lonely is not None and "ratio" not in lonely


def test_a_table_of_runs() -> None:
    rows = policy_rows(rows_of(PAIR))
    assert all(len(r) == len(HEAD) for r in rows)
    assert rows[-1][0] == "weft in all" and "of 1" in rows[-1][4] and rows[-1][9] == "3 of 3 within 5%"
    assert any("not run" in r[1] for r in rows)
    same = {"p50_ms": 1.0, "p95_ms": 1.0, "p99_ms": 1.0, "be": 0.0}
    far = {**same, "simulated": {**same, "p99_ms": 1.06}}
    assert not near(far) and over(far, "be") == "" and over(far, "p99_ms") == "1.060"
    assert policy_rows([]) == []


def test_jobs_are_those_of_the_folder() -> None:
    assert {p.job for pairs in g.SUITES.values() for p in pairs} - set(g.TWO) <= set(jobs.names())
    spec, folder = g.spec_of("tpacf")
    assert spec.stages == ("directions.toml", "pairs.toml") and (folder / spec.stages[0]).is_file()


def test_networks_are_jobs_too(tmp_path: Path) -> None:
    assert g.network_of("resnet50-b16") == ("resnet50", 16) and g.network_of("bert_base-b16") == ("bert_base", 16)
    assert not any(map(g.network_of, jobs.names()))
    spec = g.network_folder("bert_base-b2", tmp_path)
    assert spec.kind == "network" and spec.name == "bert_base-b2" and spec.outputs == "out"
    names = input_files(tmp_path / "in")
    assert len(names) == g.FILES
    first, second = (members(tmp_path / "in" / n) for n in names[:2])
    assert all(x.shape[0] == 2 for x in first.values())
    assert any(not np.array_equal(first[k], second[k]) for k in first)
    pairs = [p for p in g.SUITES["batch1"] if p.model in ("vgg16", "bert_base")]
    made = dict(g.compiled_for(pairs))
    assert made["vgg16", 1] == (BUDGET, None) and made["resnet50", 16] == made["bert_base", 16] == (None,)


def test_results_are_compared_with_those_alone(tmp_path: Path) -> None:
    class Plan:
        device = torch.device("cpu")

        def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return (x * 2, x + 1)

    for name in ("in", "out"):
        (tmp_path / name).mkdir()
    x = np.arange(3, dtype=np.float32)
    for name in ("0.npz", "1.npz"):
        np.savez(tmp_path / "in" / name, x)
    np.savez(tmp_path / "out" / "1.npz", x * 2, x + 1)
    assert g.wrong_results(Plan(), tmp_path) == ""  # type: ignore[arg-type]
    np.savez(tmp_path / "out" / "0.npz", x * 2, x)
    assert g.wrong_results(Plan(), tmp_path) == "results of 0.npz are others than alone"  # type: ignore[arg-type]


def test_what_is_asked_for(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert {k: len(v) for k, v in g.SUITES.items()} == {
        "policies": 4,
        "batch1": 30,
        "end-to-end": 60,
        "mps": 10,
        "bursts": 3,
    }
    pair = g.SUITES["end-to-end"][0]
    assert g.wanted(pair, ["resnet50/b16"]) and g.wanted(pair, []) and not g.wanted(pair, ["resnet50/b1"])
    g.main(["--dry", "--suite", "end-to-end"])
    assert "60 pairs, 360 runs of 3300 queries" in capsys.readouterr().out
    for wrong in (["--only", "resnet18"], ["--suite", "policies"]):
        with pytest.raises(SystemExit):
            g.main(wrong)
