"""Plans under a budget of an SM: checked when linked and when loaded, and on the GPU before they first run."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import pytest
import torch
from tests.runtime.fake_cuda import FakeCuda, Recorded, install
from tests.runtime.plans import library_plan

from weft.device.cuda.cubin import Usage
from weft.device.cuda.facts import GpuFacts, profile
from weft.device.cuda.tensor_map import encode_tensor_map
from weft.errors import ArtifactError, DeviceError, InvalidGraphError
from weft.generate import bind
from weft.generate.bind import CudaDriver, CudaFunction
from weft.ir.graph import Graph, GraphBuilder
from weft.ir.prims import Prim
from weft.ir.types import DType, TensorType
from weft.kernels.plan import Plan
from weft.kernels.source import CudaSource, Launch, Pointer, Schedule
from weft.options import Options
from weft.pipeline.warm import plan_key
from weft.runtime import artifact, budgeted, cuda_artifact
from weft.runtime.budgeted import Budgeted, Residence
from weft.runtime.cuda_executable import CudaExecutable
from weft.runtime.executable import Linked
from weft.sm_budget import SmBudget

BUDGET = SmBudget(49152, 200 << 10, 1792, 24)
FACTS = {"gpu": "NVIDIA H200", "capability": "90"}
HERE = torch.device("cpu")


@dataclass
class Driver:
    """Loads functions that take what it says, and notes what is asked of them."""

    taken: Usage = field(default_factory=lambda: Usage(32, 0))
    stated: Usage = field(default_factory=lambda: Usage(32, 0))
    """What the cubin says."""
    preferred: list[str] = field(default_factory=list)
    uploaded: list[tuple[int, int]] = field(default_factory=list)
    launched: int = 0

    @property
    def attributes(self) -> Usage:
        return self.taken

    def load(self, path: Path) -> Driver:
        return self

    def function(self, entry: str) -> Driver:
        return self

    def prepare(self, shared_bytes: int, cluster: tuple[int, int, int]) -> None:
        assert not self.launched

    def require_co_resident(self, *_: object) -> None:
        pass

    def bind(self, *_: object, **__: object) -> Driver:
        return self

    def launch(self, stream: int) -> None:
        self.launched += 1

    def prefer(self, function: CudaFunction) -> None:
        assert function is self and not self.launched, "before anything runs"
        self.preferred.append("100")

    def upload(self, graph: int, stream: int) -> None:
        self.uploaded.append((graph, stream))

    def budgeted(self, budget: SmBudget = BUDGET) -> Budgeted:
        return Budgeted(
            profile("h200").within(budget),
            driver=CudaDriver(self.load, encode_tensor_map),
            residence=Residence(self.prefer, self.upload),
        )


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    monkeypatch.setattr(Recorded, "raw_cuda_graph_exec", lambda self: 77, raising=False)
    return install(monkeypatch)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Driver:
    found = Driver()
    monkeypatch.setattr(budgeted, "usage", lambda data: {"double": found.stated})
    (tmp_path / "k.cubin").write_bytes(b"a cubin")
    return found


def tanh() -> Graph:
    b = GraphBuilder()
    return b.build([b.apply(Prim.TANH, b.input(TensorType(DType.F32, (64, 64))))])


def kernel(threads: int = 256, shared: int = 0) -> CudaSource:
    launch = Launch("double", (1, 1, 1), (threads, 1, 1), (Pointer("in", 0), Pointer("out", 0)), shared)
    return CudaSource(Schedule("cuda"), "text", (launch,))


def plan_of(graph: Graph, source: CudaSource) -> Plan:
    plan = library_plan(graph)
    return replace(plan, steps=tuple(replace(s, kernel=source) for s in plan.steps))


def linked(folder: Path, source: CudaSource, budget: str = str(BUDGET)) -> Linked:
    facts = {**FACTS, **({"sm_budget": budget} if budget else {})}
    graph = tanh()
    return Linked(graph, plan_of(graph, source), {source.sha256: folder / "k.cubin"}, None, None, 0, facts)


def test_a_kernel_that_fits_prefers_the_carve_out_and_is_there_before_the_first_run(
    cuda: FakeCuda, driver: Driver, tmp_path: Path
) -> None:
    CudaExecutable(linked(tmp_path, kernel()), device=HERE, budgeted=driver.budgeted())
    assert driver.preferred == ["100"] and driver.launched == 2, "run once, and recorded"
    assert driver.uploaded == [(77, cuda.streams[0].cuda_stream)] and cuda.graphs[0].replays == 0


def test_without_a_budget_nothing_is_set_or_brought(
    cuda: FakeCuda, driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bind, "real_driver", lambda: CudaDriver(driver.load, encode_tensor_map))
    driver.taken = Usage(255, 0)
    CudaExecutable(linked(tmp_path, kernel(1024), budget=""), device=HERE)
    assert driver.preferred == [] and driver.uploaded == [] and driver.launched == 2


@pytest.mark.parametrize(
    ("source", "taken", "stated", "said"),
    [
        (kernel(384), Usage(168, 0), Usage(168, 0), "64512 registers of 49152"),
        (kernel(384), Usage(168, 0), Usage(32, 0), "64512 registers of 49152"),  # the loaded one takes more
        (kernel(256, 204_000), Usage(32, 0), Usage(32, 0), "205056 shared of 204800"),
        (kernel(256, 203_000), Usage(32, 0), Usage(32, 900), "204928 shared of 204800"),
    ],
)
def test_a_step_that_does_not_fit_is_refused_before_it_runs(
    cuda: FakeCuda, driver: Driver, tmp_path: Path, source: CudaSource, taken: Usage, stated: Usage, said: str
) -> None:
    driver.taken, driver.stated = taken, stated
    with pytest.raises(DeviceError, match="double is over sm_budget") as error:
        CudaExecutable(linked(tmp_path, source), device=HERE, budgeted=driver.budgeted())
    assert said in str(error.value) and not driver.launched


def test_what_the_system_takes_is_not_counted_twice(cuda: FakeCuda, driver: Driver, tmp_path: Path) -> None:
    driver.taken = Usage(32, 1024)  # as drivers may state it since compute capability 9.0
    CudaExecutable(linked(tmp_path, kernel(256, 203_776)), device=HERE, budgeted=driver.budgeted())
    assert driver.launched == 2


def test_a_cubin_that_cannot_be_read_is_not_known_to_fit(cuda: FakeCuda, tmp_path: Path) -> None:
    (tmp_path / "k.cubin").write_bytes(b"no cubin")
    with pytest.raises(DeviceError, match="what double takes of an SM cannot be read: not a cubin"):
        CudaExecutable(linked(tmp_path, kernel()), device=HERE, budgeted=Driver().budgeted())


def test_a_call_is_refused_by_name(cuda: FakeCuda, driver: Driver) -> None:
    graph = tanh()
    given = Linked(graph, library_plan(graph), {}, None, None, 0, {**FACTS, "sm_budget": str(BUDGET)})
    with pytest.raises(DeviceError, match=r"library\(.*is a call.*not stand in a plan under sm_budget registers=49152"):
        CudaExecutable(given, device=HERE, budgeted=driver.budgeted())


def test_nobody_forgets_the_budget(cuda: FakeCuda, driver: Driver, tmp_path: Path) -> None:
    with pytest.raises(InvalidGraphError, match="sm_budget"):
        CudaExecutable(linked(tmp_path, kernel()), device=HERE)
    with pytest.raises(InvalidGraphError, match="sm_budget"):
        CudaExecutable(linked(tmp_path, kernel(), budget=""), device=HERE, budgeted=driver.budgeted())
    exe = CudaExecutable(linked(tmp_path, kernel()), device=HERE, budgeted=driver.budgeted())
    driver.launched = 0
    again = exe.with_graph(exe.graph)
    assert again.linked.facts["sm_budget"] == str(BUDGET) and len(driver.uploaded) == 2


# ---- saved plans


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, cuda: FakeCuda, driver: Driver) -> dict[str, GpuFacts]:
    """The GPU that plans are loaded on."""
    here = {"facts": profile("h200")}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(cuda_artifact, "gpu_facts", lambda cache, *, device, calibrate: here["facts"])
    monkeypatch.setattr(cuda_artifact, "_cubin", lambda path, source, members, *_: Path(members["where"].decode()))
    monkeypatch.setattr(
        cuda_artifact,
        "Budgeted",
        lambda facts: driver.budgeted(SmBudget(*(getattr(facts.sm_budget, f) for f in SmBudget.__slots__))),
    )
    monkeypatch.setattr(cuda_artifact, "CudaExecutable", partial(CudaExecutable, device=HERE))
    return here


def loaded(folder: Path, given: Linked) -> object:
    members = {"where": str(folder / "k.cubin").encode()}
    return cuda_artifact.link(folder / "p.weft", given.graph, given.plan, members, given.facts, None)


def test_a_saved_plan_has_its_budget_and_one_without_has_no_word_of_it(
    cuda: FakeCuda, driver: Driver, tmp_path: Path
) -> None:
    import zipfile

    for budget in ("", str(BUDGET)):
        path = tmp_path / "p.weft"
        artifact.save(linked(tmp_path, kernel(), budget), path, trust_dir=None)
        with zipfile.ZipFile(path) as archive:
            manifest = json.loads(archive.read("manifest.json"))
            assert manifest["facts"].get("sm_budget", "") == budget
            assert (b"sm_budget" in archive.read("manifest.json")) is bool(budget)
            assert b"sm_budget" not in archive.read("plan.json") and manifest["schema"] == 1


def test_loading_checks_it_again(gpu: dict[str, GpuFacts], driver: Driver, tmp_path: Path) -> None:
    loaded(tmp_path, linked(tmp_path, kernel()))
    assert driver.preferred == ["100"] and len(driver.uploaded) == 1
    driver.taken = Usage(255, 0)  # compiled anew, by another compiler
    driver.launched = 0
    with pytest.raises(DeviceError, match="65536 registers of 49152"):
        loaded(tmp_path, linked(tmp_path, kernel()))


def test_a_smaller_gpu_refuses_the_plan(gpu: dict[str, GpuFacts], driver: Driver, tmp_path: Path) -> None:
    gpu["facts"] = replace(profile("a100"), shared_per_sm=102_400, shared_per_block=101_376)
    with pytest.raises(ArtifactError, match=r"made under sm_budget registers=49152.*shared is 204800, and an SM of"):
        loaded(tmp_path, linked(tmp_path, kernel()))
    assert not driver.launched


@pytest.mark.parametrize("text", ["registers=1", "all", ""])
def test_a_budget_that_is_none_is_refused(gpu: dict[str, GpuFacts], tmp_path: Path, text: str) -> None:
    given = linked(tmp_path, kernel())
    with pytest.raises(ArtifactError, match="its sm_budget is none"):
        loaded(tmp_path, replace(given, facts={**given.facts, "sm_budget": text}))


# ---- what is remembered


def test_a_plan_is_remembered_per_budget_and_without_one_as_ever() -> None:
    graph, options = tanh(), Options(device="cuda")
    plain = plan_key(graph, options, FACTS)
    assert plain == plan_key(graph, replace(options, sm_budget=BUDGET), FACTS), "the environment tells them apart"
    assert "sm_budget" not in plain
    others = [plan_key(graph, options, {**FACTS, "sm_budget": str(b)}) for b in (BUDGET, SmBudget(threads=64))]
    assert len({plain, *others}) == 3
