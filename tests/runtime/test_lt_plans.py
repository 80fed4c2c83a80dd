"""Plans with products by recorded algorithms of cuBLASLt, on stand-ins for the library and for torch.cuda."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.device.cuda.stand_in import cublaslt
from tests.generate.library.lt_cases import FACTS, K, M, N, network, network_value, plan_of
from tests.runtime.fake_cuda import FakeCuda, install

from weft.device.cuda.cublaslt import CublasLt
from weft.errors import ArtifactError
from weft.generate.library import lt, lt_call
from weft.generate.library.algorithm import chosen, identity
from weft.generate.library.lt_call import Library
from weft.ir.declined import Declined
from weft.kernels.plan import Plan
from weft.kernels.source import LibraryCall
from weft.runtime import artifact, cuda_artifact
from weft.runtime.cuda_executable import CudaExecutable
from weft.runtime.executable import Linked

ABOUT = {"gpu": "NVIDIA H200", "capability": "90"}


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> CublasLt:
    return CublasLt(cublaslt(tmp_path_factory.mktemp("stub")))


@pytest.fixture
def cuda(opened: CublasLt, monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    found = Library(opened, identity(FACTS.name, FACTS.capability, FACTS.sms), torch.device("cpu"))
    for module in (lt_call, cuda_artifact):
        monkeypatch.setattr(module, "library", lambda device=None: found)
    monkeypatch.setattr(lt, "is_contender", lambda product, facts: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(cuda_artifact, "CudaExecutable", lambda link: CudaExecutable(link, device=torch.device("cpu")))
    return install(monkeypatch)


def linked(plan: Plan) -> Linked:
    return Linked(network(), plan, {}, None, None, 0, ABOUT)


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(M, K), torch.randn(M, N)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_plan_runs_its_algorithm_in_graphs_and_in_a_callers_capture(cuda: FakeCuda, number: int) -> None:
    plan = plan_of(network(), number)
    exe = CudaExecutable(linked(plan), device=torch.device("cpu"))
    given = inputs()
    wanted = network_value(network(), *given).float()
    torch.testing.assert_close(exe(*given)[0], wanted)
    assert len(cuda.graphs) == 1 and len(cuda.graphs[0].launches) == 1
    cuda.capturing = True
    torch.testing.assert_close(exe(*given)[0], wanted)
    cuda.capturing = False
    workspace = 4096 if number == 2 else 0
    assert exe.memory.arena_bytes == 256 + workspace  # the result, and the algorithm's own memory
    marked = int((exe._arena == 0x5A).sum())
    assert marked >= workspace, "the stand-in marks what it uses"


def test_a_saved_plan_runs_the_same_algorithm(cuda: FakeCuda, tmp_path: Path) -> None:
    plan = plan_of(network(), 2)
    given = inputs()
    mine = CudaExecutable(linked(plan), device=torch.device("cpu"))(*given)[0]
    digest = artifact.save(linked(plan), tmp_path / "plan.weft", trust_dir=None)
    loaded = artifact.load(tmp_path / "plan.weft", trust=digest)
    assert isinstance(loaded, CudaExecutable)
    assert loaded.plan == plan
    assert torch.equal(loaded(*given)[0], mine)


def test_a_plan_that_names_algorithms_wants_trust(cuda: FakeCuda, tmp_path: Path) -> None:
    artifact.save(linked(plan_of(network(), 0)), tmp_path / "plan.weft", trust_dir=None)
    with pytest.raises(ArtifactError, match="holds native code that is not trusted"):
        artifact.load(tmp_path / "plan.weft")
    with pytest.raises(ArtifactError, match=r"not the file that is trusted: its digest is [0-9a-f]{64}, not 'WRONG'"):
        artifact.load(tmp_path / "plan.weft", trust="WRONG")


def changed(plan: Plan, **changes: object) -> Plan:
    """A plan with another record that fits its seal."""
    (step,) = plan.steps
    assert isinstance(step.kernel, LibraryCall)
    (record,) = chosen(step.kernel)
    last = replace(step.kernel.run[-1], kwargs=replace(record, **changes).keywords)  # type: ignore[arg-type]
    return replace(plan, steps=(replace(step, kernel=replace(step.kernel, run=(*step.kernel.run[:-1], last))),))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": "120900"}, "plan.weft: a product's algorithm is one of cuBLASLt 120900, here is 130000"),
        (
            {"gpu": identity("NVIDIA A100", 80, 108)},
            "plan.weft: a product's algorithm was chosen for NVIDIA A100",
        ),
        ({"data": "ff" * 64}, "cuBLASLt does not take this algorithm"),
    ],
)
def test_a_foreign_plan_is_refused(cuda: FakeCuda, tmp_path: Path, changes: dict[str, object], message: str) -> None:
    plan = changed(plan_of(network(), 0), **changes)
    digest = artifact.save(linked(plan), tmp_path / "plan.weft", trust_dir=None)
    with pytest.raises(ArtifactError, match=message) as error:
        artifact.load(tmp_path / "plan.weft", trust=digest)
    assert "compile the model again" in str(error.value)


def test_a_plan_without_the_library_is_refused(cuda: FakeCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = artifact.save(linked(plan_of(network(), 0)), tmp_path / "plan.weft", trust_dir=None)
    monkeypatch.setattr(cuda_artifact, "library", lambda device=None: Declined("no cuBLASLt: gone"))
    with pytest.raises(ArtifactError, match="name algorithms of cuBLASLt, but no cuBLASLt: gone"):
        artifact.load(tmp_path / "plan.weft", trust=digest)


def test_tampered_bytes_are_refused(cuda: FakeCuda, tmp_path: Path) -> None:
    plan = plan_of(network(), 0)
    (step,) = plan.steps
    assert isinstance(step.kernel, LibraryCall)
    last = step.kernel.run[-1]
    words = dict(last.kwargs)
    words["data"] = "2a" + str(words["data"])[2:]  # another algorithm, which the library would take
    kernel = replace(step.kernel, run=(*step.kernel.run[:-1], replace(last, kwargs=tuple(sorted(words.items())))))
    damaged = replace(plan, steps=(replace(step, kernel=kernel),))
    digest = artifact.save(linked(damaged), tmp_path / "plan.weft", trust_dir=None)
    with pytest.raises(ArtifactError, match="record of its algorithm is damaged: its seal does not fit"):
        artifact.load(tmp_path / "plan.weft", trust=digest)
