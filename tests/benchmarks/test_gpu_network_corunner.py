"""Networks beside models: ways, cases, what a row says, arguments, the model of four layers. No GPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from benchmarks.co_runner.beside import Served
from benchmarks.co_runner.networks import (
    BEST_EFFORT,
    LATENCY_CRITICAL,
    WAYS,
    Network,
    NetworkWay,
    asked,
    in_slices,
    row,
    with_network,
)
from benchmarks.co_runner.rows import Sample
from benchmarks.gpu_network_corunner import main
from benchmarks.models import FURTHER, NETWORKS, load
from benchmarks.models.llama import Llama
from tests.runtime.fake_cuda import FakeCuda, install
from tests.runtime.plans import library_plan

from weft.ir.graph import GraphBuilder
from weft.ir.prims import Prim
from weft.ir.types import DType, TensorType
from weft.runtime.cuda_executable import CudaExecutable
from weft.runtime.executable import Linked


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_way_is_what_its_text_says(way: NetworkWay) -> None:
    assert NetworkWay.of(str(way)) == way
    assert way.plain == (way.kind != "stages")


def test_ways_that_are_written_by_hand() -> None:
    assert NetworkWay.of("stages-ctas2-duty10") == NetworkWay("stages", 2, 10)
    assert NetworkWay.of("stages-duty10") == NetworkWay("stages", 0, 10)
    assert NetworkWay.of("green20") == NetworkWay("green", 20)


@pytest.mark.parametrize(
    "text",
    ["", "stage", "stages-ctas0", "stages-duty0", "stages-duty101", "priority2", "green", "slices", "green0", "ctas1"],
)
def test_what_is_no_way(text: str) -> None:
    with pytest.raises(ValueError, match=r"neither like|at least one CTA|slices2 are of"):
        NetworkWay.of(text)


def test_all_that_the_tables_want_is_asked_for() -> None:
    every = asked([], WAYS)
    assert len(every) == 12 and all(w == list(WAYS) for w in every.values())
    assert {x[:2] for x in every} == set(LATENCY_CRITICAL) and {x[2:] for x in every} == set(BEST_EFFORT)
    assert list(asked(["resnet50/b1/bert_base"], WAYS)) == [("resnet50", 1, "bert_base", 8)]
    assert list(asked(["b1"], WAYS)) == [x for x in every if x[1] == 1], "not b16"
    assert set(map(tuple, asked(["priority"], WAYS).values())) == {(NetworkWay.of("priority"),)}
    assert asked(["nothing"], WAYS) == {}
    assert {name for name, _ in (*LATENCY_CRITICAL, *BEST_EFFORT)} <= NETWORKS.keys() | FURTHER.keys()


def sample(us: float, work: float = 0.0) -> Sample:
    return Sample([us] * 200, us * 200, work)


def test_rates_are_over_the_same_plan_alone() -> None:
    # 10 inferences in 200 queries of 125 us, each of which takes 500 us alone
    made = row(NetworkWay.of("stages"), sample(125.0, 10.0), sample(100.0), sample(80.0), 500.0)
    assert made["be"] == 0.2 and made["be_per_s"] == 400.0
    assert made["lc_p50"] == made["lc_p99"] == 1.25 and made["lc_p50_plain"] == 1.5625
    assert made["added"] == 1.0 and made["added_plain"] == 0.84 and made["price"] == 1.25
    peer = row(NetworkWay.of("priority"), sample(125.0, 10.0), sample(100.0), sample(80.0), 500.0)
    assert peer["lc_p50"] == 1.5625 and peer["added"] == peer["added_plain"] == 0.84


def test_stages_are_shares_of_an_inference() -> None:
    network = Network.__new__(Network)
    network.stage_us = [10.0, 30.0, 60.0]
    network._before = [0.0, 0.1, 0.4]
    assert network.inference_us == 100.0
    assert [network.done(k) for k in (0, 1, 2, 3, 7)] == pytest.approx([0, 0.1, 0.4, 1.0, 2.1])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--only", "vgg16"], "no case is named so"),
        (["--ways", "mps"], "invalid _ways value"),
        (["--dry", "--rounds", "0"], "--rounds: at least 1"),
        (["--dry", "--stage-kernels", "0"], "--stage-kernels: at least 1"),
        (["--dry", "--registers", "70000"], "70000 registers of 65536"),
        (["--dry", "--ctas", "0"], "at least one CTA"),
        ([], "one of --prepare, --plans and --dry"),
        (["--prepare", "a", "--plans", "b"], "one of --prepare, --plans and --dry"),
    ],
)
def test_arguments_that_cannot_be(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2 and said in capsys.readouterr().err


def test_what_would_be_measured(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--dry", "--only", "resnet50/b1/bert_base", "--ways", "stages-ctas1,priority"])
    shares, case = capsys.readouterr().out.splitlines()
    assert shares.startswith("model: registers=49152,") and "network: registers=16384," in shares
    assert case == "resnet50/b1/bert_base/8: stages-ctas1, priority"


# -- rounds, on a stand-in for the GPU


class Event:
    """Happens when it is recorded; one of the queries is seen to when the network has gone on meanwhile."""

    stages: ClassVar[Callable[[], int] | None] = None
    """Of the network that were launched."""

    def __init__(self, *, enable_timing: bool = False, **_: object) -> None:
        self.at, self.of_query, self.since = 0.0, enable_timing, -1

    def record(self, stream: object = None) -> None:
        self.at = time.perf_counter()

    def query(self) -> bool:
        if self.of_query and Event.stages is not None:
            if self.since < 0:
                self.since = Event.stages()
            return Event.stages() > self.since + 6  # more than are queued
        return self.at > 0

    def synchronize(self) -> None:
        assert self.at > 0

    def elapsed_time(self, other: Event) -> float:
        return (other.at - self.at) * 1e3


def executable(depth: int, stage_kernels: int = 0) -> CudaExecutable:
    b = GraphBuilder()
    node = b.input(TensorType(DType.F32, (4, 8)))
    for _ in range(depth):
        node = b.apply(Prim.TANH, node)
    graph = b.build([node])
    facts = {"gpu": "NVIDIA H200", "capability": "90"}
    linked = Linked(graph, library_plan(graph), {}, None, None, 0, facts)
    return CudaExecutable(linked, device=torch.device("cpu"), stage_kernels=stage_kernels)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    return install(monkeypatch)


def batches() -> list[tuple[torch.Tensor, ...]]:
    return [(torch.randn(4, 8),) for _ in range(2)]


@pytest.mark.parametrize("duty", [100, 40])
def test_a_round_beside_a_network(cuda: FakeCuda, duty: int, monkeypatch: pytest.MonkeyPatch) -> None:
    served = Served(executable(3), cuda.current, [torch.randn(4, 8)])  # type: ignore[arg-type]
    network = Network(executable(5, 2), cuda.new_stream(), batches(), 4)  # type: ignore[arg-type]
    assert len(network.stage_us) == 3 and len(set(network.wanted)) == 2
    assert network.back_to_back_us(3) > 0 and network.inference_us > 0
    monkeypatch.setattr(Event, "stages", lambda: sum(g.replays for g in network.executable._graphs))  # type: ignore[attr-defined]
    found, stop_s = with_network(served, network, 30, duty)
    assert len(found.us) == 30 and found.work > 0 and 0 <= stop_s < 5


def test_wrong_results_of_a_network_fail_its_round(cuda: FakeCuda) -> None:
    served = Served(executable(3), cuda.current, [torch.randn(4, 8)])  # type: ignore[arg-type]
    network = Network(executable(5, 2), cuda.new_stream(), batches(), 4)  # type: ignore[arg-type]
    network.wanted = network.wanted[::-1]
    with pytest.raises(ValueError, match="others than alone"):
        with_network(served, network, 10)
    with pytest.raises(ValueError, match="others than alone"):
        in_slices(served, network, 10, 10.0, 5.0)


def test_slices_hold_whole_inferences(cuda: FakeCuda) -> None:
    served = Served(executable(3), cuda.current, [torch.randn(4, 8)])  # type: ignore[arg-type]
    network = Network(executable(5), cuda.new_stream(), batches(), 4)  # type: ignore[arg-type]
    network.stage_us = [40.0]
    found = in_slices(served, network, 21, slice_us=100.0, query_us=20.0)
    assert len(found.us) == 21 and found.work == 4 * 2, "five queries, then two inferences"


# -- the decoder


def small() -> tuple[torch.nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return Llama(width=64, depth=2, heads=4, hidden=96).eval(), torch.randint(1000, (3, 128))


def test_the_decoder_has_the_size_it_says() -> None:
    with torch.device("meta"):
        module = FURTHER["llama_4"].build()
    assert sum(p.numel() for p in module.parameters()) == FURTHER["llama_4"].num_parameters


def test_a_token_reads_only_those_before_it() -> None:
    module, ids = small()
    other = ids.clone()
    other[:, 64:] = (other[:, 64:] + 1) % 1000
    with torch.no_grad():
        one, two = (module.layers(module.words(x)) for x in (ids, other))  # type: ignore[operator]
    torch.testing.assert_close(one[:, :64], two[:, :64])
    assert not torch.allclose(one[:, 64:], two[:, 64:], atol=0.01)


def test_positions_are_rotations() -> None:
    """Equal to complex multiplication, and scores depend on the distance alone."""
    module, _ = small()
    attention = module.layers[0].attention  # type: ignore[index, union-attr]
    x = torch.randn(1, 1, 1, 16).expand(1, 1, 128, 16)
    turned = attention._turned(x)
    angles = torch.outer(torch.arange(128.0), 10_000.0 ** (-torch.arange(0, 16, 2) / 16))
    wanted = torch.complex(x[..., :8], x[..., 8:]) * torch.polar(torch.ones_like(angles), angles)
    torch.testing.assert_close(turned, torch.cat([wanted.real, wanted.imag], -1))
    scores = (turned @ turned.transpose(-2, -1))[0, 0]
    torch.testing.assert_close(scores[3, 10], scores[90, 97], rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_the_decoder_has_outputs_of_order_one() -> None:
    module, inputs = load("llama_4", 2)
    with torch.no_grad():
        found = module(*inputs)
    assert tuple(found.shape) == (2, 32_000) and 0.1 < found.std().item() < 10
    assert (found[0] - found[1]).std() > 0.1


def test_nothing_is_written_by_a_dry_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    main(["--dry", "--out", "x.jsonl"])
    assert list(tmp_path.iterdir()) == []
