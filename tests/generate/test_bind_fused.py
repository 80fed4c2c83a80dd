from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from tests.generate.test_bind import Recorder, _Function

from weft.errors import ArtifactError, DeviceError
from weft.generate.bind import Addresses, BoundCuda, CudaDriver
from weft.generate.bind_fused import BoundFused, among
from weft.kernels.colocation import JOB, FusedParameter, FusedRole, FusedSource
from weft.kernels.source import CudaSource, Launch, Number, Pointer, Schedule, TensorMap


@dataclass
class _Attributes:
    registers: int
    local_bytes: int = 0
    shared_bytes: int = 16


@dataclass
class _Loaded(_Function):
    registers: int = 168

    @property
    def attributes(self) -> _Attributes:
        return _Attributes(self.registers)


@dataclass
class Driver(Recorder):
    registers: int = 168

    @property
    def driver(self) -> CudaDriver:
        return CudaDriver(lambda path: self, self.encode)

    def function(self, entry: str) -> _Loaded:
        return _Loaded(self, entry, self.registers)


MAP = TensorMap(Pointer("in", 1), "bf16", (64, 8), (128,), (64, 8), (1, 1), 128)
SOURCE = FusedSource(
    text="",
    entry="fused",
    grid=(7, 2, 1),
    threads=512,
    shared_bytes=120_000,
    dependent=True,
    parameters=(
        FusedParameter(0, "map", "", MAP),
        FusedParameter(0, "out", "void*", Pointer("out", 0)),
        FusedParameter(1, "x", "const void*", Pointer("in", 0)),
        FusedParameter(2, "n", "unsigned long long", Number(9)),
        FusedParameter(2, "y", "void*", Pointer("out", 0)),
        FusedParameter(JOB, "w_job", "w_work*", None),
    ),
    lc=FusedRole(0, 384, (1, 2), 0, 100_000, 168),
    be=(FusedRole(384, 128, (3, 4), 100_000, 1024, 168),),
    stages=(10, 20),
    shape=None,
    registers_asked=168 * 512,
)
GIVEN = [Addresses([0x10, 0x20], [0x30]), Addresses([0x40]), Addresses([], [0x50])]


def bound(source: FusedSource = SOURCE, registers: int = 168) -> tuple[BoundFused, Driver]:
    driver = Driver(registers=registers)
    return BoundFused(source, Path("/nowhere/x.cubin"), driver=driver.driver), driver


def test_arguments_are_those_of_each_role() -> None:
    kernel, seen = bound()
    assert seen.prepared == [("fused", 120_000, (1, 1, 1))]
    kernel.prepare(GIVEN, 0x1000)(3)
    tensor_map = (0x20).to_bytes(8, "little") * 16
    assert seen.launched == [("fused", (tensor_map, 0x30, 0x40, 9, 0x50, 0x1000), True, 3)]
    kernel.prepare(GIVEN, 0x1000, dependent=False)(3)
    assert seen.launched[-1][2] is False


def test_a_launch_that_would_wait_forever_is_refused() -> None:
    with pytest.raises(DeviceError, match="ask for 86016 registers, the launch has 81920"):
        bound(registers=160)
    bound(replace(SOURCE, registers_asked=0), registers=8)


@pytest.mark.parametrize(
    ("addresses", "counter", "said"),
    [
        (GIVEN, 0, "a work counter of 64 bytes at 0x0"),
        (GIVEN, 0x1008, "at 0x1008"),
        (GIVEN[:2], 0x1000, "no addresses of best-effort source 2"),
        ([*GIVEN[:2], Addresses([], [])], 0x1000, "reads out 0, which has no address"),
    ],
)
def test_what_is_missing_is_named(addresses: list[Addresses], counter: int, said: str) -> None:
    with pytest.raises(ArtifactError, match=said):
        bound()[0].prepare(addresses, counter)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_fused_kernel_stands_for_one_of_several_launches(number: int) -> None:
    seen = Recorder()
    launches = tuple(Launch(f"k{n}", (1, 1, 1), (32, 1, 1), (Pointer("in", 0),)) for n in range(3))
    source = CudaSource(schedule=Schedule("cuda", ()), text="", launches=launches)
    bound = BoundCuda(source, Path("/nowhere/x.cubin"), driver=seen.driver)

    def fused(stream: int) -> None:
        seen.launched.append(("fused", (), True, stream))

    among(bound, number, fused, Addresses([0x100]))(7)
    order = ["k0", "k1", "k2"]
    order[number] = "fused"
    assert [x[0] for x in seen.launched] == order and {x[3] for x in seen.launched} == {7}
    with pytest.raises(ValueError, match="launch 3 of 3"):
        among(bound, 3, fused, Addresses([0x100]))
