"""Programs: signature, constants, specialisation, effects and refusals."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.frontends.torch.support import Wrapped, evaluate
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import weft
from weft.errors import DataDependentError, UnsupportedError
from weft.frontends.torch import import_exported, import_exported_program, import_fx, import_fx_program
from weft.ir.prims import Prim
from weft.ir.types import DType


def export(module: Callable[..., Any], *inputs: Any, **kwargs: Any) -> Any:
    return torch.export.export(module if isinstance(module, nn.Module) else Wrapped(module), inputs, **kwargs)


def test_parameters_are_constants_without_a_copy() -> None:
    module = nn.Linear(4, 3)
    graph = import_exported(export(module, torch.ones(2, 4))).graph
    assert len(graph.inputs) == 1
    data = next(d for d in graph.constants.values() if d.shape == (3, 4))
    assert np.shares_memory(data, module.weight.detach().numpy())
    assert not data.flags.writeable


def test_bf16_parameters_are_exact_float32() -> None:
    module = nn.Linear(4, 3).bfloat16()
    graph = import_exported(export(module, torch.ones(2, 4, dtype=torch.bfloat16))).graph
    kinds = {graph.type_of(i).dtype for i, n in enumerate(graph.nodes) if n.prim is Prim.CONSTANT and n.type.rank}
    assert kinds == {DType.BF16}
    assert any(np.array_equal(d, module.weight.detach().float().numpy()) for d in graph.constants.values())


def test_parameters_that_nobody_reads_are_left_out() -> None:
    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.big = nn.Parameter(torch.ones(1000))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    graph = import_exported(export(Unused(), torch.ones(2))).graph
    assert all(d.size == 1 for d in graph.constants.values())


def test_names_types_and_origins() -> None:
    imported = import_exported(export(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), torch.ones(1, 3, 8, 8)))
    assert imported.graph.input_names == ("input",)
    rules = [o.rule for o in imported.graph.origins if o.rule]
    assert "conv" in rules
    assert "relu" in rules
    conv = next(o for o in imported.graph.origins if o.rule == "conv")
    assert "aten.conv" in conv.source
    assert re.fullmatch(r"[\w.]+:\d+", conv.location)
    assert dict(conv.params)["strides"] == (1, 1)
    assert imported.operators == 2


def test_unused_inputs_stay_in_the_signature() -> None:
    program = import_exported_program(export(lambda x, y: x * 2, torch.ones(2), torch.ones(3)))
    assert [program.imported.graph.type_of(i).shape for i in program.imported.graph.inputs] == [(2,), (3,)]
    assert program.arguments == (0, 1)


def test_numbers_among_the_arguments_are_fixed() -> None:
    program = import_exported_program(export(lambda x, n: x * n, torch.ones(2), 3))
    assert program.arguments == (0,)
    (out,) = evaluate(program.imported.graph, [torch.ones(2)])
    assert out.tolist() == [3.0, 3.0]


def test_results_that_are_no_tensors() -> None:
    program = import_exported_program(export(lambda x: (x + 1, None, x.shape[0]), torch.ones(2)))
    assert [(r.value, r.static) for r in program.results] == [(0, None), (-1, None), (-1, 2)]


def test_a_dynamic_batch_takes_the_size_of_the_example_and_says_so() -> None:
    batch = torch.export.Dim("batch", min=2, max=64)
    program = torch.export.export(Net(), (torch.ones(4, 6),), dynamic_shapes={"x": {0: batch}})
    imported = import_exported(program)
    assert [imported.graph.type_of(i).shape for i in imported.graph.inputs] == [(4, 6)]
    assert len(imported.notes) == 1
    assert imported.notes[0].endswith("was set to 4")
    (out,) = evaluate(imported.graph, [torch.ones(4, 6)])
    assert out.shape == (12, 2)
    assert out[0, 0].item() == 5.0


class Net(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(x.shape[0] * 3, -1) + x.shape[0]


def test_evaluation_mode_dropout_is_nothing() -> None:
    graph = import_exported(export(nn.Dropout(0.5).eval(), torch.ones(3))).graph
    assert [n.prim for n in graph.nodes] == [Prim.INPUT]


def test_an_fx_graph_from_aot() -> None:
    gm = make_fx(lambda x, w: (torch.relu(x @ w),), tracing_mode="fake")(torch.ones(2, 3), torch.ones(3, 4))
    imported = import_fx(gm, (torch.ones(2, 3), torch.ones(3, 4)))
    (out,) = evaluate(imported.graph, [torch.ones(2, 3), torch.ones(3, 4)])
    assert out.shape == (2, 4)
    assert imported.operators == 2


def test_an_untraced_fx_graph_is_traced_first() -> None:
    gm = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(3, 4), nn.SiLU()))
    x = torch.randn(2, 3)
    imported = import_fx(gm, (x,))
    (out,) = evaluate(imported.graph, [x])
    torch.testing.assert_close(out, gm(x))
    assert "silu" in {o.rule for o in imported.graph.origins}


def test_copies_into_arguments_are_listed() -> None:
    def step(x: Any, y: Any) -> Any:
        z = x + y
        torch.ops.aten.copy_.default(x, z)
        return (z * 2,)

    gm = make_fx(step, tracing_mode="fake")(torch.ones(3), torch.ones(3))
    program = import_fx_program(gm, (torch.ones(3), torch.ones(3)))
    assert program.mutations == ((0, 1),)
    with pytest.raises(UnsupportedError, match="writes into its arguments"):
        import_fx(gm, (torch.ones(3), torch.ones(3)))


def test_strides_of_results_are_recorded() -> None:
    gm = make_fx(lambda x: (x.permute(1, 0) * 1,), tracing_mode="fake")(torch.ones(2, 3))
    assert import_fx_program(gm, (torch.ones(2, 3),)).results[0].strides == (1, 3)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (torch.fft.fft, "a result is a complex tensor"),
        (lambda x: torch.rand_like(x) + x, "random numbers"),
        (lambda x: torch.nn.functional.dropout(x, 0.5, True), "random numbers"),
        (lambda x: x.to(torch.float8_e4m3fnuz).float(), "element type torch.float8"),
    ],
    ids=["fft", "rand", "dropout", "float8"],
)
def test_refused_graphs_are_named(function: Callable[..., Any], reason: str) -> None:
    with pytest.raises(UnsupportedError, match=reason) as error:
        import_exported(export(function, torch.ones(4)))
    assert error.value.code == "W201"


@pytest.mark.parametrize(
    ("function", "op"),
    [
        (lambda x: x.nonzero() * 2, "aten.nonzero.default"),
        (lambda x: torch.where(x > 0)[0], "aten.nonzero.default"),
        (lambda x: x.masked_select(x > 0), "aten.masked_select.default"),
        (lambda x: x[x > 0] + 1, "aten.index.Tensor"),
        (torch.unique, "aten._unique2.default"),
        (lambda x: torch.repeat_interleave(x.long()), "aten.repeat_interleave.Tensor"),
        (lambda x: torch.bincount(x.long()), "aten.bincount.default"),
    ],
    ids=["nonzero", "where", "masked_select", "mask", "unique", "repeat_interleave", "bincount"],
)
def test_a_size_that_depends_on_data_is_refused_at_its_place(function: Callable[..., Any], op: str) -> None:
    """Some said `torch.SymInt`, and nothing of where."""

    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return function(x)

    with pytest.raises(DataDependentError, match="depends on data") as error:
        weft.compile(Model().eval(), torch.ones(4), options=weft.Options(budget_s=0, in_parts=False))
    assert error.value.details["op"] == op and error.value.code == "W201"
    assert "test_importer.py:" in error.value.where
    assert "torch.where" in str(error.value) and str(error.value).count("\n") == 1


def test_a_buffer_that_is_written_is_refused() -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.n: torch.Tensor
            self.register_buffer("n", torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.n.add_(1)
            return x + self.n

    with pytest.raises(UnsupportedError, match="BUFFER_MUTATION"):
        import_exported(export(Counter(), torch.ones(1)))


def test_strided_views_of_memory_are_refused() -> None:
    gm = make_fx(lambda x: (torch.as_strided(x.t(), (2, 2), (1, 2)),), tracing_mode="fake")(torch.ones(2, 3))
    with pytest.raises(UnsupportedError, match="reads memory"):
        import_fx(gm, (torch.ones(2, 3),))


def test_another_device_is_refused() -> None:
    gm = make_fx(lambda x: (x + 1,), tracing_mode="fake")(torch.ones(2))
    with pytest.raises(UnsupportedError, match="compiled for cuda"):
        import_fx(gm, (torch.ones(2),), device="cuda")


def test_a_foreign_operator_is_refused() -> None:
    gm = make_fx(lambda x: (torch.ops.mkldnn._is_mkldnn_bf16_supported(), x)[1:], tracing_mode="fake")(torch.ones(2))
    assert import_fx(gm, (torch.ones(2),)).operators == 0
