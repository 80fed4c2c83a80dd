"""`weft fuse --search`: with measurements that the test says, a GPU that is host memory, and processes that die."""

from __future__ import annotations

import ctypes
import io
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.colocate.test_fuse import BE, BE_SOURCE, files
from typer.testing import CliRunner

from weft.cli.app import app
from weft.colocate import pair_worker, search
from weft.colocate.contents import POISON, contents
from weft.colocate.fuse import Pair, parameters, read_sides, write
from weft.colocate.pair_machine import GUARD, far, first_difference
from weft.colocate.pair_process import LostError, PairProcess
from weft.colocate.pair_worker import Code, Driver, Trials, drain_of, serve, text_digest
from weft.colocate.search import candidates, chosen, gpu_here, key_of, search_pair
from weft.colocate.side import Buffer, Side
from weft.device.cuda.facts import GpuFacts, profile
from weft.errors import ArtifactError, DeviceError, KernelDeclinedError, NoGpuError, NoWorkerError, OptionError
from weft.kernels.colocation import BYTES, FusionShape, WorkCounter
from weft.kernels.dataclass_json import from_json, to_json
from weft.tune.cuda_pair import Memory
from weft.tune.pairs import fused_digest, known
from weft.tune.store import Database

H200 = replace(profile("h200"), name="NVIDIA H200 of a test")


@dataclass
class Told:
    """What runs kernels, as the test says: microseconds of a fused launch by its shape; None: the process dies."""

    inside_us: Callable[[FusionShape], float | None]
    asked: list[tuple[FusionShape, int]] = field(default_factory=list)
    told: Mapping[str, Any] = field(default_factory=dict)
    ended: int = 0

    def start(self, first: Mapping[str, Any]) -> Told:
        self.told = first
        return self

    def ask(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        shape = from_json(FusionShape, request["shape"])
        self.asked.append((shape, int(request["rounds"])))
        assert Path(request["path"]).read_bytes()[:4] == b"\x7fELF"
        us = self.inside_us(shape)
        if us is None:
            raise LostError("signal 11")
        if us < 0:
            return {"event": "refused", "reason": "fused without blocks: best-effort memory 1 differs"}
        return {
            "event": "times", "launches": 2, "lc_us": 100.0, "be_us": 60.0,
            "peers": {"serial": 160.0, "streams": 150.0}, "fused_us": us, "inside_us": us, "idle_us": 101.0,
            "inside_blocks": 4, "drained": True,
        }  # fmt: skip

    def close(self) -> None:
        self.ended += 1


def nobody(first: Mapping[str, Any]) -> Told:
    raise AssertionError("a process that nobody wants")


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four shapes: what compiles them has other tests."""
    monkeypatch.setattr(search, "MOST_ARMS", 4)


def found(folder: Path, told: Told | None, **more: Any) -> Pair:
    lc, be = files(folder)
    with Database.open(folder) as database:
        start = nobody if told is None else told.start
        return search_pair(lc, [be], database=database, gpu=lambda: H200, start=start, **more)


def rows(folder: Path) -> list[Any]:
    with Database.open(folder) as database:
        return list(known(database))


def by_registers(shape: FusionShape) -> float:
    """The second bound with one role is the fastest."""
    return 110.0 if (shape.min_ctas_per_sm, shape.replicas) == (1, 1) and not shape.fill_grid else 140.0


@pytest.mark.usefixtures("few")
def test_the_best_shape_is_taken_and_kept(tmp_path: Path) -> None:
    told = Told(by_registers)
    pair = found(tmp_path, told)
    assert pair.fused.shape is not None
    assert (pair.fused.shape.min_ctas_per_sm, pair.fused.shape.replicas, pair.fused.shape.fill_grid) == (1, 1, False)
    rounds = [r for _, r in told.asked]
    assert rounds[:4] == [3, 3, 3, 3] and rounds[-1] == 12 and told.ended == 1
    assert {x.arch for x in pair.compiled} == {"sm_80", "sm_90a"} and pair.declined == {}
    about = parameters(pair)["measured"]
    assert isinstance(about, dict)
    assert about["ratio"] == round(150 / 110, 4) and about["peer"] == "streams" and about["complete"] is True
    assert (about["fraction"], about["slowdown"]) == (0.6, 0.1) and about["measured"] == 4
    kept = rows(tmp_path)
    assert {r.key.gpu for r in kept} == {H200.name} and all(len(r.cubin) == 64 for r in kept)
    again = found(tmp_path, None)  # all is known
    assert again.fused == pair.fused and again.measured == pair.measured
    write(again, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "fused.json").read_text())["measured"]["gpu"] == H200.name


@pytest.mark.usefixtures("few")
def test_do_not_fuse_is_an_answer_and_kept(tmp_path: Path) -> None:
    with pytest.raises(
        KernelDeclinedError, match=r"do not fuse scaled of lc\.cu with add of be\.cu .*0\.789 of the best"
    ):
        found(tmp_path, Told(lambda shape: 190.0))
    (verdict,) = [r for r in rows(tmp_path) if not r.key.kernel]
    assert verdict.declined.startswith("do not fuse: 0.789 of the best peer (streams)")
    with pytest.raises(KernelDeclinedError, match="do not fuse"):
        found(tmp_path, None)


@pytest.mark.usefixtures("few")
def test_a_shape_that_ends_the_process_has_a_row_and_the_others_go_on(tmp_path: Path) -> None:
    pair = found(
        tmp_path, Told(lambda shape: 110.0 if shape.min_ctas_per_sm else None if shape.replicas == 1 else -1.0)
    )
    assert pair.fused.shape is not None and pair.fused.shape.min_ctas_per_sm == 1
    said = [r.declined for r in rows(tmp_path) if r.declined]
    assert said and all(s == "it ended the process that ran it: signal 11" or "memory 1 differs" in s for s in said)
    assert pair.measured is not None and pair.measured["declined"] == len(said)
    assert found(tmp_path, None).fused == pair.fused, "what ended a process is not run again"


@pytest.mark.usefixtures("few")
def test_a_budget_that_ends_leaves_the_best_so_far_and_the_next_search_goes_on(tmp_path: Path) -> None:
    def ticking(step: float) -> Callable[[], float]:
        now = iter(np.arange(0.0, 1e6, step))
        return lambda: float(next(now))

    first, second = Told(by_registers), Told(by_registers)
    pair = found(tmp_path, first, budget_s=5.5, clock=ticking(1.0))
    assert 0 < len(first.asked) < 4 and first.ended == 1
    assert pair.measured is not None and pair.measured["complete"] is False
    whole = found(tmp_path, second)
    assert whole.measured is not None and whole.measured["complete"] is True
    assert not set(first.asked) & set(second.asked), "nothing is measured twice"
    with pytest.raises(OptionError, match="was spent before one shape"):
        found(tmp_path, Told(by_registers), budget_s=0.5, clock=ticking(1.0), changes={"be0": {"grid": [3]}})
    for seconds in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(OptionError, match=r"option '--budget': .* is outside of 0 to"):
            found(tmp_path, None, budget_s=seconds)


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("answer", [{"event": "times"}, {}, {"event": "times", "launches": 0, "lc_us": "x"}])
def test_answers_that_are_none_are_declined(answer: dict[str, Any], tmp_path: Path) -> None:
    told = Told(by_registers)
    told.ask = lambda request: answer  # type: ignore[method-assign]
    with pytest.raises(KernelDeclinedError, match="do not fuse"):
        found(tmp_path, told)
    kept = [r for r in rows(tmp_path) if r.key.kernel]
    assert len(kept) == 4 and all(r.declined for r in kept)


@pytest.mark.usefixtures("few")
def test_other_contents_of_a_buffer_are_another_pair(tmp_path: Path) -> None:
    lc, be = files(tmp_path)
    keys = []
    for seed in (3, 3, 4):
        sides = read_sides(lc, [be], ratio=1.0, small=False, changes={"be0": {"parameters.w.seed": seed}})
        (one, *_) = candidates(sides, H200, "sm_90a")
        keys.append(key_of(sides, one.fused, H200, "sm_90a"))
    assert keys[0] == keys[1] and keys[0].kernel == keys[2].kernel and keys[0].job != keys[2].job


def test_without_a_gpu_the_error_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(cache: object, **more: object) -> GpuFacts:
        raise DeviceError(problem="no CUDA driver")

    monkeypatch.setattr(search, "gpu_facts", absent)
    lc, be = files(tmp_path)
    done = CliRunner().invoke(app, ["fuse", str(lc), str(be), "--search", "-o", str(tmp_path / "out")])
    assert isinstance(done.exception, NoGpuError) and done.exception.exit_code == 5
    text = str(done.exception)
    assert "no search without a GPU: no CUDA driver" in text and "[W301]" in text and "leave --search out" in text
    assert not (tmp_path / "out").exists()
    alone = CliRunner().invoke(app, ["fuse", str(lc), str(be), "--budget", "5"])
    assert isinstance(alone.exception, OptionError) and "--search" in str(alone.exception)
    for capability, name in ((75, "T4"), (100, "B200"), (120, "5090")):
        monkeypatch.setattr(
            search, "gpu_facts", lambda cache, n=name, c=capability, **more: replace(H200, name=n, capability=c)
        )
        with pytest.raises(NoGpuError, match=f"{name} runs neither"):
            gpu_here()


def test_pairs_that_this_gpu_cannot_have(tmp_path: Path) -> None:
    (tmp_path / "product.toml").write_text('product = "M=256 N=128 K=256"\nlayout = "nt"\n')
    _, be = files(tmp_path)
    a100 = profile("a100")
    with Database.open(None) as database:
        with pytest.raises(KernelDeclinedError, match=r"needs compute capability 9\.0; this is"):
            search_pair(tmp_path / "product.toml", [be], database=database, gpu=lambda: a100, start=nobody)
        (tmp_path / "be.cu").write_text("__device__ int seen;\n" + BE_SOURCE.replace("z[i] +=", "seen = i; z[i] +="))
        (tmp_path / "be.toml").write_text(BE.replace("[[parameters]]", 'state = ["seen"]\n[[parameters]]', 1))
        with pytest.raises(KernelDeclinedError, match="keeps seen from launch to launch"):
            search_pair(tmp_path / "lc.toml", [be], database=database, gpu=lambda: H200, start=nobody)


@pytest.mark.usefixtures("few")
def test_the_command_shows_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lc, be = files(tmp_path)
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path / "cache"))
    real, told = search_pair, Told(by_registers)

    def here(*given: Any, **more: Any) -> Pair:
        return real(*given, **more, gpu=lambda: H200, start=told.start)

    monkeypatch.setattr(search, "search_pair", here)
    command = ["fuse", str(lc), str(be), "--search", "--budget", "60", "-o", str(tmp_path / "out")]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    flat = " ".join(done.output.split())
    assert "1.3636 of the best peer (streams) on NVIDIA H200 of a test" in flat and "4 kernels measured" in flat
    assert (tmp_path / "out" / "test.cpp").is_file()


# The process that runs them.


def script(text: str) -> list[str]:
    return [sys.executable, "-c", "import sys, json, os, time\n" + text]


READY = 'sys.stdin.readline()\nprint(json.dumps({"event": "ready"}), flush=True)\n'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("sys.stdin.readline(); os.kill(os.getpid(), 11)", "its process ended with signal 11"),
        ('sys.stdin.readline(); sys.exit("a kernel trapped")', "its process ended with status 1: a kernel trapped"),
        ("sys.stdin.readline(); time.sleep(60)", "no word for 1 s"),
        ('sys.stdin.readline(); print("x" * 10, flush=True); time.sleep(60)', "an answer that is no message"),
        ('sys.stdin.readline(); print("[1]", flush=True); time.sleep(60)', "an answer that is no message"),
        ('sys.stdin.readline(); print(json.dumps({"event": "lost", "reason": "W302"}), flush=True)', "W302"),
    ],
)
def test_a_process_that_is_lost_is_said_and_another_one_started(text: str, said: str) -> None:
    process = PairProcess({"first": 1}, command=script(READY + text), patience_s=1.0)
    try:
        for number in (1, 2):
            with pytest.raises(LostError, match=said):
                process.ask({"x": 1})
            assert process.started == number
    finally:
        process.close()


def test_a_process_goes_on_as_long_as_it_answers() -> None:
    text = 'for line in sys.stdin: print(json.dumps({"event": "refused", "got": json.loads(line)}), flush=True)'
    process = PairProcess({}, command=script(READY + text))
    try:
        assert [process.ask({"n": n})["got"]["n"] for n in range(3)] == [0, 1, 2] and process.started == 1
    finally:
        process.close()
        process.close()


@pytest.mark.parametrize(
    ("text", "error", "said"),
    [
        (
            'print(json.dumps({"event": "declined", "reason": "it does nothing"}))',
            KernelDeclinedError,
            "it does nothing",
        ),
        ('print(json.dumps({"event": "failed", "reason": "out of memory"}))', NoWorkerError, "out of memory"),
        ('print(json.dumps({"event": "?"}))', NoWorkerError, "an answer that is none"),
        ("sys.exit(3)", NoWorkerError, "did not begin: its process ended with status 3"),
        ("time.sleep(60)", NoWorkerError, "did not begin: no word for 1 s"),
    ],
)
def test_a_process_that_does_not_begin(text: str, error: type[Exception], said: str) -> None:
    process = PairProcess({}, command=script(text), start_s=1.0)
    with pytest.raises(error, match=said):
        process.ask({})
    process.close()
    with pytest.raises(NoWorkerError, match="cannot be started"):
        PairProcess({}, command=["/nowhere/python"]).ask({})


# What it does: everything but the GPU.


class Host:
    """A GPU that is host memory: kernels are Python, and a clock counts what each costs."""

    def __init__(self, fault: str = "") -> None:
        self.fault, self.us, self.held = fault, 0.0, []  # type: ignore[var-annotated]
        self.variables: list[tuple[str, str]] = []

    def room(self, size: int) -> int:
        data = (ctypes.c_ubyte * (size + 64))()
        self.held.append(data)
        return -(-ctypes.addressof(data) // 64) * 64

    def place(self, buffer: Buffer) -> tuple[int, Memory]:
        data = GUARD + contents(buffer) + GUARD
        at = self.room(len(data))
        return at + len(GUARD), Memory(at, len(data), data)

    def write(self, address: int, data: bytes) -> None:
        ctypes.memmove(address, data, len(data))

    def read(self, address: int, size: int) -> bytes:
        return ctypes.string_at(address, size)

    def keep(self, memory: Memory) -> object:
        return self.read(memory.address, memory.size)

    def restore(self, memory: Memory, kept: Any) -> None:
        self.write(memory.address, kept)

    def differs(self, memory: Memory, kept: Any) -> int:
        return first_difference(self.read(memory.address, memory.size), kept)

    def run(self, work: Sequence[Callable[[int], None]]) -> None:
        for one in work:
            one(0)

    def copy(self, to: int, source: int, size: int, stream: int) -> None:
        self.write(to, self.read(source, size))

    def beside(self, first: Any, second: Any, stream: int) -> None:
        self.run([*first, *second])

    def samples_us(self, works: Sequence[Callable[[int], None]], rounds: int) -> list[list[float]]:
        samples: list[list[float]] = [[] for _ in works]
        for _ in range(rounds):
            for to, work in zip(samples, works, strict=True):
                self.us = 0.0
                work(0)
                to.append(self.us)
        return samples

    def parts(self, first: Any, second: Any, launches: int) -> dict[str, Callable[[int], None]]:
        return {"parts:64": lambda stream: self.run([*first * launches, *second])}

    # kernels by the name of their file
    def load(self, path: Path) -> Host:
        bound = Host.__new__(Host)
        bound.__dict__ = self.__dict__ | {"file": path.stem, "gpu": self}
        return bound

    def function(self, entry: str) -> Any:
        return self

    def variable(self, name: str) -> tuple[int, int]:
        raise AssertionError(name)

    @property
    def attributes(self) -> Any:
        return type("Taken", (), {"registers": 64, "shared_bytes": 0})()

    def prepare(self, shared_bytes: int, cluster: object) -> None:
        pass

    def require_co_resident(self, *_: object) -> None:
        pass

    def bind(self, grid: Any, block: Any, arguments: Sequence[Any], **more: Any) -> Any:
        name, gpu = self.file, self.gpu  # type: ignore[attr-defined]

        class Launch:
            def launch(self, stream: int) -> None:
                gpu.kernel(name, arguments)

        return Launch()

    def kernel(self, name: str, given: Sequence[int]) -> None:
        if name in ("lc", "fused"):
            x, y = (np.ctypeslib.as_array((ctypes.c_float * 256).from_address(a)) for a in given[:2])
            y[:] = np.float32(2) * x + np.float32(1)
            self.us += 10.0
            if self.fault == "lc" and name == "fused":
                y[7] += 1
        if name == "lc":
            return
        w, z = (
            np.ctypeslib.as_array((ctypes.c_float * 1024).from_address(a)) for a in given[2 * (name == "fused") :][:2]
        )

        def block(k: int) -> None:
            z[256 * k : 256 * k + 256] += w[256 * k : 256 * k + 256] * np.float32(0.5)
            self.us += 5.0 if name != "fused" else 0.5

        if name == "be0":
            for k in range(4):
                block(k)
            return
        if self.fault == name:
            return
        counter = WorkCounter.unpack(self.read(given[-1], BYTES))
        end = counter.finished if counter.stop else min(counter.limit, counter.finished + (2 if name == "fused" else 4))
        for k in range(counter.finished, end):
            block(k)
            if self.fault == "twice" and name == "fused" and k == 1:
                block(k)
        self.write(given[-1], replace(counter, finished=end, ticket=end, end=end).pack())


@pytest.fixture
def sides(tmp_path: Path) -> tuple[Side, ...]:
    lc, be = files(tmp_path)
    return read_sides(lc, [be], ratio=1.0, small=False, changes=None)


CODES = {name: Code(Path(f"{name}.cubin"), "entry") for name in ("lc", "be0", "rest")}


def trials(sides: Sequence[Side], fault: str = "") -> Trials:
    host = Host(fault)
    return Trials(sides, H200, host, Driver(host.load, lambda *a: b""), CODES)


def test_a_kernel_is_compared_and_timed(sides: tuple[Side, ...]) -> None:
    one = candidates(sides, H200, "sm_90a")[0]
    got = trials(sides).trial(one.shape, fused_digest(one.fused), Code(Path("fused.cubin")), 3)
    assert not isinstance(got, str)
    assert (got.launches, got.lc_us, got.be_us, got.inside_us, got.inside_blocks) == (2, 20.0, 20.0, 22.0, 4)
    assert got.peers == {"serial": 40.0, "streams": 40.0, "parts:64": 40.0} and got.idle_us == 20.0
    assert got.fused_us == 22.0 and got.drained


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("lc", "fused without blocks: latency-critical memory 1 differs from byte"),
        ("twice", "best-effort memory 1 differs"),
        ("fused", ""),
    ],
)
def test_kernels_that_are_wrong_are_named(fault: str, said: str, sides: tuple[Side, ...]) -> None:
    one = candidates(sides, H200, "sm_90a")[0]
    got = trials(sides, fault).trial(one.shape, fused_digest(one.fused), Code(Path("fused.cubin")), 3)
    if said:
        assert isinstance(got, str) and said in got
    else:
        assert not isinstance(got, str) and got.inside_blocks == 0, (
            "a role that draws nothing is right, and gains nothing"
        )


def test_kernels_run_as_they_are_in_their_files_where_a_launch_can_pass_their_values(tmp_path: Path) -> None:
    lc, be = files(tmp_path)
    (tmp_path / "be.cu").write_text(BE_SOURCE.replace("float step", "float4 step").replace("* step", "* step.x"))
    wide = BE.replace(
        'type = "float"\nkind = "scalar"\nvalue = 0.5', 'type = "float4"\nkind = "scalar"\nvalue = [1, 2, 3, 4]'
    )
    be.write_text(wide)
    sides = read_sides(lc, [be], ratio=1.0, small=False, changes=None)
    assert pair_worker.source_of_ours(sides[0]) is None
    own = pair_worker.source_of_ours(sides[1])
    assert own is not None and own.launches[0].entry == "w_be0"
    (tmp_path / "product.toml").write_text('product = "M=256 N=128 K=256"\nlayout = "nt"\n')
    product = read_sides(tmp_path / "product.toml", [be], ratio=1.0, small=False, changes=None)[0]
    own = pair_worker.source_of_ours(product)
    assert own is not None and own.launches[0].dependent, "launches of products overlap in the peers, too"


def test_a_job_that_is_wrong_by_itself_and_files_that_change(sides: tuple[Side, ...], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="persistent: best-effort memory 1 differs"):
        trials(sides, "rest")
    one = candidates(sides, H200, "sm_90a")[0]
    assert "others than those" in str(trials(sides).trial(one.shape, "0" * 64, Code(Path("fused.cubin")), 3))
    before = text_digest(sides)
    (tmp_path / "be.cu").write_text(BE_SOURCE.replace("+=", "-="))
    asked = {"small": False, "changes": {}, "kernels": [["lc", f"{tmp_path}/lc.toml"], ["be0", f"{tmp_path}/be.toml"]]}
    assert text_digest(pair_worker.sides_of(asked)) != before
    with pytest.raises(ValueError, match="a file has changed"):
        pair_worker.made({**asked, "digest": before}, nullcontext())  # type: ignore[arg-type]


def served(sides: Sequence[Side], requests: Sequence[Mapping[str, Any]], make: Callable[[Any], Trials]) -> list[Any]:
    answers: list[Any] = []
    serve(io.StringIO("".join(json.dumps(r) + "\n" for r in requests)), answers.append, make)
    return json.loads(json.dumps(answers))


def test_requests_are_answered_line_by_line(sides: tuple[Side, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    one = candidates(sides, H200, "sm_90a")[0]
    request = {
        "shape": to_json(one.shape), "kernel": fused_digest(one.fused), "path": "fused.cubin",
        "symbols": [], "rounds": 3,
    }  # fmt: skip
    assert served(sides, [], lambda _: trials(sides)) == []
    answers = served(sides, [{}, request, {**request, "kernel": "0"}], lambda _: trials(sides))
    assert [a["event"] for a in answers] == ["ready", "times", "refused"] and answers[1]["peers"]["serial"] == 40.0
    assert served(sides, [{}, request], lambda _: trials(sides, "rest"))[0]["event"] == "declined"

    def broken(*_: object) -> Trials:
        raise DeviceError(problem="no room")

    assert served(sides, [{}, request], broken) == [{"event": "failed", "reason": str(DeviceError(problem="no room"))}]
    ended: list[int] = []
    monkeypatch.setattr("weft.colocate.pair_worker.os._exit", ended.append)
    monkeypatch.setattr(Trials, "trial", broken)
    lost = Trials.__new__(Trials)
    assert served(sides, [{}, request], lambda _: lost)[-1]["event"] == "lost" and ended == [4]


def test_without_a_gpu_the_process_says_so(tmp_path: Path) -> None:
    lc, be = files(tmp_path)
    kernels = [["lc", str(lc)], ["be0", str(be)]]
    process = PairProcess({"kernels": kernels, "small": False, "changes": {}, "digest": "0", "facts": "", "codes": {}})
    with pytest.raises(KernelDeclinedError, match="a file has changed meanwhile"):
        process.ask({})
    process.close()


def test_the_drain_has_several_ctas_of_each_multiprocessor(sides: tuple[Side, ...]) -> None:
    rest = drain_of(sides, H200)
    assert not hasattr(rest, "reason") and rest.grid == (8 * H200.sms, 1, 1)


class InProcess:
    """The process's own code in this one, over host memory: requests and answers are texts, as in the pipes."""

    def __init__(self, first: Mapping[str, Any], fault: str = "") -> None:
        asked = json.loads(json.dumps(first))
        self.host = Host(fault)
        self.names = {Path(path).stem: name for name, (path, *_) in asked["codes"].items()}
        self.entries = {name: entry for name, (_, entry, *_) in asked["codes"].items()}
        self.trials = pair_worker.trials_of(asked, lambda: (self.host, Driver(self.load, lambda *a: b"")))

    def load(self, path: Path) -> Host:
        assert path.read_bytes()[:4] == b"\x7fELF"
        name = self.names.get(path.stem, "fused")
        found = self.host.load(Path(f"{name}.cubin"))

        def variable(symbol: str) -> tuple[int, int]:
            self.host.variables.append((name, symbol))
            return self.host.room(16), 16

        found.__dict__["variable"] = variable
        return found

    def ask(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        found = json.loads(json.dumps(pair_worker.answer(self.trials, json.loads(json.dumps(request)))))
        assert isinstance(found, dict)
        return found

    def close(self) -> None:
        pass


@pytest.mark.usefixtures("few")
def test_a_search_with_all_but_a_gpu(tmp_path: Path) -> None:
    """The job has a table, which is filled in each kernel that has it."""
    text = BE_SOURCE.replace("z[i] +=", "z[i] += gain[i % 4] +")
    constants = '[[constants]]\nname = "gain"\ntype = "float"\nshape = [4]\ninit = "zeros"\n'
    used: list[InProcess] = []

    def start(first: Mapping[str, Any]) -> InProcess:
        used.append(InProcess(first))
        return used[-1]

    lc, _ = files(tmp_path)
    (tmp_path / "be.cu").write_text("__constant__ float gain[4];\n" + text)
    (tmp_path / "be.toml").write_text(BE + constants)
    with Database.open(tmp_path) as database:
        pair = search_pair(lc, [tmp_path / "be.toml"], database=database, gpu=lambda: H200, start=start)
        told = list(known(database))
    assert pair.measured is not None and pair.measured["peer"] in ("serial", "streams", "parts:64")
    assert pair.measured["ratio"] == round(40 / 22, 4) and pair.measured["measured"] == 4 and len(told) == 4
    filled = {(name, "gain" in symbol) for name, symbol in used[0].host.variables}
    assert used[0].entries == {"lc": "_Z6scaledPKfPf", "be0": "_Z3addPKfPff", "rest": "w_rest"}, (
        "as they are in their files"
    )
    assert filled == {("be0", True), ("rest", True), ("fused", True)} and len(used[0].host.variables) == 2 + 4


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize(("fault", "said"), [("twice", "do not fuse"), ("rest", "persistent: best-effort memory 1")])
def test_a_search_over_kernels_that_are_wrong(fault: str, said: str, tmp_path: Path) -> None:
    lc, be = files(tmp_path)
    with Database.open(tmp_path) as database:
        with pytest.raises((KernelDeclinedError, ValueError), match=said):
            search_pair(lc, [be], database=database, gpu=lambda: H200, start=lambda first: InProcess(first, fault))
        assert all("differs" in r.declined for r in known(database) if r.key.kernel)


# What buffers hold.


def _mixed(x: int) -> int:
    m = (1 << 64) - 1
    x = (x + 0x9E3779B97F4A7C15) & m
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & m
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) & m
    return x ^ x >> 31


def _uniform(seed: int, i: int) -> float:
    return float(_mixed((_mixed(seed) + i) & ((1 << 64) - 1)) >> 11) * 2.0**-53


def test_numbers_are_those_of_the_test_program() -> None:
    draw = lambda **given: contents(Buffer("b", **given))  # noqa: E731
    got = np.frombuffer(draw(nbytes=40, init="uniform", scalar="f8", seed=7, low=-1.0, high=3.0), "<f8")
    assert got.tolist() == [-1.0 + 4.0 * _uniform(7, i) for i in range(5)]
    got = np.frombuffer(draw(nbytes=20, init="uniform", scalar="i4", seed=2, low=-5.0, high=9.0), "<i4")
    assert got.tolist() == [math.floor(-5.0 + 14.0 * _uniform(2, i)) for i in range(5)]
    want = [
        math.sqrt(-2 * math.log(1 - _uniform(1, 2 * i))) * math.cos(6.283185307179586 * _uniform(1, 2 * i + 1))
        for i in range(6)
    ]
    for scalar, rtol in (("f8", 1e-12), ("f4", 1e-6), ("f2", 1e-3)):
        size = int(scalar[1])
        got = np.frombuffer(draw(nbytes=6 * size, init="normal", scalar=scalar, seed=1), f"<{scalar}")
        np.testing.assert_allclose(got.astype(float), want, rtol=rtol)
    bits = np.frombuffer(draw(nbytes=12, init="normal", scalar="bf", seed=1), "<u2").astype("<u4") << 16
    np.testing.assert_allclose(bits.view("<f4"), want, rtol=5e-3)
    assert np.frombuffer(draw(nbytes=8, init="arange", scalar="u2"), "<u2").tolist() == [0, 1, 2, 3]
    assert (
        draw(nbytes=3, init="zeros", scalar="u1") == b"\0\0\0"
        and draw(nbytes=2, init="poison", scalar="f4")[0] == POISON
    )
    assert np.frombuffer(draw(nbytes=6, init="normal", scalar="i1", seed=1), "i1").tolist() == [int(x) for x in want]


def test_files_of_buffers(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    path.write_bytes(b"abcd")
    assert contents(Buffer("x", 4, "file", "u1", file=path)) == b"abcd"
    with pytest.raises(ArtifactError, match="its file has 4 bytes, not 5"):
        contents(Buffer("x", 5, "file", "u1", file=path))
    with pytest.raises(ArtifactError, match="its file: No such file"):
        contents(Buffer("x", 4, "file", "u1", file=tmp_path / "none"))


def test_results_that_need_only_be_near() -> None:
    def text(values: Sequence[float], behind: bytes = GUARD) -> bytes:
        return GUARD + np.array(values, "<f4").tobytes() + behind

    want = text([1.0, 2.0, math.inf])
    assert far(text([1.0, 2.0, math.inf]), want, "f4", 0.1) == -1
    want = text([1.0, 2.0, 4.0])
    assert far(text([1.05, 2.1, 3.8]), want, "f4", 0.1) == -1
    assert far(text([1.0, 3.0, 4.0]), want, "f4", 0.1) == len(GUARD) + 4
    assert far(text([1.0, 2.0, math.nan]), want, "f4", 0.1) == len(GUARD) + 8
    assert far(text([1.0, 2.0, 4.0], b"\x01" + GUARD[1:]), want, "f4", 0.1) == -1, "that is its first byte"
    assert far(text([1.0, 2.0, 4.0], b"\x09" + GUARD[1:]), want, "f4", 0.1) == len(GUARD) + 12
    assert first_difference(b"abc", b"abd") == 2 and first_difference(b"", b"") == -1


def test_the_choice_is_the_largest_ratio() -> None:
    from tests.tune.test_pairs import record

    from weft.tune.pairs import summed_up

    (summary,) = summed_up([record("a", 0.1, 0.3, 1.1), record("b", 0.3, 0.9, 1.3), record("c", 0.2, 0.5, 1.2)])
    assert chosen(summary).key.kernel == "b"
    (summary,) = summed_up([record("a", ratio=0.9)])
    with pytest.raises(KernelDeclinedError, match="do not fuse"):
        chosen(summary)
