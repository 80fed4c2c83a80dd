"""The library plan on a GPU, counted without one: as few calls as the framework makes, images in one format."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from weft.device.cuda.facts import profile
from weft.frontends.torch import import_exported
from weft.generate.library.algorithm import CONVOLUTION
from weft.ir.graph import Graph, GraphBuilder
from weft.ir.passes import clean_up
from weft.ir.prims import Prim
from weft.ir.types import DType, TensorType
from weft.kernels.candidate import Candidate, Kind, Problem
from weft.kernels.formats import Format
from weft.kernels.plan import Plan
from weft.kernels.source import CallStep, LibraryCall, Schedule
from weft.options import Options
from weft.orchestrate.alternatives import find_alternatives
from weft.orchestrate.enumerate import enumerate_candidates
from weft.orchestrate.extract import Extracted
from weft.pipeline import choose
from weft.pipeline.choose import Ranked
from weft.pipeline.problems import Task, collect
from weft.pipeline.search.prices import Known, priced_offers
from weft.pipeline.setting import Setting, limits_of
from weft.pipeline.untuned import plan_in
from weft.platform.cuda.platform import Cuda

VIEWS = ("permute", "reshape", "expand", "slice")


def planned(module: nn.Module, *shape: int, dtype: torch.dtype = torch.float16) -> tuple[Graph, Plan]:
    """The library plan of a module on an H200."""
    with torch.no_grad():
        x = torch.zeros(shape, dtype=dtype)
        imported = import_exported(torch.export.export(module.eval().to(dtype), (x,)))
    options, facts = Options(device="cuda", budget_s=0), profile("h200")
    found = find_alternatives(clean_up(imported.graph, strict=False).graph, strict=False, on_gpu=True)
    candidates = enumerate_candidates(found.graph, limits_of(options, facts), found, stop=lambda: True).candidates
    setting = Setting(options, Cuda(facts))
    return found.graph, plan_in("library", collect(found.graph, candidates, found, facts), found, setting)


def called(plan: Plan) -> Counter[str]:
    """Operators by name; a step that is nothing but a view or a change of format is a `copy`."""
    found: Counter[str] = Counter()
    for step in plan.steps:
        assert isinstance(step.kernel, LibraryCall)
        names = [s.target.split(".")[1] for s in step.kernel.run]
        found.update([n for n in names if n not in VIEWS] or ["copy"])
    return found


def conversions(plan: Plan) -> int:
    return sum(s.kind is Kind.CONVERT for s in plan.steps)


class Attention(nn.Module):
    """A block as networks write it: products, a factor, softmax."""

    def __init__(self, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.scale = heads, (width // heads) ** -0.5
        self.norm, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        q, k, v = (f(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        mixed = torch.softmax(q @ k.transpose(-2, -1) * self.scale, -1) @ v
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        found: torch.Tensor = x + self.down(nn.functional.gelu(self.up(self.after(x))))
        return found


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_transformers_block(dtype: torch.dtype) -> None:
    _, plan = planned(Attention(), 1, 24, 64, dtype=dtype)
    assert called(plan) == {
        "native_layer_norm": 2, "addmm": 6, "matmul": 2, "mul": 1, "_softmax": 1, "add": 2, "gelu": 1,
    }  # fmt: skip


def test_a_factor_that_halves_do_not_hold_is_one_call() -> None:
    _, plan = planned(Attention(96, 4), 1, 24, 96)
    assert called(plan)["mul"] == 1 and not called(plan)["_to_copy"]


def test_f32_is_called_alike() -> None:
    _, plan = planned(Attention(), 1, 24, 64, dtype=torch.float32)
    assert called(plan)["addmm"] == 6 and len(plan.steps) == 15


def residual_block() -> nn.Module:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolutions = nn.ModuleList(nn.Conv2d(32, 32, 3, padding=1, bias=False) for _ in range(4))
            self.norms = nn.ModuleList(nn.BatchNorm2d(32) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for k in (0, 2):
                y = self.norms[k](self.convolutions[k](x)).relu()
                x = (self.norms[k + 1](self.convolutions[k + 1](y)) + x).relu()
            return x

    return Block()


def test_a_residual_block_lies_channels_last_throughout() -> None:
    graph, plan = planned(residual_block(), 4, 32, 56, 56)
    assert called(plan) == {"cudnn_convolution_relu": 2, "cudnn_convolution_add_relu": 2, "copy": 2}
    assert conversions(plan) == 2, "the input and the result, which are row-major"
    inside = [f for s in plan.steps for n, f in s.outputs if n not in graph.outputs]
    assert set(inside) == {Format.LAST}


class Style(nn.Module):
    """Reflected pads and instance normalisation, which the framework makes row-major."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(
            nn.Conv2d(a, b, 3, padding=1, padding_mode="reflect") for a, b in ((3, 32), (32, 32), (32, 3))
        )
        self.norms = nn.ModuleList(nn.InstanceNorm2d(32, affine=True) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for convolution, norm in zip(self.convolutions[:2], self.norms, strict=True):
            x = norm(convolution(x)).relu()
        last: torch.Tensor = self.convolutions[2](x)
        return last


@pytest.mark.parametrize("batch", [1, 16])
def test_what_the_framework_makes_row_major_stays_so(batch: int) -> None:
    _, plan = planned(Style(), batch, 3, 64, 64)
    assert conversions(plan) == 0
    assert {f for s in plan.steps for _, f in s.outputs} == {Format.ROW}
    assert called(plan)["instance_norm"] == 2 and not called(plan)["copy"]


class Tokens(nn.Module):
    """An image of tokens: depthwise convolution between products, then scaled up."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(32, 64), nn.LayerNorm(64)
        self.depthwise = nn.Conv2d(64, 64, 3, padding=1, groups=64)
        self.head = nn.Conv2d(64, 8, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        image = self.up(x).transpose(1, 2).unflatten(2, (16, 16))
        rows = nn.functional.gelu(self.depthwise(image).flatten(2).transpose(1, 2))
        image = self.norm(rows).transpose(1, 2).unflatten(2, (16, 16))
        wide = nn.functional.interpolate(image, scale_factor=2, mode="bilinear", align_corners=False)
        result: torch.Tensor = self.head(wide).relu()
        return result.amax((2, 3))


def test_rows_of_channels_are_read_as_images_where_they_lie() -> None:
    _, plan = planned(Tokens(), 4, 256, 32)
    assert called(plan) == {
        "addmm": 1, "convolution": 1, "add": 1, "gelu": 1, "native_layer_norm": 1, "upsample_bilinear2d": 1,
        "cudnn_convolution_relu": 1, "amax": 1,
    }  # fmt: skip


class Pools(nn.Module):
    """Pools of several sizes side by side, between convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Sequential(*(m for _ in range(4) for m in (nn.Conv2d(64, 64, 3, padding=1), nn.ReLU())))
        self.after = nn.Sequential(*(m for _ in range(4) for m in (nn.Conv2d(256, 256, 3, padding=1), nn.ReLU())))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x)
        pools = [nn.functional.max_pool2d(x, k, 1, k // 2) for k in (5, 9, 13)]
        result: torch.Tensor = self.after(torch.cat([x, *pools], 1))
        return result


def test_large_windows_are_row_major_and_nothing_else_is() -> None:
    _, plan = planned(Pools(), 1, 64, 13, 13)
    formats: dict[str, set[Format]] = {}
    for step in plan.steps:
        assert isinstance(step.kernel, LibraryCall)
        for call in step.kernel.run:
            formats.setdefault(call.target.split(".")[1], set()).add(step.inputs[0][1])
    assert formats["max_pool2d"] == {Format.ROW}
    assert formats["cudnn_convolution_relu"] == {Format.LAST}


def test_an_algorithm_by_number_stands_only_where_nothing_else_does() -> None:
    b = GraphBuilder()
    problem = Problem(
        b.build([b.apply(Prim.EXP, b.input(TensorType(DType.F16, (4,))))]), "p", (Format.ROW,), (Format.ROW,)
    )
    own = LibraryCall(Schedule("library", (("form", "operator"),)), (), (), ())
    numbered = LibraryCall(Schedule("library", (("form", "engine"),)), (), (CallStep(CONVOLUTION, ()),), ())

    def left(kind: Kind, *calls: LibraryCall) -> list[LibraryCall] | None:
        candidate = Candidate(1, (), (0,), kind)
        task = Task(problem, ((candidate, Extracted(problem, (), (0,))),), 1.0, 1.0)
        ranked = Ranked(task, tuple((c.schedule, c) for c in calls), (1.0,) * len(calls), measured=False, rejected=0)
        found = choose._of_the_framework(ranked)
        return None if found is None else [c for _, c in found.kernels if isinstance(c, LibraryCall)]

    assert left(Kind.ORIGIN, numbered, own) == [own]
    assert left(Kind.ORIGIN, numbered) is None
    assert left(Kind.SINGLE, numbered) == [numbered]


def with_and_without(make: Callable[[], nn.Module], *shape: int) -> list[tuple[object, ...]]:
    with torch.no_grad():
        imported = import_exported(torch.export.export(make().eval().half(), (torch.zeros(shape).half(),)))
    found = find_alternatives(clean_up(imported.graph, strict=False).graph, strict=False, on_gpu=True)
    facts, options = profile("h200"), Options(device="cuda")
    seen: list[tuple[object, ...]] = []
    for limits in (limits_of(options, facts), replace(limits_of(options, facts), library_calls=False)):
        candidates = enumerate_candidates(found.graph, limits, found).candidates
        problems = collect(found.graph, candidates, found, facts)
        offers, _ = priced_offers(problems, Known())
        seen.append(tuple(sorted((o.candidate.members, o.candidate.outputs, o.cost_us) for o in offers)))
    return seen


def test_the_search_is_offered_what_it_was() -> None:
    mine, before = with_and_without(Attention, 1, 24, 64)
    assert mine == before
