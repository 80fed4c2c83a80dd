"""Models that `torch.export` does not take: each gives an error of Weft with a code, a place and a way on."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import weft
from weft.api import flat
from weft.errors import ModelRaisesError, NotTracedError, WeftError
from weft.frontends.torch.refusal import BACKEND, place, refused

NOW = weft.Options(budget_s=0.0, in_parts=False)
Model = tuple[nn.Module, tuple[Any, ...]]
HERE = "test_refusals.py:"


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)


class Rescaled(nn.Module):
    """Divides its weights in its first call, as RWKV does."""

    def __init__(self) -> None:
        super().__init__()
        self.line, self.rescaled = nn.Linear(4, 4), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.rescaled:
            with torch.no_grad():
                self.line.weight.div_(2)
            self.rescaled = True
        y: torch.Tensor = self.line(x)
        return y


def of(forward: Callable[..., Any], *inputs: Any) -> Model:
    forward.__code__ = forward.__code__.replace(co_name="forward")  # torch begins its traces at a frame of that name
    made: nn.Module = type("Net", (Base,), {"forward": forward})()
    return made.eval(), inputs or (torch.ones(2, 4),)


def quiet(make: Callable[[], Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of what it will no longer have
        return make()


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 8, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([3, 2]), batch_first=True)
        return nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True)[0]


class Counter(Base):
    def __init__(self) -> None:
        super().__init__()
        self.n: torch.Tensor
        self.register_buffer("n", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.n.add_(x.mean(0))
        return self.linear(x) + self.n


def branch(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.linear(x) if x.sum() > 0 else x


def until(self: Any, x: torch.Tensor) -> torch.Tensor:
    while x.norm() > 1:
        x = self.linear(x) / 4
    return x


def raises(self: Any, x: torch.Tensor) -> torch.Tensor:
    raise ValueError("five columns are wanted")


def asserts(self: Any, x: torch.Tensor) -> torch.Tensor:
    assert x.shape[1] == 5, "five columns"
    return x


def gradient(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = x.clone().requires_grad_()
    return torch.autograd.grad(self.linear(y).sum(), y)[0]


def in_place(self: Any, x: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    return self.linear(x)


def nested(self: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.nested.to_padded_tensor(torch.nested.as_nested_tensor([x[0], x[1]], layout=torch.jagged), 0.0)


def quantised() -> Model:
    linear = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()
    return quiet(lambda: torch.ao.quantization.quantize_dynamic(linear, {nn.Linear})), (torch.ones(2, 4),)


def sparse_weight() -> Model:
    model, inputs = of(lambda self, x: self.weight @ x.t())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.weight = torch.eye(4).to_sparse_csr()
    return model, inputs


def unknown_shapes() -> Model:
    @torch.library.custom_op("weft_tests::no_fake", mutates_args=())
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    return of(lambda self, x: double(self.linear(x)))


def ctc(self: Any, x: torch.Tensor) -> torch.Tensor:
    lengths = torch.tensor([5, 5]), torch.tensor([2, 2])
    return F.ctc_loss(self.linear(x).log_softmax(-1), torch.tensor([[1, 2], [2, 3]]), *lengths)


MODELS: dict[str, tuple[Callable[[], Model], str, str, str]] = {
    # what is made, code, a part of the place, a part of the advice
    "a branch on values": (lambda: of(branch), "W207", HERE, BACKEND),
    "a loop on values": (lambda: of(until), "W207", HERE, BACKEND),
    "item as a size": (lambda: of(lambda self, x: x[: int(x[0, 0].item())]), "W207", HERE, "torch.where"),
    "item as a factor": (lambda: of(lambda self, x: x * x.max().item()), "W201", HERE, ".item()"),
    "tolist": (lambda: of(lambda self, x: x * x[0].tolist()[0]), "W201", HERE, ".tolist()"),
    "float that is printed": (lambda: of(lambda self, x: f"{float(x.sum())}" and x), "W207", HERE, BACKEND),
    "numpy": (lambda: of(lambda self, x: x + torch.from_numpy(x.numpy())), "W207", HERE, BACKEND),
    "rows by a mask": (lambda: of(lambda self, x: x[x[:, 0] > 0]), "W201", HERE, "torch.where"),
    "unique": (lambda: of(lambda self, x: torch.unique(x)), "W201", HERE, "mask"),
    "packed LSTM": (lambda: (Packed().eval(), (torch.ones(2, 3, 4),)), "W207", "Packed.lstm (" + HERE, "padded"),
    "ctc_loss": (lambda: of(ctc, torch.ones(5, 2, 4)), "W207", HERE, "loss outside"),
    "dynamic int8": (quantised, "W207", "Sequential", BACKEND),
    "nested inside": (lambda: of(nested, torch.ones(2, 3, 4)), "W207", HERE, "pad"),
    "sparse weight": (sparse_weight, "W207", HERE, "to_dense"),
    "sparse inside": (lambda: of(lambda self, x: torch.sparse.mm(x.to_sparse(), x.t())), "W201", HERE, BACKEND),
    "complex of 16 bits": (
        lambda: of(lambda self, x: torch.view_as_complex(x[:, :2].half()).real), "W201", HERE, BACKEND,
    ),
    "cond": (lambda: of(lambda self, x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))), "W201", HERE, BACKEND),
    "a Cholesky factor": (lambda: of(lambda self, x: torch.linalg.cholesky(x), torch.eye(2)), "W201", HERE, BACKEND),
    "operator without shapes": (unknown_shapes, "W207", HERE, "register_fake"),
    "TorchScript": (
        lambda: (quiet(lambda: torch.jit.script(nn.Linear(4, 4))), (torch.ones(2, 4),)), "W207", "", "ONNX",
    ),
    "a gradient": (lambda: of(gradient), "W207", HERE, "torch.func.grad"),
    "an input is written": (lambda: of(in_place), "W201", "Net", "new value"),
    "a parameter is written": (lambda: (Rescaled().eval(), (torch.ones(2, 4),)), "W201", "Rescaled", "model once"),
    "a buffer is written": (lambda: (Counter().eval(), (torch.ones(2, 4),)), "W201", "Counter", "new value"),
    "random numbers": (lambda: of(lambda self, x: x + torch.randn(2, 4)), "W201", HERE, "give them as an input"),
    "dropout in training": (lambda: (nn.Sequential(nn.Dropout()), (torch.ones(2),)), "W201", "module 0", ".eval()"),
    "norm in training": (lambda: (nn.BatchNorm1d(4), (torch.ones(2, 4),)), "W201", "BatchNorm1d", ".eval()"),
    "attention in training": (
        lambda: (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (torch.ones(2, 3, 8),)),
        "W201", "module self_attn", ".eval()",
    ),
    "nothing is returned": (lambda: of(lambda self, x: None), "W100", "Net", "return"),
    "another type": (lambda: of(lambda self, x: self.linear(x), torch.ones(2, 4).double()), "W201", HERE, "type"),
    "it raises": (lambda: of(raises), "W116", f"Net ({HERE}", "correct the model"),
    "it asserts": (lambda: of(asserts), "W116", HERE, "correct the model"),
    "shapes that do not fit": (
        lambda: of(lambda self, x: self.linear(x), torch.ones(2, 5)), "W116", f"Net.linear ({HERE}", "inputs",
    ),
    "an index outside": (lambda: of(lambda self, x: x[7]), "W116", HERE, "inputs"),
    "endless recursion": (lambda: of(lambda self, x: self.forward(x)), "W116", HERE, "correct the model"),
    "no forward": (lambda: (nn.ModuleList([nn.Linear(4, 4)]), (torch.ones(2, 4),)), "W116", "ModuleList", "correct"),
    "not initialised": (lambda: (nn.LazyLinear(4).eval(), (torch.ones(2, 4),)), "W100", "LazyLinear", "once"),
    "no weights": (lambda: (nn.Linear(4, 4, device="meta"), (torch.ones(2, 4),)), "W100", "Linear", "to_empty"),
    "an argument is missing": (lambda: of(lambda self, x, y: x + y), "W001", "Net", ""),
    "an argument too many": (lambda: of(lambda self, x: x, torch.ones(2), torch.ones(2)), "W001", "Net", ""),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:The tensor attribute:UserWarning")
@pytest.mark.filterwarnings("ignore:ComplexHalf support:UserWarning")
@pytest.mark.filterwarnings("ignore:Weft. forward changes:UserWarning")
@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_cannot_be_compiled_says_where_and_what_to_do(name: str) -> None:
    make, code, where, advice = MODELS[name]
    model, inputs = make()
    with pytest.raises(WeftError) as error:
        weft.compile(model, inputs, options=NOW)
    text = str(error.value)
    assert error.value.code == code and where in error.value.where and advice in text.partition("\n")[2], text
    assert text.count("\n") == 1 and "/" not in error.value.where and len(text) < 900
    assert not isinstance(error.value, NotTracedError) or error.value.__cause__ is not None or name == "TorchScript"


ODD_INPUTS: dict[str, Callable[[], Any]] = {
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    "sparse": lambda: torch.eye(4).to_sparse(),
    "quantised": lambda: quiet(lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)),
    "meta": lambda: torch.empty(2, device="meta"),
}


@pytest.mark.parametrize("name", ODD_INPUTS)
def test_an_input_that_no_plan_takes_is_refused_with_what_to_give(name: str) -> None:
    model, _ = of(lambda self, x: x)
    with pytest.raises(weft.UserError, match=rf"item 0 is .*{name}.*: (give|pad)") as error:
        weft.compile(model, (ODD_INPUTS[name](),), options=NOW)
    assert error.value.code == "W001"


@pytest.mark.parametrize(
    "name", ["a branch on values", "packed LSTM", "dynamic int8", "sparse weight", "a Cholesky factor"]
)
def test_the_way_on_that_errors_name_is_one(name: str) -> None:
    """`torch.compile` with Weft splits round what cannot be traced."""
    model, inputs = MODELS[name][0]()
    torch._dynamo.reset()
    now: dict[str, Any] = {"budget_s": 0.0}
    split = torch.compile(model, backend="weft", options=now)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for mine, want in zip(flat(split(*inputs)), flat(model(*inputs)), strict=True):
            torch.testing.assert_close(mine, want)


def test_a_model_that_writes_parameters_once_is_compiled_behind_its_first_call() -> None:
    model, x = Rescaled().eval(), torch.ones(2, 4)
    with torch.no_grad():
        want = model(x)
        compiled = weft.compile(model, (x,), options=NOW)
        torch.testing.assert_close(flat(compiled(x)), [want])


def test_an_exception_that_no_row_knows_is_told_too() -> None:
    model, inputs = of(lambda self, x: x)
    error = refused(OSError("torch ran out of\nwords"), model, inputs, {}, "Net")
    assert isinstance(error, NotTracedError) and "OSError: torch ran out of" in str(error) and BACKEND in str(error)


def test_a_failure_while_operators_are_taken_apart_is_told_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object, **kwargs: object) -> None:
        raise AssertionError("inside of torch")

    monkeypatch.setattr(torch.export.ExportedProgram, "run_decompositions", fails)
    model, inputs = of(lambda self, x: torch.special.bessel_j0(x).logsumexp(0))
    with pytest.raises(NotTracedError, match="AssertionError: inside of torch") as error:
        weft.compile(model, inputs, options=NOW)
    assert isinstance(error.value.__cause__, AssertionError)


def test_the_cause_is_what_torch_raised() -> None:
    model, inputs = of(raises)
    with pytest.raises(ModelRaisesError) as error:
        weft.compile(model, inputs, options=NOW)
    assert isinstance(error.value.__cause__, ValueError)


def test_a_failed_export_changes_no_input_and_no_random_state() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        x.add_(torch.rand(2, 4))
        raise ValueError

    model, inputs = of(forward)
    before, state = inputs[0].clone(), torch.get_rng_state()
    with pytest.raises(ModelRaisesError):
        weft.compile(model, inputs, options=NOW)
    assert torch.equal(inputs[0], before) and torch.equal(torch.get_rng_state(), state)


def test_the_place_is_the_innermost_line_outside_of_torch() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.ReLU())
    with pytest.raises(RuntimeError) as error:
        model(torch.ones(2, 5))
    assert place(error.value, model, "Net").startswith(f"Net.0.0 ({HERE}")
