"""cuDNN by its C interface, against a stand-in that computes on the host what the library's documentation says."""

from __future__ import annotations

import ctypes
import gc
from dataclasses import replace
from itertools import product as combinations

import pytest
import torch
from tests.device.cuda.stand_in import cudnn as cudnn_of
from tests.slow import few
from torch.nn.functional import conv2d

from weft.device.cuda import cudnn as module
from weft.device.cuda.cudnn import ConvAddresses, Convolution, Cudnn, find_cudnn
from weft.errors import DeviceError
from weft.ir.declined import Declined


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return cudnn_of(tmp_path_factory.mktemp("stub"))


def drawn(
    dtype: torch.dtype = torch.float32,
    *,
    last: bool = True,
    groups: int = 1,
    pad: int = 1,
    step: int = 1,
    apart: int = 1,
) -> tuple[dict[str, torch.Tensor], Convolution]:
    chance = torch.Generator().manual_seed(1)
    order = torch.channels_last if last else torch.contiguous_format

    def normal(*shape: int) -> torch.Tensor:
        x = torch.randn(*shape, generator=chance).to(dtype)
        return x.to(memory_format=order) if len(shape) == 4 else x

    given = {"x": normal(2, 4, 6, 5), "w": normal(6, 4 // groups, 3, 3), "bias": normal(6)}
    sides = [(n + 2 * pad - 2 * apart - 1) // step + 1 for n in (6, 5)]
    given["residual"] = normal(2, 6, *sides)
    given["y"] = torch.full_like(given["residual"], torch.nan)
    name = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}[dtype]
    x, w, y = (given[k] for k in "xwy")
    asked = Convolution(
        tuple(x.shape), x.stride(), tuple(w.shape), w.stride(), y.stride(), name,
        ((pad, pad), (pad, pad)), (step, step), (apart, apart),
    )  # fmt: skip
    assert asked.y == tuple(y.shape) and asked.flops == 2 * y.numel() * w[0].numel()
    return given, asked


def addresses(given: dict[str, torch.Tensor], workspace: int = 0) -> ConvAddresses:
    x, w, y, bias, residual = (given[k].data_ptr() for k in ("x", "w", "y", "bias", "residual"))
    return ConvAddresses(x, w, y, bias, residual, workspace)


@pytest.mark.parametrize("dtype", few([torch.float32, torch.float16, torch.bfloat16], 1))
@pytest.mark.parametrize("last", [True, False])
def test_convolutions_with_what_follows_them(dtype: torch.dtype, last: bool, library: ctypes.CDLL) -> None:
    cudnn, room = Cudnn(library), torch.zeros(4096, dtype=torch.uint8)
    ways = [{}, {"groups": 2}, {"pad": 0, "step": 2}, {"pad": 2, "apart": 2}]
    for way, bias, residual, relu in combinations(ways, (False, True), (False, True), (False, True)):
        given, plain = drawn(dtype, last=last, **way)
        asked = replace(plain, bias=bias, residual=residual, activation="relu" if relu else "")
        exact = conv2d(
            given["x"].double(), given["w"].double(), given["bias"].double() if bias else None,
            way.get("step", 1), way.get("pad", 1), way.get("apart", 1), way.get("groups", 1),
        )  # fmt: skip
        exact = exact + given["residual"].double() if residual else exact
        exact = exact.relu() if relu else exact
        found = cudnn.algorithms(asked, 4, workspace=4096)
        assert [(x.engine, x.knobs) for x in found][:1] == [(0, ((2, 3),))]
        for x in found:
            given["y"].fill_(torch.nan)
            x.bind(addresses(given, room.data_ptr()))(77)
            torch.testing.assert_close(given["y"].double(), exact, rtol=2e-2, atol=2e-2, msg=f"{way} {asked}")
        assert library.stub_stream() == 77


def test_engines_that_compute_otherwise_are_left_out(library: ctypes.CDLL) -> None:
    """1 adds up in any order, 3 wants too much, 5 rounds operands; 2 knows no bf16, and 0 is named twice."""
    _, asked = drawn(torch.float16)
    cudnn = Cudnn(library)
    assert [(x.number, x.engine) for x in cudnn.algorithms(asked, 9, workspace=4096)] == [(0, 0), (1, 2)]
    assert [x.engine for x in cudnn.algorithms(asked, 1, workspace=4096)] == [0]
    assert [x.engine for x in cudnn.algorithms(asked, 9, workspace=100)] == [0]
    assert [x.engine for x in cudnn.algorithms(replace(asked, dtype="bf16"), 9, workspace=4096)] == [0]
    assert [x.engine for x in cudnn.algorithms(replace(asked, dtype="tf32"), 9, workspace=4096)] == [0, 5, 2]


def test_where_the_heuristic_knows_none_there_is_what_works_everywhere(library: ctypes.CDLL) -> None:
    _, asked = drawn(torch.float16)
    cudnn = Cudnn(library)
    assert [(x.engine, x.knobs) for x in cudnn.algorithms(asked, 9, workspace=-1)] == []
    found = cudnn.algorithms(replace(asked, pads=((9, 9), (9, 9))), 9, workspace=4096)
    assert [(x.engine, x.knobs) for x in found] == [(7, ())]


def test_an_algorithm_is_made_again_from_its_numbers(library: ctypes.CDLL) -> None:
    cudnn = Cudnn(library)
    given, asked = drawn(torch.float16)
    room = torch.zeros(4096, dtype=torch.uint8)
    gc.collect()
    alive = library.stub_alive()
    algorithms = cudnn.algorithms(asked, 9, workspace=4096)
    assert algorithms
    x = again = None
    for x in algorithms:
        again = cudnn.restore(asked, x.engine, x.knobs)
        assert not isinstance(again, Declined)
        assert (again.engine, again.knobs, again.workspace, again.in_order) == (x.engine, x.knobs, x.workspace, True)
        x.bind(addresses(given, room.data_ptr()))(0)
        first = given["y"].clone()
        again.bind(addresses(given, room.data_ptr()))(0)
        assert torch.equal(first, given["y"])
    in_any_order = cudnn.restore(asked, 1, ())
    assert not isinstance(in_any_order, Declined) and not in_any_order.in_order
    del again, x, algorithms, in_any_order
    gc.collect()
    assert library.stub_alive() == alive, "descriptors go with their last user"


def test_what_the_library_does_not_take_is_told(library: ctypes.CDLL) -> None:
    cudnn = Cudnn(library)
    given, asked = drawn(torch.bfloat16)
    for engine, knobs in ((4, ()), (99, ()), (2, ()), (0, ((2, 10),)), (0, ((3, 1),))):
        found = cudnn.restore(asked, engine, knobs)
        assert isinstance(found, Declined) and "status" in found.reason, (engine, knobs)
    wants_room = cudnn.restore(replace(asked, dtype="f16"), 2, ())
    assert not isinstance(wants_room, Declined) and wants_room.workspace == 4096
    with pytest.raises(DeviceError, match="cudnnBackendExecute"):
        wants_room.bind(addresses(given))(0)


def test_a_library_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_loaded", lambda: "/nowhere/libcudnn.so.9")
    found = find_cudnn()
    assert isinstance(found, Declined) and "libcudnn" in found.reason
