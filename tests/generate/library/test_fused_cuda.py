"""Library calls for a GPU, without one: which forms apply."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from tests.typed import noting

from weft.device.cuda.facts import GpuFacts
from weft.frontends.torch import import_exported
from weft.generate.library import LibraryGenerator, attention_call
from weft.generate.library.execute import BoundCall
from weft.generate.library.fused import fused_linear
from weft.generate.library.fused_cuda import cublaslt_linear
from weft.ir.attrs import ConvAttrs
from weft.ir.declined import Declined
from weft.ir.graph import GraphBuilder, OriginParam
from weft.ir.prims import Prim
from weft.ir.types import DType, TensorType
from weft.kernels.candidate import Kind, Problem
from weft.kernels.formats import Format
from weft.kernels.source import LibraryCall, Schedule
from weft.orchestrate.enumerate import enumerate_candidates
from weft.orchestrate.extract import extract, format_choices


class Attention(torch.nn.Module):
    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, mask)


def attention(
    dtype: torch.dtype, heads: int = 2, mask: torch.Tensor | None = None, batch: int = 1, size: int = 32
) -> Problem:
    chance = torch.Generator().manual_seed(0)
    given = tuple(torch.randn(batch, heads, 16, size, dtype=dtype, generator=chance) for _ in range(3))
    given = given if mask is None else (*given, mask)
    graph = import_exported(torch.export.export(Attention(), given)).graph
    for candidate in enumerate_candidates(graph).candidates:
        if candidate.kind is Kind.ORIGIN:
            choice = format_choices(graph, candidate)[0]
            found = extract(graph, candidate, choice.inputs, choice.outputs).problem
            if found.origin_rule == "sdpa":
                return found
    raise AssertionError("no attention in the graph")


@pytest.mark.parametrize(
    ("dtype", "backends"),
    [
        (torch.float32, {"efficient"}),
        (torch.float16, {"flash", "efficient", "cudnn"}),
        (torch.bfloat16, {"flash", "efficient", "cudnn"}),
    ],
)
def test_flash_and_cudnn_take_floats_of_16_bits_only(dtype: torch.dtype, backends: set[str]) -> None:
    problem = attention(dtype)
    made = {
        name: LibraryGenerator().emit(problem, Schedule("library", (("backend", name), ("form", "attention"))))
        for name in ("flash", "efficient", "cudnn")
    }
    assert {name for name, call in made.items() if isinstance(call, LibraryCall)} == backends
    declined = [call for call in made.values() if isinstance(call, Declined)]
    assert all("16 bits" in call.reason for call in declined)


def targets(call: LibraryCall | Declined) -> dict[str, tuple[object, ...]]:
    assert isinstance(call, LibraryCall), call
    return {step.target.split(".")[1]: step.args for step in call.run}


def emit(problem: Problem, backend: str) -> LibraryCall | Declined:
    return LibraryGenerator().emit(problem, Schedule("library", (("backend", backend), ("form", "attention"))))


@pytest.mark.parametrize("shape", [(16, 16), (4, 1, 16, 16), (1, 2, 1, 16), (4, 2, 16, 16)])
def test_masks_of_bool_become_numbers_that_are_added(shape: tuple[int, ...]) -> None:
    """cuDNN reads a mask by the type of the queries, whatever it is: wrong results, and memory that is not there."""
    problem = attention(torch.float16, mask=torch.ones(shape, dtype=torch.bool).tril(), batch=4)
    for backend in ("cudnn", "efficient"):
        steps = targets(emit(problem, backend))
        assert steps["where"][1:] == (0.0, -65504.0 if backend == "cudnn" else float("-inf"))
        assert "_to_copy" in steps
        assert ("expand" in steps) == (backend == "efficient")
    flash = emit(problem, "flash")
    assert isinstance(flash, Declined) and "no mask" in flash.reason


def test_masks_of_the_queries_own_type_are_taken_as_they_are() -> None:
    problem = attention(torch.float16, mask=torch.zeros(1, 1, 16, 16, dtype=torch.float16))
    assert set(targets(emit(problem, "cudnn"))) == {"attention"}


def test_no_kernel_is_called_that_the_framework_would_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its private operators believe their operands: an illegal access ends the use of the GPU for the whole process."""
    asked: list[object] = []

    def backend(allowed: bool) -> attention_call.Backend:
        def takes(operands: object) -> bool:
            asked.append(operands)
            return allowed

        return attention_call.Backend(takes, lambda *_: torch.full((1, 2, 16, 32), 7.0, dtype=torch.float16))

    for name in attention_call.BACKENDS:
        monkeypatch.setitem(attention_call.BACKENDS, name, backend(name == "flash"))
    problem = attention(torch.float16)
    given = [torch.zeros(1, 2, 16, 32, dtype=torch.float16) for _ in range(3)]
    call = emit(problem, "flash")
    assert isinstance(call, LibraryCall)
    assert BoundCall(call, {}).run(given)[0].eq(7).all() and len(asked) == 1
    for name in ("cudnn", "efficient"):
        call = emit(problem, name)
        assert isinstance(call, LibraryCall)
        with pytest.raises(RuntimeError, match=f"would not take {name} attention for torch.float16: .*strides"):
            BoundCall(call, {}).run(given)
    assert len(asked) == 3
    q = given[0]
    with pytest.raises(RuntimeError, match=r"with a mask of torch\.bool"):
        attention_call.attention("cudnn", q, q, q, torch.ones(16, 16, dtype=torch.bool), causal=False, scale=None)
    assert len(asked) == 3


def misaligned(*shape: int, dtype: torch.dtype = torch.float32, by: int = 3) -> torch.Tensor:
    """Dense, so many elements behind the beginning of its memory."""
    room = torch.randn(math.prod(shape) + by, dtype=dtype, generator=torch.Generator().manual_seed(by))
    return room[by:].view(shape)


def dense(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


ADDRESSES = {
    "f32, 12 bytes": (misaligned(5, 1, 1, 8), True),
    "f16, 8 bytes": (misaligned(2, 4, 16, 32, dtype=torch.float16, by=4), True),
    "between batches": (dense(2, 67)[:, :64].unflatten(1, (1, 8, 8)), True),
    "between heads": (dense(2, 3, 67)[:, :, :64].unflatten(2, (8, 8)), True),
    "a mask broadcast": (misaligned(16, 64).expand(4, 2, 16, 64), True),
    "aligned": (dense(2, 4, 16, 32), False),
    "one batch of any stride": (dense(67)[:64].as_strided((1, 8, 8), (67, 8, 1)), False),
    "a slice at 16 bytes": (dense(2, 4, 16, 36)[..., 4:], False),
    "rows that are padded": (misaligned(2, 4, 16, 5), False),
    "rows with gaps": (misaligned(2, 16, 8, 4).transpose(2, 3), False),
    "no elements": (misaligned(2, 0, 8), False),
}


@pytest.mark.parametrize("name", ADDRESSES)
def test_rows_begin_where_the_kernels_load_them(name: str) -> None:
    x, copied = ADDRESSES[name]
    got = attention_call.readable(x)
    assert (got is not x) == copied and torch.equal(got, x)
    if copied:
        between = [s for s, n in zip(got.stride()[:-1], got.shape[:-1], strict=True) if n > 1]
        assert got.data_ptr() % 16 == 0 and not any(s * got.element_size() % 16 for s in between)
        assert [s for s in x.stride() if s == 0] == [s for s in got.stride() if s == 0]


MASKS = {
    "f32, strides that are not padded": (torch.arange(504.0).view(3, 3, 7, 8)[1:2, 1:2, 1:6, 1:7], True),
    "f16, strides that are not padded": (torch.arange(56, dtype=torch.float16).view(7, 8)[1:6, 1:7], True),
    "one number a row, broadcast": (misaligned(4, 1, 5, 1).expand(4, 2, 5, 1), True),
    "rows that are padded": (torch.arange(30.0).view(5, 6), False),
    "aligned, with gaps": (torch.arange(40.0).view(5, 8)[:, :6], False),
    "no row in one piece": (torch.arange(56.0).view(8, 7)[1:7, 1:6].t(), False),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_of_any_length_begin_where_the_kernels_load_them(name: str) -> None:
    """The framework looks at a mask's strides alone to say whether it pads."""
    mask, copied = MASKS[name]
    got = attention_call.readable(mask, is_mask=True)
    assert (got is not mask) == copied and torch.equal(got, mask)
    assert not copied or got.data_ptr() % 16 == 0
    if mask.shape[-1] * mask.element_size() % 16:
        assert attention_call.readable(mask) is mask


@pytest.mark.parametrize("length", [4, 6])
def test_kernels_of_attention_get_operands_that_they_can_load(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory-efficient one takes f32 at 12 bytes behind a multiple of 16 and ends the use of the GPU."""
    given: list[tuple[torch.Tensor | None, ...]] = []
    monkeypatch.setattr(torch.backends.cuda, "SDPAParams", lambda *operands: operands)

    def takes(operands: tuple[torch.Tensor | None, ...]) -> bool:
        given.append(operands[:4])
        return True

    def run(*operands: torch.Tensor) -> torch.Tensor:
        given.append(operands[:4])
        return operands[0]

    monkeypatch.setitem(attention_call.BACKENDS, "efficient", attention_call.Backend(takes, run))
    q, k, v = (misaligned(5, 1, n, 8, by=by) for by, n in ((1, 4), (2, length), (3, length)))
    mask = misaligned(4, length).expand(5, 1, 4, length)
    attention_call.attention("efficient", q, k, v, mask, causal=False, scale=None)
    assert len(given) == 2
    for operands in given:
        for got, want in zip(operands, (q, k, v, mask), strict=True):
            assert got is not None and got.data_ptr() % 16 == 0 and torch.equal(got, want)


def test_the_frameworks_own_attention_gets_them_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.Tensor] = []
    monkeypatch.setattr(attention_call, "readable", noting(lambda x, **_: asked.append(x), lambda x, **_: x))

    class OnGpu(torch.Tensor):
        is_cuda = True

    problem = attention(torch.float32)
    call = LibraryGenerator().emit(problem, Schedule("library", (("form", "operator"),)))
    assert isinstance(call, LibraryCall) and {s.target for s in call.run} == {attention_call.COMPOSED}
    chance = torch.Generator().manual_seed(1)
    given = [torch.randn(1, 2, 16, 32, generator=chance) for _ in range(3)]
    q, k, v = given
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    assert torch.equal(BoundCall(call, {}).run(given)[0], want) and not asked
    got = BoundCall(call, {}).run([x.as_subclass(OnGpu) for x in given])[0]
    assert torch.equal(got.as_subclass(torch.Tensor), want) and len(asked) == 3


def test_this_framework_takes_no_kernel_without_a_gpu() -> None:
    """The questions are asked with the arguments that this torch has."""
    q = torch.zeros(1, 2, 16, 32, dtype=torch.float16)
    for name in attention_call.BACKENDS:
        with pytest.raises(RuntimeError, match="would not take"):
            attention_call.attention(name, q, q, q, None, causal=True, scale=None)


@pytest.mark.parametrize(
    ("params", "reason"),
    [((("softcap", 30.0),), "cap on scores"), ((("causal_offset", 3), ("causal", True)), "offset")],
)
def test_attention_that_the_framework_does_not_have_is_declined(
    params: tuple[tuple[str, OriginParam], ...], reason: str
) -> None:
    problem = replace(attention(torch.float16), origin_params=params)
    for name in ("flash", "efficient", "cudnn"):
        call = emit(problem, name)
        assert isinstance(call, Declined) and reason in call.reason


def test_a_causal_mask_beside_another_is_declined() -> None:
    problem = attention(torch.float16, mask=torch.zeros(1, 1, 16, 16, dtype=torch.float16))
    call = emit(replace(problem, origin_params=(("causal", True),)), "cudnn")
    assert isinstance(call, Declined) and "never both" in call.reason


def test_flash_attention_of_odd_heads_is_declined() -> None:
    problem = attention(torch.float16, size=36)
    assert isinstance(emit(problem, "flash"), Declined)
    assert isinstance(emit(problem, "cudnn"), LibraryCall)


@pytest.mark.parametrize(("keys", "dtype"), [(1, torch.float16), (16, torch.float32)])
def test_masks_that_kernels_cannot_read_are_declined(keys: int, dtype: torch.dtype) -> None:
    """Rows of one element, and a mask of f32 for queries of f16 (of which the framework itself makes f16)."""
    problem = attention(torch.float16, mask=torch.zeros(16, 16).to(dtype)[:, :keys])
    assert isinstance(emit(problem, "efficient"), Declined)


def test_operands_that_were_changed_are_declined() -> None:
    """-2 stands for an operand that the clean-ups replaced: neither there nor absent."""
    problem = attention(torch.float16, mask=torch.zeros(16, 16, dtype=torch.float16))
    for position in range(4):
        operands = list(problem.origin_operand_nodes)
        operands[position] = -2
        changed = replace(problem, origin_operand_nodes=tuple(operands))
        for name in ("flash", "efficient", "cudnn"):
            call = emit(changed, name)
            assert isinstance(call, Declined) and "changed by the clean-ups" in call.reason


def test_attention_without_elements_is_left_to_primitives() -> None:
    problem = attention(torch.float16, heads=0)
    for name in ("flash", "efficient", "cudnn"):
        call = LibraryGenerator().emit(problem, Schedule("library", (("backend", name), ("form", "attention"))))
        assert isinstance(call, Declined) and "over none" in call.reason


@pytest.mark.parametrize(("rows", "k", "n"), [(0, 8, 8), (8, 0, 8), (8, 8, 0)])
def test_products_without_elements_are_left_to_primitives(rows: int, k: int, n: int) -> None:
    b = GraphBuilder()
    x, w = b.input(TensorType(DType.F32, (rows, k))), b.input(TensorType(DType.F32, (k, n)), is_weight=True)
    graph = b.build([b.add(Prim.MATMUL, x, w)])
    problem = Problem(graph, "nothing", (Format.ROW,) * 2, (Format.ROW,))
    for make in (fused_linear, cublaslt_linear):
        call = make(problem, Schedule("library", ()))
        assert isinstance(call, Declined) and "of none" in call.reason


def test_no_plan_lets_cudnn_choose_by_trying() -> None:
    """The fastest when a process first meets a convolution may be another in the next process, with other bits."""
    b = GraphBuilder()
    x, w = b.input(TensorType(DType.F16, (1, 8, 6, 6))), b.input(TensorType(DType.F16, (8, 8, 1, 1)), is_weight=True)
    graph = b.build([b.add(Prim.CONV, x, w, attrs=ConvAttrs((1, 1), (0, 0), (0, 0), (1, 1), 1))])
    problem = Problem(graph, "conv", (Format.LAST, Format.ROW), (Format.LAST,))
    found = LibraryGenerator().schedules(problem, GpuFacts())
    assert not isinstance(found, Declined)
    made = [LibraryGenerator().emit(problem, s) for s in found]
    steps = [s for call in made if isinstance(call, LibraryCall) for s in call.run if "cudnn_conv" in s.target]
    assert [s.args[6:8] for s in steps] == [(False, True)]
