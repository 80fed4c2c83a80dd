"""The probe of MPS, with programs that stand in for its daemon."""

from __future__ import annotations

import os
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import pytest

from weft.device.cuda import mps
from weft.ir.declined import Declined

CONTROL = """#!{python}
import os, sys
from pathlib import Path
with open({log!r}, "a") as log:
    said = "" if "-d" in sys.argv else sys.stdin.read()
    print(*sys.argv[1:], said.strip(), os.environ["CUDA_MPS_PIPE_DIRECTORY"], file=log)
{body}
"""
OK = (sys.executable, "-c", "pass")


def program(folder: Path, body: str = "") -> tuple[str, Path]:
    """A control program, and what it was told."""
    path, log = folder / "nvidia-cuda-mps-control", folder / "log"
    path.write_text(CONTROL.format(python=sys.executable, log=str(log), body=body))
    path.chmod(0o755)
    return str(path), log


def test_a_daemon_that_answers_has_this_process_as_its_client(tmp_path: Path) -> None:
    control, log = program(tmp_path)
    before = dict(os.environ)
    client = f"import os; assert os.path.isdir(os.environ['{mps.PIPES}']) and os.path.isdir(os.environ['{mps.LOGS}'])"
    with ExitStack() as held:
        pipes = mps.started(held, program=control, client=(sys.executable, "-c", client))
        assert isinstance(pipes, Path) and pipes.is_dir() and os.environ[mps.PIPES] == str(pipes)
    assert dict(os.environ) == before and not pipes.exists()
    assert [line.split()[0] for line in log.read_text().splitlines()] == ["-d", "get_server_list", "quit"]
    assert {line.split()[-1] for line in log.read_text().splitlines()} == {str(pipes)}


@pytest.mark.parametrize(("body", "client", "says", "told"), [
    ("sys.exit('An instance of this daemon is already running')", OK, "does not start: An instance of this", ["-d"]),
    ("sys.exit(3)", OK, "does not start: nvidia-cuda-mps-control ended with 3", ["-d"]),
    ("import time; time.sleep(60)", OK, "does not start in 2 s", ["-d"]),
    ("'-d' in sys.argv or sys.exit('Cannot find MPS control daemon process')", OK,
     "does not answer: Cannot find MPS control daemon", ["-d", "get_server_list", "quit"]),
    ("", (sys.executable, "-c", "import sys; sys.exit('cuInit gives 805')"),
     "does not serve a client: cuInit gives 805", ["-d", "get_server_list", "quit"]),
])  # fmt: skip
def test_what_is_missing_is_told_and_nothing_is_left(
    tmp_path: Path, body: str, client: tuple[str, ...], says: str, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    control, log = program(tmp_path, body)
    before = dict(os.environ)
    with ExitStack() as held:
        found = mps.started(held, program=control, client=client, limit_s=2.0 if "in 2 s" in says else 20.0)
        assert isinstance(found, Declined) and says in found.reason
    assert dict(os.environ) == before and not list(tmp_path.glob("weft-mps-*"))
    assert [line.split()[0] for line in log.read_text().splitlines()] == told


def test_without_the_program_or_the_right_to_run_it_nothing_is_started(tmp_path: Path) -> None:
    with ExitStack() as held:
        for name in ("nowhere/nvidia-cuda-mps-control", str(tmp_path)):
            found = mps.started(held, program=name)
            assert isinstance(found, Declined) and "or it may not be run" in found.reason
    (tmp_path / "text").write_text("no program")
    (tmp_path / "text").chmod(0o755)
    with ExitStack() as held:
        found = mps.started(held, program=str(tmp_path / "text"))
        assert isinstance(found, Declined) and "does not start" in found.reason


def test_a_daemon_that_goes_on_with_the_output_open_is_not_waited_for(tmp_path: Path) -> None:
    control, _ = program(tmp_path, "'-d' in sys.argv and os.fork() == 0 and __import__('time').sleep(5)")
    with ExitStack() as held:
        assert isinstance(mps.started(held, program=control, client=OK, limit_s=3.0), Path)
