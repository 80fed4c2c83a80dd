"""What the driver is asked for each launch, and what is refused before it is asked; against a recording driver."""

from __future__ import annotations

import ctypes
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.device.cuda.conftest import FakeGpu
from tests.typed import some

from weft.device.cuda.api import STICKY, CudaError, driver_api
from weft.device.cuda.driver import Function, Module, encode_tensor_map, primary_context
from weft.errors import DeviceError

MAP = bytes(range(128))


@pytest.fixture
def function(gpu: FakeGpu, tmp_path: Path) -> Function:
    path = tmp_path / "k.cubin"
    path.write_bytes(b"\x7fELF")
    return Module(path).function("k0")


def test_a_module_and_its_entry(gpu: FakeGpu, function: Function) -> None:
    assert gpu.of("cuModuleLoadData") == [(b"\x7fELF",)]
    assert gpu.of("cuModuleGetFunction")[0][1] == b"k0"
    assert len(gpu.of("cuFuncLoad")) == 1  # at once: a lazy load would break a capture
    found = function.attributes
    assert (found.registers, found.local_bytes, found.shared_bytes, found.max_threads) == (40, 8, 512, 1024)
    assert function.occupancy((128, 2, 1), 4096) == 8


def test_a_variable_of_a_module(gpu: FakeGpu) -> None:
    module = Module(__file__)
    assert module.variable("table") == (0x7000, 64) and gpu.of("cuModuleGetGlobal")[0][1] == b"table"
    gpu.fails["cuModuleGetGlobal"] = 500
    with pytest.raises(CudaError, match=r"cuModuleGetGlobal failed: CUDA_ERROR_NOT_FOUND \(500\): chair"):
        module.variable("chair")


def test_the_primary_context_is_put_back(gpu: FakeGpu) -> None:
    with primary_context(3):
        assert gpu.current == 99
    assert gpu.current == 77 and len(gpu.of("cuDevicePrimaryCtxRelease")) == 1
    with pytest.raises(KeyError), primary_context():
        raise KeyError
    assert gpu.current == 77


def test_a_plain_launch(gpu: FakeGpu, function: Function) -> None:
    bound = function.bind((7, 2, 1), (128, 1, 1), [0x1000, 2**40, 0])
    bound.launch(0x55)
    (seen,) = gpu.launches
    assert seen | {"parameters": 0} == {
        "grid": (7, 2, 1),
        "block": (128, 1, 1),
        "shared": 0,
        "stream": 0x55,
        "attributes": {},
        "parameters": 0,
    }
    slots = (ctypes.c_void_p * 3).from_address(seen["parameters"])
    assert [ctypes.c_uint64.from_address(some(p)).value for p in slots] == [0x1000, 2**40, 0]
    assert not gpu.of("cuFuncSetAttribute")


def test_maps_go_by_value_in_aligned_memory(gpu: FakeGpu, function: Function) -> None:
    bound = [function.bind((1, 1, 1), (32, 1, 1), [MAP, 16, MAP[::-1]]) for _ in range(8)]
    for b in bound:
        b.launch()
    for seen in gpu.launches:
        slots = (ctypes.c_void_p * 3).from_address(seen["parameters"])
        first, number, last = map(some, slots)
        assert first % 64 == last % 64 == 0
        assert ctypes.string_at(first, 128) == MAP and ctypes.string_at(last, 128) == MAP[::-1]
        assert ctypes.c_uint64.from_address(number).value == 16
    with pytest.raises(DeviceError, match="kernel k0: an argument of 64 bytes by value"):
        function.bind((1, 1, 1), (32, 1, 1), [MAP[:64]])


def test_clusters_and_dependent_launch_are_attributes(gpu: FakeGpu, function: Function) -> None:
    function.bind((8, 2, 1), (128, 1, 1), [], cluster=(2, 1, 1), dependent=True).launch()
    function.bind((8, 2, 1), (128, 1, 1), [], dependent=True).launch()
    assert [s["attributes"] for s in gpu.launches] == [
        {"CLUSTER_DIMENSION": (2, 1, 1), "PROGRAMMATIC_STREAM_SERIALIZATION": 1},
        {"PROGRAMMATIC_STREAM_SERIALIZATION": 1},
    ]


def test_before_hopper_nothing_is_dependent(gpu: FakeGpu, tmp_path: Path) -> None:
    gpu.attributes[75] = 8
    (tmp_path / "k.cubin").write_bytes(b"x")
    function = Module(tmp_path / "k.cubin").function("k0")
    function.bind((1, 1, 1), (32, 1, 1), [], dependent=True).launch()
    assert gpu.launches[0]["attributes"] == {}
    with pytest.raises(DeviceError, match=r"clusters need compute capability 9\.0"):
        function.prepare(0, (2, 1, 1))


def test_blocks_that_wait_for_each_other_need_room_for_twice_as_many(gpu: FakeGpu, function: Function) -> None:
    """A share of a GPU has fewer multiprocessors: there they might wait for ever."""
    function.require_co_resident(32, (1024, 1, 1), 0)
    gpu.attributes[16] = 31
    with pytest.raises(DeviceError, match="32 CTAs must be co-resident on 31 multiprocessors"):
        function.require_co_resident(32, (1024, 1, 1), 0)  # two fit into each, one of them twice


def test_large_shared_memory_opts_in_once(gpu: FakeGpu, function: Function) -> None:
    function.prepare(48 * 1024)
    assert not gpu.of("cuFuncSetAttribute")
    for shared in (100_000, 60_000, 231_936):
        function.prepare(shared)
    assert [int(c[2]) for c in gpu.of("cuFuncSetAttribute")] == [100_000, 231_936]
    assert gpu.of("cuFuncSetAttribute")[0][1].name == "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES"
    with pytest.raises(DeviceError, match="232449 bytes of shared memory; a block of this GPU has 232448"):
        function.prepare(231_937)  # 512 bytes are static


@pytest.mark.parametrize(
    ("grid", "block", "cluster", "text"),
    [
        ((0, 1, 1), (32, 1, 1), (1, 1, 1), "a grid of (0, 1, 1)"),
        ((1, 65536, 1), (32, 1, 1), (1, 1, 1), "a grid of (1, 65536, 1)"),
        ((1 << 31, 1, 1), (32, 1, 1), (1, 1, 1), "a grid of"),
        ((1, 1, 1), (1025, 1, 1), (1, 1, 1), "a block of (1025, 1, 1)"),
        ((1, 1, 1), (1, 1, 65), (1, 1, 1), "a block of (1, 1, 65)"),
        ((3, 1, 1), (32, 1, 1), (2, 1, 1), "in clusters of (2, 1, 1)"),
        ((16, 1, 1), (32, 1, 1), (16, 1, 1), "a cluster of (16, 1, 1) blocks; 1 to 8 are portable"),
    ],
)
def test_refused_before_the_driver_is_asked(
    function: Function,
    gpu: FakeGpu,
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    cluster: tuple[int, int, int],
    text: str,
) -> None:
    with pytest.raises(DeviceError) as caught:
        function.bind(grid, block, [], cluster=cluster)
    assert text in str(caught.value) and "kernel k0: cannot be launched" in str(caught.value)
    assert not gpu.launches


def test_the_last_launches_are_remembered(gpu: FakeGpu, function: Function) -> None:
    for i in [*range(300), 299, 299]:
        function.launch((1, 1, 1), (32, 1, 1), [16 * (i + 1)], stream=i)
    parameters = [s["parameters"] for s in gpu.launches]
    assert parameters[-1] == parameters[-2] == parameters[-3] and parameters[-1] != parameters[-4]
    assert [s["stream"] for s in gpu.launches] == [*range(300), 299, 299] and len(function._bound) == 256


def test_errors_have_a_name_and_advice(gpu: FakeGpu, function: Function) -> None:
    gpu.fails["cuLaunchKernelEx"] = 700
    with pytest.raises(
        CudaError, match=r"cuLaunchKernelEx failed: CUDA_ERROR_ILLEGAL_ADDRESS \(700\): k0 \[W302\]"
    ) as e:
        function.launch((1, 1, 1), (32, 1, 1), [])
    assert e.value.sticky and "start a new one" in str(e.value) and isinstance(e.value, DeviceError)
    gpu.fails = {"cuModuleGetFunction": 500}
    with pytest.raises(CudaError, match=r"cuModuleGetFunction failed: CUDA_ERROR_NOT_FOUND \(500\): k7") as e:
        Module(__file__).function("k7")
    assert not e.value.sticky
    gpu.fails = {"cuModuleLoadData": 999}
    with pytest.raises(CudaError, match=r"CUDA error \(999\)"):
        Module(__file__)


def test_known_numbers_are_those_of_the_driver(gpu: FakeGpu) -> None:
    from weft.device.cuda.api import _KNOWN

    for number, (name, remedy) in _KNOWN.items():
        assert gpu.api.CUresult(number).name == name and remedy
    assert set(_KNOWN) >= STICKY


def test_no_context_no_file(gpu: FakeGpu, tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match=r"cannot read cubin .*missing"):
        Module(tmp_path / "missing")
    gpu.current = 0
    with pytest.raises(CudaError, match="INVALID_CONTEXT") as caught:
        Module(__file__)
    assert "make the device's primary context current first" in str(caught.value)


def test_no_driver_no_bindings(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu.fails["cuInit"] = 100
    with pytest.raises(CudaError, match=r"cuInit failed: CUDA_ERROR_NO_DEVICE \(100\)"):
        driver_api()

    def missing(flags: Any) -> None:
        raise RuntimeError("Failed to dlopen libcuda.so.1")

    monkeypatch.setattr(gpu.api, "cuInit", missing)
    with pytest.raises(DeviceError, match=r"no NVIDIA driver: Failed to dlopen libcuda.so.1 \[W301\]"):
        driver_api()
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(DeviceError, match=r"pip install weft\[cuda\]"):
        driver_api()


def test_a_tensor_map_is_encoded_in_aligned_memory(gpu: FakeGpu) -> None:
    for _ in range(8):
        made = encode_tensor_map(0x7F00, "bf16", (64, 100), (128,), (64, 32), (1, 1), 128)
        assert struct.unpack("<7Q", made[:56]) == (9, 2, 0x7F00, 64, 100, 3, 128) and len(made) == 128
    assert all(a % 64 == 0 for a in gpu.map_addresses) and gpu.of("cuGetProcAddress")[0][1] == 12000


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"address": 8}, "address 0x8 is not a multiple of 16"),
        ({"address": 0}, "address 0x0"),
        ({"dtype": "f8"}, "elements 'f8'"),
        ({"swizzle_bytes": 16}, "a swizzle of 16 bytes"),
        ({"sizes": (64, 0)}, "sizes (64, 0) are outside of 1 to 2^32"),
        ({"sizes": (64,)}, "rank 1, 1 strides"),
        ({"strides_bytes": (120,)}, "strides (120,) are no multiples of 16 bytes"),
        ({"box": (64, 257)}, "box (64, 257)"),
        ({"box": (4, 8)}, "a box row of 8 bytes"),
        ({"box": (128, 8)}, "a box row of 256 bytes"),
        ({"element_strides": (1, 9)}, "steps (1, 9)"),
    ],
)
def test_no_such_tensor_map(gpu: FakeGpu, changes: dict[str, Any], text: str) -> None:
    good: dict[str, Any] = {"address": 256, "dtype": "bf16", "sizes": (64, 100), "strides_bytes": (128,)}
    good |= {"box": (64, 8), "element_strides": (1, 1), "swizzle_bytes": 128}
    assert len(encode_tensor_map(**good)) == 128
    with pytest.raises(DeviceError) as caught:
        encode_tensor_map(**(good | changes))
    assert text in str(caught.value)


def test_the_driver_refuses_a_map(gpu: FakeGpu) -> None:
    gpu.encode_status = 1
    with pytest.raises(
        CudaError, match=r"cuTensorMapEncodeTiled failed: CUDA_ERROR_INVALID_VALUE \(1\): sizes \(64,\)"
    ):
        encode_tensor_map(256, "f16", (64,), (), (64,), (1,), 0)
