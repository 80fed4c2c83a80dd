from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from time import perf_counter_ns
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from tests.generate.cuda import products
from tests.tune.cuda_fake import (
    EXPECTED,
    LIBRARY,
    Act,
    FakeCudaTransport,
    FakeGpu,
    problem,
    schedule,
    source,
    trial,
    tuner_waits,
)

from weft.device.cuda.facts import GpuFacts
from weft.device.cuda.nvrtc import Nvrtc, find_nvrtc
from weft.device.facts import CpuFacts
from weft.device.files import private_directory
from weft.errors import DeviceError
from weft.generate.bind import CudaDriver
from weft.generate.cuda import CudaGenerator
from weft.ir.declined import Declined
from weft.ir.graph import GraphBuilder
from weft.ir.prims import Prim
from weft.ir.types import DType, TensorType
from weft.kernels.candidate import Problem
from weft.kernels.formats import Format
from weft.kernels.measurement import Measurement, Verdict
from weft.kernels.source import CallStep, CudaSource, KernelSource, Launch, Pointer, Ref, Schedule
from weft.options import Options
from weft.tune.cuda_device import HANG_S
from weft.tune.cuda_shaken import Shaken, shaken
from weft.tune.cuda_site import CANARY_TEXT, CudaSite, describe_gpu, device_index, driver_version
from weft.tune.cuda_subject import LATE_ENTRY, LateWriter, Waited
from weft.tune.cuda_timing import CUDA_POLICY, copies_needed, launches_needed, time_rounds
from weft.tune.cuda_worker import CANARY_S, canary
from weft.tune.site import Built, HostSite, Refused
from weft.tune.store import Database
from weft.tune.tuner import ProblemTrial, Tuner, winner
from weft.tune.verify import Arena, Binding, build_reference, verify

OPTIONS = Options(device="cuda")
TEXT = 'extern "C" __global__ void run(const float* x, float* y) { y[threadIdx.x] = x[threadIdx.x] * 2.0f; }'
LAUNCH = Launch("run", (1, 1, 1), (32, 1, 1), (Pointer("in", 0), Pointer("out", 0)))


def measure(
    work: ProblemTrial, transport: FakeCudaTransport | None = None, database: Database | None = None
) -> tuple[list[Measurement], FakeCudaTransport]:
    transport = transport or FakeCudaTransport()
    with Tuner(OPTIONS, GpuFacts(), database or Database.open(None), transport=transport) as tuner:
        return list(tuner.measure([work])), transport


def verdicts(found: list[Measurement]) -> dict[Schedule, Verdict]:
    return {m.schedule: m.verdict for m in found}


@pytest.mark.parametrize("act", list(Act), ids=lambda a: a.name)
def test_one_kernel_among_good_ones(act: Act) -> None:
    found, transport = measure(trial([Act.OK, act, Act.SLOWER]))
    by = verdicts(found)
    assert by[schedule(act, 1)].value in EXPECTED[act].split(), found
    assert by[LIBRARY.schedule] is by[schedule(Act.OK, 0)] is by[schedule(Act.SLOWER, 2)] is Verdict.OK
    lost = act in (Act.ILLEGAL, Act.ILLEGAL_LATE, Act.HANG, Act.HANG_LATE)
    assert transport.started == (2 if lost else 1)
    best = winner([m for m in found if m.schedule.generator == "cuda"], None)
    assert best is not None and best.schedule in (schedule(Act.OK, 0), schedule(act, 1))
    assert best.median_us == pytest.approx(3.0)


def test_every_kernel_may_cost_a_worker_and_none_is_tried_again() -> None:
    acts = [Act.ILLEGAL, Act.HANG, Act.ILLEGAL_LATE, Act.HANG_LATE, Act.OK]
    database = Database.open(None)
    found, transport = measure(trial(acts), database=database)
    by = verdicts(found)
    assert [by[schedule(a, n)].value for n, a in enumerate(acts)] == ["crash", "hang", "crash", "hang", "ok"]
    assert transport.started == 5
    again, quiet = measure(trial(acts), database=database)
    assert verdicts(again) == by and quiet.started == 0


def test_after_a_hang_the_gpu_may_need_time(monkeypatch: pytest.MonkeyPatch) -> None:
    waited = tuner_waits(monkeypatch)
    found, transport = measure(trial([Act.HANG, Act.OK]), FakeCudaTransport(sick_canaries=2))
    assert verdicts(found)[schedule(Act.OK, 1)] is Verdict.OK
    assert transport.started == 4 and waited == [0.0, 0.0, 1.0, 5.0]
    with pytest.raises(DeviceError, match="does not start"):
        measure(trial([Act.HANG, Act.OK]), FakeCudaTransport(sick_canaries=99))


def test_a_time_below_the_roofline_is_impossible() -> None:
    found, _ = measure(trial([Act.OK, Act.SLOWER], bound_us=6.0))
    by = verdicts(found)
    assert by[schedule(Act.OK, 0)] is Verdict.IMPOSSIBLE and by[schedule(Act.SLOWER, 1)] is Verdict.OK


def test_weights_rotate_and_activations_do_not() -> None:
    _, transport = measure(trial([Act.OK]))
    gpu = transport.gpu
    # for each kernel a probe and the recording that counts: 3 us a launch, 200 us a sample
    assert gpu.launches[-2:] == [8, 48] and gpu.evictions[-2:] == [False, True]


def test_a_call_that_cannot_be_recorded_is_refused_with_a_reason() -> None:
    found, _ = measure(trial([Act.OK]), FakeCudaTransport(refuses_capture=True))
    by = {m.schedule: m for m in found}
    refused = by[LIBRARY.schedule]
    assert refused.verdict is Verdict.RESOURCE and "stream is capturing" in refused.error
    assert by[schedule(Act.OK, 0)].verdict is Verdict.OK


def test_a_wrong_library_call_is_wrong() -> None:
    wrong = replace(LIBRARY, run=(CallStep("aten.add.Tensor", (Ref("in", 0), Ref("in", 1))),))
    work = trial([Act.OK])
    found, _ = measure(replace(work, kernels=[(wrong.schedule, wrong, None), *work.kernels[1:]]))
    assert verdicts(found)[wrong.schedule] in (Verdict.WRONG, Verdict.NAN_CLASS)


def test_a_kernel_for_the_cpu_is_refused_on_a_gpu_and_the_reverse() -> None:
    native = KernelSource(Schedule("cpp"), "void k0() {}", "k0")
    found, transport = measure(replace(trial([]), kernels=[(native.schedule, native, None)]))
    assert [m.verdict for m in found] == [Verdict.RESOURCE] and transport.started == 0
    site = HostSite(Options(), CpuFacts(), None, None)
    assert site.build(source(Act.OK)) == Refused(Verdict.RESOURCE, "a CUDA kernel on a CPU")


def test_the_next_group_is_built_while_one_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    site_ = CudaSite(replace(OPTIONS, build_jobs=1), GpuFacts(), None, None)

    def build(_: CudaSite, kernel: CudaSource, left_s: float) -> Built:
        assert left_s == math.inf
        events.append(f"build {dict(kernel.schedule.params)['n']}")
        return Built("/x.cubin", 0.1)

    monkeypatch.setattr("weft.tune.cuda_site.CudaSite.build", build)
    assert site_.builds_ahead and site_.jobs == 1
    works = []
    for n in range(6):
        made_ = source(Act.OK, n)
        works.append(replace(trial([]), kernels=[(made_.schedule, made_, None)]))
    with Tuner(replace(OPTIONS, build_jobs=1), GpuFacts(), Database.open(None), transport=FakeCudaTransport()) as tuner:
        for m in tuner.measure(works):
            assert m.verdict is Verdict.OK
            events.append(f"measured {dict(m.schedule.params)['n']}")
    assert [e for e in events if e.startswith("measured")] == [f"measured {n}" for n in range(6)]
    # two problems are a group for one compiler; nothing of the third is begun before the first is out
    assert events.index("build 1") < events.index("measured 0")
    assert sorted(e for e in events if e.startswith("build")) == [f"build {n}" for n in range(6)]
    assert tuner.sm_clocks_mhz == [1755] * 6


# --- protocol numbers ---


def test_launches_and_copies() -> None:
    l2, room = 60 << 20, 1 << 34
    assert [launches_needed(CUDA_POLICY, us) for us in (0.3, 2.0, 50.0, 199.0, 500.0)] == [48, 48, 4, 2, 1]
    assert copies_needed(CUDA_POLICY, 100, 0, l2, room) == 1
    assert copies_needed(CUDA_POLICY, 100, 256, l2, room) == 100
    assert copies_needed(CUDA_POLICY, 100, 40 << 20, l2, room) == 4
    assert copies_needed(CUDA_POLICY, 100, 40 << 20, l2, 80 << 20) == 2
    assert copies_needed(CUDA_POLICY, 100, 40 << 20, l2, 1) == 1
    assert copies_needed(replace(CUDA_POLICY, cache="warm"), 100, 256, l2, room) == 1


class Steady:
    def __init__(self, us: float) -> None:
        self.us, self.taken = us, 0

    def sample(self) -> float:
        self.taken += 1
        return self.us


def test_the_slow_ones_leave_after_screening_and_the_baseline_stays() -> None:
    samplers = {k: Steady(10.0 + k) for k in range(12)}
    order: list[int] = []
    found = time_rounds(
        samplers, policy=CUDA_POLICY, always=(11,), seed=1, before=order.append, spent_us=lambda k, us: 300.0
    )
    taken = {k: len(v) for k, v in found.items()}
    rest = set(range(8)) | {11}
    assert all(taken[k] == 14 for k in rest) and all(taken[k] == 3 for k in range(8, 11))
    assert [len(set(order[i : i + 12])) for i in (0, 12, 24)] == [12] * 3 and order[:12] != order[12:24]
    assert order == list(_again(1))


def _again(seed: int) -> list[int]:
    order: list[int] = []
    samplers = {k: Steady(10.0 + k) for k in range(12)}
    time_rounds(
        samplers, policy=CUDA_POLICY, always=(11,), seed=seed, before=order.append, spent_us=lambda k, us: 300.0
    )
    return order


# --- the parent's side ---


@pytest.fixture(scope="module")
def nvrtc() -> Nvrtc:
    found = find_nvrtc()
    assert isinstance(found, Nvrtc), found
    return found


def site(nvrtc: Nvrtc | None, cache: Path, **facts: object) -> CudaSite:
    return CudaSite(replace(OPTIONS, cache_dir=cache), GpuFacts(**facts), nvrtc, None)  # type: ignore[arg-type]


def made(text: str = TEXT, **changes: object) -> CudaSource:
    return replace(CudaSource(Schedule("cuda"), text, (LAUNCH,)), **changes)  # type: ignore[arg-type]


def test_a_source_is_compiled_for_exactly_this_gpu(nvrtc: Nvrtc, tmp_path: Path) -> None:
    built = site(nvrtc, tmp_path).build(made())
    assert not isinstance(built, Refused) and Path(built.path).stat().st_size > 0
    again = site(nvrtc, tmp_path).build(made())
    assert again == replace(built, seconds=0.0)
    other = site(nvrtc, tmp_path, capability=80).build(made())
    assert not isinstance(other, Refused) and other.path != built.path


def test_what_does_not_fit_is_refused_before_it_runs(nvrtc: Nvrtc, tmp_path: Path) -> None:
    here = site(nvrtc, tmp_path)
    cases = {
        "compute capability 100": made(capability=100),
        "threads": made(launches=(replace(LAUNCH, block=(1024, 2, 1)),)),
        "shared memory": made(launches=(replace(LAUNCH, shared_bytes=1 << 20),)),
        "no entry": made(launches=(replace(LAUNCH, entry="gone"),)),
    }
    for reason, kernel in cases.items():
        found = here.build(kernel)
        assert isinstance(found, Refused) and found.verdict is Verdict.RESOURCE and reason in found.error, found


def test_a_text_that_does_not_compile_carries_the_log(nvrtc: Nvrtc, tmp_path: Path) -> None:
    found = site(nvrtc, tmp_path).build(made("this is no CUDA"))
    assert isinstance(found, Refused) and found.verdict is Verdict.COMPILE and "error" in found.error
    found = site(nvrtc, tmp_path).build(made(flags=("--run-my-code",)))
    assert isinstance(found, Refused) and found.verdict is Verdict.COMPILE
    assert site(None, tmp_path).build(made()) == Refused(Verdict.COMPILE, "no NVRTC")


def test_the_canary_compiles_and_is_asked_for(nvrtc: Nvrtc, tmp_path: Path) -> None:
    asked = site(nvrtc, tmp_path).canary()
    assert Path(str(asked["object"])).exists() and f"void {asked['entry']}(" in CANARY_TEXT
    assert site(None, tmp_path).canary()["object"] == ""


def test_the_canary_on_a_sound_and_on_a_sick_device() -> None:
    assert canary(FakeGpu(), "", "") == ""
    assert "does not run" in canary(FakeGpu(), "/nonexistent.cubin", "weft_canary")


def test_the_canary_waits_longer_than_a_kernel_may_hang() -> None:
    """Other processes may hold a sound GPU for seconds: the machine is not called sick for that."""
    gpu = FakeGpu()
    canary(gpu, "x.cubin", "weft_canary", driver=_Loads())  # type: ignore[arg-type]
    assert gpu.patience_s == [CANARY_S] and HANG_S < CANARY_S < Options().trial_timeout_s


class _Loads:
    """A driver whose kernels do nothing."""

    def __getattr__(self, name: str) -> Callable[..., _Loads]:
        return lambda *given, **named: self


def test_timings_belong_to_one_gpu_driver_compiler_and_policy(nvrtc: Nvrtc) -> None:
    def text(facts: GpuFacts, compiler: Nvrtc | None = nvrtc, tf32: bool = False, cache: str = "weights") -> str:
        policy = replace(CUDA_POLICY, cache=cache)
        return describe_gpu(facts, compiler, seed=0, policy=policy, allow_tf32=tf32).text

    same = text(GpuFacts())
    assert same == text(GpuFacts()) and '"gpu":"NVIDIA H200"' in same and nvrtc.version in same
    others = [
        text(GpuFacts(name="NVIDIA H100")),
        text(GpuFacts(sms=78)),
        text(GpuFacts(), None),
        text(GpuFacts(), tf32=True),
        text(GpuFacts(), cache="warm"),
    ]
    assert len({same, *others}) == 6


def test_the_driver_is_named_where_the_system_says(tmp_path: Path) -> None:
    path = tmp_path / "version"
    path.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\nGCC version:\n")
    assert driver_version(path) == "580.65.06"
    path.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.161.08  Mon\n")
    assert driver_version(path) == "535.161.08"
    assert driver_version(tmp_path / "gone") == "unknown"


def test_the_worker_is_told_which_gpu() -> None:
    assert [device_index(d) for d in ("cuda", "cuda:0", "cuda:3", "cpu", "cuda:x")] == [0, 0, 3, 0, 0]
    options = replace(OPTIONS, device="cuda:2", allow_tf32=True)
    sizes = {"sms": GpuFacts().sms, "shared_bytes": GpuFacts().shared_per_block}
    hello = {"op": "hello", "device": 2, "allow_tf32": True, "late": "", "soil": "", **sizes}
    assert CudaSite(options, GpuFacts(), None, None).hello() == hello


@dataclass
class Forms:
    """A site that compiles nothing: every kernel has a second form of one skeleton."""

    site: CudaSite
    asked: list[str] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.site, name)

    def build(self, kernel: CudaSource, left_s: float = math.inf) -> Built:
        return Built("/nonexistent.cubin", 0.1)

    def shaken(self, kernel: CudaSource) -> Shaken:
        return Shaken(kernel, "alike")

    def build_shaken(self, form: Shaken, left_s: float = math.inf) -> str:
        self.asked.append(form.source.sha256)
        return "/nonexistent/shaken.cubin"


def shaken_outcome(acts: Sequence[Act], database: Database, deadline: float | None = None) -> tuple[list[Verdict], int]:
    """Verdicts on kernels of one skeleton, and how many were built in their second form."""
    work = trial(acts)
    work = replace(work, kernels=[(s, k, None) for s, k, _ in work.kernels[1:]])
    with Tuner(OPTIONS, GpuFacts(), database, transport=FakeCudaTransport(), clock=lambda: 0.0) as tuner:
        site = Forms(CudaSite(OPTIONS, GpuFacts(), None, None))
        tuner._site = site  # type: ignore[assignment]
        by = {m.schedule: m.verdict for m in tuner.measure([work], deadline=deadline)}
    return [by[schedule(a, n)] for n, a in enumerate(acts)], len(site.asked)


def test_a_kernel_that_is_right_only_if_nothing_delays_it_is_rejected_before_it_is_timed() -> None:
    database = Database.open(None)
    assert shaken_outcome([Act.RACE], database) == ([Verdict.WRONG], 1)
    assert shaken_outcome([Act.RACE], Database.open(None), deadline=5.0) == ([Verdict.OK], 0)  # no time is left for it
    assert shaken_outcome([Act.OK], database) == ([Verdict.OK], 1)
    # one of its skeleton was found right
    assert shaken_outcome([Act.SLOWER], database) == ([Verdict.OK], 0)


def test_the_second_form_delays_every_meeting_and_lets_copies_come_late(tmp_path: Path) -> None:
    nvrtc = find_nvrtc()
    if isinstance(nvrtc, Declined):
        pytest.skip(nvrtc.reason)
    case = products.product((50, 136), (136, 72))
    facts = GpuFacts()
    schedules = CudaGenerator().schedules(case, facts)
    assert not isinstance(schedules, Declined)
    kinds = {str(dict(s.params).get("template")): s for s in reversed(schedules)}
    site = CudaSite(replace(OPTIONS, cache_dir=tmp_path), facts, nvrtc, None)
    skeletons = set()
    for name in ("mma", "wgmma", "tma"):
        source = CudaGenerator().emit(case, kinds[name])
        assert isinstance(source, CudaSource)
        form = shaken(source)
        assert form is not None
        text = form.source.text
        assert (text.count("w_copy16_late(") > 1) == (text.count("w_q.arrived(") > 0) == (name != "tma")
        assert (text.count("w_stay_w_bar_wait(") > 1) == (name == "tma")
        assert site.build_shaken(form)
        skeletons.add(form.skeleton)
        other = replace(source, text=re.sub(r"\nrole\.sync\(\);", "\n;", source.text, count=1))
        assert (made := shaken(other)) is not None and made.skeleton != form.skeleton
    assert len(skeletons) == 3
    helped = """extern "C" __global__ void run(const float* x, float* y) {
w_copy16(0, x); w_commit();
awaited();
"""
    for body, end in (("w_arrived<0>();", ""), ("w_commit();", "w_arrived<0>();\n")):
        helper = f"W_FN void awaited() {{\n{body}\n}}\n__shared__ float z;\n"
        form = shaken(CudaSource(Schedule("cuda"), f"{helper}{helped}{end}}}", (LAUNCH,)))
        # what one function copies and another waits for cannot be in one queue
        assert form is not None and "w_copy16(0, x)" in form.source.text and " w_late w_q;" not in form.source.text
    plain = 'extern "C" __global__ void run(const float* x, float* y) { y[threadIdx.x] = x[threadIdx.x]; }'
    assert shaken(CudaSource(Schedule("cuda"), plain, (LAUNCH,))) is None


def test_the_worker_is_given_a_predecessor_for_what_it_judges(tmp_path: Path) -> None:
    nvrtc = find_nvrtc()
    if isinstance(nvrtc, Declined):
        pytest.skip(nvrtc.reason)
    options = replace(OPTIONS, device="cuda", cache_dir=private_directory(tmp_path / "cache"))
    for capability in (80, 90):
        facts = replace(GpuFacts(), capability=capability)
        path = Path(str(CudaSite(options, facts, nvrtc, None).hello()["late"]))
        assert LATE_ENTRY.encode() in path.read_bytes()


class _Arrives:
    """A predecessor: what it writes is there once somebody waits for it."""

    def __init__(self) -> None:
        self.pending: list[Callable[[], object]] = []
        self.asked: list[list[int]] = []

    def __call__(self, arena: Arena, positions: Sequence[int]) -> None:
        self.asked.append(list(positions))
        for k in positions:
            arena.inputs[k].fill(0xFF)
            self.pending.append(partial(arena.inputs[k].bytes.copy_, arena.copies[k]))

    def wait(self) -> None:
        while self.pending:
            self.pending.pop()()


class _Adds:
    """x + 1, by a kernel that waits for its predecessor or does not."""

    deterministic, transforms, recordable, packed_bytes, reads = True, False, True, 0, frozenset[int]()

    def __init__(self, late: _Arrives, waits: bool) -> None:
        self.late, self.waits = late, waits

    def enqueue(self, arena: Arena, poison: int) -> Binding:
        def call() -> None:
            if self.waits:
                self.late.wait()
            torch.add(arena.input_tensors[0], 1.0, out=arena.output_tensors[0])

        return Binding(call, ())

    def rotate(self, arenas: Any, base: Any) -> None:
        raise AssertionError

    def misbehaviour(self) -> None:
        self.late.wait()


@pytest.mark.parametrize("waits", [True, False])
def test_a_kernel_that_waits_for_nothing_is_rejected(waits: bool) -> None:
    b = GraphBuilder()
    x = b.input(TensorType(DType.F32, (40,)))
    posed = Problem(b.build([b.apply(Prim.ADD, x, 1.0)]), "p", (Format.ROW,), (Format.ROW,))
    late, reference = _Arrives(), build_reference(posed, seed=0)
    for before, good in ((None, True), (partial(late, positions=[0]), waits)):
        subject = Waited(cast("Any", _Adds(late, waits)), FakeGpu(), before=before)
        found = verify(posed, subject, reference, {}, slow_s=60.0, clock=perf_counter_ns).finding
        assert (found.verdict is Verdict.OK) == good, found
    assert late.asked[0] == [0]


def test_the_predecessor_is_told_where_from_and_where_to(tmp_path: Path) -> None:
    posed = problem()
    arena = Arena(posed, build_reference(posed, seed=0).timed.inputs)
    bound: list[Any] = []

    class Loaded:
        def function(self, entry: str) -> Any:
            assert entry == LATE_ENTRY
            return self

        def bind(
            self, grid: Any, block: Any, arguments: Any, *, shared_bytes: int, cluster: Any, dependent: bool
        ) -> Any:
            bound.append((arguments, dependent))
            return SimpleNamespace(launch=lambda stream: bound.append((stream,)))

    gpu = FakeGpu()
    writer = LateWriter("", gpu, driver=CudaDriver(lambda path: Loaded(), lambda *_: b""))
    writer(arena, [0])
    ((table, rows), dependent), launched = bound
    expected = [arena.copies[0].data_ptr(), arena.inputs[0].address, arena.inputs[0].bytes.numel()]
    assert list(array_of(table, 3 * rows)) == expected
    assert not dependent and launched == (gpu.stream,)
    assert bool((arena.inputs[0].bytes == 0xFF).all()) and bool((arena.copies[0] != 0xFF).any())
    writer(arena, [])
    assert len(bound) == 2


def array_of(address: int, count: int) -> list[int]:
    return list((ctypes.c_int64 * count).from_address(address))


def test_a_real_worker_without_a_gpu_says_so(tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    options = replace(OPTIONS, cache_dir=tmp_path)
    made_ = CudaSite(options, GpuFacts(), None, None)
    transport = made_.transport()
    transport.start()
    try:
        transport.send(made_.hello(), 10.0)
        with pytest.raises(Exception, match="torch sees no GPU number 0"):
            transport.receive(60.0)
    finally:
        transport.kill()


@pytest.mark.parametrize("act", list(Act), ids=lambda a: a.name)
def test_what_is_not_timed_runs_from_a_graph_all_the_same(act: Act) -> None:
    """A plan on a GPU is one graph: what cannot be recorded, or runs otherwise there, is refused."""
    work = replace(trial([Act.OK, act]), timed=False)
    found, _ = measure(work)
    by = verdicts(found)
    assert by[LIBRARY.schedule] is by[schedule(Act.OK, 0)] is Verdict.OK
    harmless = {Verdict.SLOW.value, Verdict.IMPOSSIBLE.value}
    allowed = set(EXPECTED[act].split())
    assert by[schedule(act, 1)].value in allowed | ({"ok"} if allowed & harmless else set()), found
    assert not any(m.samples_us for m in found)


def test_a_call_that_cannot_be_recorded_is_refused_untimed() -> None:
    transport = FakeCudaTransport(refuses_capture=True)
    found, _ = measure(replace(trial([]), timed=False), transport)
    assert [m.verdict for m in found] == [Verdict.RESOURCE]
