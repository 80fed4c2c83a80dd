"""Tests in lanes: what failed, hung or never began is named, and what each took shapes the next run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tools.lanes import Lanes, Unit, known_durations, main, read_report, table, units

from tools import lanes

GOOD = "def test_one(): pass\n\ndef test_two(record_property): record_property('a', 1)\n"
BAD = "import pytest\n\ndef test_wrong(): assert 1 == 2\n\ndef test_left_out(): pytest.skip('no reason')\n"
HANGS = "import time\n\ndef test_hangs(): time.sleep(600)\n"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "root"
    (root / "checks").mkdir(parents=True)
    for name in ("good", "bad", "hangs"):
        (root / "checks" / f"test_{name}.py").write_text({"good": GOOD, "bad": BAD, "hangs": HANGS}[name])
    (root / "pytest.ini").write_text("[pytest]\naddopts = -q\nfilterwarnings = error\n")
    monkeypatch.setattr(lanes, "ROOT", root)
    monkeypatch.setattr(lanes, "END_S", 2.0)
    return root


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    code = main([*map(str, arguments), "--mark", "not gpu"])
    return code, capsys.readouterr().out


def test_all_good(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run(capsys, "checks/test_good.py", "--lanes", 2, "--out", tmp_path / "out")
    assert code == 0 and "checks/test_good.py: 2 passed" in out
    kept = json.loads((tmp_path / "out" / "durations.json").read_text())
    assert set(kept["checks/test_good.py"]) == {"test_one", "test_two"}


def test_what_fails_or_hangs_is_named(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run(capsys, "checks", "--lanes", 3, "--limit", 25, "--out", tmp_path / "out")
    assert code == 1
    assert "checks/test_good.py: 2 passed" in out and "checks/test_bad.py: 1 failed, 1 skipped" in out
    assert "FAILED checks/test_bad.py::test_wrong" in out
    assert "NOT WHOLE checks/test_hangs.py::test_hangs: the time was up" in out


def test_what_has_no_time_is_named(root: Path, tmp_path: Path) -> None:
    waiting = [Unit("checks/test_good.py"), Unit("checks/test_bad.py")]
    found = Lanes(waiting, 1, 1, 1.0, tmp_path, "not gpu")
    found.run()
    assert not found.ran and found.waiting == waiting
    assert table(found.ran, found.waiting)[-1] == "NOT BEGUN checks/test_bad.py"


def test_long_files_are_cut_and_long_parts_begin_first() -> None:
    known = {"a.py": {f"a.py::t{i}": 10.0 for i in range(10)}, "b.py": {"b.py::t": 1.0}}
    there = [*known["a.py"], "a.py::new", "b.py::t"]
    found = units(["a.py", "b.py", "c.py"], known, 50.0, there)
    assert [u.expected_s for u in found] == sorted((u.expected_s for u in found), reverse=True)
    parts = [u for u in found if u.file == "a.py"]
    assert len(parts) == 3 and [t for u in parts for t in u.tests if t != "a.py::new"] == list(known["a.py"])
    assert sum("a.py::new" in u.tests for u in parts) == 1, "a test that nobody has timed runs as well"
    assert Unit("b.py", ("b.py::t",), lanes.START_S + 1.0) in found and "c.py" not in {u.file for u in found}
    assert Unit("c.py") in units(["a.py", "c.py"], known, 50.0), "what was not collected is taken whole"


@pytest.mark.slow
def test_tests_of_the_repository_are_collected() -> None:
    found = lanes.collected(["tests/gpu/device/test_partition.py"], "gpu")
    assert found and all(x.startswith("tests/gpu/device/test_partition.py::test_") for x in found)
    assert lanes.collected(["tests/no_such_file.py"], "gpu") is None


@pytest.mark.slow
def test_times_that_are_kept_are_of_tests_that_there_are() -> None:
    there, known = lanes.collected(["tests/gpu"], "gpu"), known_durations(lanes.ROOT / lanes.TOOK)
    assert there is not None
    tests = {t for x in known.values() for t in x}
    assert len(tests & set(there)) > 0.7 * len(there), "bring `--durations` of a run on a GPU here"


def test_reports_and_durations_that_are_not_whole(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no report"):
        read_report(tmp_path / "none.xml")
    (tmp_path / "cut.xml").write_text("<testsuites><testsuite>")
    with pytest.raises(ValueError, match="no report"):
        read_report(tmp_path / "cut.xml")
    for text in ("", "[]", '{"a": 1}', '{"a": {"b": "c"}}'):
        (tmp_path / "d.json").write_text(text)
        assert known_durations(tmp_path / "d.json") == {}
    assert known_durations(tmp_path / "none.json") == {}


def test_of_a_folder_only_files_that_may_hold_the_mark(root: Path, tmp_path: Path) -> None:
    assert main(["checks", "--lanes", "1", "--out", str(tmp_path / "out")]) == 0
    assert not list((tmp_path / "out").glob("*.log"))
    assert lanes._may_hold(root / "tests" / "gpu" / "nn" / "test_a.py", "gpu")
    assert not lanes._may_hold(root / "tests" / "nn" / "test_a.py", "gpu")


@pytest.mark.parametrize(("arguments", "said"), [(["nowhere"], "no such file"), (["--lanes", "0"], "at least one")])
def test_arguments_that_are_wrong(
    root: Path, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2 and said in capsys.readouterr().err


def test_tests_that_are_named_alone(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = tmp_path / "tests.txt"
    wanted.write_text("checks/test_good.py::test_two\nchecks/test_bad.py::test_left_out\n")
    code, out = run(capsys, "checks", "--lanes", 2, "--tests", wanted, "--out", tmp_path / "out")
    assert code == 0 and "checks/test_good.py: 1 passed" in out and "checks/test_bad.py: 1 skipped" in out
    known = {"a.py": {"a.py::t": 30.0}}
    found = units(["a.py", "b.py"], known, 50.0, ["a.py::u", "a.py::t"])
    assert found == [Unit("a.py", ("a.py::u", "a.py::t"), lanes.START_S + lanes.UNKNOWN_TEST_S + 30.0)]
