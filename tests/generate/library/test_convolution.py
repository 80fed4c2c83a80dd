"""Convolutions by recorded engines of cuDNN, on a stand-in for the library that computes on the host."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.device.cuda.stand_in import cudnn
from tests.generate.library.conv_cases import calls, convolution, expected, inputs_of, prepared
from tests.generate.library.lt_cases import FACTS
from tests.slow import few

from weft.device.cuda.cudnn import Convolution, Cudnn
from weft.device.cuda.facts import GpuFacts
from weft.errors import ArtifactError
from weft.generate.library import LibraryGenerator, conv_call
from weft.generate.library import convolution as module
from weft.generate.library.algorithm import (
    CONVOLUTION,
    chosen,
    engine_of,
    identity,
    names_algorithm,
    workspace_bytes,
)
from weft.generate.library.conv_call import Engines, convolution_of
from weft.ir.attrs import ConvAttrs
from weft.ir.declined import Declined
from weft.ir.types import DType
from weft.kernels.candidate import Problem
from weft.kernels.codec import kernel_from_json, kernel_to_json
from weft.kernels.formats import Format
from weft.kernels.source import LibraryCall
from weft.runtime import cuda_artifact

HERE = identity(FACTS.name, FACTS.capability, FACTS.sms)
LIMITS = {DType.F32: 1e-5, DType.F16: 4e-3, DType.BF16: 3e-2}


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Engines:
    return Engines(Cudnn(cudnn(tmp_path_factory.mktemp("stub"))), HERE, torch.device("cpu"))


@pytest.fixture
def here(opened: Engines, monkeypatch: pytest.MonkeyPatch) -> Engines:
    """The stand-in is what this process finds, whatever the convolution's size."""

    class Stream:
        cuda_stream = 0

    found = Engines(opened.cudnn, opened.gpu, opened.device)
    monkeypatch.setattr(conv_call, "engines", lambda device=None: found)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: Stream)
    monkeypatch.setattr(module, "is_contender", lambda asked, facts: True)
    return found


def run(problem: Problem, call: LibraryCall, inputs: list[torch.Tensor], room: torch.Tensor | None = None) -> Any:
    launch, out = prepared(problem, call, inputs, room)
    launch()
    return out


WAYS = (
    ConvAttrs((1, 1), (1, 1), (1, 1), (1, 1), 1),
    ConvAttrs((2, 1), (0, 2), (1, 0), (1, 1), 1),
    ConvAttrs((1, 1), (2, 2), (2, 2), (2, 2), 1),
    ConvAttrs((1, 1), (1, 1), (1, 1), (1, 1), 4),
)


@pytest.mark.parametrize("dtype", list(LIMITS))
@pytest.mark.parametrize("attrs", few(WAYS, 1), ids=str)
def test_every_engine_computes_every_form(dtype: DType, attrs: ConvAttrs, here: Engines) -> None:
    orders = list(itertools.product((Format.ROW, Format.LAST), (Format.ROW, Format.LAST)))
    for bias, residual, relu in itertools.product((False, True), repeat=3):
        for formats in orders if bias and relu else orders[-1:]:
            about: dict[str, Any] = {"bias": bias, "residual": residual}
            problem = convolution(dtype, attrs=attrs, formats=formats, activation="relu" if relu else "", **about)
            inputs = inputs_of(problem)
            made = calls(problem)
            assert len(made) == (1 if dtype is DType.BF16 else 2)
            for call in made:
                y = run(problem, call, inputs)
                exact = expected(problem, inputs, relu=relu, **about)
                torch.testing.assert_close(y.double(), exact, rtol=LIMITS[dtype], atol=4 * LIMITS[dtype])


def test_engines_are_schedules_of_their_own(here: Engines) -> None:
    problem = convolution(DType.F16)
    found = LibraryGenerator().schedules(problem, FACTS)
    assert not isinstance(found, Declined)
    params = [dict(s.params) for s in found if dict(s.params)["form"] == "engine"]
    assert [(p["algorithm"], p["number"], p["knobs"], p["workspace"]) for p in params] == [
        (0, 0, "2:3", 0), (1, 2, "2:5", 4096),
    ]  # fmt: skip
    assert {p["version"] for p in params} == {"91900"} and {p["gpu"] for p in params} == {HERE}
    assert [dict(s.params)["form"] for s in found[:2]] == ["engine", "cudnn"]  # then the framework's own choice
    assert len({*found}) == len(found)


def test_what_the_library_cannot_do_is_left_alone(here: Engines) -> None:
    for problem, reason in {
        convolution(activation="silu"): "bias + residual + relu",
        convolution(DType.F64): "floats",
        convolution(
            attrs=ConvAttrs((1, 1), (1, 1), (1, 1), (1, 1), 1, transposed=True, output_padding=(0, 0)),
            sizes=(2, 8, 6, 5, 8),
        ): "plain",
        convolution(sizes=(0, 8, 6, 5, 16)): "without elements",
    }.items():
        assert calls(problem) == []
        found = module.match_convolution(problem)
        assert isinstance(found, Declined) and reason in found.reason, found
    mixed = convolution(residual=True)
    turned = replace(mixed, input_formats=(*mixed.input_formats[:-1], Format.ROW))
    found = module.match_convolution(turned)
    assert isinstance(found, Declined) and "lies otherwise" in found.reason and calls(turned) == []


def test_small_or_bare_convolutions_are_left_to_kernels(here: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()

    def asked(n: int, c: int, side: int, k: int, kernel: int, **tail: Any) -> Convolution:
        def tensor(*shape: int) -> torch.Tensor:
            return torch.empty(shape, device="meta", dtype=torch.float16)

        at = {"pads": ((kernel // 2,) * 2,) * 2, **tail}
        found = convolution_of(
            tensor(n, c, side, side), tensor(k, c, kernel, kernel), tensor(n, k, side, side), "f16", **at
        )
        assert not isinstance(found, Declined)
        return found

    assert module.is_contender(asked(16, 128, 56, 128, 3, bias=True), FACTS)
    assert not module.is_contender(asked(16, 128, 56, 128, 3), FACTS)
    assert not module.is_contender(asked(1, 64, 14, 64, 3, bias=True, activation="relu"), FACTS)


@pytest.mark.parametrize("facts", [GpuFacts(name="NVIDIA A100"), GpuFacts(sms=114), GpuFacts(capability=80)])
def test_engines_are_not_asked_for_another_gpu(facts: GpuFacts, here: Engines) -> None:
    assert module.engine_schedules(convolution(DType.F16), facts) == []


def test_without_the_library_there_are_the_frameworks_calls(here: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = convolution(DType.F16)
    call = calls(problem)[0]
    monkeypatch.setattr(conv_call, "engines", lambda device=None: Declined("no cuDNN: gone"))
    assert calls(problem) == []
    with pytest.raises(ArtifactError, match=r"needs cuDNN: no cuDNN: gone"):
        run(problem, call, inputs_of(problem))
    monkeypatch.undo()
    assert isinstance(conv_call.engines(torch.device("cpu")), Declined)
    assert conv_call.engines() == Declined("torch sees no GPU") or torch.cuda.is_available()


def test_the_record_survives_the_codec_and_asks_for_trust(here: Engines) -> None:
    problem = convolution(DType.F16)
    for call in calls(problem):
        back = kernel_from_json(kernel_to_json(call))
        assert back == call and isinstance(back, LibraryCall)
        assert list(chosen(back)) == list(chosen(call)) != []
        assert names_algorithm(back)


def test_workspace_is_taken_from_the_plan_where_it_gives_some(here: Engines) -> None:
    problem = convolution(DType.F16)
    inputs, call = inputs_of(problem), calls(problem)[1]
    assert workspace_bytes(call) == 4096
    room = torch.zeros(4096 + 64, dtype=torch.uint8)
    y = run(problem, call, inputs, room)
    assert bool((room[:4096] == 1).all()) and not room[4096:].any(), "the stand-in marks what it uses"
    assert torch.equal(y, run(problem, call, inputs))
    with pytest.raises(ArtifactError, match="too small"):
        run(problem, call, inputs, room[:4095])


def changed(call: LibraryCall, **changes: object) -> LibraryCall:
    """The call with another record that fits its seal."""
    (before,) = chosen(call)
    after = replace(before, **changes)  # type: ignore[arg-type]
    return replace(call, run=(*call.run[:-1], replace(call.run[-1], kwargs=after.keywords)))


def test_damaged_and_foreign_records_are_refused(here: Engines) -> None:
    problem = convolution(DType.F16)
    inputs, made = inputs_of(problem), calls(problem)
    (record,) = chosen(made[0])
    good = dict(record.keywords)
    assert engine_of(good) == record and made[0].run[-1].target == CONVOLUTION
    wrong: list[dict[str, Any]] = [
        {"number": 2}, {"number": "0"}, {"number": True}, {"knobs": "2:4"}, {"knobs": "2"}, {"knobs": 7}, {"seal": "0"},
        {"workspace": -1}, {"workspace": 1 << 40}, {"compute": "f64"}, {"activation": "gelu_tanh"}, {"more": 1},
    ]  # fmt: skip
    for change in wrong:
        with pytest.raises(ArtifactError, match="a convolution's record of its algorithm is damaged"):
            engine_of({**good, **change})
    for changes, reason in (
        ({"version": "90100"}, "is one of cuDNN 90100, here is 91900"),
        ({"gpu": "NVIDIA A100"}, "was chosen for NVIDIA A100"),
        ({"number": 6}, "does not take this algorithm"),
        ({"knobs": "2:10"}, "does not take this algorithm"),
        ({"number": 1, "knobs": ""}, "not the one that was chosen"),  # adds up in any order
        ({"number": 2}, "not the one that was chosen"),  # wants more memory
        ({"knobs": "2:" + "9" * 10}, "damaged"),
        ({"number": -1}, "damaged"),
    ):
        with pytest.raises(ArtifactError, match=reason):
            run(problem, changed(made[0], **changes), inputs)


def test_tensors_that_a_record_is_not_for_are_refused(here: Engines) -> None:
    problem = convolution(DType.F16)
    (record,) = chosen(calls(problem)[0])
    x, w, bias = inputs_of(problem)
    where: tuple[Any, ...] = ((1, 1), (1, 1), (1, 1), (1, 1))
    run: Callable[..., torch.Tensor] = conv_call.run
    y = run(x, w, bias, None, *where, **dict(record.keywords))
    assert y.shape == (2, 16, 6, 5) and y.is_contiguous(memory_format=torch.channels_last)
    bad: list[tuple[dict[str, Any], str]] = [
        ({"x": x.double()}, "no convolution of"), ({"w": w[:, :3]}, "whole groups"), ({"bias": bias[:3]}, "bias"),
        ({"residual": torch.zeros(2, 16, 6, 4).half()}, "residual"), ({"where": ((0, 1), *where[1:])}, "are none"),
        ({"where": ((1, 1), (-1, 0), *where[2:])}, "are none"),
        ({"out": torch.zeros(2, 16, 6, 4).half()}, "a result of"),
        ({"bias": torch.zeros(17).half()[1:]}, "not aligned"), ({"x": x[0]}, "two-dimensional"),
    ]  # fmt: skip
    for change, reason in bad:
        given = {"x": x, "w": w, "bias": bias, "residual": None, "where": where, "out": None, **change}
        with pytest.raises(ArtifactError, match=reason):
            run(
                given["x"], given["w"], given["bias"], given["residual"], *given["where"], out=given["out"],
                **dict(record.keywords),
            )  # fmt: skip


def test_a_plan_with_engines_of_another_library_is_refused(here: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    call = calls(convolution(DType.F16))[0]

    class Step:
        kernel = call

    class Only:
        steps = (Step,)

    monkeypatch.setattr(cuda_artifact, "engines", lambda: here)
    cuda_artifact._check_algorithms(Path("plan.weft"), Only)  # type: ignore[arg-type]
    Step.kernel = changed(call, version="1")
    with pytest.raises(ArtifactError, match=r"plan\.weft: a convolution's engine is one of cuDNN 1, here is 91900"):
        cuda_artifact._check_algorithms(Path("plan.weft"), Only)  # type: ignore[arg-type]
    monkeypatch.setattr(cuda_artifact, "engines", lambda: Declined("no cuDNN: gone"))
    with pytest.raises(ArtifactError, match="name engines of cuDNN, but no cuDNN"):
        cuda_artifact._check_algorithms(Path("plan.weft"), Only)  # type: ignore[arg-type]
