"""A worker that outlives its tuner: only a sound one, only for who would start the same, and never for good."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.faults.test_processes import stub, trial

from weft.device.facts import CpuFacts
from weft.kernels.measurement import Verdict
from weft.options import Options
from weft.tune import kept, sites
from weft.tune.kept import Keeper, KeptTransport, preloaded_worker
from weft.tune.site import HostSite
from weft.tune.store import Database
from weft.tune.transport import ProcessTransport
from weft.tune.tuner import Tuner


@pytest.fixture
def keeper(monkeypatch: pytest.MonkeyPatch) -> Iterator[Keeper]:
    """The one that tuners use, with stand-ins for workers, which load quickly."""
    found = use(Keeper(), monkeypatch)
    monkeypatch.setattr(HostSite, "transport", lambda _: stub())
    yield found
    found.close()


def use(keeper: Keeper, monkeypatch: pytest.MonkeyPatch) -> Keeper:
    monkeypatch.setattr(kept, "KEEPER", keeper)
    return keeper


def measured(*acts: str, keep: bool = True, options: Options | None = None) -> tuple[list[Verdict], int]:
    """The verdicts of a tuner that was closed, and the process that it had at the end."""
    options = options or Options(trial_timeout_s=5.0)
    with Tuner(options, CpuFacts(), Database.open(None), keep=keep) as found:
        verdicts = [m.verdict for m in found.measure([trial(list(acts)), trial(["ok"], 2)])][:-1]
        return verdicts, pid_of(found)


def pid_of(found: Tuner) -> int:
    inner = found._transport._inner if isinstance(found._transport, KeptTransport) else found._transport
    assert isinstance(inner, ProcessTransport) and inner._process is not None
    return inner._process.pid


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_the_next_tuner_has_the_same_worker(keeper: Keeper) -> None:
    first, pid = measured("ok")
    assert len(keeper) == 1 and is_running(pid)
    again, same = measured("ok", "ok")
    assert (first, again, same) == ([Verdict.OK], [Verdict.OK] * 2, pid)
    keeper.close()
    assert not is_running(pid) and len(keeper) == 0


def test_one_may_say_no(keeper: Keeper) -> None:
    _, pid = measured("ok", keep=False)
    assert len(keeper) == 0 and not is_running(pid)


def test_other_options_another_environment_another_cache(
    keeper: Keeper, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _, pid = measured("ok")
    _, threads = measured("ok", options=Options(threads=3))
    _, cache = measured("ok", options=Options(cache_dir=tmp_path))
    monkeypatch.setenv("SOME_LIBRARY_READS", "this")
    _, environment = measured("ok")
    monkeypatch.chdir(tmp_path)
    _, folder = measured("ok")
    assert len({pid, threads, cache, environment, folder}) == 5
    assert len(keeper) == kept.MOST, "no more are kept than one may want"
    assert not is_running(pid), "the oldest is ended"


def test_a_worker_that_was_lost_is_not_kept_and_its_successor_is(keeper: Keeper) -> None:
    verdicts, pid = measured("segv", "ok")
    assert verdicts == [Verdict.POISONED, Verdict.OK] and is_running(pid)
    assert measured("ok")[1] == pid


@pytest.mark.parametrize("lost", [signal.SIGKILL, signal.SIGSTOP])
def test_a_kept_worker_that_died_or_hangs_is_replaced(
    keeper: Keeper, monkeypatch: pytest.MonkeyPatch, lost: signal.Signals
) -> None:
    monkeypatch.setattr(kept, "PROOF_S", 0.5)
    _, pid = measured("ok")
    os.kill(pid, lost)
    verdicts, another = measured("ok")
    assert verdicts == [Verdict.OK] and another != pid and not is_running(pid)


def test_what_writes_where_it_should_not_costs_the_worker(keeper: Keeper) -> None:
    with Tuner(Options(), CpuFacts(), Database.open(None), keep=True) as found:
        assert [m.verdict for m in found.measure([trial(["ok"])])] == [Verdict.OK]
        found._rejected[Verdict.GUARD] += 1
    assert len(keeper) == 0


def test_one_that_is_still_loading_is_kept(keeper: Keeper) -> None:
    """A budget may end before it was ready; the next compilation has it then."""
    with Tuner(Options(), CpuFacts(), Database.open(None), keep=True) as found:
        found.start_early()
        pid = pid_of(found)
    assert is_running(pid)
    assert measured("ok") == ([Verdict.OK], pid)


def test_a_worker_loads_before_it_is_known_what_it_is_told(keeper: Keeper, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the time that a model's export takes is not lost to a short budget."""
    monkeypatch.setattr(sites, "host_worker", lambda _: stub())
    with preloaded_worker(Options(budget_s=5.0), 1):
        (early,) = keeper._kept
        assert early.transport._process is not None
        pid = early.transport._process.pid
        with preloaded_worker(Options(budget_s=5.0), 1):
            assert len(keeper) == 1, "one is enough"
        assert measured("ok") == ([Verdict.OK], pid)
    assert is_running(pid), "it is kept like others"
    with preloaded_worker(Options(budget_s=5.0), 1):
        assert len(keeper) == 1, "one that is there need not load"


@pytest.mark.parametrize(
    "options", [Options(budget_s=0.0), Options(budget_s=300.0), Options(budget_s=5.0, keep_worker=False)]
)
def test_none_loads_where_that_gains_nothing(keeper: Keeper, monkeypatch: pytest.MonkeyPatch, options: Options) -> None:
    monkeypatch.setattr(sites, "host_worker", lambda _: stub())
    with preloaded_worker(options, 1):
        assert len(keeper) == 0


def test_a_worker_that_loaded_for_nobody_is_ended(keeper: Keeper, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does one that died meanwhile stand in the way."""
    monkeypatch.setattr(sites, "host_worker", lambda _: stub())
    with preloaded_worker(Options(budget_s=5.0, cache_dir=Path("another")), 1):
        (early,) = keeper._kept
        assert early.transport._process is not None
        unwanted = early.transport._process.pid
        _, pid = measured("ok")
        assert pid != unwanted
    assert not is_running(unwanted) and is_running(pid)
    keeper.close()
    with preloaded_worker(Options(budget_s=5.0), 1):
        (early,) = keeper._kept
        assert early.transport._process is not None
        os.kill(pid := early.transport._process.pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert measured("ok")[0] == [Verdict.OK]


def test_one_that_was_not_ready_in_time_goes_on_loading(keeper: Keeper) -> None:
    with Tuner(Options(), CpuFacts(), Database.open(None), keep=True) as found:
        found.start_early()
        os.kill(pid := pid_of(found), signal.SIGSTOP)
        assert list(found.measure([trial(["ok"])], ready_by=time.monotonic() + 0.1)) == []
        assert found.gave_up
    os.kill(pid, signal.SIGCONT)
    assert measured("ok") == ([Verdict.OK], pid)


def test_one_that_has_loaded_is_ready_however_late_it_is_asked(keeper: Keeper) -> None:
    """The first kernel may be there only when nobody would wait for a worker any longer."""
    with Tuner(Options(), CpuFacts(), Database.open(None), keep=True) as found:
        found.start_early()
        pid_of(found)
        assert isinstance(found._transport, KeptTransport) and isinstance(found._transport._inner, ProcessTransport)
        assert select.select([found._transport._inner._receive], [], [], 60)[0], "it greets"
        outcomes = found.measure([trial(["ok"])], ready_by=time.monotonic() - 1, deadline=time.monotonic() + 60)
        assert [m.verdict for m in outcomes] == [Verdict.OK] and not found.gave_up


def test_an_idle_one_is_ended(monkeypatch: pytest.MonkeyPatch, keeper: Keeper) -> None:
    impatient = use(Keeper(idle_s=0.01), monkeypatch)
    _, pid = measured("ok")
    end = time.monotonic() + 60
    while is_running(pid) and time.monotonic() < end:
        time.sleep(0.01)
    assert not is_running(pid) and len(impatient) == 0


def test_after_many_trials_it_is_ended(monkeypatch: pytest.MonkeyPatch, keeper: Keeper) -> None:
    monkeypatch.setattr(kept, "MOST_TRIALS", 4)
    _, pid = measured("ok")
    assert measured("ok")[1] == pid
    assert len(keeper) == 0 and not is_running(pid)


def test_much_less_memory_than_it_may_take(keeper: Keeper) -> None:
    _, pid = measured("ok")
    (held,) = keeper._kept
    held.max_bytes *= 4
    assert measured("ok")[1] != pid


def test_a_forked_child_has_none_of_its_parents(keeper: Keeper) -> None:
    """And leaves them alone when it ends."""
    _, pid = measured("ok")
    child = os.fork()
    if child == 0:
        os._exit(0 if len(keeper) == 0 and measured("ok")[1] != pid and _closed(keeper) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert is_running(pid) and measured("ok")[1] == pid


def _closed(keeper: Keeper) -> bool:
    keeper.close()
    return len(keeper) == 0
