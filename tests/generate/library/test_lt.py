"""Products by recorded algorithms of cuBLASLt, on a stand-in for the library that computes on the host."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.device.cuda.stand_in import cublaslt
from tests.generate.library.lt_cases import FACTS, K, M, N, calls, expected, inputs_of, linear, problem_of, run
from tests.tune.cuda_fake import FakeCudaTransport
from tests.typed import narrow

from weft.device.cuda.cublaslt import CublasLt
from weft.device.cuda.facts import GpuFacts
from weft.errors import ArtifactError
from weft.generate.library import LibraryGenerator, lt, lt_call
from weft.generate.library.algorithm import Algorithm, algorithm_of, chosen, identity, workspace_bytes
from weft.generate.library.lt_call import Library, operand, product_of
from weft.ir.declined import Declined
from weft.ir.graph import GraphBuilder, NodeId
from weft.ir.prims import Prim
from weft.ir.types import DType, TensorType
from weft.kernels.candidate import Problem
from weft.kernels.codec import kernel_from_json, kernel_to_json
from weft.kernels.formats import Format
from weft.kernels.measurement import Verdict
from weft.kernels.source import LibraryCall
from weft.options import Options
from weft.tune.store import Database
from weft.tune.tuner import ProblemTrial, Tuner

HERE = identity(FACTS.name, FACTS.capability, FACTS.sms)
LIMITS = {DType.F32: 1e-5, DType.F16: 2e-3, DType.BF16: 2e-2}


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Library:
    return Library(CublasLt(cublaslt(tmp_path_factory.mktemp("stub"))), HERE, torch.device("cpu"))


@pytest.fixture
def here(opened: Library, monkeypatch: pytest.MonkeyPatch) -> Library:
    """The stand-in is what this process finds, whatever the product's size."""

    class Stream:
        cuda_stream = 0

    found = Library(opened.lt, opened.gpu, opened.device)
    monkeypatch.setattr(lt_call, "library", lambda device=None: found)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: Stream)
    monkeypatch.setattr(lt, "is_contender", lambda product, facts: True)
    return found


Tail = Callable[[GraphBuilder, NodeId], NodeId]


@pytest.mark.parametrize("dtype", list(LIMITS))
@pytest.mark.parametrize(("turned", "right"), [(False, "constant"), (True, "constant"), (False, "n"), (True, "t")])
def test_every_algorithm_computes_every_layout_and_epilogue(
    dtype: DType, turned: bool, right: str, here: Library
) -> None:
    for bias, residual, activation in itertools.product((False, True), (False, True), ("", "relu", "gelu")):
        about: dict[str, Any] = {"bias": bias, "residual": residual, "activation": activation}
        about |= {"turned": turned, "right": right}
        problem = linear(dtype, **about, sizes=(M, N, K))
        inputs = inputs_of(problem)
        made = calls(problem)
        assert len(made) == 3
        for call in made:
            if dtype is DType.BF16 and call is made[1]:
                with pytest.raises(ArtifactError, match="does not take this algorithm"):  # the stand-in lacks it
                    run(problem, call, inputs)
                continue
            y = run(problem, call, inputs)
            torch.testing.assert_close(
                y.double(), expected(inputs, **about), atol=4 * LIMITS[dtype], rtol=LIMITS[dtype], msg=str(about)
            )


def test_algorithms_differ_and_none_adds_up_in_any_order(here: Library) -> None:
    problem = linear(sizes=(M, N, K))
    found = LibraryGenerator().schedules(problem, FACTS)
    assert not isinstance(found, Declined)
    params = [dict(s.params) for s in found if dict(s.params)["form"] == "lt"]
    first = [int.from_bytes(bytes.fromhex(str(p["data"]))[:8], "little") for p in params]
    assert first == [
        40,
        42,
        45,
    ]  # of 40 to 46: 41 does not apply, 43 is 40 again, 44 adds up as parts come in, 46 does not say
    assert [p["algorithm"] for p in params] == [0, 1, 2]
    assert [p["workspace"] for p in params] == [0, 0, 4096]
    assert {p["version"] for p in params} == {"130000"} and {p["gpu"] for p in params} == {HERE}
    forms = [dict(s.params)["form"] for s in found]
    assert forms[:2] == ["lt", "cublaslt"] and forms[-2:] == ["lt", "lt"]  # the framework's own choice comes second
    assert all(len(str(s)) < 250 for s in found)
    assert len({*found}) == len(found)


def test_batches_of_products_read_views_in_place(here: Library) -> None:
    """Queries times keys as one head's worth of a token lies in memory; and a matrix that all products share."""
    b = GraphBuilder()
    q, k = (b.reshape(b.input(TensorType(DType.F32, (1, M, 3 * K))), (1, M, 3, K)) for _ in range(2))
    scores = b.add(Prim.MATMUL, b.transpose(q, (0, 2, 1, 3)), b.transpose(k, (0, 2, 3, 1)))
    problem = problem_of(b.build([scores]))
    x, y = inputs_of(problem)
    wanted = x.view(1, M, 3, K).permute(0, 2, 1, 3) @ y.view(1, M, 3, K).permute(0, 2, 3, 1)
    made = calls(problem)
    assert len(made) == 3
    for call in made:
        assert [s.target.split(".")[1] for s in call.run] == ["reshape", "permute", "reshape", "permute", "cublaslt"]
        torch.testing.assert_close(run(problem, call, [x, y]), wanted)
    b = GraphBuilder()
    x_, w_ = b.input(TensorType(DType.F32, (4, M, K))), b.input(TensorType(DType.F32, (K, N)))
    problem = problem_of(b.build([b.add(Prim.MATMUL, x_, b.broadcast(w_, (4, K, N)))]))
    inputs = inputs_of(problem)
    for call in calls(problem):
        torch.testing.assert_close(run(problem, call, inputs), inputs[0] @ inputs[1])


def declined(problem: Problem) -> str:
    assert not calls(problem)
    found = lt.match_product(problem)
    return found.reason if isinstance(found, Declined) else ""


def test_what_the_library_cannot_do_is_left_alone(here: Library) -> None:
    def product(tail: Tail, dtype: DType = DType.F32) -> Problem:
        b = GraphBuilder()
        x, w = b.input(TensorType(dtype, (M, K))), b.input(TensorType(dtype, (K, N)), is_weight=True)
        return problem_of(b.build([tail(b, b.add(Prim.MATMUL, x, w))]))

    def rows(b: GraphBuilder) -> NodeId:
        return b.broadcast(b.input(TensorType(DType.F32, (M, 1)), is_weight=True), (M, N))

    assert "tanh-GELU" in declined(product(lambda b, y: b.apply(Prim.TANH, y)))
    assert "tanh-GELU" in declined(product(lambda b, y: b.add(Prim.MUL, b.apply(Prim.TANH, y), y)))
    for tail in (lambda b, y: b.add(Prim.ADD, y, y), lambda b, y: b.add(Prim.ADD, y, rows(b))):
        assert "something else is added" in declined(product(tail))
    assert "floats" in declined(product(lambda b, y: y, DType.F64))
    plain = product(lambda b, y: y)
    assert "row-major" in declined(replace(plain, output_formats=(Format.LAST,)))
    b = GraphBuilder()
    x, w = b.input(TensorType(DType.F32, (0, K))), b.input(TensorType(DType.F32, (K, N)), is_weight=True)
    assert "without elements" in declined(problem_of(b.build([b.add(Prim.MATMUL, x, w)])))


@pytest.mark.parametrize("error", [RuntimeError, ValueError])
def test_operands_that_would_be_copied_are_left_alone(
    here: Library, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    """Versions of torch differ in what they raise where a tensor without memory has no such view."""

    def view(self: torch.Tensor, *shape: int) -> torch.Tensor:
        raise error("no view")

    monkeypatch.setattr(torch.Tensor, "view", view)
    b = GraphBuilder()
    x = b.reshape(b.transpose(b.input(TensorType(DType.F32, (2, M, 3))), (1, 0, 2)), (M, 6))
    w = b.input(TensorType(DType.F32, (6, N)), is_weight=True)
    assert declined(problem_of(b.build([b.add(Prim.MATMUL, x, w)]))) == ""


def test_pixels_with_their_channels_last_are_rows(here: Library) -> None:
    """The product of a 1x1 convolution; in row-major order the pixels would have to be copied."""
    b = GraphBuilder()
    image = b.transpose(b.input(TensorType(DType.F32, (2, K, 3, 4))), (0, 2, 3, 1))
    w = b.input(TensorType(DType.F32, (K, N)), is_weight=True)
    row = problem_of(b.build([b.add(Prim.MATMUL, b.reshape(image, (24, K)), w)]))
    assert declined(row) == ""
    problem = replace(row, input_formats=(Format.LAST, Format.ROW))
    x, v = inputs_of(problem)
    last = x.to(memory_format=torch.channels_last)
    made = calls(problem)
    assert len(made) == 3
    for call in made:
        torch.testing.assert_close(run(problem, call, [last, v]), x.permute(0, 2, 3, 1).reshape(24, K) @ v)


def test_a_product_that_is_soon_over_is_left_to_kernels(here: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(lt_call, "library", lambda device=None: here)
    for (m, n, k), contends in {
        (128, 768, 768): False, (1, 4096, 4096): False, (65536, 64, 64): False,
        (2048, 3072, 768): True, (1, 4096, 25088): True,
    }.items():  # fmt: skip
        product = product_of(torch.empty(m, k, device="meta").half(), torch.empty(k, n, device="meta").half(), "f16")
        assert not isinstance(product, Declined)
        assert lt.is_contender(product, FACTS) is contends, (m, n, k)
    assert calls(linear(sizes=(M, N, K))) == []


@pytest.mark.parametrize("facts", [GpuFacts(name="NVIDIA A100"), GpuFacts(sms=114), GpuFacts(capability=80)])
def test_algorithms_are_not_asked_for_another_gpu(facts: GpuFacts, here: Library) -> None:
    assert lt.lt_schedules(linear(sizes=(M, N, K)), facts) == []


def test_without_a_gpu_or_the_library_there_are_the_frameworks_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    assert lt_call.library() == Declined("torch sees no GPU") or torch.cuda.is_available()
    assert isinstance(lt_call.library(torch.device("cpu")), Declined)
    monkeypatch.setattr(lt_call, "library", lambda device=None: Declined("no cuBLASLt: gone"))
    found = LibraryGenerator().schedules(linear(sizes=(M, N, K)), FACTS)
    assert not isinstance(found, Declined)
    assert "lt" not in {dict(s.params)["form"] for s in found}


def test_a_call_without_the_library_says_so(here: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = linear(sizes=(M, N, K))
    call = calls(problem)[0]
    monkeypatch.setattr(lt_call, "library", lambda device=None: Declined("no cuBLASLt: gone"))
    with pytest.raises(ArtifactError, match=r"needs cuBLASLt: no cuBLASLt: gone \[W401\]\n  compile the model again"):
        run(problem, call, inputs_of(problem))


def test_the_record_survives_the_codec(here: Library) -> None:
    problem = linear(DType.F16, sizes=(M, N, K), bias=True, residual=True, activation="relu")
    inputs = inputs_of(problem)
    for call in calls(problem):
        back = kernel_from_json(kernel_to_json(call))
        assert back == call
        assert isinstance(back, LibraryCall)
        assert torch.equal(run(problem, back, inputs), run(problem, call, inputs))
        assert list(chosen(back)) == list(chosen(call)) != []


def sealed(call: LibraryCall, **changes: object) -> LibraryCall:
    """The call with another record that fits its seal."""
    (before,) = chosen(call)
    after = replace(before, **changes)  # type: ignore[arg-type]
    last = replace(call.run[-1], kwargs=after.keywords)
    return replace(call, run=(*call.run[:-1], last))


def other(data: str) -> str:
    """Bytes that are no algorithm."""
    return data[:-2] + f"{int(data[-2:], 16) ^ 1:02x}"


def test_damaged_records_are_refused(here: Library) -> None:
    problem = linear(sizes=(M, N, K))
    inputs, call = inputs_of(problem), calls(problem)[0]
    (record,) = chosen(call)
    good = dict(record.keywords)
    assert algorithm_of(good) == record
    wrong: list[dict[str, Any]] = [
        {"data": other(record.data)}, {"data": record.data[:-2]}, {"data": "g" * 128}, {"data": 7}, {"seal": "0" * 16},
        {"workspace": -1}, {"workspace": 1 << 40}, {"workspace": True}, {"compute": "f64"}, {"activation": "tanh"},
        {"version": "1"}, {"gpu": "another"}, {"more": 1},
    ]  # fmt: skip
    for change in wrong:
        with pytest.raises(ArtifactError, match="record of its algorithm is damaged"):
            algorithm_of({**good, **change})
        last = replace(call.run[-1], kwargs=tuple(sorted({**good, **change}.items())))
        with pytest.raises(ArtifactError, match="damaged"):
            run(problem, replace(call, run=(*call.run[:-1], last)), inputs)
    with pytest.raises(ArtifactError, match="is of form 2, this Weft reads 1"):
        algorithm_of({**good, "step": 2})
    del good["data"]
    with pytest.raises(ArtifactError, match="fields are missing"):
        algorithm_of(good)


def test_foreign_algorithms_are_refused_and_never_replaced(here: Library) -> None:
    problem = linear(sizes=(M, N, K))
    inputs, made = inputs_of(problem), calls(problem)
    with pytest.raises(ArtifactError, match=r"one of cuBLASLt 120900, here is 130000"):
        run(problem, sealed(made[0], version="120900"), inputs)
    with pytest.raises(ArtifactError, match=f"chosen for NVIDIA A100, sm_80, 108 multiprocessors, here is {HERE}"):
        run(problem, sealed(made[0], gpu=identity("NVIDIA A100", 80, 108)), inputs)
    (record,) = chosen(made[0])
    assert isinstance(record, Algorithm)
    with pytest.raises(ArtifactError, match=r"does not take this algorithm: INVALID_VALUE \(7\)"):
        run(problem, sealed(made[0], data=other(record.data)), inputs)
    unordered = "2c" + record.data[2:16] + "0400000001000000" + record.data[32:]
    with pytest.raises(ArtifactError, match="not the one that was chosen"):
        run(problem, sealed(made[0], data=unordered), inputs)
    with pytest.raises(ArtifactError, match="not the one that was chosen"):
        run(problem, sealed(made[2], workspace=0), inputs)  # it needs more than was recorded
    assert not torch.isnan(run(problem, made[0], inputs)).any()


def test_a_record_cannot_make_the_library_leave_the_tensors(here: Library) -> None:
    (record,) = chosen(calls(linear(sizes=(M, N, K)))[0])
    x, w = torch.randn(M, K), torch.randn(K, N)

    def step(*given: torch.Tensor | None, **more: Any) -> torch.Tensor:
        run: Callable[..., torch.Tensor] = lt_call.run
        return run(*given, **more, **dict(record.keywords))

    torch.testing.assert_close(step(x, w, None, None), x @ w)
    bad: list[tuple[tuple[torch.Tensor | None, ...], dict[str, Any], str]] = [
        ((x, torch.randn(K + 1, N), None, None), {}, "fit"),
        ((x, w.double(), None, None), {}, "no product of"),
        ((x.half(), w.half(), None, None), {}, "no product of"),
        ((x, w, torch.randn(N - 1), None), {}, "bias of another size"),
        ((x, w, None, torch.randn(M, N - 1)), {}, "residual of another size"),
        ((x, w, None, None), {"out": torch.empty(M, N + 1)}, "result or residual"),
        ((x, w, None, None), {"out": torch.empty(N, M).T}, "not dense"),
        ((x, w, None, None), {"out": torch.empty(M, N).half()}, "several types"),
        ((torch.randn(M, 2 * K)[:, ::2], w, None, None), {}, "do not lie in order"),
        ((torch.randn(M * K + 1)[1:].view(M, K), w, None, None), {}, "not aligned"),
        ((x[None].expand(2, M, K), torch.randn(3, K, N), None, None), {}, "different numbers"),
    ]
    for given, more, reason in bad:
        with pytest.raises(ArtifactError, match=reason):
            step(*given, **more)


def test_workspace_is_taken_from_the_plan_where_it_gives_some(here: Library) -> None:
    problem = linear(sizes=(M, N, K))
    inputs, call = inputs_of(problem), calls(problem)[2]
    assert workspace_bytes(call) == 4096
    room = torch.zeros(4096 + 64, dtype=torch.uint8)
    y = run(problem, call, inputs, room)
    assert bool((room[:4096] == 0x5A).all()) and not room[4096:].any()  # the stand-in marks what it uses
    assert torch.equal(y, run(problem, call, inputs))
    with pytest.raises(ArtifactError, match="too small"):
        run(problem, call, inputs, room[:4095])


def test_strides_say_what_the_library_is_asked_for() -> None:
    assert operand(torch.empty(3, 4)) == ("n", 4, 1, 0)
    assert operand(torch.empty(4, 3).T) == ("t", 3, 1, 0)
    assert operand(torch.empty(3, 8)[:, :4]) == ("n", 8, 1, 0)
    assert operand(torch.empty(2, 5, 3, 4)) == ("n", 4, 10, 12)
    assert operand(torch.empty(3, 4).expand(7, 3, 4)) == ("n", 4, 7, 0)
    assert operand(torch.empty(2, 5, 3, 4).transpose(0, 1)) is None  # not at equal distances
    assert operand(torch.empty(3, 8)[:, ::2]) is None
    assert operand(torch.empty(1).expand(3, 4)) is None  # rows that overlap
    tall = product_of(torch.empty(2, 5, 4), torch.empty(4, 3).expand(2, 4, 3), "f32")
    assert not isinstance(tall, Declined)
    assert (tall.m, tall.batch, tall.leading) == (10, 1, (4, 3))


def test_threads_share_the_library(here: Library) -> None:
    problem = linear(sizes=(M, N, K), bias=True)
    call = calls(problem)[2]
    given = [inputs_of(problem, seed) for seed in range(8)]
    wanted = [run(problem, call, x) for x in given]
    failed: list[int] = []

    def again(number: int) -> None:
        if not all(torch.equal(run(problem, call, given[number]), wanted[number]) for _ in range(20)):
            failed.append(number)

    threads = [threading.Thread(target=again, args=(i,)) for i in range(len(given))]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert not failed and not any(t.is_alive() for t in threads)


def test_a_schedule_alone_makes_its_call(here: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """Emission depends on problem and schedule only: it asks no library."""
    problem = linear(sizes=(M, N, K), bias=True)
    found = lt.lt_schedules(problem, FACTS)
    before = [lt.lt_product(problem, s) for s in found]
    monkeypatch.setattr(lt_call, "library", lambda device=None: Declined("gone"))
    assert [lt.lt_product(problem, s) for s in found] == before
    records = [narrow(Algorithm, next(chosen(call))) for call in before if isinstance(call, LibraryCall)]
    assert [r.data for r in records] == [s.param("data") for s in found]
    assert len(records) == 3


def test_the_tuner_verifies_and_times_each_algorithm(here: Library) -> None:
    problem = linear(sizes=(M, N, K), bias=True, residual=True, activation="relu")
    made = calls(problem)
    foreign = sealed(made[0], version="1")
    wrong = sealed(made[0], activation="")
    pairs = [
        (replace(x.schedule, params=(*x.schedule.params, ("n", n))), x, None)
        for n, x in enumerate((*made, foreign, wrong))
    ]
    with Tuner(Options(device="cuda"), FACTS, Database.open(None), transport=FakeCudaTransport()) as tuner:
        found = {int(str(m.schedule.param("n"))): m for m in tuner.measure([ProblemTrial(problem, pairs)])}
    assert [found[n].verdict for n in range(3)] == [Verdict.OK] * 3
    assert found[3].verdict is not Verdict.OK and "one of cuBLASLt 1, here is 130000" in found[3].error
    assert found[4].verdict is Verdict.WRONG
    assert len({m.kernel for m in found.values()}) == 5, "each algorithm is measured for itself"
