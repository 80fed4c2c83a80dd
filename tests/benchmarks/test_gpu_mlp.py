from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.cases.mlp import ACTIVATIONS, AUTOTUNED, CASES, CLOCK_GHZ, COMPILED, Case, Ran, busy, problem_of, why
from benchmarks.harness import record

from benchmarks import gpu_mlp
from tools import record_tables, tables
from weft.ir.types import DType

WIDE = Case(18, 128, 4)
RAN = Ran(us=100.0, clock_ghz=1.8, launch_us=2.0, group=True, tile_rows=64, at_once=3, registers=160, weight_bytes=0)


def test_cases_are_what_the_issue_asks_for() -> None:
    assert len(set(CASES)) == len(CASES) >= 60
    assert {c.log_rows for c in CASES} == {12, 14, 16, 18, 20, 22}
    assert {c.depth for c in CASES} == {2, 4, 8, 16}
    assert {c.width for c in CASES} == {16, 32, 64, 128, 192, 256, 320, 384, 512}
    for act in ("silu", "gelu", "tanh"):
        assert {128, 192, 256} <= {c.width for c in CASES if c.act == act}
    assert set(COMPILED) | set(AUTOTUNED) <= set(CASES)
    assert len(COMPILED) >= 12


def test_the_floor_is_the_slowest_resource() -> None:
    assert WIDE.floor_us == pytest.approx(WIDE.flops / 989.4e12 * 1e6)
    assert Case(20, 16, 4).floor_us == pytest.approx(4 * 16 * 2**20 / 4.8e12 * 1e6)
    narrow = Case(18, 64, 4, "tanh")  # 2^26 exponentials, 16 per clock of 132 multiprocessors
    assert narrow.floor_us == pytest.approx(2**26 / (16 * 132 * CLOCK_GHZ * 1e3))
    assert narrow.bound_us < narrow.floor_us  # a polynomial may be faster than that


def test_what_is_near_its_floor_needs_no_reason() -> None:
    assert why(WIDE, replace(RAN, us=WIDE.floor_us / 0.61)) == ""
    assert why(WIDE, replace(RAN, us=WIDE.floor_us / 0.59)) != ""


def test_reasons_follow_from_what_was_measured() -> None:
    few = Case(12, 64, 4)
    small = why(few, replace(RAN, us=4.0))
    assert small.startswith("a launch of nothing takes 2.0 of 4.0 us") or "64 tiles of 64 rows" in small
    assert "clock" not in small
    assert "clock 1.30 of 1.83 GHz (power)" in why(WIDE, replace(RAN, clock_ghz=1.3))
    assert "3 warpgroups hide each other's waiting" in why(WIDE, RAN)
    assert "256 KB of weights" in why(Case(18, 256, 4), replace(RAN, us=400.0, weight_bytes=256 << 10))
    assert "special functions" in why(Case(18, 128, 4, "gelu"), RAN)
    uneven = why(Case(14, 64, 4), replace(RAN, us=9.0, at_once=1))  # 256 tiles in places for 132
    assert "2 turns of 132 tiles at once are 97% full" not in uneven
    assert "2 turns" in why(Case(14, 64, 4), replace(RAN, us=9.0, at_once=1, tile_rows=96))


def test_nothing_is_busier_than_it_can_be() -> None:
    at_peak = replace(RAN, us=WIDE.flops / 989.4e12 * 1e6, clock_ghz=CLOCK_GHZ)
    assert busy(WIDE, at_peak)["products"] == pytest.approx(1.0)


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_every_activation_has_a_graph(act: str) -> None:
    graph = problem_of(Case(12, 16, 2, act), DType.BF16).graph
    assert graph.type_of(graph.outputs[0]).shape == (4096, 16)


def _line(c: Case, **more: object) -> dict[str, object]:
    row: dict[str, object] = {
        "record": "case", "case": c.name, "commit": "abc", "rows": c.rows, "width": c.width, "depth": c.depth,
        "act": c.act, "dtype": "bf16", "weft_us": 50.0, "tflops": 600.0, "share": 0.5, "hot": False, "why": "power",
        "floors_us": c.floors_us, "peers_us": {"eager": 200.0, "library": 100.0}, "failures": {}, "ratio": 2.0,
        "best_peer": "library", "error": 0.003, "eager_error": 0.003, "clock_ghz": 1.5, "schedule": "group",
    }  # fmt: skip
    return {**row, **more}


def test_what_is_on_record_is_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    plain, asked, other = Case(18, 64, 16), Case(18, 64, 4), Case(18, 32, 16)
    lines = [_line(plain), _line(asked), _line(other, commit="older")]
    (tmp_path / "gpu").mkdir()
    (tmp_path / "gpu" / "mlp.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    kept = record.Record("gpu", "mlp")
    cases = [plain, asked, other]
    assert gpu_mlp.missing(kept, cases, DType.BF16, [], "abc") == [asked, other]  # torch.compile is missing of one
    assert gpu_mlp.missing(kept, cases, DType.F16, [], "abc") == cases
    kept.fail("RuntimeError: no", case=plain.name)
    assert gpu_mlp.missing(kept, cases, DType.BF16, [], "abc") == cases, "what failed is measured again"
    assert len((tmp_path / "gpu" / "mlp.jsonl").read_text().splitlines()) == 4


def test_tables_show_reason_and_ratio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_tables, "RESULTS", tmp_path)
    assert "not measured" in tables.gpu_mlp()
    head = {"record": "environment", "device": "GPU", "driver": "1", "cuda": "2", "torch": "3", "command": "c"}
    (tmp_path / "nvidia-h200").mkdir()
    lines = [head, _line(WIDE), _line(Case(12, 64, 4), ratio=None, peers_us={})]
    (tmp_path / "nvidia-h200" / "mlp.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    shown = tables.gpu_mlp()
    assert (
        "| 2^18 rows, 4 x 128 relu | **50.00** | 600 | 0.50 | 200.0 | 100.0 |  |  |  | 2.00 | 1.00 | power |" in shown
    )
    assert "ReLU, width 128: geometric mean (least) of 1" in shown
    assert "2^12 rows, 4 x 64 relu | 50.00" in shown  # no peer, no claim
    assert "2 x " in gpu_mlp.table([_line(Case(18, 64, 2))])
