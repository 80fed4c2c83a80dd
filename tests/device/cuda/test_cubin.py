"""Digests of machine code: alike under other names and words, apart for whatever a launch may notice."""

from __future__ import annotations

import pytest

from weft.device.cuda.cubin import entries
from weft.device.cuda.nvrtc import Nvrtc, find_nvrtc
from weft.ir.declined import Declined

TEXT = """// words
__constant__ float TABLE[4] = {1, 2, 3, 4};
__device__ int counter;
__device__ __noinline__ float inner(float x, int i) { return x * TABLE[i & 3] + sinf(x); }
extern "C" __global__ void __launch_bounds__(128) first(const float* a, float* b) {
  extern __shared__ float dynamic[];
  __shared__ float kept[32];
  kept[threadIdx.x & 31] = a[threadIdx.x];
  __syncthreads();
  b[threadIdx.x] = inner(kept[(threadIdx.x + 1) & 31], threadIdx.x) + dynamic[3];
  atomicAdd(&counter, 1);
}
extern "C" __global__ void second(float* b, int n) { b[threadIdx.x] = TABLE[n & 3]; }
"""
ARCHS = ("sm_80", "sm_90a")


@pytest.fixture(scope="module")
def nvrtc() -> Nvrtc:
    found = find_nvrtc()
    if isinstance(found, Declined):
        pytest.skip("no NVRTC")
    return found


def code(nvrtc: Nvrtc, text: str, arch: str) -> dict[str, str]:
    return entries(nvrtc.compile(text, arch=arch).path.read_bytes())


def replaced(*pairs: tuple[str, str]) -> str:
    text = TEXT
    for old, new in pairs:
        assert old in text
        text = text.replace(old, new)
    return text


@pytest.mark.parametrize("arch", ARCHS)
def test_words_names_and_their_order_are_no_code(nvrtc: Nvrtc, arch: str) -> None:
    old = code(nvrtc, TEXT, arch)
    assert set(old) == {"first", "second"} and old["first"] != old["second"]
    assert code(nvrtc, replaced(("// words", "// other\n// words\n\n")), arch) == old
    text = replaced(
        ("first", "z_first"), ("second", "a_longer_name"), ("inner", "called"), ("TABLE", "A"), ("kept", "x")
    )
    new = code(nvrtc, text, arch)
    assert new == {"z_first": old["first"], "a_longer_name": old["second"]}


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    ("pair", "both"),
    [
        (("kept[32]", "kept[40]"), False),  # shared memory
        (("(128)", "(256)"), False),  # attributes
        (("sinf", "cosf"), False),  # a called function
        (("dynamic[3]", "dynamic[4]"), False),  # one instruction's constant
        (("3, 4}", "3, 5}"), True),  # a table of both
        (("int counter", "int before = 1, counter"), True),  # data
    ],
)
def test_what_a_launch_may_notice_is_told(nvrtc: Nvrtc, arch: str, pair: tuple[str, str], both: bool) -> None:
    text = replaced(pair) + ("" if pair[0] != "int counter" else "__device__ int* used() { return &before; }\n")
    if pair[0] == "int counter":
        text = text.replace("atomicAdd(&counter, 1)", "atomicAdd(&counter, before)")
    old, new = code(nvrtc, TEXT, arch), code(nvrtc, text, arch)
    assert old["first"] != new["first"]
    assert (old["second"] != new["second"]) is both


@pytest.mark.parametrize("arch", ARCHS)
def test_damaged_files_are_said_to_be(nvrtc: Nvrtc, arch: str) -> None:
    data = nvrtc.compile(TEXT, arch=arch).path.read_bytes()
    for bad in (b"", b"text", data[:100], data[: len(data) // 2], data[:40] + b"\xff" * 24 + data[64:]):
        with pytest.raises(ValueError, match="not a cubin, or a damaged one"):
            entries(bad)
