"""Calls of executables on a real GPU: threads and streams, a caller's own graph, strange inputs, values and sizes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from tests.gpu import small_networks
from tests.gpu.conftest import Compile, Tell
from tests.gpu.small_networks import DTYPES, network
from torch import nn

import weft
from weft.frontends.imported import Imported
from weft.frontends.torch import import_exported
from weft.ir.attrs import ReduceAttrs
from weft.ir.graph import Graph, GraphBuilder
from weft.ir.prims import Prim
from weft.ir.types import DType, TensorType
from weft.kernels.source import CudaSource
from weft.pipeline.untuned import build
from weft.platform.cuda import captured as capturing
from weft.runtime.cuda_executable import CudaExecutable
from weft.runtime.executable import InputError

pytestmark = pytest.mark.gpu


def executable(compiled: Compile, name: str, dtype: str) -> CudaExecutable:
    found = compiled(name, dtype).exe.executable
    assert isinstance(found, CudaExecutable)
    return found


# -- who calls, and from where


def test_several_executables_from_several_threads_and_streams(compiled: Compile) -> None:
    pairs = [("cnn", "f16"), ("transformer", "f16"), ("transformer", "f32")]
    plans = [executable(compiled, name, dtype) for name, dtype in pairs]
    given = [[network(name, DTYPES[dtype], seed)[1] for seed in range(4)] for name, dtype in pairs]
    expected = [[plan(*x)[0] for x in inputs] for plan, inputs in zip(plans, given, strict=True)]
    torch.cuda.synchronize()
    wrong: list[str] = []
    begin = threading.Barrier(6)

    def work(number: int) -> None:
        try:
            stream = torch.cuda.Stream()
            begin.wait(timeout=30)
            with torch.cuda.stream(stream):
                found = []
                for turn in range(60):
                    which, seed = (number + turn) % len(plans), (number * 7 + turn) % 4
                    (y,) = plans[which](*given[which][seed])
                    found.append((y != expected[which][seed]).any() | y.isnan().any())
                if bool(torch.stack(found).any()):
                    wrong.append(f"thread {number}")
        except Exception as error:  # a thread must not die in silence
            wrong.append(f"thread {number}: {error}")

    threads = [threading.Thread(target=work, args=(k,)) for k in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not wrong and not any(t.is_alive() for t in threads), wrong


def test_the_frameworks_model_in_a_graph_is_as_safe(compiled: Compile) -> None:
    """What is returned where eager beats every plan: threads and streams, a caller's capture, wrong devices."""
    case = compiled("transformer", "f16")
    captured = capturing.capture(lambda *x: [case.module(*x)], case.inputs, case.options)
    assert isinstance(captured, capturing.Captured)
    given = [network("transformer", DTYPES["f16"], seed)[1] for seed in range(3)]
    expected = [captured(*x)[0] for x in given]
    torch.cuda.synchronize()
    wrong: list[str] = []

    def work(number: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for turn in range(60):
                    seed = (number + turn) % 3
                    if not torch.equal(captured(*given[seed])[0], expected[seed]):
                        wrong.append(f"thread {number}, turn {turn}")
        except Exception as error:  # a thread must not die in silence
            wrong.append(f"thread {number}: {error}")

    threads = [threading.Thread(target=work, args=(k,)) for k in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not wrong, wrong[:3]
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        y = captured(*given[1])[0] * 1
    graph.replay()
    torch.testing.assert_close(y, expected[1], rtol=1e-2, atol=1e-2)
    with pytest.raises(InputError, match="expected a tensor on cuda:0, got cpu"):
        captured(given[0][0].cpu())


def test_compiling_does_not_disturb_the_calls_of_others(compiled: Compile, shared_cache: Path) -> None:
    """While plans are recorded, another thread calls an executable and takes memory from the driver."""
    plan = executable(compiled, "cnn", "f16")
    (x,) = network("cnn", DTYPES["f16"], 2)[1]
    (want,) = plan(x)
    torch.cuda.synchronize()
    stop, turns = threading.Event(), 0
    wrong: list[str] = []
    rooms: list[torch.Tensor] = []

    def serve() -> None:
        nonlocal turns
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                while not stop.is_set():
                    turns += 1
                    rooms.append(torch.empty(4 << 20, dtype=torch.uint8, device="cuda"))
                    if not torch.equal(plan(x)[0], want):
                        wrong.append(f"turn {turns}")
                    if len(rooms) == 500:
                        rooms.clear()
        except Exception as error:  # a thread must not die in silence
            wrong.append(f"turn {turns}: {error}")

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        module = nn.Sequential(nn.Linear(48, 80), nn.GELU(), nn.Linear(80, 16)).cuda()
        given = torch.randn(24, 48, device="cuda")
        options = weft.Options(device="cuda", budget_s=30.0, cache_dir=shared_cache)
        exe = weft.compile(module, (given,), options=options)
        with torch.no_grad():
            torch.testing.assert_close(exe(given), module(given), rtol=1e-4, atol=1e-5)
    finally:
        stop.set()
        thread.join(timeout=30)
    assert turns > 10 and not wrong, wrong[:3]


@pytest.mark.parametrize(("name", "dtype"), [("cnn", "f16"), ("transformer", "f16"), ("transformer", "f32")])
def test_a_call_inside_a_callers_own_graph(name: str, dtype: str, compiled: Compile) -> None:
    plan = executable(compiled, name, dtype)
    inputs = [network(name, DTYPES[dtype], seed)[1][0] for seed in range(3)]
    expected = [plan(x)[0] for x in inputs]
    x = inputs[0].clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = plan(x + 0)[0] * 1
    for value, want in zip(inputs, expected, strict=True):
        x.copy_(value)
        graph.replay()
        assert torch.equal(y, want)
    assert torch.equal(plan(inputs[1])[0], expected[1]), "calls outside of the graph go on as before"


# -- what is given


def test_inputs_need_not_be_contiguous(compiled: Compile) -> None:
    plan = executable(compiled, "cnn", "f16")
    (x,) = network("cnn", DTYPES["f16"], 3)[1]
    (want,) = plan(x)
    n, c, h, w = x.shape
    wide = torch.zeros(n, c, h, 2 * w, dtype=x.dtype, device="cuda")
    wide[..., ::2] = x
    turned = x.transpose(2, 3).contiguous().transpose(2, 3)
    odd = torch.zeros(x.numel() + 1, dtype=x.dtype, device="cuda")
    odd[1:] = x.flatten()
    forms = {
        "every second column": wide[..., ::2],
        "turned": turned,
        "channels last": x.to(memory_format=torch.channels_last),
        "at an odd address": odd[1:].reshape(x.shape),
    }
    for what, form in forms.items():
        kept = form.clone()
        assert torch.equal(plan(form)[0], want), what
        assert torch.equal(form, kept), what
    row = x[:1].expand(x.shape)
    assert torch.equal(plan(row)[0], plan(row.contiguous())[0])


def test_wrong_inputs_are_named(compiled: Compile) -> None:
    plan = executable(compiled, "cnn", "f16")
    (x,) = network("cnn", DTYPES["f16"])[1]
    for given, message in (
        ((x.cpu(),), "expected a tensor on cuda:0, got cpu"),
        ((x.float(),), "float32"),
        ((x[:, :2],), "expected 4x3x96x96xf16"),
        ((), "the model takes 1 tensors"),
    ):
        with pytest.raises(InputError, match=message):
            plan(*given)
    assert bool(plan(x)[0].isfinite().all())


# -- strange sizes and values


def own_plans(graph: Graph, cache: Path) -> Mapping[str, CudaExecutable]:
    """Plans of generated kernels, untuned: few large ones, and one per primitive."""
    made = build(Imported(graph, 0), weft.Options(device="cuda", cache_dir=cache), ("fused", "single"))
    found = {way: e for way, e in made.executables.items() if isinstance(e, CudaExecutable)}
    assert found and made.generated
    return found


def of_module(module: nn.Module, *inputs: torch.Tensor) -> Graph:
    with torch.no_grad():
        return import_exported(torch.export.export(module, inputs, strict=False), device="cuda").graph


class Sums(nn.Module):
    def forward(self, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = torch.relu(x) * 2 + 1
        return y, y.sum(1), y.sum(), torch.softmax(x, 1), x @ w, torch.cat([x, y], 0)


EMPTY = [(0, 8), (4, 0), (0, 0)]


def check_sums(plan: Callable[..., tuple[torch.Tensor, ...]], x: torch.Tensor, w: torch.Tensor) -> None:
    want = Sums()(x, w)
    got = plan(x, w)
    assert [y.shape for y in got] == [z.shape for z in want]
    assert [torch.equal(y, z) for y, z in zip(got, want, strict=True)] == [True] * len(want), got


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
@pytest.mark.parametrize("shape", EMPTY)
def test_zero_sized_dimensions(shape: tuple[int, int], shared_cache: Path) -> None:
    x, w = torch.ones(shape, device="cuda"), torch.ones(shape[1], 3, device="cuda")
    for plan in own_plans(of_module(Sums(), x, w), shared_cache).values():
        check_sums(plan, x, w)


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
@pytest.mark.parametrize("shape", EMPTY)
def test_zero_sized_dimensions_are_tuned(shape: tuple[int, int], shared_cache: Path) -> None:
    x, w = torch.ones(shape, device="cuda"), torch.ones(shape[1], 3, device="cuda")
    options = weft.Options(device="cuda", budget_s=30.0, cache_dir=shared_cache)
    exe = weft.compile(Sums(), (x, w), options=options)
    check_sums(exe.executable, x, w)
    check_sums(exe, x, w)


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty", "ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("name", list(small_networks.EMPTY))
def test_networks_of_nothing(name: str, shared_cache: Path) -> None:
    """Layers without rows or columns: untuned plans and tuned ones give what eager gives."""
    make, shape = small_networks.EMPTY[name]
    module, x = make().eval().half().cuda(), torch.zeros(shape, device="cuda").half()
    with torch.no_grad():
        want = module(x)
    options = weft.Options(device="cuda", budget_s=30.0, cache_dir=shared_cache)
    tuned = weft.compile(module, x, options=options)
    plans = own_plans(of_module(module, x), shared_cache)
    for got in (tuned(x), *(plan(x)[0] for plan in plans.values())):
        assert isinstance(got, torch.Tensor)
        torch.testing.assert_close(got, want, rtol=2e-3, atol=2e-3)


class Values(nn.Module):
    """Operators in which NaN, infinities, signed zeros and subnormal numbers go different ways."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        f = nn.functional
        return (
            torch.relu(x), torch.exp(x), torch.log(x), torch.sqrt(x), torch.reciprocal(x), torch.sigmoid(x),
            torch.tanh(x), f.gelu(x), torch.maximum(x, y), torch.minimum(x, y), torch.clamp(x, -1.0, 1.0), x + y,
            x * y, x / y, torch.where(x > y, x, y), x == y, torch.isnan(x), x.abs(), x.sign(), torch.floor(x),
            f.hardswish(x), torch.softmax(x, 1), x.amax(1), x.amin(1), x.sum(1), x.mean(0), x.argmax(1),
            f.layer_norm(x, (x.shape[1],)), f.max_pool2d(x.reshape(1, 1, *x.shape), 2, 2), f.leaky_relu(x, 0.1),
        )  # fmt: skip


@pytest.mark.parametrize("dtype", ["f32", "f16"])
def test_nan_and_infinities_are_as_in_eager(dtype: str, shared_cache: Path) -> None:
    kind = DTYPES[dtype]
    torch.manual_seed(1)
    special = [float("nan"), float("inf"), float("-inf"), 0.0, -0.0, 1e-40 if dtype == "f32" else 6e-8, 3.0, -2.5]
    x = torch.randn(24, 64)
    for row in range(20):
        x[row, row] = special[row % len(special)]
        x[row, 40] = special[row // 3 % len(special)]
    y = torch.tensor(special).repeat(24, 8)
    x, y = x.to(kind).cuda(), y.to(kind).cuda()
    with torch.no_grad():
        want = Values()(x, y)
    for way, plan in own_plans(of_module(Values(), x, y), shared_cache).items():
        for number, (got, truth) in enumerate(zip(plan(x, y), want, strict=True)):
            what = f"{way}, output {number}"
            if not truth.is_floating_point():
                assert torch.equal(got, truth), what
                continue
            assert torch.equal(got.isnan(), truth.isnan()), what
            assert torch.equal(got.isinf(), truth.isinf()), what
            close = 1e-5 if dtype == "f32" else 1e-2  # classes are the question here
            torch.testing.assert_close(got, truth, equal_nan=True, rtol=close, atol=close)


def large(dtype: DType, shape: tuple[int, int]) -> Graph:
    """An elementwise result, the sum or largest of each row, and the largest of all."""
    b = GraphBuilder()
    x = b.input(TensorType(dtype, shape))
    y = b.apply(Prim.MAX, x, 3.0)
    rows = b.add(Prim.REDUCE_MAX, x, attrs=ReduceAttrs((1,)))
    return b.build([y, rows, b.add(Prim.REDUCE_MIN, x, attrs=ReduceAttrs((0, 1)))])


@pytest.mark.parametrize("dtype", [DType.U8, DType.F16])
def test_more_elements_than_32_bits_count(dtype: DType, shared_cache: Path, tell: Tell) -> None:
    """2^31 + 2^15 elements; what stands at the end is found, and written, at the end."""
    shape = ((1 << 16) + 1, 1 << 15)
    size = shape[0] * shape[1]
    assert size > 1 << 31
    if torch.cuda.mem_get_info()[0] < 10 * size * (2 if dtype is DType.F16 else 1):
        pytest.skip("not enough memory on this GPU")
    if dtype is DType.U8:
        x = torch.randint(1, 250, shape, dtype=torch.uint8, device="cuda")
    else:
        x = torch.empty(shape, dtype=torch.float16, device="cuda").uniform_(1, 250)
    x[-1, -1], x[-1, -2], x[0, 0] = 252, 0, 251
    for way, plan in own_plans(large(dtype, shape), shared_cache).items():
        y, rows, least = plan(x)
        what = [str(s.kernel.schedule) for s in plan.plan.steps if isinstance(s.kernel, CudaSource)]
        assert float(least.flatten()[0]) == 0 and float(rows.flatten()[-1]) == 252 and float(rows.flatten()[0]) == 251
        for first in range(0, shape[0], 8192):
            part = x[first : first + 8192]
            assert torch.equal(y[first : first + 8192], part.clamp(min=3)), (way, what)
            assert torch.equal(rows.flatten()[first : first + 8192], part.amax(1)), (way, what)
        tell(f"{size} elements of {dtype.value}, {way}: {', '.join(what)}")
        del y, rows, least
    del x, plan
    torch.cuda.empty_cache()


def test_sums_over_more_elements_than_32_bits_count(shared_cache: Path) -> None:
    """Sums of rows in f32, of 2^31 + 2^15 elements of f16."""
    shape = ((1 << 16) + 1, 1 << 15)
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("not enough memory on this GPU")
    b = GraphBuilder()
    x = b.input(TensorType(DType.F16, shape))
    graph = b.build([b.reduce(Prim.REDUCE_SUM, b.cast(x, DType.F32), [1])])
    given = torch.empty(shape, dtype=torch.float16, device="cuda").normal_()
    for way, plan in own_plans(graph, shared_cache).items():
        if way != "fused":
            continue  # one kernel per primitive would store 8 GB of f32
        (got,) = plan(given)
        for first in range(0, shape[0], 8192):
            want = given[first : first + 8192].sum(1, dtype=torch.float64)
            error = (got.flatten()[first : first + 8192].double() - want).abs().max()
            assert float(error) < 2e-3, (way, first)
    del given, plan
    torch.cuda.empty_cache()
