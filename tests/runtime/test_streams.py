"""Who works on which stream, without a GPU."""

from __future__ import annotations

import gc

import pytest
import torch
from tests.runtime.fake_cuda import install

from weft.runtime import streams
from weft.runtime.streams import Lease

HERE = torch.device("cpu")


@pytest.fixture(autouse=True)
def waits(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Every wait for the whole device."""
    gc.collect()  # what other tests left would give its streams back here
    install(monkeypatch)
    found: list[object] = []
    monkeypatch.setattr(torch.cuda, "synchronize", found.append)
    return found


def test_holders_at_the_same_time_share_nothing(waits: list[object]) -> None:
    first, second = Lease(HERE), Lease(HERE)
    mine, theirs = first.streams(2), second.streams(3)
    assert not {id(s) for s in mine} & {id(s) for s in theirs}
    assert first.streams(1) == mine[:1] and first.streams(2) == mine
    assert waits == []


def test_what_was_given_back_goes_first_and_nothing_of_it_still_runs(waits: list[object]) -> None:
    kept, gone = Lease(HERE), Lease(HERE)
    known = {id(s) for s in gone.streams(2)}
    kept.streams(1)
    del gone
    gc.collect()
    again = Lease(HERE)
    assert {id(s) for s in again.streams(2)} == known and waits == [HERE, HERE]
    assert id(again.streams(3)[2]) not in known and len(waits) == 2
    assert streams._FREE[HERE] == []


def test_each_device_has_its_own() -> None:
    one = Lease(HERE)
    known = one.streams(1)
    del one
    gc.collect()
    assert Lease(torch.device("meta")).streams(1)[0] is not known[0]


def test_streams_of_the_caller_go_first_and_are_lent_to_nobody_else() -> None:
    own = Lease(HERE)
    given = own.streams(2)
    lease = Lease(HERE, given)
    assert lease.streams(1) == given[:1] and lease.streams(2) == given
    three = lease.streams(3)
    assert three[:2] == given and three[2] not in given and lease.streams(3) == three
    known = {id(s) for s in given}
    del lease, three
    gc.collect()
    assert not known & {id(s) for s in streams._FREE[HERE]}


def test_workspaces_are_taken_on_a_gpu_alone() -> None:
    taken = set(streams._TAKEN)
    streams.take_workspaces(HERE)
    assert taken == streams._TAKEN
