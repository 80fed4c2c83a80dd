"""Children that speak, end, hang and die."""

from __future__ import annotations

import sys

import pytest
from benchmarks.harness.child import Child, Silence


def python(text: str) -> list[str]:
    return [sys.executable, "-u", "-c", text]


def test_lines_and_the_end() -> None:
    with Child(python("print(1); print(2); raise SystemExit(3)")) as child:
        assert [child.line(300), child.line(300), child.line(300)] == ["1\n", "2\n", None]
        assert child.status == 3


def test_one_that_hangs_is_ended() -> None:
    with Child(python("import time; print('begun'); time.sleep(600)")) as child:
        assert child.line(300) == "begun\n"
        with pytest.raises(Silence):
            child.line(0.2)
    assert child.status == -9


def test_one_that_is_not_waited_for_is_ended() -> None:
    with pytest.raises(KeyError), Child(python("while True: print('more')")) as child:
        raise KeyError
    assert child.status < 0
