"""A budget of an SM at the command line and in the report; records from before have no word of it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tests.cli.test_limits import chain
from tests.report.records import make_record as record

from weft.cli import app as cli
from weft.kernels.dataclass_json import from_json, to_json
from weft.kernels.record import CompileRecord
from weft.report import render

BUDGET = "registers=49152,shared=200KiB,threads=1792,ctas=24"
SHARE = "2 CTAs: registers 50 %, shared 31 %, threads 25 %"
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    for name in [n for n in os.environ if n.startswith("WEFT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path / "cache"))

    def call(*args: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["weft", *map(str, args)])
        with pytest.raises(SystemExit) as ended:
            cli.run()
        code = int(ended.value.code or 0)
        out = capsys.readouterr()
        return code, out.out, out.err

    return call


def budgeted() -> CompileRecord:
    plain = record()
    first, *others = plain.steps
    environment = tuple(sorted({**dict(plain.environment), "sm_budget": BUDGET}.items()))
    return replace(plain, environment=environment, steps=(replace(first, sm_share=SHARE), *others))


def test_a_cpu_refuses_it(run: Run, tmp_path: Path) -> None:
    code, _, err = run("compile", chain(tmp_path / "m.onnx", 2), "--budget", 0, "--sm-budget", BUDGET)
    assert code == 2 and "[W001]" in err and "option 'sm_budget'" in err and "the device is 'cpu'" in err


def test_what_is_none_is_said_before_anything_is_read(run: Run, tmp_path: Path) -> None:
    code, _, err = run("compile", tmp_path / "none.onnx", "--sm-budget", "registers=100")
    assert code == 2 and "option '--sm-budget'" in err and "no multiple of 256" in err


def test_explain_shows_budget_and_shares(run: Run, tmp_path: Path) -> None:
    for name, given in (("with", budgeted()), ("without", record())):
        path = tmp_path / f"{name}.record.json"
        path.write_text(json.dumps(to_json(given)))
        code, out, _ = run("explain", path, "0")
        shown = " ".join(out.split())
        assert code == 0 and ("of an SM" in shown) is (name == "with")
        assert (f"within {BUDGET} of each SM" in shown) is (SHARE in shown) is (name == "with")
        told = json.loads(run("explain", path, "0", "--format", "json")[1])
        assert [s.get("sm_share") for s in told] == [SHARE if name == "with" else None]


def test_the_report_shows_them_too() -> None:
    page, plain = render(budgeted()), render(record())
    assert SHARE in page and BUDGET in page
    assert SHARE not in plain and "sm_budget" not in plain.replace("report.js", "")


def test_records_without_a_budget_are_as_they_were() -> None:
    for given in (record(), budgeted()):
        stored = json.loads(json.dumps(to_json(given)))
        assert ["sm_share" in s for s in stored["steps"]] == [bool(s.sm_share) for s in given.steps]
        read = from_json(CompileRecord, stored)
        assert read.steps == given.steps and read.sm_budget == given.sm_budget
    assert not record().sm_budget and budgeted().sm_budget == BUDGET
