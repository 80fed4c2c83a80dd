"""cuBLASLt by its C interface, against a stand-in that computes on the host what the library's documentation says."""

from __future__ import annotations

import ctypes
import gc
import shutil
import subprocess
from itertools import product as combinations
from pathlib import Path

import numpy as np
import pytest

from weft.device.cuda import cublaslt
from weft.device.cuda.cublaslt import Activation, CublasLt, LtAddresses, LtProduct, find_cublaslt
from weft.errors import DeviceError
from weft.ir.declined import Declined

M, N, K = 5, 7, 3


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    path = tmp_path_factory.mktemp("stub") / "libcublasLt.so"
    source = Path(__file__).parent / "cublaslt_stub.cpp"
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", str(path), str(source)], check=True, timeout=60)
    return ctypes.CDLL(str(path))


def activated(y: np.ndarray, name: Activation) -> np.ndarray:
    if name == "relu":
        return np.maximum(y, 0)
    return 0.5 * y * (1 + np.tanh(np.sqrt(2 / np.pi) * (y + 0.044715 * y**3))) if name else y


@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
def test_row_major_products_of_every_layout_and_epilogue(layout: str, library: ctypes.CDLL) -> None:
    lt = CublasLt(library)
    chance = np.random.default_rng(1)
    a, b, c, bias = (chance.normal(size=s).astype(np.float32) for s in ((M, K), (K, N), (M, N), (N,)))
    stored = [np.ascontiguousarray(x.T if t == "t" else x) for x, t in zip((a, b), layout, strict=True)]
    for has_bias, has_residual, name in combinations((False, True), (False, True), ("", "relu", "gelu_tanh")):
        asked = LtProduct(M, N, K, "f32", layout, has_bias, has_residual, name)
        algorithms = lt.algorithms(asked)
        assert [x.number for x in algorithms] == [0, 2]  # the second one does not apply
        d = np.full((M, N), np.nan, np.float32)
        at = LtAddresses(stored[0].ctypes.data, stored[1].ctypes.data, d.ctypes.data, bias.ctypes.data, c.ctypes.data)
        algorithms[-1].bind(at)(0)
        wanted = activated(a @ b + (c if has_residual else 0) + (bias if has_bias else 0), name)
        assert np.allclose(d, wanted, atol=1e-5), (has_bias, has_residual, name)


def test_products_of_bytes_are_exact(library: ctypes.CDLL) -> None:
    chance = np.random.default_rng(2)
    a, b = (chance.integers(-128, 128, s).astype(np.int8) for s in ((M, 48), (N, 48)))
    d = np.full((M, N), -1, np.int32)
    first = CublasLt(library).algorithms(LtProduct(M, N, 48, "i8", "nt", out="i32"))[0]
    first.bind(LtAddresses(a.ctypes.data, b.ctypes.data, d.ctypes.data))(0)
    np.testing.assert_array_equal(d, a.astype(np.int32) @ b.astype(np.int32).T)
    assert CublasLt(library).algorithms(LtProduct(M, N, 48, "i8", "nn", out="i32")) == []
    with pytest.raises(DeviceError, match="INVALID_VALUE"):
        CublasLt(library).algorithms(LtProduct(M, N, 48, "i8", "nt", out="bf16"))


def test_descriptors_are_given_back(library: ctypes.CDLL) -> None:
    lt = CublasLt(library)
    before = library.stub_alive()
    first = lt.algorithms(LtProduct(M, N, K, "f32"))[0]
    assert library.stub_alive() == before
    launch = first.bind(LtAddresses(256, 256, 256))
    assert library.stub_alive() == before + 4
    del launch
    gc.collect()
    assert library.stub_alive() == before
    assert lt.version == "130000"


def test_what_the_library_does_not_take_has_no_algorithm(library: ctypes.CDLL) -> None:
    assert CublasLt(library).algorithms(LtProduct(M, N, K, "tf32")) == []


def test_a_refusal_names_the_call_and_the_status(library: ctypes.CDLL) -> None:
    lt = CublasLt(library)
    with pytest.raises(DeviceError, match=r"cublasLtMatmulAlgoGetHeuristic failed with INVALID_VALUE \(7\)"):
        lt.algorithms(LtProduct(16, 16, 16, "f8e4m3", "nt"))  # a result in 8 bits
    first = lt.algorithms(LtProduct(M, N, K, "f32"))[0]
    first._found.algorithm[0] = 1
    with pytest.raises(DeviceError, match="cublasLtMatmul failed with INVALID_VALUE"):
        first.bind(LtAddresses(256, 256, 256))(0)


def test_without_the_library_there_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cublaslt, "_loaded", lambda: "/nowhere/libcublasLt.so.13")
    found = find_cublaslt()
    assert isinstance(found, Declined)
    assert "/nowhere/libcublasLt.so.13" in found.reason
