from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from weft.errors import ArtifactError
from weft.generate.bind import Addresses, BoundCuda, CudaDriver
from weft.kernels.source import CudaSource, Launch, Pointer, Schedule, TensorMap


@dataclass
class Recorder:
    """A driver that writes down what it is asked."""

    prepared: list[tuple[str, int, tuple[int, int, int]]] = field(default_factory=list)
    launched: list[tuple[str, tuple[int | bytes, ...], bool, int]] = field(default_factory=list)
    encoded: list[tuple[object, ...]] = field(default_factory=list)
    co_resident: list[tuple[object, ...]] = field(default_factory=list)

    @property
    def driver(self) -> CudaDriver:
        return CudaDriver(lambda path: self, self.encode)

    def function(self, entry: str) -> _Function:
        return _Function(self, entry)

    def encode(
        self,
        address: Any,
        dtype: Any,
        sizes: Any,
        strides_bytes: Any,
        box: Any,
        element_strides: Any,
        swizzle_bytes: Any,
    ) -> bytes:
        self.encoded.append((address, dtype, sizes, strides_bytes, box, element_strides, swizzle_bytes))
        return address.to_bytes(8, "little") * 16


@dataclass
class _Function:
    owner: Recorder
    entry: str

    def prepare(self, shared_bytes: int, cluster: Any) -> None:
        self.owner.prepared.append((self.entry, shared_bytes, cluster))

    def require_co_resident(self, blocks: Any, block: Any, shared_bytes: int) -> None:
        self.owner.co_resident.append((self.entry, blocks, block, shared_bytes))

    def bind(
        self, grid: Any, block: Any, arguments: Any, *, shared_bytes: int, cluster: Any, dependent: bool
    ) -> _Launch:
        assert len(grid) == len(block) == len(cluster) == 3
        return _Launch(self.owner, self.entry, tuple(arguments), dependent)


@dataclass
class _Launch:
    owner: Recorder
    entry: str
    arguments: tuple[int | bytes, ...]
    dependent: bool

    def launch(self, stream: int) -> None:
        self.owner.launched.append((self.entry, self.arguments, self.dependent, stream))


MAP = TensorMap(Pointer("packed", 1), "f16", (64, 8), (128,), (64, 8), (1, 1), 128)
ONE, BLOCK = (1, 1, 1), (32, 1, 1)
SOURCE = CudaSource(
    schedule=Schedule("cuda"),
    text="",
    launches=(
        Launch("k0", (4, 2, 1), BLOCK, (Pointer("in", 0), MAP, Pointer("work", 512)), 1024),
        Launch("k1", ONE, BLOCK, (Pointer("state"), Pointer("out", 0), Pointer("work")), 0, dependent=False),
        Launch("k0", ONE, BLOCK, (Pointer("in", 0), Pointer("in", 0), Pointer("work")), 4096, cluster=(2, 1, 1)),
    ),
    pack=(Launch("p0", ONE, BLOCK, (Pointer("in", 1), Pointer("packed", 1))),),
    workspace_bytes=1024,
    state_bytes=16,
    packed_bytes=(128, 1024),
)


def bound(source: CudaSource = SOURCE) -> tuple[BoundCuda, Recorder]:
    recorder = Recorder()
    return BoundCuda(source, Path("/nowhere/x.cubin"), driver=recorder.driver), recorder


def test_arguments_are_resolved_and_launched_in_order() -> None:
    kernel, seen = bound()
    kernel.prepare(Addresses([0x1000, 0], [0x2000], [0x3000, 0x4000], 0x5000, 0x6000))(7)
    tensor_map = (0x4000).to_bytes(8, "little") * 16
    assert seen.launched == [
        ("k0", (0x1000, tensor_map, 0x5200), True, 7),
        ("k1", (0x6000, 0x2000, 0x5000), False, 7),
        ("k0", (0x1000, 0x1000, 0x5000), True, 7),
    ]
    assert seen.encoded == [(0x4000, "f16", (64, 8), (128,), (64, 8), (1, 1), 128)]


def test_each_entry_is_prepared_once_for_its_largest_launch() -> None:
    _, seen = bound()
    assert sorted(seen.prepared) == [("k0", 4096, (2, 1, 1)), ("k1", 0, ONE), ("p0", 0, ONE)]


def test_blocks_that_wait_for_each_other_are_made_sure_of() -> None:
    launch = replace(SOURCE.launches[0], co_resident=8)
    _, seen = bound(replace(SOURCE, launches=(launch, *SOURCE.launches[1:])))
    assert seen.co_resident == [("k0", 8, BLOCK, 1024)]
    assert bound()[1].co_resident == []


def test_maps_are_encoded_once_per_set_of_addresses() -> None:
    kernel, seen = bound()
    for work in (0x5000, 0x7000):
        launch = kernel.prepare(Addresses([0x1000], [0x2000], [0x3000, 0x4000], work, 0x6000))
        launch(0)
        launch(0)
    assert len(seen.encoded) == 2 and len(seen.launched) == 12
    assert seen.launched[-1][1][2] == 0x7000


def test_results_have_maps_too() -> None:
    to = replace(MAP, base=Pointer("out", 1))
    kernel, seen = bound(replace(SOURCE, launches=(Launch("k0", ONE, BLOCK, (to, Pointer("out", 1))),)))
    for address in (0x2100, 0x2200):
        kernel.prepare(Addresses([0x1000], [0x2000, address]))(0)
    assert [x[0] for x in seen.encoded] == [0x2100, 0x2200]
    assert seen.launched[-1][1] == ((0x2200).to_bytes(8, "little") * 16, 0x2200)


def test_packing_reads_weights_only() -> None:
    kernel, seen = bound()
    kernel.pack([0, 0x1100], [0x3000, 0x4000], 3)
    assert seen.launched == [("p0", (0x1100, 0x4000), True, 3)]
    with pytest.raises(ArtifactError, match="in 1, which has no address"):
        kernel.pack([0x1100, 0], [0x3000, 0x4000], 3)
    nothing, quiet = bound(replace(SOURCE, pack=()))
    nothing.pack([], [], 0)
    assert not quiet.launched


@pytest.mark.parametrize(
    "pointer",
    [
        Pointer("work", 1024),
        Pointer("work", -8),
        Pointer("state", 16),
        Pointer("packed", 2),
        Pointer("in", -1),
        Pointer("host"),
    ],
)
def test_an_argument_outside_of_the_declared_buffers_is_refused(pointer: Pointer) -> None:
    for argument in (pointer, replace(MAP, base=pointer)):
        with pytest.raises(ArtifactError, match=r"k0: .*(outside|no argument)"):
            bound(replace(SOURCE, launches=(Launch("k0", ONE, BLOCK, (argument,)),)))


def test_packing_has_no_outputs_and_no_scratch() -> None:
    for kind in ("out", "work", "state"):
        with pytest.raises(ArtifactError, match="pack launch"):
            bound(replace(SOURCE, pack=(Launch("p0", ONE, BLOCK, (Pointer(kind),)),)))


def test_a_missing_address_is_an_error_and_no_null_pointer() -> None:
    kernel, seen = bound()
    for addresses in (
        Addresses([], [0x2000], [0x3000, 0x4000], 0x5000, 0x6000),
        Addresses([0x1000], [0x2000], [0x3000, 0], 0x5000, 0x6000),
        Addresses([0x1000], [0x2000], [0x3000, 0x4000], 0, 0x6000),
    ):
        with pytest.raises(ArtifactError, match="no address"):
            kernel.prepare(addresses)
    assert not seen.launched
