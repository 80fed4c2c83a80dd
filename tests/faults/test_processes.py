"""Real processes: dozens of lost workers through a stand-in that starts quickly, a few through the real worker."""

from __future__ import annotations

import os
import random
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.faults.fake import fake_problem
from tests.tune.cases import problem
from tests.typed import some

from weft.device.facts import CpuFacts
from weft.device.toolchain import HostCompiler, find_compiler
from weft.ir.graph import GraphBuilder
from weft.ir.prims import Prim
from weft.ir.types import DType, TensorType
from weft.kernels.measurement import Verdict
from weft.kernels.source import CallStep, Kernel, KernelBinary, KernelSource, LibraryCall, Ref, Schedule
from weft.options import Options
from weft.tune.store import Database
from weft.tune.transport import Fault, ProcessTransport, WorkerFault
from weft.tune.tuner import ProblemTrial, Tuner, winner

ROOT = str(Path(__file__).resolve().parents[2])
CLASSES = {
    "segv": Verdict.POISONED,
    "abort": Verdict.POISONED,
    "exit": Verdict.POISONED,
    "hang": Verdict.HANG,
    "spin": Verdict.HANG,
    "deaf": Verdict.HANG,
    "flood": Verdict.POISONED,
    "garbage": Verdict.POISONED,
    "nonsense": Verdict.POISONED,
    "half": Verdict.POISONED,
    "stall": Verdict.HANG,
    "child": Verdict.HANG,
    "oom": Verdict.OOM,
    "sigstop": Verdict.HANG,
}


def stub() -> ProcessTransport:
    return ProcessTransport(1, environ={**os.environ, "PYTHONPATH": ROOT}, module="tests.faults.stub_worker")


def trial(acts: list[str], number: int = 1) -> ProblemTrial:
    kernels: list[tuple[Schedule, Kernel, KernelBinary | None]] = []
    for k, act in enumerate(acts):
        s = Schedule("cpp", (("k", k), ("n", number)))
        source = KernelSource(s, act, "k0")
        kernels.append((s, source, KernelBinary(source.sha256, "", "", "k0", 0.0)))
    return ProblemTrial(fake_problem(number), kernels)


def test_a_worker_that_does_not_die_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver may hold a killed process for as long as it likes."""
    patience: list[float] = []

    def held(self: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        if timeout is None:
            return -9  # the thread that waits on
        patience.append(timeout)
        raise subprocess.TimeoutExpired("worker", timeout)

    transport = stub()
    transport.start()
    process = transport._process
    assert process is not None
    with monkeypatch.context() as stuck:
        stuck.setattr(subprocess.Popen, "wait", held)
        transport.kill()
    assert process.wait(60) == -9
    assert sum(patience) <= 1.0
    assert transport.running() == -1


def test_a_worker_may_be_killed_while_another_thread_waits_for_it() -> None:
    transport = stub()
    transport.start()
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(transport.receive, 60.0)
        time.sleep(0.2)  # until it waits; if not yet, it finds no worker
        transport.kill()
        with pytest.raises(WorkerFault):
            answer.result(10)


def test_every_way_to_lose_a_process() -> None:
    rng = random.Random(3)
    acts = [*CLASSES, *["ok"] * 6, *rng.choices(["segv", "abort", "exit", "half", "garbage"], k=10)]
    rng.shuffle(acts)
    with Tuner(Options(trial_timeout_s=1.5), CpuFacts(), Database.open(None), transport=stub()) as tuner:
        found = list(tuner.measure([trial(acts)]))
    for act, m in zip(acts, found, strict=True):
        assert m.verdict is CLASSES.get(act, Verdict.OK), (act, m)
    assert winner(found, None) is not None
    assert tuner.workers_started >= 30


@pytest.mark.parametrize("act", ["hang", "deaf", "spin", "sigstop", "child"])
def test_a_hang_is_over_soon_after_the_limit(act: str) -> None:
    transport = stub()
    transport.start()
    transport.send({"op": "trial", "kernels": [[0, {"text": act}, ""]]}, 5.0)
    pid = some(transport._process).pid
    with pytest.raises(WorkerFault) as caught:
        transport.receive(2.0)  # what hangs does so for days: coming back at all is soon
    assert caught.value.fault is Fault.HANG and transport.running() == 0
    transport.kill()
    alive = subprocess.run(["pgrep", "-g", str(pid)], capture_output=True, check=False)
    assert alive.stdout == b"" or all(is_zombie(int(p)) for p in alive.stdout.split())


def is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


def test_a_log_is_capped() -> None:
    transport = stub()
    transport.start()
    transport.send({"op": "trial", "kernels": [[0, {"text": "flood"}, ""]]}, 5.0)
    with pytest.raises(WorkerFault) as caught:
        transport.receive(60.0)
    assert caught.value.fault is Fault.FLOOD and len(transport.log) <= 64 * 1024
    transport.kill()


def test_a_worker_that_does_not_read_its_request() -> None:
    transport = stub()
    transport.start()
    transport.send({"op": "trial", "kernels": [[0, {"text": "hang"}, ""]]}, 5.0)
    with pytest.raises(WorkerFault, match="did not read"):
        transport.send({"op": "trial", "kernels": [[0, {"text": "x" * (4 << 20)}, ""]]}, 0.5)
    transport.kill()


def test_a_transport_can_be_killed_twice_and_never_leaks_pipes() -> None:
    transport = stub()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        transport.start()
        transport.kill()
        transport.kill()
    assert len(os.listdir("/proc/self/fd")) <= before
    assert transport.running() == -1
    with pytest.raises(WorkerFault):
        ProcessTransport(1, environ={**os.environ}, module="tests.faults.no_such_worker").receive(0.1)


# --- the real worker --------------------------------------------------------------------------------------

HEAD = """#include <cstdlib>
#include <cstdio>
#include <csignal>
#include <unistd.h>
extern "C" void k0(const void* const* in, void* const* out, void*, const void* const*) {
  const float* x = (const float*)in[0];
  float* y = (float*)out[0];
  volatile int* nowhere = 0;
  static long calls = 0;
  ++calls;
"""
BODIES = {
    "good": ("for (int i = 0; i < 300; ++i) y[i] = x[i] * 2;", Verdict.OK),
    "segv": ("*nowhere = 1;", Verdict.POISONED),
    "segv while timed": (
        "for (int i = 0; i < 300; ++i) y[i] = x[i] * 2; if (calls > 40) *nowhere = 1;",
        Verdict.POISONED,
    ),
    "loop": ('for (;;) asm volatile("");', Verdict.HANG),
    "trap": ("__builtin_trap();", Verdict.POISONED),
    "exit": ("_exit(0);", Verdict.POISONED),
    "wild": ("for (long i = 0; i < 1000; ++i) y[i << 20] = 1;", Verdict.POISONED),
    "wrong": ("for (int i = 0; i < 300; ++i) y[i] = x[i] * 3;", Verdict.WRONG),
    "late": ("for (int i = 0; i < 300; ++i) y[i] = x[i] * (calls > 30 ? 3 : 2);", Verdict.UNSTABLE),
    "short": ("for (int i = 0; i < 299; ++i) y[i] = x[i] * 2;", Verdict.UNWRITTEN),
    "past": ("for (int i = 0; i < 301; ++i) y[i] = x[i] * 2;", Verdict.GUARD),
    "input": ("for (int i = 0; i < 300; ++i) y[i] = x[i] * 2; ((float*)x)[7] = 1;", Verdict.INPUT_MODIFIED),
    "broken text": ("this is no C++", Verdict.COMPILE),
}


@pytest.mark.slow
def test_the_real_worker(tmp_path: Path) -> None:
    compiler = find_compiler()
    if not isinstance(compiler, HostCompiler):
        pytest.skip("no compiler")
    b = GraphBuilder()
    graph = b.build([b.apply(Prim.MUL, b.input(TensorType(DType.F32, (3, 100))), 2.0)])
    library = Schedule("library")
    call = LibraryCall(library, (), (CallStep("aten.mul.Scalar", (Ref("in", 0), 2.0)),), (Ref("tmp", 0),))
    kernels: list[tuple[Schedule, Kernel, KernelBinary | None]] = [(library, call, None)]
    for name, (body, _) in BODIES.items():
        s = Schedule("cpp", (("name", name),))
        kernels.append((s, KernelSource(s, f"{HEAD}{body}\n}}\n", "k0"), None))
    options = Options(cache_dir=tmp_path, trial_timeout_s=8.0)
    with Database.open(tmp_path) as database:
        with Tuner(options, CpuFacts(), database, compiler=compiler) as tuner:
            found = list(tuner.measure([ProblemTrial(problem(graph), kernels)]))
        assert found[0].verdict is Verdict.OK, found[0]
        for m, (name, (_, expected)) in zip(found[1:], BODIES.items(), strict=True):
            assert m.verdict is expected, (name, m)
        assert found[1].rmse <= 1 and len(found[1].samples_us) >= 5
        with Tuner(options, CpuFacts(), database, compiler=compiler) as tuner:  # warm: nothing is started
            assert list(tuner.measure([ProblemTrial(problem(graph), kernels)])) == found
            assert tuner.workers_started == 0
