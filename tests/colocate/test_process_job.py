"""A job in another process: units counted exactly over pauses, faults and new starts; queries beside it unharmed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.colocate.host_process import PLAIN, SEGMENT_S, STATEFUL, TOML, machine_of, started, until, written
from tests.colocate.recorded import constant, samples

from weft.colocate import compare as c
from weft.colocate import process_job, process_machine
from weft.colocate.arrivals import poisson
from weft.colocate.job import JobError, digest, resume, save_progress
from weft.colocate.live import LiveBackend, run
from weft.colocate.operating import Prepared, prepare
from weft.colocate.outcome import Outcome
from weft.colocate.policies import NEEDS_BLOCKS, make
from weft.colocate.policy import PolicyError
from weft.colocate.process_job import ProcessJob
from weft.colocate.process_words import BYTES, FREE, Confinement, Words
from weft.device.nameless import nameless
from weft.errors import ArtifactError, DeviceError
from weft.kernels.scheduling import JobProgress, Query

BOUND_S = 0.05
"""In which a segment that is under way mostly ends, and is seen to have, on a busy machine."""


def state_of(folder: Path) -> list[int]:
    (path,) = (folder / "p.json.states").iterdir()
    found: list[int] = json.loads(path.read_text())
    assert path.name == f"{len(found)}.state", "nothing is left of others"
    return found


def saved(folder: Path, job: ProcessJob | None = None) -> int:
    from weft.colocate.job import read_job

    return resume(folder / "p.json", read_job(folder / "job.toml")).passes


def another(job: ProcessJob, before: int) -> None:
    """Wait for its next process."""
    until(lambda: job.lives > before and job.is_ready)


def killed(job: ProcessJob) -> None:
    before = job.lives
    os.kill(job.pid, signal.SIGKILL)
    another(job, before)


# -- units


def test_units_count_once_and_are_resumed_from_what_was_saved(tmp_path: Path) -> None:
    written(tmp_path, STATEFUL)
    with started(tmp_path) as job:
        assert job.units == 0 and not job.works, "nothing is done before it may"
        job.measure()
        measured = job.units
        assert measured >= process_job.MEASURED and job.blocks() == 0
        assert job.block_us > 1.9e6 * SEGMENT_S and job.kernel_us > 0.95e6 * SEGMENT_S, "a busy machine takes longer"
        job.go(Confinement())
        until(lambda: job.blocks() >= 20)
        job.pause()
        until(lambda: not job.works)
        assert job.work_us() / job.block_us == pytest.approx(job.blocks(), abs=1.0)
        job.finish()
        first = job.progress().passes
        assert first == job.units
    assert state_of(tmp_path) == list(range(first)) and saved(tmp_path) == first
    with started(tmp_path) as job:
        assert job.units == first
        job.grant(10)
        until(lambda: not job.works)
        assert job.units == first + 5, "two segments to a unit"
        job.finish()
    assert state_of(tmp_path) == list(range(first + 5)) and saved(tmp_path) == first + 5


def test_it_pauses_within_a_segment_and_rests(tmp_path: Path) -> None:
    written(tmp_path, STATEFUL)
    with started(tmp_path) as job:
        job.measure()
        waits = []
        for _ in range(20):
            job.go(Confinement())
            time.sleep(0.004)
            began = time.perf_counter()
            job.pause()
            begun = job._words.word("begun")
            until(lambda: not job.works)
            waits.append(time.perf_counter() - began)
            assert job._words.word("begun") <= begun + 1
            time.sleep(0.002)
            assert job._words.word("begun") == job._words.word("ended") <= begun + 1, "it stays so"
        assert np.median(waits) < BOUND_S
        shares = []
        for _ in range(3):  # on a busy machine a unit takes longer than it works
            job.anew()
            began = time.perf_counter()
            job.go(Confinement(duty=64))
            time.sleep(0.3)
            job.pause()
            until(lambda: not job.works)
            shares.append(job.work_us() / 1e6 / (time.perf_counter() - began))
        assert 0.0 < min(shares) < 0.35, "a quarter of the time"


def test_the_last_unit_is_the_last(tmp_path: Path) -> None:
    written(tmp_path, STATEFUL, "passes = 12\n")
    with started(tmp_path) as job:
        job.measure()
        job.go(Confinement())
        until(job.is_done)
        assert job.units == 12 and not job.failure
        job.finish()
    assert state_of(tmp_path) == list(range(12))
    with started(tmp_path) as job:
        assert job.is_done() and job.units == 12
        job.measure()  # of nothing that is left, nothing is asked
        assert job.units == 12 and not job.works
    assert not list(tmp_path.rglob("__pycache__")), "its folder stays as it is"


def test_a_stop_ends_the_unit_under_way_and_not_half_of_it(tmp_path: Path) -> None:
    written(tmp_path, STATEFUL)
    with started(tmp_path) as job:
        job.grant(3)
        until(lambda: job._words.word("ended") == 3)
        assert job.units == 1
        job.finish()
        assert job.units == 2
    assert state_of(tmp_path) == [0, 1]


def test_a_function_without_a_state_goes_on_with_the_number(tmp_path: Path) -> None:
    written(tmp_path, PLAIN)
    with started(tmp_path) as job:
        job.go(Confinement())
        until(lambda: job.units >= 5)
        killed(job)
        assert job.lost == 0
        until(lambda: job.units >= 10)
        job.finish()
        assert saved(tmp_path) == job.units and not list((tmp_path / "p.json.states").iterdir())


TRAINING = """
import torch
from safetensors.torch import load_file, save_file

torch.set_num_threads(1)
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
optimiser = torch.optim.SGD(net.parameters(), lr=0.05)

def unit(number):
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(number))
    loss = (net(x) - x.sum(1, keepdim=True)).square().mean()
    yield
    optimiser.zero_grad()
    loss.backward()
    yield
    optimiser.step()

def save(path):
    save_file(net.state_dict(), path)

def load(path):
    net.load_state_dict(load_file(path))
"""


def test_a_training_step_of_torch_that_is_killed_gives_the_weights_of_one_that_is_not(tmp_path: Path) -> None:
    written(tmp_path, TRAINING, "passes = 60\n")
    with started(tmp_path) as job:
        job.go(Confinement())
        while job.units < 10:
            time.sleep(0.0005)
        killed(job)
        until(job.is_done)
        job.finish()
        assert job.progress().passes == 60 and job.lives == 2
    alone: dict[str, Any] = {}
    threads = torch.get_num_threads()
    try:
        exec(TRAINING, alone)  # noqa: S102 - the text above
    finally:
        torch.set_num_threads(threads)
    for number in range(60):
        assert len(list(alone["unit"](number))) == 2
    alone["save"](str(tmp_path / "alone"))
    assert (tmp_path / "p.json.states" / "60.state").read_bytes() == (tmp_path / "alone").read_bytes()


# -- faults


def test_whatever_happens_no_unit_is_lost_or_doubled(tmp_path_factory: pytest.TempPathFactory) -> None:
    @settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(st.sampled_from(["kill", "pause", "grant", "go", "again", "hang"]), min_size=2, max_size=7))
    def holds(events: list[str]) -> None:
        folder = tmp_path_factory.mktemp("job")
        program = STATEFUL.replace("    busy(", "    hang()\n    busy(", 1) + (
            "\nimport os\ndef hang():\n    while os.path.exists(__file__ + '.hang'):\n        time.sleep(0.01)\n"
        )
        written(folder, program)
        at = iter(events)
        event = next(at, "")
        while event:
            with started(folder) as job:
                assert job.units == saved(folder)
                while event:
                    job.go(Confinement())
                    until(lambda: job.is_ready)
                    time.sleep(0.02)
                    if event == "kill":
                        killed(job)
                    elif event == "hang":
                        (folder / "train.py.hang").write_bytes(b"")
                        another(job, job.lives)
                        (folder / "train.py.hang").unlink()
                    elif event == "pause":
                        job.pause()
                    elif event == "grant":
                        job.pause()
                        job.grant(3)
                    again = event == "again"
                    event = next(at, "")
                    if again:
                        break
                until(lambda: job.is_ready)
                job.finish()
                assert job.progress().passes == job.units == saved(folder)
            assert state_of(folder) == list(range(saved(folder))), "one after the other, each once"

    holds()


def test_a_function_that_raises_is_told_with_what_it_says(tmp_path: Path) -> None:
    written(
        tmp_path, STATEFUL.replace("    done.append", "    if number == 3: raise OSError('no data')\n    done.append")
    )
    with started(tmp_path) as job:
        job.go(Confinement())
        until(job.is_done)
        assert "OSError: no data" in job.failure and 3 <= job.lives <= 5
        with pytest.raises(JobError, match=r"(?s)train: file: OSError: no data.* mend the function"):
            job.finish()
    assert saved(tmp_path) <= 3


def test_a_segment_that_hangs_is_killed_and_done_again(tmp_path: Path) -> None:
    hang = "    import os\n    if number == 3 and not os.path.exists(__file__ + '.was'):\n"
    hang += "        open(__file__ + '.was', 'w').close()\n        time.sleep(3600)\n    done.append"
    written(tmp_path, STATEFUL.replace("    done.append", hang))
    with started(tmp_path) as job:
        job.go(Confinement())
        until(lambda: job.units >= 6)
        assert job.lives == 2
        job.finish()
    assert state_of(tmp_path) == list(range(saved(tmp_path)))


def test_what_starts_it_may_die(tmp_path: Path) -> None:
    written(tmp_path, PLAIN)
    with started(tmp_path) as job:
        job.go(Confinement())
        until(lambda: job.units >= 3)
        pid = job.pid
        job._process.kill()
        until(job.is_done)
        assert "what starts its process ended with -9" in job.failure
        until(lambda: not running(pid))
        units = job.units
        with pytest.raises(DeviceError, match="ended with -9"):
            job.finish()
        assert job.progress().passes == units, "what was done counts"


def running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def test_it_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    written(tmp_path, PLAIN)
    program = (
        "import sys\nfrom pathlib import Path\nfrom tests.colocate.host_process import started, until\n"
        "from weft.colocate.process_words import Confinement\n"
        f"with started(Path({str(tmp_path)!r})) as job:\n"
        "    job.go(Confinement())\n    until(lambda: job.units > 2)\n    print(job.pid, flush=True)\n"
        "    sys.stdin.read()\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    )
    assert process.stdout is not None and process.stdin is not None
    with process.stdout, process.stdin:
        pid = int(process.stdout.readline())
        assert running(pid)
        process.kill()
        process.wait()
    until(lambda: not running(pid))


def test_half_a_state_of_a_life_that_was_killed_is_removed(tmp_path: Path) -> None:
    written(tmp_path, STATEFUL)
    states = tmp_path / "p.json.states"
    states.mkdir()
    (states / ".3.state.new").write_text("[0, 1")
    (states / "kept.txt").write_text("of somebody else")
    with started(tmp_path) as job:
        job.go(Confinement())
        until(lambda: job.units >= 3)
        job.finish()
    assert {x.name for x in states.iterdir()} == {"kept.txt", f"{saved(tmp_path)}.state"}


def test_a_state_that_cannot_be_saved_is_told_and_nothing_saved_is_lost(tmp_path: Path) -> None:
    written(tmp_path, STATEFUL)
    with started(tmp_path) as job:
        job.go(Confinement())
        until(lambda: saved(tmp_path) >= 10)
        job.pause()
        until(lambda: not job.works)
        folder = tmp_path / "p.json.states"
        until(lambda: [x.name for x in folder.iterdir()] == [f"{saved(tmp_path)}.state"])  # no save is under way
        kept = saved(tmp_path)
        before = state_of(tmp_path)
        for path in folder.iterdir():
            path.rename(tmp_path / path.name)
        folder.rmdir()
        folder.write_bytes(b"")  # whatever is written there fails
        job.grant(40)
        until(lambda: not job.works)
        with pytest.raises(ArtifactError, match="cannot be saved"):
            job.finish()
        assert job.progress().passes == kept == len(before) and saved(tmp_path) == kept


@pytest.mark.parametrize(
    ("program", "says"),
    [
        ("", r"train has no function 'unit'"), ("unit = 3", "has no function 'unit'"),
        ("def unit(n): ...\ndef save(p): ...", "only one of `save` and `load`"),
        ("import nothing_like_this", "cannot be imported: ModuleNotFoundError"), ("def unit(:", "SyntaxError"),
        ("import os; os._exit(7)", "ended with 7 3 times without a further unit"),
        ("import os, signal; os.kill(os.getpid(), 11)", "ended by SIGSEGV 3 times"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_taken(program: str, says: str, tmp_path: Path) -> None:
    written(tmp_path, program)
    with pytest.raises((JobError, DeviceError), match=says), started(tmp_path):
        pass


def test_progress_that_cannot_be_taken(tmp_path: Path) -> None:
    spec = written(tmp_path, STATEFUL, "passes = 3\n")
    save_progress(tmp_path / "p.json", JobProgress(digest(spec), 4, 0, 0))
    with pytest.raises(JobError, match="behind the last of 3 units"), started(tmp_path):
        pass
    save_progress(tmp_path / "p.json", JobProgress(digest(spec), 2, 0, 0))
    with pytest.raises(JobError, match="the state behind 2 units is missing"), started(tmp_path):
        pass
    save_progress(tmp_path / "p.json", JobProgress("other", 2, 0, 0))
    with pytest.raises(JobError, match="of another job"), started(tmp_path):
        pass


def test_what_cannot_be_started_or_is_not_ready(tmp_path: Path) -> None:
    written(tmp_path, "import time\ntime.sleep(3600)\n")
    with pytest.raises(DeviceError, match="cannot be started"), started(tmp_path, command=("/no/such/program",)):
        pass
    with pytest.raises(DeviceError, match=r"is not ready in 0\.3 s"), started(tmp_path, start_s=0.3):
        pass


def test_segments_that_are_longer_than_allowed(tmp_path: Path) -> None:
    written(tmp_path, STATEFUL, "segment_us = 50\n")
    with started(tmp_path) as job, pytest.raises(JobError, match="at most 50 are allowed"):
        job.measure()


def test_words_hold_texts_and_numbers() -> None:
    fd = nameless(BYTES, "test")
    one, other = Words(fd), Words(fd)
    os.close(fd)
    one.say("granted", FREE)
    one.tell("x" * 5000)
    one.tell("how it is", unsaved=True)
    assert other.word("granted") == FREE and other.told() == "x" * 2000 and other.told(unsaved=True) == "how it is"
    one.tell("é")
    assert other.told() == "é" and other.word("begun") == 0


# -- beside queries


RECORD = samples(constant(300.0), launch_us=5.0, stop_us=1000.0)


def prepared(policy: str, job: ProcessJob) -> Prepared:
    made = prepare(RECORD, policy, "net", "" if policy == "exclusive" else "work", 50_000_000)
    if made.job is None:
        return made
    own = replace(made.job, kernel_us=job.kernel_us, block_us=job.block_us, kind="process")
    return replace(made, job=own)


def lived(policy: str, job: ProcessJob, queries: int = 250) -> Outcome:
    p = prepared(policy, job)
    made = make(policy, p.setting)
    machine, _ = machine_of(job.anew(), *(x.lc.at(0.5) for x in p.points))
    return run(made, LiveBackend(machine, [(p, poisson(500.0, queries, seed=3))], policy=made))


@pytest.mark.parametrize(
    "policy", ["exclusive", "serial", "priority", "green:16", "green", "timeslice", "orion", "weft"]
)
def test_every_policy_that_needs_no_blocks_runs(policy: str, tmp_path: Path) -> None:
    written(tmp_path, STATEFUL)
    with started(tmp_path) as job:
        job.measure()
        before = job.units
        out = lived(policy, job)
        assert all(d > 0 for d in out.done_ns)
        until(lambda: not job.works)  # a segment that was said to begin as the job was paused is taken back
        assert out.blocks == job.units - before and (out.blocks > 0) == (policy != "exclusive")
        assert out.work_us == pytest.approx(out.blocks * job.block_us, abs=job.block_us)
        job.finish()
    assert state_of(tmp_path) == list(range(saved(tmp_path)))


@pytest.mark.parametrize("policy", sorted(NEEDS_BLOCKS))
def test_a_policy_that_needs_blocks_is_refused_by_name(policy: str) -> None:
    jobs = tuple(replace(j, kind="process") for j in RECORD.jobs)
    with pytest.raises(PolicyError, match=f"{policy}.*work is a process: its segments end by themselves"):
        prepare(replace(RECORD, jobs=jobs), policy, "net", "work", 500_000)


def test_kill_9_of_the_job_leaves_the_run_as_it_was(tmp_path: Path) -> None:
    """It dies again and again while queries run: all of them end, none waits for it, and the record stands."""
    written(tmp_path, STATEFUL)
    with started(tmp_path) as job:
        job.measure()
        p = prepared("priority", job)
        made = make("priority", p.setting)
        machine, _ = machine_of(job.anew(), *(x.lc.at(0.5) for x in p.points))
        ended, kills, wanted = machine.ended, [0], [job.units + 20]

        def looked() -> object:
            if job.is_ready and job.units >= wanted[0] and job.lives == kills[0] + 1:
                kills[0] += 1
                wanted[0] = job.units + 20
                os.kill(job.pid, signal.SIGKILL)
            return ended()

        machine.ended = looked  # type: ignore[method-assign, assignment]
        arrivals = poisson(300.0, 900, seed=4)
        out = run(made, LiveBackend(machine, [(p, arrivals)], policy=made))
        assert kills[0] >= 1 and all(d > 0 for d in out.done_ns)
        assert (np.diff(out.begin_ns) >= 0).all()
        found = c.summed_up([p], c.Cell("net", "work", 50_000_000, 0.1, c.RELATIVE, arrivals, 1), out)[0]
        assert not found.simulated and found.latency.queries > 0 and found.be_throughput >= 0
        until(lambda: job.is_ready)
        job.finish()
        assert 0 <= job.lives - kills[0] - 1 <= 1, "the end of a run kills what a busy machine keeps from its own"
    assert state_of(tmp_path) == list(range(saved(tmp_path)))


HANGS = """
import os
_busy = busy
def busy(seconds):
    _busy(seconds)
    while os.path.exists(__file__ + ".hang"):
        open(__file__ + ".hangs", "w").close()
"""
"""Behind STATEFUL: while a file is there segments do not end, and another file says that one does not."""


def hang(folder: Path, *, hangs: bool) -> None:
    """Let segments hang from the next one on, or no longer."""
    if hangs:
        (folder / "train.py.hang").write_bytes(b"")
    else:
        (folder / "train.py.hang").unlink()


def test_queries_wait_for_granted_segments_but_not_for_a_job_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_machine, "PATIENCE_NS", 20_000_000_000)
    written(tmp_path, STATEFUL + HANGS)
    (tmp_path / "job.toml").write_text(TOML.replace("hang_s = 0.3", "hang_s = 600"))
    with started(tmp_path) as job:
        job.measure()
        machine, _ = machine_of(job.anew(), 300.0)
        asked = machine.now_ns()
        machine.kernels(2 * job.segment_us)
        machine.launch(Query("net", 0, 0, 0), 0)
        assert machine.kernels_run()
        while not (found := machine.ended()):
            pass
        assert found[0].put_ns - asked > 1e9 * SEGMENT_S, "behind the segments"
        assert job._words.word("begun") == job._words.word("ended")
        monkeypatch.setattr(process_machine, "PATIENCE_NS", 20_000_000)
        hang(tmp_path, hangs=True)
        machine.kernels(job.kernel_us)
        asked = machine.now_ns()
        machine.launch(Query("net", 1, 0, 0), 0)
        while not (found := machine.ended()):
            assert machine.now_ns() - asked < 60e9, "it waits for what does not end"
        assert found[0].put_ns - asked > 20_000_000
        hang(tmp_path, hangs=False)
        machine.close_job()


def test_a_job_that_hangs_at_the_end_of_a_run_is_killed_and_the_run_stands(tmp_path: Path) -> None:
    written(tmp_path, STATEFUL + HANGS, "memory = '1GiB'\n".replace("'", '"'))
    (tmp_path / "job.toml").write_text(TOML.replace("hang_s = 0.3", "hang_s = 600"))
    with started(tmp_path) as job:
        job.measure()
        machine, _ = machine_of(job.anew(), 300.0)
        machine.set_form(0)
        until(lambda: job.blocks() >= 2)
        hang(tmp_path, hangs=True)
        until((tmp_path / "train.py.hangs").exists)
        work = machine.close_job()
        hang(tmp_path, hangs=False)
        assert work.blocks >= 2
        until(lambda: job.lives == 2 and job.is_ready)
        with pytest.raises(ValueError, match="variant 1 has no form"):
            process_machine.ProcessMachine(machine._machine, job, {"net": [None, None]}).set_form(1)


def test_the_benchmarks_jobs_are_jobs() -> None:
    from benchmarks.models.llama import PROMPT, Llama
    from benchmarks.process_jobs.decoding import Decoder

    from weft.colocate.job import read_job

    folder = Path(__file__).parents[2] / "benchmarks" / "process_jobs"
    for name in ("resnet50", "bert", "llama"):
        assert read_job(folder / f"{name}.toml").kind == "process"
    torch.manual_seed(1)
    network = Llama(width=64, depth=2, heads=4, hidden=96).eval()
    ids = torch.randint(32_000, (3, PROMPT))
    decoder = Decoder(network, 3)
    for _ in range(2):
        decoder.begin()
        found = [decoder.step(ids[:, k]) for k in range(PROMPT)]
        with torch.no_grad():
            torch.testing.assert_close(found[-1], network(ids), rtol=1e-3, atol=1e-3)
    with pytest.raises(ValueError, match="position 128 of 128"):
        decoder.step(ids[:, 0])


def test_training_goes_on_with_the_same_numbers(tmp_path: Path) -> None:
    from benchmarks.process_jobs.training import Training, classes, squares

    def made(loss: object = None) -> Training:
        torch.manual_seed(2)
        network = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 4))
        inputs = lambda n: torch.randn(32, 8, generator=torch.Generator().manual_seed(n))  # noqa: E731
        return Training(network, inputs, classes(4) if loss is None else squares, rate=0.1)

    whole, first, second = made(), made(), made()
    for k in range(6):
        assert len(list(whole.unit(k))) == 2
    for k in range(3):
        list(first.unit(k))
    first.save(str(tmp_path / "s"))
    second.load(str(tmp_path / "s"))
    for k in range(3, 6):
        list(second.unit(k))
    for a, b in zip(whole.network.state_dict().values(), second.network.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    list(made("squares").unit(0))
