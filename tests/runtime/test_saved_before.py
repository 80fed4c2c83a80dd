"""What an earlier version saved loads, and runs with right numbers; what it holds for a GPU is whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.saved_before import FOLDER, PLANS, numbers, unpacked
from tests.typed import narrow

import weft
from weft.device.cuda.cubin import entries
from weft.errors import ArtifactError, DeviceError
from weft.kernels.source import CudaSource, KernelSource, LibraryCall
from weft.runtime import artifact, cuda_artifact
from weft.runtime.executable import Executable, Linked
from weft.runtime.loaded import Loaded


def load(name: str, folder: Path) -> Loaded:
    path, digest = unpacked(name, folder)
    return weft.load(path, trust=digest, options=weft.Options(cache_dir=folder / "cache", threads=1))


def test_they_are_few_bytes() -> None:
    assert sum(f.stat().st_size for f in FOLDER.iterdir()) < 200_000


def test_a_plan_of_library_calls_gives_the_same(tmp_path: Path) -> None:
    loaded = load("cpu-library", tmp_path)
    assert isinstance(loaded.executable, Executable)
    assert {type(s.kernel) for s in loaded.executable.linked.plan.steps} == {LibraryCall}
    x, expected = numbers("cpu-library")
    torch.testing.assert_close(narrow(torch.Tensor, loaded(x)).double(), expected, rtol=1e-5, atol=1e-6)


def test_kernels_in_cpp_are_compiled_from_their_texts_on_another_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(artifact, "cpu_target", lambda: "a machine that made none of the objects")
    loaded = load("cpu-kernels", tmp_path)
    assert isinstance(loaded.executable, Executable)
    kernels = [s.kernel for s in loaded.executable.linked.plan.steps if isinstance(s.kernel, KernelSource)]
    assert len(kernels) == 5 and not (tmp_path / "cache/loaded").exists()
    x, expected = numbers("cpu-kernels")
    torch.testing.assert_close(narrow(torch.Tensor, loaded(x)).double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["cpu-kernels", "cuda"])
def test_code_of_an_earlier_version_is_not_trusted_by_itself(name: str, tmp_path: Path) -> None:
    path, digest = unpacked(name, tmp_path)
    with pytest.raises(ArtifactError, match="native code that is not trusted") as error:
        weft.load(path, options=weft.Options(cache_dir=tmp_path / "cache"))
    assert digest in str(error.value)


@pytest.mark.parametrize("name", PLANS)
def test_a_changed_byte_is_seen(name: str, tmp_path: Path) -> None:
    path, digest = unpacked(name, tmp_path)
    data = bytearray(path.read_bytes())
    data[data.index(b"plan.json") + 200] ^= 1
    path.write_bytes(data)
    with pytest.raises(ArtifactError, match=r"damaged|readable"):
        weft.load(path, trust=digest, options=weft.Options(cache_dir=tmp_path / "cache"))


def test_without_a_gpu_a_plan_for_one_is_read_and_refused(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU: tests/gpu/runtime/test_saved_before.py runs the plan")
    with pytest.raises(DeviceError, match="made for an NVIDIA GPU"):
        load("cuda", tmp_path)


def test_a_plan_for_a_gpu_has_a_cubin_with_every_entry_that_it_launches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linked as on an H200, short of the driver."""
    made: list[Linked] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(cuda_artifact, "CudaExecutable", made.append)
    path, digest = unpacked("cuda", tmp_path)
    artifact.load(path, trust=digest, cache_dir=tmp_path / "cache")
    (linked,) = made
    kernels = [s.kernel for s in linked.plan.steps]
    assert len(kernels) == 3
    for kernel in kernels:
        assert isinstance(kernel, CudaSource) and kernel.launches
        place = linked.objects[kernel.sha256]
        assert place.parent == tmp_path / "cache/loaded", "compiled again"
        assert {launch.entry for launch in kernel.launches} <= entries(place.read_bytes()).keys()
    written = {node for step in linked.plan.steps for node, _ in step.outputs}
    assert set(linked.graph.outputs) <= written and len(linked.graph.inputs) == 1


def test_a_plan_for_another_gpu_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 5))
    with pytest.raises(DeviceError, match=r"needs compute capability \d+, this GPU has 75"):
        load("cuda", tmp_path)
