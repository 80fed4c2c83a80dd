"""Faults that are injected beside queries, a few of each that needs no process; and what tells a wrong one."""

from __future__ import annotations

import random

import pytest
from benchmarks.harness.faults import WrongError
from tools.colocate_tables import faults

from benchmarks import colocate_faults as f
from weft.colocate.outcome import Outcome
from weft.colocate.policies.weft import Weft
from weft.kernels.scheduling import Query

QUICK = ("a variant is mispredicted", "the sender dies", "the clock goes back", "the disk is full")


@pytest.mark.parametrize("name", QUICK)
def test_a_fault_does_what_it_may(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f, "QUERIES", 120 if "variant" in name else 20)
    kind, fault = f.ROWS[name]
    assert kind == "kernels"
    with f.host_kernels() as world:
        for seed in range(2):
            assert fault(world, random.Random(seed)) >= 0.0


def test_a_policy_that_learns_nothing_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Weft, "learn", lambda _: None)
    with f.host_kernels() as world, pytest.raises(WrongError, match="by variants that take twice as long"):
        f.mispredicted(world, random.Random(0))


def test_what_is_wrong_is_told() -> None:
    queries = [Query("net", n, n, 100) for n in range(3)]
    whole = Outcome(queries, [1, 2, 3], [2, 3, 4], [0] * 3, [0] * 3)
    f.whole(whole, 3)
    for done, begin, count, says in (
        ([2, -1, 4], [1, 2, 3], 3, "lost"), ([2, 3, 4], [1, 2, 3], 2, "not sent"), ([2, 3, 4], [1, 3, 2], 3, "order"),
    ):  # fmt: skip
        with pytest.raises(WrongError, match=says):
            f.whole(Outcome(queries, begin, done, [0] * 3, [0] * 3), count)
    with pytest.raises(WrongError, match="no KeyError"):
        f.expect(KeyError, "", lambda: None)
    with pytest.raises(WrongError, match="it says"):
        f.expect(ValueError, "this", lambda: int("x"))


def test_the_command_knows_its_rows(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, says in ((["--only", "nothing"], "no row 'nothing'"), (["--device", "cuda"], "needs --plans")):
        with pytest.raises(SystemExit):
            f.main(arguments)
        assert says in capsys.readouterr().err


def test_every_row_of_the_table_is_one_that_is_injected() -> None:
    shown = {line.split("|")[1].strip() for line in faults().splitlines() if line.startswith("| ")} - {"fault"}
    assert shown <= set(f.ROWS)
