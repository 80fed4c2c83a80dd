"""cuBLASLt by its C interface, against a stand-in that computes on the host what the library's documentation says."""

from __future__ import annotations

import ctypes
import gc
from itertools import product as combinations
from typing import get_args

import numpy as np
import pytest
from tests.device.cuda.stand_in import cublaslt as cublaslt_of

from weft.device.cuda import cublaslt
from weft.device.cuda.cublaslt import IN_ORDER, Activation, CublasLt, LtAddresses, LtProduct, find_cublaslt
from weft.errors import DeviceError
from weft.ir.declined import Declined

M, N, K = 5, 7, 3


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return cublaslt_of(tmp_path_factory.mktemp("stub"))


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
    for has_bias, has_residual, name in combinations((False, True), (False, True), get_args(Activation)):
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


def test_an_algorithm_is_restored_from_its_bytes(library: ctypes.CDLL) -> None:
    lt = CublasLt(library)
    asked = LtProduct(M, N, K, "f32")
    offered = lt.algorithms(asked, schemes=IN_ORDER, alignment=16)
    assert [x.number for x in offered] == [0, 2, 3, 4, 5, 6]
    assert [(x.splits, x.scheme, x.workspace) for x in offered[-3:]] == [(4, 1, 0), (4, 2, 4096), (-1, 2, 0)]
    assert [x.in_order for x in offered] == [True, True, True, False, True, False]
    offered.pop()
    alive = library.stub_alive()
    for x in offered:
        back = lt.restore(asked, x.data)
        assert not isinstance(back, Declined)
        assert (back.data, back.workspace, back.in_order) == (x.data, x.workspace, x.in_order)
    chance = np.random.default_rng(2)
    a, b = chance.normal(size=(M, K)).astype(np.float32), chance.normal(size=(K, N)).astype(np.float32)
    d, work = np.zeros((M, N), np.float32), np.zeros(4096, np.uint8)
    at = LtAddresses(a.ctypes.data, b.ctypes.data, d.ctypes.data, workspace=work.ctypes.data)
    back = lt.restore(asked, offered[-1].data)
    assert not isinstance(back, Declined)
    back.bind(at)(0)
    assert np.allclose(d, a @ b, atol=1e-5) and work.all()
    assert library.stub_alive() == alive


def test_bytes_that_the_library_does_not_take_are_declined(library: ctypes.CDLL) -> None:
    lt = CublasLt(library)
    asked = LtProduct(M, N, K, "f32")
    data = lt.algorithms(asked)[-1].data
    assert lt.restore(asked, b"\xff" * 64) == Declined("cuBLASLt does not take this algorithm: INVALID_VALUE (7)")
    elsewhere = lt.restore(LtProduct(M, N, K, "bf16"), data)
    assert elsewhere == Declined("cuBLASLt does not take this algorithm: NOT_SUPPORTED (15)")
    with pytest.raises(ValueError, match="63 bytes are no algorithm"):
        lt.restore(asked, data[:-1])


def test_batches_of_matrices_with_gaps_between_rows(library: ctypes.CDLL) -> None:
    lt = CublasLt(library)
    chance = np.random.default_rng(3)
    a = chance.normal(size=(4, M, K + 2)).astype(np.float32)
    b = chance.normal(size=(N, K + 1)).astype(np.float32)  # one for all, as its transpose
    d = np.zeros((4, M, N), np.float32)
    asked = LtProduct(M, N, K, "f32", "nt", batch=4, leading=(K + 2, K + 1), strides=(M * (K + 2), 0))
    lt.algorithms(asked)[0].bind(LtAddresses(a.ctypes.data, b.ctypes.data, d.ctypes.data))(0)
    assert np.allclose(d, a[:, :, :K] @ b[:, :K].T, atol=1e-5)


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
