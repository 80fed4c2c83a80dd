"""Compiled models are called as their modules are, and give what these give; what does not fit is an error of Weft."""

from __future__ import annotations

import collections
import copy
import dataclasses
import warnings
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils import _pytree

import weft
from weft.errors import ArtifactError, InputError, NotTracedError, OptionError

NOW = weft.Options(budget_s=0.0, in_parts=False)
X, Y = torch.arange(8.0).reshape(2, 4), torch.full((2, 4), 3.0)


@dataclasses.dataclass
class Scaled:
    value: torch.Tensor
    scale: float = 2.0
    more: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)


class Point(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


class Thing:
    """Of no kind that the framework knows."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x, self.parts = x, [x + 1, {"more": (x * 2,)}]


def of(forward: Callable[..., Any]) -> nn.Module:
    made: nn.Module = type("Net", (nn.Module,), {"forward": forward})()
    return made.eval()


def compiled(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> weft.Compiled:
    return weft.compile(of(forward), args, example_kwargs=kwargs, options=NOW)


def same(mine: object, want: object) -> None:
    """Equal in every type, key and value."""
    assert type(mine) is type(want)
    if isinstance(want, torch.Tensor):
        torch.testing.assert_close(mine, want)
    elif isinstance(want, dict):
        assert isinstance(mine, dict) and list(mine) == list(want)
        for key in want:
            same(mine[key], want[key])
    elif isinstance(want, list | tuple):
        assert isinstance(mine, list | tuple) and len(mine) == len(want)
        for a, b in zip(mine, want, strict=True):
            same(a, b)
    elif dataclasses.is_dataclass(want) or isinstance(want, Thing):
        same(vars(mine), vars(want))
    else:
        assert mine == want


RESULTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "tensor": lambda x: x + 1,
    "tuple of one": lambda x: (x + 1,),
    "list": lambda x: [x + 1, x - 1],
    "dictionary": lambda x: {"b": x + 1, "a": [x, None, "text", 3]},
    "named tuple": lambda x: Point(x + 1, x - 1),
    "ordered dictionary": lambda x: collections.OrderedDict(z=x * 2, a=x),
    "dataclass": lambda x: Scaled(x * 2, 2.5, {"k": x + 1}),
    "object": lambda x: Thing(x + 1),
    "nothing beside": lambda x: (None, x + 1, (), {}),
    "size": lambda x: (x + 1, x.shape),
    "what topk gives": lambda x: torch.topk(x, 2),
    "nested": lambda x: ({"a": Scaled(x + 1)}, [Point(x, (x + 2, [x]))]),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", RESULTS)
def test_results_are_the_modules_own(name: str) -> None:
    function = RESULTS[name]
    same(compiled(lambda self, x: function(x), X)(Y), function(Y))


def test_results_of_further_shapes_and_of_calls_do_not_share() -> None:
    exe = compiled(lambda self, x: {"a": x + 1}, X)
    first, other = exe(X), exe(torch.ones(3, 5))
    assert other["a"].shape == (3, 5)
    exe(Y)
    torch.testing.assert_close(first["a"], X + 1)


def test_a_distribution_is_given_back() -> None:
    found = compiled(lambda self, x: torch.distributions.Normal(x, x.exp(), validate_args=False), X)(Y)
    assert isinstance(found, torch.distributions.Normal)
    torch.testing.assert_close(found.scale, Y.exp())


def test_arguments_by_name() -> None:
    def forward(self: Any, x: torch.Tensor, y: torch.Tensor | None = None, *, scale: torch.Tensor) -> torch.Tensor:
        return (x if y is None else x - y) * scale

    exe = weft.compile(of(forward), X, example_kwargs={"scale": Y}, options=NOW)
    torch.testing.assert_close(exe(X, scale=X), X * X)
    torch.testing.assert_close(exe(scale=Y, x=X), X * Y)
    torch.testing.assert_close(exe(X, None, scale=Y), X * Y)
    torch.testing.assert_close(exe(X, X + 1, scale=Y), -Y)  # another plan: an argument more
    torch.testing.assert_close(exe(y=X + 1, x=X, scale=Y), -Y)
    all_named = weft.compile(of(forward), {"scale": Y, "x": X}, options=NOW)
    torch.testing.assert_close(all_named(X, scale=Y), X * Y)
    assert exe.graph.input_names == ("x", "scale")


def test_tensors_by_name_in_any_order_as_often_as_one_likes() -> None:
    """Names that were met before are not bound again: numbers among them, other shapes, and one tensor twice are."""

    def forward(self: Any, x: torch.Tensor, y: torch.Tensor, *, z: Any = 1.0) -> torch.Tensor:
        return x - 2 * y + z

    net = of(forward)
    made = compiled(forward, X, y=Y)
    z = torch.rand(2, 4)
    for _ in range(3):
        assert torch.equal(made(y=Y, x=X), net(X, Y)) and torch.equal(made(x=Y, y=X), net(Y, X))
        assert torch.equal(made(X, z=z, y=Y), net(X, Y, z=z)) and torch.equal(made(X, y=Y, z=z), net(X, Y, z=z))
        assert torch.equal(made(x=X, y=X), net(X, X)) and torch.equal(made(X, y=Y, z=3.0), net(X, Y, z=3.0))
        assert torch.equal(made(y=Y[:1], x=X[:1]), net(X[:1], Y[:1]))
        with pytest.raises(InputError):
            made(x=X, w=Y)
        with pytest.raises(InputError):
            made(x=X, y=Thing(Y))
    assert len(made._forms) == 4, "x and y, z in two places of two"


def test_containers_none_numbers_and_texts() -> None:
    def forward(self: Any, pair: Any, named: Any, mode: str = "add", power: int = 1, mask: Any = None) -> Any:
        x = pair[0] + pair[1] if mode == "add" else pair[0] - pair[1]
        x = x**power + named["deep"]["er"]
        return x if mask is None else x * mask

    exe = compiled(forward, [X, Y], {"deep": {"er": X}})
    named = {"deep": {"er": Y}}
    torch.testing.assert_close(exe([X, Y], named), X + Y + Y)
    torch.testing.assert_close(exe([X, Y], named, "sub"), X - Y + Y)
    torch.testing.assert_close(exe([X, Y], named, "sub", 2), (X - Y) ** 2 + Y)
    torch.testing.assert_close(exe([X, Y], named, mask=Y), (X + Y + Y) * Y)
    torch.testing.assert_close(exe([X, Y], named), X + Y + Y)
    assert exe.graph.input_names == ("pair_0", "pair_1", "named_deep_er")


def test_a_dataclass_as_argument() -> None:
    exe = compiled(lambda self, s: Scaled(s.value * s.scale, s.scale), Scaled(X))
    same(exe(Scaled(Y)), Scaled(Y * 2))
    same(exe(Scaled(Y, 3.0)), Scaled(Y * 3, 3.0))


def test_refit_of_plans_with_several_forms_of_calls() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 64)

        def forward(self, x: torch.Tensor, *, double: bool = False) -> dict[str, torch.Tensor]:
            return {"y": self.linear(x) * (2 if double else 1)}

    model, other = Net().eval(), Net().eval()
    x = torch.randn(32, 64)
    exe = weft.compile(model, x, options=NOW)
    assert exe(x, double=True)["y"].shape == (32, 64)
    exe.refit(other.state_dict())
    for double in (False, True):
        torch.testing.assert_close(exe(x, double=double)["y"], other(x, double=double)["y"])


def test_a_model_of_transformers_gives_its_own_output() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=1, n_head=2, n_embd=16, vocab_size=32, n_positions=16, bos_token_id=0, eos_token_id=0
    )
    model = transformers.GPT2Model(config).eval()
    ids = torch.arange(4)[None]
    exe = weft.compile(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, options=NOW)
    mine, want = exe(input_ids=ids, attention_mask=torch.ones_like(ids)), model(ids)
    assert type(mine) is type(want) and type(mine.past_key_values) is type(want.past_key_values)
    torch.testing.assert_close(mine.last_hidden_state, want.last_hidden_state, atol=1e-4, rtol=1e-4)
    layer = mine.past_key_values.layers[0]
    torch.testing.assert_close(layer.keys, want.past_key_values.layers[0].keys, atol=1e-4, rtol=1e-4)


def test_an_exported_program_keeps_its_structures() -> None:
    module = of(lambda self, pair, *, z: {"sum": pair[0] + pair[1], "more": [z * 2, None]})
    program = torch.export.export(module, ([X, Y],), {"z": X})
    exe = weft.compile(program, options=NOW)
    same(exe([Y, Y], z=Y), {"sum": Y + Y, "more": [Y * 2, None]})
    with pytest.raises(InputError, match="another structure"):
        exe(X, Y, Y)
    with pytest.raises(InputError, match="expected"):
        exe([X[:1], Y], z=X)


def test_the_frameworks_own_execution_gives_the_same() -> None:
    """With a budget that ends before anything is known, the module itself answers."""
    module = of(lambda self, x, *, y: {"a": x + y})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exe = weft.compile(module, X, example_kwargs={"y": Y}, options=weft.Options(budget_s=1e-6))
    same(exe(X, y=X), {"a": X + X})


def linear(self: Any, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
    return x @ torch.ones(4, 4) if y is None else x @ y


BAD_CALLS: dict[str, tuple[Callable[[weft.Compiled], Any], str]] = {
    "text": (lambda exe: exe("text"), "cannot be compiled|no tensor"),
    "array": (lambda exe: exe(X.numpy()), "0 is a ndarray"),
    "nothing": (lambda exe: exe(), "missing a required argument: 'x'"),
    "too many": (lambda exe: exe(X, X, X), "too many positional"),
    "unknown name": (lambda exe: exe(X, z=X), "unexpected keyword argument 'z'"),
    "twice": (lambda exe: exe(X, x=X), "multiple values"),
    "other type": (lambda exe: exe(X.double()), r"torch.float64 of \(2, 4\), as it was for"),
    "other shape": (lambda exe: exe(torch.ones(2, 5)), r"torch.float32 of \(2, 5\), as it was for"),
    "meta": (lambda exe: exe(X.to("meta")), "meta"),
    "sparse": (lambda exe: exe(X.to_sparse()), "sparse_coo"),
    "nested": (lambda exe: exe(torch.nested.nested_tensor([X, X], layout=torch.jagged)), "nested"),
}


@pytest.mark.parametrize("name", BAD_CALLS)
@pytest.mark.parametrize("budget_s", [0.0, 1e-6], ids=["plan", "framework"])
def test_a_call_that_does_not_fit_is_an_error_of_weft(name: str, budget_s: float) -> None:
    call, text = BAD_CALLS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exe = weft.compile(of(linear), X, options=weft.Options(budget_s=budget_s))
        if budget_s and name in ("text", "other type", "other shape"):
            return  # the module itself is asked, which raises what it raises
        with pytest.raises(InputError, match=text) as error:
            call(exe)
    assert error.value.code == "W011"


EXAMPLES: dict[str, tuple[Any, Any, str]] = {
    "array": ((X.numpy(),), None, "0 is a ndarray"),
    "number": (3, None, "a int is no tensor"),
    "text": ("text", None, "a str is no tensor"),
    "names that it lacks": ({"a": X}, None, "one argument stands in a tuple"),
    "twice by name": ({"x": X}, {"y": X}, "all arguments by name"),
    "names in a list": ((X,), [X], "no mapping"),
    "meta deep inside": (([X.to("meta")],), None, "item 0_0 is on the device 'meta'"),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_that_do_not_fit(name: str) -> None:
    given, named, text = EXAMPLES[name]
    with pytest.raises(OptionError, match=text) as error:
        weft.compile(of(linear), given, example_kwargs=named, options=NOW)
    assert error.value.code == "W001"


def test_a_number_that_depends_on_values_is_no_result() -> None:
    with pytest.raises(NotTracedError, match="returns a Python number"):
        compiled(lambda self, x: (x, x.sum().item()), X)


def test_attributes_that_a_forward_changes_are_told() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        return x * self.calls

    with pytest.warns(UserWarning, match="changes the module's attribute 'calls'"):
        compiled(forward, X)


def test_a_buffer_that_is_replaced_is_refused() -> None:
    """torch notices that in the outermost module only, and left it out elsewhere."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.n: torch.Tensor
            self.register_buffer("n", torch.zeros(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.n = self.n + 1
            return x + self.n

    for model in (Net(), nn.Sequential(Net())):
        with pytest.raises(NotTracedError, match=r"place of its buffer '(0\.)?n'"):
            weft.compile(model.eval(), X, options=NOW)


def test_compiling_leaves_the_module_in_its_mode() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout()).eval()
    weft.compile(model, X, options=NOW)
    assert not any(m.training for m in model.modules())


def test_copies_and_pickles_point_to_save_and_load(tmp_path: Path) -> None:
    exe = compiled(lambda self, x: x + 1, X)
    exe.save(tmp_path / "m.weft")
    for one in (exe, weft.load(tmp_path / "m.weft", options=NOW)):
        for take in (copy.copy, copy.deepcopy, ForkingPickler.dumps):
            with pytest.raises(ArtifactError, match=r"neither copied nor pickled.*\n.*save.*load"):
                take(one)
    for odd in ("text", X.to_sparse(), X.double(), X[:1]):
        with pytest.raises(InputError, match=r"no tensor|no dense tensor|expected"):
            weft.load(tmp_path / "m.weft", options=NOW)(odd)


def test_pytrees_of_the_users_own() -> None:
    class Pair:
        def __init__(self, a: Any, b: Any) -> None:
            self.a, self.b = a, b

    _pytree.register_pytree_node(Pair, lambda p: ([p.a, p.b], None), lambda c, _: Pair(*c))
    exe = compiled(lambda self, p: Pair(p.a + p.b, p.a - p.b), Pair(X, Y))
    found = exe(Pair(Y, X))
    torch.testing.assert_close(found.b, Y - X)
