"""`weft colocate simulate` and `compare`: tables and JSON that say they are simulated, and clear refusals."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.colocate.recorded import samples

from weft.cli import app as cli
from weft.colocate.arrivals import poisson, write_trace
from weft.kernels.samples import write

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    (tmp_path / "record.json").write_text(write(samples()))
    monkeypatch.chdir(tmp_path)

    def call(*args: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["weft", "colocate", *map(str, args)])
        with pytest.raises(SystemExit) as ended:
            cli.run()
        out = capsys.readouterr()
        return int(ended.value.code or 0), out.out, out.err

    return call


NET = ("-m", "net", "--record", "record.json", "--queries", 800)


def test_one_policy_for_people(run: Run) -> None:
    code, out, _ = run("simulate", "-s", "tally", *NET, "--be", "work", "--load", 0.5)
    assert code == 0 and "simulated" in out and "our implementation of Tally" in out
    assert "0.50 of the peak load" in out and "kept at p99" in out and "of the whole GPU" in out


def test_one_policy_for_programs(run: Run) -> None:
    code, out, _ = run("simulate", "-s", "exclusive", *NET, "--qos", 0.6, "--load", 0.5, "--of", "service", "--json")
    data = json.loads(out)
    assert code == 0 and data["simulated"] is True and data["kept"] and data["over_exclusive"] == 1.0
    assert (
        data["load_of"] == "service rate"
        and data["target_us"] == 600.0
        and data["rate_hz"] == pytest.approx(5000, rel=0.2)
    )


def test_several_policies_in_a_table(run: Run) -> None:
    code, out, _ = run("compare", *NET, "--be", "work", "-s", "weft,tally,mps", "--load", 0.6)
    assert code == 0 and out.startswith("simulated: net beside work")
    lines = [line.split()[0] for line in out.splitlines() if line.strip()]
    assert [x for x in lines if x in ("exclusive", "weft", "tally")] == ["exclusive", "weft", "tally"]
    assert "mps: not run: no samples of net beside work by mps" in out


def test_all_policies_for_programs(run: Run) -> None:
    code, out, _ = run("compare", *NET, "--be", "work", "--format", "json", "--loads", "0.2,0.4")
    data = json.loads(out)
    names = [r["policy"] for r in data["runs"]]
    assert code == 0 and data["simulated"] is True and names[0] == "exclusive" and len(names) == 11
    assert list(data["refused"]) == ["mps"] and len(data["over_load"]) == 22
    assert all(r["simulated"] and r["arrivals_digest"] == data["runs"][0]["arrivals_digest"] for r in data["runs"])


def test_the_same_command_twice_says_the_same(run: Run) -> None:
    args = ("simulate", "-s", "weft", *NET, "--be", "work", "--json", "--seed")
    assert run(*args, 3)[1] == run(*args, 3)[1] != run(*args, 4)[1]


def test_arrivals_of_a_trace(run: Run, tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text(write_trace(poisson(4000.0, 500, seed=1)))
    data = json.loads(run("simulate", "-s", "exclusive", *NET, "--arrivals", "t.txt", "--json")[1])
    assert (
        data["load_of"] == "trace"
        and data["arrivals"] == "trace t.txt"
        and data["rate_hz"] == pytest.approx(4000, rel=0.2)
    )
    _, out, _ = run("simulate", "-s", "exclusive", *NET, "--arrivals", "gamma:3", "--json")
    assert json.loads(out)["arrivals"] == "gamma cv=3"


def test_a_job_by_its_file(run: Run, tmp_path: Path) -> None:
    (tmp_path / "k.toml").write_text("")
    (tmp_path / "job.toml").write_text('name="work"\nkind="kernels"\nstages=["k.toml"]\n')
    code, out, _ = run("simulate", "-s", "tally", *NET, "--be", "job.toml", "--json")
    assert code == 0 and json.loads(out)["job"] == "work"


@pytest.mark.parametrize(("args", "code", "said"), [
    (("simulate", "-s", "magic", *NET), 4, "policy 'magic': there is none of this name [W206]"),
    (("simulate", "-s", "weft", *NET), 4, "it shares the GPU with a job"),
    (("simulate", "-s", "mps", *NET, "--be", "work"), 4, "policy 'mps': no samples of net beside work by mps"),
    (("simulate", "-s", "weft", *NET, "--be", "nothing"), 4, "no samples of the job 'nothing'"),
    (("simulate", "-s", "exclusive", "-m", "nets", "--record", "record.json"), 4, "no samples of the model 'nets'"),
    (("simulate", "-s", "exclusive", "-m", "net"), 2, "option '--record': samples that were recorded on a GPU"),
    (("simulate", "-s", "exclusive", "-m", "net", "--record", "none.json"), 3, "none.json: it cannot be read"),
    (("simulate", "-s", "exclusive", "-m", "net", "--record", "bad.json"), 3, "bad.json: no JSON"),
    (("simulate", "-s", "exclusive", "-m", "net", "--record", "other.json"), 3, "malformed SampleRecord"),
    (("simulate", "-s", "exclusive", *NET, "--qos", 0.05), 2, "alone takes 0.104 ms"),
    (("simulate", "-s", "exclusive", *NET, "--load", 0), 2, "a load of 0"),
    (("simulate", "-s", "exclusive", *NET[:-1], 0), 2, "option '--queries'"),
    (("simulate", "-s", "exclusive", *NET, "--seed", -1), 2, "option '--seed'"),
    (("simulate", "-s", "exclusive", *NET, "--arrivals", "gamma:x"), 2, "no process 'gamma:x'"),
    (("simulate", "-s", "exclusive", *NET, "--arrivals", "nowhere.txt"), 2, "nowhere.txt: arrivals: it cannot be read"),
    (("simulate", "-s", "exclusive", *NET, "--arrivals", "bad.json"), 2, "the first line is not"),
    (("simulate", "-s", "tally", *NET, "--be", "none.toml"), 2, "none.toml: path: it cannot be read"),
    (("compare", *NET), 2, "option '--be'"), (("compare", *NET, "--be", "work", "-s", "weft,magic"), 4, "'magic'"),
    (("compare", *NET, "--be", "work", "--loads", "a"), 2, "option '--loads'"),
    (("compare", *NET, "--be", "work", "--loads", ",".join(["0.5"] * 13)), 2, "13 loads"),
    (("compare", *NET, "--be", "work", "-s", "weft", "--report", "no/report.html"), 3, "it cannot be written"),
])  # fmt: skip
def test_refusals(run: Run, tmp_path: Path, args: tuple[object, ...], code: int, said: str) -> None:
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "other.json").write_text('{"format": 1}')
    ended, out, err = run(*args)
    assert (ended, out) == (code, "") and said in err and "Traceback" not in err


def test_names_of_a_record_cannot_write_to_the_terminal(run: Run, tmp_path: Path) -> None:
    text = write(samples()).replace('"work"', '"w\\u001b[31m[bold]x"').replace('"net"', '"n\\u202e[red]"')
    (tmp_path / "record.json").write_text(text)
    named = ("-m", "n\u202e[red]", "--be", "w\x1b[31m[bold]x", "--record", "record.json")
    code, out, _ = run("compare", *named, "-s", "tally", "--queries", 200)
    assert code == 0 and "\x1b" not in out and "\u202e" not in out and "[bold]" in out
